"""``dcr group`` and ``dcr status`` as people and scripts run them, on a store in a directory with real members."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from states import write_hf

import dcr_store
from dcr_store.cli.main import main
from dcr_store.receive.member import Member


class Shell:
    """Runs command lines in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def text(self, *line: object) -> str:
        code = main([str(word) for word in line])
        out, err = self._capsys.readouterr()
        assert (code, err) == (0, ""), err
        return out

    def document(self, *line: object) -> Any:
        return json.loads(self.text(*line, "--json"))

    def both(self) -> tuple[str, str]:
        """Return what was written to both since the last look."""
        return self._capsys.readouterr()

    def refused(self, *line: object, code: int = 1) -> str:
        found = main([str(word) for word in line])
        out, err = self._capsys.readouterr()
        assert (found, out) == (code, "")
        assert err.startswith("dcr: ")
        assert err.count("\n") == 1
        return err


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store with two versions."""
    with dcr_store.create(tmp_path / "store", chunk_elements=64) as store:
        publish(store)
        publish(store)
    return tmp_path / "store"


def publish(store: dcr_store.Store) -> None:
    with store.begin() as transaction:
        transaction.write("w", np.full(100, len(store.log()), np.int32))


def started(place: Path, name: str) -> Member:
    member = Member(dcr_store.open(place)._catalog, "eu", name)
    member.join()
    return member


def prepare(member: Member) -> None:
    wanted = member.step().prepare
    assert wanted is not None
    member.prepared(wanted, None, wanted.root)
    member.try_promote()


def test_the_life_of_a_group(shell: Shell, place: Path) -> None:
    found = shell.document("group", place, "create", "eu", "r2", "r1", "--drop-after", 60)
    assert found == {
        "group": "eu",
        "line": "main",
        "head": "main@1",
        "active": None,
        "root": None,
        "proposed": None,
        "lag": 2,
        "waits_for": "r1 to come, r2 to come",
        "admission": "expected",
        "proposing": "newest",
        "drop_after_s": 60,
        "members": [
            {"name": name, "incarnation": None, "version": None, "doing": "has not come yet"} for name in ("r1", "r2")
        ],
    }
    r1, r2 = started(place, "r1"), started(place, "r2")
    assert shell.document("group", place, "propose", "eu", "main@0")["proposed"] == "main@0"
    prepare(r2)
    found = shell.document("group", place, "show", "eu")
    assert [member["doing"] for member in found["members"]] == ["prepares main@0", "has prepared main@0"]
    assert found["waits_for"] == "r1 to prepare main@0"
    assert found["members"][0]["incarnation"] == r1.incarnation
    prepare(r1)
    active = r1.active
    assert active is not None
    r1.applied(active, active.root)
    found = shell.document("group", place, "show", "eu")
    assert (found["active"], found["root"], found["lag"]) == ("main@0", active.root, 1)
    doing = [(member["version"], member["doing"]) for member in found["members"]]
    assert doing == [("main@0", "serves main@0"), (None, "applies main@0")]
    shell.text("group", place, "propose", "eu")
    assert "is no such proposal" in shell.refused("group", place, "withdraw", "eu", "main@0")
    assert shell.document("group", place, "withdraw", "eu", "main@1", "--reason", "bad")["proposed"] is None
    found = shell.document("group", place, "drop", "eu", "r2", "--reason", "its rack\nburns")
    assert found["members"][1]["doing"] == "was dropped: its rack\nburns"
    assert "was dropped: its rack\\nburns" in shell.text("group", place, "show", "eu")
    assert shell.document("group", place, "admit", "eu", "r3")["members"][2]["doing"] == "may come"
    started(place, "r2")
    found = shell.document("group", place, "show", "eu")
    assert found["members"][1]["doing"] == "applies main@0", "what became of its earlier start is past"


def test_status(shell: Shell, place: Path) -> None:
    assert shell.text("status", place).split()[:2] == ["line", "head"]
    shell.text("group", place, "create", "eu", "r1")
    shell.text("group", place, "create", "us", "--line", "exp", "--anyone", "--manual")
    prepare(started(place, "r1"))
    store = dcr_store.open(place)
    pending = store.begin(owner="run-17")
    found = shell.document("status", place)
    assert found["lines"] == [
        {
            "line": "main",
            "head": "main@1",
            "root": store.log()[1].root,
            "created_at": store.log()[1].created_at,
            "open": "main@2",
            "owner": "run-17",
        }
    ]
    assert [(group["group"], group["active"], group["lag"]) for group in found["groups"]] == [
        ("eu", "main@1", 0),
        ("us", None, 0),
    ]
    assert (found["groups"][1]["admission"], found["groups"][1]["proposing"]) == ("anyone", "manual")
    told = shell.text("status", place)
    for words in ("main@2 by run-17", "applies main@1", "a first member to come", "the next version of main"):
        assert words in told
    pending.abort()


def test_an_empty_store_has_nothing_to_show(shell: Shell, tmp_path: Path) -> None:
    dcr_store.create(tmp_path / "store")
    assert shell.text("status", tmp_path / "store") == "nothing has been published yet, and there are no groups\n"
    shell.text("group", tmp_path / "store", "create", "eu", "r1")
    assert shell.document("status", tmp_path / "store")["groups"][0]["head"] is None
    assert "no version on line 'main'" in shell.refused("group", tmp_path / "store", "propose", "eu")


def test_a_publisher_waits_for_groups_and_stays_near_them(shell: Shell, place: Path, tmp_path: Path) -> None:
    checkpoint = write_hf(tmp_path / "checkpoint", {"w": np.arange(100, dtype=np.int32)})
    shell.text("group", place, "create", "eu", "r1")
    assert "there is no group 'us'" in shell.refused("publish", place, checkpoint, "--wait-for", "us")
    told = shell.refused("publish", place, checkpoint, "--max-ahead", "2", "--ahead-of", "eu")
    assert "would be more than 2 ahead" in told
    assert told.endswith("; publish again when they have caught up\n")
    assert "would be more than 1 ahead" in shell.refused(
        "publish", place, checkpoint, "--max-ahead", 1, "--wait-for", "eu"
    )
    assert len(dcr_store.open(place).log()) == 2, "nothing was begun"
    # Committed, and told, though the group is late.
    assert main(["publish", str(place), str(checkpoint), "--wait-for", "eu", "--timeout", "0.1"]) == 1
    out, err = shell.both()
    assert "main@2" in out
    assert "main@2 is committed, but not promoted everywhere after 0.1 s: group eu is at no version" in err
    assert err.endswith(f"; dcr status {place} shows who it waits for\n")
    assert "commit again" not in err
    prepare(started(place, "r1"))
    version = shell.document("publish", place, checkpoint, "--max-ahead", "1", "--ahead-of", "eu")["version"]
    assert version == "main@3"
    follower = threading.Thread(target=lambda: follow(place, tmp_path / "node"))
    follower.start()
    try:
        version = shell.document("publish", place, checkpoint, "--wait-for", "eu", "--timeout", "60")["version"]
        assert dcr_store.open(place).group("eu").status().active == version == "main@4"
    finally:
        follower.join()


def follow(place: Path, directory: Path) -> None:
    with dcr_store.open(place) as store, store.receiver(directory, group="eu", name="r1") as receiver:
        receiver.follow(until="main@4")


def test_refusals(shell: Shell, place: Path) -> None:
    shell.text("group", place, "create", "eu", "r1")
    for line, says in (
        (
            ("create", "eu", "r1"),
            "exists already; choose another name, or let further receivers into it: dcr group STORE admit",
        ),
        (("show", "us"), "there is no group 'us'; there are: eu"),
        (("propose", "eu", "main@7"), "no such version; the head of main is main@1"),
        (("propose", "eu", "x"), "no version on line 'x'"),
        (("drop", "eu", "r2"), "no such member to drop"),
        (("withdraw", "eu"), "no such proposal"),
    ):
        assert says in shell.refused("group", place, *line), line
    for line, says in (
        (("create", "us", "--drop-after", "0"), "expected a number of 1 or more"),
        (("create", "a/b"), "cannot name a group"),
        (("create", "us", "a.b"), "cannot name a member"),
        (("create", "us", "--line", "a/b"), "cannot name a line"),
        (("elect", "eu"), "ACT"),
        ((), "ACT"),
    ):
        assert says in shell.refused("group", place, *line, code=2), line


def test_as_a_process(place: Path) -> None:
    command = [sys.executable, "-m", "dcr_store", "group", str(place), "create", "eu", "r1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["waits_for"] == "r1 to come"
