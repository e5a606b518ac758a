"""Megatron's sharded tensors: leading axes, padding, flat ranges; NumPy doing what Megatron does with them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_store.errors import InvalidInputError
from dcr_store.layout import slices
from dcr_store.layout.affine_map import AffineMap, coverage
from dcr_store.layout.from_megatron import is_main_replica, map_of_megatron

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Data:
    shape: tuple[int, ...]
    dtype: str = "torch.bfloat16"


@dataclass(frozen=True)
class Sharded:
    """The attributes of Megatron's class, in its order."""

    key: str
    data: Data | None
    dtype: str
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None = None
    replica_id: int | tuple[int, ...] = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None


def sharded(local: Any, full: Any, offset: Any, **options: Any) -> Sharded:
    return Sharded("layers.w", None, "torch.bfloat16", tuple(local), tuple(full), tuple(offset), **options)


def places(mapped: AffineMap) -> list[int]:
    return mapped.canonical_of("layers.w", np.arange(math.prod(mapped.shape))).tolist()


@st.composite
def cases(draw: st.DrawFn) -> tuple[Sharded, tuple[int, ...], Array]:
    """A sharded tensor, the canonical shape, and what its data are: places in the canonical tensor, -1 for padding."""
    full = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    n_leading = draw(st.integers(0, len(full) - 1))
    offsets = [draw(st.integers(0, n - 1)) for n in full]
    local = [draw(st.integers(0, n - at)) for n, at in zip(full, offsets, strict=True)][n_leading:]
    is_padded = draw(st.booleans())
    canonical = [draw(st.integers(0, n)) if is_padded else n for n in full]
    numbers = np.arange(math.prod(canonical)).reshape(canonical)
    wide = np.pad(numbers, [(0, n - m) for n, m in zip(full, canonical, strict=True)], constant_values=-1)
    ends = [slice(at, at + n) for at, n in zip(offsets[n_leading:], local, strict=True)]
    data = wide[(*offsets[:n_leading], *ends)]
    flat = None
    if draw(st.booleans()):
        start = draw(st.integers(0, data.size))
        flat = slice(start, draw(st.integers(start, data.size)))
        data = data.ravel()[flat]
    options = {"prepend_axis_num": n_leading, "allow_shape_mismatch": is_padded, "flattened_range": flat}
    return sharded(local, full, offsets, **options), tuple(canonical), data


@settings(deadline=None)
@given(cases())
def test_the_map_says_where_the_data_lie(case: tuple[Sharded, tuple[int, ...], Array]) -> None:
    item, canonical, data = case
    mapped = map_of_megatron(replace(item, data=Data(data.shape)), canonical)
    assert mapped.shape == data.shape
    assert mapped.tensors == {"layers.w": canonical}
    assert places(mapped) == data.ravel().tolist()
    if not item.allow_shape_mismatch:
        assert map_of_megatron(item) == mapped


def test_padded_vocabulary_over_ranks_covers_the_vocabulary() -> None:
    """Five rows padded to eight, over four ranks: the last one holds padding alone."""
    maps = [
        map_of_megatron(sharded((2, 3), (8, 3), (2 * rank, 0), allow_shape_mismatch=True), (5, 3)) for rank in range(4)
    ]
    assert maps == [slices.padded_vocabulary("layers.w", "BF16", (5, 3), 8, rank, 4) for rank in range(4)]
    assert coverage(maps, {"layers.w": (5, 3)}).is_exact
    assert maps[3].n_values == 0


def test_layers_lead_on_to_canonical_tensors_of_their_own() -> None:
    mapped = map_of_megatron(sharded((2, 3), (3, 4, 3), (1, 2, 0), prepend_axis_num=1))
    stack = slices.stacked([slices.whole(f"layers.{i}.w", "BF16", (4, 3)) for i in range(3)])
    onward = mapped.then({"layers.w": stack})
    assert {
        name: onward.canonical_of(name, np.arange(6)).tolist() for name, boxes in onward.boxes.items() if boxes
    } == {"layers.1.w": [6, 7, 8, 9, 10, 11]}


def test_ranges_of_a_distributed_optimizer_cover_the_slice() -> None:
    ranges = [slice(0, 5), slice(5, 5), slice(5, 12)]
    maps = [map_of_megatron(sharded((3, 4), (3, 8), (0, 4), flattened_range=flat)) for flat in ranges]
    other = map_of_megatron(sharded((3, 4), (3, 8), (0, 0)))
    assert coverage([*maps, other], {"layers.w": (3, 8)}).is_exact


