"""The filter language against an evaluator of its own, over random expressions, and what it refuses."""

from __future__ import annotations

import json
import secrets
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcr_store
from dcr_store.errors import InvalidInputError
from dcr_store.history.where import parse
from dcr_store.versions.info import VersionInfo

MISSING = object()
scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, -1.5, 2.0, 1e300]) | st.sampled_from(
    ["", "a", "b", "it's", 'say "x"', "back\\slash"]
)  # fmt: skip
NAMES = (
    "step",
    "reward",
    "eval/loss",
    "a.b",
    "a.c.d",
    "gone",
    "metadata.step",
    "version",
    "changed",
    "rate",
    "message",
)


def info(metadata: dict[str, Any], number: int = 3, message: str | None = "m") -> VersionInfo:
    return VersionInfo(f"main@{number}", None, "0" * 64, "2026-12-01T08:00:00.000Z", 1, 4, 10, metadata, message)


def written(value: object) -> str:
    """Return a literal."""
    if isinstance(value, str):
        quote = "'" if len(value) % 2 else '"'
        return quote + value.replace("\\", "\\\\").replace(quote, f"\\{quote}") + quote
    return json.dumps(value)


comparisons = st.tuples(
    st.sampled_from(["==", "!=", "<", "<=", ">", ">="]),
    st.sampled_from(NAMES).map(lambda name: ("name", name)) | scalars.map(lambda value: ("value", value)),
    st.sampled_from(NAMES).map(lambda name: ("name", name)) | scalars.map(lambda value: ("value", value)),
)
trees = st.recursive(
    comparisons,
    lambda inner: st.tuples(st.just("not"), inner)
    | st.tuples(st.sampled_from(["and", "or"]), inner, inner),
    max_leaves=8,
)  # fmt: skip
metadatas = st.fixed_dictionaries(
    {},
    optional={
        "step": scalars, "reward": scalars, "eval/loss": scalars, "version": scalars,
        "a.b": scalars,
        "a": st.fixed_dictionaries({}, optional={"b": scalars, "c": st.fixed_dictionaries({"d": scalars})}),
    },
)  # fmt: skip
_RANK = {"or": 0, "and": 1, "not": 2}


def text_of(tree: Any, data: st.DataObject, outer: int = 0) -> str:
    """Return a tree as text, with the parentheses it needs and some it does not."""
    kind, *parts = tree
    if kind in _RANK:
        inner = [text_of(part, data, _RANK[kind]) for part in parts]
        text = f"not {inner[0]}" if kind == "not" else f" {kind} ".join(inner)
        needs = _RANK[kind] < outer
    else:
        space = data.draw(st.sampled_from(["", " ", "\n "]))
        text = f"{space}{kind}{space}".join(part if how == "name" else written(part) for how, part in parts)
        needs = False
    return f"({text})" if needs or data.draw(st.integers(0, 4)) == 0 else text


def looked_up(name: str, found: VersionInfo) -> object:
    if name in ("version", "changed", "rate", "message"):
        facts = {"version": int(found.version[5:]), "changed": found.changed, "rate": found.changed / found.elements}
        return MISSING if name == "message" and found.message is None else {**facts, "message": found.message}[name]
    if name == "a.b":
        return found.metadata.get("a.b", found.metadata.get("a", {}).get("b", MISSING))
    if name == "a.c.d":
        return found.metadata.get("a", {}).get("c", {}).get("d", MISSING)
    return found.metadata.get(name.removeprefix("metadata."), MISSING)


