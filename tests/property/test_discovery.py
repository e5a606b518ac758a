"""Discovery against exporters made at random: every exact move is found, nothing else is taken for one.

An exporter is a list of steps. Each step works on a pair: the tensor itself, and where each of its values comes from,
an int64 array of the same shape (-1: computed), on which the model does the same by NumPy's own operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcr_store
from dcr_store.errors import InvalidInputError
from dcr_store.layout import slices as slices_of
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.discovery import Discovery, discover

Array = np.ndarray[Any, Any]
Pair = tuple[Array, Array]
Step = Callable[[list[Pair]], list[Pair]]

DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
    "C64": np.dtype(np.complex64),
    "C128": np.dtype(np.complex128),
}
STEP = 1 << 20


@dataclass
class Case:
    """Slices, the steps of an exporter, and what the model says of each output's values."""

    slices: dict[str, Array]
    steps: list[Step]
    sources: dict[str, str]

    def pairs(self, slices: dict[str, Array]) -> list[Pair]:
        found = [(array, origins(index, array.shape)) for index, array in enumerate(slices.values())]
        with np.errstate(all="ignore"):
            for step in self.steps:
                found = step(found)
        return found

    def export(self, slices: dict[str, Array]) -> Iterator[tuple[str, Array]]:
        for index, (array, _) in enumerate(self.pairs(slices)):
            yield f"out.{index}", array


def origins(index: int, shape: tuple[int, ...]) -> Array:
    return index * STEP + np.arange(math.prod(shape)).reshape(shape)


def on(index: int, move: Callable[[Array], Array]) -> Step:
    """The same operation on tensor and origins."""

    def step(pairs: list[Pair]) -> list[Pair]:
        at = index % len(pairs)
        changed = (move(pairs[at][0]), move(pairs[at][1]))
        return [*pairs[:at], changed, *pairs[at + 1 :]]

    return step


def computed(index: int, compute: Callable[[Array], Array]) -> Step:
    """An operation after which no value is a slice's; not on dtypes that it does not know.

    Nor on what was computed already: a second minus would make it the slice's again.
    """

    def step(pairs: list[Pair]) -> list[Pair]:
        at = index % len(pairs)
        tensor = pairs[at][0]
        if tensor.dtype.kind in "biuc" or (pairs[at][1] < 0).any():
            return pairs
        changed = (compute(tensor), np.full(tensor.shape, -1))
        return [*pairs[:at], changed, *pairs[at + 1 :]]

    return step


def narrow(dim: int, start: int, n: int, step: int) -> Callable[[Array], Array]:
    def move(array: Array) -> Array:
        if array.ndim == 0:
            return array
        cut = [slice(None)] * array.ndim
        first = start % (array.shape[dim % array.ndim] + 1)
        cut[dim % array.ndim] = slice(first, first + n, step)
        return array[tuple(cut)]

    return move


def permute(seed: int) -> Callable[[Array], Array]:
    return lambda array: array.transpose(np.random.default_rng(seed).permutation(array.ndim))


def reshape(size: int) -> Callable[[Array], Array]:
    return lambda array: array.reshape(size, -1) if array.size and array.size % size == 0 else array.reshape(-1)


def pad(n: int) -> Step:
    """Zeros at the end of the first tensor: they come from nowhere."""

    def step(pairs: list[Pair]) -> list[Pair]:
        tensor, places = pairs[0]
        if tensor.ndim == 0:
            return pairs
        more = [(0, n), *[(0, 0)] * (tensor.ndim - 1)]
        wide = np.concatenate([tensor, np.zeros((n, *tensor.shape[1:]), tensor.dtype)])
        return [(wide, np.pad(places, more, constant_values=-1)), *pairs[1:]]

    return step


def join(first: int, second: int, *, is_mixed: bool) -> Step:
    """Two tensors of one dtype as one, in turn or one after the other."""

    def step(pairs: list[Pair]) -> list[Pair]:
        a, b = first % len(pairs), second % len(pairs)
        if a == b or pairs[a][0].dtype != pairs[b][0].dtype:
            return pairs
        if is_mixed and pairs[a][0].shape == pairs[b][0].shape:
            both = tuple(np.stack([pairs[a][side], pairs[b][side]], -1) for side in (0, 1))
        else:
            both = tuple(np.concatenate([pairs[a][side].ravel(), pairs[b][side].ravel()]) for side in (0, 1))
        return [*[pair for index, pair in enumerate(pairs) if index not in (a, b)], (both[0], both[1])]

    return step


