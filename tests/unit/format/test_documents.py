"""Documents and records: the parsers against the same examples as the schemas, and the rules of compatibility."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dcr_store.errors import DcrError, FormatError
from dcr_store.format import canonical, signatures
from dcr_store.format.copies import Absent, Detached
from dcr_store.format.documents import (
    Array,
    Base,
    CheckpointFile,
    JournalEntry,
    Manifest,
    ObjectRef,
    StoreDocument,
    check_array,
    check_path,
)
from dcr_store.format.fields import Fields, now
from dcr_store.format.groups import Ack, parse_group_record
from dcr_store.format.marks import Named
from dcr_store.format.records import Abort, Begin, Commit, Record, Resume, parse_record
from dcr_store.format.signatures import Signature
from dcr_store.history.report_file import Kept
from dcr_store.layout import discovered
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.layout import Layout
from dcr_store.log import checkpoints
from dcr_store.log import group as group_log
from dcr_store.objects.open import open_objects
from dcr_store.publish.ownership import Ownership

EXAMPLES = Path(__file__).parents[3] / "schema" / "examples"
VALID = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted((EXAMPLES / "valid").glob("*.json"))}
INVALID = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted((EXAMPLES / "invalid").glob("*.json"))}


def dumps(document: object) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


class UnusableError(FormatError):
    """A derived document that counts as missing."""


def _derived(schema: str) -> Callable[[bytes], object]:
    """Read hints and checkpoints from a store, as they are only ever read there."""

    def parse(data: bytes) -> object:
        document = json.loads(data)
        body = document.get("body") if isinstance(document, dict) else None
        body = body if isinstance(body, dict) else {}
        line = body.get("line") if isinstance(body.get("line"), str) else "main"
        objects = open_objects("memory://derived/examples")
        if schema == "group-checkpoint":
            group = body.get("group") if isinstance(body.get("group"), str) else "eu"
            objects.put(f"groups/{group}/log/latest.json", data)
            found: object = group_log.read_checkpoint(objects, group, str(body.get("store_sha256")))
        elif schema == "log-hint":
            objects.put(f"log/{line}/latest.json", data)
            found = checkpoints.read_hint(objects, line)
        else:
            seq = body.get("seq") if isinstance(body.get("seq"), int) else 0
            objects.put(f"log/{line}/checkpoints/{seq:020d}.json", data)
            found = checkpoints.read_checkpoint(objects, line, seq, str(body.get("store_sha256")))
        if found is None:
            raise UnusableError("counts as missing", key="k")
        return found

    return parse


# What the example of a discovery is of.
SLICES = {"fc1": np.zeros((4, 2), ml_dtypes.bfloat16), "norm": np.zeros(3, np.float32)}
REQUEST = discovered.request_of(SLICES, "example 1")

PARSERS: dict[str, Callable[[bytes], Any]] = {
    "store": StoreDocument.from_bytes,
    "layout": lambda data: Layout.from_json_bytes(data, "k"),
    "journal": lambda data: JournalEntry.from_bytes(data, "k"),
    "affine-map": lambda data: AffineMap.from_bytes(data, "k"),
    "discovery": lambda data: discovered.from_bytes(data, SLICES, REQUEST, "k"),
    "ownership": lambda data: Ownership.from_bytes(data, "k"),
    "manifest": lambda data: Manifest.from_bytes(data, "k"),
    "tag": lambda data: Named.from_bytes("tag", data, "k"),
    "pin": lambda data: Named.from_bytes("pin", data, "k"),
    "absent": lambda data: Absent.from_bytes(data, "k"),
    "detached": lambda data: Detached.from_bytes(data, "k"),
    "verify-report": lambda data: Kept.from_bytes(data, "k"),
    "log-record": lambda data: parse_record(data, "k"),
    "log-hint": _derived("log-hint"),
    "log-checkpoint": _derived("log-checkpoint"),
    "group-record": lambda data: parse_group_record(data, "k"),
    "group-ack": lambda data: Ack.from_bytes(data, "k"),
    "group-checkpoint": _derived("group-checkpoint"),
}
OPTIONAL = {
    ("log-checkpoint", "source"),
    ("log-checkpoint", "history"),
    ("log-hint", "tail"),
    ("log-record", "signature"),
    ("group-record", "signature"),
}
DIRECT = {
    name: example
    for name, example in VALID.items()
    if not example["schema"].startswith(("log-hint", "log-check", "group-check", "discovery"))
}


def reseal(document: Any) -> Any:
    """Give a derived document the SHA-256 of its body, if it has a body; a copy's that of its source's."""
    if (
        isinstance(document, dict)
        and isinstance(document.get("body"), dict)
        and isinstance(document.get("sha256"), str)
    ):
        document["sha256"] = canonical.sha256(dumps(document["body"]))
    if isinstance(document, dict) and isinstance(document.get("copy_of"), str) and len(document["copy_of"]) == 64:
        source = {name: value for name, value in document.items() if name != "copy_of"}
        document["copy_of"] = canonical.sha256(dumps({**source, "features": []}))
    return document


def objects_in(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Each object inside `value` whose fields the spec names."""
    if isinstance(value, dict):
        if not place or place[-1] not in ("metadata", "digests", "spaces"):
            yield place, value
        if not place or place[-1] != "metadata":
            for name, item in value.items():
                yield from objects_in(item, (*place, name))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from objects_in(item, (*place, i))