def holds(tree: Any, found: VersionInfo) -> bool:
    kind, *parts = tree
    if kind == "not":
        return not holds(parts[0], found)
    if kind in ("and", "or"):
        return {"and": all, "or": any}[kind](holds(part, found) for part in parts)
    a, b = (looked_up(part, found) if how == "name" else part for how, part in parts)
    if MISSING in (a, b) or a is MISSING or b is MISSING:
        return False
    groups = [{bool: "b", int: "n", float: "n", str: "s", type(None): "0"}[type(side)] for side in (a, b)]
    if kind == "==":
        return groups[0] == groups[1] and a == b
    if kind == "!=":
        return groups[0] != groups[1] or a != b
    if groups[0] != groups[1] or groups[0] not in "ns":
        return False
    return {"<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[kind]


@settings(max_examples=300, deadline=None)
@given(trees, metadatas, st.integers(0, 4), st.sampled_from([None, "a"]), st.data())
def test_against_an_evaluator_of_its_own(
    tree: Any, metadata: dict[str, Any], number: int, message: str | None, data: st.DataObject
) -> None:
    found = info(metadata, number, message)
    assert parse(text_of(tree, data))(found) == holds(tree, found)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab .()=!<>'\"\\019-+e\n\0é", max_size=30))
def test_any_text_is_a_filter_or_refused(text: str) -> None:
    try:
        test = parse(text)
    except InvalidInputError:
        return
    assert test(info({"a": 1, "b": "x"})) in (True, False)


@pytest.mark.parametrize(
    ("text", "metadata", "expected"),
    [
        ("step >= 100", {"step": 100}, True),
        ("step>=100", {"step": 99}, False),
        ("100 <= step", {"step": 100}, True),
        ("a==1 or b==1 and c==1", {"a": 1}, True),
        ("(a==1 or b==1) and c==1", {"a": 1}, False),
        ("not a==1 and b==1", {"a": 1, "b": 1}, False),
        ("not (a==1 and b==1)", {"a": 1, "b": 2}, True),
        ("flag == true", {"flag": True}, True),
        ("flag == 1", {"flag": True}, False),
        ("flag != 1", {"flag": True}, True),
        ("step == '7'", {"step": 7}, False),
        ("gone != 1", {}, False),
        ("not gone == 1", {}, True),
        ("lr < 1e-3", {"lr": 5e-4}, True),
        ("x == -.5", {"x": -0.5}, True),
        ("x == 12345678901234567891", {"x": 12345678901234567891}, True),
        ("x == 12345678901234567891", {"x": 12345678901234567890}, False),
        ("eval.loss < 1", {"eval": {"loss": 0.5}}, True),
        ("eval.loss < 1", {"eval.loss": 0.5}, True),
        ("a.b.c == 1", {"a.b": {"c": 1}, "a": {"b": {"c": 2}}}, True),
        ("a.b.c == 2", {"a.b": {"d": 1}, "a": {"b": {"c": 2}}}, True),
        ("tags == 'x'", {"tags": ["x"]}, False),
        ("tags != 'x'", {"tags": ["x"]}, True),
        ("version == 3 and metadata.version == 8", {"version": 8}, True),
        ("created_at >= '2026-12-01' and created_at < '2026-12-02'", {}, True),
        ("kept == true and base == null and nbytes == 10 and elements == 4 and rate == 0.25", {}, True),
        ("note == 'it\\'s'", {"note": "it's"}, True),
    ],
)
def test_examples(text: str, metadata: dict[str, Any], expected: bool) -> None:
    assert parse(text)(info(metadata)) is expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "character 1 (expected a name or a value, found the end)"),
        ("step", "a comparison"),
        ("step >= ", "found the end"),
        ("step = 1", 'character 6 (expected == to compare, found "= 1")'),
        ("1 < step < 3", "one comparison at a time; use and"),
        ("(step > 1", "a closing parenthesis"),
        ("step > 1)", "and, or, or the end"),
        ("step > 1 step", "character 10 (expected and, or, or the end"),
        ("step > and", "a name or a value"),
        ("'a", "character 1"),
        ("__import__('os')", "a comparison"),
        ("step.real.__class__ == 1 and f(1)", "a comparison"),
        ("x == 1e999", "a number that is finite"),
        ("x == " + "9" * 5000, "a number that is finite"),
        ("x == 1.2.3", "character 6"),
        ("x == 0x10", "character 6"),
        ("(" * 5000 + "x == 1" + ")" * 4000, "at most 100 levels"),
        ("not " * 101 + "x == 1", "at most 100 levels"),
        ("x == 1 or " * 2000 + "x == 1", "is no filter"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rewrd > 0.4", ["no version of main has 'rewrd', which the filter asks for; did you mean reward?"]),
        ("not rewrd > 0.4 or metadata.rewrd == 1", ["no version of main has 'rewrd', which"]),
        ("chnged > 1", ["'chnged', which the filter asks for; did you mean changed?"]),
        ("loss < 1", ["'loss', which the filter asks for; did you mean eval.loss?"]),
        ("tag == best and zzz == 1", ["has 'tag', which", "'best', which the filter asks for; there are", "has 'zzz'"]),
        ("metadata.changed > 1", ["has 'changed', which the filter asks for; did you mean changed?"]),
        ("reward > 9 and early == 1 and eval.loss > 9 and version > 9 and message == 'x' and kept == true", []),
    ],
)
def test_names_that_no_version_has(text: str, says: list[str]) -> None:
    versions = [info({"reward": 0.5}, message=None), info({"early": 1, "eval": {"loss": 2}}, 2, None)]
    found = parse(text).doubts("main", iter(versions))
    assert len(found) == len(says)
    assert all(part in doubt for part, doubt in zip(says, found, strict=True))
    assert parse(text).doubts("main", iter([])) == []


def test_no_more_versions_are_looked_at_for_a_name_than_it_takes() -> None:
    versions = iter([info({"a": 1}), info({"b": 1}), info({"c": 1})])
    assert parse("a == 1 or b == 1").doubts("main", versions) == []
    assert next(versions).metadata == {"c": 1}


def test_of_a_store() -> None:
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=64) as store:
        assert store.log(where="step > 1", limit=1) == []
        for step in range(6):
            with store.begin(metadata={"step": step * 10}) as transaction:
                transaction.write("a", np.array([step]))
        assert [found.version for found in store.log(where="step >= 20 and version != 4")] == [
            "main@2",
            "main@3",
            "main@5",
        ]
        assert [found.version for found in store.log(where="step >= 20 and version != 4", limit=2)] == [
            "main@3",
            "main@5",
        ]
        assert [found.version for found in store.log(limit=1)] == ["main@5"]
        store.expire(keep_last=2)
        assert [found.version for found in store.log(where="kept == false", limit=2)] == ["main@2", "main@3"]
        for limit in (0, -1, True, "1"):
            with pytest.raises(InvalidInputError, match="limit"):
                store.log(limit=limit)  # type: ignore[arg-type]
        with pytest.warns(UserWarning, match="no version of main has 'stp', .* did you mean step") as caught:
            assert store.log(where="stp >= 20 or version == 5", limit=1)[0].version == "main@5"
        assert [warning.filename for warning in caught] == [__file__]
        with pytest.raises(InvalidInputError, match="is no filter"):
            store.log(where=7)  # type: ignore[arg-type]
