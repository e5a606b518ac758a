"""Which engine runs the inner loops."""

from __future__ import annotations

from types import ModuleType

from dcr_store.codec import kernels_numpy


def engine() -> ModuleType:
    """Return the module whose functions run the inner loops."""
    return kernels_numpy
