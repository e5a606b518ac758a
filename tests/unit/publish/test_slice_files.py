"""Baselines of slices in files: found again by the next process, proven piece by piece, and never trusted."""

from __future__ import annotations

import errno
import gc
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import SHAPES, State, maps_of, next_state, publish_alone, require_state, states_of, whole, write
from watched import Watched

import dcr_store
from dcr_store import events
from dcr_store.codec.digest import crc64
from dcr_store.errors import ConflictError, FormatError, IntegrityError, InvalidInputError, StorageError
from dcr_store.format import canonical
from dcr_store.layout import slices
from dcr_store.publish.baseline import Baseline
from dcr_store.publish.slice_bits import SliceBits
from dcr_store.publish.slice_files import SliceFiles
from dcr_store.publish.slice_memory import OwnMemory
from dcr_store.publish.slice_note import Note, NotedSlice
from dcr_store.publish.slice_rooms import Room, Rooms
from dcr_store.store import Store
from dcr_store.targets.own_directories import holds_baseline

N_EXAMPLES = int(os.environ.get("DCR_DAMAGES", "14"))
STATES = states_of(5)
NAMES = ["r0", "r1"]


@pytest.fixture(scope="module")
def roots() -> list[str]:
    return publish_alone("memory://slice-files-alone", STATES, chunk_elements=256)


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = str(tmp_path / "store")
    dcr_store.create(url, chunk_elements=256).close()
    return url


def publish(
    url: str,
    state: State,
    baseline: Any,
    *,
    announced: bool = True,
    n_ranks: int = 2,
    stores: list[Store] | None = None,
    watch: Callable[[Store], object] = lambda store: None,
) -> str:
    """Publish as ranks that have just started, or that have these stores; return the root."""
    names = [f"r{rank}" for rank in range(n_ranks)]
    opened = stores or [dcr_store.open(url) for _ in names]
    try:
        parts = []
        for rank, (store, name) in enumerate(zip(opened, names, strict=True)):
            watch(store)
            told = maps_of(rank, n_ranks) if announced else None
            if rank == 0:
                parts.append(store.begin(writers=names, tensors=SHAPES, slices=told, baseline=baseline))
            else:
                parts.append(store.join(writer=name, slices=told, baseline=baseline, timeout_s=5))
        try:
            for rank, part in enumerate(parts):
                write(part, maps_of(rank, n_ranks), state)
            for part in parts[1:]:
                part.seal()
            root = parts[0].commit(timeout_s=5).root
        except IntegrityError:
            for part in parts:
                part.abort()
            raise
        for part in parts[1:]:
            part.commit(timeout_s=5)
        return root
    finally:
        for store in opened if stores is None else []:
            store.close()


@contextmanager
def seen() -> Iterator[list[str]]:
    """What happens to slices: read from the store, followed by changes, healed."""
    found: list[str] = []
    with events.listening(lambda event: found.append(event.name) if event.name.startswith("slices.") else None):
        yield found


def partitions(watched: Watched) -> list[str]:
    """The keys of those that were fetched."""
    return [key for method, key in watched.requests if method == "get" and "/data/" in key and "/c/" in key]


def folders(baseline: Path) -> list[Path]:
    return [baseline / "main" / name for name in NAMES]


# ---------------------------------------------------------------------- the next process


@pytest.mark.parametrize("announced", [True, False])
def test_a_rank_that_starts_again_reads_its_folder_and_no_partition(
    url: str, tmp_path: Path, roots: list[str], announced: bool
) -> None:
    baseline = tmp_path / "baseline"
    fetched: list[Watched] = []

    def watch(store: Store) -> None:
        fetched.append(Watched(store._objects))
        store._objects = store._catalog.objects = fetched[-1]

    def requests() -> list[str]:
        found = [key for watched in fetched for key in partitions(watched)]
        fetched.clear()
        return found

    assert publish(url, STATES[0], baseline, announced=announced) == roots[0]
    shutil.copytree(baseline, tmp_path / "behind")
    for number in (1, 2):
        with seen() as happened:
            assert publish(url, STATES[number], baseline, announced=announced, watch=watch) == roots[number]
        assert requests() == []
        assert {"slices.read", "slices.followed", "slices.healed"}.isdisjoint(happened)
        assert "slices.piece.advanced" in happened
    # Two versions behind: the changes since, and no anchor.
    with seen() as happened:
        assert publish(url, STATES[3], tmp_path / "behind", announced=announced, watch=watch) == roots[3]
    assert "slices.read" not in happened
    assert "slices.followed" in happened
    versions = {key.split("/")[2].partition("-")[0] for key in requests()}
    assert versions == {"000000000001", "000000000002"}
    with dcr_store.open(url) as store:
        require_state(store, "main", STATES[3])
        assert store.verify(deep=True).ok


