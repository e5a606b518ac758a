"""Who owns a transaction, and whether that process is certainly gone.

An owner is free text. The default names this process on this machine so exactly (boot, pid namespace, pid, start
time) that another process of the same machine can tell a dead owner from a live one; of any other owner nothing is
known.
"""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path

from dcr_store.format.names import new_incarnation


@functools.cache
def _default_owner(pid: int) -> str:
    return ":".join(("process", *_place(), str(pid), _start_time(pid) or "unknown", new_incarnation()))


def default_owner() -> str:
    """Return this process as an owner; no other process ever has the same."""
    return _default_owner(os.getpid())


def describe(owner: str) -> str:
    """Return an owner for people: of a process, its id and host."""
    parts = owner.split(":")
    return f"process {parts[4]} on {parts[1]}" if len(parts) == 7 and parts[0] == "process" else owner


def is_dead(owner: str) -> bool:
    """Whether `owner` is a process of this machine, boot and pid namespace that does not exist any more.

    False wherever that cannot be known.
    """
    parts = owner.split(":")
    if len(parts) != 7 or parts[0] != "process" or tuple(parts[1:4]) != _place() or "unknown" in parts[2:6]:
        return False
    if not parts[4].isdecimal():
        return False
    pid = int(parts[4])
    found = _start_time(pid)
    # Where /proc hides the processes of others, or cannot be read just now, only the kernel's own word counts.
    return found != parts[5] if found is not None else _is_gone(pid)


def _place() -> tuple[str, str, str]:
    """Return host, boot id and pid namespace; the latter two ``unknown`` where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        boot = namespace = "unknown"
    return socket.gethostname().replace(":", "_"), boot, namespace


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot, ``ended`` of a zombie, None if /proc says none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return "ended" if fields[0] in ("Z", "X") else fields[19]


def _is_gone(pid: int) -> bool:
    """Whether the kernel says that there is no such process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
