"""Bit-exact, delta-compressed, transactional history of RL policy weights on an object store.

``create`` and ``open`` return a ``Store``; everything else hangs off it. Importing this package imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcr_store.layout.affine_map import AffineMap as AffineMap
    from dcr_store.publish.discovering import discover as discover
    from dcr_store.store import Store, create, open
    from dcr_store.targets.native.target import NativeLoaderTarget as NativeLoaderTarget

__version__ = "0.1.0"
__all__ = ["Store", "__version__", "create", "open"]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> object:
    if name in ("Store", "create", "open"):
        from dcr_store import store

        return getattr(store, name)
    if name == "AffineMap":
        from dcr_store.layout.affine_map import AffineMap

        return AffineMap
    if name == "discover":
        from dcr_store.publish.discovering import discover

        return discover
    if name == "NativeLoaderTarget":
        from dcr_store.targets.native.target import NativeLoaderTarget

        return NativeLoaderTarget
    raise AttributeError(f"module 'dcr_store' has no attribute '{name}'")
