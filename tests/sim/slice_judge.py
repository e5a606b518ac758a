"""The judge of versions that several writers make: of what each incarnation meant, sealed, and was told.

It reads manifests, journals and ownership documents as the spec says (docs/spec/v1.md §8), and knows from the writers
themselves which values they gave.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from sim.cuts import DTYPES, FLAT, Part, first_of, flattened, in_shapes, shapes_of
from sim.library import CHUNK_ELEMENTS
from sim.scheduler import ViolationError

from dcr_store.codec.digest import crc64, linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.judge import Judge
    from sim.library import State
    from sim.scheduler import Actor

    from dcr_store.layout.layout import Layout
    from dcr_store.publish.joint import SliceTransaction
    from dcr_store.publish.slice_baseline import SliceBaseline

Flat = dict[str, NDArray[Any]]

_PARTITION: Final = re.compile(r"(versions/.*/)data/([^/.]+)\.([0-9a-f]{16})/(.+)/c/(\d+)")
_JOURNAL: Final = re.compile(r"versions/.*/journal/([^/.]+)\.([0-9a-f]{16})\.\d+\.json")
_SPACES: Final = {"u8": "U8", "u16": "U16"}
_MAX_PROVEN: Final = 2000


@dataclass(eq=False)
class Meaning:
    """What one incarnation of a writer gives in a transaction, and what it could know of those before it.

    Attributes
    ----------
    durable : set of (str, int, str)
        Array, index and SHA-256 of the partitions that were journaled, and there.
    named : dict of (str, int) to set of str
        By array and index: the SHA-256 of all that were journaled.
    was_sealed : bool
        Whether these were sealed.
    """

    writer: str
    step: int
    flat: Flat
    parts: list[Part] = field(default_factory=list)
    durable: set[tuple[str, int, str]] = field(default_factory=set)
    named: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    was_sealed: bool = False

    def values(self) -> dict[tuple[str, int], int]:
        """Return each value by its dtype and number."""
        return {
            (part.dtype, number): value
            for part in self.parts
            for number, value in zip(part.held.tolist(), self.flat[part.dtype][part.held].tolist(), strict=True)
        }


class SliceJudge:
    """Follows the writers of one simulation; `judge` asks it about versions that were begun for several writers."""

    proven: Final[set[tuple[Any, ...]]] = set()  # ownership documents that were compared with what their writers gave

    def __init__(self, judge: Judge, count: Callable[[str], None]) -> None:
        self.judge, self.count = judge, count
        self.meant: dict[tuple[str, str, str], Meaning] = {}
        self.committers: dict[tuple[str, int], Actor] = {}
        self.aborted: set[str] = set()
        self._listed: dict[tuple[Actor, str], dict[str, int]] = {}
        self._flat: dict[int, Flat] = {}
        self._chunks: dict[tuple[int, str], dict[str, NDArray[Any]]] = {}
        judge.slices = self

    # ------------------------------------------------------------------ what writers do

    def on_list(self, actor: Actor, prefix: str, found: dict[str, int]) -> None:
        """An actor sees what is stored of a transaction: of its journal, all that it has ever seen counts."""
        if prefix.endswith("/journal/"):
            self._listed.setdefault((actor, prefix), {}).update(found)
        else:
            self._listed[actor, prefix] = found

    def joined(self, transaction: SliceTransaction, actor: Actor, step: int, variant: int) -> Meaning:
        """An incarnation takes part in a transaction."""
        writer, partitions = transaction.writer, transaction._writer.partitions
        meaning = Meaning(writer, step, FLAT[step, variant])
        keys, listed = transaction._keys, self._listed[actor, transaction._keys.prefix]
        for key in listed:
            found = _JOURNAL.fullmatch(key)
            if found is None or found[1] != writer:
                continue
            entry = json.loads(self.judge.objects[key])
            meaning.was_sealed |= entry["seal"] is not None
            for item in (*entry["partitions"], *(entry["seal"]["partitions"] if entry["seal"] else ())):
                meaning.named.setdefault((item["array"], item["index"]), set()).add(item["sha256"])
                there = keys.partition(writer, item["incarnation"], item["array"], item["index"])
                if listed.get(there) == item["nbytes"]:
                    meaning.durable.add((item["array"], item["index"], item["sha256"]))
        self.meant[transaction.txid, writer, partitions.incarnation] = meaning
        if transaction.is_committer:
            self.committers[transaction.txid, transaction.attempt] = actor
        return meaning

    def on_object(self, key: str, data: bytes) -> None:
        """Check a journal entry or a partition that has just been stored: against what was journaled before."""
        if (found := _JOURNAL.fullmatch(key)) is not None:
            entry = json.loads(data)
            meaning = self.meant.get((entry["txid"], found[1], found[2]))
            if meaning is None or not (meaning.named or meaning.was_sealed):
                return
            seal = entry["seal"]
            for item in (*entry["partitions"], *(seal["partitions"] if seal else ())):
                before = meaning.named.get((item["array"], item["index"]))
                _require(
                    before == {item["sha256"]} or (before is None and not meaning.was_sealed),
                    f"{key}: the writer had journaled other bits in {item['array']} {item['index']}",
                )
            if seal:
                lacking = set(meaning.named) - {(item["array"], item["index"]) for item in seal["partitions"]}
                _require(not lacking, f"{key}: the writer had journaled {sorted(lacking)}, and does not seal it")
        elif (found := _PARTITION.fullmatch(key)) is not None:
            txid = found[1].rpartition("-")[2].rstrip("/")
            meaning = self.meant.get((txid, found[2], found[3]))
            if meaning is not None and meaning.durable:
                sha256 = hashlib.sha256(data).hexdigest()
                again = (found[4], int(found[5]), sha256) in meaning.durable
                _require(not again, f"{key} is stored again, and was durable")

    # ------------------------------------------------------------------ versions

    def committed(self, record: dict[str, Any], begin: dict[str, Any]) -> State:
        """Return what all writers meant of a version that has just become visible; check what they sealed."""
        objects, txid, number = self.judge.objects, record["txid"], record["version"]
        where = f"main@{number}"
        _require(txid not in self.aborted, f"{where} is committed, and a writer was told that it was not")
        manifest = json.loads(objects[record["manifest"]["key"]])
        seals = manifest["seals"]
        _require([seal["writer"] for seal in seals] == begin["writers"], f"{where} has not the seals of its writers")
        step = begin["metadata"]["step"]
        shapes = shapes_of(step)
        flat = {dtype: np.zeros(len(values), DTYPES[dtype]) for dtype, values in FLAT[step, 0].items()}
        counts = {dtype: np.zeros(len(values), int) for dtype, values in flat.items()}
        layout = self.judge.catalog.layout(record["layout"])
        bases: dict[tuple[str, int], int] = {}
        for ref in seals:
            meaning = self.meant[txid, ref["writer"], ref["incarnation"]]
            entry = json.loads(objects[ref["key"]])
            told = entry["attempt"], entry["txid"], entry["writer"], entry["incarnation"]
            _require(
                told == (record["attempt"], txid, ref["writer"], ref["incarnation"]) and entry["seal"] is not None,
                f"{where} counts {ref['key']}, a seal of {told}",
            )
            for part in meaning.parts:
                flat[part.dtype][part.held] = meaning.flat[part.dtype][part.held]
                counts[part.dtype][part.held] += 1
            self._require_ownership(where, record, entry["seal"]["ownership"], meaning, layout)
            for place, digest in _bases(objects[entry["seal"]["contributions"]["key"]]):
                bases[place] = bases.get(place, 0) ^ digest
        for dtype, found in counts.items():
            wrong = np.flatnonzero(found != 1)
            _require(not len(wrong), f"{where}: value {wrong[:1]} of {dtype} is of {found[wrong[:1]]} writers")
        places = {(space, chunk) for space in _SPACES for chunk in range(-(-layout.spaces[space] // CHUNK_ELEMENTS))}
        _require(set(bases) == places, f"{where}: its seals say nothing of {sorted(places - set(bases))}")
        is_delta = record["base"] is not None and self.judge.line.versions[number - 1]["layout"] == record["layout"]
        for place, digest in bases.items():
            wanted = self._linear(number - 1, layout, *place) if is_delta else 0
            _require(digest == wanted, f"{where}: its seals say that another base was in chunk {place}")
        self._require_alike(where, record, seals)
        self._flat[number] = flat
        return in_shapes(flat, shapes)

    def _require_ownership(
        self, where: str, record: dict[str, Any], ref: dict[str, Any], meaning: Meaning, layout: Layout
    ) -> None:
        """Require that an ownership document is there to stay, and says what its writer gave."""
        versions, key = self.judge.line.versions, ref["key"]
        if not key.startswith(f"versions/main/{record['version']:012}-{record['txid']}/"):
            base = json.loads(self.judge.objects[versions[record["version"] - 1]["manifest"]["key"]])
            named = [json.loads(self.judge.objects[seal["key"]])["seal"]["ownership"] for seal in base["seals"]]
            _require(ref in named, f"{where} refers to {key}, which its base does not name")
            self.count("ownership unchanged")
        data = self.judge.objects[key]
        case = (data, layout.sha256, meaning.step, *map(id, meaning.parts))
        if case in self.proven:
            return
        document = json.loads(data)
        _require(
            (document["layout"], document["writer"]) == (layout.sha256, meaning.writer), f"{key} is of another writer"
        )
        first, shapes = first_of(shapes_of(meaning.step)), shapes_of(meaning.step)
        owned = [
            (shapes[row["name"]][0], first[row["name"]] + number)
            for row in document["tensors"]
            for box in row["boxes"]
            for number in _numbers(box)
        ]
        _require(sorted(owned) == sorted(meaning.values()), f"{key} does not say what its writer wrote")
        for space, dtype in _SPACES.items():
            held = {number for kind, number in owned if kind == dtype}
            ones = {}
            for chunk, bits in enumerate(_spread(layout, space, first, held)):
                if bits.any():
                    ones[chunk] = linear(crc64(bits), bits.nbytes)
            told = {chunk: int(digest, 16) for chunk, digest in document["ones"][space]}
            _require(told == ones, f"{key}: its digests in {space} are not those of what it owns")
        if len(self.proven) >= _MAX_PROVEN:
            self.proven.clear()
        self.proven.add(case)

    def _require_alike(self, where: str, record: dict[str, Any], seals: list[dict[str, Any]]) -> None:
        """Require that all seals of one writer that the committer had seen are of the same bits."""
        txid, prefix = record["txid"], f"versions/main/{record['version']:012}-{record['txid']}/journal/"
        seen = self._listed[self.committers[txid, record["attempt"]], prefix]
        if len(seen) == len(seals):
            return
        counted = {ref["writer"]: self.meant[txid, ref["writer"], ref["incarnation"]] for ref in seals}
        for key in seen:
            entry = json.loads(self.judge.objects[key])
            if entry["seal"] is None or entry["attempt"] != record["attempt"]:
                continue
            other, one = self.meant[txid, entry["writer"], entry["incarnation"]], counted[entry["writer"]]
            _require(
                other is one or other.values() == one.values(), f"{where}: {key} seals other bits than those that count"
            )

    def flat(self, number: int) -> Flat:
        """Return the values of a version."""
        if number not in self._flat:
            self._flat[number] = flattened(self.judge.states[number])
        return self._flat[number]

    def _in_chunks(self, number: int, layout: Layout) -> dict[str, NDArray[Any]]:
        """Return the chunks of each space at a version, shape (n, CHUNK_ELEMENTS)."""
        found = self._chunks.get((number, layout.sha256))
        if found is None:
            found = self._chunks[number, layout.sha256] = {}
            for space, dtype in _SPACES.items():
                length = layout.spaces[space]
                found[space] = np.zeros((-(-length // CHUNK_ELEMENTS), CHUNK_ELEMENTS), DTYPES[dtype])
                for entry in layout.tensors:
                    if entry.space == space:
                        values = self.judge.states[number][entry.name].reshape(-1)
                        found[space].reshape(-1)[entry.start : entry.start + entry.n_elements] = values
        return found

    def _linear(self, number: int, layout: Layout, space: str, chunk: int) -> int:
        bits = self._in_chunks(number, layout)[space][chunk]
        return int(linear(crc64(bits), bits.nbytes))

    # ------------------------------------------------------------------ what writers are told

    def told_version(self, name: str, meaning: Meaning) -> None:
        """A writer was told that a version is committed, and takes it for granted that its bits are in it."""
        flat = self.flat(int(name.rpartition("@")[2]))
        for part in meaning.parts:
            _require(
                np.array_equal(flat[part.dtype][part.held], meaning.flat[part.dtype][part.held]),
                f"{name} has other bits than writer {meaning.writer} gave, who was told that it is committed",
            )

    def told_aborted(self, txid: str) -> None:
        """A writer was told that a transaction has ended without a version."""
        self.aborted.add(txid)
        _require(
            all(record["txid"] != txid for record in self.judge.line.versions),
            f"{txid} is committed, and a writer is told that it is not",
        )

    def look_at(self, baseline: SliceBaseline) -> None:
        """Check a baseline: of a version that is committed; what its digests vouch for are that version's bits."""
        if baseline.at is None:
            return
        row = baseline.at.row
        self.judge.told_version(baseline.at.name, row.root)
        chunks = self._in_chunks(row.version, self.judge.catalog.layout(row.layout))
        for bits in baseline.slices.values():
            for index, piece in enumerate(bits.pieces):
                packed = bits.packed(index)
                if crc64(packed) != int(bits.digests[index]):
                    continue  # it has rotted, and will be read again
                wanted = np.empty_like(packed)
                piece.gather_chunk(chunks[piece.space][piece.chunk], wanted)
                _require(
                    np.array_equal(packed, wanted), f"a baseline of {baseline.at.name} has other bits in {piece.space}"
                )


