"""The safety rules, each taken out alone: the simulation has to find out that it is gone.

A removal patches the product in this process; the product has no switch for any of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
from sim import objects
from sim.history_removals import HISTORY_REMOVALS
from sim.taking_out import Removal, patched

from dcr_store.codec.digest import crc64, zeros_digest
from dcr_store.errors import FencedError, OutcomeUnknownError
from dcr_store.format.groups import AckRef
from dcr_store.format.names import TransactionKeys, ack_prefix
from dcr_store.format.records import Commit
from dcr_store.layout.dtypes import width
from dcr_store.log import fold, record_log
from dcr_store.log.acks import AckReader
from dcr_store.objects.retry import Backoff, TransientError
from dcr_store.publish import (
    committing,
    joint,
    joint_commit,
    journaled,
    ownership,
    partitions,
    seals,
    slice_writer,
    state,
    transaction,
)
from dcr_store.receive import deciding, pull
from dcr_store.receive.transfers import Transfers
from dcr_store.targets import copy_directory, marker, paths
from dcr_store.targets.directory import DirectoryTarget


def fencing() -> contextlib.AbstractContextManager[None]:
    """A writer commits as long as its transaction is open, whoever resumed it meanwhile."""

    def require_ours(self: Any, line: Any) -> None:
        if line.open is None or line.open.txid != self.txid:
            self._state = "fenced"
            raise FencedError("the transaction is over", key=self.txid)

    apply = fold.apply

    def lenient(line: Any, record: Any, data: bytes) -> Any:
        if isinstance(record, Commit) and line.open is not None:
            line = replace(line, open=replace(line.open, attempt=record.attempt))
        return apply(line, record, data)

    return patched((transaction.Transaction, "_require_ours", require_ours), (fold, "apply", lenient))


def judged_prefix() -> contextlib.AbstractContextManager[None]:
    """A record goes to the end of the log as it is now, not to the number on whose prefix it was decided."""

    def append(self: Any, decide: Callable[[Any], Any]) -> Any:
        self._resolve()
        line = self._refresh()
        while True:
            record = decide(line)
            line = self._refresh()
            record = replace(record, seq=line.length, prev=line.last_sha256)
            if self._put(self._key(line.length), record.to_bytes()):
                self._refresh()
                return record

    return patched((record_log.RecordLog, "_append", append))


def read_back() -> contextlib.AbstractContextManager[None]:
    """A put-if-absent that finds the key taken has lost, also when an earlier try of it may have taken effect."""

    def resolving(policy: Any, key: str, data: Any, create: Callable[[], bool], read: Callable[[], bytes]) -> bool:
        backoff = Backoff(policy)
        while True:
            try:
                return create()
            except TransientError as error:
                if not backoff.wait():
                    raise OutcomeUnknownError("no answer", key=key) from error

    def append_commit(log: Any, proposal: Any, require_ours: Callable[[Any], None]) -> Any:
        with patched((log, "row", lambda version: None)), contextlib.suppress(AssertionError):
            original(log, proposal, require_ours)
        return log.row(proposal.manifest.version)

    original = committing.append_commit
    return patched((objects, "resolving", resolving), (transaction, "append_commit", append_commit))


def own_attempt_directory() -> contextlib.AbstractContextManager[None]:
    """All attempts of a transaction write manifest and tables to the same place."""
    return patched((TransactionKeys, "attempt", lambda self, attempt: f"{self.prefix}attempts/0/"))


def own_incarnation_directory() -> contextlib.AbstractContextManager[None]:
    """All incarnations of a writer write their partitions to the same place."""
    return patched((transaction, "new_incarnation", lambda: "0" * 16))


def adopted_by_content() -> contextlib.AbstractContextManager[None]:
    """A writer takes its earlier incarnation's partition for its own without having got the same bytes."""

    class Loose(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            return next((item for (array, index, _), item in self.items() if (array, index) == key[:2]), default)

    read = journaled.read_durable
    return patched((transaction, "read_durable", lambda *arguments: Loose(read(*arguments))))


def base_digests() -> contextlib.AbstractContextManager[None]:
    """A writer trusts its baseline: nobody compares the bits that it compared with, with the base."""
    encode, tables = state.encode_delta, committing.new_tables

    def encode_delta(codec: Any, space: str, chunk: int, base: Any, base_digest: int, new: Any) -> Any:
        found = crc64(base)
        encoded = encode(codec, space, chunk, base, found, new)
        return None if encoded is None else replace(encoded, base=base_digest)

    def new_tables(lengths: Any, base: Any, rows: Any, chunk_elements: int, told: Any) -> Any:
        if base is not None:
            rows = {space: table.copy() for space, table in rows.items()}
            for space, table in rows.items():
                zero = np.uint64(zeros_digest(chunk_elements * width(space)))
                table[:, 3] = base[space][table[:, 0].astype(np.int64)] ^ zero
        return tables(lengths, base, rows, chunk_elements, told)

    return patched((state, "encode_delta", encode_delta), (committing, "new_tables", new_tables))


def dirty_marker() -> contextlib.AbstractContextManager[None]:
    """A target is written without a note that says so before."""
    write = pull.write_marker
    return patched((pull, "write_marker", lambda root, note: None if note.state == "dirty" else write(root, note)))


def sync_before_clean() -> contextlib.AbstractContextManager[None]:
    """A target is marked clean before what was written is durable."""
    return patched((DirectoryTarget, "sync", lambda self: None))


def durable_marker_name() -> contextlib.AbstractContextManager[None]:
    """The marker is renamed to its place, and the directory is not synced."""
    nothing = lambda place: None  # noqa: E731
    return patched((marker, "fsync_directory", nothing), (paths, "fsync_directory", nothing))


def sync_before_switch() -> contextlib.AbstractContextManager[None]:
    """The link moves to a version before what was written of it is durable."""
    return patched((DirectoryTarget, "sync", lambda self: None))


def held_by_readers() -> contextlib.AbstractContextManager[None]:
    """A version is removed although an engine holds it."""
    free = types.SimpleNamespace(**{**vars(fcntl), "flock": lambda descriptor, operation: None})
    return patched((copy_directory, "fcntl", free))


def target_lock() -> contextlib.AbstractContextManager[None]:
    """Two processes may write a target at once."""
    return patched((pull, "lock", lambda root: contextlib.nullcontext()))


def chunks_judged_by_digest() -> contextlib.AbstractContextManager[None]:
    """A target is taken for what its marker says that it was before: chunks are not looked at."""

    def classify(path: Any, found: Any, candidates: Any) -> Any:
        first = next(iter([*candidates]), path.goal)
        return pull.everywhere(path, first)

    return patched((pull, "classify", classify))


def acknowledging_incarnation() -> contextlib.AbstractContextManager[None]:
    """What a member acknowledged counts for all its later incarnations."""

    def read(self: Any, kind: str, subject: Any, members: Any) -> Any:
        found = {}
        prefix = ack_prefix(self._group, subject.version, kind)
        for file in self._objects.list_names(prefix):
            name, _, proposal, _ = file.split(".")
            if name in members and int(proposal) == subject.proposal:
                found[name] = AckRef(name, members[name], "0" * 64)
        return found

    return patched((AckReader, "read", read))


def acknowledged_proposal() -> contextlib.AbstractContextManager[None]:
    """What a member acknowledged of a version counts whenever that version is proposed again."""

    def read(self: Any, kind: str, subject: Any, members: Any) -> Any:
        found = {}
        prefix = ack_prefix(self._group, subject.version, kind)
        for file in self._objects.list_names(prefix):
            name, incarnation, _, _ = file.split(".")
            if members.get(name) == incarnation:
                found[name] = AckRef(name, incarnation, "0" * 64)
        return found

    return patched((AckReader, "read", read))


def prepared_means_here() -> contextlib.AbstractContextManager[None]:
    """A member says that it is prepared, whatever it has of the version."""
    return patched((Transfers, "_bring", lambda self, ref, tag, before: False))


def applied_when_promoted() -> contextlib.AbstractContextManager[None]:
    """A member applies what is proposed, and does not wait for the others."""
    following = deciding.InGroup.next
    return patched((deciding.InGroup, "next", lambda *arguments: replace(following(*arguments), may_apply=True)))


# ---------------------------------------------------------------------- several writers


def fencing_of_committers() -> contextlib.AbstractContextManager[None]:
    """A committer commits as long as the transaction is open, whoever resumed it meanwhile."""

    def require_ours(self: Any, line: Any) -> None:
        if line.open is None or line.open.txid != self.txid:
            raise FencedError("the transaction is over", key=self.txid)

    apply = fold.apply

    def lenient(line: Any, record: Any, data: bytes) -> Any:
        if isinstance(record, Commit) and line.open is not None:
            line = replace(line, open=replace(line.open, attempt=record.attempt))
        return apply(line, record, data)

    return patched((joint.SliceTransaction, "_require_ours", require_ours), (fold, "apply", lenient))


def seals_of_the_attempt() -> contextlib.AbstractContextManager[None]:
    """The seal of any attempt counts for all later ones."""

    def newest(self: Any, writer: str) -> int:
        return max((attempt for name, attempt in self._seals if name == writer), default=-1)

    only = seals.SealWatch._only
    return patched(
        (
            seals.SealWatch,
            "missing",
            lambda self, attempt: [writer for writer in self.writers if newest(self, writer) < 0],
        ),
        (seals.SealWatch, "_only", lambda self, writer, attempt: only(self, writer, newest(self, writer))),
    )


def sealed_again() -> contextlib.AbstractContextManager[None]:
    """A writer that has sealed does not seal again for another attempt."""
    return patched((partitions.PartitionWriter, "reseal", lambda self, attempt: None))


def disjoint_boxes() -> contextlib.AbstractContextManager[None]:
    """Who owns what is only compared by digests: what three writers own looks as if one did."""

    def check(layout: Any, found: Any, chunk_elements: int) -> None:
        ownership._check_ones(layout, found, chunk_elements)

    return patched((joint_commit, "check_ownership", check))


def digests_of_ones() -> contextlib.AbstractContextManager[None]:
    """Nobody compares the digests of what writers own with their boxes."""
    return patched((ownership, "_check_ones", lambda *arguments: None))


def base_identity() -> contextlib.AbstractContextManager[None]:
    """Nobody compares what writers say of the base with the base's digests."""
    tables = committing.new_tables

    def new_tables(lengths: Any, base: Any, rows: Any, chunk_elements: int, *more: Any) -> Any:
        rows = {space: table.copy() for space, table in rows.items()}
        for space, table in rows.items():
            zero = np.uint64(zeros_digest(chunk_elements * width(space)))
            chunks = table[:, 0].astype(np.int64)
            table[:, 3] = 0 if base is None else base[space][chunks] ^ zero
        return tables(lengths, base, rows, chunk_elements, *more)

    return patched((committing, "new_tables", new_tables))


def digests_of_pieces() -> contextlib.AbstractContextManager[None]:
    """A writer trusts the bits of its baseline."""
    compare = slice_writer.compare_piece
    return patched((slice_writer, "compare_piece", lambda base, base_digest, new: compare(base, crc64(base), new)))


def seals_alike() -> contextlib.AbstractContextManager[None]:
    """Of several seals of one writer any one counts, whatever the others say."""
    return patched((seals, "same_bits", lambda one, two: True))


def seal_of_the_manifest() -> contextlib.AbstractContextManager[None]:
    """A writer takes for committed what it sealed, whichever seal the manifest names."""
    return patched((joint.SliceTransaction, "_require_counted", lambda self, located: None))


def ownership_of_the_base() -> contextlib.AbstractContextManager[None]:
    """A seal refers to the document of any transaction before, also of one that was aborted."""
    store = joint.SliceTransaction._store_ownership

    def store_ownership(self: Any) -> Any:
        found = store(self)
        self._baseline.ownership = self._ownership
        return found

    return patched((joint.SliceTransaction, "_store_ownership", store_ownership))


def advance_after_the_outcome() -> contextlib.AbstractContextManager[None]:
    """A baseline advances when all is sealed."""
    seal = joint.SliceTransaction.seal

    def and_advance(self: Any) -> None:
        seal(self)
        if self._base is not None:
            for key, index, digest, mask in self._writer.changes.marks():
                self._used[key].digests[index] = digest
                self._used[key].owned[index] ^= np.uint64(mask)
            for key, index, positions, values in self._writer.changes.changed():
                self._used[key].packed(index)[positions] ^= values
            self._writer.changes.clear()

    return patched((joint.SliceTransaction, "seal", and_advance))


def bound_by_the_journal() -> contextlib.AbstractContextManager[None]:
    """A writer may seal other bits than its earlier incarnation has journaled."""
    return patched((partitions.PartitionWriter, "_require_bound", lambda *arguments: None))


def durable_partitions() -> contextlib.AbstractContextManager[None]:
    """A writer stores again what its earlier incarnation has stored."""
    read = journaled.read_earlier
    return patched((joint, "read_earlier", lambda *arguments: replace(read(*arguments), durable={})))


def own_directory_of_each_rank() -> contextlib.AbstractContextManager[None]:
    """All incarnations of a rank write to the same place."""
    return patched((joint, "new_incarnation", lambda: "0" * 16))


REMOVALS: Final[dict[str, tuple[Removal, str]]] = {
    "fencing by attempt": (fencing, "publishing"),
    "number on the judged prefix": (judged_prefix, "publishing"),
    "number on the judged prefix, groups": (judged_prefix, "grouping"),
    "read-back after unknown outcome": (read_back, "publishing"),
    "own attempt directory": (own_attempt_directory, "publishing"),
    "own incarnation directory": (own_incarnation_directory, "publishing"),
    "partitions adopted by content": (adopted_by_content, "publishing"),
    "base digests": (base_digests, "publishing"),
    "dirty marker before writing": (dirty_marker, "receiving"),
    "sync before clean": (sync_before_clean, "receiving"),
    "marker's name synced": (durable_marker_name, "receiving"),
    "lock of the target": (target_lock, "receiving"),
    "sync before the link moves": (sync_before_switch, "copying"),
    "versions held by readers": (held_by_readers, "copying"),
    "chunks judged by digest": (chunks_judged_by_digest, "receiving"),
    "incarnation in acknowledgements": (acknowledging_incarnation, "grouping"),
    "proposal in acknowledgements": (acknowledged_proposal, "grouping"),
    "prepared means here": (prepared_means_here, "grouping"),
    "applied when promoted": (applied_when_promoted, "grouping"),
    "fencing by attempt, several writers": (fencing_of_committers, "joining"),
    "own incarnation directory, several writers": (own_directory_of_each_rank, "joining"),
    "seals of this attempt": (seals_of_the_attempt, "joining"),
    "sealed again under another attempt": (sealed_again, "joining"),
    "seals of one writer alike": (seals_alike, "joining, twins"),
    "own seal compared with the manifest's": (seal_of_the_manifest, "joining, twins"),
    "bound by what was journaled": (bound_by_the_journal, "joining"),
    "durable partitions recognised": (durable_partitions, "joining"),
    "ownership: boxes disjoint": (disjoint_boxes, "joining"),
    "ownership: digests of ones": (digests_of_ones, "joining, rot"),
    "ownership documents of the base": (ownership_of_the_base, "joining"),
    "base identity, several writers": (base_identity, "joining, rot"),
    "base digests, several writers": (digests_of_pieces, "joining, rot"),
    "baseline after the outcome": (advance_after_the_outcome, "joining"),
    **HISTORY_REMOVALS,
}
