"""The model that several writers of a simulation publish, and how it can be cut among them.

Which values a rank holds is said by NumPy alone: by numbers of values, cut as the weights are. The maps say it again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from dcr_store.layout import slices

if TYPE_CHECKING:
    from sim.library import State

    from dcr_store.layout.affine_map import AffineMap

Shapes = dict[str, tuple[str, tuple[int, ...]]]
Ids = NDArray[np.int64]

SHAPES: Final[Shapes] = {"q": ("U16", (6, 8)), "k": ("U16", (6, 8)), "w": ("U16", (4, 7)), "n": ("U8", (40,))}
LARGER: Final[Shapes] = {**SHAPES, "x": ("U16", (4,))}
N_STEPS: Final = 5
N_VARIANTS: Final = 2
KINDS: Final = ("rows", "columns", "groups", "owners", "flat")
EVERYONE: Final = "everyone"  # as rows, but each rank writes what all of them hold
DTYPES: Final = {"U16": np.dtype("<u2"), "U8": np.dtype("u1")}


def shapes_of(step: int) -> Shapes:
    """Return the tensors of a step: one of them has another layout."""
    return LARGER if step == 3 else SHAPES


def _states() -> dict[tuple[int, int], State]:
    rng = np.random.default_rng(1)
    flat = {name: rng.integers(0, 1 << 16, int(np.prod(shape))) for name, (_, shape) in LARGER.items()}
    states: dict[tuple[int, int], State] = {}
    for step in range(N_STEPS):
        for name, values in flat.items():
            flat[name] = np.where(
                rng.random(len(values)) < (0.2 if name != "n" or step != 2 else 0), values ^ 1, values
            )
        for variant in range(N_VARIANTS):
            state = {}
            for name, (dtype, shape) in shapes_of(step).items():
                values = flat[name].astype(DTYPES[dtype])
                values[variant * 3 :: 7] ^= 2 * variant
                state[name] = values.reshape(shape)
            states[step, variant] = state
    return states


def flattened(state: State) -> dict[str, NDArray[Any]]:
    """Return the values of all tensors of each dtype, one after the other."""
    return {
        dtype: np.concatenate([array.reshape(-1) for array in state.values() if array.dtype == kind])
        for dtype, kind in DTYPES.items()
    }


STATES: Final = _states()
FLAT: Final = {key: flattened(state) for key, state in STATES.items()}


def first_of(shapes: Shapes) -> dict[str, int]:
    """Return the number of the first value of each tensor among all of its dtype."""
    found, ends = {}, dict.fromkeys(DTYPES, 0)
    for name, (dtype, shape) in shapes.items():
        found[name] = ends[dtype]
        ends[dtype] += int(np.prod(shape))
    return found


def in_shapes(flat: dict[str, NDArray[Any]], shapes: Shapes) -> State:
    """Return tensors again, of what `flattened` made."""
    first = first_of(shapes)
    return {
        name: flat[dtype][first[name] : first[name] + int(np.prod(shape))].reshape(shape)
        for name, (dtype, shape) in shapes.items()
    }


@dataclass(frozen=True, eq=False)
class Part:
    """What a rank writes by one call.

    Attributes
    ----------
    ids : ndarray of int64
        The number of each value, in the shape of the slice; -1 where it is no tensor's.
    held : ndarray of int64, shape (n,)
        Those that are.
    mapped : AffineMap
        Of the slice, or of the fragment.
    fragment : tuple of (str, int), or None
        Tensor and offset, if it is written as residual.
    """

    dtype: str
    ids: Ids
    held: Ids
    mapped: AffineMap
    fragment: tuple[str, int] | None = None

    def values(self, flat: dict[str, NDArray[Any]]) -> NDArray[Any]:
        found = flat[self.dtype][self.ids]
        found[self.ids < 0] = 77
        return found


def _numbers(shapes: Shapes) -> dict[str, Ids]:
    first = first_of(shapes)
    return {name: first[name] + np.arange(int(np.prod(shape))).reshape(shape) for name, (_, shape) in shapes.items()}


def _part(dtype: str, ids: Ids, mapped: AffineMap, fragment: tuple[str, int] | None = None) -> Part:
    return Part(dtype, ids, ids[ids >= 0].reshape(-1), mapped, fragment)


def _flat(shapes: Shapes, name: str, cuts: Sequence[int], rank: int, *, is_residual: bool) -> list[Part]:
    dtype, shape = shapes[name]
    ids, start, stop = _numbers(shapes)[name].reshape(-1), cuts[rank], cuts[rank + 1]
    mapped = slices.flat_part(name, dtype, shape, start, stop)
    return [_part(dtype, ids[start:stop], mapped, (name, start) if is_residual else None)]


def _split(n: int, n_ranks: int) -> list[int]:
    each = -(-n // n_ranks)
    return [min(rank * each, n) for rank in range(n_ranks + 1)]


@functools.cache
def parts_of(step: int, kind: str, rank: int, n_ranks: int) -> tuple[Part, ...]:
    """Return what a rank writes of the model of a step, cut in a way."""
    shapes = shapes_of(step)
    numbers = _numbers(shapes)
    q, k, w = numbers["q"], numbers["k"], numbers["w"]
    found: list[Part] = []
    both = {name: shapes[name][1] for name in ("q", "k")}
    if kind in ("rows", EVERYONE):
        cuts, w_cuts = _split(6, n_ranks), _split(4, n_ranks)
        rows, w_rows = slice(*cuts[rank : rank + 2]), slice(*w_cuts[rank : rank + 2])
        found.append(_part("U16", np.concatenate([q[rows], k[rows]]), slices.fused(both, "U16", rank, n_ranks)))
        found.append(_part("U16", w[w_rows], slices.column_parallel("w", *shapes["w"], rank, n_ranks)))
        if kind == EVERYONE:
            found.append(_part("U8", numbers["n"], slices.whole("n", *shapes["n"])))
        else:
            found += _flat(shapes, "n", _split(40, n_ranks), rank, is_residual=False)
    elif kind == "columns":
        for name in ("q", "k", "w"):
            cuts = _split(shapes[name][1][1], n_ranks)
            ids, mapped = (
                numbers[name][:, slice(*cuts[rank : rank + 2])],
                slices.row_parallel(name, *shapes[name], rank, n_ranks),
            )
            found.append(_part("U16", ids.T, slices.transposed(mapped)) if name == "w" else _part("U16", ids, mapped))
        found += _flat(shapes, "n", _split(40, n_ranks), rank, is_residual=True)
    elif kind == "groups":
        turns = np.stack([q, k], 1).reshape(12, 8)
        each = 12 // n_ranks
        rows = slice(rank * each, (rank + 1) * each)
        found.append(_part("U16", turns[rows], slices.qkv(both, "U16", 6, rank, n_ranks)))
        padded = np.concatenate([w, np.full((8, 7), -1)])
        found.append(_part("U16", padded[rows], slices.padded_vocabulary("w", *shapes["w"], 12, rank, n_ranks)))
        for half in (0, 20):  # fragments that do not adjoin
            cuts = [half + cut for cut in _split(20, n_ranks)]
            found += _flat(shapes, "n", cuts, rank, is_residual=True)
    elif kind == "owners":
        for index, name in enumerate(("q", "k", "w", "n")):
            if index % n_ranks == rank:
                found.append(_part(shapes[name][0], numbers[name], slices.whole(name, *shapes[name])))
    else:
        for index, name in enumerate(("q", "k", "w", "n")):
            n = numbers[name].size
            cuts = [0, *(n * (i + 1) // n_ranks - 3 * i for i in range(n_ranks - 1)), n]
            found += _flat(shapes, name, cuts, rank, is_residual=index % 2 == 1)
    if "x" in shapes and rank == n_ranks - 1:
        found.append(_part("U16", numbers["x"], slices.whole("x", *shapes["x"])))
    return tuple(found)
