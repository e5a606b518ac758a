"""Each object of a store is deleted, cut, flipped, swapped: verify names it at the depth that docs/verify.md promises.

And whatever is damaged, no reader ever returns a wrong bit. The tables of the docs are what is found here: with
``DCR_WRITE_DOCS=1`` they are written.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pytest
from faults.scenes import OCCURRENCES, Place, assert_checkpoint, seeded
from states import assert_same, write_hf

import dcr_store
from dcr_store.errors import DcrError, IntegrityError
from dcr_store.format import canonical
from dcr_store.format.names import STORE_KEY, record_key
from dcr_store.history.report import VerifyReport
from dcr_store.log import checkpoints, line
from dcr_store.log.key_files import make_key_file
from dcr_store.log.signing import Signing
from dcr_store.objects.open import open_objects
from dcr_store.publish import committing, partitions
from dcr_store.store import Store

Array = np.ndarray
EVERY = 1 if OCCURRENCES > 1 else 12  # of the damages that readers meet; a campaign takes all
DOCS = Path(__file__).parents[2] / "docs" / "verify.md"
DEPTHS: Final = ("log", "objects", "replay")


@dataclass
class Sound:
    """A store that is whole, and what its versions are. `keys`: a directory with the key that signs its records."""

    place: Place
    keys: Path | None = None
    objects: dict[str, bytes] = field(default_factory=dict)
    states: list[dict[str, Array]] = field(default_factory=list)
    checkpoints: list[Path] = field(default_factory=list)

    def open(self, *, signs: bool = False) -> Store:
        """Open the store anew, trusting the key if there is one."""
        if self.keys is None:
            return self.place.open()
        key = self.keys / "key" if signs else None
        return dcr_store.open(self.place.url, sign_with=key, trust=self.keys / "trust")

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

    def restore(self, keys: Any) -> None:
        """Undo what was put at keys."""
        self.put({key: self.objects.get(key) for key in keys})


def small_states(n: int) -> Iterator[dict[str, Array]]:
    """Yield states that follow each other, each with a few changes."""
    rng = np.random.default_rng(3)
    state: dict[str, Array] = {
        "a.weight": rng.integers(0, 1 << 16, (20, 11)).astype(np.uint16),
        "b.weight": rng.normal(size=100).astype(np.float32),
    }
    for _ in range(n):
        yield {name: array.copy() for name, array in state.items()}
        for array in state.values():
            bits = array.reshape(-1).view(f"u{array.itemsize}")
            bits[rng.integers(0, bits.size, 20)] ^= rng.integers(1, 200, 20).astype(bits.dtype)


def build(
    directory: Path, codec: str, n: int, monkeypatch: pytest.MonkeyPatch, *, signs: bool = False, whole: bool = False
) -> Sound:
    """Make a store of `n` versions, the third of another layout; `whole`: of one, and with all kinds of objects."""
    monkeypatch.setattr(partitions, "PARTITION_NBYTES", 256)  # several partitions of several chunks
    if whole:
        monkeypatch.setattr(line, "CHECKPOINT_VERSIONS", 1)
    place = Place(f"memory://damage-{secrets.token_hex(8)}")
    sound = Sound(place)
    store = place.create(codec=codec, chunk_elements=64)
    if signs:
        sound.keys = directory / "keys"
        sound.keys.mkdir(parents=True)
        (sound.keys / "trust").write_text(make_key_file(sound.keys / "key"))
        store = sound.open(signs=True)
    for step, state in enumerate(small_states(n)):
        if step >= 2 and not whole:
            state["c.weight"] = np.arange(90, dtype=np.uint8) + np.uint8(step)
        sound.publish(store, directory, state, 1 + step % 2)
    if whole:
        for name in ("best", "last"):
            store.tag(f"main@{len(name) % 3}", name)
            store.pin(f"main@{len(name) % 3}", name)
        store.fold("main@0", "main@2")
        store.anchor("main@1")
        store.fork("main@1", "exp")
        with store.begin("exp") as transaction:
            transaction.write("a.weight", np.arange(64, dtype=np.uint16))
        for name in ("eu", "us"):
            store.create_group(name, ["node"])
            with store.receiver(dict(small_states(1).__next__()), group=name, name="node") as receiver:
                store.group(name).propose("main@1")
                receiver.prepare(receiver.poll().wanted or "")
                receiver.poll()
    store.close()
    sound.keep()
    return sound


KINDS: Final = (
    ("the store document", r"dcr\.json"),
    ("a log record", r"log/[^/]+/0\d+\.json"),
    ("a log's or group's last record", r"never a key"),
    ("a hint", r"log/[^/]+/latest\.json"),
    ("a log checkpoint", r"log/[^/]+/checkpoints/.*"),
    ("a group's record", r"groups/[^/]+/log/0\d+\.json"),
    ("a group's checkpoint", r"groups/[^/]+/log/latest\.json"),
    ("an acknowledgement", r"groups/[^/]+/acks/.*"),
    ("a tag", r"tags/.*"),
    ("a pin", r"pins/.*"),
    ("a manifest", r".*/manifest\.json"),
    ("a layout", r"layouts/.*"),
    ("a seal, a journal entry", r".*/journal/.*"),
    ("contributions", r".*/contributions\.bin"),
    ("a digest table", r".*/digests/.*"),
    ("a file of a checkpoint", r".*/files/.*"),
    ("metadata of an array", r".*/zarr\.json"),
    ("a partition", r".*/c/\d+"),
)
HOW: Final = ("deleted", "cut", "a bit flipped", "swapped")


def kind_of(key: str, objects: dict[str, bytes] | None = None) -> str:
    """Return what an object is; with all `objects`, whether it is the last record of its log."""
    kind = next(kind for kind, form in KINDS if re.fullmatch(form, key))
    if objects is not None and kind.endswith("record"):
        head, seq = key[:-25], int(key[-25:-5])
        if f"{head}{seq + 1:020d}.json" not in objects:
            return "a log's or group's last record"
    return kind


@dataclass(frozen=True)
class Damage:
    """What is done to the store: keys and their new contents (None: deleted)."""

    what: str
    how: str
    contents: dict[str, bytes | None]

    @property
    def is_derived(self) -> bool:
        """Whether only hints and log checkpoints are hit, which readers can do without."""
        return all(key.endswith("/latest.json") or "/checkpoints/" in key for key in self.contents)


def damages(objects: dict[str, bytes], rng: random.Random, *, n_flips: int = 3) -> Iterator[Damage]:
    """Yield all damages of a store, one at a time, object by object."""
    keys = sorted(objects)
    for key in keys:
        data = objects[key]
        yield Damage(f"{key} deleted", "deleted", {key: None})
        for n in {0, len(data) // 2, len(data) - 1} if n_flips > 1 else {len(data) // 2}:
            yield Damage(f"{key} cut to {n} bytes", "cut", {key: data[:n]})
        for position in {rng.randrange(len(data)) for _ in range(n_flips)}:
            flipped = bytearray(data)
            flipped[position] ^= 1 << rng.randrange(8)
            yield Damage(f"bit flipped in byte {position} of {key}", "a bit flipped", {key: bytes(flipped)})
        alike = [other for other in keys if kind_of(other) == kind_of(key) and objects[other] != data]
        if "/journal/" in key:
            alike = [other for other in alike if other[-11:] == key[-11:]] or alike
        for other in rng.sample(alike, min(1, len(alike))):
            yield Damage(f"{key} swapped with {other}", "swapped", {key: objects[other], other: data})
        if n_flips > 1 and len(data) > 40:
            start = rng.randrange(len(data) - 20)
            zeros = data[:start] + bytes(20) + data[start + 20 :]
            yield Damage(f"20 zeros at {start} of {key}", "a bit flipped", {key: zeros})
            yield Damage(f"{key} longer by a byte", "cut", {key: data + b"\0"})


def tried(damage: Damage, what: str, read: Callable[[], None]) -> bool:
    """Call a reader; return whether it succeeded. An error must name a key."""
    try:
        read()
    except DcrError as error:
        if not error.key or damage.is_derived:
            raise AssertionError(f"{what}: {error!r}") from error
        return False
    return True


def named_at(sound: Sound, damage: Damage, depth: str) -> set[str]:
    """Return what verify names at a depth."""
    reports: list[VerifyReport] = []
    if not tried(damage, "verify", lambda: reports.append(sound.open().verify(depth=depth))):  # type: ignore[arg-type]
        assert STORE_KEY in damage.contents, "verify raises"
        return {STORE_KEY}
    named = {problem.key for problem in reports[0].problems}
    if STORE_KEY in damage.contents:  # the first records follow another one: each of them is named
        return {STORE_KEY} if named else set()
    return named


def _parts(damage: Damage) -> set[str]:
    """Return what a damage touches: logs and groups as a whole, else single objects."""
    of_logs = ("groups/", "log/")
    return {"/".join(key.split("/")[:2]) if key.startswith(of_logs) else key for key in damage.contents}


def together(all_damages: list[Damage]) -> Iterator[list[Damage]]:
    """Put damages into batches in which each is noticed by itself, or not: one does not stand before another."""
    batches: dict[tuple[str, str, int], list[Damage]] = {}
    counts: dict[str, int] = {}
    for damage in all_damages:
        key = next(iter(damage.contents))
        kind, place = kind_of(key), "/".join(key.split("/")[:2])
        if "/data/" in key or "/digests/" in key:  # the leaves: nothing is found by way of them
            batch = "leaves", damage.how, 0
        elif kind in ("a manifest", "a layout"):
            batch = kind, damage.how, 0
        elif kind == "a seal, a journal entry" and len({other[-11:] for other in damage.contents}) == 1:
            batch = f"journals {key[-11:]}", damage.how, 0  # a seal is the way to the entries before it
        elif place.startswith(("groups/", "log/exp")) and "log/main" not in _parts(damage):  # one of each at a time
            counts[place] = counts.get(place, 0) + 1
            batch = "logs", "", counts[place]
        else:
            batch = damage.what, "", 0
        while any(_parts(damage) & _parts(other) for other in batches.get(batch, [])):
            batch = batch[0], batch[1], batch[2] + 1  # what it is swapped with is hit by another one
        batches.setdefault(batch, []).append(damage)
    yield from batches.values()


LAST_FLIPPED: Final = ("a log's or group's last record", "a bit flipped")
# Damage that need not be noticed, because what it hits may be missing, or says nothing that a version consists of.
HARMLESS: Final = {
    ("a log checkpoint", "deleted"): "none: a reader can do without",
    ("a group's checkpoint", "deleted"): "none: a reader can do without",
    ("a log's or group's last record", "deleted"): "log, if the hint knows it; else `--head`",
    LAST_FLIPPED: "log, if the hint knows it, or with `--trust`",
    ("a tag", "deleted"): "none: may be deleted",
    ("a pin", "deleted"): "none: may be deleted",
    ("a tag", "a bit flipped"): "log, but for the message and the time",
    ("a pin", "a bit flipped"): "log, but for the message and the times",
}


@pytest.mark.parametrize("signs", [False, True], ids=["unsigned", "signed"])
def test_each_damage_is_named_at_the_depth_that_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signs: bool
) -> None:
    sound = build(tmp_path, "dcr.delta", 3, monkeypatch, signs=signs, whole=True)
    assert {kind_of(key, sound.objects) for key in sound.objects} == {kind for kind, _ in KINDS}
    report = sound.open().verify(deep=True)
    assert report.problems == []
    caught: dict[tuple[str, str], set[str]] = {}
    for batch in together(list(damages(sound.objects, seeded("damage", signs), n_flips=1))):
        contents = {key: data for damage in batch for key, data in damage.contents.items()}
        whole = Damage(batch[0].what, batch[0].how, contents)
        sound.put(contents)
        at_log = named_at(sound, whole, "log")
        missed = any(not at_log & set(damage.contents) for damage in batch)
        at_objects = named_at(sound, whole, "objects") if missed else at_log
        sound.restore(contents)
        for damage in batch:
            found = [bool(named & set(damage.contents)) for named in (at_log, at_objects)]
            depth = "log" if found[0] else "objects" if found[1] else "none"
            case = kind_of(next(iter(damage.contents)), sound.objects), damage.how
            caught.setdefault(case, set()).add(depth)
            assert depth != "none" or (case in HARMLESS and not (signs and case == LAST_FLIPPED)), damage.what
    rows = []
    for kind, _ in KINDS:
        cells = []
        for how in HOW:
            found = caught.get((kind, how), set())
            told = "-" if not found else max(found, key=["log", "objects", "none"].index)
            cells.append(HARMLESS.get((kind, how), told))
        rows.append([kind, *cells])
    assert sound.open().verify(deep=True).ok
    check_docs("damage", ["", *HOW], rows)


def check_docs(name: str, header: list[str], rows: list[list[str]]) -> None:
    """Compare a table of docs/verify.md with what was found; write it with DCR_WRITE_DOCS."""
    lines = ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]
    text = DOCS.read_text("utf-8")
    begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
    assert text.count(begin) == text.count(end) == 1, "the marks of the table"
    before, _, rest = text.partition(begin)
    found, _, after = rest.partition(end)
    table = "\n".join(line.replace("|  |", "| |") for line in lines)
    if os.environ.get("DCR_WRITE_DOCS"):
        DOCS.write_text(before + begin + table + end + after, "utf-8")
    else:
        assert found == table, f"docs/verify.md says otherwise than what happens:\n{table}"


# ---------------------------------------------------------------------- forgery


class Forger:
    """Somebody who may write the store, has no key, and gives everything that he changes the right hashes."""

    def __init__(self, sound: Sound) -> None:
        self.objects = open_objects(sound.place.url)
        self.original, self.url = sound.objects, sound.place.url
        self.hashes: dict[str, str] = {}
        self.nbytes: dict[str, int] = {}

    def put(self, key: str, data: bytes) -> None:
        old = canonical.sha256(self.objects.get(key))
        self.hashes[old] = canonical.sha256(data)
        self.nbytes[key] = len(data)
        self.objects.put(key, data)

    def document(self, key: str, **changed: Any) -> None:
        """Write a document anew, with the hashes and lengths of what it refers to."""
        self.put(key, canonical.encode({**self._right(json.loads(self.objects.get(key))), **changed}))

    def _right(self, value: Any) -> Any:
        if isinstance(value, dict):
            found = {name: self._right(item) for name, item in value.items()}
            if "nbytes" in found and found.get("key") in self.nbytes:
                found["nbytes"] = self.nbytes[found["key"]]
            return found
        if isinstance(value, list):
            return [self._right(item) for item in value]
        return self.hashes.get(value, value) if isinstance(value, str) else value

    def log(self, seq: int, **changed: Any) -> None:
        """Write a record of main anew, and all that follow; without checkpoints, which are derived."""
        while self.objects.size(record_key("main", seq)) is not None:
            self.document(record_key("main", seq), **changed)
            changed, seq = {}, seq + 1
        last = canonical.sha256(self.objects.get(record_key("main", seq - 1)))
        checkpoints.write_hint(self.objects, checkpoints.LineState("main", seq, last), None)
        for key in self.objects.list("log/main/checkpoints/"):
            self.objects.delete(key)
        self.rest()

    def rest(self) -> None:
        """Write anew what refers to versions of main: names, groups, the line that goes on from it."""
        keys = sorted(self.objects.list(""))
        for key in [key for key in keys if key.startswith(("tags/", "pins/")) or "/acks/" in key]:
            self.document(key)
        for key in keys:
            if re.fullmatch(r"(log/exp|groups/[^/]+/log)/0\d+\.json", key):
                self.document(key)
            elif key.startswith("log/exp/checkpoints/") or re.fullmatch(r"groups/.*/latest\.json", key):
                self.objects.delete(key)
        last = max(key for key in keys if re.fullmatch(r"log/exp/0\d+\.json", key))
        state = checkpoints.LineState("exp", int(last[-25:-5]) + 1, canonical.sha256(self.objects.get(last)))
        checkpoints.write_hint(self.objects, state, None)

    def key(self, form: str) -> str:
        return next(key for key in sorted(self.objects.list("")) if re.fullmatch(form, key))


def rewrite_partition(forger: Forger, manifest: str) -> None:
    """Give a partition other bits, those of the one beside it, which decode; journal, seal and manifest follow."""
    prefix = re.escape(manifest.partition("attempts/")[0])
    own, other = forger.key(prefix + r"data/.*/u16/mask/c/0"), forger.key(prefix + r"data/.*/u16/mask/c/1")
    forger.put(own, forger.objects.get(other))
    for key in sorted(key for key in forger.objects.list("") if re.fullmatch(prefix + "journal/.*", key)):
        document = json.loads(forger.objects.get(key))
        seal = document["seal"] or {"partitions": []}
        for item in [*document["partitions"], *seal["partitions"]]:
            if (item["array"], item["index"]) == ("u16/mask", 0):
                item["nbytes"] = forger.nbytes[own]
        forger.objects.put(key, canonical.encode(document))
        was = canonical.sha256(canonical.encode(document))
        original = forger.original[key]
        forger.document(key)
        forger.hashes[canonical.sha256(original)] = forger.hashes.pop(was)
    forger.document(manifest)


def record_of(forger: Forger, kind: str, version: int) -> tuple[int, str]:
    """Return the number of a record of main, and the manifest that it names."""
    for key in sorted(key for key in forger.objects.list("log/main/") if "/0" in key and "/checkpoints/" not in key):
        record = json.loads(forger.objects.get(key))
        if (record["kind"], record.get("version")) == (kind, version):
            return record["seq"], record["manifest"]["key"]
    raise AssertionError(kind)


def rewrite_bits(forger: Forger) -> None:
    """A version leads to other bits than its digests say."""
    seq, manifest = record_of(forger, "commit", 1)
    rewrite_partition(forger, manifest)
    forger.log(seq)


def rewrite_fold(forger: Forger) -> None:
    """A fold does."""
    seq, manifest = record_of(forger, "fold", 2)
    rewrite_partition(forger, manifest)
    forger.log(seq)


def rewrite_state(forger: Forger) -> None:
    """A version has another root, and all that refers to it says so."""
    commit = json.loads(forger.objects.get(record_key("main", 1)))
    manifest = json.loads(forger.objects.get(commit["manifest"]["key"]))
    table = next(iter(manifest["digests"].values()))["table"]["key"]
    data = bytearray(forger.objects.get(table))
    data[0] ^= 1
    forger.put(table, bytes(data))
    from dcr_store.codec.digest import state_root
    from dcr_store.layout.layout import Layout

    layout_key = f"layouts/{manifest['layout']}.json"
    layout = Layout.from_json_bytes(forger.objects.get(layout_key), key=layout_key)
    tables = []
    for space in ("u8", "u16", "u32", "u64"):
        place = manifest["digests"].get(space)
        stored = b"" if place is None else forger.objects.get(place["table"]["key"])
        tables.append((layout.spaces[space], 64, np.frombuffer(stored, "<u8")))
    forger.hashes[commit["root"]] = state_root(layout.sha256, tables)
    for key in forger.objects.list("versions/"):
        if key.endswith("/manifest.json"):
            forger.document(key)
    forger.log(1)


def rewrite_record(forger: Forger) -> None:
    """The metadata of a version."""
    begin = json.loads(forger.objects.get(record_key("main", 2)))
    forger.log(2, metadata={**begin["metadata"], "reward": 1e9})


def one_more(forger: Forger) -> None:
    """A version more, in all order but for its author."""
    store = Place(forger.url).open()
    with patch.object(Signing, "check_goes_on"), store.begin() as transaction:
        for name, array in store.read("main").items():
            transaction.write(name, array ^ array.dtype.type(1) if array.dtype.kind == "u" else array)
    store.close()


def set_back(forger: Forger) -> None:
    """The last records of a line are gone, and hint and checkpoints know nothing of them; what they led to is left."""
    for seq in (1, 2):
        forger.objects.delete(record_key("exp", seq))
    last = canonical.sha256(forger.objects.get(record_key("exp", 0)))
    checkpoints.write_hint(forger.objects, checkpoints.LineState("exp", 1, last), None)
    for key in forger.objects.list("log/exp/checkpoints/"):
        forger.objects.delete(key)


def checkpoint_lies(forger: Forger) -> None:
    """A log checkpoint, whole, tells another root."""
    key = forger.key(r"log/main/checkpoints/0+4\.json")
    body = canonical.open_body(forger.objects.get(key), key)
    assert body is not None
    body["rows"][0]["root"] = "0" * 64
    forger.objects.put(key, canonical.seal_body(body))


FORGERIES: Final = (
    ("the bits of a version", rewrite_bits),
    ("the bits of a fold", rewrite_fold),
    ("a version's digests and root", rewrite_state),
    ("what a record says", rewrite_record),
    ("a version more, by somebody else", one_more),
    ("a log checkpoint", checkpoint_lies),
    ("the last records gone, hint and log checkpoints set back", set_back),
)


def test_forgery_is_noticed_at_the_depth_that_is_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is rewritten with the right hashes: by the bits alone, by signatures, by a head that is remembered."""
    unsigned = build(tmp_path / "unsigned", "dcr.delta", 3, monkeypatch, whole=True)
    signed = build(tmp_path / "signed", "dcr.delta", 3, monkeypatch, signs=True, whole=True)
    rows = []
    for what, forge in FORGERIES:
        cells = []
        for sound in (unsigned, signed):
            heads = [f"{info.version}#{info.root}" for name in ("main", "exp") for info in sound.open().log(name)]
            forge(Forger(sound))
            for given in ((), heads) if sound is unsigned else ((),):
                caught = (d for d in DEPTHS if not sound.open().verify(depth=d, heads=given).ok)  # type: ignore[arg-type]
                cells.append(next(caught, "none"))
            sound.restore({**sound.objects, **dict.fromkeys(sound.open()._objects.list(""))})
        rows.append([what, *cells])
    assert unsigned.open().verify(deep=True).ok
    assert signed.open().verify(deep=True).ok
    assert [row[3] for row in rows] == ["log"] * 6 + ["none"], rows
    assert [row[1] for row in rows] == ["replay", "replay", "replay", "none", "none", "log", "none"], rows
    assert [row[2] for row in rows] == ["replay", "replay", "log", "none", "none", "log", "log"], rows
    check_docs("forgery", ["", "no keys", "no keys, `--head`", "`--trust`"], rows)