def test_slices_that_are_announced_are_read_together_and_each_chunk_once(url: str, tmp_path: Path) -> None:
    publish(url, STATES[0], None)
    publish(url, STATES[1], None)
    watched: list[Watched] = []

    def watch(store: Store) -> None:
        watched.append(Watched(store._objects))
        store._objects = store._catalog.objects = watched[-1]

    with seen() as happened:
        publish(url, STATES[2], tmp_path / "baseline", watch=watch)
    assert happened.count("slices.read") == 2  # once a rank
    for rank in watched:
        keys = partitions(rank)
        assert keys
        assert len(set(keys)) == len(keys)
    assert len(list((tmp_path / "baseline").rglob("bits-*.bin"))) == 2  # a file a rank


def test_what_was_read_is_noted_at_once(url: str, tmp_path: Path) -> None:
    """A rank that is killed before its first commit need not read it again."""
    publish(url, STATES[0], None, n_ranks=1)
    with dcr_store.open(url) as store:
        transaction = store.begin(writers=["r0"], slices=maps_of(0, 1), baseline=tmp_path / "baseline")
        write(transaction, maps_of(0, 1)[:1], STATES[1])
        transaction.abort()
    with seen() as happened:
        publish(url, STATES[1], tmp_path / "baseline", n_ranks=1)
    assert "slices.read" not in happened


@pytest.mark.parametrize("mapped", [False, True])
def test_versions_that_others_have_published_meanwhile_are_followed(
    url: str, tmp_path: Path, roots: list[str], mapped: bool
) -> None:
    """By masks and by overwrites."""
    baseline = tmp_path / "baseline" if mapped else None
    stores = [dcr_store.open(url) for _ in NAMES]
    publish(url, STATES[0], baseline, stores=stores)
    with dcr_store.open(url) as other:
        with other.begin() as alone:
            for name, array in STATES[1].items():
                alone.write(name, array)
        with other.begin(writers=["x"]) as fragments:
            for name, array in STATES[2].items():
                fragments.write_residual(name, array)
    with seen() as happened:
        assert publish(url, STATES[3], baseline, stores=stores) == roots[3]
    assert "slices.read" not in happened
    assert "slices.followed" in happened
    assert publish(url, STATES[4], baseline, stores=stores) == roots[4]
    with dcr_store.open(url) as store:
        assert store.verify(deep=True).ok
    for held in stores:
        held.close()


@pytest.mark.parametrize("mapped", [False, True])
def test_a_layout_that_another_has_changed_meanwhile_is_another_baseline(
    url: str, tmp_path: Path, mapped: bool
) -> None:
    """The same slices lie elsewhere, and are cut otherwise."""
    options = {"writers": ["a"], "baseline": tmp_path / "baseline" if mapped else None}
    with dcr_store.open(url) as store, dcr_store.open(url) as other:
        with store.begin(tensors=SHAPES, **options) as transaction:
            write(transaction, [whole(name) for name in SHAPES], STATES[0])
        first = {"first": np.arange(77, dtype=np.uint16)}
        with other.begin() as alone:
            for name, array in {**first, **STATES[0]}.items():
                alone.write(name, array)
        with store.begin(**options) as transaction:
            transaction.write_slice(first["first"], slices.whole("first", "U16", (77,)))
            write(transaction, [whole(name) for name in SHAPES], STATES[1])
        assert store.log()[-1].base == "main@1"
        require_state(store, "main", {**first, **STATES[1]})
        assert store.verify(deep=True).ok


