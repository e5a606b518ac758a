"""Pull by copy on write: ``current`` leads to whole versions only; what is shared, kept, removed and refused."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from states import series, tree, write_hf
from watched import Watched

import dcr_store
from dcr_store import events
from dcr_store.errors import ConflictError, IntegrityError, InvalidInputError, StorageError
from dcr_store.receive import copy_building
from dcr_store.receive.bringing import Bringer
from dcr_store.receive.copying import CopyBringer, CopyResult
from dcr_store.store import Store
from dcr_store.targets import copy_directory
from dcr_store.targets.copy_directory import reading
from dcr_store.targets.file_sharing import Sharing
from dcr_store.targets.marker import lock

STATES = series(4, seed=11)
# Only one tensor, in a file of its own, changes from main@0 to main@1; main@3 has one more tensor.
CHANGED = "layers.0.q.weight"
STATES[1] = {**STATES[0], CHANGED: STATES[1][CHANGED]}
N_CHANGED = int(np.count_nonzero(STATES[1][CHANGED] != STATES[0][CHANGED]))
STATES[3] = {**STATES[2], "more.weight": np.arange(3000, dtype=np.float32)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Versions of five tensors in five files of unchanging headers, and one with a sixth."""
    place = tmp_path_factory.mktemp("checkpoints")
    return [write_hf(place / f"checkpoint{i}", state, len(state)) for i, state in enumerate(STATES)]


@pytest.fixture(scope="module")
def url(checkpoints: list[Path]) -> str:
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=64) as store:
        for directory in checkpoints:
            with store.begin() as transaction:
                transaction.write_checkpoint(directory)
        return store.url


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with dcr_store.open(url) as store:
        yield store


class File(NamedTuple):
    """What must not change about a file that a reader may have open."""

    inode: int
    mtime_ns: int
    content: bytes


def files_of(directory: Path) -> dict[str, File]:
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and ".dcr" not in path.parts:
            status = path.stat()
            found[str(path.relative_to(directory))] = File(status.st_ino, status.st_mtime_ns, path.read_bytes())
    return found


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def versions(root: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in root.iterdir() if "@" in path.name)


def pull(store: Store, root: Path, number: int, keep: int = 1) -> CopyResult:
    return store.pull(root, f"main@{number}", mode="copy", keep=keep)


def test_current_is_the_version_file_for_file(store: Store, checkpoints: list[Path], tmp_path: Path) -> None:
    root = tmp_path / "out"
    previous = None
    for number in (0, 1, 2, 3, 2, 0, 3, 1):
        result = pull(store, root, number)
        assert tree(root / "current") == tree(checkpoints[number])
        assert (result.version, result.previous) == (f"main@{number}", previous)
        assert (root / "current").resolve() == Path(result.directory)
        assert store.compare_directory(f"main@{number}", Path(result.directory)).ok
        previous = f"main@{number}"
        assert names(root / ".dcr") == {"lock", "copies.json"}
        assert names(root / "current" / ".dcr") == {"lock", "marker.json"}


def test_the_old_version_is_never_written(store: Store, tmp_path: Path) -> None:
    root = tmp_path / "out"
    pull(store, root, 0)
    old = (root / "current").resolve()
    before = files_of(old)
    for number in (1, 2, 3):
        pull(store, root, number, keep=5)
    assert files_of(old) == before


def test_files_that_do_not_change_are_shared(store: Store, tmp_path: Path) -> None:
    root = tmp_path / "out"
    pull(store, root, 0)
    old = files_of((root / "current").resolve())
    result = pull(store, root, 1)
    new = files_of((root / "current").resolve())
    assert (result.files_linked, result.files_made) == (4, 1)
    assert {name for name in new if new[name].inode != old[name].inode} == {
        name for name in new if new[name].content != old[name].content
    }
    changed = [name for name in new if new[name].content != old[name].content]
    assert result.nbytes_needed == sum(len(new[name].content) for name in changed if name.endswith(".safetensors"))


