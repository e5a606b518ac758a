"""schema/ against its own examples: valid ones pass, invalid ones fail where and as they say, nothing else passes."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
SCHEMAS = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted((ROOT / "schema").glob("*.json"))}
DOCUMENTS = sorted(set(SCHEMAS) - {"defs"})
VALID = {path.stem: json.loads(path.read_text("utf-8")) for path in (ROOT / "schema/examples/valid").glob("*.json")}
INVALID = {path.stem: json.loads(path.read_text("utf-8")) for path in (ROOT / "schema/examples/invalid").glob("*.json")}

# Objects whose field names are data, by the last two steps of their place.
MAPS = {"metadata", "digests"}
# Fields that are there only where there is something to say.
OPTIONAL = {
    "log-checkpoint": {"source", "history"},
    "log-hint": {"tail"},
    "log-record": {"signature"},
    "group-record": {"signature"},
    "store": {"copy_of"},
}
WRONG = {"type", "enum", "const", "pattern", "minimum"}


def validator(schema: str) -> Draft202012Validator:
    registry: Registry[Any] = Registry().with_resources(
        (document["$id"], Resource.from_contents(document)) for document in SCHEMAS.values()
    )
    return Draft202012Validator(SCHEMAS[schema], registry=registry)


def faults(schema: str, document: object) -> set[tuple[str, str]]:
    """Each fault as (JSON Pointer, keyword)."""
    return {
        ("".join(f"/{step}" for step in error.absolute_path), str(error.validator))
        for error in validator(schema).iter_errors(document)
    }


def canonical(document: object) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sha256(document: object) -> str:
    return hashlib.sha256(canonical(document)).hexdigest()


def objects(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Each object inside `value` whose fields the spec names."""
    if isinstance(value, dict):
        if not (place and place[-1] in MAPS):
            yield place, value
        if not (place and place[-1] == "metadata"):
            for name, item in value.items():
                yield from objects(item, (*place, name))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from objects(item, (*place, i))


def at(document: Any, place: tuple[Any, ...]) -> Any:
    for step in place:
        document = document[step]
    return document


def test_every_document_has_a_schema_and_both_kinds_of_examples() -> None:
    of_lines = ["journal", "layout", "log-checkpoint", "log-hint", "log-record", "manifest"]
    of_groups = ["group-ack", "group-checkpoint", "group-record"]
    others = ["ownership", "pin", "store", "tag", "verify-report"]
    assert ["absent", "affine-map", "detached", "discovery", *of_groups, *of_lines, *others] == DOCUMENTS
    for examples in (VALID, INVALID):
        assert {example["schema"] for example in examples.values()} == set(DOCUMENTS)
        for name, example in examples.items():
            assert name.split(".")[0] == example["schema"]
            assert example["about"].endswith(".")
    kinds = {
        schema: {VALID[name]["document"]["kind"] for name in VALID if name.startswith(f"{schema}.")}
        for schema in ("log-record", "group-record", "group-ack")
    }
    assert kinds == {
        "log-record": {
            "begin",
            "resume",
            "commit",
            "abort",
            "intent",
            "anchor",
            "fold",
            "expire",
            "gc",
            "fork",
            "origin",
        },
        "group-record": {"create", "admit", "drop", "propose", "withdraw", "promote"},
        "group-ack": {"prepared", "applied"},
    }


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_schema_is_a_schema(name: str) -> None:
    Draft202012Validator.check_schema(SCHEMAS[name])
    assert SCHEMAS[name]["$id"].endswith(f"/v1/{name}.json")


@pytest.mark.parametrize("name", sorted(VALID))
def test_valid(name: str) -> None:
    assert faults(VALID[name]["schema"], VALID[name]["document"]) == set()


@pytest.mark.parametrize("name", sorted(INVALID))
def test_invalid_has_exactly_the_fault_that_it_names(name: str) -> None:
    example = INVALID[name]
    assert faults(example["schema"], example["document"]) == {(example["error"]["at"], example["error"]["keyword"])}


@pytest.mark.parametrize("name", sorted(VALID))
def test_unknown_fields_are_allowed_everywhere(name: str) -> None:
    document = copy.deepcopy(VALID[name]["document"])
    for _, item in list(objects(document)):
        item["x_of_a_later_minor"] = {"any": ["thing"]}
    assert faults(VALID[name]["schema"], document) == set()


@pytest.mark.parametrize("name", sorted(VALID))
def test_every_field_is_required(name: str) -> None:
    schema, document = VALID[name]["schema"], VALID[name]["document"]
    for place, item in objects(document):
        for field in item.keys() - OPTIONAL.get(schema, set()):
            other = copy.deepcopy(document)
            del at(other, place)[field]
            pointer = "".join(f"/{step}" for step in place)
            assert (pointer, "required") in faults(schema, other), (place, field)