# ---------------------------------------------------------------------- readers


def assert_reads(sound: Sound, number: int, state: dict[str, Array]) -> None:
    assert_same(sound.open().read(f"main@{number}"), state)


def pull(sound: Sound, number: int, target: Path) -> None:
    sound.open().pull(target, f"main@{number}")


def check(sound: Sound, damage: Damage, scratch: Path, base: Path, turn: int) -> None:
    """Assert that readers return right bits or say which key is wrong."""
    for number, state in enumerate(sound.states):
        read = functools.partial(assert_reads, sound, number, state)
        tried(damage, f"read of main@{number}", read)
    # A checkout of each version would take long: one a turn, and one pull of a directory that has the second.
    number = turn % len(sound.states)
    name, start = ("checkout", None) if turn % 2 else ("pull", base)
    target = scratch / name
    shutil.rmtree(target, ignore_errors=True)
    if start is not None:
        shutil.copytree(start, target)
    if tried(damage, name, functools.partial(pull, sound, number, target)):
        assert_checkpoint(target, sound.checkpoints[number])


@pytest.mark.parametrize(
    ("codec", "n_versions", "signs"), [("dcr.delta", 4, False), ("portable", 3, True)], ids=["delta", "portable-signed"]
)
def test_no_reader_returns_a_wrong_bit(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, codec: str, n_versions: int, signs: bool
) -> None:
    monkeypatch.setattr(line, "CHECKPOINT_VERSIONS", 3)
    sound = build(scratch / "checkpoints", codec, n_versions, monkeypatch, signs=signs)
    base = scratch / "base"
    sound.open().pull(base, "main@1")
    report = sound.open().verify(deep=True)
    assert report.ok, report.problems
    assert report.unreferenced == []
    everything = list(damages(sound.objects, seeded("damage", codec, n_versions)))
    derived = [damage for damage in everything if damage.is_derived]
    chosen = derived[::2] + everything[n_versions % 3 :: EVERY]
    failures = []
    for turn, damage in enumerate(chosen):
        sound.put(damage.contents)
        try:
            if turn % 4 == 0 and not damage.is_derived:
                assert named_at(sound, damage, "replay")
            check(sound, damage, scratch, base, turn)
        except Exception as error:
            failures.append(f"{damage.what}: {type(error).__name__}: {str(error)[:300]}")
        sound.restore(damage.contents)
    assert not failures, f"{len(failures)} of {len(chosen)}:\n" + "\n".join(failures[:40])
    assert sound.open().verify(deep=True).ok


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
    assert (target / "model.safetensors").read_bytes()[start : start + 4 * 36] == before[start : start + 4 * 36]
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
