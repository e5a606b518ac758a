"""Which engine runs the inner loops: NumPy, or numba if it is worth its start.

Both make the same bytes. numba (the extra ``fast``) takes half a second to import and some seconds to compile for the
first time on a machine, and saves about a fifth of a second per GiB. So NumPy runs until this process has encoded,
decoded or compared 1 GiB of chunks, and numba from then on, if it is installed. With the environment variable
``DCR_STORE_KERNELS`` set to ``numpy`` or ``numba`` that engine runs from the start; other values are refused.
"""

from __future__ import annotations

import os
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np

from dcr_store.errors import InvalidInputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    U8 = NDArray[np.uint8]
    U32 = NDArray[np.uint32]
    Bits = NDArray[np.unsignedinteger[Any]]

ENVIRONMENT_VARIABLE: Final = "DCR_STORE_KERNELS"
ENGINES: Final = ("auto", "numpy", "numba")
NUMBA_FROM_NBYTES: Final = 1 << 30


class Engine(Protocol):
    """The functions that ``kernels_numpy`` documents."""

    def find_changes(self, base: Bits, new: Bits) -> tuple[U32, Bits]: ...  # noqa: D102
    def find_nonzero(self, mask: Bits) -> tuple[U32, Bits]: ...  # noqa: D102
    def find_gaps(self, positions: U32, typical: int, max_k: int) -> tuple[U32, int, int]: ...  # noqa: D102
    def split_gaps(self, gaps: U32, k: int) -> tuple[U8, U8]: ...  # noqa: D102
    def join_gaps(self, high: U8, low: U8, n: int, k: int) -> tuple[U32, int]: ...  # noqa: D102
    def pack_flags(self, positions: U32, n_elements: int) -> U8: ...  # noqa: D102
    def find_flags(self, bitmap: U8, n_elements: int) -> U32: ...  # noqa: D102
    def spread(self, bitmap: U8, values: Bits, out: Bits) -> None: ...  # noqa: D102
    def pack_values(self, values: Bits) -> tuple[U8, Bits]: ...  # noqa: D102
    def count_escapes(self, codes: U8, n: int) -> int: ...  # noqa: D102
    def unpack_values(self, codes: U8, escaped: Bits, n: int) -> Bits: ...  # noqa: D102
    def split_plane(self, values: Bits, rotation: int, j: int) -> U8: ...  # noqa: D102
    def join_plane(self, plane: U8, rotation: int, j: int, out: Bits) -> None: ...  # noqa: D102
    def digest_sparse(self, positions: U32, values: Bits, n_elements: int) -> int: ...  # noqa: D102
    def xor_at(self, bits: Bits, positions: U32, values: Bits) -> None: ...  # noqa: D102


_choosing: Final = threading.Lock()
_engine: Engine | None = None  # None: not decided yet
_until_then: Engine | None = None  # None: the environment has not been looked at yet
_seen_nbytes = 0


def engine(nbytes: int = 0) -> Engine:
    """Return the engine to use now.

    Parameters
    ----------
    nbytes : int
        Length of the chunk about to be worked on, to be counted once per chunk.
    """
    global _seen_nbytes
    if _engine is not None:
        return _engine
    _seen_nbytes += nbytes  # an update that another thread overwrites only puts off the change
    until_then = _until_then
    if until_then is None or _seen_nbytes >= NUMBA_FROM_NBYTES:
        return _decided()
    return until_then


def _decided() -> Engine:
    """Return the engine that the environment asks for, or by the rule; what is so until then is remembered."""
    global _until_then
    wanted = os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    if wanted != "auto":
        use_engine(wanted)
    elif _seen_nbytes >= NUMBA_FROM_NBYTES:
        try:
            use_engine("numba")
        except (ImportError, InvalidInputError):  # not installed, or not for this version of NumPy
            use_engine("numpy")
    if _engine is not None:
        return _engine
    _until_then = numpy = _load("numpy")
    return numpy


def use_engine(name: str) -> None:
    """Choose the engine of this process.

    Parameters
    ----------
    name : str
        ``numpy`` or ``numba``; ``auto`` goes back to the rule that this module states, counting from zero.

    Raises
    ------
    InvalidInputError
        There is no such engine, or numba is not installed.
    """
    global _engine, _until_then, _seen_nbytes
    if name not in ENGINES:
        raise InvalidInputError("unknown engine of the chunk coding", expected=" or ".join(ENGINES), found=repr(name))
    with _choosing:
        _seen_nbytes, _until_then = 0, None
        _engine = None if name == "auto" else _load(name)


def _load(name: str) -> Engine:
    try:
        return cast("Engine", import_module(f"dcr_store.codec.kernels_{name}"))
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        raise InvalidInputError("numba is not installed; pip install dcr-store[fast]", expected="numba") from error