@pytest.mark.parametrize("name", sorted(VALID))
def test_every_field_has_a_type(name: str) -> None:
    """Something of a type that fits no field at all is refused at every place."""
    schema, document = VALID[name]["schema"], VALID[name]["document"]
    for place, item in objects(document):
        for field in item:
            other = copy.deepcopy(document)
            at(other, place)[field] = -0.5
            pointer = "".join(f"/{step}" for step in (*place, field))
            assert {keyword for found, keyword in faults(schema, other) if found == pointer} & WRONG, (place, field)


@pytest.mark.parametrize(("schema", "n"), [("log-record", 20), ("group-record", 11)])
def test_record_examples_are_one_log(schema: str, n: int) -> None:
    found = [VALID[name]["document"] for name in VALID if name.startswith(f"{schema}.")]
    mine = [record for record in found if record["kind"] != "origin"]  # of another line
    records = sorted(mine, key=lambda record: record["seq"])
    assert len(records) == n
    before = VALID["store"]["document"]
    for seq, record in enumerate(records):
        assert record["seq"] == seq
        assert record["prev"] == sha256(before)
        before = record


def test_references_between_examples_hold() -> None:
    documents = {sha256(example["document"]): example["document"] for example in VALID.values()}
    by_name = {name: example["document"] for name, example in VALID.items()}
    layout = sha256(by_name["layout"])
    found = 0
    for document in documents.values():
        for _, item in objects(document):
            if item.keys() >= {"key", "sha256", "nbytes"} and item["sha256"] in documents:
                assert item["nbytes"] == len(canonical(documents[item["sha256"]]))
                found += 1
            if "body" in item:
                assert item["sha256"] == sha256(item["body"])
    assert found >= 5
    assert by_name["log-record.1-commit"]["manifest"]["sha256"] == sha256(by_name["manifest"])
    assert by_name["log-record.4-commit"]["manifest"]["sha256"] == sha256(by_name["manifest.delta"])
    assert by_name["manifest"]["seals"][0]["sha256"] == sha256(by_name["journal.seal"])
    assert by_name["manifest"]["layout"] == by_name["log-record.1-commit"]["layout"] == layout
    assert by_name["journal.seal"]["prev"] == sha256(by_name["journal"])
    rows = by_name["log-checkpoint"]["body"]["rows"]
    assert [row["record_sha256"] for row in rows] == [
        sha256(by_name["log-record.1-commit"]),
        sha256(by_name["log-record.4-commit"]),
    ]


@pytest.mark.parametrize("name", ["log-record.19-gc-signed", "group-record.10-admit-signed"])
def test_signed_examples_are_signed(name: str) -> None:
    """By the words of the spec alone: the bytes without the signature, bound to the store."""
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    document = VALID[name]["document"]
    signature = document["signature"]
    unsigned = {field: value for field, value in document.items() if field != "signature"}
    message = b"dcr-record-1" + bytes.fromhex(sha256(VALID["store"]["document"])) + canonical(unsigned)
    key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature["public_key"]))
    key.verify(bytes.fromhex(signature["value"]), message)
    with pytest.raises(Exception, match=r"^$"):  # what cryptography says of a wrong one
        key.verify(bytes.fromhex(signature["value"]), message + b" ")
    stored = canonical(document)
    part = b',"signature":' + canonical(signature)
    assert stored.count(part) == 1
    assert stored.replace(part, b"") == canonical(unsigned)


def test_group_examples_belong_together() -> None:
    by_name = {name: example["document"] for name, example in VALID.items()}
    for record, commit in (("03-propose", "1-commit"), ("05-propose", "4-commit")):
        assert by_name[f"group-record.{record}"]["new"]["root"] == by_name[f"log-record.{commit}"]["root"]
    acks = [ack["sha256"] for ack in by_name["group-record.04-promote"]["acks"]]
    assert acks[0] == sha256(by_name["group-ack.prepared"])
    body = by_name["group-checkpoint"]["body"]
    assert body["last_sha256"] == sha256(by_name["group-record.09-admit"])
    assert (body["length"], body["store_sha256"]) == (10, sha256(by_name["store"]))
    assert by_name["store.copy"]["copy_of"] == sha256(by_name["store"])


def test_documents_of_the_spec_validate() -> None:
    """The JSON that the spec shows whole."""
    text = (ROOT / "docs/spec/v1.md").read_text("utf-8")
    shown = [json.loads(block.split("```")[0]) for block in text.split("```json")[1:]]
    names = {VALID[name]["document"].get("format"): VALID[name]["schema"] for name in VALID}
    assert [document["format"] for document in shown] == ["dcr-store", "dcr-layout"]
    for document in shown:
        assert faults(names[document["format"]], document) == set()
