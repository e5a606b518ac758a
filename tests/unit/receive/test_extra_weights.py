"""Weights beside those that a directory follows: refused, or removed by force; our own leftovers never are."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from states import assert_same, series, tree, write_hf

import dcr_store
from dcr_store import events
from dcr_store.errors import InvalidInputError
from dcr_store.store import Store
from dcr_store.targets.checkpoint import open_checkpoint

STATES = series(4, seed=3)
N_FILES = (1, 3, 2, 1)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with checkpoints and with a store of them."""
    place = tmp_path_factory.mktemp("template")
    with dcr_store.create(place / "store", chunk_elements=1024) as store:
        for i, state in enumerate(STATES):
            with store.begin() as transaction:
                transaction.write_checkpoint(write_hf(place / f"run{i}", state, N_FILES[i], i))
    return place


@pytest.fixture
def store(tmp_path: Path, template: Path) -> Iterator[Store]:
    """That store, for one test, with the checkpoints beside it."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    with dcr_store.open(tmp_path / "store") as store:
        yield store


def shown(directory: Path) -> dict[str, bytes]:
    return {path: data for path, data in tree(directory).items() if not path.startswith(".dcr")}


def put_foreign(out: Path, kind: str) -> str:
    name = {"index": "model.safetensors.index.json.safetensors.index.json", "distributed": "__0_0.distcp"}.get(
        kind, "stray.safetensors"
    )
    if kind == "file":
        (out / name).write_bytes((out / sorted(path.name for path in out.glob("*.safetensors"))[0]).read_bytes())
    elif kind in ("torn", "distributed"):
        (out / name).write_bytes(b"\0" * 100)
    elif kind == "link":
        (out / name).symlink_to("nowhere")
    elif kind == "index":
        (out / name).write_text('{"weight_map": {"x": "y.safetensors"}}')
    return name


@contextlib.contextmanager
def stopped_at(point: str, monkeypatch: pytest.MonkeyPatch, nth: int = 1) -> Iterator[None]:
    """Interrupt what is called inside when it reaches a point for the nth time, and require that it does."""
    n_seen = 0

    def stop(reached: str, place: str = "") -> None:
        nonlocal n_seen
        n_seen += reached == point
        if n_seen == nth:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(events, "reached", stop)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("kind", ["file", "torn", "link", "index", "distributed"])
@pytest.mark.parametrize("marker", ["clean", "lost", "damaged"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_refused_unless_forced(store: Store, tmp_path: Path, kind: str, marker: str, number: int) -> None:
    out = tmp_path / "out"
    store.pull(out, "main@1")
    name = put_foreign(out, kind)
    if marker == "lost":
        (out / ".dcr" / "marker.json").unlink()
    elif marker == "damaged":
        (out / ".dcr" / "marker.json").write_bytes(b"{")
    before = tree(out)
    with pytest.raises(InvalidInputError, match=r"weights.*nothing was changed.*--force.*found .*") as caught:
        store.pull(out, f"main@{number}")
    assert name in str(caught.value.found)
    assert caught.value.key == str(out)
    assert tree(out) == before
    result = store.pull(out, f"main@{number}", force=True)
    assert shown(out) == shown(tmp_path / f"run{number}")
    assert not (out / name).is_symlink()
    if marker == "clean":
        assert result.previous == "main@1"
        assert result.chunks_healed == 0, "what the directory holds of the version is used"
    assert store.compare_directory(f"main@{number}", out).ok
    with open_checkpoint(out) as checkpoint:
        assert set(checkpoint.tensors) == set(STATES[number])


@pytest.mark.parametrize("options", [{}, {"force": True}, {"mode": "copy"}])
@pytest.mark.parametrize("names", [(".metadata", "__0_0.distcp"), (".metadata",), ("__1_0.distcp",)])
def test_no_distributed_checkpoint_gets_weights_beside_it(
    store: Store, tmp_path: Path, names: tuple[str, ...], options: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in names:
        (out / name).write_bytes(b"theirs")
    if options.get("force"):
        store.pull(out, "main@0", force=True)
        assert shown(out) == shown(tmp_path / "run0")
        return
    with pytest.raises(InvalidInputError, match=f"the directory holds .*found '?{names[0]}") as caught:
        store.pull(out, "main@0", **options)
    assert caught.value.key == str(out)
    assert tree(out) == dict.fromkeys(names, b"theirs")


def test_no_publish_takes_one_of_two_checkpoints(store: Store, tmp_path: Path) -> None:
    for name in (".metadata", "__0_0.distcp"):
        (tmp_path / "run1" / name).write_bytes(b"theirs")
    begun = store.begin()
    with pytest.raises(InvalidInputError, match="which of the two is meant") as caught:
        begun.write_checkpoint(tmp_path / "run1")
    begun.abort()
    assert caught.value.key == str(tmp_path / "run1")
    assert re.fullmatch(r"model-00001-of-00003\.safetensors, .* and \.metadata, __0_0\.distcp", str(caught.value.found))
    with pytest.raises(InvalidInputError, match="this is a checkpoint"):
        dcr_store.create(saved(tmp_path / "distributed"))
    with pytest.raises(InvalidInputError, match="is a checkpoint; give the baseline"):
        store.begin(baseline=saved(tmp_path / "distributed"))


def saved(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "__0_0.distcp").write_bytes(b"theirs")
    return folder


def test_what_others_keep_below_or_under_other_names_stays(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    store.pull(out, "main@0")
    (out / "adapter").mkdir()
    (out / "adapter" / "adapter_model.safetensors").write_bytes(b"theirs")
    (out / "notes.txt").write_text("theirs")
    (out / "dir.safetensors").mkdir()
    for number in (1, 2, 0, 3):
        store.pull(out, f"main@{number}")
    assert (out / "adapter" / "adapter_model.safetensors").read_bytes() == b"theirs"
    assert (out / "notes.txt").read_text() == "theirs"
    assert (out / "dir.safetensors").is_dir()


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize(
    "point", ["pull.dirty", "pull.seeded", "pull.staged", "pull.file.moved", "pull.side.stored", "pull.applied"]
)
def test_what_a_pull_that_was_stopped_left_is_not_foreign(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, lost: bool
) -> None:
    """Stopped on the way from 1 to 2, and then to wherever."""
    for goal in range(4):
        out = tmp_path / f"out{goal}"
        store.pull(out, "main@1")

        with stopped_at(point, monkeypatch):
            store.pull(out, "main@2")
        if lost:
            (out / ".dcr" / "marker.json").unlink()
        store.pull(out, f"main@{goal}")
        assert shown(out) == shown(tmp_path / f"run{goal}")
        assert_same(store.read(f"main@{goal}"), STATES[goal])


@pytest.fixture(scope="module")
def renaming(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions with the same tensors in files of other names, and one with all in one file."""
    place = tmp_path_factory.mktemp("renaming")
    with dcr_store.create(place / "store", chunk_elements=1024) as store:
        for number, state in enumerate([STATES[0], STATES[1], STATES[1]]):
            run = write_hf(place / f"run{number}", state, 1 if number == 2 else 2, 0)
            (run / "model.safetensors.index.json").unlink(missing_ok=True)
            if number == 0:
                for file in list(run.glob("model-*.safetensors")):
                    file.rename(run / file.name.replace("model", "weights"))
            with store.begin() as transaction:
                transaction.write_checkpoint(run)
    return place


