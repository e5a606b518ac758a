"""The layout: the table of tensors and the address of each in the canonical spaces (docs/spec/v1.md §5).

Building refuses bad names, dtypes and shapes with ``InvalidInputError``; reading a malformed document, `document` does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from heapq import nlargest
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dcr_store.errors import InvalidInputError, NotFoundError
from dcr_store.format import canonical
from dcr_store.format.documents import SPACES
from dcr_store.layout import document
from dcr_store.layout.dtypes import DTYPES, MAX_ELEMENTS, aligned, dtype, n_elements, shown
from dcr_store.layout.entry import TensorEntry, name_problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Layout", "LayoutBuilder", "Piece", "TensorEntry"]


class Piece(NamedTuple):
    """Where an address range meets a tensor.

    Attributes
    ----------
    entry : TensorEntry
        The tensor.
    tensor_start, tensor_stop : int
        The elements of the tensor in the range, counted from its own first.
    offset : int
        Where they begin, counted from the start of the range.
    """

    entry: TensorEntry
    tensor_start: int
    tensor_stop: int
    offset: int


@dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """All tensors of a state and the lengths of the spaces. Immutable; made by `LayoutBuilder` or read from JSON.

    Attributes
    ----------
    tensors : tuple of TensorEntry
        In the order of the first publish; starts ascend within each space.
    spaces : mapping of str to int
        Length of each of the four spaces, in elements; a multiple of 64 bytes.
    """

    tensors: tuple[TensorEntry, ...]
    spaces: Mapping[str, int]
    _document: bytes | None = None  # as it was read: the digest covers fields that this version does not know

    @classmethod
    def from_json_bytes(cls, data: bytes, key: str = "layout") -> Layout:
        """Read and validate a layout document.

        Parameters
        ----------
        data : bytes
            The document, as stored.
        key : str
            Where it comes from, for errors.

        Raises
        ------
        FormatError
            If it is no layout; names the tensor and what was expected.
        """
        tensors, spaces = document.decode(data, key)
        return cls(tensors, spaces, data)

    def to_json_bytes(self) -> bytes:
        """Return the document: canonical JSON, or the very bytes that were read."""
        return self._document if self._document is not None else self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        return document.encode(self.tensors, self.spaces)

    @cached_property
    def sha256(self) -> str:
        """The layout digest: SHA-256 of the document, 64 hex digits."""
        return canonical.sha256(self.to_json_bytes())

    @cached_property
    def _by_name(self) -> dict[str, TensorEntry]:
        by_name = {entry.name: entry for entry in self.tensors}
        by_name.update((alias, entry) for entry in self.tensors for alias in entry.aliases)
        return by_name

    def names(self) -> list[str]:
        """Return the names of all tensors in order, then all aliases."""
        return list(self._by_name)

    def find(self, name: str) -> TensorEntry | None:
        """Return a tensor by its name or an alias, or None."""
        return self._by_name.get(name)

    def entry(self, name: str) -> TensorEntry:
        """Return a tensor by its name or an alias; ``NotFoundError`` that says which names are close."""
        found = self.find(name)
        if found is not None:
            return found
        close = _close_names(str(name)[:200], self._by_name)
        some = ", ".join(list(self._by_name)[:3])
        n = len(self.tensors)
        hint = f"did you mean {' or '.join(close)}?" if close else f"the layout has {n} tensors, such as {some}"
        raise NotFoundError(f"there is no tensor {str(name)[:200]!r}; {hint}")

    def serves(self, other: Layout) -> bool:
        """Whether a state of the layout `other` can be written in this one.

        That is so if both have the same names, each with one dtype and shape, and names that are tied here are tied
        there. The order is of no account, and names that are tied there only are stored once for each here.
        """
        if self._by_name.keys() != other._by_name.keys():
            return False
        ties: dict[str, set[str]] = {}
        for name, entry in self._by_name.items():
            its = other._by_name[name]
            if (entry.dtype, entry.shape) != (its.dtype, its.shape):
                return False
            ties.setdefault(entry.name, set()).add(its.name)
        return all(len(names) == 1 for names in ties.values())

    def n_chunks(self, space: str, chunk_elements: int) -> int:
        """Return the number of chunks of a space, the last one perhaps partly past its end."""
        return -(-self.spaces[space] // chunk_elements)

    @cached_property
    def _placed(self) -> dict[str, tuple[list[TensorEntry], list[int]]]:
        """Per space the tensors that take addresses, and their starts, ascending: for bisection."""
        placed: dict[str, tuple[list[TensorEntry], list[int]]] = {space: ([], []) for space in SPACES}
        for entry in self.tensors:
            if entry.n_elements:
                entries, starts = placed[entry.space]
                entries.append(entry)
                starts.append(entry.start)
        return placed

    def pieces(self, space: str, start: int, stop: int) -> list[Piece]:
        """Return where the addresses ``[start, stop)`` of a space meet tensors, ascending.

        Addresses of no tensor (alignment gaps, past the end) are in no piece.
        """
        entries, starts = self._placed[space]
        pieces = []
        for index in range(max(bisect_right(starts, start) - 1, 0), len(entries)):
            entry = entries[index]
            if entry.start >= stop:
                break
            first, last = max(start, entry.start), min(stop, entry.stop)
            if first < last:
                pieces.append(Piece(entry, first - entry.start, last - entry.start, first - start))
        return pieces

    def occupied(self, space: str, chunk_elements: int) -> NDArray[np.int64]:
        """Return how many addresses of each chunk belong to a tensor: int64, shape (n_chunks,)."""
        entries, starts_list = self._placed[space]
        edges = np.arange(self.n_chunks(space, chunk_elements) + 1, dtype=np.int64) * chunk_elements
        if not entries:
            return np.zeros(edges.size - 1, np.int64)
        starts = np.array(starts_list, np.int64)
        counts = np.array([entry.n_elements for entry in entries], np.int64)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        # The number of occupied addresses below each edge: whole tensors, and the part of the one that it falls into.
        index = np.searchsorted(starts, edges, side="right") - 1
        inside = np.where(index < 0, 0, np.minimum(edges - starts[index], counts[index]))
        return np.diff(before[np.maximum(index, 0)] + inside)

    def __repr__(self) -> str:
        spaces = ", ".join(f"{space} {n}" for space, n in self.spaces.items() if n)
        return f"<Layout of {len(self.tensors)} tensors: {spaces or 'empty'}>"


class LayoutBuilder:
    """Hands out addresses, tensor by tensor: an entry's address is final as soon as `add` returns it."""

    def __init__(self) -> None:
        self._entries: dict[str, TensorEntry] = {}
        self._aliases: dict[str, list[str]] = {}
        self._owner: dict[str, str] = {}
        self._ends = dict.fromkeys(SPACES, 0)

    def add(self, name: str, dtype_name: str, shape: Sequence[int]) -> TensorEntry:
        """Add a tensor behind all others of its space.

        Raises
        ------
        InvalidInputError
            If the name is taken or no name, the dtype unknown, the shape none, or the space full (2^52 elements).
        """
        self._check_new(name)
        row = dtype(dtype_name, key=name)
        start = self._ends[row.space]
        size = n_elements(row, shape, key=name)
        if aligned(start + size, row.space) > MAX_ELEMENTS:
            raise InvalidInputError(f"no room left for {size} elements in space {row.space}", key=name)
        entry = TensorEntry(name, row.name, tuple(shape), row.space, start, size)
        self._ends[row.space] = aligned(entry.stop, row.space)
        self._entries[name] = entry
        self._owner[name] = name
        return entry

    def add_alias(self, name: str, of: str) -> None:
        """Add a further name of the tensor `of` (itself a name or an alias)."""
        self._check_new(name)
        if of not in self._owner:
            raise InvalidInputError(f"cannot be an alias of {of!r}, which is no tensor here; add that first", key=name)
        owner = self._owner[of]
        self._aliases.setdefault(owner, []).append(name)
        self._owner[name] = owner

    def build(self) -> Layout:
        """Return the layout of what was added so far."""
        tensors = tuple(
            TensorEntry(e.name, e.dtype, e.shape, e.space, e.start, e.n_elements, tuple(self._aliases.get(e.name, ())))
            for e in self._entries.values()
        )
        return Layout(tensors, dict(self._ends))

    def _check_new(self, name: object) -> None:
        problem = name_problem(name)
        if problem is not None:
            raise InvalidInputError(f"{shown(name)} cannot name a tensor: {problem}")
        if name in self._owner:
            raise InvalidInputError("is the name of two tensors; each needs its own", key=str(name))


