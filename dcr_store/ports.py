"""What the upper floors ask of an object store and of a receiver's target.

The protocols carry the promises; ``objects/`` and ``targets/`` satisfy them. Imports numpy for types only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Bytes = bytes | bytearray | memoryview


class ObjectStore(Protocol):
    """Objects under string keys (``a/b/c``), read-after-write consistent. Safe to call from any thread.

    Every method retries what is worth retrying, with back-off, and raises ``StorageError`` with the key when
    that does not help. Keys are checked: one with ``..``, an empty component, a leading ``/``, a backslash or NUL is
    refused with ``InvalidInputError`` before any I/O.
    """

    @property
    def url(self) -> str:
        """Where the store is, for people."""

    @property
    def is_local(self) -> bool:
        """Whether reading an object back costs no network."""

    def get(self, key: str, start: int = 0, stop: int | None = None, *, sha256: str | None = None) -> bytes:
        """Return the bytes ``[start, stop)`` of an object; ``NotFoundError`` if there is none.

        An answer shorter than the range within the object is retried, never returned. `sha256` is what the caller
        expects of the whole object: a hint by which caches on the way keep and find it, and route around a wrong copy
        (``IntegrityError`` if there is no other). The caller compares it himself all the same.
        """

    def put(self, key: str, data: Bytes) -> None:
        """Store an object, atomically and durably, over whatever is there."""

    def put_if_absent(self, key: str, data: Bytes) -> bool:
        """Create an object, atomically and durably, unless the key is taken.

        Returns
        -------
        bool
            True if the key now holds exactly `data`, put there by this call (also when its answer was lost);
            False if it holds something else.

        Raises
        ------
        OutcomeUnknownError
            No answer, and the read-back kept failing until the deadline.
        """

    def list(self, prefix: str) -> dict[str, int]:
        """Return key → nbytes of every object whose key starts with `prefix` (which ends in ``/``, or is empty)."""

    def list_names(self, prefix: str) -> Sequence[str]:
        """Return the sorted next path components below `prefix` (which ends in ``/``)."""

    def size(self, key: str) -> int | None:
        """Return an object's nbytes, or None if there is none."""

    def delete(self, key: str) -> None:
        """Delete an object; one that does not exist is no error."""


@runtime_checkable
class Dated(Protocol):
    """An object store that tells when it stored an object, by a clock of its own."""

    def dated(self, prefix: str) -> dict[str, tuple[int, float]]:
        """Return key → (nbytes, seconds since 1970) of every object whose key starts with `prefix`."""


@runtime_checkable
class Doubtable(Protocol):
    """An object store whose answers may come out of caches on the way."""

    def doubt(self, for_s: float) -> None:
        """Ask past the caches for so many seconds, for everything whose SHA-256 is not known."""


class Source(Protocol):
    """The bits of one state, by chunks of the canonical spaces.

    Safe to call from several threads. ``space`` is ``u8``, ``u16``, ``u32`` or ``u64``.
    """

    def read_chunk(self, space: str, chunk: int, out: NDArray[np.unsignedinteger]) -> None:
        """Copy a chunk's current bits into `out`, uintN of shape (chunk_elements,); zeros where no tensor is."""


class CopiedSource(Source, Protocol):
    """A source in which a tensor may lie several times, under tied names."""

    def copies_of_chunk(
        self, space: str, chunk: int, out: NDArray[np.unsignedinteger]
    ) -> Iterator[NDArray[np.unsignedinteger]]:
        """Yield `out` with a chunk's bits, then arrays of its kind with those of the further copies of its tensors."""


class Target(Source, Protocol):
    """The bits of one state that a receiver brings up to date.

    Safe to call from several threads on different chunks.
    """

    def write_chunk(self, space: str, chunk: int, bits: NDArray[np.unsignedinteger]) -> None:
        """Overwrite a chunk with `bits`, uintN of shape (chunk_elements,); elements of no tensor are dropped."""


@runtime_checkable
class ScatterTarget(Target, Protocol):
    """A target of which a few elements can be changed for less than a chunk is written whole: live memory."""

    @property
    def is_far(self) -> bool:
        """Whether that is worth comparing whole chunks to find the changes, as for memory of a device."""

    def xor_chunk(
        self, space: str, chunk: int, positions: NDArray[np.uint32], masks: NDArray[np.unsignedinteger]
    ) -> None:
        """XOR `masks`, uintN of shape (n,), into the elements at `positions` of a chunk, ascending and distinct.

        Called where the chunk's bits were read and proven just before. Elements of no tensor are passed over.
        """