def test_only_the_delta_is_fetched_and_written(store: Store, tmp_path: Path) -> None:
    root = tmp_path / "out"
    pull(store, root, 0)
    watched = store._catalog.objects = Watched(store._objects)
    result = pull(store, root, 1)
    anchor = store._catalog.resolve("main@0").row.txid
    assert not [key for method, key in watched.requests if anchor in key and "/c/" in key and "/digests/" not in key]
    assert 0 < result.chunks_written <= N_CHANGED
    assert result.chunks_healed == 0


def test_nothing_to_do_costs_nothing(store: Store, tmp_path: Path) -> None:
    root = tmp_path / "out"
    pull(store, root, 2)
    before = files_of(root)
    result = pull(store, root, 2)
    assert (result.nbytes_fetched, result.chunks_written, result.files_linked, result.files_made) == (0, 0, 0, 0)
    assert files_of(root) == before
    assert versions(root) == ["main@2"]


class TestKept:
    def test_the_previous_one_by_default(self, store: Store, tmp_path: Path) -> None:
        root = tmp_path / "out"
        seen = []
        for number in (0, 1, 2, 0, 3):
            pull(store, root, number)
            seen.append(versions(root))
        assert seen == [
            ["main@0"],
            ["main@0", "main@1"],
            ["main@1", "main@2"],
            ["main@0", "main@2"],
            ["main@0", "main@3"],
        ]

    @pytest.mark.parametrize(("keep", "expected"), [(0, ["main@3"]), (2, ["main@1", "main@2", "main@3"])])
    def test_as_many_as_wanted(self, store: Store, tmp_path: Path, keep: int, expected: list[str]) -> None:
        for number in range(4):
            pull(store, tmp_path / "out", number, keep)
        assert versions(tmp_path / "out") == expected

    def test_back_to_a_kept_one_fetches_nothing(self, store: Store, checkpoints: list[Path], tmp_path: Path) -> None:
        root = tmp_path / "out"
        pull(store, root, 1)
        before = files_of((root / "current").resolve())
        pull(store, root, 2)
        result = pull(store, root, 1)
        assert (result.nbytes_fetched, result.chunks_written) == (0, 0)
        assert files_of((root / "current").resolve()) == before
        pull(store, root, 3)
        assert versions(root) == ["main@1", "main@3"], "the one before is what was current before, not the older one"

    @pytest.mark.parametrize("goal", [1, 2, 3])
    def test_broken_off_anywhere_on_the_way_back_to_a_kept_one(
        self, store: Store, checkpoints: list[Path], tmp_path: Path, goal: int
    ) -> None:
        """Whoever reads the version that was left may still do so: it is neither written nor forgotten."""
        points: list[str] = []
        for at in range(100):
            root = tmp_path / str(at)
            pull(store, root, 1)
            left = (root / "current").resolve()
            pull(store, root, 2)
            before, marker = files_of(left), (left / ".dcr" / "marker.json").stat().st_ino
            seen: list[str] = []

            def strike(event: events.Event, at: int = at, seen: list[str] = seen) -> None:
                if event.name.startswith("copy."):
                    seen.append(event.name)
                    if len(seen) > at:
                        raise KeyboardInterrupt

            with contextlib.suppress(KeyboardInterrupt), events.listening(strike):
                pull(store, root, 1)
            points = seen
            if len(seen) <= at:
                break
            is_back = "copy.switched" in seen
            pull(store, root, goal)
            assert tree(root / "current") == tree(checkpoints[goal]), points
            kept = {1, 2} if goal < 3 else {1 if is_back else 2, 3}
            assert versions(root) == [f"main@{number}" for number in sorted(kept)], points
            if 1 in kept:
                assert files_of(left) == before, points
                assert (left / ".dcr" / "marker.json").stat().st_ino == marker, points
        assert "copy.link.made" in points

    def test_one_that_a_reader_holds_stays(self, store: Store, checkpoints: list[Path], tmp_path: Path) -> None:
        root = tmp_path / "out"
        pull(store, root, 0)
        with reading(root) as held:
            for number in (1, 2, 3):
                pull(store, root, number, keep=0)
            assert versions(root) == ["main@0", "main@3"]
            assert tree(held) == tree(checkpoints[0])
            with reading(root) as newer:
                assert tree(newer) == tree(checkpoints[3])
        pull(store, root, 3, keep=0)
        assert versions(root) == ["main@3"]

    @pytest.mark.parametrize("keep", [-1, True, 1.0, "2"])
    def test_no_number(self, store: Store, tmp_path: Path, keep: int) -> None:
        with pytest.raises(InvalidInputError, match="number of versions"):
            pull(store, tmp_path / "out", 0, keep)
        assert not (tmp_path / "out").exists()


