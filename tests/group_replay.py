"""What a group's raw records say, by rules written anew: shares no code with the package's fold."""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcr_store.ports import ObjectStore

Proposal = tuple[str, str, int]
"""Version, root, and the number of the record that proposed it."""


@dataclass
class Replayed:
    """What came out: what was promoted, in order, and who the members are."""

    promoted: list[Proposal] = field(default_factory=list)
    members: dict[str, str] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)


def replay(objects: ObjectStore, group: str, prepared: Container[tuple[str, int]]) -> Replayed:
    """Replay a group's records and assert that each promotion was of what all members had prepared.

    Parameters
    ----------
    prepared : container of (incarnation, proposal)
        Who has really prepared what.
    """
    result = Replayed()
    awaited: set[str] = set()
    gone: set[str] = set()
    proposed: Proposal | None = None
    active: dict[str, Any] | None = None
    keys = sorted(key for key in objects.list(f"groups/{group}/log/") if not key.endswith("latest.json"))
    for seq, key in enumerate(keys):
        record = json.loads(objects.get(key))
        kind, name = record["kind"], record.get("name")
        assert record["seq"] == seq
        result.kinds.append(kind)
        if kind == "create":
            awaited = set(record["expected"])
        elif kind == "admit" and record["incarnation"]:
            assert record["incarnation"] not in gone, "an incarnation that was dropped or replaced came back"
            gone.add(result.members.get(name, ""))
            result.members[name] = record["incarnation"]
            awaited.discard(name)
        elif kind == "drop":
            gone.add(result.members.pop(name, ""))
            awaited.discard(name)
        elif kind == "propose":
            assert proposed is None
            proposed = (record["new"]["version"], record["new"]["root"], seq)
        elif kind == "withdraw":
            proposed = None
        elif kind == "promote":
            assert proposed is not None
            assert not awaited, "promoted before all expected members had come"
            assert result.members, "promoted for nobody"
            assert record["new"] == {"version": proposed[0], "root": proposed[1]}
            assert record["old"] == active
            for name, incarnation in result.members.items():
                assert (incarnation, proposed[2]) in prepared, f"{name} has not prepared {proposed}"
            result.promoted.append(proposed)
            active, proposed = record["new"], None
    return result