def tie(index: int) -> Step:
    return lambda pairs: [*pairs, pairs[index % len(pairs)]]


def drop(index: int) -> Step:
    return lambda pairs: [pair for at, pair in enumerate(pairs) if at != index % len(pairs) or len(pairs) == 1]


def blend(index: int, how: Callable[[Array, Array], Array]) -> Step:
    """Two tensors of one shape and dtype computed to one, value by value."""

    def step(pairs: list[Pair]) -> list[Pair]:
        at = index % len(pairs)
        tensor, places = pairs[at]
        other = np.roll(tensor, 1)
        # A value and itself, which two places may hold, give itself: that is a move.
        if tensor.dtype.kind in "biuc" or (places < 0).any() or (places == np.roll(places, 1)).any():
            return pairs
        changed = (how(tensor, other).astype(tensor.dtype), np.full(tensor.shape, -1))
        return [*pairs[:at], changed, *pairs[at + 1 :]]

    return step


ARITHMETIC: list[Callable[[Array], Array]] = [
    lambda x: x + x.dtype.type(1),
    lambda x: x + x.dtype.type(0),
    lambda x: x * x.dtype.type(2),
    lambda x: x * x.dtype.type(0.5),
    lambda x: -x,
    lambda x: abs(x),
    lambda x: np.where(x > x.dtype.type(0), x, x.dtype.type(0)),
    lambda x: np.minimum(x, x.dtype.type(64)),
    lambda x: np.clip(x.astype(np.float64), -1e-3, 1e30).astype(x.dtype),
    lambda x: x.astype(ml_dtypes.float8_e5m2).astype(x.dtype) if x.dtype.itemsize > 1 else -x,
    lambda x: x.astype(np.float16 if x.dtype != np.float16 else ml_dtypes.bfloat16),
    lambda x: np.round(x.astype(np.float64)).astype(x.dtype),
]
BLENDS: list[Callable[[Array, Array], Array]] = [
    lambda a, b: (a.astype(np.float64) + b.astype(np.float64)) / 2,
    lambda a, b: np.maximum(a, b),
    lambda a, b: np.where(a.astype(np.float64) >= b.astype(np.float64), a, b),
    lambda a, b: np.where(a > a.dtype.type(0), a, b),
    lambda a, b: a * b,
]


INDEX = st.integers(0, 5)
MOVES = st.one_of(
    st.builds(on, INDEX, st.builds(narrow, INDEX, INDEX, st.integers(0, 5), st.integers(1, 3))),
    st.builds(on, INDEX, st.builds(permute, INDEX)),
    st.builds(on, INDEX, st.builds(reshape, st.integers(1, 4))),
    st.builds(pad, st.integers(0, 3)),
    st.builds(join, INDEX, INDEX, is_mixed=st.booleans()),
    st.builds(tie, INDEX),
    st.builds(drop, INDEX),
    st.builds(computed, INDEX, st.sampled_from(ARITHMETIC)),
    st.builds(blend, INDEX, st.sampled_from(BLENDS)),
)
STEPS = st.lists(MOVES, max_size=8)  # made once: to check a strategy takes longer than to draw from it
NAMES = st.lists(st.sampled_from(sorted(DTYPES)), min_size=1, max_size=3)
SHAPES = st.lists(st.integers(1, 7), max_size=3)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    names = draw(NAMES)
    if draw(st.booleans()):
        names = names[:1] * len(names)
    slices = {}
    for index, name in enumerate(names):
        shape = draw(SHAPES)
        slices[f"s{index}"] = np.zeros(shape, DTYPES[name])
    return Case(slices, draw(STEPS), dict(zip(slices, names, strict=True)))


def found_by(discovery: Discovery, case: Case, name: str) -> Array:
    """What the maps say of each value of an output."""
    dtype, shape = discovery.tensors[name]
    found = np.full(math.prod(shape), -1)
    for index, (source, mapped) in enumerate(discovery.maps[0].items()):
        if name in mapped.tensors:
            assert case.sources[source] == dtype
            here = mapped.local_of(name, np.arange(len(found)))
            assert not ((here >= 0) & (found >= 0)).any()
            found = np.where(here >= 0, index * STEP + here, found)
    for part in discovery.residual:
        if part.tensor == name:
            assert (found[part.start : part.stop] == -1).all()
            found[part.start : part.stop] = -2
    assert (found != -1).all(), "each value is moved or residual"
    return np.where(found == -2, -1, found).reshape(shape)


