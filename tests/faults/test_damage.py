"""Each object of a store is deleted, cut, flipped, swapped: verify names it, and no reader ever returns a wrong bit."""

from __future__ import annotations

import functools
import json
import random
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults.scenes import OCCURRENCES, Place, assert_checkpoint, seeded
from states import assert_same, write_hf

from dcr_store.errors import DcrError, IntegrityError
from dcr_store.history.report import VerifyReport
from dcr_store.objects.open import open_objects
from dcr_store.publish import committing, partitions
from dcr_store.store import Store

Array = np.ndarray
EVERY = 1 if OCCURRENCES > 1 else 12  # of the damages; a campaign takes all


@dataclass
class Sound:
    """A store that is whole, and what its versions are."""

    place: Place
    objects: dict[str, bytes] = field(default_factory=dict)
    states: list[dict[str, Array]] = field(default_factory=list)
    checkpoints: list[Path] = field(default_factory=list)

    def publish(self, store: Store, directory: Path, state: dict[str, Array], n_files: int) -> None:
        step = len(self.states)
        checkpoint = write_hf(directory / f"step{step}", state, n_files, step=step)
        (checkpoint / "config.json").write_text(f'{{"step": {step}}}')
        with store.begin(message=f"step {step}", metadata={"step": step}) as transaction:
            transaction.write_checkpoint(checkpoint)
        self.states.append(state)
        self.checkpoints.append(checkpoint)

    def keep(self) -> None:
        """Remember the objects of the store."""
        objects = self.place.open()._objects
        self.objects = {key: objects.get(key) for key in objects.list("")}

    def put(self, contents: dict[str, bytes | None]) -> None:
        """Overwrite or delete objects behind the store's back."""
        objects = open_objects(self.place.url)
        for key, data in contents.items():
            if data is None:
                objects.delete(key)
            else:
                objects.put(key, data)


def small_states(n: int) -> Iterator[dict[str, Array]]:
    """Yield states that follow each other, each with a few changes."""
    rng = np.random.default_rng(3)
    state: dict[str, Array] = {
        "a.weight": rng.integers(0, 1 << 16, (30, 11)).astype(np.uint16),
        "b.weight": rng.normal(size=200).astype(np.float32),
    }
    for _ in range(n):
        yield {name: array.copy() for name, array in state.items()}
        for array in state.values():
            bits = array.reshape(-1).view(f"u{array.itemsize}")
            bits[rng.integers(0, bits.size, 20)] ^= rng.integers(1, 200, 20).astype(bits.dtype)


def build(directory: Path, codec: str, n: int, monkeypatch: pytest.MonkeyPatch) -> Sound:
    """Make a store of `n` versions, the third of another layout and so an anchor."""
    monkeypatch.setattr(partitions, "PARTITION_NBYTES", 256)  # several partitions of several chunks
    place = Place(f"memory://damage-{secrets.token_hex(8)}")
    sound = Sound(place)
    store = place.create(codec=codec, chunk_elements=64)
    for step, state in enumerate(small_states(n)):
        if step >= 2:
            state["c.weight"] = np.arange(90, dtype=np.uint8) + np.uint8(step)
        sound.publish(store, directory, state, 1 + step % 2)
    sound.keep()
    return sound


@dataclass(frozen=True)
class Damage:
    """What is done to the store: keys and their new contents (None: deleted)."""

    what: str
    contents: dict[str, bytes | None]

    @property
    def is_derived(self) -> bool:
        """Whether only hints and log checkpoints are hit, which readers can do without."""
        return all(key.endswith("/latest.json") or "/checkpoints/" in key for key in self.contents)