@pytest.fixture
def renamed(tmp_path: Path, renaming: Path) -> Iterator[Store]:
    """That store, for one test, with the checkpoints beside it."""
    shutil.copytree(renaming, tmp_path, dirs_exist_ok=True)
    with dcr_store.open(tmp_path / "store") as store:
        yield store


@pytest.mark.parametrize("n_renamed", [1, 2])
@pytest.mark.parametrize("damage", ["deleted", "emptied"])
@pytest.mark.parametrize("goal", [0, 1, 2])
def test_files_that_were_renamed_and_not_yet_changed_are_known_again(
    renamed: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_renamed: int, damage: str, goal: int
) -> None:
    """Stopped on the way from 0 to 1, which has the same files under other names; then the marker is lost."""
    out = tmp_path / "out"
    renamed.pull(out, "main@0")
    with stopped_at("pull.file.renamed", monkeypatch, n_renamed):
        renamed.pull(out, "main@1")
    marker = out / ".dcr" / "marker.json"
    if damage == "deleted":
        marker.unlink()
    else:
        marker.write_bytes(b"")
    result = renamed.pull(out, f"main@{goal}")
    assert shown(out) == shown(tmp_path / f"run{goal}")
    if goal == 0:
        assert (result.chunks_written, result.nbytes_fetched) == (0, 0)


def test_a_side_file_of_a_third_version_goes_when_the_marker_is_lost(store: Store, tmp_path: Path) -> None:
    """A pull that died had put it where the version that the weights are of has another one."""
    for number, text in ((4, "fourth"), (5, "fifth")):
        run = write_hf(tmp_path / f"run{number}", STATES[number - 4], N_FILES[number - 4], number - 4)
        (run / "merges.txt").write_text(text)
        with store.begin() as transaction:
            transaction.write_checkpoint(run)
    out = tmp_path / "out"
    store.pull(out, "main@4")
    (out / "merges.txt").write_text("fifth")
    (out / ".dcr" / "marker.json").write_bytes(b"{")
    store.pull(out, "main@1")
    assert shown(out) == shown(tmp_path / "run1")