def layout_of(tensors: Mapping[str, tuple[str, Sequence[int]]], aliases: Mapping[str, str] | None = None) -> Layout:
    """Return the layout of tensors given by dtype and shape, and of further names of them.

    Raises
    ------
    InvalidInputError
        If something else is given, or a tensor cannot be stored; names the tensor.
    """
    for key, mapping in (("tensors", tensors), ("aliases", {} if aliases is None else aliases)):
        if not isinstance(mapping, Mapping):
            found = type(mapping).__name__
            raise InvalidInputError("is no mapping by name", key=key, expected="a mapping", found=found)
    builder = LayoutBuilder()
    for name, given in tensors.items():
        if not isinstance(given, tuple | list) or len(given) != 2 or not isinstance(given[1], Sequence):
            raise InvalidInputError(
                "is to be given by its dtype and shape, not by its values",
                key=str(name),
                expected="such as ('BF16', (4096, 1024))",
                found=shown(given) if isinstance(given, tuple | list | str) else type(given).__name__,
            )
        if not isinstance(given[0], str) or given[0] not in DTYPES:
            raise InvalidInputError(
                "its dtype is to be given by a name that safetensors has",
                key=str(name),
                expected=f"one of {', '.join(DTYPES)}",
                found=shown(given[0]),
            )
        builder.add(name, given[0], tuple(given[1]))
    for alias, of in (aliases or {}).items():
        builder.add_alias(alias, of)
    return builder.build()


def _close_names(name: str, names: Iterable[str]) -> list[str]:
    """Return up to three names like `name`; among many names, only those that share most of its parts are compared."""
    parts = set(name.split("."))
    likely = nlargest(200, names, key=lambda other: len(parts.intersection(other.split("."))))
    return get_close_matches(name, likely, n=3)
