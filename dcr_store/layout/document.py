"""The layout document (docs/spec/v1.md §5), written and read.

Reading refuses every document in which tensors overlap, leave their space, are not aligned, leave gaps other than
alignment, share a name, or whose numbers are no sizes: ``FormatError`` that names the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from dcr_store.errors import FormatError, InvalidInputError
from dcr_store.format import canonical
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import (
    ALIGNMENT_NBYTES,
    DTYPES,
    MAX_ELEMENTS,
    aligned,
    dtype,
    n_elements,
    shown,
    width,
)
from dcr_store.layout.entry import TensorEntry, name_problem

FORMAT: Final = "dcr-layout"


def encode(tensors: tuple[TensorEntry, ...], spaces: Mapping[str, int]) -> bytes:
    """Return the document as canonical JSON."""
    rows = [
        {
            "aliases": list(entry.aliases),
            "dtype": entry.dtype,
            "name": entry.name,
            "shape": list(entry.shape),
            "space": entry.space,
            "start": entry.start,
        }
        for entry in tensors
    ]
    return canonical.encode({"format": FORMAT, "spaces": dict(spaces), "tensors": rows})


def decode(data: bytes, key: str) -> tuple[tuple[TensorEntry, ...], dict[str, int]]:
    """Read and validate a document; return its tensors and the lengths of its spaces.

    Raises
    ------
    FormatError
        If it is no layout; names the tensor and what was expected.
    """
    document = canonical.decode_object(data, key, FORMAT)
    spaces = _read_spaces(document.get("spaces"), key)
    tensors = _read_tensors(document.get("tensors"), spaces, key)
    _check_addresses(tensors, spaces, key)
    _check_unique(tensors, key)
    return tensors, spaces


def _read_tensors(rows: object, spaces: dict[str, int], key: str) -> tuple[TensorEntry, ...]:
    if not isinstance(rows, list):
        raise FormatError("field 'tensors' is wrong", key=key, expected="a list", found=type(rows).__name__)
    return tuple(_read_tensor(row, spaces, key, index) for index, row in enumerate(rows))


def _read_tensor(row: Any, spaces: dict[str, int], key: str, index: int) -> TensorEntry:
    if not isinstance(row, dict):
        raise FormatError(f"tensor {index} is no object", key=key, expected="an object", found=type(row).__name__)
    name = row.get("name")
    problem = name_problem(name)
    if problem is not None or not isinstance(name, str):
        raise FormatError(f"tensor {index}: {shown(name)} cannot name a tensor: {problem}", key=key)
    kind = DTYPES.get(row["dtype"]) if isinstance(row.get("dtype"), str) else None
    if kind is None:
        kind = dtype(row.get("dtype"), key=_place(key, name), error=FormatError)
    shape, start, aliases = row.get("shape"), row.get("start"), row.get("aliases")
    if not isinstance(shape, list):
        raise _wrong(key, name, "shape is wrong", "a list", shape)
    try:
        size = n_elements(kind, shape)
    except InvalidInputError as error:
        raise _wrong(key, name, "shape is wrong", error.expected, error.found) from error
    if row.get("space") != kind.space:
        raise _wrong(key, name, f"the space is not that of dtype {kind.name}", kind.space, row.get("space"))
    if type(start) is not int or not 0 <= start <= MAX_ELEMENTS:
        raise _wrong(key, name, "start is no address", "an integer from 0 to 2^52", start)
    if start + size > spaces[kind.space]:
        raise _wrong(
            key, name, f"leaves space {kind.space}", f"an end of at most {spaces[kind.space]}", f"{start} + {size}"
        )
    if not isinstance(aliases, list):
        raise _wrong(key, name, "aliases are wrong", "a list", aliases)
    for alias in aliases:
        problem = name_problem(alias)
        if problem is not None:
            raise FormatError(f"alias {shown(alias)} cannot name a tensor: {problem}", key=_place(key, name))
    return TensorEntry(name, kind.name, tuple(shape), kind.space, start, size, tuple(aliases))


def _place(key: str, name: str) -> str:
    return f"{key}#{shown(name)}"


def _wrong(key: str, name: str, message: str, expected: object, found: object) -> FormatError:
    return FormatError(message, key=_place(key, name), expected=expected, found=shown(found))


def _read_spaces(document: object, key: str) -> dict[str, int]:
    if not isinstance(document, dict) or set(document) != set(SPACES):
        raise FormatError(
            "field 'spaces' is wrong", key=key, expected=f"the lengths of {', '.join(SPACES)}", found=shown(document)
        )
    for space, length in document.items():
        if type(length) is not int or not 0 <= length <= MAX_ELEMENTS or length != aligned(length, space):
            raise FormatError(
                f"the length of space {space} is wrong",
                key=key,
                expected=f"a multiple of {ALIGNMENT_NBYTES // width(space)} from 0 to 2^52",
                found=shown(length),
            )
    return {space: document[space] for space in SPACES}


def _check_addresses(tensors: tuple[TensorEntry, ...], spaces: dict[str, int], key: str) -> None:
    """Refuse tensors that are not where the rule of §5 puts them, naming the first one that is not."""
    for space in SPACES:
        mine = [entry for entry in tensors if entry.space == space]
        step = ALIGNMENT_NBYTES // width(space)
        starts = np.fromiter((entry.start for entry in mine), np.int64, len(mine))
        stops = starts + np.fromiter((entry.n_elements for entry in mine), np.int64, len(mine))
        ends = -(-stops // step) * step  # no end is past its space, so below 2^63
        expected = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if mine else starts
        wrong = np.flatnonzero(starts != expected)
        if wrong.size:
            raise _misplaced(mine, int(wrong[0]), int(expected[wrong[0]]), step, key)
        length = int(ends[-1]) if mine else 0
        if length != spaces[space]:
            last = f"tensor {shown(mine[-1].name)} ends" if mine else "it has no tensor and ends"
            raise FormatError(
                f"the length of space {space} is wrong: {last} at {length}, rounded up to 64 bytes",
                key=key,
                expected=length,
                found=spaces[space],
            )


def _misplaced(mine: list[TensorEntry], index: int, expected: int, step: int, key: str) -> FormatError:
    entry = mine[index]
    if entry.start % step:
        what = "is not aligned to 64 bytes"
    elif entry.start > expected:
        what = "leaves addresses unused before it"
    else:
        what = f"overlaps tensor {shown(mine[index - 1].name)}" if index else "has a negative start"
    return FormatError(
        f"the start of the tensor {what}", key=_place(key, entry.name), expected=expected, found=entry.start
    )


def _check_unique(tensors: tuple[TensorEntry, ...], key: str) -> None:
    seen: set[str] = set()
    for entry in tensors:
        for name in (entry.name, *entry.aliases):
            if name in seen:
                raise FormatError(
                    "is a name of two tensors", key=_place(key, name), expected="unique names", found="a second one"
                )
            seen.add(name)