def test_residual_fragments_that_are_announced_are_read_once(url: str, tmp_path: Path) -> None:
    def announced(name: str) -> Any:
        return slices.flat_part(name, *SHAPES[name], 0, int(np.prod(SHAPES[name][1])))

    publish(url, STATES[0], None, n_ranks=1)
    with dcr_store.open(url) as store, seen() as happened:
        told = [announced(name) for name in SHAPES]
        with store.begin(writers=["a"], slices=told, baseline=tmp_path / "baseline") as transaction:
            for name, array in STATES[1].items():
                transaction.write_residual(name, array)
    assert happened.count("slices.read") == 1


def test_an_anchor_is_not_made_of_what_its_files_hold(
    url: str, tmp_path: Path, roots: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    take = SliceBits.take

    def spoilt(self: SliceBits, index: int, new: Any, chunk_elements: int) -> None:
        take(self, index, new, chunk_elements)
        self.packed(index)[:1] ^= 1  # somebody else writes to the file

    monkeypatch.setattr(SliceBits, "take", spoilt)
    assert publish(url, STATES[0], tmp_path / "baseline") == roots[0]
    monkeypatch.undo()
    with seen() as found:
        assert publish(url, STATES[1], tmp_path / "baseline") == roots[1]
    assert any(name == "slices.read" for name in found), "its digests are those of what was published"


def test_an_anchor_that_was_aborted_leaves_room(url: str, tmp_path: Path, roots: list[str]) -> None:
    baseline = tmp_path / "baseline"
    for _ in range(3):
        with dcr_store.open(url) as store:
            transaction = store.begin(writers=["r0"], tensors=SHAPES, baseline=baseline, slices=maps_of(0, 1))
            write(transaction, maps_of(0, 1), STATES[1])
            transaction.abort()
    assert publish(url, STATES[0], baseline, n_ranks=1) == roots[0]
    total = sum(path.stat().st_size for path in baseline.rglob("bits-*.bin"))
    assert total < 2 * sum(array.nbytes for array in STATES[0].values())


def test_files_do_not_grow_with_slices_that_come_and_go(url: str, tmp_path: Path, roots: list[str]) -> None:
    baseline = tmp_path / "baseline"
    with dcr_store.open(url) as store:
        for number in range(8):
            part = 4 + number % 5
            q, rest = slices.part("q", "BF16", (32, 24), (0, 0), (part, 24)), SHAPES["q"][1][0] - part
            told = [q, slices.part("q", "BF16", (32, 24), (part, 0), (rest, 24))]
            told += [whole(name) for name in SHAPES if name != "q"]
            state = STATES[number % 5]
            with store.begin(writers=["r0"], tensors=SHAPES, baseline=baseline) as transaction:
                transaction.write_slice(state["q"][:part], told[0])
                transaction.write_slice(state["q"][part:], told[1])
                write(transaction, told[2:], state)
        assert [info.root for info in store.log()] == [roots[number % 5] for number in range(8)]
    assert sum(path.stat().st_blocks * 512 for path in baseline.rglob("bits-*.bin")) <= 128 << 10
    # Another topology takes other files, and those before go.
    for number in range(2):
        publish(url, STATES[number], baseline, n_ranks=1 + number)
    assert len(list(baseline.rglob("bits-*.bin"))) == 2


# ---------------------------------------------------------------------- damage


class Damage:
    """Folders of several versions, of which a crash may leave any mixture."""

    def __init__(self, rng: random.Random, older: list[Path]) -> None:
        self.rng, self.older = rng, older

    def __call__(self, folder: Path, name: str) -> None:
        rng = self.rng
        for path in sorted(folder.glob("bits-*.bin")) + sorted(folder.glob("note-*")):
            sources = [older / "main" / name / path.name for older in self.older]
            kind = rng.choice(["keep", "pages", "pages", "pages", "other", "short", "gone", "bit", "long"])
            data = bytearray(path.read_bytes())
            if kind == "pages":
                page = rng.choice([64, 512, 4096])
                for start in range(0, len(data), page):
                    source = rng.choice([None, None, *sources])
                    if source is not None and source.exists():
                        old = source.read_bytes()[start : start + page]
                        data[start : start + len(old)] = old
                    elif rng.random() < 0.1:
                        data[start : start + page] = rng.randbytes(len(data[start : start + page]))
            elif kind == "other" and (source := rng.choice(sources)).exists():
                data = bytearray(source.read_bytes())
            elif kind == "short":
                del data[rng.randrange(len(data)) :]
            elif kind == "long":
                data += bytes(100)
            elif kind == "bit":
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            if kind == "gone":
                path.unlink()
            else:
                path.write_bytes(data)


@pytest.mark.parametrize("seed", range(2))
def test_any_damage_is_noticed_and_the_next_version_right(
    url: str, tmp_path: Path, roots: list[str], seed: int
) -> None:
    rng = random.Random(seed)
    baseline, older, total = tmp_path / "baseline", [], 0
    for number in range(3):
        publish(url, STATES[number], baseline)
        older.append(tmp_path / f"older-{number}")
        shutil.copytree(baseline, older[-1])
    damage = Damage(rng, older)
    with seen() as happened:
        for nth in range(N_EXAMPLES // 2):
            for folder in folders(baseline):
                damage(folder, folder.name)
            number = rng.randrange(5)
            assert publish(url, STATES[number], baseline, announced=nth % 3 > 0) == roots[number]
            if nth % 4 == 0:
                older[nth % 3] = tmp_path / f"older-{3 + nth}"
                shutil.copytree(baseline, older[nth % 3])
            total += 1
    assert {"slices.read", "slices.followed", "slices.piece.advanced"} <= set(happened)
    with dcr_store.open(url) as store:
        require_state(store, "main", STATES[number])
        assert store.verify(deep=True).ok


@pytest.mark.parametrize("point", [("slices.noted", 1), ("slices.piece.advanced", 1), ("slices.piece.advanced", 9)])
def test_a_crash_while_the_baseline_advances_costs_no_reading(
    url: str, tmp_path: Path, roots: list[str], point: tuple[str, int]
) -> None:
    """Pieces that have not advanced get the changes since, the others nothing."""
    baseline, crashed = tmp_path / "baseline", tmp_path / "crashed"
    publish(url, STATES[0], baseline, n_ranks=1)
    reached: Counter[str] = Counter()

    def crash(event: events.Event) -> None:
        reached[event.name] += 1
        if (event.name, reached[event.name]) == point:
            shutil.copytree(baseline, crashed)

    with events.listening(crash):
        publish(url, STATES[1], baseline, n_ranks=1)
    told: list[events.Event] = []
    with events.listening(told.append):
        assert publish(url, STATES[2], crashed, n_ranks=1) == roots[2]
    followed = [int(event.detail.split()[1]) for event in told if event.name == "slices.followed"]
    assert followed == [reached["slices.piece.advanced"] - (point[1] if "piece" in point[0] else 0)]
    assert "slices.read" not in [event.name for event in told]


def test_files_that_lie_and_agree_with_themselves_are_refused_and_then_read_anew(
    url: str, tmp_path: Path, roots: list[str]
) -> None:
    baseline = tmp_path / "baseline"
    publish(url, STATES[0], baseline)
    folder = baseline / "main" / "r1"
    path = next(folder.glob("bits-*.bin"))
    data = bytearray(path.read_bytes())
    for slot in range(2):
        if (folder / f"note-{slot}").exists():
            note = Note.from_bytes((folder / f"note-{slot}").read_bytes(), "note")
            key = max(note.slices, key=lambda key: note.slices[key].n_elements)
            item = note.slices[key]
            data[item.room.start] ^= 1
            # Of its first piece, whose length is found by its digest.
            bits = path.read_bytes()[item.room.start : item.room.stop]
            length = next(n for n in range(2, 513, 2) if crc64(bits[:n]) == int(item.digests[0]))
            item.digests[0] = crc64(bytes(data[item.room.start : item.room.start + length]))
            (folder / f"note-{slot}").write_bytes(note.to_bytes())
    path.write_bytes(data)
    stores = [dcr_store.open(url) for _ in NAMES]
    for _ in range(2):
        with pytest.raises(IntegrityError, match="baseline is not the base"):
            publish(url, STATES[1], baseline, stores=stores)
    assert publish(url, STATES[1], baseline, stores=stores) == roots[1]
    for store in stores:
        store.close()
    with dcr_store.open(url) as store:
        assert store.verify(deep=True).ok


@pytest.mark.parametrize("change", ["elements", "space", "pieces"])
def test_notes_of_other_slices_are_not_taken(url: str, tmp_path: Path, roots: list[str], change: str) -> None:
    baseline = tmp_path / "baseline"
    publish(url, STATES[0], baseline, n_ranks=1)
    path = next((baseline / "main" / "r0").glob("note-*"))
    note = Note.from_bytes(path.read_bytes(), "note")
    key = max(note.slices, key=lambda key: note.slices[key].n_elements)
    item = note.slices[key]
    note.slices[key] = replace(
        item,
        n_elements=item.n_elements - (change == "elements"),
        space="u8" if change == "space" else item.space,
        digests=item.digests[:-1] if change == "pieces" else item.digests,
    )
    path.write_bytes(note.to_bytes())
    with seen() as happened:
        assert publish(url, STATES[1], baseline, n_ranks=1) == roots[1]
    assert happened.count("slices.read") == 1


def test_files_of_another_store_or_run_are_not_taken(url: str, tmp_path: Path, roots: list[str]) -> None:
    other = str(tmp_path / "other")
    dcr_store.create(other, chunk_elements=256).close()
    baseline = tmp_path / "baseline"
    publish(other, STATES[0], baseline)
    publish(url, STATES[0], None)
    with seen() as happened:
        assert publish(url, STATES[1], baseline) == roots[1]
    assert happened.count("slices.read") == 2
    # The store is put back, and goes on otherwise: the version that the files are of is not there any more.
    shutil.copytree(url, tmp_path / "copy")
    assert publish(url, STATES[2], baseline) == roots[2]
    shutil.rmtree(url)
    shutil.copytree(tmp_path / "copy", url)
    assert publish(url, STATES[3], None) == roots[3]
    with seen() as happened:
        assert publish(url, STATES[4], baseline) == roots[4]
    # Their note of the version before that one is of a version that is there still.
    with dcr_store.open(url) as store:
        assert store.verify(deep=True).ok


# ---------------------------------------------------------------------- the directory


def test_each_writer_has_a_place_of_its_own_and_nobody_else_in_it(url: str, tmp_path: Path) -> None:
    baseline = tmp_path / "baseline"
    with dcr_store.open(url) as store, dcr_store.open(url) as other:
        transaction = store.begin(writers=NAMES, tensors=SHAPES, baseline=baseline)
        second = other.join(writer="r1", baseline=baseline)
        with dcr_store.open(url) as third, pytest.raises(ConflictError, match="another publisher") as refused:
            third.join(writer="r1", baseline=baseline)
        assert refused.value.key == str(baseline / "main" / "r1")
        second.abort()
        transaction.abort()
        assert all(holds_baseline(folder) for folder in folders(baseline))
        # It stays locked from one transaction to the next, until another is named, or the store closed.
        with dcr_store.open(url) as third, pytest.raises(ConflictError):
            third.begin(writers=NAMES, tensors=SHAPES, baseline=baseline)
        assert store._catalog.log("main").refresh().open is None, "refused before anything is begun"
        store.begin(writers=NAMES, tensors=SHAPES).abort()
        with dcr_store.open(url) as third:
            third.begin(writers=NAMES, tensors=SHAPES, baseline=baseline).abort()
    SliceFiles(baseline, "main", "r1").close()


@pytest.mark.parametrize("what", ["file", "lock", "link", "whole"])
def test_files_of_somebody_else_stay(url: str, tmp_path: Path, what: str) -> None:
    place = tmp_path / "baseline" / "main" / "r0"
    place.mkdir(parents=True)
    if what == "file":
        (place / "note-0").write_text("mine")
    elif what == "lock":
        (place / "lock").write_text("mine")
    elif what == "link":
        (tmp_path / "mine").write_bytes(b"dcr-baseline\nslices\n")
        (place / "lock").symlink_to(tmp_path / "mine")
    else:  # of a publisher of whole states
        with dcr_store.open(url) as store:
            store.begin("other", baseline=place).abort()
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    with dcr_store.open(url) as store:
        with pytest.raises(InvalidInputError, match="files of somebody else"):
            store.begin(writers=["r0"], tensors=SHAPES, baseline=tmp_path / "baseline")
        assert store._catalog.log("main").refresh().open is None
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before


def test_files_that_are_none_of_a_baseline_are_replaced_within_its_place(
    url: str, tmp_path: Path, roots: list[str]
) -> None:
    """Links and pipes where bits and notes are: nothing is written through them, and nobody waits for them."""
    baseline = tmp_path / "baseline"
    publish(url, STATES[0], baseline, n_ranks=1)
    folder = baseline / "main" / "r0"
    (tmp_path / "victim").write_bytes(next(folder.glob("bits-*.bin")).read_bytes())
    before = (tmp_path / "victim").read_bytes()
    (folder / "bits-0.bin").unlink()
    (folder / "bits-0.bin").symlink_to(tmp_path / "victim")
    os.mkfifo(folder / "bits-7.bin")
    assert publish(url, STATES[1], baseline, n_ranks=1) == roots[1]
    for slot in range(2):
        (folder / f"note-{slot}").unlink(missing_ok=True)
    os.mkfifo(folder / "note-0")
    (folder / "note-1").symlink_to(tmp_path / "victim")
    for number in (2, 3, 4):
        assert publish(url, STATES[number], baseline, n_ranks=1) == roots[number]
    assert (tmp_path / "victim").read_bytes() == before


def test_files_that_nobody_refers_to_are_unlocked_also_where_a_child_has_the_descriptor(tmp_path: Path) -> None:
    files = SliceFiles(tmp_path, "main", "r0")
    inherited = os.dup(files._lock)  # as a process that was forked has it
    del files
    gc.collect()
    SliceFiles(tmp_path, "main", "r0").close()
    os.close(inherited)


@pytest.mark.parametrize("kind", ["slices", "whole"])
def test_a_file_system_that_does_not_lock_is_not_another_publisher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def none(*_: Any) -> Any:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    make = {"slices": lambda: SliceFiles(tmp_path, "main", "r0"), "whole": lambda: Baseline(tmp_path, "s", "main", 256)}
    with monkeypatch.context() as patched:
        patched.setattr("dcr_store.publish.baseline_place.fcntl.flock", none)
        with pytest.raises(StorageError, match="cannot be kept: No locks available"):
            make[kind]()


@pytest.mark.parametrize("mapped", [False, True])
def test_a_place_that_is_refused_costs_no_reading(url: str, tmp_path: Path, roots: list[str], mapped: bool) -> None:
    baseline = tmp_path / "baseline" if mapped else None
    with dcr_store.open(url) as store, dcr_store.open(url) as other:
        assert publish(url, STATES[0], baseline, n_ranks=1, stores=[store]) == roots[0]
        taken = other.begin("other", writers=["r0"], tensors=SHAPES, baseline=tmp_path / "taken")
        (tmp_path / "taken" / "main").symlink_to(tmp_path / "taken" / "other")
        for place, error in ((url, InvalidInputError), (tmp_path / "taken", ConflictError)):
            with pytest.raises(error):
                store.begin(writers=["r0"], baseline=place)
        with seen() as happened:
            assert publish(url, STATES[1], baseline, n_ranks=1, stores=[store]) == roots[1]
        assert "slices.piece.advanced" in happened
        assert "slices.read" not in happened
        taken.abort()


@pytest.mark.parametrize("where", ["checkpoint", "store", "file", "empty"])
def test_places_that_cannot_be(url: str, tmp_path: Path, where: str) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes(b"")
    (tmp_path / "file").write_text("mine")
    place = {"checkpoint": tmp_path / "checkpoint", "store": url, "file": tmp_path / "file", "empty": ""}[where]
    with dcr_store.open(url) as store, pytest.raises(InvalidInputError):
        store.begin(writers=["r0"], tensors=SHAPES, baseline=place)


def test_a_full_disk_is_an_error_before_and_only_time_after_the_commit(
    url: str, tmp_path: Path, roots: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    baseline = tmp_path / "baseline"
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with dcr_store.open(url) as store:
            transaction = store.begin(writers=["r0"], tensors=SHAPES, baseline=baseline)
            with pytest.raises(StorageError, match="cannot be kept: No space left"):
                write(transaction, maps_of(0, 1), STATES[0])
            transaction.abort()
    with dcr_store.open(url) as store:
        for number in (0, 1, 2):
            with monkeypatch.context() as patched, seen() as happened:
                if number == 1:
                    patched.setattr("dcr_store.publish.slice_files.write_all", full)
                assert publish(url, STATES[number], baseline, n_ranks=1, stores=[store]) == roots[number]
            assert ("slices.unnoted" in happened) == (number == 1)
    assert publish(url, STATES[3], baseline, n_ranks=1) == roots[3]


def test_a_note_is_whole_or_none() -> None:
    digests = np.arange(3, dtype=np.uint64)
    items = {
        "a": NotedSlice(Room(0, 0, 64), "u16", 20, digests[:2]),
        "b": NotedSlice(Room(0, 64, 128), "u8", 1, digests[2:]),
    }
    note = Note(3, 7, "t", "r", "l", items)
    data = note.to_bytes()
    again = Note.from_bytes(data, "note")
    assert (again.to_bytes(), again.slices["a"].room) == (data, Room(0, 0, 64))
    rng = random.Random(0)
    for _ in range(200):
        place = rng.randrange(len(data))
        bad = bytearray(data)
        bad[place] ^= 1 << rng.randrange(8)
        for wrong in (data[:place], bytes(bad), data + b"\0"):
            with pytest.raises(FormatError):
                Note.from_bytes(wrong, "note")


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["slices"][1].update(room=[0, 0, 64]),
        lambda d: d["slices"][1].update(key="a"),
        lambda d: d["slices"][0].update(room=[0, 1, 64]),
        lambda d: d["slices"][0].update(room=[0, 0, 63]),
        lambda d: d["slices"][0].update(room=[0, 0, -64]),
        lambda d: d["slices"][0].update(room=[10**9, 0, 64]),
        lambda d: d["slices"][0].update(room=[0, 64]),
        lambda d: d["slices"][0].update(elements=33),
        lambda d: d["slices"][0].update(elements=-1),
        lambda d: d["slices"][0].update(pieces=3),
        lambda d: d["slices"][0].update(space="u128"),
        lambda d: d.update(slices=None),
        lambda d: d.update(generation=True),
        lambda d: d.update(format="other"),
    ],
)
def test_notes_that_contradict_themselves(change: Callable[[dict[str, Any]], None]) -> None:
    document = {
        "format": "dcr-slices",
        "generation": 0,
        "version": 0,
        "txid": "t",
        "root": "r",
        "layout": "l",
        "slices": [
            {"key": "a", "space": "u16", "elements": 32, "pieces": 1, "room": [0, 0, 64]},
            {"key": "b", "space": "u8", "elements": 1, "pieces": 1, "room": [0, 64, 128]},
        ],
    }

    def data() -> bytes:
        rest = canonical.encode(document) + b"\n" + bytes(16)
        return b"dcr-slices 1 %016x\n%s" % (crc64(rest), rest)

    Note.from_bytes(data(), "note")
    change(document)
    with pytest.raises(FormatError):
        Note.from_bytes(data(), "note")


def test_rooms_never_overlap(tmp_path: Path) -> None:
    rng = random.Random(1)
    rooms = Rooms(tmp_path)
    held: dict[Room, bytes] = {}
    for nth in range(300):
        if rng.random() < 0.3:
            rooms.expect(rng.randrange(5000))
        nbytes = rng.choice([0, 1, 64, 65, 1000, 300_000])
        room = rooms.take(nbytes)
        assert not any(room.file == b.file and room.start < b.stop and b.start < room.stop for b in held)
        held[room] = rng.randbytes(nbytes)
        rooms.view(room, nbytes, np.dtype(np.uint8))[:] = np.frombuffer(held[room], np.uint8)
        if nth % 10 == 9:
            held = {room: data for room, data in held.items() if rng.random() < 0.6}
            rooms.keep(held)
        if nth % 60 == 59:
            rooms.close()
            rooms = Rooms(tmp_path)
            assert rooms.open(held) == set(held)
    for room, data in held.items():
        assert rooms.view(room, len(data), np.dtype(np.uint8)).tobytes() == data
    rooms.keep([])
    assert list(tmp_path.iterdir()) == []


def test_rooms_that_have_become_holes_take_the_disk_s_room_again(tmp_path: Path) -> None:
    rooms = Rooms(tmp_path)
    room = rooms.take(200_000)
    rooms.close()
    path = tmp_path / "bits-0.bin"
    nbytes = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, nbytes)
    assert path.stat().st_blocks == 0
    rooms = Rooms(tmp_path)
    assert rooms.open([room]) == {room}
    assert path.stat().st_blocks * 512 >= 200_000
    rooms.close()


