"""Targets in memory and in flat files of whole spaces."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_store.errors import IntegrityError, InvalidInputError, NotFoundError, StorageError
from dcr_store.format.documents import SPACES
from dcr_store.layout.dtypes import DTYPES, uint_dtype, width
from dcr_store.layout.layout import Layout, LayoutBuilder
from dcr_store.layout.tensors import to_array
from dcr_store.targets.memory import MemoryTarget
from dcr_store.targets.space_file import SpaceFiles

CHUNK = 64


def layout() -> Layout:
    builder = LayoutBuilder()
    for i, name in enumerate(DTYPES):
        for shape in ((i + 1, 9), (0, 3), ()):
            builder.add(f"{name}{shape}", name, shape)
    builder.add_alias("tied", "BF16()")
    return builder.build()


LAYOUT = layout()


def chunks() -> list[tuple[str, int]]:
    return [(space, chunk) for space in SPACES for chunk in range(LAYOUT.n_chunks(space, CHUNK))]


def random_chunk(space: str, chunk: int) -> Any:
    octets = np.random.default_rng(chunk).integers(1, 256, CHUNK * width(space), np.uint8)
    return octets.view(uint_dtype(space))


def only_tensors(space: str, chunk: int, bits: Any) -> Any:
    expected = np.zeros_like(bits)
    for piece in LAYOUT.pieces(space, chunk * CHUNK, (chunk + 1) * CHUNK):
        place = slice(piece.offset, piece.offset + piece.tensor_stop - piece.tensor_start)
        expected[place] = bits[place]
    return expected


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_chunks_there_and_back(kind: str, tmp_path: Path) -> None:
    target: Any = MemoryTarget(LAYOUT, CHUNK) if kind == "memory" else SpaceFiles(tmp_path, LAYOUT, CHUNK, create=True)
    for space, chunk in chunks():
        out = np.full(CHUNK, 7, uint_dtype(space))
        target.read_chunk(space, chunk, out)
        assert not out.any()
    for space, chunk in chunks():
        bits = random_chunk(space, chunk)
        bits.flags.writeable = False
        target.write_chunk(space, chunk, bits)
    for space, chunk in chunks():
        out = np.full(CHUNK, 7, uint_dtype(space))
        target.read_chunk(space, chunk, out)
        assert out.tobytes() == only_tensors(space, chunk, random_chunk(space, chunk)).tobytes()
    for space, chunk, bits in (("u16", -1, out), ("u8", 0, out), ("u64", 0, out[:5]), ("u16", 10_000, out)):
        for action in (target.read_chunk, target.write_chunk):
            with pytest.raises(InvalidInputError):
                action(space, chunk, bits)


def test_tensors_in_memory() -> None:
    target = MemoryTarget(LAYOUT, CHUNK)
    whole = {space: [] for space in SPACES}  # type: ignore[var-annotated]
    for space, chunk in chunks():
        whole[space].append(random_chunk(space, chunk))
        target.write_chunk(space, chunk, whole[space][-1])
    tensors = target.tensors()
    assert list(tensors) == LAYOUT.names()
    for entry in LAYOUT.tensors:
        dtype, shape, bits = tensors[entry.name]
        assert (dtype, shape) == (entry.dtype, entry.shape)
        assert bits.tobytes() == np.concatenate(whole[entry.space])[entry.start : entry.stop].tobytes()
        to_array(bits, dtype, shape)
    assert tensors["tied"].bits is tensors["BF16()"].bits
    tensors["tied"].bits[:] = 0x3F80
    out = np.empty(CHUNK, "<u2")
    place = LAYOUT.entry("tied").start
    target.read_chunk("u16", place // CHUNK, out)
    assert out[place % CHUNK] == 0x3F80


def test_a_choice_of_tensors() -> None:
    target = MemoryTarget(LAYOUT, CHUNK, ["tied", "F32(13, 9)", "F32(13, 9)"])
    for space, chunk in chunks():
        target.write_chunk(space, chunk, random_chunk(space, chunk))
    assert list(target.tensors()) == ["tied", "F32(13, 9)"]
    entry = LAYOUT.entry("F32(13, 9)")
    whole = np.concatenate([random_chunk("u32", chunk) for chunk in range(LAYOUT.n_chunks("u32", CHUNK))])
    assert target.tensors()["F32(13, 9)"].bits.tolist() == whole[entry.start : entry.stop].tolist()
    out = np.empty(CHUNK, "<u8")
    target.read_chunk("u64", 0, out)
    assert not out.any()
    assert MemoryTarget(LAYOUT, CHUNK, []).tensors() == {}
    with pytest.raises(NotFoundError, match="did you mean tied"):
        MemoryTarget(LAYOUT, CHUNK, ["tide"])


def test_only_what_was_chosen_takes_memory() -> None:
    builder = LayoutBuilder()
    builder.add("small", "BF16", (8,))
    builder.add("huge", "BF16", (1 << 50,))
    target = MemoryTarget(builder.build(), CHUNK, ["small"])
    target.write_chunk("u16", 1 << 40, random_chunk("u16", 0))
    assert not target.tensors()["small"].bits.any()


def test_space_files_are_the_spaces(tmp_path: Path) -> None:
    with SpaceFiles(tmp_path / "a" / "b", LAYOUT, CHUNK, create=True) as files:
        for space, chunk in chunks():
            files.write_chunk(space, chunk, random_chunk(space, chunk))
        files.sync()
    for space in SPACES:
        whole = np.fromfile(tmp_path / "a" / "b" / f"{space}.bin", uint_dtype(space))
        assert whole.size == LAYOUT.spaces[space]
        expected = [only_tensors(s, c, random_chunk(s, c)) for s, c in chunks() if s == space]
        assert whole.tobytes() == np.concatenate(expected)[: whole.size].tobytes()
    with SpaceFiles(tmp_path / "a" / "b", LAYOUT, CHUNK) as files:
        out = np.empty(CHUNK, "<u2")
        files.read_chunk("u16", 0, out)
        assert out.tolist() == only_tensors("u16", 0, random_chunk("u16", 0)).tolist()


def test_views_are_the_files(tmp_path: Path) -> None:
    files = SpaceFiles(tmp_path, LAYOUT, CHUNK, create=True)
    view, writable = files.view("u16", 0), files.writable_view("u16", 0)
    assert view.shape == writable.shape == (CHUNK,)
    assert view.dtype == "<u2"
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    writable[5] = 77
    assert view[5] == 77
    files.write_chunk("u16", 0, random_chunk("u16", 0))  # written past the mapping, seen through it
    assert view.tolist() == only_tensors("u16", 0, random_chunk("u16", 0)).tolist()
    files.close()
    assert view[5] != 77
    for space, chunk in (("u16", 0), ("u16", -1), ("u16", 10**9)):
        with pytest.raises(InvalidInputError, match="no chunk"):
            files.view(space, chunk)


def test_the_last_chunk_is_padded(tmp_path: Path) -> None:
    builder = LayoutBuilder()
    builder.add("a", "U8", (70,))
    with SpaceFiles(tmp_path, builder.build(), 48, create=True) as files:
        files.write_chunk("u8", 2, np.full(48, 9, np.uint8))
        assert files.writable_view("u8", 2).tolist() == [0] * 32
        files.write_chunk("u8", 1, np.full(48, 9, np.uint8))
        assert files.view("u8", 1).tolist() == [9] * 22 + [0] * 26
        assert files.view("u8", 2).tolist() == [0] * 48
        with pytest.raises(ValueError, match="read-only"):
            files.view("u8", 2)[0] = 1
        out = np.full(48, 5, np.uint8)
        files.read_chunk("u8", 2, out)
        assert not out.any()
    assert (tmp_path / "u8.bin").stat().st_size == 128


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such directory"):
        SpaceFiles(tmp_path / "missing", LAYOUT, CHUNK)
    with pytest.raises(NotFoundError, match=r"u8\.bin.*make it anew"):
        SpaceFiles(tmp_path, LAYOUT, CHUNK)
    with SpaceFiles(tmp_path, LAYOUT, CHUNK, create=True) as files:
        for space, chunk in chunks():
            files.write_chunk(space, chunk, random_chunk(space, chunk))
    os.truncate(tmp_path / "u32.bin", 8)
    with pytest.raises(IntegrityError, match=r"u32\.bin.*another size.*found 8"):
        SpaceFiles(tmp_path, LAYOUT, CHUNK)
    with SpaceFiles(tmp_path, LAYOUT, CHUNK, create=True) as files:
        assert not files.view("u32", 0).any()
        assert files.view("u16", 0).any()
    (tmp_path / "u16.bin").unlink()
    (tmp_path / "u16.bin").symlink_to("u8.bin")
    with pytest.raises(StorageError, match=r"u16\.bin"):
        SpaceFiles(tmp_path, LAYOUT, CHUNK, create=True)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be made"):
        SpaceFiles(tmp_path / "file" / "x", LAYOUT, CHUNK, create=True)


def test_nothing_of_a_file_of_another_size_remains(tmp_path: Path) -> None:
    (tmp_path / "u16.bin").write_bytes(b"x" * 100_000)
    with SpaceFiles(tmp_path, LAYOUT, CHUNK, create=True) as files:
        assert not any(files.view("u16", chunk).any() for chunk in range(LAYOUT.n_chunks("u16", CHUNK)))


def test_a_layout_without_values_has_no_files(tmp_path: Path) -> None:
    with SpaceFiles(tmp_path, LayoutBuilder().build(), CHUNK, create=True) as files:
        files.sync()
    assert list(tmp_path.iterdir()) == []


def test_room_is_taken_when_files_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = {}
    posix_fallocate = os.posix_fallocate

    def spy(fd: int, offset: int, nbytes: int) -> None:
        reserved[Path(f"/proc/self/fd/{fd}").readlink().name] = (offset, nbytes)
        posix_fallocate(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", spy)
    SpaceFiles(tmp_path, LAYOUT, CHUNK, create=True).close()
    assert reserved == {f"{space}.bin": (0, n * width(space)) for space, n in LAYOUT.spaces.items()}
    reserved.clear()
    SpaceFiles(tmp_path, LAYOUT, CHUNK, create=True).close()
    assert reserved == {}


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_file_systems_that_cannot_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with SpaceFiles(tmp_path, LAYOUT, CHUNK, create=True) as files:
        files.write_chunk("u16", 0, random_chunk("u16", 0))
        assert files.view("u16", 0).any()


def test_a_full_disk_is_found_out_when_the_files_are_made(tmp_path: Path) -> None:
    """Under a limit of file size, which the kernel enforces where a full disk would be."""
    code = (
        "import resource, signal, sys\n"
        "from dcr_store.errors import StorageError\n"
        "from dcr_store.layout.layout import LayoutBuilder\n"
        "from dcr_store.targets.space_file import SpaceFiles\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "builder = LayoutBuilder()\n"
        "builder.add('a', 'U8', (1 << 21,))\n"
        "try:\n"
        "    SpaceFiles(sys.argv[1], builder.build(), 1 << 20, create=True)\n"
        "except StorageError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    assert "u8.bin: cannot get 2097152 bytes" in result.stdout
    assert (tmp_path / "u8.bin").stat().st_size == 0