def _numbers(box: dict[str, Any]) -> list[int]:
    """Return the elements of a box, by their numbers in its tensor."""
    found = [box["start"]]
    for n, stride in box["dims"]:
        found = [start + step * stride for start in found for step in range(n)]
    return found


def _spread(layout: Layout, space: str, first: dict[str, int], held: set[int]) -> NDArray[Any]:
    """Return the chunks of a space, all ones where a value is held and zero elsewhere."""
    kind = DTYPES[_SPACES[space]]
    chunks = np.zeros((-(-layout.spaces[space] // CHUNK_ELEMENTS), CHUNK_ELEMENTS), kind)
    for entry in layout.tensors:
        if entry.space == space:
            for number in range(entry.n_elements):
                if first[entry.name] + number in held:
                    chunks.reshape(-1)[entry.start + number] = np.iinfo(kind).max
    return chunks


def _bases(data: bytes) -> list[tuple[tuple[str, int], int]]:
    """Return what contributions say of the base: (space, chunk) and digest."""
    _require(data[:8] == b"dcrcont1", "contributions begin with something else")
    found, place = [], 8
    for space in ("u8", "u16", "u32", "u64"):
        (n,) = struct.unpack_from("<Q", data, place)
        rows = struct.unpack_from(f"<{4 * n}Q", data, place + 8)
        found += [((space, rows[4 * i]), rows[4 * i + 3]) for i in range(n)]
        place += 8 + 32 * n
    return found


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ViolationError(message)