@given(cases())
@settings(max_examples=500, deadline=None)
def test_moves_are_found_and_nothing_else_is(case: Case) -> None:
    discovery = discover(case.export, case.slices)
    wanted = case.pairs(case.slices)
    assert list(discovery.tensors) == [f"out.{index}" for index in range(len(wanted))]
    for index, (tensor, places) in enumerate(wanted):
        assert discovery.tensors[f"out.{index}"][1] == tensor.shape
        assert np.array_equal(found_by(discovery, case, f"out.{index}"), places)


@pytest.mark.parametrize(
    "dtype",
    [
        ml_dtypes.bfloat16,
        np.float16,
        np.float32,
        np.float64,
        np.complex64,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e4m3fnuz,
        ml_dtypes.float8_e5m2fnuz,
        ml_dtypes.float8_e8m0fnu,
    ],
)
@pytest.mark.parametrize("which", [np.isnan, np.isposinf, np.isneginf])
def test_what_changes_only_what_is_no_number_is_noticed(dtype: Any, which: Callable[[Array], Array]) -> None:
    """As an exporter does that clips to finite numbers, or replaces NaN."""
    one = np.ones(5, dtype)

    def export(slices: dict[str, Array]) -> Iterator[tuple[str, Array]]:
        wide = slices["w"].real.astype(np.float64)
        yield "w", np.where(which(wide), one, slices["w"])

    special = np.array([np.nan if which is np.isnan else np.inf if which is np.isposinf else -np.inf])
    kinds = special.astype(np.float32).astype(dtype).real.astype(np.float64)
    found = discover(export, {"w": np.zeros(5, dtype)})
    if which(kinds)[0]:
        assert [(part.start, part.stop) for part in found.residual] == [(0, 5)]
    else:  # the dtype has none: nothing is changed
        assert found.residual == ()
        assert found.maps[0]["w"].n_values == 5


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_many_values_need_several_digits(dtype: str) -> None:
    given_slices = {"a": np.zeros((300, 40), DTYPES[dtype]), "b": np.zeros(70_000, DTYPES[dtype])}
    found = discover(lambda s: [("w", s["a"].T), ("v", s["b"][:0:-1][::-1])], given_slices)
    assert found.residual == ()
    assert found.maps[0]["a"] == slices_of.transposed(slices_of.whole("w", dtype, (40, 300)))
    assert found.maps[0]["b"] == slices_of.padded(slices_of.whole("v", dtype, (69_999,)), (70_000,)) or found.maps[0][
        "b"
    ].canonical_of("v", np.arange(70_000)).tolist() == [-1, *range(69_999)]


