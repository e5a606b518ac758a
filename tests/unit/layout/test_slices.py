"""The usual parameters of tensor-parallel models, each against NumPy doing what its framework does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from dcr_store.errors import InvalidInputError
from dcr_store.layout import slices
from dcr_store.layout.affine_map import AffineMap, coverage
from dcr_store.layout.boxes import Box, Dim

Array = np.ndarray[Any, Any]


def state(**shapes: tuple[int, ...]) -> dict[str, Array]:
    """Tensors of numbers that are all different."""
    found, start = {}, 1
    for name, shape in shapes.items():
        found[name] = np.arange(start, start + math.prod(shape)).reshape(shape)
        start += math.prod(shape)
    return found


def assert_holds(mapped: AffineMap, local: Array, full: dict[str, Array]) -> None:
    """The map sends each value of `local` to its place, and leaves out those that are 0."""
    assert mapped.shape == local.shape
    got = np.zeros(local.size, local.dtype)
    for name in mapped.tensors:
        there = mapped.canonical_of(name, np.arange(local.size))
        got[there >= 0] = full[name].ravel()[there[there >= 0]]
    assert np.array_equal(got.reshape(local.shape), local)


def assert_covers(maps: list[AffineMap], full: dict[str, Array]) -> None:
    assert coverage(maps, {name: array.shape for name, array in full.items()}).is_exact


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_sharded_is_torch_chunk_also_where_it_does_not_divide(n_ranks: int, dim: int) -> None:
    torch = pytest.importorskip("torch")
    full = state(w=(6, 5))
    maps = [slices.sharded("w", "BF16", (6, 5), dim, rank, n_ranks) for rank in range(n_ranks)]
    chunks = list(torch.from_numpy(full["w"]).chunk(n_ranks, dim))
    for rank, mapped in enumerate(maps):
        if rank < len(chunks):
            assert_holds(mapped, chunks[rank].numpy(), full)
        else:
            assert mapped.n_values == 0
            assert math.prod(mapped.shape) == 0
    assert_covers(maps, full)


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_gated_mlp_has_its_part_of_gate_and_then_of_up(n_ranks: int) -> None:
    full = state(gate=(8, 3), up=(8, 3))
    maps = [slices.fused({"gate": (8, 3), "up": (8, 3)}, "BF16", rank, n_ranks) for rank in range(n_ranks)]
    for rank, mapped in enumerate(maps):
        mine = [np.split(full[name], n_ranks)[rank] for name in ("gate", "up")]
        assert_holds(mapped, np.concatenate(mine), full)
        assert sum(len(boxes) for boxes in mapped.boxes.values()) == 2
    assert_covers(maps, full)


def grouped(full: dict[str, Array], names: tuple[str, ...], n_groups: int) -> Array:
    """As Megatron lays fused attention weights: for each group of queries its rows of each, in turn."""
    return np.concatenate([np.split(full[name], n_groups)[group] for group in range(n_groups) for name in names])


@pytest.mark.parametrize("names", [("q", "k", "v"), ("q", "gate", "k", "v"), ("k", "v")])
@pytest.mark.parametrize(("n_groups", "n_ranks"), [(4, 1), (4, 2), (4, 4), (2, 4), (1, 2)])
def test_qkv_is_interleaved_by_groups_also_with_less_than_one_each(
    names: tuple[str, ...], n_groups: int, n_ranks: int
) -> None:
    rows = {"q": 16, "gate": 16, "k": 8, "v": 8}
    full = state(**{name: (rows[name], 3) for name in names})
    shapes = {name: array.shape for name, array in full.items()}
    maps = [slices.qkv(shapes, "BF16", n_groups, rank, n_ranks) for rank in range(n_ranks)]
    for rank, mapped in enumerate(maps):
        assert_holds(mapped, np.split(grouped(full, names, n_groups), n_ranks)[rank], full)
    assert_covers(maps, full)


def test_groups_that_repeat_are_one_box() -> None:
    mapped = slices.qkv({"q": (4096, 64), "k": (1024, 64), "v": (1024, 64)}, "BF16", 8, 0, 1)
    assert {name: len(boxes) for name, boxes in mapped.boxes.items()} == {"q": 1, "k": 1, "v": 1}


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("dim", "n_ranks"), [(None, 1), (0, 2), (1, 2)])
def test_experts_are_stacked_and_perhaps_transposed(is_transposed: bool, dim: int | None, n_ranks: int) -> None:
    full = state(**{f"experts.{i}": (4, 6) for i in range(3)})
    shapes = dict.fromkeys(full, (4, 6))
    maps = [
        slices.stacked_experts(shapes, "BF16", is_transposed=is_transposed, dim=dim, rank=rank, n_ranks=n_ranks)
        for rank in range(n_ranks)
    ]
    for rank, mapped in enumerate(maps):
        mine = [full[name] if dim is None else np.split(full[name], n_ranks, dim)[rank] for name in shapes]
        assert_holds(mapped, np.stack([expert.T for expert in mine] if is_transposed else mine), full)
    assert_covers(maps, full)


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_padded_rows_of_a_vocabulary_are_dropped(n_ranks: int) -> None:
    full = state(embed=(5, 3))
    maps = [slices.padded_vocabulary("embed", "BF16", (5, 3), 8, rank, n_ranks) for rank in range(n_ranks)]
    wide = np.pad(full["embed"], [(0, 3), (0, 0)])
    for rank, mapped in enumerate(maps):
        assert_holds(mapped, np.split(wide, n_ranks)[rank], full)
    assert_covers(maps, full)


def test_mamba_in_proj_has_its_part_of_each_in_turn() -> None:
    shapes = {"z": (8, 3), "x": (8, 3), "B": (4, 3), "C": (4, 3), "dt": (2, 3)}
    full = state(**shapes)
    maps = [slices.fused(shapes, "F32", rank, 2) for rank in range(2)]
    for rank, mapped in enumerate(maps):
        assert_holds(mapped, np.concatenate([np.split(full[name], 2)[rank] for name in shapes]), full)
    assert_covers(maps, full)


def test_mamba_parts_of_one_tensor_go_to_one_tensor() -> None:
    """The checkpoint's in_proj is one tensor; a rank holds its part of each of its sections."""
    sections = {"z": 8, "x": 8, "dt": 2}
    full = state(in_proj=(18, 3))
    starts = np.cumsum([0, *sections.values()])[:-1].tolist()
    maps, cuts = [], [full["in_proj"][start : start + n] for start, n in zip(starts, sections.values(), strict=True)]
    for rank in range(2):
        parts = [
            slices.part("in_proj", "BF16", (18, 3), [start + rank * n // 2, 0], [n // 2, 3])
            for start, n in zip(starts, sections.values(), strict=True)
        ]
        maps.append(slices.concatenated(parts))
        assert_holds(maps[rank], np.concatenate([np.split(cut, 2)[rank] for cut in cuts]), full)
    assert_covers(maps, full)


def test_flat_ranges_of_a_slice_of_a_slice() -> None:
    """A range of the flattened tensor-parallel slice, as a distributed optimizer holds it."""
    full = state(w=(6, 8))
    local = np.split(full["w"], 2, 1)[1]
    mapped = slices.flattened(slices.row_parallel("w", "BF16", (6, 8), 1, 2), 5, 18)
    assert_holds(mapped, local.ravel()[5:18], full)
    rest = [slices.flattened(slices.row_parallel("w", "BF16", (6, 8), 1, 2), a, b) for a, b in ((0, 5), (18, 24))]
    assert_covers([slices.row_parallel("w", "BF16", (6, 8), 0, 2), mapped, *rest], full)


def test_scalars_and_empty_tensors() -> None:
    scalar = slices.whole("s", "F32", ())
    assert (scalar.shape, scalar.n_values) == ((), 1)
    assert scalar.canonical_of("s", np.array([0])).tolist() == [0]
    empty = slices.whole("e", "F32", (0, 3))
    assert (empty.shape, empty.n_values) == ((0, 3), 0)
    assert coverage([scalar, empty], {"s": (), "e": (0, 3)}).is_exact


def test_what_is_not_covered_or_covered_twice_is_named() -> None:
    maps = [slices.row_parallel("w", "BF16", (2, 6), rank, 3) for rank in (0, 0, 2)]
    found = coverage(maps, {"w": (2, 6), "v": (3,)})
    assert [str(part) for part in found.doubled] == [f"values {a} to {a + 1} of w in C order" for a in (0, 6)]
    assert [str(part) for part in found.missing] == [
        "values 2 to 3 of w in C order", "values 8 to 9 of w in C order", "values 0 to 2 of v in C order"
    ]  # fmt: skip
    assert (found.n_doubled, found.n_missing) == (4, 7)


@pytest.mark.parametrize(
    "item",
    [
        Box(-1, 0, (Dim(2, 2, 1),)), Box(0, -1, (Dim(2, 1, 2),)), Box(0, 0, (Dim(0, 1, 1),)),
        Box(0, 0, (Dim(2, 0, 1),)), Box(0.0, 0, (Dim(2, 1, 1),)),
        Box(True, 0, (Dim(2, 1, 1),)), Box(0, 0, (Dim(2, -1, 1),)),
    ],
)  # fmt: skip
def test_boxes_that_lie_outside_or_nowhere_make_no_map(item: Box) -> None:
    """Of a negative offset the memory before the slice would be published."""
    with pytest.raises(InvalidInputError, match="w: is no box"):
        AffineMap.of("U8", (4,), {"w": (4,)}, {"w": [item]})


def test_a_value_that_goes_to_two_tensors_is_in_both() -> None:
    both = AffineMap.of(
        "BF16", (4,), {"a": (4,), "b": (4,)}, {n: slices.whole("x", "BF16", (4,)).boxes["x"] for n in "ab"}
    )
    assert coverage([both], {"a": (4,), "b": (4,)}).is_exact


@pytest.mark.parametrize(
    "call",
    [
        lambda: slices.part("w", "BF16", (4, 4), (2, 0), (3, 4)),
        lambda: slices.part("w", "BF16", (4, 4), (2,), (3, 4)),
        lambda: slices.sharded("w", "BF16", (4, 4), 2, 0, 2),
        lambda: slices.sharded("w", "BF16", (4, 4), 0, 2, 2),
        lambda: slices.interleaved({"q": (5, 2)}, "BF16", 2),
        lambda: slices.padded_vocabulary("w", "BF16", (5, 2), 7, 0, 2),
        lambda: slices.padded_vocabulary("w", "BF16", (5, 2), 4, 0, 2),
        lambda: slices.reshaped(slices.whole("w", "BF16", (4, 4)), (3, 5)),
        lambda: slices.permuted(slices.whole("w", "BF16", (4, 4)), (0, 0)),
        lambda: slices.narrowed(slices.whole("w", "BF16", (4, 4)), 0, 3, 2),
        lambda: slices.flattened(slices.whole("w", "BF16", (4, 4)), 3, 17),
        lambda: slices.concatenated([slices.whole("w", "BF16", (4, 4)), slices.whole("v", "BF16", (4, 3))], 0),
        lambda: slices.concatenated([slices.whole("w", "BF16", (4,)), slices.whole("v", "F32", (4,))], 0),
        lambda: slices.concatenated([slices.whole("w", "BF16", (4,)), slices.whole("w", "BF16", (4,))], 0),
        lambda: slices.whole("w", "F4", (4, 4)),
        lambda: slices.whole("", "BF16", (4, 4)),
    ],
)
def test_what_does_not_fit_is_refused(call: Any) -> None:
    with pytest.raises(InvalidInputError):
        call()


W = slices.whole("w", "BF16", (4, 6))
V = slices.whole("v", "BF16", (4, 5))
GATED = {"gate": (4, 6), "up": (4, 6)}


@pytest.mark.parametrize(
    ("call", "key"),
    [
        (lambda: slices.column_parallel("q", "bfloat16", (64, 32), 0, 2), "q"),
        (lambda: slices.whole("q", "BF16", (-1, 32)), "q"),
        (lambda: slices.whole("q", "F4", (2, 32)), "q"),
        (lambda: slices.sharded("q", "BF16", (4, 6), 2, 0, 2), "q"),
        (lambda: slices.fused(GATED, "bf16", 0, 2), "gate"),
        (lambda: slices.flat_part("w", "BF16", (4, 6), 0, 25), "w"),
        (lambda: slices.concatenated([W], 2), "w"),
        (lambda: slices.concatenated([W, V]), "v"),
        (lambda: slices.concatenated([]), "maps"),
        (lambda: slices.stacked([]), "maps"),
        (lambda: slices.stacked([W], 3), "w"),
        (lambda: slices.reshaped(slices.fused(GATED, "BF16", 0, 1), (3, 3)), "gate, up"),
        (lambda: slices.permuted(W, (0, 0)), "w"),
        (lambda: slices.narrowed(W, 0, 3, 2), "w"),
        (lambda: slices.narrowed(W, 2, 0, 1), "w"),
        (lambda: slices.padded(W, (3, 6)), "w"),
        (lambda: slices.flattened(W, 0, 25), "w"),
        (lambda: slices.sections("w", "BF16", (4, 6), (2, 2), 2, 2), "w"),
        (lambda: slices.sections("w", "BF16", (4, 6), (2, 2), 0, 0), "w"),
        (lambda: slices.interleaved({"q": (4, 6), "k": (3, 6)}, "BF16", 2), "k"),
        (lambda: slices.interleaved({"q": (4, 6)}, "BF16", 0), "q"),
        (lambda: slices.interleaved({"q": ()}, "BF16", 1), "q"),
        (lambda: slices.qkv({"q": (4, 6), "k": (2, 6)}, "BF16", 2, 0, 4), "q, k"),
        (lambda: slices.qkv({"q": (4, 6), "k": (2, 6)}, "BF16", 2, 0, 3, copied=["k"]), "q, k"),
        (lambda: slices.qkv({"q": (4, 6), "k": (2, 6)}, "BF16", 0, 0, 2, copied=["k"]), "q, k"),
        (lambda: slices.qkv(dict.fromkeys("abcd", (4, 6)), "BF16", 2, 0, 3), "a, b, c and 1 more"),
        (lambda: slices.stacked_experts({f"e{i}": (4 + i, 6) for i in range(2)}, "BF16"), "e1"),
        (lambda: slices.stacked_experts({}, "BF16"), "maps"),
        (lambda: slices.padded_vocabulary("w", "BF16", (4, 6), 5, 0, 2), "w"),
        (lambda: slices.padded_vocabulary("w", "BF16", (4, 6), 5, 0, 0), "w"),
    ],
)
def test_errors_name_the_tensors(call: Any, key: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{key}: ")


def test_documents_validate() -> None:
    schema = Path(__file__).parents[3] / "schema"
    found = {
        path.name: json.loads(path.read_text("utf-8")) for path in (schema / "affine-map.json", schema / "defs.json")
    }
    registry: Registry[Any] = Registry().with_resources(
        (document["$id"], Resource.from_contents(document)) for document in found.values()
    )
    validator = Draft202012Validator(found["affine-map.json"], registry=registry)
    for mapped in (
        slices.whole("s", "F32", ()),
        slices.whole("e", "F32", (0, 3)),
        slices.qkv({"q": (8, 4), "k": (4, 4)}, "BF16", 2, 0, 2),
        slices.transposed(slices.row_parallel("w", "C64", (6, 8), 1, 2)),
    ):
        validator.validate(json.loads(mapped.to_bytes()))
