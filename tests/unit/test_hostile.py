"""Stores, files and arguments made to harm: a clear error of the right kind, nothing written outside, nothing lost."""

from __future__ import annotations

import json
import os
import resource
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade import Part, publish, zeros
from log_records import Writer, abort, begin
from states import assert_same, tree, write_hf
from watched import Watched

import dcr_store
from dcr_store.errors import (
    ConflictError,
    DcrError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from dcr_store.format import canonical
from dcr_store.format.documents import CheckpointFile, ObjectRef, Seal, StoreDocument
from dcr_store.layout.layout import Layout, LayoutBuilder
from dcr_store.objects.open import open_objects
from dcr_store.store import Store

STATE = {"a": np.arange(300, dtype=np.float32), "b": np.ones((5, 7), np.int16)}


@pytest.fixture
def sentinel(tmp_path: Path) -> Iterator[Path]:
    """A tree around the places of a test, none of which may change."""
    for name in ("secret.txt", "above/secret.txt", "above/beside/model.safetensors", "above/store2/dcr.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"precious: {name}")
    place = tmp_path / "above" / "place"
    place.mkdir()

    def outside() -> dict[str, tuple[bytes, int, int]]:
        return {
            str(path): (path.read_bytes(), path.stat().st_ino, path.stat().st_mtime_ns)
            for path in sorted(tmp_path.rglob("*"))
            if path.is_file() and place not in path.parents
        }

    before = outside()
    assert len(before) == 4
    yield place
    assert outside() == before, "something outside was touched"
    assert {path.name for path in tmp_path.iterdir()} == {"secret.txt", "above"}
    assert {path.name for path in (tmp_path / "above").iterdir()} == {"secret.txt", "beside", "store2", "place"}


@pytest.fixture
def store(sentinel: Path) -> Iterator[Store]:
    """A store with one version, which is still there and right in the end."""
    with dcr_store.create(sentinel / "store", chunk_elements=64) as store:
        with store.begin() as transaction:
            for name, array in STATE.items():
                transaction.write(name, array)
        yield store
    with dcr_store.open(sentinel / "store") as again:
        assert_same(again.read("main@0"), STATE)


def layout_of(**tensors: tuple[str, int]) -> Layout:
    builder = LayoutBuilder()
    for name, (dtype, n) in tensors.items():
        builder.add(name, dtype, (n,))
    return builder.build()


LAYOUT = layout_of(a=("U8", 200))


def some(layout: Layout = LAYOUT) -> list[Part]:
    mask = zeros(layout)
    mask["u8"][:200] = 7
    return [Part(mask={"u8": mask["u8"]})]


# ---------------------------------------------------------------------- names

HOSTILE_NAMES = [
    "../x", "../../../../etc/passwd", "/etc/passwd", "a/../../b", ".", "..", "~/x", "a\\..\\b", "C:\\x", "a\nb",
    "\x1b[2J", "a\rb", " ", "x" * 10_000, "é" * 30_000, "\u202eevil", "con", "a/b/c", "dcr.json", "log/main", "{0}",
    "%s", "$HOME",
    "__proto__", "-rf", "*", "?", "\ufeff",
]  # fmt: skip


def test_names_of_tensors_are_only_names(store: Store, sentinel: Path) -> None:
    """They are data: never a key, never a path."""
    state = {name: np.full(3, i, np.int32) for i, name in enumerate(HOSTILE_NAMES)}
    keys = set(store._objects.list(""))
    with store.begin() as transaction:
        for name, array in state.items():
            transaction.write(name, array)
    assert_same(store.read("main@1"), state)
    for key in set(store._objects.list("")) - keys:
        assert all(part.isascii() and part not in ("..", "etc", "passwd") for part in key.split("/"))
    store.checkout("main@1", sentinel / "out")
    assert sorted(tree(sentinel / "out")) == ["model.safetensors"]
    shutil.copytree(sentinel / "out", sentinel / "again", ignore=shutil.ignore_patterns(".dcr"))
    with store.begin() as transaction:
        transaction.write_checkpoint(sentinel / "again")
    assert store.log()[-1].changed == 0
    for name in HOSTILE_NAMES[:5]:
        assert store.read("main", [name])[name].tolist() == state[name].tolist()


@pytest.mark.parametrize(
    "name",
    ["", "a\0b", "\0", "\ud800", "x" * 65_537, "é" * 40_000, None, 5, b"bytes", ("a",), 1.5],
    ids=lambda n: repr(n)[:12],
)
def test_what_is_no_name_of_a_tensor(store: Store, name: object) -> None:
    with store.begin() as transaction:
        transaction.write("fine", np.arange(3))
        with pytest.raises(InvalidInputError) as caught:
            transaction.write(name, np.arange(3))  # type: ignore[arg-type]
        assert len(str(caught.value)) < 1000
    assert list(store.read("main@1")) == ["fine"]


def test_a_name_that_files_cannot_hold(store: Store, sentinel: Path) -> None:
    with store.begin() as transaction:
        transaction.write("__metadata__", np.arange(3))
    assert store.read("main@1")["__metadata__"].tolist() == [0, 1, 2]
    with pytest.raises(DcrError, match="__metadata__"):
        store.checkout("main@1", sentinel / "out")
    assert not any(sentinel.glob("out/*"))


@pytest.mark.parametrize(
    "line",
    ["", ".", "..", "../x", "/abs", "a/b", "a\0", "a\n", "x" * 129, "x" * 10_000, ".x", None, 3],
    ids=lambda n: repr(n)[:12],
)
def test_names_of_lines(store: Store, line: Any) -> None:
    """Refused before any request for them."""
    watched = store._catalog.objects = store._objects = Watched(store._objects)
    calls: list[Callable[[], object]] = [
        lambda: store.begin(line),
        lambda: store.log(line),
        lambda: store.read(line),
        lambda: store.show(line),
        lambda: store.diff("main", line),
    ]
    if isinstance(line, str):
        calls += [lambda: store.read(f"{line}@0"), lambda: store.verify(line), lambda: store.begin(base=line)]
    for call in calls:
        with pytest.raises(InvalidInputError) as caught:
            call()
        assert len(str(caught.value)) < 500
    assert all(key.startswith(("log/main/", "versions/main/", "layouts/", "dcr.json")) for _, key in watched.requests)


# ---------------------------------------------------------------------- paths in manifests

PATHS = [
    "../outside.txt", "../../secret.txt", "/tmp/outside.txt", "a/../../outside.txt", "a/..", "..", ".", "", "./a",
    "a//b", "a/", ".dcr/marker.json", ".dcr/lock", "a/.dcr/x", "a\0b", "a\\..\\b", "x" * 256, "x" * 10_000,
    "\ud800", "a\nb",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["side", "weights"])
@pytest.mark.parametrize("path", PATHS, ids=lambda path: repr(path)[:24])
def test_paths_of_files(store: Store, sentinel: Path, path: str, kind: str) -> None:
    data = b"evil"
    store._objects.put("elsewhere/evil", data)
    ref = ObjectRef.of("elsewhere/evil", data)
    file = {"path": "PLACE", "kind": kind, "object" if kind == "side" else "header": ref.to_json()}
    if kind == "weights":
        file["nbytes"] = 4

    def edit(manifest: bytes) -> bytes:
        document = json.loads(manifest)
        document["files"] = [file]
        return canonical.encode(document).replace(b'"PLACE"', json.dumps(path).encode())

    publish(store, LAYOUT, some(), None, edit_manifest=edit)
    (sentinel / "out").mkdir()
    for call in (store.pull, store.checkout):
        with pytest.raises(FormatError) as caught:
            call(*((sentinel / "out", "main@1") if call == store.pull else ("main@1", sentinel / "out")))
        assert caught.value.key is not None
        assert "manifest.json" in caught.value.key
    with pytest.raises(FormatError):
        store.read("main@1")
    assert not any((sentinel / "out").iterdir())
    assert not store.verify().ok


def with_weights(store: Store, *paths: str) -> tuple[CheckpointFile, ...]:
    """Return the files of a version of LAYOUT: the weights, and side files at `paths`."""
    store._objects.put("elsewhere/evil", b"evil")
    data = header({"a": {"dtype": "U8", "shape": [200], "data_offsets": [0, 200]}})
    store._objects.put("elsewhere/header", data)
    return (
        CheckpointFile("model.safetensors", "weights", ObjectRef.of("elsewhere/header", data), len(data) + 200),
        *(CheckpointFile(path, "side", ObjectRef.of("elsewhere/evil", b"evil"), 4) for path in paths),
    )


def test_files_of_one_path_in_another(store: Store, sentinel: Path) -> None:
    """A file and a directory of one name cannot both be: an error, not a traceback, and nothing outside."""
    publish(store, LAYOUT, some(), None, files=with_weights(store, "x", "x/y"))
    with pytest.raises(DcrError):
        store.checkout("main@1", sentinel / "out")


def test_links_in_the_target_are_not_followed(store: Store, sentinel: Path) -> None:
    """A directory in the target is a link to outside: a version's file below it is not written there."""
    publish(store, LAYOUT, some(), None, files=with_weights(store, "sub/secret.txt"))
    (sentinel / "out").mkdir()
    (sentinel / "out" / "sub").symlink_to(sentinel.parent, target_is_directory=True)
    with pytest.raises(InvalidInputError, match="symbolic link"):
        store.pull(sentinel / "out", "main@1", force=True)


@pytest.mark.parametrize("name", ["secret.txt", "model.safetensors"])
def test_a_file_of_the_target_that_is_a_link(store: Store, sentinel: Path, name: str) -> None:
    """It is replaced, not written through."""
    if name == "secret.txt":
        publish(store, LAYOUT, some(), None, files=with_weights(store, "secret.txt"))
    (sentinel / "out").mkdir()
    (sentinel / "out" / name).symlink_to(
        sentinel.parent / ("secret.txt" if name == "secret.txt" else "beside/model.safetensors")
    )
    store.pull(sentinel / "out", "main", force=True)
    assert not (sentinel / "out" / name).is_symlink()


# ---------------------------------------------------------------------- headers that lie


def header(document: Any, *, n: int | None = None, body: bytes = b"") -> bytes:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    return (len(data) if n is None else n).to_bytes(8, "little") + data + body


F4 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
LIES: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"\x01" * 7,
    "length past the end": header(b"{}", n=100),
    "gigantic length": header(b"{}", n=2**63 - 1),
    "all ones": b"\xff" * 8,
    "length of a terabyte": header(b"{}", n=2**40),
    "length 0": header(b"", n=0),
    "no JSON": header(b"{]"),
    "no UTF-8": header(b'{"\xff":1}'),
    "a list": header([F4]),
    "a number": header(1),
    "deep": header(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "duplicate tensor": header(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                               b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', body=b"x"),
    "duplicate field": header(b'{"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}', body=b"x"),
    "outside": header({"a": {**F4, "data_offsets": [0, 8]}}, body=b"xxxx"),
    "beyond": header({"a": {**F4, "data_offsets": [2**62, 2**62 + 4]}}, body=b"xxxx"),
    "negative": header({"a": {**F4, "data_offsets": [-4, 0]}}, body=b"xxxx"),
    "backwards": header({"a": {**F4, "data_offsets": [4, 0]}}, body=b"xxxx"),
    "overlap": header({"a": F4, "b": F4}, body=b"xxxx"),
    "partial overlap": header({"a": {**F4, "shape": [2], "data_offsets": [0, 8]},
                               "b": {**F4, "data_offsets": [4, 8]}}, body=b"x" * 8),
    "hole": header({"a": F4, "b": {**F4, "data_offsets": [8, 12]}}, body=b"x" * 12),
    "more behind": header({"a": F4}, body=b"xxxxyyyy"),
    "other size": header({"a": {**F4, "shape": [2]}}, body=b"xxxx"),
    "huge shape": header({"a": {**F4, "shape": [2**62, 2**62]}}, body=b"xxxx"),
    "wrapping shape": header({"a": {**F4, "shape": [2**32, 2**32, 0x40000001]}}, body=b"xxxx"),
    "negative shape": header({"a": {**F4, "shape": [-1]}}, body=b"xxxx"),
    "fractional shape": header({"a": {**F4, "shape": [1.0]}}, body=b"xxxx"),
    "true as a size": header({"a": {**F4, "shape": [True]}}, body=b"xxxx"),
    "true as an offset": header({"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, True]}}, body=b"x"),
    "three offsets": header({"a": {**F4, "data_offsets": [0, 4, 4]}}, body=b"xxxx"),
    "unknown dtype": header({"a": {**F4, "dtype": "F7"}}, body=b"xxxx"),
    "no dtype": header({"a": {"shape": [1], "data_offsets": [0, 4]}}, body=b"xxxx"),
    "empty name": header({"": F4}, body=b"xxxx"),
    "NUL in a name": header({"a\0b": F4}, body=b"xxxx"),
    "half a character": header(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', body=b"x"),
    "a name of a megabyte": header({"x" * (1 << 20): F4}, body=b"xxxx"),
    "metadata a number": header({"__metadata__": 5, "a": F4}, body=b"xxxx"),
    "NaN": header(b'{"a":NaN}'),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_headers_of_checkpoints(store: Store, sentinel: Path, lie: str) -> None:
    """Published: refused, naming the file. In a target: foreign weights, which are not touched unless forced."""
    directory = sentinel / "checkpoint"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(LIES[lie])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((FormatError, InvalidInputError)) as caught, store.begin() as transaction:
        transaction.write_checkpoint(directory)
    assert caught.value.key is not None
    assert "model.safetensors" in f"{caught.value.key} {caught.value}"
    assert len(str(caught.value)) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, (
        "memory follows the file, not its words"
    )
    assert len(store.log()) == 1
    with pytest.raises(InvalidInputError, match="no version of this store"):
        store.pull(directory, "main@0")
    assert (directory / "model.safetensors").read_bytes() == LIES[lie]
    store.pull(directory, "main@0", force=True)
    assert store.compare_directory("main@0", directory).ok


INDICES = [
    b"", b"[]", b"{}", b'{"weight_map":[]}', b'{"weight_map":{"a":"../../secret.txt"}}', b'{"weight_map":{"a":5}}',
    b'{"weight_map":{"a":"missing.safetensors"}}', b"{" * 10_000,
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=lambda index: repr(index)[:30])
def test_indices_of_checkpoints(store: Store, sentinel: Path, index: bytes) -> None:
    """An index that lies never leads out of the directory."""
    directory = write_hf(sentinel / "checkpoint", STATE, 2)
    (directory / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises((FormatError, InvalidInputError, NotFoundError)), store.begin() as transaction:
        transaction.write_checkpoint(directory)
    assert len(store.log()) == 1


@pytest.mark.parametrize(
    ("document", "nbytes"),
    [
        (LIES["empty"], 0),
        (LIES["gigantic length"], 10),
        (header({"a": {"dtype": "U8", "shape": [200], "data_offsets": [0, 200]}}), 2**52),
        (header({"a": {"dtype": "U8", "shape": [200], "data_offsets": [0, 200]}}), 0),
        (header({"a": {"dtype": "U8", "shape": [2**50], "data_offsets": [0, 2**50]}}), 2**50 + 71),
        (header({"b": {"dtype": "U8", "shape": [200], "data_offsets": [0, 200]}}), None),
        (header({"a": {"dtype": "I8", "shape": [200], "data_offsets": [0, 200]}}), None),
        (header({"a": {"dtype": "U8", "shape": [2, 100], "data_offsets": [0, 200]}}), None),
        (header({"a": {"dtype": "U8", "shape": [200], "data_offsets": [0, 200]},
                 "b": {"dtype": "U8", "shape": [0], "data_offsets": [200, 200]}}), None),
        (header({}), None),
    ],
)  # fmt: skip
def test_headers_of_manifests(store: Store, sentinel: Path, document: bytes, nbytes: int | None) -> None:
    """A version's own header does not fit its layout: nothing is put into the directory, least of all exabytes."""
    store._objects.put("elsewhere/header", document)
    ref = ObjectRef.of("elsewhere/header", document)
    file = CheckpointFile("model.safetensors", "weights", ref, len(document) + 200 if nbytes is None else nbytes)
    publish(store, LAYOUT, some(), None, files=(file,))
    with pytest.raises(FormatError) as caught:
        store.checkout("main@1", sentinel / "out")
    assert caught.value.key is not None
    assert [path for path in (sentinel / "out").rglob("*") if path.suffix == ".safetensors"] == []
    assert store.read("main@1")["a"].tolist() == [7] * 200, "the tensors themselves are fine"


# ---------------------------------------------------------------------- layouts, seals, records


def layout_with(**changed: Any) -> Layout:
    """Return the layout of a and b, said by a document that says something else."""
    layout = layout_of(a=("U8", 100), b=("U8", 100))
    document = json.loads(layout.to_json_bytes())
    for place, value in changed.items():
        if place == "spaces":
            document["spaces"] = value
        else:
            document["tensors"][1].update({place: value})
    return replace(layout, _document=canonical.encode(document))


@pytest.mark.parametrize(
    "changed",
    [
        {"start": 0},
        {"start": 64},
        {"start": 99},
        {"start": 192},
        {"start": 2**52},
        {"start": -64},
        {"start": 10**30},
        {"name": "a"},
        {"aliases": ["a"]},
        {"aliases": ["x", "x"]},
        {"shape": [10**9]},
        {"shape": [2**62, 2**62]},
        {"dtype": "F99"},
        {"dtype": "F32"},
        {"space": "u16"},
        {"spaces": {"u8": 10**18, "u16": 0, "u32": 0, "u64": 0}},
        {"spaces": {"u8": 256}},
        {"name": ""},
        {"name": "a\0"},
    ],
    ids=str,
)
def test_layouts(store: Store, sentinel: Path, changed: dict[str, Any]) -> None:
    layout = layout_with(**changed)
    publish(store, layout, [Part()], None)
    for call in (
        lambda: store.read("main@1"),
        lambda: store.checkout("main@1", sentinel / "out"),
        lambda: store.diff("main@0", "main@1"),
    ):
        with pytest.raises(FormatError) as caught:
            call()
        assert caught.value.key is not None
        assert caught.value.key.startswith(f"layouts/{layout.sha256}.json")
    assert not any(sentinel.glob("out/*.safetensors"))
    problem = store.verify().problems[0]
    assert problem.key.startswith(f"layouts/{layout.sha256}.json")


def seal_with(**changed: Any) -> Callable[[Seal], Seal]:
    def edit(seal: Seal) -> Seal:
        if "shard" in changed:
            return replace(seal, arrays=(replace(seal.arrays[0], shard=changed["shard"]),))
        if "array_twice" in changed:
            return replace(seal, arrays=(*seal.arrays, replace(seal.arrays[0], shard=2 * seal.arrays[0].shard)))
        (first, *others) = seal.partitions
        if "twice" in changed:
            return replace(seal, partitions=(first, *others, first))
        return replace(seal, partitions=(replace(first, **changed), *others))

    return edit


@pytest.mark.parametrize(
    "changed",
    [
        {"shard": 2**52},
        {"shard": 64},
        {"index": 2**52},
        {"index": 1},
        {"nbytes": 2**52},
        {"twice": True},
        {"array_twice": True},
        {"sha256": "0" * 64},
        {"incarnation": "0" * 16},
        {"array": "u64/mask"},
    ],
    ids=str,
)
def test_seals(store: Store, changed: dict[str, Any]) -> None:
    """Partitions that are none: an error, and soon."""
    publish(store, LAYOUT, some(), None, edit_seal=seal_with(**changed))
    started = time.monotonic()
    with pytest.raises((IntegrityError, FormatError)) as caught:
        store.read("main@1")
    assert caught.value.key is not None
    assert time.monotonic() - started < 20
    assert not store.verify(deep=True).ok


def test_an_array_that_a_seal_names_twice(store: Store) -> None:
    publish(store, LAYOUT, some(), None, edit_seal=seal_with(array_twice=True))
    with pytest.raises(FormatError, match="names an array twice") as caught:
        store.read("main@1")
    key = (caught.value.key or "").removesuffix("#seal")
    assert key in store._objects.list("versions/")
    assert "/journal/w0." in key
    assert [problem.key for problem in store.verify().problems] == [key]


@pytest.mark.parametrize("writers", [("w1",), ("w0", "w1")])
@pytest.mark.parametrize("n_after", [0, 9], ids=["from the records", "from a log checkpoint"])
def test_seals_of_other_writers_than_begun(store: Store, writers: tuple[str, ...], n_after: int) -> None:
    """A committer that left a writer out would have lost what that one changed, under a root of its own."""
    publish(store, LAYOUT, some(), None, writers=writers)
    for _ in range(n_after):
        publish(store, LAYOUT, some(), None)
    again = dcr_store.open(store.url)
    with pytest.raises(IntegrityError, match="one seal of each writer") as caught:
        again.read("main@1")
    assert (caught.value.expected, caught.value.found) == (sorted(writers), ["w0"])
    assert caught.value.key == again._catalog.resolve("main@1").row.manifest.key
    assert [problem.key for problem in again.verify().problems if "writer" in problem.what] == [caught.value.key]


def test_keys_that_lead_out_of_the_store(store: Store) -> None:
    for key in ("../../secret.txt", "/etc/passwd", "a/../../../secret.txt"):

        def edit(manifest: bytes, key: str = key) -> bytes:
            document = json.loads(manifest)
            document["seals"][0]["key"] = key
            return canonical.encode(document)

        publish(store, LAYOUT, some(), None, edit_manifest=edit)
        with pytest.raises(FormatError, match="'key' is wrong"):
            store.read("main")


def test_duplicate_keys_in_what_a_store_holds(store: Store) -> None:
    def twice(data: bytes) -> bytes:
        return b'{"format":"first",' + data[1:]

    publish(store, LAYOUT, some(), None, edit_manifest=twice)
    with pytest.raises(FormatError, match="duplicate key"):
        store.read("main@1")
    layout = replace(LAYOUT, _document=twice(LAYOUT.to_json_bytes()))
    publish(store, layout, some(), None)
    with pytest.raises(FormatError, match="duplicate key"):
        store.read("main@2")
    document = store._objects.get("dcr.json")
    store._objects.put("dcr.json", twice(document))
    with pytest.raises(FormatError, match="duplicate key"):
        dcr_store.open(store.url)
    store._objects.put("dcr.json", document)
    log = store._catalog.log("main")
    key = f"log/main/{log.refresh().length:020d}.json"
    store._objects.put(key, twice(begin(log.state).to_bytes()))
    with pytest.raises(FormatError, match="duplicate key") as caught:
        dcr_store.open(store.url).log()
    assert caught.value.key == key
    store._objects.delete(key)


def test_records_of_a_later_release(store: Store) -> None:
    log = store._catalog.log("main")
    key = f"log/main/{log.refresh().length:020d}.json"
    document = {**json.loads(begin(log.state).to_bytes()), "kind": "merge"}
    store._objects.put(key, canonical.encode(document))
    with dcr_store.open(store.url) as other:
        for call in (other.log, lambda: other.read("main@0"), other.begin):
            with pytest.raises(FormatError, match="unknown kind of log record; upgrade dcr_store") as caught:
                call()  # type: ignore[operator]
            assert caught.value.key == key
    store._objects.delete(key)


# ---------------------------------------------------------------------- stores


def rewritten(store: Store, **changed: Any) -> None:
    document = {**json.loads(store._objects.get("dcr.json")), **changed}
    store._objects.put("dcr.json", canonical.encode(document))


@pytest.fixture
def spare(sentinel: Path) -> Store:
    """A store whose document may be spoilt."""
    store = dcr_store.create(sentinel / "spare", chunk_elements=64)
    with store.begin() as transaction:
        transaction.write("a", np.arange(3))
    store.close()
    return store


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"version": "2.0"}, "another major"),
        ({"version": "0.9"}, "another major"),
        ({"version": "1"}, "version"),
        ({"version": 1}, "version"),
        ({"features": ["encryption"]}, "features"),
        ({"features": "none"}, "features"),
        ({"codec": "dcr.delta.2"}, "codec"),
        ({"chunk_elements": 2**60}, "chunk_elements"),
        ({"chunk_elements": 10**400}, "chunk_elements"),
        ({"chunk_elements": 0}, "chunk_elements"),
        ({"chunk_elements": 64.0}, "chunk_elements"),
        ({"chunk_elements": True}, "chunk_elements"),
        ({"store_id": "../x"}, "store_id"),
        ({"format": "icechunk"}, "foreign"),
        ({"created_at": "yesterday"}, "created_at"),
    ],
    ids=str,
)
def test_store_documents(spare: Store, changed: dict[str, Any], match: str) -> None:
    rewritten(spare, **changed)
    before = tree(Path(spare.url))
    with pytest.raises(FormatError, match=match):
        dcr_store.open(spare.url)
    with pytest.raises(ConflictError):
        dcr_store.create(spare.url)
    assert tree(Path(spare.url)) == before


class Newer:
    """Makes store documents as a later release does."""

    from_bytes = StoreDocument.from_bytes

    def __new__(cls, *fields: Any) -> StoreDocument:  # type: ignore[misc]
        return StoreDocument(*fields, version=(1, 7))


def test_a_newer_minor_version_is_read_and_not_written(sentinel: Path) -> None:
    """A later release made and filled it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcr_store.format.documents.FORMAT_VERSION", (1, 7))
        patch.setattr("dcr_store.store.StoreDocument", Newer)
        with dcr_store.create(sentinel / "store") as store, store.begin() as transaction:
            transaction.write("a", np.arange(3))
    assert json.loads((sentinel / "store" / "dcr.json").read_bytes())["version"] == "1.7"
    with dcr_store.open(sentinel / "store") as store:
        assert store.read()["a"].tolist() == [0, 1, 2]
        store.checkout("main", sentinel / "out")
        assert store.verify(deep=True).ok
        before = tree(sentinel / "store")
        with pytest.raises(FormatError, match="newer minor"):
            store.begin()
        assert tree(sentinel / "store") == before


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\0" * 500, b"[]", b"null", b"hello", b"\xff\xfe", b'{"format":"dcr-store"}', b"{" * 10_000]
)
def test_store_documents_that_are_none(sentinel: Path, content: bytes) -> None:
    (sentinel / "store").mkdir()
    (sentinel / "store" / "dcr.json").write_bytes(content)
    with pytest.raises(FormatError) as caught:
        dcr_store.open(sentinel / "store")
    assert caught.value.key == "dcr.json"
    with pytest.raises(ConflictError):
        dcr_store.create(sentinel / "store")
    assert (sentinel / "store" / "dcr.json").read_bytes() == content


def test_directories_that_are_no_store(sentinel: Path) -> None:
    (sentinel / "empty").mkdir()
    (sentinel / "photos").mkdir()
    (sentinel / "photos" / "cat.jpg").write_bytes(b"meow")
    write_hf(sentinel / "model", STATE)
    (sentinel / "half" / "log" / "main").mkdir(parents=True)
    (sentinel / "half" / "log" / "main" / f"{0:020d}.json").write_bytes(b"{}")
    (sentinel / "file").write_bytes(b"")
    before = tree(sentinel)
    for name in ("missing", "empty", "photos", "model", "half", "half/log", "file"):
        with pytest.raises((NotFoundError, StorageError)) as caught:
            dcr_store.open(sentinel / name)
        assert name in f"{caught.value.key} {caught.value}"
    assert tree(sentinel) == before
    assert not (sentinel / "missing").exists()


def test_a_store_made_again_over_what_is_left_of_one(sentinel: Path) -> None:
    """The document is gone and the log is not: a new store does not take it for its own."""
    with dcr_store.create(sentinel / "store", chunk_elements=64) as store, store.begin() as transaction:
        transaction.write("a", np.arange(3))
    (sentinel / "store" / "dcr.json").unlink()
    with pytest.raises(NotFoundError):
        dcr_store.open(sentinel / "store")
    try:
        again = dcr_store.create(sentinel / "store", chunk_elements=64)
    except ConflictError:
        return
    with pytest.raises(IntegrityError, match="the hash chain is broken"):
        again.read("main")
    with pytest.raises(IntegrityError, match="the hash chain is broken"):
        again.begin()


def test_a_line_of_another_store_copied_in(store: Store, sentinel: Path) -> None:
    with dcr_store.create(sentinel / "other", chunk_elements=64) as other, other.begin("exp") as transaction:
        transaction.write("a", np.arange(3))
    for part in ("log", "versions"):
        shutil.copytree(sentinel / "other" / part / "exp", sentinel / "store" / part / "exp")
    with pytest.raises(IntegrityError, match="the hash chain is broken") as caught:
        store.read("exp")
    assert caught.value.key == f"log/exp/{0:020d}.json"
    assert any(problem.key.startswith("log/exp/") for problem in store.verify().problems)


@pytest.mark.parametrize("value", [0, 1, 63, 65, 2**25, 2**60, -64, 64.0, "64", None, True, [64]], ids=repr)
def test_options_of_create(sentinel: Path, value: Any) -> None:
    with pytest.raises(InvalidInputError, match="chunk_elements"):
        dcr_store.create(sentinel / "new", chunk_elements=value)
    assert not (sentinel / "new").exists()
    with pytest.raises(InvalidInputError, match="codec"):
        dcr_store.create(sentinel / "new", codec="zip")
    with dcr_store.create(sentinel / "fine", chunk_elements=1 << 24) as store:
        with store.begin() as transaction:
            transaction.write("a", np.arange(5, dtype=np.uint8))
        assert store.read()["a"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("url", ["", "ftp://x/y", "nonsense://x", "s3://", "file://", 5, None, b"x", "a\0b"], ids=repr)
def test_urls(sentinel: Path, url: Any) -> None:
    here = Path.cwd()
    os.chdir(sentinel)
    try:
        for call in (dcr_store.open, dcr_store.create):
            with pytest.raises(DcrError) as caught:
                call(url)
            assert caught.value.kind in ("invalid-input", "not-found", "storage")
    finally:
        os.chdir(here)
    assert not any(sentinel.iterdir())


@pytest.mark.parametrize("url", ["~no-such-user/store", "file://~no-such-user/store", "LOCAL://~no-such-user/x"])
def test_homes_of_users_that_do_not_exist(sentinel: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.chdir(sentinel)
    for call in (dcr_store.open, dcr_store.create):
        with pytest.raises(InvalidInputError, match="there is no user 'no-such-user' here"):
            call(url)
    assert not any(sentinel.iterdir())
    with dcr_store.create("./~no-such-user/store") as store:
        assert store.url == f"{sentinel}/~no-such-user/store"


@pytest.mark.parametrize("scheme", ["file", "FILE", "File", "local", "LOCAL"])
def test_schemes_in_any_case(sentinel: Path, scheme: str) -> None:
    with dcr_store.create(f"{scheme}://{sentinel}/Store") as store:
        assert store.url == f"{sentinel}/Store", "the path keeps its case"
    assert dcr_store.open(f"{scheme.swapcase()}://{sentinel}/Store").store_id == store.store_id


def test_schemes_of_other_backends_in_any_case() -> None:
    name = secrets.token_hex(8)
    with dcr_store.create(f"MEMORY://{name}") as store:
        assert dcr_store.open(f"memory://{name}").store_id == store.store_id
    assert open_objects("S3://Bucket/Prefix").url == "s3://Bucket/Prefix"


@pytest.mark.parametrize("options", [3, "key", [("key", "secret")]], ids=str)
def test_storage_options_that_are_none(options: Any) -> None:
    for url in ("s3://bucket/x", "memory://x", "x"):
        with pytest.raises(InvalidInputError, match="storage_options: are no options") as caught:
            dcr_store.open(url, storage_options=options)
        assert "secret" not in str(caught.value)


class PathLike:
    """What ``os.fspath`` is told."""

    def __init__(self, path: object) -> None:
        self.path = path

    def __fspath__(self) -> Any:
        return self.path


NO_PATHS = ["", "a\0b", b"bytes", 3, 0.5, True, [], object(), PathLike(b"bytes"), PathLike(3), PathLike("a\0b")]


@pytest.mark.parametrize("path", [*NO_PATHS, None], ids=lambda path: type(path).__name__)
def test_what_is_no_path(store: Store, sentinel: Path, monkeypatch: pytest.MonkeyPatch, path: Any) -> None:
    """``None`` is a baseline: a temporary one."""
    (sentinel / "work").mkdir()
    monkeypatch.chdir(sentinel / "work")
    calls: dict[str, Callable[[], object]] = {
        "pull": lambda: store.pull(path),
        "checkout": lambda: store.checkout("main", path),
        "compare_directory": lambda: store.compare_directory("main", path),
        "write_checkpoint": lambda: write_checkpoint(store, path),
    }
    for name, call in calls.items():
        with pytest.raises(InvalidInputError, match="directory: is no path"):
            pytest.fail(f"{name} took it: {call()}")
    if path is not None:
        with pytest.raises(InvalidInputError, match="baseline: is no path"):
            store.begin(baseline=path)
    for url_call in (dcr_store.open, dcr_store.create):
        with pytest.raises(InvalidInputError, match="not a store's URL"):
            url_call(path)
    assert not any((sentinel / "work").iterdir())


def write_checkpoint(store: Store, path: Any) -> None:
    with store.begin() as transaction:
        transaction.write_checkpoint(path)


def test_metadata_come_back_and_do_no_harm(store: Store) -> None:
    """Whatever may be said is told again as it was; the rest is refused (test_transaction)."""
    metadata = {
        "__proto__": {}, "../../x": "../../y", "big": 2**200, "text": "\x1b[2J\0\u2028", "deep": [[[[[[[[{}]]]]]]]],
        "long": "x" * (1 << 20), "": None, "number": 1e308,
    }  # fmt: skip
    with store.begin(metadata=metadata, message="\x1b[2J" * 1000) as transaction:
        transaction.write("a", np.arange(3))
    with dcr_store.open(store.url) as other:
        info = other.log()[-1]
        assert info.metadata == metadata
        assert info.message == "\x1b[2J" * 1000
        assert other.verify(deep=True).ok


def test_metadata_as_deep_as_may_be_survive_checkpoints() -> None:
    """What a record may hold, a checkpoint that wraps it may hold too."""
    deep: Any = {}
    for _ in range(canonical.MAX_METADATA_DEPTH - 1):
        deep = {"a": deep}
    with dcr_store.create(f"memory://{secrets.token_hex(8)}") as store:
        for _ in range(9):
            with store.begin(metadata=deep) as transaction:
                transaction.write("a", np.arange(3))
        assert store._objects.list("log/main/checkpoints/")
        with dcr_store.open(store.url) as other:
            assert [info.metadata for info in other.log()] == [deep] * 9
        with pytest.raises(InvalidInputError, match="levels"):
            store.begin(metadata={"a": deep})
        assert len(store.log()) == 9


def test_a_log_with_hundreds_of_aborted_transactions() -> None:
    """Somebody began and died, over and over: the line still works."""
    with dcr_store.create(f"memory://{secrets.token_hex(8)}") as store:
        writer = Writer(Watched(store._objects), "busy")
        writer.state = replace(writer.state, last_sha256=store._catalog.store_sha256)
        for _ in range(500):
            writer.put(begin(writer.state))
            writer.put(abort(writer.state))
        with store.begin("busy") as transaction:
            transaction.write("a", np.arange(3))
        with dcr_store.open(store.url) as other:
            assert other.read("busy")["a"].tolist() == [0, 1, 2]
