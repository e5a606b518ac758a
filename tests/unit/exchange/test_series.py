"""Delta directories of slime, miles and SGLang, into a line and out of it, against a writer and a receiver by hand."""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from series import (
    State,
    octets,
    read_checkpoint,
    receive,
    safetensors,
    write_blobs,
    write_checkpoint,
    write_delta,
)
from upkeep import KilledError, Mortal, through

import dcr_store
from dcr_store import events
from dcr_store.errors import (
    ConflictError,
    DcrError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from dcr_store.exchange import delta_directory, export_deltas
from dcr_store.exchange.export_lock import LOCK
from dcr_store.store import Store

ENCODINGS = ("xor", "overwrite")


def states() -> list[State]:
    """Five versions: small steps, special values, one tensor of zero elements, one version in which nothing changes."""
    rng = np.random.default_rng(3)
    state: State = {
        "a.weight": rng.normal(0, 1, (33, 40)).astype(ml_dtypes.bfloat16),
        "b.bias": rng.normal(0, 1, 77).astype(np.float32),
        "codes": rng.integers(0, 256, (9, 5)).astype(np.uint8),
        "nothing": np.zeros((0, 4), np.float32),
        "step": np.array([7], np.int64),
    }
    found = [state]
    for number in range(1, 5):
        new = {name: array.copy() for name, array in found[-1].items()}
        if number != 3:
            new["a.weight"].view(np.uint16)[rng.random((33, 40)) < 0.1] ^= 1
            new["step"] += 1
        if number == 1:
            special = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000000, 0x7F800000, 1], np.uint32)
            new["b.bias"].view(np.uint32)[:6] = special
        if number == 2:  # NaN payload to another one, -0.0 to 0.0 and back
            new["b.bias"].view(np.uint32)[:4] = np.array([0x7FC00002, 0xFFC12345, 0, 0x80000000], np.uint32)
        if number == 4:
            new["codes"][0] ^= 255
        found.append(new)
    return found


STATES = states()


def create() -> Store:
    return dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=64)


def require(store: Store, version: str, state: State) -> None:
    found = store.read(version)
    assert {name: array.tobytes() for name, array in found.items()} == {n: a.tobytes() for n, a in state.items()}


def raw(state: State) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in state.items()}


def write_series(root: Path, encoding: str, n_files: int = 1, first: int = 1, last: int = 4) -> Path:
    for number in range(first, last + 1):
        write_delta(root, number, STATES[number - 1], STATES[number], encoding, n_files)
    return root


# ---------------------------------------------------------------------- import


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_series_becomes_a_line(tmp_path: Path, encoding: str) -> None:
    base = write_checkpoint(tmp_path / "base", STATES[0], n_files=2)
    series = write_series(tmp_path / "series", encoding, n_files=2)
    with create() as store:
        done = store.import_series(series, base=base)
        assert [place for _, place in done.versions] == [str(base), *(f"weight_v{n:06d}" for n in range(1, 5))]
        for number, state in enumerate(STATES):
            require(store, f"main@{number}", state)
        info = store.log("main")[3]
        assert info.metadata == {"imported": {"version": 3, "directory": "weight_v000003"}}
        assert info.changed == 0, "nothing changed in it"
        store.checkout("main", tmp_path / "out")
        assert (tmp_path / "out/config.json").read_bytes() == (base / "config.json").read_bytes()
        # What came since, and nothing twice.
        assert store.import_series(series).versions == ()
        new = {name: array.copy() for name, array in STATES[4].items()}
        new["step"] += 1
        write_delta(series, 5, STATES[4], new, encoding)
        assert store.import_series(series).versions == (("main@5", "weight_v000005"),)
        require(store, "main@5", new)


def test_a_whole_checkpoint_in_a_series(tmp_path: Path) -> None:
    series = tmp_path / "series"
    write_checkpoint(series / "weight_v000002", STATES[2])
    write_series(series, "xor", first=3)
    write_checkpoint(series / "weight_v000005", STATES[1], n_files=3)
    with create() as store:
        store.import_series(series)
        for number, state in enumerate([STATES[2], STATES[3], STATES[4], STATES[1]]):
            require(store, f"main@{number}", state)


