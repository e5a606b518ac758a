"""The process that is killed: publishes, receives or relays as told, and kills or stops itself at named points.

Run as a program it is a nursery: it imports the package once, and for each connection to its socket forks a child of
its own process group that does one job (a JSON line), answers ``{"pid": …}`` and, if it lives, the outcome. A child
that is killed leaves an open transaction, a torn target and a closed connection, like any process. The nursery ends
all of them when its standard input ends.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ranks
from faults.holding import Claims, Holding, preload

import dcr_store
from dcr_store import events
from dcr_store.errors import ConflictError, DcrError, FencedError, InvalidInputError, LagError
from dcr_store.log import line
from dcr_store.objects.retry import RetryPolicy
from dcr_store.publish import partitions, waiting
from dcr_store.receive import pacing
from dcr_store.receive.results import Applied

Job = dict[str, Any]
ARM = "child.armed"  # reached by a child that brings its target somewhere else first


class Points:
    """Counts the named points that are reached, and strikes at the one it was told."""

    def __init__(self, strike: tuple[str, int, int] | None) -> None:
        self.counts: Counter[str] = Counter()
        self._strike = strike
        self.slow = ("", 0.0)  # at which point to dawdle, and for how many seconds
        self.is_armed = True
        self._lock = threading.Lock()

    def __call__(self, event: events.Event) -> None:
        if event.name == ARM:
            self.is_armed = True
        if event.name in (ARM, "progress") or not self.is_armed:
            return
        if event.name == self.slow[0]:
            time.sleep(self.slow[1])
        with self._lock:
            self.counts[event.name] += 1
            if self._strike is not None and (event.name, self.counts[event.name]) == self._strike[:2]:
                os.kill(os.getpid(), self._strike[2])


def do(job: Job) -> dict[str, Any]:
    """Do one job; return its outcome."""
    strike = None
    for name in ("kill", "stop"):
        if job.get(name):
            point, nth = job[name]
            strike = (point, nth, signal.SIGKILL if name == "kill" else signal.SIGSTOP)
    partitions.PARTITION_NBYTES = job.get("partition_nbytes", partitions.PARTITION_NBYTES)  # type: ignore[misc]
    partitions.JOURNAL_PARTITIONS = job.get("journal_partitions", partitions.JOURNAL_PARTITIONS)  # type: ignore[misc]
    n_first = job.get("journal_first_partitions", partitions.JOURNAL_FIRST_PARTITIONS)
    partitions.JOURNAL_FIRST_PARTITIONS = n_first  # type: ignore[misc]
    line.CHECKPOINT_VERSIONS = job.get("checkpoint_versions", line.CHECKPOINT_VERSIONS)  # type: ignore[misc]
    if "deadline_s" in job:
        _hasten(job["deadline_s"])
    waiting._LONGEST_DELAY_S = job.get("delay_s", waiting._LONGEST_DELAY_S)  # type: ignore[misc]
    pacing._LONGEST_REST_S = job.get("rest_s", pacing._LONGEST_REST_S)  # type: ignore[misc]
    points = Points(strike)
    points.slow = tuple(job.get("slow", points.slow))
    points.is_armed = not job.get("first")
    try:
        with events.listening(points):
            done = _VERBS[job["do"]](job)
        return {"ok": True, "points": points.counts, **done}
    except DcrError as error:
        return {"ok": False, "kind": error.kind, "key": error.key, "message": str(error), "points": points.counts}


def _hasten(deadline_s: float) -> None:
    """Let storage operations give up sooner than users would want."""
    from dcr_store.objects import local, s3

    def policy() -> RetryPolicy:
        return RetryPolicy(deadline_s=deadline_s, unreachable_s=deadline_s, first_delay_s=0.02, longest_delay_s=0.2)

    local.RetryPolicy = s3.RetryPolicy = policy  # type: ignore[assignment,attr-defined]


def _open(job: Job) -> dcr_store.Store:
    return dcr_store.open(job["store"], storage_options=job.get("options"))


def _create(job: Job) -> dict[str, Any]:
    dcr_store.create(job["store"], storage_options=job.get("options"), chunk_elements=256).close()
    return {}


def _publish(job: Job) -> dict[str, Any]:
    store = _open(job)
    transaction = store.begin(
        job.get("line", "main"),
        base=job.get("base"),
        message=job.get("message"),
        metadata=job.get("metadata"),
        owner=job.get("owner"),
        takeover=job.get("takeover", False),
        baseline=job.get("baseline"),
    )
    with transaction:
        transaction.write_checkpoint(job["checkpoint"])
        info = transaction.commit()
    store.close()
    return {"version": info.version, "root": info.root}


def _slices(job: Job) -> dict[str, Any]:
    """Be one of several writers, of which the first begins, until version `number` is there.

    State `state` of ``ranks.states_of`` is published; `gives_up` lets the first refusal be the end.
    """
    names = [f"r{rank}" for rank in range(job["n_ranks"])]
    rank, line_name = job["rank"], job.get("line", "main")
    maps = ranks.maps_of(rank, len(names))
    told = maps if job.get("announced") else None
    state = ranks.states_of(job["state"] + 1)[-1]
    with _open(job) as store:
        log = store._catalog.log(line_name)
        while True:
            row = log.refresh() and log.row(job["number"])
            if row is not None:
                return {"version": f"{line_name}@{row.version}", "root": row.root}
            try:
                if rank == 0:
                    transaction = store.begin(
                        line_name,
                        writers=names,
                        tensors=ranks.SHAPES,
                        slices=told,
                        owner=job.get("owner"),
                        message=job.get("message"),
                        takeover=job.get("takeover", False),
                        baseline=job.get("baseline"),
                    )
                else:
                    transaction = store.join(
                        job.get("txid"),
                        line=line_name,
                        writer=names[rank],
                        slices=told,
                        baseline=job.get("baseline"),
                        timeout_s=0.1,
                    )
                with transaction:
                    ranks.write(transaction, maps, state)
                    info = transaction.commit(timeout_s=job.get("timeout_s"))
                return {"version": info.version, "root": info.root, "attempt": transaction.attempt}
            except LagError:
                if job.get("timeout_s"):
                    raise
            except FencedError:
                if job.get("gives_up"):
                    raise


def _pull(job: Job) -> dict[str, Any]:
    with _open(job) as store:
        if job.get("kind") == "copy":
            return store.pull(job["directory"], job.get("version"), mode="copy", keep=job.get("keep", 1)).to_json()
        result = store.pull(job["directory"], job.get("version"), force=job.get("force", False))
    return result.to_json()


def _load(job: Job) -> dict[str, Any]:
    """Bring tensors in memory to a version, as a process does that knows nothing of what they hold."""
    with _open(job) as store:
        holding = Holding(job, store)
        result = store.load_into(holding.target, job["version"])
        Claims(job.get("claims"), holding.image).note("loaded", result.version)
    return result.to_json()


def _command(job: Job) -> dict[str, Any]:
    """Run the command line; what it prints is not looked at."""
    from dcr_store.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()):
        status = main([*job["arguments"]])
    if status:
        raise InvalidInputError("the command failed; see stderr", key=" ".join(job["arguments"]), found=status)
    return {"version": job["version"]}


def _follow(job: Job) -> dict[str, Any]:
    """Follow as told; return what was applied, what failed, and what was moved, in bytes."""
    applied: list[dict[str, Any]] = []
    failures: list[str] = []
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(_open(job))
        holding = Holding(job, store)
        receiver = stack.enter_context(
            store.receiver(
                holding.target,
                group=job.get("group"),
                name=job.get("name"),
                line=job.get("line"),
                spool=job.get("spool"),
                spool_nbytes=job.get("spool_nbytes"),
            )
        )
        claims = Claims(job.get("claims"), holding.image)
        stack.enter_context(events.listening(claims))
        if job.get("watch"):
            stack.enter_context(claims.watching(receiver, is_atomic=holding.is_atomic))

        def on_applied(found: Applied) -> None:
            claims.note("applied", found.version)
            applied.append(found.to_json())

        if job.get("first"):
            receiver.follow(until=job["first"], on_applied=on_applied)
            events.reached(ARM)
        receiver.follow(
            until=job.get("until"),
            once=job.get("once", False),
            on_applied=on_applied,
            on_failure=lambda error, _: failures.append(f"{error.kind}: {error}"),
        )
        active = receiver.active()
        counts = receiver._keeper._transfers.counts
        return {
            "applied": applied,
            "failures": failures,
            "active": None if active is None else active.to_json(),
            "fetched": counts.fetched,
            "ahead": counts.ahead,
            "spooled": counts.spooled,
        }


def _race(job: Job) -> dict[str, Any]:
    """Commit versions of one tensor until `n` are in, beginning again after each conflict."""
    import numpy as np

    roots, conflicts = [], 0
    with _open(job) as store:
        while len(roots) < job["n"]:
            mine = {"racer": job["racer"], "nth": len(roots)}
            try:
                with store.begin(metadata=mine) as transaction:
                    transaction.write("weight", np.full(256, 1000 * job["racer"] + len(roots), np.int32))
                    roots.append(transaction.commit().root)
            except ConflictError:
                conflicts += 1
                _nap()
    return {"roots": roots, "conflicts": conflicts}


def _member(job: Job) -> dict[str, Any]:
    """Be a member of a group until it has promoted version `until` and all have applied it.

    What it prepares is noted in the file `notes` first, so that the test knows it whatever becomes of this process.
    """
    from dcr_store.receive.member import Member

    with _open(job) as store, Path(job["notes"]).open("a", encoding="utf-8", buffering=1) as notes:
        member = Member(store._catalog, job["group"], job["name"])
        member.join()
        while True:
            wanted = member.step()
            if wanted.apply is not None:
                _nap()
                member.applied(wanted.apply, wanted.apply.root)
            if wanted.prepare is not None:
                _nap()
                notes.write(f"{member.incarnation} {wanted.prepare.proposal}\n")
                member.prepared(wanted.prepare, None, wanted.prepare.root)
            member.try_promote()
            active = member.active
            if active is not None and active.number >= job["until"] and member.all_applied():
                return {"active": active.version}
            _nap()


def _nap() -> None:
    import random

    time.sleep(random.uniform(0.0, 0.05))


def _relay(job: Job) -> dict[str, Any]:
    """Be a relay until killed."""
    import asyncio

    from dcr_store.objects.open import open_upstreams
    from dcr_store.relay.serving import Settings, serving

    async def run() -> None:
        settings = Settings("127.0.0.1", job["port"], job["cache"], job.get("max_nbytes", 1 << 30), access="publish")
        async with serving(settings, open_upstreams([job["store"]], job.get("options")), lambda told: None):
            await asyncio.Event().wait()

    asyncio.run(run())
    return {}


def _upkeep(job: Job) -> dict[str, Any]:
    """Call methods of the store one after the other: each its name, its arguments, and those by name."""
    with _open(job) as store:
        for name, arguments, named in job["calls"]:
            getattr(store, name)(*arguments, **named)
    return {}


def _live(job: Job) -> dict[str, Any]:
    """Play a role beside others until the end."""
    from faults import living

    with _open(job) as store:
        return living.live(store, job)


_VERBS = {
    "live": _live,
    "upkeep": _upkeep,
    "create": _create,
    "publish": _publish,
    "slices": _slices,
    "pull": _pull,
    "load": _load,
    "command": _command,
    "follow": _follow,
    "race": _race,
    "member": _member,
    "relay": _relay,
}


def _warm_up(scratch: Path) -> None:
    """Import what a job needs, once, by doing one of each kind."""
    import numpy as np

    import dcr_store.cli.main
    import dcr_store.objects.s3
    import dcr_store.relay.serving

    assert dcr_store.cli.main.main is not dcr_store.relay.serving.serving

    with dcr_store.create(scratch / "store", chunk_elements=64) as store:
        for value in range(2):
            with store.begin() as transaction:
                transaction.write("weight", np.full(256, value, np.int32))
        with store.begin("ranks", writers=["r0"], tensors=ranks.SHAPES) as transaction:
            ranks.write(transaction, ranks.maps_of(0, 1), ranks.random_state(0))
        store.pull(scratch / "target")
        with store.receiver(scratch / "target") as receiver:
            receiver.follow(once=True)
        store.verify(deep=True)


def _serve_one(connection: socket.socket) -> None:
    with connection, connection.makefile("rw", encoding="utf-8") as stream:
        job = json.loads(stream.readline())
        stream.write(json.dumps({"pid": os.getpid()}) + "\n")
        stream.flush()
        stream.write(json.dumps(do(job)) + "\n")
        stream.flush()


@contextlib.contextmanager
def _listening(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(path)
        server.listen(64)
        yield server


def main(path: str, scratch: str, *names: str) -> None:
    """Serve jobs at the socket `path` until standard input ends, with modules imported that the jobs need."""
    preload(names)
    _warm_up(Path(scratch))
    gc.collect()
    gc.freeze()  # what children share stays shared: a collection in one would write to all of it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are reaped at once, and their owners known to be dead
    with _listening(path) as server:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            readable, _, _ = select.select([server, sys.stdin], [], [])
            if sys.stdin in readable:
                os.killpg(0, signal.SIGKILL)  # also those that are stopped, and this process
            connection, _ = server.accept()
            if os.fork():
                connection.close()
                continue
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            server.close()
            status = 0
            try:
                _serve_one(connection)
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stderr.flush()
            os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
