"""Layouts against brute force, documents and headers there and back, damaged ones never read as something else."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcr_store.errors import DcrError, FormatError
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import DTYPES, n_elements, uint_dtype, width
from dcr_store.layout.layout import Layout, LayoutBuilder
from dcr_store.layout.tensors import as_bits, to_array
from dcr_store.targets.directory import DirectoryTarget
from dcr_store.targets.memory import MemoryTarget
from dcr_store.targets.safetensors_file import FILE_DTYPES, make_header, parse_header
from dcr_store.targets.space_file import SpaceFiles

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
thorough = settings(calm, max_examples=300)
shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=12)
rows = st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), shapes), max_size=12)


def layout_of(tensors: list[tuple[str, tuple[int, ...]]]) -> Layout:
    builder = LayoutBuilder()
    for i, (dtype, shape) in enumerate(tensors):
        builder.add(f"t{i}", dtype, shape)
    return builder.build()


def owners(layout: Layout, space: str) -> list[tuple[str, int] | None]:
    """Name tensor and element of every address, one by one."""
    addresses: list[tuple[str, int] | None] = [None] * layout.spaces[space]
    for entry in layout.tensors:
        if entry.space == space:
            for i in range(entry.n_elements):
                assert addresses[entry.start + i] is None
                addresses[entry.start + i] = (entry.name, i)
    return addresses


@calm
@given(rows, st.sampled_from(SPACES), st.integers(0, 3000), st.integers(0, 3000))
def test_pieces_are_those_of_brute_force(
    tensors: list[tuple[str, tuple[int, ...]]], space: str, start: int, n: int
) -> None:
    layout = layout_of(tensors)
    expected = owners(layout, space)[start : start + n]
    found: list[tuple[str, int] | None] = [None] * len(expected)
    last = -1
    for entry, first, stop, offset in layout.pieces(space, start, start + n):
        assert 0 <= first < stop <= entry.n_elements
        assert offset > last
        last = offset + stop - first - 1
        for i in range(first, stop):
            found[offset + i - first] = (entry.name, i)
    assert found == expected


@calm
@given(rows, st.integers(1, 300))
def test_occupied_is_that_of_brute_force(tensors: list[tuple[str, tuple[int, ...]]], chunk: int) -> None:
    layout = layout_of(tensors)
    for space in SPACES:
        addresses = owners(layout, space)
        expected = [
            sum(owner is not None for owner in addresses[i : i + chunk]) for i in range(0, len(addresses), chunk)
        ]
        assert layout.occupied(space, chunk).tolist() == expected
        assert len(addresses) * width(space) % 64 == 0


@calm
@given(st.lists(st.tuples(names, st.sampled_from(sorted(DTYPES)), shapes), max_size=8), st.data())
def test_documents_there_and_back(tensors: list[tuple[str, str, tuple[int, ...]]], data: st.DataObject) -> None:
    builder = LayoutBuilder()
    taken: list[str] = []
    for name, dtype, shape in tensors:
        if name not in taken:
            if taken and data.draw(st.booleans()):
                builder.add_alias(name, data.draw(st.sampled_from(taken)))
            else:
                builder.add(name, dtype, shape)
            taken.append(name)
    layout = builder.build()
    again = Layout.from_json_bytes(layout.to_json_bytes())
    assert again.tensors == layout.tensors
    assert again.sha256 == layout.sha256
    assert again.spaces == layout.spaces
    assert sorted(again.names()) == sorted(taken)


hostile_numbers = st.integers(-2, 70) | st.sampled_from([1.0, 1.5, -0.0, True, False, 1 << 62, 1 << 63, 1 << 64])
hostile_texts = st.sampled_from(["", "t0", "t1", "u8", "u16", "F32", "F4", "\0"])
hostile_lists = st.sampled_from([[], [0], [1], [2, 3], [0, 4], [[1]], [1.0], ["t0"], ["x"], [True]])
hostile_objects = st.sampled_from([{}, {"t0": 1}, {"dtype": "U8"}])
json_values = st.none() | hostile_numbers | hostile_texts | hostile_lists | hostile_objects


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


def changed(document: Any, data: st.DataObject) -> bytes:
    """Return a document with one value replaced or removed."""
    place = data.draw(st.sampled_from(places(document)[1:]))
    parent = document
    for key in place[:-1]:
        parent = parent[key]
    if data.draw(st.booleans()):
        parent[place[-1]] = data.draw(json_values)
    else:
        del parent[place[-1]]
    return json.dumps(document).encode()


@thorough
@given(rows, st.data())
def test_a_damaged_layout_is_refused_or_consistent(tensors: Any, data: st.DataObject) -> None:
    damaged = changed(json.loads(layout_of(tensors).to_json_bytes()), data)
    try:
        layout = Layout.from_json_bytes(damaged)
    except FormatError:
        return
    for space in SPACES:
        if layout.spaces[space] < 100_000:
            owners(layout, space)
    assert Layout.from_json_bytes(layout._encoded).tensors == layout.tensors


@thorough
@given(st.lists(st.tuples(st.sampled_from(sorted(FILE_DTYPES)), shapes), min_size=1, max_size=6), st.data())
def test_a_damaged_header_is_refused_or_one_that_the_library_reads(tensors: Any, data: st.DataObject) -> None:
    rows, nbytes = writable(tensors)
    header = make_header(rows, {"format": "pt"})
    document = changed(json.loads(header[8:]), data)
    raw = len(document).to_bytes(8, "little") + document
    try:
        parsed = parse_header(raw, len(raw) + nbytes, "f")
    except FormatError:
        return
    found = dict(safetensors.deserialize(raw + bytes(nbytes)))
    assert {t.name: (t.dtype, list(t.shape), t.end - t.begin) for t in parsed.tensors} == {
        name: (info["dtype"], info["shape"], len(info["data"])) for name, info in found.items()
    }


@calm
@given(st.binary(max_size=200), st.integers(0, 300))
def test_bytes_are_a_header_or_refused(data: bytes, n_data: int) -> None:
    for raw in (data, len(data).to_bytes(8, "little") + data, len(data).to_bytes(8, "little") + b"{" + data[1:]):
        try:
            parse_header(raw, len(raw) + n_data, "f")
        except FormatError:
            continue


def writable(tensors: list[tuple[str, tuple[int, ...]]]) -> tuple[list[tuple[str, str, tuple[int, ...]]], int]:
    """Name tensors and give packed ones whole bytes; return the bytes that they take, too."""
    named = []
    for i, (dtype, shape) in enumerate(tensors):
        named.append((f"t{i}", dtype, (*shape, 8) if DTYPES[dtype].packed else shape))
    return named, sum(n_elements(DTYPES[dtype], shape) * DTYPES[dtype].width for _, dtype, shape in named)


@calm
@given(
    st.lists(
        st.tuples(names.filter(lambda name: name != "__metadata__"), st.sampled_from(sorted(FILE_DTYPES)), shapes)
    ),
    st.none() | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.just("x"), max_size=3),
)
def test_headers_there_and_back_through_the_library(tensors: Any, metadata: dict[str, str] | None) -> None:
    unique = {name: (dtype, (*shape, 8) if DTYPES[dtype].packed else shape) for name, dtype, shape in tensors}
    header = make_header([(name, *rest) for name, rest in unique.items()], metadata)
    nbytes = sum(n_elements(DTYPES[dtype], shape) * DTYPES[dtype].width for dtype, shape in unique.values())
    content = header + np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).tobytes()
    parsed = parse_header(header, len(content), "f")
    found = dict(safetensors.deserialize(content))
    assert parsed.metadata == (metadata or {})
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in parsed.tensors} == unique
    assert {name: (info["dtype"], tuple(info["shape"])) for name, info in found.items()} == unique
    for tensor in parsed.tensors:
        assert content[tensor.begin : tensor.end] == bytes(found[tensor.name]["data"])


@calm
@given(st.sampled_from(sorted(DTYPES)), shapes, st.randoms())
def test_bits_there_and_back(dtype: str, shape: tuple[int, ...], random: Any) -> None:
    row = DTYPES[dtype]
    bits = np.frombuffer(random.randbytes(n_elements(row, shape) * row.width), uint_dtype(row.space))
    result = as_bits("a", to_array(bits, dtype, shape))
    assert result.bits.tobytes() == bits.tobytes()
    assert row.packed or (result.dtype, result.shape) == (dtype, shape)


@settings(calm, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(FILE_DTYPES)), shapes), min_size=1, max_size=12),
    st.integers(1, 100),
    st.randoms(),
    st.lists(st.integers(0, 11), max_size=3),
)
def test_all_targets_hold_the_same(tensors: Any, chunk: int, random: Any, tied: list[int]) -> None:
    """Files in any order and split, with further copies under other names; space files; memory."""
    named, _ = writable(tensors)
    builder = LayoutBuilder()
    for row in named:
        builder.add(*row)
    copies = list(named)
    for i, index in enumerate(tied):
        name, dtype, shape = named[index % len(named)]
        builder.add_alias(f"alias{i}", name)
        copies.append((f"alias{i}", dtype, shape))
    layout = builder.build()
    random.shuffle(copies)
    cut = random.randint(0, len(copies))
    files = []
    for i, part in enumerate((copies[:cut], copies[cut:])):
        header = make_header(part)
        nbytes = sum(n_elements(DTYPES[dtype], shape) * DTYPES[dtype].width for _, dtype, shape in part)
        files.append((f"{i}.safetensors", header, len(header) + nbytes))
    with tempfile.TemporaryDirectory() as root:
        memory = MemoryTarget(layout, chunk)
        with (
            DirectoryTarget.create(Path(root) / "d", layout, files, chunk) as directory,
            SpaceFiles(Path(root) / "s", layout, chunk, create=True) as spaces,
        ):
            targets: list[Any] = [memory, directory, spaces]
            every = [(space, i) for space in SPACES for i in range(layout.n_chunks(space, chunk))]
            for space, i in [*every, *every[::-2]]:
                bits = np.frombuffer(random.randbytes(chunk * width(space)), uint_dtype(space))
                for target in targets:
                    target.write_chunk(space, i, bits)
            for space, i in every:
                outs = [np.full(chunk, 9, uint_dtype(space)) for _ in targets]
                for target, out in zip(targets, outs, strict=True):
                    target.read_chunk(space, i, out)
                assert outs[0].tobytes() == outs[1].tobytes() == outs[2].tobytes() == spaces.view(space, i).tobytes()
        held = memory.tensors()
        for path, header, nbytes in files:
            content = (Path(root) / "d" / path).read_bytes()
            assert len(content) == nbytes
            for tensor in parse_header(header, nbytes, path).tensors:
                assert content[tensor.begin : tensor.end] == held[tensor.name].bits.tobytes()


@calm
@given(st.lists(json_values))
def test_no_shape_is_a_traceback(shape: list[Any]) -> None:
    for row in DTYPES.values():
        try:
            assert n_elements(row, shape) >= 0
        except DcrError:
            continue