@pytest.mark.parametrize(("replica_id", "is_main"), [(0, True), (2, False), ((0, 0, 0), True), ((0, 1, 0), False)])
def test_main_replicas(replica_id: Any, is_main: bool) -> None:
    assert is_main_replica(sharded((1,), (1,), (0,), replica_id=replica_id)) == is_main


def test_versions_of_the_class_without_a_flattened_range() -> None:
    class Newer:
        key, data, dtype, replica_id, prepend_axis_num = "layers.w", None, "torch.float32", 0, 0
        local_shape, global_shape, global_offset, allow_shape_mismatch = (2,), (4,), (2,), False

    assert places(map_of_megatron(Newer())) == [2, 3]


@pytest.mark.parametrize(
    ("item", "canonical", "words"),
    [
        (sharded((2, 3), (4,), (0,)), None, "do not fit each other"),
        (sharded((2, 3), (4, 3), (0,)), None, "do not fit each other"),
        (sharded((2, 3), (4, 3), (0, 0), prepend_axis_num=1), None, "do not fit each other"),
        (sharded((2,), (4,), (0,), prepend_axis_num=-1), None, "do not fit each other"),
        (sharded((2, 3), (4, 3), (3, 0)), None, "leaves the tensor"),
        (sharded((3,), (2, 3), (2, 0), prepend_axis_num=1), None, "leaves the tensor"),
        (sharded((2, 3), (4, 3), (0, 0)), (3, 3), "it is not padded"),
        (sharded((2, 3), (4, 3), (0, 0), allow_shape_mismatch=True), None, "canonical_shape"),
        (sharded((2, 3), (4, 3), (0, 0), allow_shape_mismatch=True), (5, 3), "within"),
        (sharded((2, 3), (4, 3), (0, 0), allow_shape_mismatch=True), (4,), "within"),
        (sharded((2, 3), (4, 3), (0, 0), flattened_range=slice(2, 7)), None, "leaves the slice"),
        (sharded((2, 3), (4, 3), (0, 0), flattened_range=slice(3, 2)), None, "leaves the slice"),
        (sharded((2, 3), (4, 3), (0, 0), flattened_range=slice(0, 4, 2)), None, "range is none"),
        (sharded((2, 3), (4, 3), (0, 0), flattened_range=slice(2)), None, "range is none"),
        (replace(sharded((2, 3), (4, 3), (0, 0)), data=Data((3, 2))), None, "data is not"),
        (replace(sharded((2, 3), (4, 3), (0, 0)), data=Data((2, 3), "torch.float32")), None, "data is not"),
        (
            replace(sharded((2, 3), (4, 3), (0, 0), flattened_range=slice(0, 6)), data=Data((2, 3))),
            None,
            "data is not",
        ),
        (replace(sharded((2,), (2,), (0,)), dtype="torch.complex32"), None, "dtype"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(item: Sharded, canonical: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words) as caught:
        map_of_megatron(item, canonical)
    assert caught.value.key == "layers.w"


def test_factories_and_objects_are_refused_by_name() -> None:
    class ShardedTensorFactory:
        key = "layers.fc1"

    with pytest.raises(InvalidInputError, match="apply_factories") as caught:
        map_of_megatron(ShardedTensorFactory())  # type: ignore[arg-type]
    assert caught.value.key == "layers.fc1"


@pytest.mark.parametrize("read", [map_of_megatron, is_main_replica])
def test_what_has_no_key_is_refused_as_the_argument_that_it_is(read: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^sharded: is no ShardedTensor.* found ndarray") as caught:
        read(np.zeros(3))
    assert caught.value.key == "sharded"


def test_a_dtype_without_a_map_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match="dtype") as caught:
        map_of_megatron(replace(sharded((1,), (1,), (0,)), dtype="torch.quint8"))
    assert caught.value.key == "layers.w"


@pytest.mark.parametrize("replica_id", [-1, (0, "0"), None])
def test_replica_ids_that_are_none_are_refused(replica_id: Any) -> None:
    with pytest.raises(InvalidInputError, match="replica id"):
        is_main_replica(sharded((1,), (1,), (0,), replica_id=replica_id))
