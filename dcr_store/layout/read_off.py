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
    kinds = np.zeros(len(here), np.int64)
    while True:
        n_before = len(here)
        here, there, kinds = _level(here, there, kinds, shapes)
        if len(here) == n_before:
            break
    if len(here) > MAX_BOXES:
        return None
    items = zip(here.tolist(), there.tolist(), kinds.tolist(), strict=True)
    return merged(box(start, place, shapes[kind]) for start, place, kind in items)


def _level(
    here: Indices, there: Indices, kinds: Indices, shapes: list[tuple[Dim, ...]]
) -> tuple[Indices, Indices, Indices]:
    """Take neighbours of one kind at even steps together; new kinds are added to `shapes`."""
    if len(here) < 2:
        return here, there, kinds
    steps = np.stack([np.diff(here), np.diff(there)], 1)
    is_same = kinds[1:] == kinds[:-1]
    first = np.flatnonzero(
        np.concatenate([[True], (steps[1:] != steps[:-1]).any(1) | (kinds[1:-1] != kinds[:-2]) | ~is_same[1:]])
    )
    stop = np.append(first[1:], len(steps))  # of the steps that are alike; they join items first … stop, stop included
    step_here, step_there, kind = steps[first, 0], steps[first, 1], kinds[first]
    joined = {
        key: _joined(shapes[key[0]], key[1], key[2])
        for key in set(zip(kind.tolist(), step_here.tolist(), step_there.tolist(), strict=True))
    }
    keys = list(zip(kind.tolist(), step_here.tolist(), step_there.tolist(), strict=True))
    is_joint = is_same[first] & np.array([joined[key] for key in keys], bool)
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
    is_run = is_joint & (n > 1)
    table: dict[tuple[tuple[int, int, int], int], int] = {}
    for index in np.flatnonzero(is_run).tolist():
        (old, here_step, there_step), n_items = keys[index], int(n[index])
        dims = (Dim(n_items, here_step, there_step), *shapes[old])
        if (keys[index], n_items) not in table and is_box(0, 0, dims):
            table[keys[index], n_items] = len(shapes)
            shapes.append(dims)
        is_run[index] = (keys[index], n_items) in table
    taken = np.zeros(len(here) + 1, np.int64)
    np.add.at(taken, start[is_run], 1)
    np.add.at(taken, end[is_run], -1)
    is_head = np.cumsum(taken[:-1]) == 0
    is_head[start[is_run]] = True
    new_kinds = kinds.copy()
    new_kinds[start[is_run]] = [table[keys[index], int(n[index])] for index in np.flatnonzero(is_run)]
    return here[is_head], there[is_head], new_kinds[is_head]


def _joined(shape: tuple[Dim, ...], here: int, there: int) -> bool:
    return here > 0 and there > 0 and is_box(0, 0, (Dim(2, here, there), *shape))