@pytest.mark.parametrize("call", ["os.ftruncate", "mmap.mmap"])
def test_a_file_that_cannot_be_as_long_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Its number is that of the next one."""

    def none(*_: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    rooms = Rooms(tmp_path)
    rooms.take(64)
    with monkeypatch.context() as patched:
        patched.setattr(f"dcr_store.publish.slice_rooms.{call}", none)
        with pytest.raises(OSError, match="Cannot allocate"):
            rooms.take(2 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["bits-0.bin"]
    assert rooms.take(2 << 20).file == 1
    rooms.close()


# ---------------------------------------------------------------------- page-locked memory


def test_pinned_memory_needs_cuda(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with dcr_store.open(url) as store:
        with pytest.raises(InvalidInputError, match="needs CUDA"):
            store.begin(writers=["r0"], tensors=SHAPES, baseline="pinned")
        assert store._catalog.log("main").refresh().open is None
    assert not Path("pinned").exists()


def test_who_joins_is_told_at_once_that_its_baseline_can_be_nowhere(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after a wait for a transaction that nobody begins, since all are refused."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with dcr_store.open(url) as store:
        for baseline, what in (
            ("pinned", "needs CUDA"),
            ("PINNED", "not the word either"),
            ("s3://bucket/x", "is a URL"),
            ("file:///x", "is a URL"),
        ):
            with pytest.raises(InvalidInputError, match=what):
                store.join(writer="r1", baseline=baseline)
            with pytest.raises(InvalidInputError, match=what):
                store.begin(writers=["r0"], tensors=SHAPES, baseline=baseline)
        with pytest.raises(InvalidInputError, match="is a URL"):
            store.begin(baseline="s3://bucket/x")
        assert store._catalog.log("main").refresh().open is None
    assert list(here.iterdir()) == []


def test_pinned_memory_holds_the_slices(url: str, roots: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    real, asked = torch.empty, []

    def empty(nbytes: int, *, dtype: Any, pin_memory: bool) -> Any:
        asked.append((nbytes, pin_memory))
        return real(nbytes, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", empty)
    with dcr_store.open(url) as store:
        for number in range(3):
            assert publish(url, STATES[number], "pinned", n_ranks=1, stores=[store]) == roots[number]
    assert sum(nbytes for nbytes, _ in asked) == sum(array.nbytes for array in STATES[0].values())
    assert all(pinned for _, pinned in asked)

    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", refused)
    with dcr_store.open(url) as store, pytest.raises(StorageError, match="cannot be page-locked"):
        publish(url, next_state(STATES[0], 9), "pinned", n_ranks=1, stores=[store])


def test_own_memory_finds_nothing() -> None:
    assert OwnMemory().found() == {}