def at(document: Any, place: tuple[Any, ...]) -> Any:
    for step in place:
        document = document[step]
    return document


def test_there_are_examples() -> None:
    assert {example["schema"] for example in VALID.values()} == set(PARSERS)
    assert {example["schema"] for example in INVALID.values()} == set(PARSERS)


@pytest.mark.parametrize("name", VALID)
def test_valid_documents_are_accepted(name: str) -> None:
    PARSERS[VALID[name]["schema"]](dumps(VALID[name]["document"]))


@pytest.mark.parametrize("name", sorted(set(DIRECT) - {n for n in DIRECT if n.startswith("store")}))
def test_valid_documents_come_back_byte_for_byte(name: str) -> None:
    data = dumps(VALID[name]["document"])
    value = PARSERS[VALID[name]["schema"]](data)
    found = value.to_json_bytes() if isinstance(value, Layout) else value.to_bytes()
    if (signature := VALID[name]["document"].get("signature")) is not None:  # beside the record, not of it
        assert signatures.apart(data, "k") == (Signature(**signature), found)
        found = signatures.signed(found, Signature(**signature))
    assert found == data


@pytest.mark.parametrize("name", INVALID)
def test_invalid_documents_are_refused(name: str) -> None:
    document = reseal(copy.deepcopy(INVALID[name]["document"]))
    with pytest.raises(FormatError) as caught:
        PARSERS[INVALID[name]["schema"]](dumps(document))
    assert caught.value.key is not None


@pytest.mark.parametrize("name", VALID)
def test_unknown_fields_are_harmless(name: str) -> None:
    schema, document = VALID[name]["schema"], copy.deepcopy(VALID[name]["document"])
    for _, item in list(objects_in(document)):
        item["x_of_a_later_minor"] = {"any": ["thing"]}
    found, expected = PARSERS[schema](dumps(reseal(document))), PARSERS[schema](dumps(VALID[name]["document"]))
    if isinstance(found, Layout):
        assert found.tensors == expected.tensors
        assert found.sha256 == canonical.sha256(dumps(document)), "the digest is of the document as stored"
    elif isinstance(found, Ownership):  # which has arrays
        assert found.to_bytes() == expected.to_bytes()
    else:
        assert found == expected


@pytest.mark.parametrize("name", VALID)
def test_every_field_is_required_and_typed(name: str) -> None:
    schema, document = VALID[name]["schema"], VALID[name]["document"]
    checked = 0
    for place, item in objects_in(document):
        for name_of_field in item:
            missing = copy.deepcopy(document)
            del at(missing, place)[name_of_field]
            wrong = copy.deepcopy(document)
            at(wrong, place)[name_of_field] = -0.5
            is_optional = (schema, name_of_field) in OPTIONAL
            for other in (wrong,) if is_optional else (missing, wrong):
                with pytest.raises(FormatError):
                    PARSERS[schema](dumps(reseal(other)))
                checked += 1
    assert checked


@pytest.mark.parametrize("name", DIRECT)
def test_a_document_of_another_name_is_foreign(name: str) -> None:
    document = {**VALID[name]["document"], "format": "other"}
    with pytest.raises(FormatError, match="foreign"):
        PARSERS[VALID[name]["schema"]](dumps(document))


