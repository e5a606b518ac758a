"""The memory that holds the baselines of slices: the process's own, page-locked, or files (``publish.slice_files``).

Whoever takes bits from a memory gets a room with them, and says from time to time which rooms are still in use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dcr_store.errors import InvalidInputError, StorageError
from dcr_store.layout.dtypes import Bits
from dcr_store.versions.catalog import Located

PINNED: Final = "pinned"
"""What asks for page-locked memory where else a directory is named."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What bits of a slice are said to be: those of a version.

    Attributes
    ----------
    version, txid, root : int, str, str
        Which one, of the line.
    digests : ndarray of uint64, shape (n_pieces,)
        CRC-64/NVME of each piece's packed bytes in it.
    """

    version: int
    txid: str
    root: str
    digests: NDArray[np.uint64]

    @classmethod
    def of(cls, located: Located, digests: NDArray[np.uint64]) -> Claim:
        """Return the claim that bits are those of a committed version."""
        return cls(located.row.version, located.row.txid, located.row.root, digests)


@dataclass(frozen=True, slots=True)
class Earlier:
    """Bits of a slice from before, of which each piece has to be proven to be of one of some versions, or read anew.

    Attributes
    ----------
    bits : ndarray of uintN, shape (n_elements,)
    room : object
        As the memory gave it.
    claims : tuple of Claim
        What they may be, the likeliest first.
    """

    bits: Bits
    room: object
    claims: tuple[Claim, ...]


class Memory(Protocol):
    """Where bits of slices are kept.

    Attributes
    ----------
    place : Path, str or None
        What was asked for: a directory, ``PINNED``, or None for the process's own memory.
    layout : str or None
        SHA-256 of the layout of what was found there.
    """

    place: Path | str | None
    layout: str | None

    @property
    def is_open(self) -> bool:
        """Whether this process may use it: it is not closed, nor that of a process that forked this one."""

    def found(self) -> dict[str, Earlier]:
        """Return what was found there, by the slices' keys; once."""

    def take(self, n_elements: int, dtype: np.dtype[Any]) -> tuple[Bits, object]:
        """Return new bits of any content, shape (n_elements,), and their room; ``StorageError`` if there are none."""

    def expect(self, nbytes: int) -> None:
        """Hear how many bytes are going to be taken, one slice after the other."""

    def keep(self, rooms: Iterable[object]) -> None:
        """Take back all rooms but these; nobody uses the bits any more."""

    def note(self, at: Located, layout: str, slices: Mapping[str, tuple[object, NDArray[np.uint64]]]) -> None:
        """Note what the bits are going to be, before they are changed; for a process that comes after this one.

        Parameters
        ----------
        slices : mapping of str to (room, ndarray of uint64)
            The room of each slice, and the digests of its pieces.
        """

    def close(self) -> None:
        """Let go of it; who shares nothing with other processes has nothing to do."""


class OwnMemory:
    """Memory of this process, which ends with it."""

    def __init__(self) -> None:
        self.place: Path | str | None = None
        self.layout: str | None = None

    @property
    def is_open(self) -> bool:
        """Always: a forked process has a copy of its own."""
        return True

    def found(self) -> dict[str, Earlier]:
        """Return nothing: nothing was there."""
        return {}

    def take(self, n_elements: int, dtype: np.dtype[Any]) -> tuple[Bits, object]:
        """Allocate."""
        return np.empty(n_elements, dtype), None

    def expect(self, nbytes: int) -> None:
        """Do nothing."""

    def keep(self, rooms: Iterable[object]) -> None:
        """Do nothing: what nobody refers to is freed."""

    def note(self, at: Located, layout: str, slices: Mapping[str, tuple[object, NDArray[np.uint64]]]) -> None:
        """Do nothing: nobody could read it."""

    def close(self) -> None:
        """Do nothing."""


class PinnedMemory(OwnMemory):
    """Page-locked memory, which is never swapped out: that of torch, which needs CUDA for it.

    Raises
    ------
    InvalidInputError
        If torch is missing, or has no CUDA here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = PINNED
        self._torch = require_pinned()

    def take(self, n_elements: int, dtype: np.dtype[Any]) -> tuple[Bits, object]:
        """Allocate; ``StorageError`` if the system does not lock so much memory."""
        nbytes = n_elements * dtype.itemsize
        try:
            tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise StorageError(
                f"{nbytes} bytes cannot be page-locked: {error}; leave `baseline` out, or name a directory",
                key="baseline",
            ) from error
        return tensor.numpy().view(dtype), None


def require_pinned() -> Any:
    """Return torch, if it can lock pages here; ``InvalidInputError`` if it is missing, or has no CUDA here."""
    try:
        import torch
    except ImportError as error:
        raise InvalidInputError("pinned memory needs torch; pip install dcr-store[torch]", key="baseline") from error
    if not torch.cuda.is_available():
        raise InvalidInputError(
            "pinned memory needs CUDA, which torch does not find here; leave `baseline` out, or name a directory",
            key="baseline",
            expected="a CUDA device",
            found="none",
        )
    return torch