def test_a_line_that_was_not_imported_goes_on(tmp_path: Path) -> None:
    series = write_series(tmp_path / "series", "xor")
    with create() as store:
        with store.begin() as transaction:
            transaction.write_checkpoint(write_checkpoint(tmp_path / "two", STATES[2]))
        with pytest.raises(InvalidInputError, match="was not imported"):
            store.import_series(series)
        store.import_series(series, at=2)
        require(store, "main@2", STATES[4])
        with pytest.raises(ConflictError, match="another one of the series"):
            store.import_series(series, at=2)
        with pytest.raises(InvalidInputError, match="leave the base out"):
            store.import_series(series, base=tmp_path / "two")


def test_a_base_that_is_a_distributed_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    series = write_series(tmp_path / "series", "xor")
    with create() as store:
        with store.begin("seed") as transaction:
            transaction.write_checkpoint(write_checkpoint(tmp_path / "base", STATES[0]))
        store.checkout("seed", tmp_path / "dcp", format="dcp")
        store.import_series(series, base=tmp_path / "dcp")
        for number, state in enumerate(STATES):
            require(store, f"main@{number}", state)


def test_the_base_again(tmp_path: Path) -> None:
    """Of an import that stopped, it is read again: by its name alone it could be another one by now."""
    series = write_series(tmp_path / "series", "xor")
    base = write_checkpoint(tmp_path / "base", STATES[0], n_files=2)
    with create() as store:

        def stop(event: events.Event) -> None:
            if event.name == "progress" and event.detail == "import weight_v000001":
                raise StopError

        with events.listening(stop), pytest.raises(StopError):
            store.import_series(series, base=base)
        assert [info.version for info in store.log()] == ["main@0"], "the base alone"
        # Another one under that name; with the bits, but not the other files; none.
        (base / "config.json").write_text("{}")
        with pytest.raises(InvalidInputError, match="leave the base out"):
            store.import_series(series, base=base)
        base.rename(tmp_path / "other")
        wrong = {name: array.copy() for name, array in STATES[0].items()}
        wrong["codes"][0, 0] ^= 1
        write_checkpoint(base, wrong, n_files=2)
        with pytest.raises(InvalidInputError, match="leave the base out"):
            store.import_series(series, base=base)
        with pytest.raises(NotFoundError):
            store.import_series(series, base=tmp_path / "none")
        assert len(store.log()) == 1
        again = write_checkpoint(tmp_path / "moved", STATES[0], n_files=2)
        done = store.import_series(series, base=again)
        assert [name for name, _ in done.versions] == [f"main@{number}" for number in range(1, 5)]
        for number, state in enumerate(STATES):
            require(store, f"main@{number}", state)
        assert store.import_series(series, base=again).versions == ()


def test_bases_that_are_missing(tmp_path: Path) -> None:
    series = write_series(tmp_path / "series", "xor")
    base = write_checkpoint(tmp_path / "base", STATES[0])
    with create() as store:
        with pytest.raises(InvalidInputError, match="give the checkpoint on which it builds"):
            store.import_series(series)
        with pytest.raises(InvalidInputError, match="no version yet"):
            store.import_series(series, at=3)
        with pytest.raises(NotFoundError):
            store.import_series(tmp_path / "none", base=base)
        (tmp_path / "empty").mkdir()
        with pytest.raises(InvalidInputError, match="holds no series"):
            store.import_series(tmp_path / "empty", base=base)
        assert store.log() == []
        (series / "weight_v000002").rename(tmp_path / "away")
        with pytest.raises(InvalidInputError, match="builds on a version that is not there") as caught:
            store.import_series(series, base=base)
        assert "weight_v000003" in str(caught.value)
        assert [info.version for info in store.log()] == ["main@0", "main@1"]
        (tmp_path / "away").rename(series / "weight_v000002")
        store.import_series(series)
        require(store, "main@4", STATES[4])


def test_a_base_that_is_another_one_is_found_by_its_checksums(tmp_path: Path) -> None:
    """As after a trainer that began to count anew."""
    wrong = {name: array.copy() for name, array in STATES[0].items()}
    wrong["a.weight"].view(np.uint16)[5] ^= 1
    series = write_series(tmp_path / "series", "xor")
    with create() as store:
        with pytest.raises(IntegrityError, match="builds on another base") as caught:
            store.import_series(series, base=write_checkpoint(tmp_path / "base", wrong))
        assert "a.weight" in str(caught.value)
        assert store.log() == [], "what it does not fit is no version"
        store.import_series(series, base=write_checkpoint(tmp_path / "right", STATES[0]))
        require(store, "main@4", STATES[4])


