"""Placements on a mesh, on all of its coordinates; NumPy doing the splits in the order in which they were made."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_store.errors import InvalidInputError
from dcr_store.layout.affine_map import AffineMap, coverage
from dcr_store.layout.placements import Placement, Replicas, Split, map_of_placements, replicas_of

Array = np.ndarray[Any, Any]


def chunk(array: Array, n: int, dim: int) -> list[Array]:
    """``torch.chunk``, with empty chunks for those that it leaves out."""
    n_each = -(-array.shape[dim] // n)
    return np.split(array, [min(i * n_each, array.shape[dim]) for i in range(1, n)], dim)


@dataclass
class Placed:
    """A tensor on a mesh, and in which order its dimensions split it."""

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    order: tuple[int, ...]
    placements: list[Placement]

    @property
    def full(self) -> Array:
        return np.arange(math.prod(self.shape)).reshape(self.shape)

    @property
    def coordinates(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*map(range, self.mesh_shape)))

    def by_order(self, at: tuple[int, ...]) -> Array:
        """What ``fully_shard`` leaves, called on what was split before."""
        found = self.full
        for mesh_dim in self.order:
            placement = self.placements[mesh_dim]
            if placement is not None:
                found = chunk(found, self.mesh_shape[mesh_dim], placement.dim)[at[mesh_dim]]
        return found

    def by_placements(self, at: tuple[int, ...]) -> Array:
        """What ``distribute_tensor`` leaves."""
        found = self.full
        for mesh_dim, placement in enumerate(self.placements):
            if placement is not None:
                pieces = chunk(found, placement.factor, placement.dim)
                parts = [chunk(piece, self.mesh_shape[mesh_dim], placement.dim)[at[mesh_dim]] for piece in pieces]
                found = np.concatenate(parts, placement.dim)
        return found

    def mapped(self, at: tuple[int, ...], **options: Any) -> AffineMap:
        return map_of_placements("w", "F32", self.shape, self.mesh_shape, at, self.placements, **options)


@st.composite
def placed(draw: st.DrawFn) -> Placed:
    """Any order of splits, and the factors that note it."""
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    order = tuple(draw(st.permutations(range(len(mesh_shape)))))
    dims = [draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh_shape]
    placements: list[Placement] = []
    for mesh_dim, dim in enumerate(dims):
        before = [other for other in order[: order.index(mesh_dim)] if other > mesh_dim and dims[other] == dim]
        factor = math.prod(mesh_shape[other] for other in before)
        negative = draw(st.booleans())
        placements.append(None if dim is None else Split(dim - len(shape) if negative else dim, factor))
    return Placed(shape, mesh_shape, order, placements)


def assert_holds(mapped: AffineMap, local: Array) -> None:
    assert mapped.shape == local.shape
    assert np.array_equal(mapped.canonical_of("w", np.arange(local.size)), local.ravel())


def refuses(call: Any) -> bool:
    try:
        call()
    except InvalidInputError as error:
        return error.key == "w" and "made_by" in str(error)
    return False


@given(placed())
@settings(max_examples=300, deadline=None)
def test_each_coordinate_holds_what_the_maker_left_it(case: Placed) -> None:
    for at in case.coordinates:
        assert_holds(case.mapped(at, made_by="fully_shard"), case.by_order(at))
        assert_holds(case.mapped(at, made_by="distribute_tensor"), case.by_placements(at))


@given(placed())
@settings(max_examples=300, deadline=None)
def test_the_maker_is_asked_for_exactly_where_it_matters_and_by_all_alike(case: Placed) -> None:
    matters = any(not np.array_equal(case.by_order(at), case.by_placements(at)) for at in case.coordinates)
    for at in case.coordinates:
        assert refuses(lambda at=at: case.mapped(at)) == matters
        if not matters:
            assert_holds(case.mapped(at), case.by_order(at))


@settings(deadline=None)
@given(placed(), st.sampled_from(["fully_shard", "distribute_tensor"]))
def test_those_with_one_replica_index_hold_each_value_once(case: Placed, made_by: Any) -> None:
    groups: dict[int, list[AffineMap]] = {}
    for at in case.coordinates:
        found = replicas_of(case.mesh_shape, at, case.placements)
        assert at == found.coordinates[found.index]
        groups.setdefault(found.index, []).append(case.mapped(at, made_by=made_by))
        for other in found.coordinates:
            assert case.mapped(other, made_by=made_by) == case.mapped(at, made_by=made_by)
            assert replicas_of(case.mesh_shape, other, case.placements).coordinates == found.coordinates
    for maps in groups.values():
        assert coverage(maps, {"w": case.shape}).is_exact


def test_replicas_are_ranks_of_the_mesh() -> None:
    placements = [None, Split(0), None]
    found = replicas_of((2, 2, 2), (1, 0, 1), placements, ranks=[10, 11, 12, 13, 14, 15, 16, 17])
    assert found == Replicas(3, ((0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)), (10, 11, 14, 15))
    assert replicas_of((2, 2, 2), (1, 0, 1), placements).ranks == (0, 1, 4, 5)


def test_equal_shapes_do_not_decide_between_two_orders() -> None:
    """Of 38 rows over 4 by 4 ranks this one holds one either way, but not the same one."""
    case = Placed((38,), (4, 4), (1, 0), [Split(0, 4), Split(0)])
    at = (3, 2)
    assert case.by_order(at).shape == case.by_placements(at).shape
    assert case.by_order(at).tolist() == [29]
    assert case.by_placements(at).tolist() != [29]
    assert refuses(lambda: case.mapped(at))


def test_a_factor_that_no_split_explains_is_read_from_the_first_placement_on() -> None:
    case = Placed((12, 2), (3, 2), (0, 1), [Split(0, 2), None])
    for at in case.coordinates:
        assert_holds(case.mapped(at), case.by_placements(at))
        assert len(case.mapped(at).boxes["w"]) == 1
    with_rest = Placed((11, 2), (3, 2), (0, 1), [Split(0, 2), None])
    for at in with_rest.coordinates:
        assert_holds(with_rest.mapped(at), with_rest.by_placements(at))


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "at", "placements"),
    [
        ((4,), (2,), (2,), [None]),
        ((4,), (2,), (-1,), [None]),
        ((4,), (2, 2), (0,), [None]),
        ((4,), (2,), (0,), [None, None]),
        ((4,), (2,), (0,), [Split(1)]),
        ((4,), (2,), (0,), [Split(-2)]),
        ((), (2,), (0,), [Split(0)]),
        ((4,), (2,), (0,), [Split(0, 0)]),
    ],
)
def test_what_does_not_fit_is_refused_by_name(shape: Any, mesh_shape: Any, at: Any, placements: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        map_of_placements("layers.0.w", "F32", shape, mesh_shape, at, placements)
    assert caught.value.key == "layers.0.w"