def flip(path: Path, offset: int = -3) -> None:
    """Change a bit of a file, as a bad disk does: the names that share the file see it too."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    with path.open("r+b") as file:
        file.write(data)


class TestDamage:
    def test_of_the_current_version_is_healed_beside(
        self, store: Store, checkpoints: list[Path], tmp_path: Path
    ) -> None:
        root = tmp_path / "out"
        pull(store, root, 2)
        old = (root / "current").resolve()
        flip(old / "model-00001-of-00005.safetensors", 5000)
        damaged = files_of(old)
        result = pull(store, root, 2)
        assert tree(root / "current") == tree(checkpoints[2])
        assert (root / "current").resolve() != old
        assert files_of(old) == damaged, "a reader may have it open"
        assert (result.chunks_written, result.chunks_healed) == (1, 1)
        assert (result.files_linked, result.files_made) == (4, 1)
        pull(store, root, 3)
        pull(store, root, 2)
        assert tree(root / "current") == tree(checkpoints[2])

    def test_of_the_old_version_does_not_get_into_the_new_one(
        self, store: Store, checkpoints: list[Path], tmp_path: Path
    ) -> None:
        root = tmp_path / "out"
        for damage in (
            lambda place: flip(place / "model-00001-of-00005.safetensors"),
            lambda place: flip(place / "model-00002-of-00005.safetensors", 12),
            lambda place: os.truncate(place / "model-00001-of-00005.safetensors", 1000),
            lambda place: (place / "model-00003-of-00005.safetensors").unlink(),
            lambda place: (place / "config.json").write_text("{}"),
            lambda place: (place / ".dcr" / "marker.json").write_text("{}"),
            lambda place: shutil.rmtree(place / ".dcr"),
        ):
            pull(store, root, 0)
            damage((root / "current").resolve())
            pull(store, root, 1)
            assert tree(root / "current") == tree(checkpoints[1])
            assert store.compare_directory("main@1", root / "current").ok
            pull(store, root, 0)
            assert tree(root / "current") == tree(checkpoints[0])

    @pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"body": {"format": "dcr-copies", "order": 3}}'])
    def test_of_what_the_directory_says_of_itself(
        self, store: Store, checkpoints: list[Path], tmp_path: Path, content: bytes
    ) -> None:
        root = tmp_path / "out"
        pull(store, root, 2)
        pull(store, root, 1)
        (root / ".dcr" / "copies.json").write_bytes(content)
        pull(store, root, 1)
        assert versions(root) == ["main@1", "main@2"], "an engine may still read the one before"
        pull(store, root, 3)
        assert tree(root / "current") == tree(checkpoints[3])
        assert versions(root) == ["main@1", "main@3"]

    @pytest.mark.parametrize("damage", ["gone", "dangling"])
    def test_of_the_link(self, store: Store, checkpoints: list[Path], tmp_path: Path, damage: str) -> None:
        root = tmp_path / "out"
        pull(store, root, 0)
        before = files_of((root / "current").resolve())
        (root / "current").unlink()
        if damage == "dangling":
            (root / "current").symlink_to("main@7-0123456789ab")
        result = pull(store, root, 0)
        assert (result.chunks_written, files_of((root / "current").resolve())) == (0, before)

    def test_of_the_store_leaves_the_current_version(
        self, store: Store, checkpoints: list[Path], tmp_path: Path
    ) -> None:
        root = tmp_path / "out"
        pull(store, root, 0)
        key = store._catalog.contents(store._catalog.resolve("main@1")).partitions[-1].key
        data = store._objects.get(key)
        store._objects.put(key, data[:-1] + bytes([data[-1] ^ 1]))
        try:
            for _ in range(2):
                with pytest.raises(IntegrityError) as caught:
                    pull(store, root, 1)
                assert caught.value.key == key
                assert tree(root / "current") == tree(checkpoints[0])
        finally:
            store._objects.put(key, data)
        pull(store, root, 1)
        assert tree(root / "current") == tree(checkpoints[1])


class TestFileSystems:
    """What a file system cannot do is done without; the bits are the same."""

    @pytest.fixture(params=[Sharing(False, False), Sharing(True, False), Sharing(True, True)])
    def sharing(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sharing:
        sharing: Sharing = request.param

        def clone(source: Path, place: Path) -> bool:
            shutil.copyfile(source, place)  # as a clone looks to its readers
            return True

        monkeypatch.setattr(copy_building, "probe", lambda *_: sharing)
        monkeypatch.setattr(copy_building, "clone", clone)
        return sharing

    def test_all_ways_give_the_version(
        self, store: Store, checkpoints: list[Path], tmp_path: Path, sharing: Sharing
    ) -> None:
        root = tmp_path / "out"
        for number in (0, 1, 2, 1, 3):
            pull(store, root, number)
            assert tree(root / "current") == tree(checkpoints[number])

    def test_a_clone_takes_only_what_changes(self, store: Store, tmp_path: Path, sharing: Sharing) -> None:
        root = tmp_path / "out"
        pull(store, root, 0)
        reached: list[str] = []
        with events.listening(lambda event: reached.append(event.name)):
            result = pull(store, root, 1)
        sizes = {f.name: f.stat().st_size for f in (root / "current").glob("*.safetensors")}
        changed = "model-00004-of-00005.safetensors"
        assert result.files_linked == (4 if sharing.can_link else 0)
        assert reached.count("copy.file.cloned") == sharing.can_clone
        if sharing.can_clone:
            assert 0 < result.nbytes_needed < sizes[changed]
        else:
            assert result.nbytes_needed == (sizes[changed] if sharing.can_link else sum(sizes.values()))

    def test_a_link_that_cannot_be_made_after_all(
        self, store: Store, checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = tmp_path / "out"
        pull(store, root, 0)
        monkeypatch.setattr(copy_building, "link", lambda *_: False)
        assert pull(store, root, 1).files_linked == 0
        assert tree(root / "current") == tree(checkpoints[1])


class TestRoom:
    def test_is_asked_for_before_anything_is_copied(
        self, store: Store, checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = tmp_path / "out"
        pull(store, root, 0)
        real = os.statvfs(root)

        class Full:
            f_frsize = 1
            f_bavail = 50_000

        monkeypatch.setattr(copy_building.os, "statvfs", lambda _: Full)
        with pytest.raises(StorageError, match="not enough room") as caught:
            pull(store, root, 2)
        assert int(str(caught.value.expected).split()[0]) > 50_000
        assert caught.value.found == "50000 bytes free"
        assert tree(root / "current") == tree(checkpoints[0])
        half = next(path for path in root.iterdir() if path.name.startswith("main@2"))
        assert not list(half.glob("*.safetensors"))
        assert pull(store, root, 1).version == "main@1", "what shares nearly everything has room"
        assert versions(root) == ["main@0", "main@1"], "the one given up is gone"
        monkeypatch.setattr(copy_building.os, "statvfs", lambda _: real)
        pull(store, root, 2)
        assert tree(root / "current") == tree(checkpoints[2])

    def test_is_told(self, store: Store, tmp_path: Path) -> None:
        told: list[str] = []
        with events.listening(lambda event: told.append(event.detail) if event.name == "copy.room" else None):
            result = pull(store, tmp_path / "out", 0)
        needed, free = int(told[0].split()[0]), int(told[0].split()[2])
        assert result.nbytes_needed <= needed < free


class TestRefusals:
    def test_a_checkpoint(self, store: Store, checkpoints: list[Path], tmp_path: Path) -> None:
        root = shutil.copytree(checkpoints[0], tmp_path / "out")
        before = files_of(root)
        with pytest.raises(InvalidInputError, match="side by side need a directory of their own"):
            pull(store, root, 1)
        assert files_of(root) == before
        assert not (root / ".dcr").exists()

    def test_a_directory_that_is_pulled_in_place(self, store: Store, tmp_path: Path) -> None:
        store.pull(tmp_path / "out", "main@0")
        with pytest.raises(InvalidInputError, match="side by side need a directory of their own"):
            pull(store, tmp_path / "out", 1)

    def test_in_place_what_holds_versions_side_by_side(self, store: Store, tmp_path: Path) -> None:
        root = tmp_path / "out"
        pull(store, root, 0)
        before = files_of(root)
        for place in (root, root / "current", (root / "current").resolve()):
            with pytest.raises(InvalidInputError, match="side by side"):
                store.pull(place, "main@1")
            with pytest.raises(InvalidInputError, match="side by side"):
                store.pull(place, "main@1", force=True)
        with pytest.raises(InvalidInputError, match="one of the versions side by side"):
            pull(store, (root / "current").resolve(), 1)
        assert files_of(root) == before

    @pytest.mark.parametrize("kind", ["file", "directory", "link"])
    def test_somebody_elses_current(self, store: Store, tmp_path: Path, kind: str) -> None:
        root = tmp_path / "out"
        root.mkdir()
        place = root / "current"
        if kind == "file":
            place.write_text("mine")
        elif kind == "directory":
            place.mkdir()
        else:
            place.symlink_to(tmp_path)
        with pytest.raises(InvalidInputError, match="not a link to a version beside it"):
            pull(store, root, 0)
        assert names(root) == {"current"}

    def test_another_store(self, store: Store, checkpoints: list[Path], tmp_path: Path) -> None:
        root = tmp_path / "out"
        pull(store, root, 0)
        with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=64) as other:
            with other.begin() as transaction:
                transaction.write_checkpoint(checkpoints[2])
            with pytest.raises(InvalidInputError, match="follows another store"):
                pull(other, root, 0)
            assert tree(root / "current") == tree(checkpoints[0])
            other.pull(root, mode="copy", force=True)
            assert tree(root / "current") == tree(checkpoints[2])
            assert len(versions(root)) == 2

    def test_a_second_process(self, store: Store, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        with lock(tmp_path / "out"), pytest.raises(ConflictError, match="being written by process"):
            pull(store, tmp_path / "out", 0)

    def test_options_of_the_other_mode(self, store: Store, tmp_path: Path) -> None:
        for version in (None, "main@99"):  # which is not looked for
            with pytest.raises(InvalidInputError, match="keeps no other versions"):
                store.pull(tmp_path / "out", version, keep=2)  # type: ignore[call-overload]
            with pytest.raises(InvalidInputError, match="unknown mode"):
                store.pull(tmp_path / "out", version, mode="clone")  # type: ignore[call-overload]
            with pytest.raises(InvalidInputError, match="is no number of versions"):
                store.pull(tmp_path / "out", version, mode="copy", keep=-1)


def test_a_reader_sees_whole_versions_only(store: Store, checkpoints: list[Path], tmp_path: Path) -> None:
    """While versions come and go, with none kept, whoever holds one reads it to its end."""
    root = tmp_path / "out"
    pull(store, root, 0)
    whole = [tree(directory) for directory in checkpoints]
    seen: list[int] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            with reading(root) as held:
                found = tree(held)
            seen.append(whole.index(found) if found in whole else -1)

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for number in (1, 2, 3, 0, 2, 1, 3):
            pull(store, root, number, keep=0)
        is_over.set()
        for reader in readers:
            reader.result()
    assert -1 not in seen
    assert len(set(seen)) > 1


def test_a_link_that_moves_while_it_is_read(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version that it led to is gone by the time it is looked at; the one that it leads to now is found."""
    root = tmp_path / "out"
    pull(store, root, 0)
    readlink = Path.readlink

    def overtaken(place: Path) -> Path:
        found = readlink(place)
        monkeypatch.setattr(Path, "readlink", readlink)
        pull(store, root, 1, keep=0)
        assert not (root / found).exists()
        return found

    monkeypatch.setattr(Path, "readlink", overtaken)
    with reading(root) as held:
        assert held == root / readlink(root / "current")


