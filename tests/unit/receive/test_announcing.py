"""Commands and engines are told of each version once they can be; a failing one is told again and holds nobody up."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from engines import SglangStandIn
from states import series, write_hf

import dcr_store
from dcr_store.errors import DcrError, InvalidInputError, StorageError
from dcr_store.receive.announcing import Announcer, Command, announcer
from dcr_store.receive.engines import Arrival
from dcr_store.receive.results import Active, Applied, Prepared

ARRIVAL = Arrival("main@3", "ab" * 32, "/models/main@3 it's", "main@2")


class TestCommand:
    def test_is_told_by_its_environment(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        Command(f'printf "%s\\n" "$DCR_VERSION" "$DCR_ROOT" "$DCR_DIRECTORY" "$DCR_PREVIOUS" "$HOME" > {out}').take(
            ARRIVAL
        )
        expected = [ARRIVAL.version, ARRIVAL.root, ARRIVAL.directory, ARRIVAL.previous, os.environ.get("HOME", "")]
        assert out.read_text().split("\n")[:5] == expected

    def test_nothing_before(self, tmp_path: Path) -> None:
        first = Arrival("main@0", "cd" * 32, "/models", None)
        Command(f'test -z "$DCR_PREVIOUS" && test "${{DCR_PREVIOUS-unset}}" != unset && touch {tmp_path}/yes').take(
            first
        )
        assert (tmp_path / "yes").exists()

    def test_that_fails(self) -> None:
        with pytest.raises(StorageError, match=r"main@3.*exit status 3: so sorry") as caught:
            Command("echo so sorry >&2; exit 3").take(ARRIVAL)
        assert caught.value.key == "echo so sorry >&2; exit 3"

    def test_that_fails_is_told_by_its_last_line(self) -> None:
        with pytest.raises(StorageError) as caught:
            Command("echo loading; printf 'no\\n  engine answers  \\n\\n'; exit 4").take(ARRIVAL)
        assert caught.value.found == "exit status 4: engine answers"
        with pytest.raises(StorageError) as caught:
            Command("exit 5").take(ARRIVAL)
        assert caught.value.found == "exit status 5, and nothing was said"

    def test_that_does_not_exist(self) -> None:
        with pytest.raises(StorageError, match="exit status 127"):
            Command("/no/such/command").take(ARRIVAL)

    def test_that_writes_much_tells_the_end(self) -> None:
        with pytest.raises(StorageError, match="the end") as caught:
            Command("seq 100000; echo the end; exit 1").take(ARRIVAL)
        assert len(str(caught.value)) < 2000

    def test_that_does_not_end_is_killed_with_its_children(self, tmp_path: Path) -> None:
        began = time.monotonic()
        with pytest.raises(StorageError, match=r"no end within 0.3 s"):
            Command(f"sleep 60 & echo $! > {tmp_path}/pid; wait", timeout_s=0.3).take(ARRIVAL)
        assert time.monotonic() - began < 10
        pid = int((tmp_path / "pid").read_text())
        deadline = time.monotonic() + 10
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[-1]:
            assert time.monotonic() < deadline, "its child lives"
            time.sleep(0.01)

    def test_that_leaves_something_running_is_not_waited_for(self, tmp_path: Path) -> None:
        Command(f"sleep 600 & echo $! > {tmp_path}/pid; echo started").take(ARRIVAL)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # so it was still there

    def test_has_no_input(self) -> None:
        Command("! read line").take(ARRIVAL)

    @pytest.mark.parametrize("text", ["", "  ", "a\0b"])
    def test_that_is_none(self, text: str) -> None:
        with pytest.raises(InvalidInputError, match="no command"):
            Command(text)


class Noted:
    """A taker that fails as often as it is told to."""

    def __init__(self, name: str, failures: int = 0) -> None:
        self.name, self.failures = name, failures
        self.taken: list[Arrival] = []
        self.served = 0

    def take(self, arrival: Arrival) -> None:
        self.taken.append(arrival)
        if self.failures:
            self.failures -= 1
            raise StorageError(f"{self.name} is busy")

    def serve(self) -> None:
        self.served += 1
        if self.failures:
            self.failures -= 1
            raise StorageError(f"{self.name} is busy")


def applied(number: int) -> Applied:
    return Applied(f"main@{number}", f"{number:064x}", f"main@{number - 1}", 0, 0, 0, 0, 0.0)


def prepared(number: int) -> Prepared:
    return Prepared(f"main@{number}", f"{number:064x}", f"main@{number - 1}", "cd" * 32, 1, 1, 1)


class TestAnnouncer:
    def test_only_who_failed_is_told_again(self) -> None:
        good, bad, late = Noted("good"), Noted("bad", 2), Noted("late", 1)
        reported: list[DcrError] = []
        told = Announcer(lambda: Path("/models"), [], [good, bad, late], reported.append)
        with pytest.raises(StorageError, match="late is busy"):
            told.on_applied(applied(1))
        assert [str(error) for error in reported] == ["bad is busy"]
        with pytest.raises(StorageError, match="bad is busy"):
            told.on_applied(applied(1))
        told.on_applied(applied(1))
        assert (len(good.taken), len(bad.taken), len(late.taken)) == (1, 3, 2)
        assert good.taken[0] == Arrival("main@1", f"{1:064x}", "/models", "main@0")

    def test_only_who_did_not_go_on_is_told_again(self) -> None:
        good, bad = Noted("good"), Noted("bad")
        told = Announcer(lambda: Path("/models"), [], [good, bad], lambda error: None)
        told.on_applied(applied(1))
        bad.failures = 1
        active = Active("main@1", f"{1:064x}")
        with pytest.raises(StorageError, match="bad is busy"):
            told.on_serving(active)
        told.on_serving(active)
        assert (good.served, bad.served, len(good.taken)) == (1, 2, 1)

    def test_a_newer_version_takes_the_place_of_one_that_was_not_taken(self) -> None:
        bad = Noted("bad", 1)
        told = Announcer(lambda: Path("/models"), [], [bad], lambda error: None)
        with pytest.raises(StorageError):
            told.on_applied(applied(1))
        told.on_applied(applied(2))
        assert [item.version for item in bad.taken] == ["main@1", "main@2"]

    def test_going_back_is_told(self) -> None:
        good = Noted("good")
        told = Announcer(lambda: Path("/models"), [], [good], lambda error: None)
        for number in (1, 2, 1, 1):
            told.on_applied(applied(number))
        assert [item.version for item in good.taken] == ["main@1", "main@2", "main@1"]

    def test_what_is_told_before_never_fails_the_caller(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("dcr_store.receive.announcing._FIRST_WAIT_S", 0.001)
        bad, twice, good = Noted("bad", 99), Noted("twice", 2), Noted("good")
        reported: list[DcrError] = []
        told = Announcer(lambda: Path("/models"), [bad, twice, good], [], reported.append)
        told.on_prepared(prepared(1))
        assert (len(bad.taken), len(twice.taken), len(good.taken)) == (3, 3, 1)
        assert len(reported) == 5
        assert good.taken[0].previous == "main@0"

    def test_of_a_command_line(self) -> None:
        assert announcer(lambda: Path(), [], [], [], lambda error: None) is None
        with pytest.raises(InvalidInputError):
            announcer(lambda: Path(), ["nobody=http://host"], [], [], lambda error: None)
        with pytest.raises(InvalidInputError):
            announcer(lambda: Path(), [], [" "], [], lambda error: None)


def test_a_receiver_goes_on_while_an_engine_fails(tmp_path: Path) -> None:
    """Each version gets to the target; the engine has the newest one once it answers again."""
    states = series(4)
    with dcr_store.create(tmp_path / "store", chunk_elements=1024) as store, SglangStandIn() as server:
        from dcr_store.receive.copying import CopyBringer

        bringer = CopyBringer(tmp_path / "models")
        reported: list[str] = []
        told = announcer(
            lambda: bringer.place, [f"sglang={server.url}"], [], [], lambda error: reported.append(str(error))
        )
        assert told is not None
        server.fail["/update_weights_from_disk"] = [(500, "out of memory")] * 2

        def failed(error: DcrError, wait_s: float) -> None:
            reported.append(str(error))
            if len(reported) == 1:
                publish(3)

        def publish(number: int) -> None:
            directory = write_hf(tmp_path / f"checkpoint{number}", states[number], 2)
            with store.begin() as transaction:
                transaction.write_checkpoint(directory)

        publish(2)
        with store.receiver(bringer) as receiver:
            receiver.follow(until="main@1", on_applied=told.on_applied, on_serving=told.on_serving, on_failure=failed)
        assert len(reported) == 2
        assert all("out of memory" in text for text in reported)
        assert (server.version, server.paused) == ("main@1", False)
        newest = tmp_path / "checkpoint3"
        assert server.weights == {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}
        assert bringer.place.name.startswith("main@1-")


def test_a_hook_that_fails_is_called_again_at_growing_intervals(tmp_path: Path) -> None:
    """Until it has been called once without failing: then the next one is called again soon."""
    waits: list[float] = []
    told: list[str] = []
    with dcr_store.create(tmp_path / "store", chunk_elements=1024) as store:

        def publish(value: int) -> None:
            with store.begin() as transaction:
                transaction.write("weight", np.full(100, value, np.int32))

        def hook(applied: Applied) -> None:
            told.append(applied.version)
            if len(told) in (1, 2, 4):
                raise StorageError("is busy")
            if len(told) == 3:
                publish(2)

        publish(1)
        with store.receiver(tmp_path / "models") as receiver:
            receiver.follow(until="main@1", on_applied=hook, on_failure=lambda error, wait_s: waits.append(wait_s))
    assert told == ["main@0"] * 3 + ["main@1"] * 2
    assert waits[0] <= 0.5 <= waits[1] <= 1.0
    assert waits[2] <= 0.5


def test_in_a_group_engines_go_on_once_all_members_hold_the_version(tmp_path: Path) -> None:
    with dcr_store.create(tmp_path / "store", chunk_elements=1024) as store, SglangStandIn() as server:
        checkpoint = write_hf(tmp_path / "checkpoint", series(1)[0], 2)
        with store.begin() as transaction:
            transaction.write_checkpoint(checkpoint)
        store.create_group("eu", ["a", "b"])
        place = tmp_path / "a"
        told = announcer(lambda: place, [f"sglang={server.url}"], [], [], lambda error: None)
        assert told is not None
        seen: list[tuple[bool, str | None]] = []
        is_applied = threading.Event()

        def on_applied(applied: Applied) -> None:
            told.on_applied(applied)
            is_applied.set()

        def wait(applied: Applied) -> None:
            is_applied.wait(20)
            time.sleep(0.2)  # time enough to go on too soon
            seen.append((server.paused, server.version))

        with (
            store.receiver(place, group="eu", name="a") as a,
            dcr_store.open(tmp_path / "store") as other,
            other.receiver(tmp_path / "b", group="eu", name="b") as b,
            ThreadPoolExecutor(2) as pool,
        ):
            hooks = {"on_applied": on_applied, "on_serving": told.on_serving}
            runs = [pool.submit(a.follow, until="main@0", **hooks)]
            runs.append(pool.submit(b.follow, until="main@0", on_applied=wait))
            try:
                for run in runs:
                    run.result(40)
            finally:
                a.stop()
                b.stop()
        assert seen == [(True, "main@0")]
        assert (server.paused, server.version) == (False, "main@0")