def test_a_base_without_a_tensor_that_the_series_changes(tmp_path: Path) -> None:
    series = write_series(tmp_path / "series", "xor")
    fewer = {name: array for name, array in STATES[0].items() if name != "a.weight"}
    with create() as store:
        with pytest.raises(FormatError, match="its base does not have") as caught:
            store.import_series(series, base=write_checkpoint(tmp_path / "base", fewer))
        assert "#a.weight" in str(caught.value)
        assert store.log() == []


ONE = "b.bias"


def hostile_blobs() -> dict[str, tuple[str, bytes, str]]:
    """Frames for a tensor of 308 bytes: how they are encoded, what they are, and what is said of them."""
    nbytes = STATES[0][ONE].nbytes
    pack = zstandard.ZstdCompressor(level=1).compress

    def sparse(count: int, positions: list[int], values: bytes) -> bytes:
        return pack(count.to_bytes(4, "little") + np.array(positions, "<u4").tobytes() + values)

    return {
        "short": ("xor", pack(bytes(nbytes - 1)), "too short"),
        "long": ("xor", pack(bytes(nbytes + 1)), "too long"),
        "bomb": ("xor", pack(bytes(50 << 20)), "too long"),
        "no frame": ("xor", b"not zstd at all", "no zstd frame"),
        "empty": ("xor", b"", "no whole zstd frame"),
        "cut": ("xor", pack(np.arange(nbytes, dtype=np.uint8).tobytes())[:-3], "no whole zstd frame"),
        "two frames": ("xor", pack(bytes(nbytes)) + pack(b"x"), "zstd frame"),
        "count": ("overwrite", sparse(3, [1, 2], b"ab"), "another length"),
        "no count": ("overwrite", pack(b"\\0"), "another length"),
        "outside": ("overwrite", sparse(2, [1, nbytes], b"ab"), "outside of the tensor"),
        "twice": ("overwrite", sparse(2, [5, 5], b"ab"), "not ascending"),
        "backwards": ("overwrite", sparse(2, [9, 5], b"ab"), "not ascending"),
        "bomb of values": ("overwrite", pack(bytes(50 << 20)), "too long"),
        "damaged": ("xor", pack(bytes([1]) + bytes(nbytes - 1)), "not what its checksum says"),
    }


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Path]:
    """A line with the base alone."""
    root = tmp_path_factory.mktemp("begun")
    store = create()
    write_checkpoint(root / "base", STATES[0])
    with store.begin(metadata={"imported": {"version": 0}}) as transaction:
        transaction.write_checkpoint(root / "base")
    return store, root


@pytest.mark.parametrize("what", hostile_blobs())
def test_hostile_blobs(begun: tuple[Store, Path], tmp_path: Path, what: str) -> None:
    encoding, frame, said = hostile_blobs()[what]
    place = write_blobs(tmp_path, 1, {ONE: frame}, {ONE: f"{zlib.adler32(octets(STATES[0][ONE])):08x}"}, encoding)
    with pytest.raises((FormatError, IntegrityError), match=said) as caught:
        begun[0].import_series(tmp_path)
    assert f"{place.name}/model-00000-of-00001.safetensors#{ONE}" in str(caught.value)
    assert len(begun[0].log()) == 1


FRAME = zstandard.ZstdCompressor(level=1).compress(bytes(308))
SUM = {ONE: f"{zlib.adler32(octets(STATES[0][ONE])):08x}"}


def _told(**metadata: Any) -> Callable[[Path], object]:
    return lambda root: write_blobs(root, 1, {ONE: FRAME}, SUM, **metadata)


def _index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def make(root: Path) -> None:
        index = write_blobs(root, 1, {ONE: FRAME}, SUM) / "model.safetensors.index.json"
        document = json.loads(index.read_text())
        change(document)
        index.write_text(json.dumps(document))

    return make


def _file(data: Callable[[], bytes]) -> Callable[[Path], object]:
    return lambda root: (write_blobs(root, 1, {ONE: FRAME}, SUM) / "model-00000-of-00001.safetensors").write_bytes(
        data()
    )


def _extra(root: Path) -> None:
    (write_blobs(root, 1, {ONE: FRAME}, SUM) / "other.safetensors").write_bytes(safetensors({}, {}))