@pytest.mark.parametrize("name", DIRECT)
def test_duplicate_keys_are_refused(name: str) -> None:
    data = dumps(VALID[name]["document"])
    for place, item in objects_in(VALID[name]["document"]):
        if not item:
            continue
        field, value = next(iter(item.items()))
        one = dumps({field: value})[1:-1]
        whole = dumps(item)
        assert whole in data, place
        with pytest.raises(FormatError, match="duplicate key"):
            PARSERS[VALID[name]["schema"]](data.replace(whole, b"{" + one + b"," + whole[1:], 1))


class TestCompatibility:
    document = VALID["store"]["document"]

    def parse(self, **changed: object) -> StoreDocument:
        return StoreDocument.from_bytes(dumps({**self.document, **changed}))

    def test_same_version(self) -> None:
        self.parse().check_writable()
        assert self.parse().version == (1, 0)
        assert StoreDocument.from_bytes(self.parse().to_bytes()) == self.parse()

    @pytest.mark.parametrize("version", ["1.1", "1.10", "1.999"])
    def test_newer_minor_is_read_only(self, version: str) -> None:
        document = self.parse(version=version)
        with pytest.raises(FormatError, match="newer minor") as caught:
            document.check_writable()
        assert caught.value.found == version

    @pytest.mark.parametrize("version", ["2.0", "10.0", "0.9", "999999999.0"])
    def test_another_major_is_refused(self, version: str) -> None:
        with pytest.raises(FormatError, match="another major format version") as caught:
            self.parse(version=version)
        assert caught.value.found == version

    @pytest.mark.parametrize(
        "version", ["", "1", "1.", ".1", "1.0.0", "01.0", "1.00", "1.-1", "a.b", "1.0\n", "١.٠", "9" * 5000]
    )
    def test_malformed_version(self, version: str) -> None:
        with pytest.raises(FormatError, match="'version' is wrong"):
            self.parse(version=version)

    def test_unknown_feature_is_refused(self) -> None:
        with pytest.raises(FormatError, match="features") as caught:
            self.parse(features=["teleport", "x"])
        assert caught.value.found == ["teleport", "x"]

    def test_unknown_codec_is_refused(self) -> None:
        with pytest.raises(FormatError, match="unknown codec; upgrade"):
            self.parse(codec="dcr.delta2")

    @pytest.mark.parametrize("n", [0, 1, 32, 63, 65, 100, 1 << 25, 1 << 60, (1 << 20) + 1])
    def test_chunk_elements(self, n: int) -> None:
        with pytest.raises(FormatError, match="chunk_elements"):
            self.parse(chunk_elements=n)

    @pytest.mark.parametrize("n", [2**53, 10**400])
    def test_numbers_that_parsers_do_not_agree_on(self, n: int) -> None:
        with pytest.raises(FormatError, match="chunk_elements"):
            self.parse(chunk_elements=n)

    def test_unknown_kind_of_record_names_the_record(self) -> None:
        document = {**VALID["log-record.0-begin"]["document"], "kind": "merge"}
        with pytest.raises(FormatError, match="unknown kind of log record; upgrade") as caught:
            parse_record(dumps(document), "log/main/00000000000000000007.json")
        assert caught.value.key == "log/main/00000000000000000007.json"
        assert caught.value.found == "merge"


