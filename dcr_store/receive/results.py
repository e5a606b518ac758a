"""What a receiver tells: what it saw, what it has prepared, what it did. Frozen values with ``to_json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dcr_store.receive.streaming import Seen


@dataclass(frozen=True, slots=True)
class Active:
    """The version that a target surely holds and may serve: what rollouts are stamped with.

    Attributes
    ----------
    version, root : str
        ``line@number``, and its state root.
    """

    version: str
    root: str

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Polled:
    """What a look at the store found.

    Attributes
    ----------
    head : Active or None
        The newest version of the line.
    open : Seen or None
        What is known of the transaction that may become the next version.
    active : Active or None
        What the target holds and may serve.
    wanted : str or None
        The version that comes next; None if the target holds it, or has prepared it and waits for the group.
    may_apply : bool
        Whether the target may be brought to `wanted`, or only prepare it: in a group, until that has promoted it.
    spool_nbytes : int
        Bytes in the spool, of whatever version.
    """

    head: Active | None
    open: Seen | None
    active: Active | None
    wanted: str | None
    may_apply: bool
    spool_nbytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version to which the target can be brought at once.

    Attributes
    ----------
    base, base_root : str or None
        What the target holds; None if it held nothing known, and was brought to the version already.
    n_objects, nbytes : int
        Partitions and files on the way there; all fetched and found to be right.
    nbytes_spooled : int
        Of these bytes, what the spool could keep. The rest is fetched again when it is applied.
    """

    version: str
    root: str
    base: str | None
    base_root: str | None
    n_objects: int
    nbytes: int
    nbytes_spooled: int

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Applied:
    """What bringing the target to a version did.

    Attributes
    ----------
    previous : str or None
        The version that it held before, if that was known.
    nbytes_spooled, nbytes_fetched : int
        Bytes that were in the spool by then, and bytes that had to be fetched meanwhile, or were read ahead of it
        without having been kept.
    chunks_written, chunks_healed : int
        Chunks written, and among them those that were in no state of the path and rebuilt.
    seconds : float
        For which the target was on its way.
    """

    version: str
    root: str
    previous: str | None
    nbytes_spooled: int
    nbytes_fetched: int
    chunks_written: int
    chunks_healed: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)