def _lost(root: Path) -> None:
    (write_blobs(root, 1, {ONE: FRAME}, SUM) / "model-00000-of-00001.safetensors").unlink()


def _begun(root: Path) -> None:
    (write_blobs(root, 1, {ONE: FRAME}, SUM) / "model.safetensors.index.json").unlink()


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "encoding": (_told(delta_encoding="add"), "delta_encoding is not one"),
    "compression": (_told(compression_format="lz4"), "compression_format is not one"),
    "checksum": (_told(checksum_format="crc"), "checksum_format is not one"),
    "version": (_told(version="one"), "version is no version"),
    "version true": (_told(version=True), "version is no version"),
    "other version": (_told(version="000002"), "another version than its directory"),
    "later base": (_told(base_version="000001"), "builds on a later one"),
    "path": (_index(lambda d: d["weight_map"].update({ONE: "../model.safetensors"})), "names no file for"),
    "absolute": (_index(lambda d: d["weight_map"].update({ONE: "/etc/x.safetensors"})), "names no file for"),
    "dot": (_index(lambda d: d["weight_map"].update({ONE: "..safetensors"})), "names no file for"),
    "no text": (_index(lambda d: d["weight_map"].update({ONE: 3})), "names no file for"),
    "no map": (_index(lambda d: d.pop("weight_map")), "has no weight_map"),
    "no metadata": (_index(lambda d: d.pop("metadata")), "has no metadata"),
    "not told": (_index(lambda d: d["weight_map"].update({"c": "model-00000-of-00001.safetensors"})), "does not hold"),
    "extra file": (_extra, "does not name the files beside it"),
    "lost file": (_lost, "does not name the files beside it"),
    "no index yet": (_begun, "without their index"),
    "no checksum": (lambda root: write_blobs(root, 1, {ONE: FRAME}, {}), "has no checksum"),
    "unknown tensor": (lambda root: write_blobs(root, 1, {"x": FRAME}, {"x": "0"}), "its base does not have"),
    "values": (_file(lambda: safetensors({ONE: ("F32", [1], bytes(4))}, SUM)), "is no blob"),
    "shape": (_file(lambda: safetensors({ONE: ("U8", [2, 2], bytes(4))}, SUM)), "is no blob"),
    "file": (_file(lambda: b"\\xff" * 16), "no safetensors file"),
    "torn file": (_file(lambda: safetensors({ONE: ("U8", [len(FRAME)], FRAME)}, SUM)[:-1]), "outside of the file"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_directories(begun: tuple[Store, Path], tmp_path: Path, what: str) -> None:
    make, said = HOSTILE[what]
    make(tmp_path)
    with pytest.raises(FormatError, match=said) as caught:
        begun[0].import_series(tmp_path)
    assert "weight_v000001" in str(caught.value)
    assert len(begun[0].log()) == 1


def test_checksums_of_other_packages(begun: tuple[Store, Path], tmp_path: Path) -> None:
    for name, package in (("xxh3-128", "xxhash"), ("blake3", "blake3")):
        try:
            __import__(package)
        except ImportError:
            with pytest.raises(DcrError, match=f"pip install {package}"):
                delta_directory.hasher(name, "k")
        else:
            assert len(delta_directory.checksum(name, np.arange(9, dtype=np.uint8), "k")) in (32, 64)
    assert (
        delta_directory.checksum("adler32", octets(np.arange(300)), "k")
        == f"{zlib.adler32(np.arange(300).tobytes()):08x}"
    )


def test_an_import_that_was_killed_goes_on(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", STATES[0])
    series = write_series(tmp_path / "series", "xor")
    n_killed = 0
    for dies_at in range(5, 400, 60):
        store = create()
        mortal = Mortal(store._objects, dies_at)
        try:
            through(store, mortal).import_series(series, base=base)
        except KilledError:
            n_killed += 1
            dcr_store.open(store.url).import_series(series, base=base)
        for number, state in enumerate(STATES):
            require(store, f"main@{number}", state)
    assert n_killed >= 3


# ---------------------------------------------------------------------- export


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The five states as a line, from checkpoints of two files."""
    root = tmp_path_factory.mktemp("line")
    store = create()
    for number, state in enumerate(STATES):
        with store.begin() as transaction:
            transaction.write_checkpoint(write_checkpoint(root / f"{number}", state, n_files=2))
    return store


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_receivers_are_fed_from_a_line(line: Store, tmp_path: Path, encoding: str) -> None:
    done = line.export("main@0", "main@2", tmp_path, format="slime", encoding=encoding)
    assert done.written == ("main@0", "main@1", "main@2")
    for number in range(3):
        assert receive(tmp_path, number) == raw(STATES[number])
    # Again: only what is new.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    done = line.export("main@0", "main", tmp_path, format="slime", encoding=encoding)
    assert (done.written, done.found) == (("main@3", "main@4"), ("main@0", "main@1", "main@2"))
    assert before.items() <= {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}.items()
    assert receive(tmp_path, 4) == raw(STATES[4])
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, *(f"weight_v{n:06d}" for n in range(5))]
    index = json.loads((tmp_path / "weight_v000003/model.safetensors.index.json").read_text())
    assert index["weight_map"] == {}, "nothing changed in it"
    # And back into another store.
    with create() as other:
        other.import_series(tmp_path)
        for number, state in enumerate(STATES):
            require(other, f"main@{number}", state)


def test_copies_are_durable_where_nothing_can_be_linked(
    line: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable, fsync = set[int](), os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        durable.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(export_deltas, "link", lambda source, place: False)
    line.export("main@0", "main@0", tmp_path, format="slime")
    files = list((tmp_path / "weight_v000000").iterdir())
    assert len(files) == 4
    assert [path.name for path in files if path.stat().st_ino not in durable] == []
    assert receive(tmp_path, 0) == raw(STATES[0])


def test_receivers_that_have_the_first_version(line: Store, tmp_path: Path) -> None:
    done = line.export("main@1", "main@4", tmp_path, format="slime", with_first=False)
    assert done.written == ("main@2", "main@3", "main@4")
    assert receive(tmp_path, 4, raw(STATES[1])) == raw(STATES[4])


def test_versions_that_have_expired_or_have_other_tensors(tmp_path: Path) -> None:
    with create() as store:
        for number, state in enumerate([*STATES, {**STATES[4], "new": np.zeros(3, np.float32)}]):
            with store.begin() as transaction:
                transaction.write_checkpoint(write_checkpoint(tmp_path / f"c{number}", state))
        store.expire("main", keep_last=3, keep_every=2)
        done = store.export("main@0", "main", tmp_path / "out", format="slime")
        assert done.left_out == ("main@1",)
        assert receive(tmp_path / "out", 2) == raw(STATES[2]), "whole, because nobody can go on from before"
        assert receive(tmp_path / "out", 4) == raw(STATES[4])
        assert not (tmp_path / "out/weight_v000001").exists()
        assert receive(tmp_path / "out", 5) == raw({**STATES[4], "new": np.zeros(3, np.float32)})


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_tensors_of_another_dtype_or_shape_of_as_many_bytes_are_written_whole(tmp_path: Path, encoding: str) -> None:
    """A delta tells bytes alone: receivers would read them by the dtype and the shape that they know."""
    first: State = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "x": np.arange(3, dtype=np.int64)}
    turned: State = {"w": first["w"].reshape(3, 2) + 1, "x": first["x"]}
    states: list[State] = [first, turned, {"w": turned["w"].view(np.uint8).reshape(24), "x": turned["x"]}]
    with create() as store:
        for number, state in enumerate(states):
            with store.begin() as transaction:
                transaction.write_checkpoint(write_checkpoint(tmp_path / f"c{number}", state))
        store.export("main@0", "main", tmp_path / "out", format="slime", encoding=encoding)
        with create() as other:
            other.import_series(tmp_path / "out")
            assert [info.root for info in other.log()] == [info.root for info in store.log()]
            for number, state in enumerate(states):
                require(other, f"main@{number}", state)
                assert {name: array.shape for name, array in other.read(f"main@{number}").items()} == {
                    name: array.shape for name, array in state.items()
                }


def test_large_deltas_are_cut_into_files(line: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_deltas, "FILE_NBYTES", 64)
    line.export("main@0", "main@1", tmp_path, format="slime")
    assert len(list((tmp_path / "weight_v000001").glob("*.safetensors"))) == 2
    assert receive(tmp_path, 1) == raw(STATES[1])


def test_what_an_overwrite_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_directory, "_MAX_OVERWRITE_NBYTES", 100)
    with pytest.raises(InvalidInputError, match="positions have 32 bits; use xor"):
        delta_directory.make_blob(np.zeros(101, np.uint8), np.ones(101, np.uint8), "overwrite", "w")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_blobs_longer_than_a_block(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_directory, "BLOCK_NBYTES", 1 << 12)
    rng = np.random.default_rng(1)
    old = rng.integers(0, 256, 50_001).astype(np.uint8)
    for rate in (0.0, 0.001, 1.0):
        new = old ^ (rng.integers(1, 256, len(old)) * (rng.random(len(old)) < rate)).astype(np.uint8)
        frame = delta_directory.make_blob(old, new, encoding, "w")
        assert (frame is None) == (rate == 0.0)
        if frame is not None:
            region = old.copy()
            delta_directory.patch(memoryview(frame), encoding, region, "w")
            assert np.array_equal(region, new)


def test_an_index_that_is_a_directory(line: Store, tmp_path: Path) -> None:
    (tmp_path / "weight_v000001" / "model.safetensors.index.json").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"index\.json: cannot be read: Is a directory"):
        line.export("main@1", "main@1", tmp_path, format="slime")


def test_nothing_is_written_through_a_link(line: Store, tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".partial").symlink_to(tmp_path / "others")
    with pytest.raises(StorageError, match="cannot be written: File exists"):
        line.export("main@1", "main@1", tmp_path / "out")
    assert list((tmp_path / "others").iterdir()) == []


def test_a_directory_of_another_series(line: Store, tmp_path: Path) -> None:
    write_series(tmp_path, "xor", last=1)
    with pytest.raises(ConflictError, match="of another series"):
        line.export("main@0", "main", tmp_path, format="slime")
    other = tmp_path / "other"
    write_checkpoint(other / "weight_v000000", STATES[1])
    with pytest.raises(ConflictError, match="of another series"):
        line.export("main@0", "main", other, format="slime")
    for options, said in (
        ({"format": "dcp"}, "unknown format"),
        ({"format": "slime", "encoding": "add"}, "unknown encoding"),
        ({"format": "slime", "checksum": "crc"}, "unknown checksum"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            line.export("main@0", "main", tmp_path, **options)
    with pytest.raises(InvalidInputError, match="no range"):
        line.export("main@2", "main@0", tmp_path / "x")


class StopError(BaseException):
    """Stands for a death."""


@pytest.mark.parametrize("format", ["slime", "safetensors"])
@pytest.mark.parametrize("point", ["export.built", "copy.headers.restored"])
def test_an_export_that_was_killed_goes_on(line: Store, tmp_path: Path, format: str, point: str) -> None:
    reached = [0]

    def stop(event: events.Event) -> None:
        reached[0] += event.name == point
        if event.name == point and reached[0] == 3:
            raise StopError

    with events.listening(stop), pytest.raises(StopError):
        line.export("main@0", "main", tmp_path, format=format)
    there = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert 1 <= len(there) <= 4
    done = line.export("main@0", "main", tmp_path, format=format)
    assert len(done.found) == len(there)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [LOCK]
    for number, state in enumerate(STATES):
        name = f"main@{number}" if format == "safetensors" else f"weight_v{number:06d}"
        assert (tmp_path / name).is_dir()
        found = read_checkpoint(tmp_path / name) if format == "safetensors" else receive(tmp_path, number)
        assert found == raw(state)


# ---------------------------------------------------------------------- folders


def test_folders_share_what_does_not_change(line: Store, tmp_path: Path) -> None:
    done = line.export("main@1", "main@4", tmp_path)
    assert done.written == tuple(f"main@{number}" for number in range(1, 5))
    for number in range(1, 5):
        place = tmp_path / f"main@{number}"
        assert read_checkpoint(place) == raw(STATES[number])
        assert sorted(path.name for path in place.iterdir()) == [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ]
    for name in ("model-00001-of-00002.safetensors", "config.json"):
        assert (tmp_path / "main@3" / name).samefile(tmp_path / "main@2" / name), "nothing changed in main@3"
    assert line.export("main@1", "main@4", tmp_path).written == ()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [LOCK]
    (tmp_path / "main@2/config.json").unlink()
    with pytest.raises(InvalidInputError, match="holds something else"):
        line.export("main@1", "main@4", tmp_path)