class TestParts:
    ref = ObjectRef("a/b", "f" * 64, 3)

    def test_reference_of_data(self) -> None:
        assert ObjectRef.of("k", b"abc") == ObjectRef("k", canonical.sha256(b"abc"), 3)

    @pytest.mark.parametrize("key", ["../x", "/etc/passwd", "a//b", "a/../../b", "", "a\0", "a\\b", "a/"])
    def test_reference_out_of_the_store(self, key: str) -> None:
        with pytest.raises(FormatError, match="'key' is wrong"):
            ObjectRef.from_json(Fields({**self.ref.to_json(), "key": key}, "k"))

    @pytest.mark.parametrize("name", ["u16", "u16/", "u128/mask", "u16/masks", "u16/mask/x", "/mask", "U16/mask"])
    def test_array_names(self, name: str) -> None:
        with pytest.raises(FormatError, match="unknown array"):
            check_array(name, "k")

    def test_shard_is_a_multiple_of_the_chunk(self) -> None:
        array = Array("u8/mask", 64, 64, 128, "portable", self.ref)
        assert Array.from_json(Fields(array.to_json(), "k")) == array
        with pytest.raises(FormatError, match="no multiple"):
            Array.from_json(Fields({**array.to_json(), "shard": 96}, "k"))

    @pytest.mark.parametrize(
        "path", ["a", "a/b", "..a", "a..", "...", ".hidden", "a b", "ä/ö", "dcr", ".dcr2", "x" * 255, "é" * 127]
    )
    def test_good_paths(self, path: str) -> None:
        assert check_path(path, "k") == path

    @pytest.mark.parametrize(
        "path",
        [
            "",
            "/",
            "/a",
            "a/",
            "a//b",
            ".",
            "..",
            "../a",
            "a/..",
            "a/./b",
            "a\0b",
            "a\\b",
            "a\nb",
            "a\x7f",
            "\x1b[2J",
            ".dcr/x",
            "a/.dcr/b",
            "x" * 256,
            "é" * 128,
            "x" * 10_000,
            "a/" + "y" * 256,
        ],
        ids=lambda path: repr(path)[:20],
    )
    def test_bad_paths(self, path: str) -> None:
        with pytest.raises(FormatError, match="leaves the checkpoint") as caught:
            check_path(path, "k")
        assert len(str(caught.value)) < 400
        for file in (
            {"kind": "side", "object": self.ref.to_json()},
            {"kind": "weights", "header": self.ref.to_json(), "nbytes": 9},
        ):
            with pytest.raises(FormatError):
                CheckpointFile.from_json(Fields({"path": path, **file}, "k"))

    def test_a_manifest_names_a_file_once(self) -> None:
        document = copy.deepcopy(VALID["manifest"]["document"])
        document["files"].append(document["files"][0])
        with pytest.raises(FormatError, match="twice"):
            Manifest.from_bytes(dumps(document), "k")

    def test_time(self) -> None:
        assert Fields({"t": now()}, "k").time("t")
        assert now().endswith("Z")
        for text in ("2026-01-01T00:00:00Z", "2026-01-01 00:00:00.000Z", "2026-13-01T00:00:00.000Z", "x"):
            with pytest.raises(FormatError):
                Fields({"t": text}, "k").time("t")

    def test_errors_name_document_and_field(self) -> None:
        document = copy.deepcopy(VALID["manifest"]["document"])
        document["digests"]["u16"]["table"]["nbytes"] = "12"
        with pytest.raises(FormatError, match="'nbytes' is wrong") as caught:
            Manifest.from_bytes(dumps(document), "some/key")
        assert caught.value.key is not None
        assert caught.value.key.startswith("some/key#")
        assert caught.value.key.endswith("#table")
        assert caught.value.expected == "an integer from 0 to 9007199254740991"
        assert caught.value.found == "'12'"


COMMON = {
    "line": "main",
    "seq": 3,
    "id": "1" * 32,
    "prev": "2" * 64,
    "created_at": "2026-01-01T00:00:00.000Z",
    "txid": "3" * 32,
}
RECORDS: list[Record] = [
    Begin(**COMMON, owner="me", version=0, base=None, layout=None, writers=("w0",)),  # type: ignore[arg-type]
    Begin(
        **COMMON,  # type: ignore[arg-type]
        owner="é",
        version=7,
        base=Base("main@6", "4" * 64),
        layout="5" * 64,
        writers=("w0", "w1"),
        message="",
        metadata={"step": 1, "nested": [{"": None}], "é": 1.5},
    ),
    Resume(**COMMON, attempt=1, owner="you"),  # type: ignore[arg-type]
    Abort(**COMMON, reason=""),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.kind)
def test_records_round_trip(record: Record) -> None:
    assert parse_record(record.to_bytes(), "k") == record


def test_record_kinds() -> None:
    assert {kind.kind for kind in (Begin, Resume, Commit, Abort)} == {"begin", "resume", "commit", "abort"}


def test_damaged_documents_never_raise_anything_else() -> None:
    """Whatever single byte is changed: a DcrError or a document, nothing else."""
    for name, example in DIRECT.items():
        data = dumps(example["document"])
        step = max(1, len(data) // 60)
        for i in range(0, len(data), step):
            for byte in (0, ord('"'), ord("}"), ord("9"), 0xFF):
                damaged = data[:i] + bytes([byte]) + data[i + 1 :]
                try:
                    PARSERS[example["schema"]](damaged)
                except DcrError as error:
                    assert error.kind == "format", (name, i, byte, error)  # noqa: PT017
