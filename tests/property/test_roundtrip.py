"""What comes back equals what went in, byte for byte: every dtype, codec, backend, way in and way out."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from states import raw

import dcr_store
from dcr_store.store import Store

DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "U16": np.uint16,
    "I16": np.int16,
    "F32": np.float32,
    "U32": np.uint32,
    "I32": np.int32,
    "F64": np.float64,
    "U64": np.uint64,
    "I64": np.int64,
    "C64": np.complex64,
    "C128": np.complex128,
}
TORCH = {
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "C64": torch.complex64,
    "C128": torch.complex128,
}
# Signs of zero, ends of the range, subnormals, infinities, NaNs with payloads: as the bits of the widest real part.
EDGES = {
    1: [0x00, 0x80, 0x01, 0x81, 0x7F, 0xFF, 0x7C, 0xFC, 0x7E, 0x38, 0x3C],
    2: [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7F81, 0xFFC1, 0x7C00, 0x7C01, 0xFE02, 0x3F80, 0x007F],
    4: [0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x7F800000, 0x7F800001, 0xFFC00001, 0x7FFFFFFF, 0x3F800000],
    8: [0, 1 << 63, 1, (1 << 63) + 1, 0x7FF0000000000000, 0x7FF0000000000001, 0xFFF8000000000001, 2**64 - 1],
}
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (7,), (3, 5), (2, 3, 4), (129,), (17, 33)]
CHUNK = 128


def array_of(dtype: str, data: bytes, shape: tuple[int, ...]) -> Any:
    return np.frombuffer(bytearray(data), DTYPES[dtype]).reshape(shape)


def random_bytes(dtype: str, n_values: int, rng: np.random.Generator) -> bytes:
    """Return any bits at all, edges among them; of bools 0 and 1."""
    item = np.dtype(DTYPES[dtype]).itemsize
    if dtype == "BOOL":
        return bytes(rng.integers(0, 2, n_values, np.uint8).tobytes())
    width = min(item, 8)
    lanes = rng.integers(0, 1 << 8 * width, n_values * item // width, np.uint64, endpoint=False) if width < 8 else (
        rng.integers(0, 2**64 - 1, n_values * item // width, np.uint64, endpoint=True)
    )  # fmt: skip
    some = rng.random(lanes.size) < 0.3
    lanes[some] = rng.choice(np.array(EDGES[width], np.uint64), int(some.sum()))
    return lanes.astype(f"<u{width}").tobytes()


def random_array(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    return array_of(dtype, random_bytes(dtype, int(np.prod(shape, dtype=int)), rng), shape)


def changed(dtype: str, array: Any, rng: np.random.Generator, rate: float = 0.1) -> Any:
    """Return an array in which some elements have other bits."""
    other = random_array(dtype, array.shape, rng)
    return np.where(rng.random(array.shape) < rate, other, array).astype(array.dtype) if array.size else array


def as_torch(dtype: str, array: Any) -> torch.Tensor:
    octets = (
        torch.frombuffer(bytearray(raw(array)), dtype=torch.uint8) if array.size else torch.empty(0, dtype=torch.uint8)
    )
    kind = TORCH.get(dtype) or getattr(torch, np.dtype(DTYPES[dtype]).name)
    return octets.view(kind).reshape(array.shape)


def views(name: str, dtype: str, array: Any) -> dict[str, Any]:
    """Return the same values in memory of other orders, as numpy arrays."""
    found = {f"{name}.fortran": np.asfortranarray(array)}
    if array.ndim >= 1 and array.size:
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        wide[..., ::2] = array
        found[f"{name}.strided"] = wide[..., ::2]
        found[f"{name}.reversed"] = np.ascontiguousarray(array[::-1])[::-1]
        found[f"{name}.broadcast"] = np.broadcast_to(array[..., :1], array.shape)
    if array.ndim >= 2:
        found[f"{name}.transposed"] = np.ascontiguousarray(array.T).T
    little = array.dtype.newbyteorder("<")
    if array.dtype.itemsize > 1 and dtype != "BF16" and little.newbyteorder(">") != little:
        found[f"{name}.big"] = array.byteswap().view(array.dtype.newbyteorder(">"))
    offset = bytearray(b"x" + raw(array))
    if array.size:
        found[f"{name}.unaligned"] = np.frombuffer(offset, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    return found


@dataclass
class State:
    """Tensors as they go in, and their dtype, shape and bytes as they have to come out."""

    given: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, tuple[str, tuple[int, ...], bytes]] = field(default_factory=dict)

    def add(self, name: str, dtype: str, tensor: Any, like: Any) -> None:
        self.given[name] = tensor
        self.expected[name] = (dtype, tuple(like.shape), raw(np.asarray(like, like.dtype.newbyteorder("<"))))


def numpy_state(dtypes: list[str], rng: np.random.Generator, before: State | None = None) -> State:
    state = State()
    for dtype in dtypes:
        for shape in SHAPES:
            name = f"{dtype}.{'x'.join(map(str, shape))}"
            array = random_array(dtype, shape, rng)
            if before is not None:
                array = changed(dtype, array_of(dtype, before.expected[name][2], shape), rng)
            state.add(name, dtype, array, array)
            for other, view in views(name, dtype, array).items():
                state.add(other, dtype, view, np.ascontiguousarray(view).reshape(view.shape))
    return state


def torch_state(dtypes: list[str], rng: np.random.Generator, before: State | None = None) -> State:
    state = State()
    for dtype in dtypes:
        for shape in SHAPES:
            name = f"{dtype}.{'x'.join(map(str, shape))}"
            array = random_array(dtype, shape, rng)
            if before is not None:
                array = changed(dtype, array_of(dtype, before.expected[name][2], shape), rng)
            state.add(name, dtype, as_torch(dtype, array), array)
            if array.ndim >= 2:
                transposed = as_torch(dtype, np.ascontiguousarray(array.T))
                state.add(f"{name}.t", dtype, transposed.permute(*range(array.ndim)[::-1]), array)
            if array.ndim and array.size:
                first = np.ascontiguousarray(array[..., :1])
                expanded = np.broadcast_to(first, array.shape)
                state.add(
                    f"{name}.expanded",
                    dtype,
                    as_torch(dtype, first).expand(array.shape),
                    np.ascontiguousarray(expanded),
                )
                doubled = np.repeat(array, 2, axis=-1)
                state.add(f"{name}.strided", dtype, as_torch(dtype, doubled)[..., ::2], array)
    return state


def publish(store: Store, state: State, names: list[str] | None = None) -> None:
    with store.begin() as transaction:
        for name in names or list(state.given):
            transaction.write(name, state.given[name])


def assert_numpy(found: dict[str, Any], state: State) -> None:
    assert set(found) == set(state.expected)
    for name, (dtype, shape, data) in state.expected.items():
        array = found[name]
        assert (array.dtype, array.shape) == (np.dtype(DTYPES[dtype]).newbyteorder("<"), shape), name
        assert raw(array) == data, name


def assert_torch(found: dict[str, Any], state: State) -> None:
    assert set(found) == set(state.expected)
    for name, (dtype, shape, data) in state.expected.items():
        tensor = found[name]
        assert tensor.dtype == (TORCH.get(dtype) or getattr(torch, np.dtype(DTYPES[dtype]).name)), name
        assert tuple(tensor.shape) == shape, name
        octets = (
            tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        )
        assert octets.numpy().tobytes() == data, name


def file_tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Parse a safetensors file by the words of its format."""
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n])
    body = memoryview(data)[8 + n :]
    return {
        name: (row["dtype"], tuple(row["shape"]), bytes(body[slice(*row["data_offsets"])]))
        for name, row in header.items()
        if name != "__metadata__"
    }


