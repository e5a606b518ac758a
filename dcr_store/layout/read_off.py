"""Boxes read off a list of moves: which element came from where, in few boxes. Pure; refuses what is too irregular.

The boxes hold exactly the given moves. They are not always the fewest there could be.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dcr_store.layout.boxes import Box, Dim, box, is_box, merged

MAX_BOXES: Final = 1 << 14

Indices = NDArray[np.int64]


def read_off(here: Indices, there: Indices) -> list[Box] | None:
    """Return boxes of moves.

    Parameters
    ----------
    here, there : ndarray of int64, shape (n,)
        Move i leads from ``here[i]`` to ``there[i]``; `there` ascends.

    Returns
    -------
    list of Box or None
        By rising place there; None if there would be more than ``MAX_BOXES``.
    """
    shapes: list[tuple[Dim, ...]] = [()]  # what is within each item so far
    kinds = np.zeros(len(here), np.int32)
    while True:
        n_before = len(here)
        level = _level(here, there, kinds, shapes)
        if level is None:
            return None
        here, there, kinds = level
        if len(here) == n_before:
            break
    if len(here) > MAX_BOXES:
        return None
    items = zip(here.tolist(), there.tolist(), kinds.tolist(), strict=True)
    return merged(box(start, place, shapes[kind]) for start, place, kind in items)


def _level(
    here: Indices, there: Indices, kinds: NDArray[np.int32], shapes: list[tuple[Dim, ...]]
) -> tuple[Indices, Indices, NDArray[np.int32]] | None:
    """Take neighbours of one kind at even steps together; new kinds are added to `shapes`, and change `kinds`.

    None if there will be more than ``MAX_BOXES`` boxes.
    """
    if len(here) < 2:
        return here, there, kinds
    steps_here, steps_there = np.diff(here), np.diff(there)
    is_other = kinds[1:] != kinds[:-1]
    is_first = np.ones(len(steps_here), bool)
    is_first[1:] = steps_here[1:] != steps_here[:-1]
    is_first[1:] |= steps_there[1:] != steps_there[:-1]
    is_first[1:] |= is_other[:-1]
    is_first[1:] |= is_other[1:]
    first = np.flatnonzero(is_first)
    stop = np.append(first[1:], len(steps_here))  # of steps that are alike; they join items first … stop, stop included
    step_here, step_there, kind = steps_here[first], steps_there[first], kinds[first]
    is_joint = ~is_other[first] & (step_here > 0) & (step_there > 0)  # enough for single elements
    joined: dict[tuple[int, int, int], bool] = {}
    for index in np.flatnonzero(is_joint & (kind > 0)).tolist():
        key = int(kind[index]), int(step_here[index]), int(step_there[index])
        if key not in joined:
            joined[key] = is_box(0, 0, (Dim(2, key[1], key[2]), *shapes[key[0]]))
        is_joint[index] = joined[key]
    weight = np.where(is_joint, stop - first, 0)
    # Two runs of steps share an item: the longer run has it; of equal ones that of the smaller step, then the earlier.
    wins = weight[:-1] > weight[1:]
    is_equal = weight[:-1] == weight[1:]
    wins |= is_equal & ((step_here[:-1] < step_here[1:]) | ((step_here[:-1] == step_here[1:]) & (weight[:-1] > 0)))
    start = first.copy()
    end = stop + 1  # after the last item
    start[1:] += wins
    end[:-1] -= ~wins
    n = end - start
    runs = np.flatnonzero(is_joint & (n > 1))
    made: dict[tuple[int, int, int, int], int] = {}  # -1: no box
    found: list[int] = []
    n_shapes = len(shapes)
    for run in zip(*(of[runs].tolist() for of in (kind, n, step_here, step_there)), strict=True):
        if run not in made:
            dims = (Dim(*run[1:]), *shapes[run[0]])
            made[run] = len(shapes) if is_box(0, 0, dims) else -1
            if made[run] >= 0:
                shapes.append(dims)
            if len(shapes) - n_shapes > MAX_BOXES:
                return None  # no two of these kinds will ever be one box
        found.append(made[run])
    new_kinds = np.array(found, np.int32)
    runs, new_kinds = runs[new_kinds >= 0], new_kinds[new_kinds >= 0]
    taken = np.zeros(len(here) + 1, np.int8)
    np.add.at(taken, start[runs], 1)
    np.add.at(taken, end[runs], -1)
    is_head = np.cumsum(taken[:-1], dtype=np.int8) == 0
    is_head[start[runs]] = True
    kinds[start[runs]] = new_kinds
    return here[is_head], there[is_head], kinds[is_head]
