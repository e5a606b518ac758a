"""What is remembered: asked for once, compared with what it would be now."""

from __future__ import annotations

import pytest
from sim import memory
from sim.memory import Memory


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "all", [])


def test_the_same_arguments_are_asked_for_once() -> None:
    asked = []
    parse = Memory(lambda data, key: asked.append(data) or [data, key])
    assert parse(b"a", key="k") is parse(b"a", key="k")
    assert parse(b"b", "k") == [b"b", "k"]
    assert asked == [b"a", b"b"]


def test_what_is_raised_is_raised_again() -> None:
    parse = Memory(lambda data: 1 // data)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            parse(0)


@pytest.mark.parametrize("change", [lambda value: value["a"].append(1), lambda value: value.update(b=1)])
def test_a_change_of_what_is_remembered_is_found(change) -> None:
    def parse(data: bytes) -> dict[str, list[int]]:
        return {"a": [*data]}

    remembered = Memory(parse)
    value = remembered(b"x")
    assert memory.changed() == []
    change(value)
    assert len(memory.changed()) == 1