Make = Callable[..., Store]


@pytest.fixture(params=["memory", "directory", "s3"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Create stores in one backend."""
    made: list[Store] = []

    def create(codec: str, chunk_elements: int = CHUNK) -> Store:
        options = None
        if request.param == "memory":
            url = f"memory://{secrets.token_hex(8)}"
        elif request.param == "directory":
            url = str(tmp_path / f"store{len(made)}")
        else:
            server = request.getfixturevalue("seaweed")
            url, options = server.new_url(), server.storage_options
        store = dcr_store.create(url, codec=codec, chunk_elements=chunk_elements, storage_options=options)
        made.append(store)
        return store

    yield create
    for store in made:
        store.close()


FILE_DTYPES = [name for name in DTYPES if name != "C128"]


@pytest.mark.parametrize("codec", ["dcr.delta", "portable"])
def test_every_dtype_on_every_backend(make: Make, codec: str, tmp_path: Path) -> None:
    """numpy in; read, torch, checkout, pull forwards and back out."""
    rng = np.random.default_rng(1)
    store = make(codec)
    states = [numpy_state(FILE_DTYPES, rng)]
    states += [numpy_state(FILE_DTYPES, rng, states[0])]
    states += [numpy_state(FILE_DTYPES, rng, states[1])]
    for state in states:
        publish(store, state)
    assert [info.base for info in store.log()] == [None, "main@0", "main@1"]
    for number, state in enumerate(states):
        assert_numpy(store.read(f"main@{number}"), state)
    assert_torch(store.read("main@2", framework="torch"), states[2])
    store.checkout("main@1", tmp_path / "out")
    assert file_tensors(tmp_path / "out" / "model.safetensors") == states[1].expected
    for number in (2, 0, 1):
        store.pull(tmp_path / "out", f"main@{number}")
        assert file_tensors(tmp_path / "out" / "model.safetensors") == states[number].expected


@pytest.mark.parametrize("codec", ["dcr.delta", "portable"])
def test_every_dtype_from_torch(codec: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", codec=codec, chunk_elements=CHUNK) as store:
        states = [torch_state(list(DTYPES), rng)]
        states += [torch_state(list(DTYPES), rng, states[0])]
        for state in states:
            publish(store, state)
        for number, state in enumerate(states):
            assert_numpy(store.read(f"main@{number}"), state)
            assert_torch(store.read(f"main@{number}", framework="torch"), state)
        # The same bits from numpy and in another order are no change at all.
        arrays = State(
            {name: array_of(dtype, data, shape) for name, (dtype, shape, data) in states[1].expected.items()}
        )
        publish(store, arrays, list(arrays.given)[::-1])
        assert (store.log()[-1].changed, store.log()[-1].base) == (0, "main@1")


@pytest.mark.parametrize("chunk_elements", [64, 1 << 14, 1 << 20])
@pytest.mark.parametrize("codec", ["dcr.delta", "portable"])
def test_every_size_of_chunk(codec: str, chunk_elements: int) -> None:
    rng = np.random.default_rng(3)
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", codec=codec, chunk_elements=chunk_elements) as store:
        states = [numpy_state(list(DTYPES), rng)]
        states += [numpy_state(list(DTYPES), rng, states[0])]
        for state in states:
            publish(store, state)
        for number, state in enumerate(states):
            assert_numpy(store.read(f"main@{number}"), state)


@pytest.mark.parametrize("rate", [0.0, 0.001, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("codec", ["dcr.delta", "portable"])
def test_every_rate_of_change(codec: str, rate: float) -> None:
    rng = np.random.default_rng(4)
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", codec=codec, chunk_elements=4096) as store:
        state = State()
        for dtype in DTYPES:
            array = random_array(dtype, (5001,), rng)
            state.add(dtype, dtype, array, array)
        publish(store, state)
        after = State()
        for dtype in DTYPES:
            array = changed(dtype, state.given[dtype], rng, rate)
            after.add(dtype, dtype, array, array)
        publish(store, after)
        assert_numpy(store.read("main@0"), state)
        assert_numpy(store.read("main@1"), after)


def test_tied_tensors(tmp_path: Path) -> None:
    with dcr_store.create(tmp_path / "store", chunk_elements=64) as store:
        a, b = np.arange(500, dtype=np.float32), np.arange(500, dtype=np.float32)
        for i, group in enumerate(
            ({"a": a, "b": b, "tied": a}, {"tied": a, "a": a, "b": b}, {"b": b, "tied": b, "a": a})
        ):
            a += 1
            state = State()
            for name, array in group.items():
                state.add(name, "F32", array.copy() if i == 2 else array, array.copy())
            publish(store, state)
            assert_numpy(store.read(f"main@{i}"), state)
            store.pull(tmp_path / "out", f"main@{i}")
            assert file_tensors(tmp_path / "out" / "model.safetensors") == state.expected
        assert [info.base for info in store.log()] == [None, "main@0", None]


def test_fifty_thousand_tiny_tensors() -> None:
    with dcr_store.create(f"memory://{secrets.token_hex(8)}") as store:
        values = np.arange(50_000, dtype=np.float32)
        for i in range(2):
            with store.begin() as transaction:
                for number, value in enumerate(values[: 50_000 if i == 0 else None]):
                    transaction.write(f"layer.{number}.scale", value)
            found = store.read()
            assert np.array([found[f"layer.{n}.scale"] for n in range(50_000)]).tobytes() == values.tobytes()
            values = values * np.float32(1.5)
        assert store.log()[-1].base == "main@0"
        assert store.read("main@0", ["layer.49999.scale"])["layer.49999.scale"] == 49_999


@pytest.mark.parametrize("codec", ["dcr.delta", "portable"])
def test_snapshots_of_training(snapshots: list[Path], codec: str, tmp_path: Path) -> None:
    with dcr_store.create(tmp_path / "store", codec=codec) as store:
        for path in snapshots:
            with store.begin() as transaction:
                transaction.write_checkpoint(path)
        for number in (len(snapshots) - 1, 0, len(snapshots) // 2):
            path = snapshots[number]
            store.pull(tmp_path / "out", f"main@{number}")
            if path.is_file():
                assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
            file = path if path.is_file() else path / "model.safetensors"
            found = store.read(f"main@{number}")
            assert {name: raw(array) for name, array in found.items()} == {
                name: data for name, (_, _, data) in file_tensors(file).items()
            }
        assert all(info.base for info in store.log()[1:])


# ---------------------------------------------------------------------- random histories

names = st.sampled_from(["a", "b", "c", "d.weight", "é", "x" * 40])
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
Tensors = dict[str, tuple[str, Any]]


@st.composite
def histories(draw: st.DrawFn) -> list[list[tuple[str, str, Any]]]:
    """Draw versions, each a list of (name, dtype, array) in the order of writing; tied names share an array."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tensors: Tensors = {}
    versions = []

    def new(shape: tuple[int, ...] | None = None) -> tuple[str, Any]:
        dtype = draw(st.sampled_from(list(DTYPES)))
        return dtype, random_array(dtype, draw(shapes) if shape is None else shape, rng)

    for _ in range(draw(st.integers(1, 5))):
        for _ in range(draw(st.integers(0 if tensors else 1, 3))):
            action = draw(
                st.sampled_from(["change", "change", "change", "add", "remove", "reshape", "dtype", "tie", "untie"])
            )
            name = draw(names)
            if action == "add" or not tensors:
                tensors[name] = new()
                continue
            name = draw(st.sampled_from(sorted(tensors)))
            dtype, array = tensors[name]
            if action == "change":
                with np.errstate(all="ignore"):
                    other = changed(dtype, array, rng, draw(st.sampled_from([0.0, 0.2, 1.0])))
                tied = [key for key, (_, held) in tensors.items() if held is array]
                tensors.update(dict.fromkeys(tied, (dtype, other)))
            if action == "remove" and len(tensors) > 1:
                del tensors[name]
            if action == "reshape":
                tensors[name] = (
                    dtype,
                    array.reshape(draw(st.sampled_from([(-1,), (1, array.size), (array.size, 1, 1)]))),
                )
            if action == "dtype":
                tensors[name] = new(array.shape)
            if action == "tie":
                tensors[draw(names)] = (dtype, array)
            if action == "untie":
                tensors[name] = (dtype, array.copy())
        order = draw(st.permutations(sorted(tensors)))
        versions.append([(name, *tensors[name]) for name in order])
    return versions


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(histories(), st.sampled_from(["dcr.delta", "portable"]), st.booleans(), st.booleans())
def test_random_histories(versions: list[list[tuple[str, str, Any]]], codec: str, use_torch: bool, reuse: bool) -> None:
    """Random tensors, changes, layouts, orders, ties; buffers used again between writes."""
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", codec=codec, chunk_elements=64) as store:
        expected: list[State] = []
        for version in versions:
            state, buffers = State(), {}
            with store.begin() as transaction:
                for name, dtype, array in version:
                    state.add(name, dtype, array, array)
                    tensor = array
                    if use_torch:
                        # One torch tensor for all names of one array, so that ties are seen.
                        tensor = buffers.setdefault(id(array), as_torch(dtype, array))
                    elif reuse:
                        tensor = buffers.setdefault((dtype, array.shape), np.empty(array.shape, array.dtype))
                        tensor[...] = array
                    transaction.write(name, tensor)
            before = expected[-1].expected if expected else {}
            same = {n: row[:2] for n, row in before.items()} == {n: row[:2] for n, row in state.expected.items()}
            ties = (
                [
                    [e.name, *e.aliases]
                    for e in store._catalog.layout(
                        store._catalog.resolve(f"main@{len(expected) - 1}").row.layout
                    ).tensors
                ]
                if same
                else []
            )
            kept = same and all(len({state.expected[name][2] for name in group}) == 1 for group in ties)
            assert (store.log()[-1].base is not None) == kept, "an anchor exactly where the layout is another one"
            expected.append(state)
        for number, state in enumerate(expected):
            assert_numpy(store.read(f"main@{number}"), state)
        assert_torch(store.read(framework="torch"), expected[-1])
        assert store.verify(deep=True).problems == []
