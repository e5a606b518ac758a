"""Both engines of the chunk coding."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from dcr_store.codec import kernels


@pytest.fixture(params=["numpy", "numba"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test with each engine; the rule applies again afterwards."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    kernels.use_engine(request.param)
    yield request.param
    kernels.use_engine("auto")