def test_files_of_others_are_left_alone(store: Store, tmp_path: Path) -> None:
    root = tmp_path / "out"
    (root / "logs").mkdir(parents=True)
    (root / "logs" / "a.txt").write_text("mine")
    (root / "main@1-notours").mkdir()
    for number in range(4):
        pull(store, root, number)
    assert (root / "logs" / "a.txt").read_text() == "mine"
    assert (root / "main@1-notours").is_dir()


def test_versions_in_one_file_of_another_name(store: Store, checkpoints: list[Path], tmp_path: Path) -> None:
    """The same tensors in other files: the bits are taken from the old ones, whatever their names are."""
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=64) as other:
        single = write_hf(tmp_path / "single", STATES[1], 1)
        for directory in (checkpoints[0], single):
            with other.begin() as transaction:
                transaction.write_checkpoint(directory)
        pull(other, tmp_path / "out", 0)
        result = pull(other, tmp_path / "out", 1)
        assert tree(tmp_path / "out" / "current") == tree(single)
        assert 0 < result.chunks_written <= N_CHANGED


class TestBringer:
    def test_is_one(self, store: Store, checkpoints: list[Path], tmp_path: Path) -> None:
        bringer = CopyBringer(tmp_path / "out", keep=2)
        assert isinstance(bringer, Bringer)
        catalog = store._catalog
        assert bringer.held(catalog) is None
        for number in (0, 2):
            goal = catalog.resolve(f"main@{number}")
            outcome = bringer.bring(catalog, goal, None)
            assert outcome.chunks_written > 0
            assert bringer.held(catalog) == goal
            assert tree(bringer.place) == tree(checkpoints[number])
            assert not bringer.place.is_symlink()
        bringer.close()
        bringer.close()

    def test_takes_partitions_from_the_fetcher(self, store: Store, tmp_path: Path) -> None:
        from dcr_store.payload.version import fetch

        bringer = CopyBringer(tmp_path / "out")
        goal = store._catalog.resolve("main@0")
        fetched = []

        def fetcher(item: object) -> bytes:
            fetched.append(item)
            return fetch(store._objects, item.ref)  # type: ignore[attr-defined]

        bringer.bring(store._catalog, goal, fetcher)
        assert len(fetched) == len(store._catalog.contents(goal).partitions)

    def test_does_not_trust_a_half_built_version(self, store: Store, tmp_path: Path) -> None:
        bringer = CopyBringer(tmp_path / "out")
        goal = store._catalog.resolve("main@0")
        bringer.bring(store._catalog, goal, None)
        (copy_directory.current_place(tmp_path / "out") / ".dcr" / "marker.json").unlink()
        assert bringer.held(store._catalog) is None
