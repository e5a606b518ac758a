"""Diff: counts against brute force, and steps of the last place against a scalar reference for every dtype."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from states import series

import dcr_store
from dcr_store.history.steps import has_steps, histogram, steps
from dcr_store.layout.dtypes import DTYPES, uint_dtype
from dcr_store.payload.shard import index_nbytes
from dcr_store.store import Store

FLOATS: dict[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}
SIGNED = {"I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}
UNSIGNED = ("BOOL", "U8", "U16", "U32", "U64", "F8_E8M0")
PACKED = ("F4", "F6_E2M3", "F6_E3M2")
COMPLEX = ("C64", "C128")


def place(dtype: str, bits: int) -> int:
    """Return where a value stands in the order of all values of its dtype, by arithmetic and not by bit tricks.

    Floating-point values of one sign are counted away from zero, -0.0 right below +0.0; NaNs beyond infinity.
    """
    n_bits = DTYPES[dtype].bits if dtype != "C128" else 64
    if dtype in UNSIGNED:
        return bits
    if dtype in SIGNED:
        return bits - (1 << n_bits) if bits >= 1 << (n_bits - 1) else bits
    magnitude = bits % (1 << (n_bits - 1))
    return -magnitude - 1 if bits >= 1 << (n_bits - 1) else magnitude


def largest_step(dtype: str, old: Any, new: Any) -> int:
    return int(steps(dtype, old, new).distance.max(initial=0))


def test_every_dtype_has_a_case() -> None:
    assert {*FLOATS, *SIGNED, *UNSIGNED, *PACKED, *COMPLEX} == set(DTYPES)


@pytest.mark.parametrize("dtype", sorted({*FLOATS, *SIGNED, *UNSIGNED}))
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_against_the_scalar_reference(dtype: str, data: st.DataObject) -> None:
    row = DTYPES[dtype]
    top = (1 << row.bits) - 1
    edges = [0, 1, 2, top, top - 1, 1 << (row.bits - 1), (1 << (row.bits - 1)) - 1, (1 << (row.bits - 1)) + 1]
    values = st.sampled_from(edges) | st.integers(0, top)
    pairs = data.draw(st.lists(st.tuples(values, values), min_size=1, max_size=8))
    old, new = (np.array(side, np.uint64).astype(uint_dtype(row.space)) for side in zip(*pairs, strict=True))
    expected = [place(dtype, b) - place(dtype, a) for a, b in pairs if a != b]
    found = steps(dtype, old, new)
    assert found.distance.tolist() == [abs(step) for step in expected]
    assert found.is_up.tolist() == [step > 0 for step in expected]
    counts = [0] * 64
    for step in expected:
        counts[abs(step).bit_length() - 1] += 1
    assert histogram(found.distance).tolist() == counts


@pytest.mark.parametrize("dtype", FLOATS)
def test_neighbouring_values_are_one_apart(dtype: str) -> None:
    """The order of bits is the order of values: for every finite value of narrow dtypes, for some of wide ones."""
    kind, row = FLOATS[dtype], DTYPES[dtype]
    uint = uint_dtype(row.space)
    if row.bits <= 16:
        every = np.arange(1 << row.bits, dtype=np.uint64).astype(uint)
    else:
        rng = np.random.default_rng(0)
        every = rng.integers(0, 1 << (row.bits - 1), 200, np.uint64).astype(uint)
        every = np.concatenate([every, every + uint.type(1), every | uint.type(1 << (row.bits - 1))])
    with np.errstate(invalid="ignore"):
        values = every.view(kind).astype(np.float64)
    finite = np.isfinite(values)
    order = sorted(
        zip(values[finite].tolist(), every[finite].tolist(), strict=True), key=lambda v: (v[0], math.copysign(1, v[0]))
    )
    places = [place(dtype, bits) for _, bits in order]
    assert places == sorted(places), "places ascend as values do"
    if row.bits <= 16 and "FNUZ" not in dtype:  # there the place of -0.0 is a NaN's
        assert places == list(range(places[0], places[0] + len(places))), "without a gap among finite values"


@pytest.mark.parametrize(
    ("dtype", "old", "new", "step"),
    [
        ("BF16", 1.0, 1.0078125, 1),
        ("BF16", -1.0, -1.0078125, 1),
        ("BF16", 0.0, -0.0, 1),
        ("F32", 0.0, math.ulp(0.0), None),
        ("F16", 65504.0, math.inf, 1),
        ("F64", 1.0, 1.0 + math.ulp(1.0), 1),
        ("F32", -1.0, 1.0, 2 * 0x3F800000 + 1),
        ("F8_E5M2", 1.0, 1.25, 1),
    ],
)
def test_examples(dtype: str, old: float, new: float, step: int | None) -> None:
    kind, uint = FLOATS[dtype], uint_dtype(DTYPES[dtype].space)
    a, b = (np.array([value]).astype(kind).view(uint) for value in (old, new))
    if step is None:
        step = abs(place(dtype, int(a[0])) - place(dtype, int(b[0])))
    assert largest_step(dtype, a, b) == step


def test_distances_do_not_overflow() -> None:
    top = np.array([2**64 - 1], np.uint64)
    assert largest_step("U64", np.zeros(1, np.uint64), top) == 2**64 - 1
    assert largest_step("I64", np.array([2**63], np.uint64), np.array([2**63 - 1], np.uint64)) == 2**64 - 1
    assert largest_step("F64", top, np.array([2**63 - 1], np.uint64)) == 2**64 - 1


@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex_values_are_two_reals(dtype: str) -> None:
    kind = np.complex64 if dtype == "C64" else np.complex128
    real = np.float32 if dtype == "C64" else np.float64
    old = np.array([1 + 1j, 2 - 2j], kind)
    new = old.copy()
    new.view(real)[3] = np.nextafter(new.view(real)[3], real(0))
    assert largest_step(dtype, old.view(np.uint64), new.view(np.uint64)) == 1


@pytest.mark.parametrize("dtype", PACKED)
def test_packed_values_have_no_step(dtype: str) -> None:
    assert not has_steps(dtype)
    assert {dtype for dtype in DTYPES if not has_steps(dtype)} == set(PACKED)


def test_nothing_to_compare() -> None:
    assert largest_step("F32", np.empty(0, np.uint32), np.empty(0, np.uint32)) == 0


@pytest.fixture(params=["dcr.delta", "portable"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", codec=request.param, chunk_elements=256) as store:
        yield store


def publish(store: Store, state: dict[str, Any]) -> None:
    with store.begin() as transaction:
        for name, array in state.items():
            transaction.write(name, array)


def bits(array: Any) -> Any:
    return np.frombuffer(array.tobytes(), f"u{array.itemsize}")


def test_counts_are_those_of_brute_force(store: Store) -> None:
    states = series(3, seed=2)
    for state in states:
        publish(store, state)
    for a in range(3):
        for b in range(3):
            found = store.diff(f"main@{a}", f"main@{b}")
            assert (found.a, found.b) == (f"main@{a}", f"main@{b}")
            assert [item.name for item in found.tensors] == list(states[b])
            for item in found.tensors:
                old, new = bits(states[a][item.name]), bits(states[b][item.name])
                n = int(np.count_nonzero(old != new))
                assert (item.changed, item.elements) == (n, old.size)
                assert item.rate == n / old.size
                assert item.status == ("changed" if n else "same")
                dtype = "F32" if item.name == "norm.weight" else "BF16"
                assert item.dtype == dtype
                pairs = zip(old[old != new].tolist(), new[old != new].tolist(), strict=True)
                assert item.largest_ulp == max((abs(place(dtype, x) - place(dtype, y)) for x, y in pairs), default=0)
                assert (item.nbytes > 0) == (n > 0)
            assert found.changed == sum(item.changed for item in found.tensors)
            assert found.elements == sum(array.size for array in states[b].values())


def test_counts_do_not_depend_on_the_path(store: Store) -> None:
    """Bits decide: what changed there and back again has not changed."""
    a = np.arange(1000, dtype=np.int32)
    publish(store, {"a": a})
    publish(store, {"a": a + 5})
    publish(store, {"a": a})
    assert store.diff("main@0", "main@2").changed == 0
    assert store.diff("main@0", "main@1").tensors[0].largest_ulp == 5


def test_zeros_and_nans_are_bits(store: Store) -> None:
    old = np.array([0.0, -0.0, np.nan, 1.0], np.float32)
    new = np.array([-0.0, -0.0, np.nan, 1.0], np.float32)
    new.view(np.uint32)[2] ^= 1
    publish(store, {"a": old})
    publish(store, {"a": new})
    found = store.diff("main@0", "main@1").tensors[0]
    assert (found.changed, found.largest_ulp) == (2, 1)


def test_layout_changes(store: Store) -> None:
    first = {
        "same": np.arange(10), "gone": np.arange(7), "shape": np.zeros((2, 3)), "dtype": np.zeros(4, np.int32),
        "changed": np.zeros(5, np.uint8), "empty": np.zeros((0, 2)),
    }  # fmt: skip
    second = {
        "new": np.arange(3), "same": np.arange(10), "shape": np.zeros((3, 2)), "dtype": np.zeros(4, np.float32),
        "changed": np.array([0, 0, 9, 0, 0], np.uint8), "empty": np.zeros((0, 2)),
    }  # fmt: skip
    publish(store, first)
    publish(store, second)
    found = {item.name: item for item in store.diff("main@0", "main@1").tensors}
    assert {name: item.status for name, item in found.items()} == {
        "new": "added", "same": "same", "shape": "altered", "dtype": "altered", "changed": "changed", "empty": "same",
        "gone": "removed",
    }  # fmt: skip
    assert list(found)[-1] == "gone"
    assert (found["new"].changed, found["gone"].changed, found["shape"].changed) == (3, 7, 6)
    assert (found["changed"].changed, found["changed"].largest_ulp) == (1, 9)
    assert found["new"].largest_ulp is None
    assert found["empty"].rate == 0.0
    back = {item.name: item.status for item in store.diff("main@1", "main@0").tensors}
    assert (back["new"], back["gone"]) == ("removed", "added")


def test_ties(store: Store) -> None:
    """A tensor that was an alias and has come apart is compared with what it was."""
    a = np.arange(100.0)
    publish(store, {"x": a, "y": a})
    publish(store, {"x": a, "y": a + 1})
    found = {item.name: item for item in store.diff("main@0", "main@1").tensors}
    assert (found["x"].changed, found["y"].changed) == (0, 100)
    back = {item.name: (item.status, item.changed) for item in store.diff("main@1", "main@0").tensors}
    assert back["x"] == ("same", 0)
    assert back.get("y", ("changed", 100)) == ("changed", 100)


def test_what_a_change_takes(store: Store) -> None:
    """The bytes told are those that the version stored, but for the indices of its partitions."""
    rng = np.random.default_rng(0)
    a = rng.integers(0, 2**16, 256 * 40, np.uint16)
    b = np.where(rng.random(a.size) < 0.05, a ^ 1, a).astype(np.uint16)
    publish(store, {"a": a})
    publish(store, {"a": b})
    (item,) = store.diff("main@0", "main@1").tensors
    partitions = store._catalog.contents(store._catalog.resolve("main@1")).partitions
    assert item.nbytes == sum(p.partition.nbytes - index_nbytes(p.n_chunks) for p in partitions)


def test_json(store: Store) -> None:
    import json

    publish(store, {"a": np.arange(3, dtype=np.int8)})
    publish(store, {"a": np.arange(3, dtype=np.int8) * 2})
    document = store.diff("main@0", "main@1").to_json()
    assert json.loads(json.dumps(document)) == {
        "a": "main@0", "b": "main@1", "changed": 2, "elements": 3,
        "tensors": [
            {"name": "a", "status": "changed", "dtype": "I8", "shape": [3], "elements": 3, "changed": 2,
             "rate": 2 / 3, "nbytes": document["tensors"][0]["nbytes"], "up": 2, "down": 0, "largest_ulp": 2,
             "steps": [1, 1], "rows_changed": 2, "top_rows": [{"row": 1, "changed": 1}, {"row": 2, "changed": 1}]}
        ],
    }  # fmt: skip
    assert Fraction(document["tensors"][0]["rate"]).limit_denominator(10) == Fraction(2, 3)