def damages(objects: dict[str, bytes], rng: random.Random) -> Iterator[Damage]:
    """Yield all damages of a store, one at a time, object by object."""
    keys = sorted(objects)
    for number, key in enumerate(keys):
        data = objects[key]
        yield Damage(f"{key} deleted", {key: None})
        yield Damage(f"{key} cut in half", {key: data[: len(data) // 2]})
        yield Damage(f"{key} cut by a byte", {key: data[:-1]})
        yield Damage(f"{key} emptied", {key: b""})
        yield Damage(f"{key} longer by a byte", {key: data + b"\0"})
        for position in {0, len(data) - 1, *(rng.randrange(len(data)) for _ in range(3))}:
            flipped = bytearray(data)
            flipped[position] ^= 1 << rng.randrange(8)
            yield Damage(f"bit flipped in byte {position} of {key}", {key: bytes(flipped)})
        if len(data) > 40:
            start = rng.randrange(len(data) - 20)
            yield Damage(f"20 zeros at {start} of {key}", {key: data[:start] + bytes(20) + data[start + 20 :]})
        alike = [other for other in keys if other.rpartition("/")[2] == key.rpartition("/")[2] and other != key]
        for other in {keys[(number + 1) % len(keys)], *rng.sample(alike, min(2, len(alike)))}:
            if objects[other] != data:
                yield Damage(f"{key} swapped with {other}", {key: objects[other], other: data})


def tried(damage: Damage, what: str, read: Callable[[], None]) -> bool:
    """Call a reader; return whether it succeeded. An error must name a key."""
    try:
        read()
    except DcrError as error:
        if not error.key or damage.is_derived:
            raise AssertionError(f"{what}: {error!r}") from error
        return False
    return True


def assert_verify_names(sound: Sound, damage: Damage, deep: bool) -> None:
    reports: list[VerifyReport] = []
    if not tried(damage, "verify", lambda: reports.append(sound.place.open().verify(deep=deep))):
        assert "dcr.json" in damage.contents, "verify raises"
        return
    named = {problem.key for problem in reports[0].problems}
    assert named & set(damage.contents), f"verify names {sorted(named) or 'nothing'}"


def assert_reads(sound: Sound, number: int, state: dict[str, Array]) -> None:
    assert_same(sound.place.open().read(f"main@{number}"), state)


def pull(sound: Sound, number: int, target: Path) -> None:
    sound.place.open().pull(target, f"main@{number}")


def check(sound: Sound, damage: Damage, scratch: Path, base: Path, turn: int) -> None:
    """Assert that verify names the damage and that readers return right bits or say which key is wrong."""
    for deep in (False, True):
        assert_verify_names(sound, damage, deep)
    for number, state in enumerate(sound.states):
        read = functools.partial(assert_reads, sound, number, state)
        tried(damage, f"read of main@{number}", read)
    # A checkout of each version would take long: one a turn, and one pull of a directory that has the second.
    number = turn % len(sound.states)
    for name, start in (("checkout", None), ("pull", base)):
        target = scratch / name
        shutil.rmtree(target, ignore_errors=True)
        if start is not None:
            shutil.copytree(start, target)
        if tried(damage, name, functools.partial(pull, sound, number, target)):
            assert_checkpoint(target, sound.checkpoints[number])


@pytest.mark.parametrize(("codec", "n_versions"), [("dcr.delta", 4), ("portable", 4), ("dcr.delta", 9)])
def test_no_damage_goes_unnoticed(scratch: Path, monkeypatch: pytest.MonkeyPatch, codec: str, n_versions: int) -> None:
    sound = build(scratch / "checkpoints", codec, n_versions, monkeypatch)
    base = scratch / "base"
    sound.place.open().pull(base, "main@1")
    report = sound.place.open().verify(deep=True)
    assert report.ok, report.problems
    assert report.unreferenced == []
    everything = list(damages(sound.objects, seeded("damage", codec, n_versions)))
    derived = [damage for damage in everything if damage.is_derived]
    chosen = everything[(n_versions % 3) :: EVERY] if n_versions == 4 else derived + everything[:: 4 * EVERY]
    failures = []
    for turn, damage in enumerate(chosen):
        sound.put(damage.contents)
        try:
            check(sound, damage, scratch, base, turn)
        except Exception as error:
            failures.append(f"{damage.what}: {type(error).__name__}: {str(error)[:300]}")
        sound.put({key: sound.objects[key] for key in damage.contents})
    assert not failures, f"{len(failures)} of {len(chosen)}:\n" + "\n".join(failures[:40])
    assert sound.place.open().verify(deep=True).ok


def test_a_version_that_is_defective_though_every_object_is_whole(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken publisher sealed a mask that does not lead where the digest table says."""
    real = committing.new_tables

    def wrong(*arguments: Any) -> Any:
        tables = real(*arguments)
        if arguments[1] is not None:
            tables["u32"][1] ^= np.uint64(1)
        return tables

    sound = Sound(Place(f"memory://defective-{secrets.token_hex(8)}"))
    store = sound.place.create(chunk_elements=64)
    states = list(small_states(2))
    sound.publish(store, scratch / "checkpoints", states[0], 1)
    monkeypatch.setattr(committing, "new_tables", wrong)
    sound.publish(store, scratch / "checkpoints", states[1], 1)
    monkeypatch.undo()
    store.close()
    target = scratch / "target"
    sound.place.open().pull(target, "main@0")
    before = (target / "model.safetensors").read_bytes()
    for read in (
        lambda: sound.place.open().read("main@1"),
        lambda: sound.place.open().read("main@1", ["b.weight"]),
        lambda: sound.place.open().pull(target, "main@1"),
        lambda: sound.place.open().checkout("main@1", scratch / "new"),
    ):
        with pytest.raises(IntegrityError, match="defective in chunk 1 of u32") as caught:
            read()
        assert caught.value.key == "main@1"
    header = json.loads(before[8 : 8 + int.from_bytes(before[:8], "little")])
    start = 8 + int.from_bytes(before[:8], "little") + header["b.weight"]["data_offsets"][0] + 4 * 64
    assert (target / "model.safetensors").read_bytes()[start : start + 4 * 64] == before[start : start + 4 * 64]
    assert_same(sound.place.open().read("main@1", ["a.weight"]), {"a.weight": states[1]["a.weight"]})
    assert {problem.key for problem in sound.place.open().verify(deep=True).problems} == {"main@1"}
    sound.place.open().pull(target, "main@0")
    assert_checkpoint(target, sound.checkpoints[0])


def test_a_directory_of_a_version_whose_manifest_is_gone_goes_on(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which files are that version's cannot be told any more, but no weights of it may stay beside the new ones."""
    sound = build(scratch / "checkpoints", "dcr.delta", 4, monkeypatch)
    target = scratch / "target"
    sound.place.open().pull(target, "main@1")  # two files; the versions from 2 on stand on an anchor of their own
    manifest = next(key for key in sound.objects if "/000000000001-" in key and key.endswith("/manifest.json"))
    sound.put({manifest: None})
    sound.place.open().pull(target, "main@2")
    assert_checkpoint(target, sound.checkpoints[2])