def test_all_ranks_are_found_where_the_exporter_gathers() -> None:
    torch = pytest.importorskip("torch")

    def export(ranks: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
        """As a tensor-parallel exporter: gate and up of all ranks, one after the other."""
        halves = [rank["fc1"].chunk(2) for rank in ranks]
        yield "gate", torch.cat([gate for gate, _ in halves])
        yield "up", torch.cat([up for _, up in halves])
        yield "norm", ranks[0]["norm"] + 1

    given_slices = [
        {"fc1": torch.zeros(8, 6, dtype=torch.bfloat16), "norm": torch.zeros(6, dtype=torch.bfloat16)} for _ in range(2)
    ]
    found = discover(export, given_slices)
    for rank in range(2):
        wanted = slices_of.fused({"gate": (8, 6), "up": (8, 6)}, "BF16", rank, 2)
        assert found.maps[rank]["fc1"] == wanted
        assert found.maps[rank]["norm"].n_values == 0
    assert [(part.tensor, part.start, part.stop) for part in found.residual] == [("norm", 0, 6)]
    assert found.residual[0].reason == "added: 1"


def test_reasons_name_what_happens() -> None:
    bf16 = DTYPES["BF16"]
    given_slices = {
        "w": np.zeros((4, 4), np.float32),
        "v": np.zeros((4, 4), np.float32),
        "half": np.zeros(3, bf16),
        "scale": np.zeros(4, np.float64),
        "count": np.zeros(4, np.int64),
    }
    found = discover(
        lambda s: [
            ("made", np.ones(3, np.float32)),
            ("rows", np.concatenate([s["w"][:2], np.zeros((2, 4), np.float32)])),
            ("cast", s["w"].astype(bf16)),
            ("wider", s["half"].astype(np.float64)),
            ("foreign", np.abs(s["w"]).astype(np.float16)),
            ("counted", s["count"].astype(np.float32)),
            ("added", s["w"] + 1),
            ("halved", (s["w"] * np.float32(0.5)).astype(bf16)),
            ("each", np.concatenate([s["w"] * np.float32(2), s["w"] * np.float32(4), s["w"] + np.float32(3)])),
            ("scaled", s["w"] * s["scale"].astype(np.float32)),
            ("mean", (s["w"] + s["v"]) / np.float32(2)),
            ("same", s["w"] + np.float32(0)),
            ("cut", np.maximum(s["w"], np.float32(0))),
        ],
        given_slices,
    )
    assert [(part.tensor, part.start, part.stop, part.reason) for part in found.residual] == [
        ("made", 0, 3, "made from nothing"),
        ("rows", 8, 16, "made from nothing"),
        ("cast", 0, 16, "cast: from F32"),
        ("wider", 0, 3, "cast: from BF16"),
        ("foreign", 0, 16, "cast: no slice has the dtype F16"),
        ("counted", 0, 4, "cast: from I64"),
        ("added", 0, 16, "added: 1"),
        ("halved", 0, 16, "scaled: by 0.5"),
        ("each", 0, 32, "scaled: by several numbers"),
        ("each", 32, 48, "added: 3"),
        ("scaled", 0, 16, "scaled: by other values"),
        ("mean", 0, 16, "computed: other bits than any slice has"),
        ("same", 0, 16, "computed: numbers are kept, but -0 becomes 0"),
        ("cut", 0, 16, "computed: other bits than any slice has"),
    ]


def test_sums_are_not_called_scaled_or_added() -> None:
    given_slices = {name: np.zeros((8, 6), np.float32) for name in ("w", "v")} | {"few": np.zeros(2, np.float32)}
    found = discover(
        lambda s: [
            ("sum", s["w"].sum(0)),
            ("pair", s["few"][:1] + s["few"][1:]),
            ("both", s["w"] + s["v"]),
            ("less", s["w"] * np.float32(3) - s["v"]),
            ("mean", (s["w"] + s["v"]) / np.float32(2) + np.float32(1)),
            ("dot", (s["w"] * s["v"]).sum(0)),
            ("rows", np.concatenate([s["w"] * np.float32(4), s["w"] + s["v"]])),
        ],
        given_slices,
    )
    computed = "computed: other bits than any slice has"
    assert [(part.tensor, part.start, part.stop, part.reason) for part in found.residual] == [
        ("sum", 0, 6, computed),
        ("pair", 0, 1, computed),
        ("both", 0, 48, computed),
        ("less", 0, 48, computed),
        ("mean", 0, 48, computed),
        ("dot", 0, 6, computed),
        ("rows", 0, 48, "scaled: by 4"),
        ("rows", 48, 96, computed),
    ]


def test_reasons_say_which_numbers_are_not_kept() -> None:
    torch = pytest.importorskip("torch")
    nans = "NaNs change their bits, as by arithmetic, or a cast there and back"
    cases: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
        "there and back": (lambda w: w.float().bfloat16(), torch.bfloat16, nans),
        "times one": (lambda w: w * 1.0, torch.bfloat16, nans),
        "wider": (lambda w: w.double().float(), torch.float32, nans),
        "zero": (lambda w: w + 0, torch.bfloat16, "-0 becomes 0"),
        "clamped": (lambda w: w.clamp(-1e30, 1e30), torch.float32, "not the largest ones"),
        "clean": (lambda w: torch.where(w.isinf(), 0, w), torch.float32, "not infinities"),
        "flushed": (lambda w: torch.where(w.abs() < 1e-40, 0 * w, w), torch.float32, "not subnormal ones"),
    }
    for name, (made, dtype, words) in cases.items():
        found = discover(lambda s, made=made: {"t": made(s["w"])}, {"w": torch.zeros(16, 16, dtype=dtype)})
        assert [(part.start, part.stop, part.reason) for part in found.residual] == [
            (0, 256, f"computed: numbers are kept, but {words}")
        ], name


def test_reasons_that_change_too_often_are_one() -> None:
    def export(s: dict[str, Array]) -> list[tuple[str, Array]]:
        both = np.stack([s["w"] + np.float32(1), s["w"] * np.float32(2)], -1)
        return [("w", both), ("few", both[:3])]

    found = discover(export, {"w": np.zeros(600, np.float32)})
    assert [part.reason for part in found.residual if part.tensor == "few"] == ["added: 1", "scaled: by 2"] * 3
    assert [(part.start, part.stop, part.reason) for part in found.residual if part.tensor == "w"] == [
        (0, 1200, "computed: other bits than any slice has")
    ]


