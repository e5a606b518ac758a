"""Weight files in place: chunks there and back, several copies of a tensor, and files that may not be touched."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from dcr_store.errors import DcrError, FormatError, IntegrityError, InvalidInputError, NotFoundError, StorageError
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import DTYPES, n_elements, uint_dtype
from dcr_store.layout.layout import Layout, LayoutBuilder
from dcr_store.targets import file_bytes
from dcr_store.targets.checkpoint import open_checkpoint
from dcr_store.targets.directory import DirectoryTarget, FileProblem, WeightFile
from dcr_store.targets.safetensors_file import make_header, parse_header

CHUNK = 64
Row = tuple[str, str, tuple[int, ...]]
ROWS: list[Row] = [
    ("embed", "BF16", (40, 5)),
    ("norm", "F32", (7,)),
    ("empty", "BF16", (0,)),
    ("q", "BF16", (33,)),
    ("flag", "BOOL", (3,)),
    ("scale", "F64", ()),
    ("packed", "F4", (6,)),
    ("k", "BF16", (64,)),
    ("v", "BF16", (64,)),
]


def layout_of(rows: list[Row], aliases: dict[str, str] | None = None) -> Layout:
    builder = LayoutBuilder()
    for row in rows:
        builder.add(*row)
    for alias, name in (aliases or {}).items():
        builder.add_alias(alias, name)
    return builder.build()


def weight_file(path: str, rows: list[Row]) -> WeightFile:
    header = make_header(rows)
    data = sum(n_elements(DTYPES[dtype], shape) * DTYPES[dtype].width for _, dtype, shape in rows)
    return WeightFile(path, header, len(header) + data)


def unaligned_file(path: str) -> WeightFile:
    """A file whose elements are at odd offsets, in an order of its own."""
    header = (
        b'{"flag":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]},"v":{"dtype":"BF16","shape":[64],"data_offsets":[3,'
        b'131]},"k":{"dtype":"BF16","shape":[64],"data_offsets":[131,259]}}'
    )
    return WeightFile(path, len(header).to_bytes(8, "little") + header, 8 + len(header) + 259)


def random_chunk(space: str, seed: int = 0) -> Any:
    uint = uint_dtype(space)
    return np.random.default_rng(seed).integers(1, 256, CHUNK * uint.itemsize, np.uint8).view(uint)


@pytest.fixture
def target(tmp_path: Path) -> Any:
    files = [
        weight_file("model-1.safetensors", ROWS[:3]),
        unaligned_file("sub/model-2.safetensors"),
        weight_file("model-3.safetensors", [ROWS[6], ROWS[5], ROWS[3]]),
    ]
    with DirectoryTarget.create(tmp_path / "model", layout_of(ROWS), files, CHUNK) as target:
        yield target


def tensors_in(target: DirectoryTarget) -> dict[str, Any]:
    """Read the tensors from the files, past the code under test."""
    found = {}
    for file in target.files:
        content = (target.root / file.path).read_bytes()
        for tensor in parse_header(file.header, file.nbytes, file.path).tensors:
            found[tensor.name] = content[tensor.begin : tensor.end]
    return found


def test_chunks_there_and_back(target: DirectoryTarget) -> None:
    state = {}
    for space in SPACES:
        for chunk in range(target.layout.n_chunks(space, CHUNK)):
            state[space, chunk] = random_chunk(space, chunk)
            target.write_chunk(space, chunk, state[space, chunk])
    assert target.check() == []
    for (space, chunk), bits in state.items():
        expected = np.zeros_like(bits)
        for piece in target.layout.pieces(space, chunk * CHUNK, (chunk + 1) * CHUNK):
            place = slice(piece.offset, piece.offset + piece.tensor_stop - piece.tensor_start)
            expected[place] = bits[place]
        out = np.full_like(bits, 77)
        target.read_chunk(space, chunk, out)
        assert out.tobytes() == expected.tobytes()
    found = tensors_in(target)
    for entry in target.layout.tensors:
        whole = np.concatenate([state[entry.space, i] for i in range(target.layout.n_chunks(entry.space, CHUNK))])
        assert found[entry.name] == whole[entry.start : entry.stop].tobytes()
    target.sync()


def test_a_new_directory_reads_as_zeros_and_takes_no_space(tmp_path: Path) -> None:
    rows: list[Row] = [("a", "BF16", (1 << 29,))]
    with DirectoryTarget.create(tmp_path / "x" / "y", layout_of(rows), [weight_file("m", rows)], 1 << 20) as target:
        out = np.ones(1 << 20, "<u2")
        target.read_chunk("u16", 511, out)
        assert not out.any()
        assert (target.root / "m").stat().st_size > 1 << 30
        assert (target.root / "m").stat().st_blocks * 512 < 1 << 20
        out[:] = 5
        target.write_chunk("u16", 511, out)
        assert target.check() == []


def test_chunks_beyond_32_bits(tmp_path: Path) -> None:
    rows: list[Row] = [("a", "U8", ((1 << 32) + 5,)), ("b", "U8", (3,))]
    chunk = 1 << 20
    with DirectoryTarget.create(tmp_path, layout_of(rows), [weight_file("m", rows)], chunk) as target:
        bits = np.arange(chunk, dtype=np.uint8)
        target.write_chunk("u8", 4096, bits)
        out = np.empty_like(bits)
        target.read_chunk("u8", 4096, out)
        assert out[:5].tolist() == [0, 1, 2, 3, 4]
        assert out[64:67].tolist() == [64, 65, 66]
        assert not out[5:64].any()
        assert not out[67:].any()
        with (tmp_path / "m").open("rb") as file:
            file.seek(-8, os.SEEK_END)
            assert list(file.read()) == [0, 1, 2, 3, 4, 64, 65, 66]


def test_a_checkpoint_can_be_its_own_target(tmp_path: Path) -> None:
    arrays = {f"t{i}": np.random.default_rng(i).standard_normal((i, 7)).astype(np.float16) for i in range(9)}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    builder = LayoutBuilder()
    with open_checkpoint(tmp_path) as checkpoint:
        for name, (_, tensor) in checkpoint.tensors.items():
            builder.add(name, tensor.dtype, tensor.shape)
        files = [(file.path, file.header.raw, file.header.nbytes) for file in checkpoint.files]
    with DirectoryTarget(tmp_path, builder.build(), files, CHUNK) as target:
        assert target.check() == []
        for chunk in range(target.layout.n_chunks("u16", CHUNK)):
            bits = np.empty(CHUNK, "<u2")
            target.read_chunk("u16", chunk, bits)
            target.write_chunk("u16", chunk, bits ^ 0xFFFF)
        target.sync()
    for name, array in safetensors.numpy.load_file(tmp_path / "model.safetensors").items():
        assert np.array_equal(array.view("<u2"), arrays[name].view("<u2") ^ 0xFFFF)


def test_many_threads(target: DirectoryTarget) -> None:
    def fill(chunk: int) -> None:
        for round_ in range(20):
            target.write_chunk("u16", chunk, random_chunk("u16", round_))
            target.read_chunk("u16", chunk, np.empty(CHUNK, "<u2"))

    n_chunks = target.layout.n_chunks("u16", CHUNK)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fill, range(n_chunks)))
    out, expected = np.empty(CHUNK, "<u2"), random_chunk("u16", 19)
    for chunk in range(n_chunks):
        target.read_chunk("u16", chunk, out)
        assert set((out ^ expected).tolist()) <= {0, *(expected[out == 0]).tolist()}


@pytest.mark.parametrize(
    ("space", "chunk", "bits", "match"),
    [
        ("u16", -1, np.zeros(CHUNK, "<u2"), "no chunk -1"),
        ("u16", 99, np.zeros(CHUNK, "<u2"), "no chunk 99"),
        ("u32", 1, np.zeros(CHUNK, "<u4"), "no chunk 1"),
        ("u128", 0, np.zeros(CHUNK, "<u4"), "no such space"),
        ("u16", 0, np.zeros(CHUNK, "<u4"), "cannot hold chunk 0"),
        ("u16", 0, np.zeros(CHUNK - 1, "<u2"), "cannot hold chunk 0"),
        ("u16", 0, np.zeros(2 * CHUNK, "<u2")[::2], "contiguous"),
        ("u16", 0, np.zeros(CHUNK, ">u2"), "cannot hold chunk 0"),
    ],
)
def test_chunks_that_are_none(target: DirectoryTarget, space: str, chunk: int, bits: Any, match: str) -> None:
    with pytest.raises(InvalidInputError, match=match):
        target.read_chunk(space, chunk, bits)
    with pytest.raises(InvalidInputError, match=match):
        target.write_chunk(space, chunk, bits)


def test_read_only_arrays_are_written_from_and_not_to(target: DirectoryTarget) -> None:
    bits = random_chunk("u16")
    bits.flags.writeable = False
    target.write_chunk("u16", 0, bits)
    with pytest.raises(InvalidInputError, match="writable"):
        target.read_chunk("u16", 0, bits)


# ---------------------------------------------------------------------------------------------- several copies


TIED: list[Row] = [("embed", "BF16", (50,)), ("norm", "BF16", (20,))]
ALIASES = {"head": "embed", "third": "embed"}


def tied(tmp_path: Path, *names: str) -> DirectoryTarget:
    rows: list[Row] = [(name, "BF16", (20,) if name == "norm" else (50,)) for name in names]
    return DirectoryTarget.create(tmp_path, layout_of(TIED, ALIASES), [weight_file("m", rows)], CHUNK)


@pytest.mark.parametrize("names", [("head", "norm"), ("norm", "embed"), ("third", "head", "norm", "embed")])
def test_all_copies_of_tied_tensors_are_written(tmp_path: Path, names: tuple[str, ...]) -> None:
    bits = random_chunk("u16")
    with tied(tmp_path, *names) as target:
        target.write_chunk("u16", 0, bits)
        found = tensors_in(target)
        assert {found[name] for name in names if name != "norm"} == {bits[:50].tobytes()}
        out = np.empty_like(bits)
        target.read_chunk("u16", 0, out)
        assert out[:50].tolist() == bits[:50].tolist()


@pytest.mark.parametrize("stale", ["embed", "head", "third"])
def test_a_stale_copy_does_not_pass_for_either(tmp_path: Path, stale: str) -> None:
    bits = random_chunk("u16")
    with tied(tmp_path, "head", "embed", "third", "norm") as target:
        target.write_chunk("u16", 0, bits)
        [tensor] = [t for t in parse_header(*target.files[0][1:], "m").tensors if t.name == stale]
        for other in (bits[7] ^ 1, bits[7] ^ 2, bits[7] ^ 3, 0, 1, 2, 3):
            with (tmp_path / "m").open("r+b") as file:
                file.seek(tensor.begin + 14)
                file.write(np.array([other], "<u2").tobytes())
            out = np.empty_like(bits)
            target.read_chunk("u16", 0, out)
            # Whatever a version has in that place, these are not its bits.
            assert np.delete(out, 7)[:49].tolist() != np.delete(bits, 7)[:49].tolist()
        target.write_chunk("u16", 0, bits)
        target.read_chunk("u16", 0, out)
        assert out[:50].tolist() == bits[:50].tolist()


@pytest.mark.parametrize("order", [("embed", "head", "third"), ("head", "third", "embed"), ("third", "embed", "head")])
def test_the_copy_that_counts_is_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, ...]
) -> None:
    names = []
    with tied(tmp_path, *order, "norm") as target:
        by_offset = {tensor.begin: tensor.name for tensor in parse_header(*target.files[0][1:], "m").tensors}
        pwritev = os.pwritev

        def spy(fd: int, buffers: Any, offset: int) -> int:
            names.append(by_offset[offset])
            return pwritev(fd, buffers, offset)

        monkeypatch.setattr(os, "pwritev", spy)
        target.write_chunk("u16", 0, random_chunk("u16"))
    assert sorted(names[:2]) == ["head", "third"]
    assert names[2] == "embed"


def test_tensors_that_follow_each_other_in_different_files(tmp_path: Path) -> None:
    """Neighbours in the space, and the offset of the second is where the first one ends - in another file."""
    rows: list[Row] = [(name, "U8", (64,)) for name in "abcd"]
    files = [weight_file("0", [rows[0], rows[2]]), weight_file("1", [rows[3], rows[1]])]
    assert len(files[0].header) == len(files[1].header)
    bits = np.arange(256, dtype=np.uint8)
    with DirectoryTarget.create(tmp_path, layout_of(rows), files, 256) as target:
        target.write_chunk("u8", 0, bits)
        assert {name: data[0] for name, data in tensors_in(target).items()} == {"a": 0, "b": 64, "c": 128, "d": 192}


# ---------------------------------------------------------------------------------------------- files and layout


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (ROWS[:-1], "^v: is in no file"),
        ([*ROWS, ("extra", "F32", ())], "m#extra.*expected no such tensor, found F32"),
        ([*ROWS[:-1], ("v", "BF16", (8, 8))], r"m#v.*expected BF16 \[64\], found BF16 \[8, 8\]"),
        ([*ROWS[:-1], ("v", "F16", (64,))], r"m#v.*expected BF16 \[64\], found F16 \[64\]"),
    ],
)
def test_files_of_another_layout_are_refused(tmp_path: Path, rows: list[Row], match: str) -> None:
    with pytest.raises(InvalidInputError, match=match):
        DirectoryTarget(tmp_path, layout_of(ROWS), [weight_file("m", rows)], CHUNK)


def test_malformed_files_are_refused(tmp_path: Path) -> None:
    file = weight_file("model.safetensors", ROWS)
    with pytest.raises(FormatError, match=r"model\.safetensors.*after its last tensor"):
        DirectoryTarget(tmp_path, layout_of(ROWS), [(file.path, file.header, file.nbytes + 1)], CHUNK)
    with pytest.raises(InvalidInputError, match="same path"):
        DirectoryTarget(tmp_path, layout_of(ROWS), [file, file], CHUNK)
    with pytest.raises(NotFoundError, match="no such directory"):
        DirectoryTarget(tmp_path / "missing", layout_of(ROWS), [file], CHUNK)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match="is not a directory"):
        DirectoryTarget(tmp_path / "file", layout_of(ROWS), [file], CHUNK)
    with pytest.raises(StorageError, match="cannot be made"):
        DirectoryTarget.create(tmp_path / "file" / "x", layout_of(ROWS), [file], CHUNK)


def test_a_layout_without_values(tmp_path: Path) -> None:
    for rows in ([], [("e", "F32", (0,))]):
        with DirectoryTarget.create(tmp_path, layout_of(rows), [weight_file(f"m{len(rows)}", rows)], CHUNK) as target:
            assert target.check() == []
            target.sync()


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a/..",
        ".",
        "",
        "a//b",
        "a/",
        ".dcr/marker.json",
        "a/.dcr/x",
        "a\\b",
        "a\0",
        "a\nb",
        "\udcff",
        "x" * 256,
    ],
)
def test_paths_that_lead_elsewhere(tmp_path: Path, path: str) -> None:
    file = weight_file(path, ROWS)
    with pytest.raises(InvalidInputError, match="cannot be a file of a checkpoint"):
        DirectoryTarget.create(tmp_path / "m", layout_of(ROWS), [file], CHUNK)
    assert list((tmp_path / "m").iterdir()) == []


def test_links_that_lead_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    root = tmp_path / "model"
    root.mkdir()
    (root / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidInputError, match="outside of its directory"):
        DirectoryTarget.create(root, layout_of(ROWS), [weight_file("sub/m", ROWS)], CHUNK)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (root / "inner").mkdir()
    (root / "link").symlink_to("inner")
    DirectoryTarget.create(root, layout_of(ROWS), [weight_file("link/m", ROWS)], CHUNK).close()
    assert (root / "inner" / "m").is_file()


def test_a_link_to_the_directory_is_resolved_once(tmp_path: Path) -> None:
    file = weight_file("m", ROWS)
    for name in ("one", "two"):
        DirectoryTarget.create(tmp_path / name, layout_of(ROWS), [file], CHUNK).close()
    (tmp_path / "current").symlink_to("one")
    with DirectoryTarget(tmp_path / "current", layout_of(ROWS), [file], CHUNK) as target:
        (tmp_path / "current").unlink()
        (tmp_path / "current").symlink_to("two")
        target.write_chunk("u16", 0, random_chunk("u16"))
    assert (tmp_path / "one" / "m").read_bytes() != (tmp_path / "two" / "m").read_bytes()


def soft_link(path: Path) -> None:
    blob = path.with_name("blob")
    path.rename(blob)
    path.symlink_to(blob)


def hard_link(path: Path) -> None:
    path.with_name("blob").hardlink_to(path)


@pytest.mark.parametrize("link", [soft_link, hard_link])
def test_shared_files_are_read_but_not_written(tmp_path: Path, link: Callable[[Path], None]) -> None:
    with DirectoryTarget.create(tmp_path, layout_of(ROWS), [weight_file("m", ROWS)], CHUNK) as target:
        target.write_chunk("u16", 0, random_chunk("u16"))
        link(tmp_path / "m")
    before = (tmp_path / "blob").read_bytes()
    with DirectoryTarget.create(tmp_path, layout_of(ROWS), [weight_file("m", ROWS)], CHUNK) as target:
        out = np.empty(CHUNK, "<u2")
        target.read_chunk("u16", 0, out)
        assert out.tolist() == random_chunk("u16").tolist()
        with pytest.raises(InvalidInputError, match="copy the directory"):
            target.write_chunk("u16", 0, random_chunk("u16", 1))
        [problem] = target.check()
        assert problem.expected == "a file of its own"
        with pytest.raises(InvalidInputError, match="copy the directory"):
            target.restore_headers()
    assert (tmp_path / "blob").read_bytes() == before


def test_what_is_no_file_is_neither_read_nor_written(target: DirectoryTarget) -> None:
    place = target.root / "model-1.safetensors"
    place.unlink()
    os.mkfifo(place)
    with DirectoryTarget(target.root, target.layout, target.files, CHUNK) as other:
        assert other.check() == [FileProblem(place.name, "is no regular file", "a file of its own", "prw-r--r--")]
        with pytest.raises(StorageError):
            other.read_chunk("u16", 0, np.empty(CHUNK, "<u2"))
        with pytest.raises(InvalidInputError, match="is no regular file"):
            other.write_chunk("u16", 0, random_chunk("u16"))


# ---------------------------------------------------------------------------------------------- headers and sizes


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def cut_into_the_header(path: Path) -> None:
    os.truncate(path, 11)


def lengthen(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 5)


def other_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[12] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "is missing"),
        (cut, "has another size"),
        (cut_into_the_header, "has another size"),
        (lengthen, "has another size"),
        (other_header, "has another header"),
    ],
)
def test_damage_is_found_and_repaired(target: DirectoryTarget, damage: Callable[[Path], None], message: str) -> None:
    place = target.root / "model-1.safetensors"
    bits = random_chunk("u16")
    target.write_chunk("u16", 0, bits)
    damage(place)
    damaged = place.read_bytes() if place.exists() else None
    with DirectoryTarget(target.root, target.layout, target.files, CHUNK) as other:
        [problem] = other.check()
        assert (problem.path, problem.message) == (place.name, message)
        assert place.name in str(problem)
        assert (place.read_bytes() if place.exists() else None) == damaged
        assert other.restore_headers() == [place.name]
        assert other.check() == []
        assert other.restore_headers() == []
        out = np.empty_like(bits)
        other.read_chunk("u16", 0, out)
        if damaged is not None and len(damaged) > 100:
            assert out.tolist() == bits.tolist()
        other.write_chunk("u16", 0, bits)
        other.read_chunk("u16", 0, out)
        assert out.tolist() == bits.tolist()


def test_short_and_missing_files_are_errors(target: DirectoryTarget) -> None:
    place = target.root / "model-1.safetensors"
    os.truncate(place, 300)
    with pytest.raises(IntegrityError, match=r"model-1\.safetensors.*shorter than its header says"):
        target.read_chunk("u16", 1, np.empty(CHUNK, "<u2"))
    place.unlink()
    with DirectoryTarget(target.root, target.layout, target.files, CHUNK) as other:
        with pytest.raises(NotFoundError, match="restore the headers"):
            other.read_chunk("u16", 1, np.empty(CHUNK, "<u2"))
        with pytest.raises(NotFoundError, match="restore the headers"):
            other.write_chunk("u16", 1, random_chunk("u16"))
        with pytest.raises(NotFoundError, match="restore the headers"):
            other.sync()


def test_create_leaves_files_that_exist_alone(tmp_path: Path) -> None:
    files = [weight_file("one", ROWS[:4]), weight_file("two", ROWS[4:])]
    (tmp_path / "one").write_bytes(b"mine")
    with DirectoryTarget.create(tmp_path, layout_of(ROWS), files, CHUNK) as target:
        assert (tmp_path / "one").read_bytes() == b"mine"
        assert [problem.path for problem in target.check()] == ["one"]
        assert target.restore_headers() == ["one"]
        assert target.check() == []


def test_every_file_is_made_durable(target: DirectoryTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was killed may have written what this one finds right and leaves alone."""
    synced = []
    fsync = os.fsync

    def spy(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", spy)
    with DirectoryTarget(target.root, target.layout, target.files, CHUNK) as other:
        other.sync()
    root = str(target.root)
    assert set(synced) == {root, f"{root}/sub", *(f"{root}/{file.path}" for file in target.files)}


@pytest.mark.parametrize(("name", "code"), [("pwritev", errno.ENOSPC), ("preadv", errno.EIO), ("fsync", errno.EIO)])
def test_errors_of_the_disk(target: DirectoryTarget, monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, fail)
    action: Any = {
        "pwritev": lambda: target.write_chunk("u16", 0, random_chunk("u16")),
        "preadv": lambda: target.read_chunk("u16", 0, np.empty(CHUNK, "<u2")),
        "fsync": target.sync,
    }[name]
    with pytest.raises(StorageError, match=rf"model-1\.safetensors.*{os.strerror(code)}"):
        action()


def test_names_that_cannot_be_made_durable(target: DirectoryTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def fail(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().is_dir():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match=f"{target.root}: cannot be made durable"):
        target.sync()


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(StorageError, match="No space left"):
        file_bytes.write_exactly(full.fileno(), 0, [memoryview(b"x")], "m")


def test_short_reads_and_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, pwritev = os.preadv, os.pwritev

    def little(call: Callable[..., int]) -> Callable[..., int]:
        def limited(fd: int, buffers: list[memoryview], offset: int) -> int:
            first = next((buffer for buffer in buffers if len(buffer)), buffers[0])
            return call(fd, [first[:3]], offset)

        return limited

    monkeypatch.setattr(os, "preadv", little(preadv))
    monkeypatch.setattr(os, "pwritev", little(pwritev))
    parts = [bytes([i % 256]) * (i % 7) for i in range(3000)]
    with (tmp_path / "f").open("w+b", buffering=0) as file:
        file_bytes.write_exactly(file.fileno(), 5, [memoryview(part) for part in parts], "f")
        assert (tmp_path / "f").read_bytes() == bytes(5) + b"".join(parts)
        found = [bytearray(len(part)) for part in parts]
        file_bytes.read_exactly(file.fileno(), 5, [memoryview(part) for part in found], "f")
        assert found == parts
        file_bytes.read_exactly(file.fileno(), 10**9, [memoryview(bytearray())], "f")


def test_more_parts_than_one_call_takes(tmp_path: Path) -> None:
    parts = [bytes([i % 256, 7]) for i in range(3000)]
    with (tmp_path / "f").open("w+b", buffering=0) as file:
        file_bytes.write_exactly(file.fileno(), 0, [memoryview(part) for part in parts], "f")
        found = [bytearray(2) for _ in parts]
        file_bytes.read_exactly(file.fileno(), 0, [memoryview(part) for part in found], "f")
    assert found == parts


def test_fifty_thousand_tiny_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[Row] = [(f"model.layers.{i}.weight", ("BF16", "F32", "U8")[i % 3], (i % 5,)) for i in range(50_000)]
    layout = layout_of(rows)
    file = weight_file("m", rows[::-1])
    chunk = 1 << 20
    began = time.perf_counter()
    with DirectoryTarget.create(tmp_path, layout, [file], chunk) as target:
        opened = time.perf_counter()
        bits = np.random.default_rng(0).integers(1, 1 << 16, chunk, np.uint16)
        target.write_chunk("u16", 0, bits)
        written = time.perf_counter()
        out = np.empty_like(bits)
        target.read_chunk("u16", 0, out)
        read = time.perf_counter()
        assert np.count_nonzero(out) == sum(e.n_elements for e in layout.tensors if e.space == "u16")
        assert np.array_equal(out[out != 0], bits[out != 0])
    with capsys.disabled():
        times = f"mapped {opened - began:.2f} s, written {written - opened:.3f} s, read {read - written:.3f} s"
        print(f"\n50,000 tensors in one file: {times}")


def test_errors_name_files() -> None:
    assert issubclass(NotFoundError, DcrError)
    assert (
        str(FileProblem("m", "is missing", "5 bytes", "no file")) == "m: is missing (expected 5 bytes, found no file)"
    )