def test_an_exporter_may_return_a_mapping() -> None:
    slices = {"w": np.zeros((2, 3), np.float32)}
    found = discover(lambda given: {"t": given["w"].T, "half": given["w"][:1]}, slices)
    assert found == discover(lambda given: [("t", given["w"].T), ("half", given["w"][:1])], slices)
    assert found.maps[0]["w"].tensors == {"t": (3, 2), "half": (1, 3)}


@pytest.mark.parametrize(
    ("export", "message"),
    [
        (lambda s: [("w", s["w"]), ("w", s["w"])], "twice"),
        (lambda s: [("w", [1, 2])], "no tensor"),
        (lambda s: [(f"w{int(s['w'][0])}", s["w"])], "another run|other tensors|another tensor"),
        (lambda s: [("w", s["w"][: 1 + int(s["w"][0] == 1)])], "another tensor"),
    ],
)
def test_exporters_that_are_none_are_refused(export: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        discover(export, {"w": np.zeros(3, np.float32)})


@pytest.mark.parametrize(
    ("slices", "found"),
    [
        ([("w", np.zeros(3, np.float32))], "tuple in it"),
        ([{"w": np.zeros(3, np.float32)}, np.zeros(3)], "ndarray in it"),
        ({"w": np.zeros(3, np.float32)}.items(), "dict_items"),
        (np.zeros(3, np.float32), "ndarray"),
        ("w", "str"),
    ],
)
def test_what_are_no_slices_is_refused(slices: Any, found: str, tmp_path: Path) -> None:
    for kept in ({}, {"cache": tmp_path, "key": "of a test"}):
        with pytest.raises(InvalidInputError, match=rf"^slices: .*mapping of names to tensors.*found {found}\)"):
            dcr_store.discover(lambda s: s, slices, **kept)


@pytest.mark.parametrize(
    ("export", "found"),
    [
        (lambda s: None, "NoneType"),
        (lambda s: "w", "str"),
        (lambda s: s["w"], "float32"),
        (lambda s: list(s), "str"),
        (lambda s: [(1, s["w"])], "tuple"),
        (lambda s: [("w", s["w"], 1)], "tuple"),
        ({"w": 1}, "dict"),
    ],
)
def test_what_are_no_names_and_tensors_is_refused(export: Any, found: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"^export: .*found {found}\)"):
        discover(export, {"w": np.zeros(3, np.float32)})


def test_meta_tensors_say_the_shapes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def export(ranks: list[dict[str, Any]]) -> dict[str, Any]:
        return {"w": torch.cat([rank["w"] for rank in ranks])}

    given_slices = [{"w": torch.zeros(4, 3, dtype=torch.bfloat16)} for _ in range(2)]
    meta = [{name: tensor.to("meta") for name, tensor in mine.items()} for mine in given_slices]
    wanted = discover(export, given_slices)
    assert wanted.maps[1]["w"].n_values == 12
    assert discover(export, meta) == wanted
    for slices in (meta, given_slices, meta):
        assert dcr_store.discover(export, slices, cache=tmp_path, key="of a test") == wanted
    assert len(list(tmp_path.iterdir())) == 1


def test_what_an_exporter_changes_in_place_does_not_count() -> None:
    def export(given: dict[str, Array]) -> list[tuple[str, Array]]:
        given["a"] += np.float32(1)
        return [("a", given["a"]), ("b", given["b"])]

    found = discover(export, {"a": np.zeros(5, np.float32), "b": np.zeros(5, np.float32)})
    assert [part.tensor for part in found.residual] == ["a"]
    assert isinstance(found.maps[0]["b"], AffineMap)


def test_an_exporter_may_use_its_memory_again() -> None:
    def export(given: dict[str, Array]) -> Iterator[tuple[str, Array]]:
        buffer = np.empty(5, np.float32)
        for name in ("a", "b"):
            buffer[:] = given[name]
            yield name, buffer

    found = discover(export, {"a": np.zeros(5, np.float32), "b": np.zeros(5, np.float32)})
    assert found.residual == ()
    assert [list(found.maps[0][name].tensors) for name in ("a", "b")] == [["a"], ["b"]]
