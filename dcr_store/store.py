"""The facade: ``create`` and ``open`` a store, publish, read, pull, ask. Wires the floors below, adds nothing to them.

Refuses backends on which put-if-absent is not atomic, and stores of another format version.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, overload

from dcr_store.errors import ConflictError, IntegrityError, InvalidInputError, NotFoundError, StorageError
from dcr_store.format.copies import DETACHED_KEY, chain_sha256, copy_document
from dcr_store.format.documents import CODECS, StoreDocument
from dcr_store.format.fields import now
from dcr_store.format.names import STORE_KEY, check_line, check_writers, layout_key, new_txid
from dcr_store.log.fold import LineState
from dcr_store.log.signing import UNSIGNED, Signing
from dcr_store.objects.open import open_objects
from dcr_store.targets.checkpoint_listing import is_weights
from dcr_store.targets.own_directories import refuse_inside_store
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.document import read_document
from dcr_store.versions.info import VersionDetail, VersionInfo, detail_of, info_of

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from datetime import datetime

    from dcr_store.exchange.copied import Copied
    from dcr_store.exchange.folders import Exported
    from dcr_store.exchange.import_deltas import Imported
    from dcr_store.format.marks import Named
    from dcr_store.format.rows import VersionRow
    from dcr_store.history.blame import Blame
    from dcr_store.history.changed import Diff
    from dcr_store.history.identify import Identified
    from dcr_store.history.report import VerifyReport
    from dcr_store.history.walk import State
    from dcr_store.history.written import Written
    from dcr_store.layout.layout import Layout
    from dcr_store.layout.selection import Index
    from dcr_store.maintain.collect import Collected
    from dcr_store.maintain.edges import EdgeInfo
    from dcr_store.maintain.retention import Expiry
    from dcr_store.ports import ObjectStore
    from dcr_store.publish.baseline import Baseline
    from dcr_store.publish.joint import Slices, SliceTransaction
    from dcr_store.publish.opening import Intent
    from dcr_store.publish.slice_baseline import SliceBaseline
    from dcr_store.publish.transaction import Transaction
    from dcr_store.receive.aio import AsyncReceiver
    from dcr_store.receive.copying import CopyResult
    from dcr_store.receive.group import Group
    from dcr_store.receive.patches import TensorPatch
    from dcr_store.receive.pull import PullResult
    from dcr_store.receive.receiver import Receiver
    from dcr_store.receive.status import Status
    from dcr_store.report.figures import Report
    from dcr_store.versions.places import StorePlace

Url = str | os.PathLike[str]
Trust = str | os.PathLike[str] | Iterable[str]


def create(
    url: Url,
    *,
    codec: str = "dcr.delta",
    chunk_elements: int = 1 << 20,
    storage_options: Mapping[str, Any] | None = None,
    sign_with: str | os.PathLike[str] | None = None,
    trust: Trust | None = None,
) -> Store:
    """Create a store at an empty place.

    Parameters
    ----------
    url : str or path
        A directory, ``file://``, ``memory://``, ``s3://bucket/prefix``, or ``http://host:port`` of a relay that
        passes everything on.
    codec : {"dcr.delta", "portable"}
        How chunks are encoded; ``portable`` uses codecs of the Zarr core only and is larger.
    chunk_elements : int
        Elements of a chunk, a power of two from 64 to 2^24.
    storage_options : mapping, optional
        What fsspec's file system takes.
    sign_with, trust
        As of ``open``.

    Raises
    ------
    ConflictError
        If there is a store already.
    InvalidInputError
        If an option is wrong.
    StorageError
        If the backend cannot be written, or does not put atomically.
    """
    if codec not in CODECS:
        raise InvalidInputError("unknown codec", key="codec", expected=" or ".join(CODECS), found=codec)
    if (
        not isinstance(chunk_elements, int)
        or not 64 <= chunk_elements <= 1 << 24
        or chunk_elements & (chunk_elements - 1)
    ):
        raise InvalidInputError(
            "chunk_elements is wrong", key="chunk_elements", expected="a power of two, 64 to 2^24", found=chunk_elements
        )
    signing = _signing(sign_with, trust)
    document = StoreDocument(new_txid(), codec, chunk_elements, now())
    return _created(url, storage_options, document.to_bytes(), signing)


def _created(url: Url, storage_options: Mapping[str, Any] | None, data: bytes, signing: Signing = UNSIGNED) -> Store:
    """Create the store whose document `data` is; errors are those of ``create``."""
    from dcr_store.objects.probe import probe

    objects = open_objects(url, storage_options)
    if objects.size(STORE_KEY) is not None:
        raise ConflictError("there is a store already; open it, or choose another place", key=objects.url)
    _check_place(objects)
    try:
        probe(objects)
    except StorageError as error:
        raise StorageError(f"cannot hold a store: {error.args[0]}", key=objects.url) from error
    if not objects.put_if_absent(STORE_KEY, data):
        raise ConflictError("somebody else has just created a store there; open it", key=objects.url)
    return Store(
        objects, StoreDocument.from_bytes(data), chain_sha256(data), opened=(url, storage_options), signing=signing
    )


def open(
    url: Url,
    *,
    storage_options: Mapping[str, Any] | None = None,
    sign_with: str | os.PathLike[str] | None = None,
    trust: Trust | None = None,
) -> Store:
    """Open a store, by its place, by relays (``http://host:port``), or by several ways separated by commas.

    Parameters
    ----------
    sign_with : path, optional
        File of a private key (``dcr keygen``), with which all log records are signed that are written.
    trust : path or iterable of str, optional
        File of public keys, one a line, or such lines. Then a log counts only if one of these has signed each record of
        it; all are read, whatever log checkpoints say.

    Raises
    ------
    NotFoundError
        If there is none.
    FormatError
        If it is of another format version, or no store.
    InvalidInputError
        If there is no such file of keys, or no key in it.
    """
    return _opened(url, storage_options, _signing(sign_with, trust))


def _opened(url: Url, storage_options: Mapping[str, Any] | None, signing: Signing) -> Store:
    """Open a store; errors are those of ``open``."""
    objects = open_objects(url, storage_options)
    return Store(objects, *read_document(objects), opened=(url, storage_options), signing=signing)


def _signing(sign_with: str | os.PathLike[str] | None, trust: Trust | None) -> Signing:
    if sign_with is None and trust is None:
        return UNSIGNED
    from dcr_store.log.key_files import signing_of

    return signing_of(sign_with, trust)


_NO_ONES: Final = ("probe", "lost+found")  # what a creation that was killed, or making a file system, leaves


def _check_place(objects: ObjectStore) -> None:
    """Refuse a directory inside of a store, the remains of a store, a checkpoint, and whatever else is not empty."""
    if objects.url.startswith("/"):
        refuse_inside_store(Path(objects.url), "the store")
    names = objects.list_names("")
    if remains := sorted({"groups", "layouts", "log", "versions"} & set(names)):
        raise ConflictError(
            "there are the remains of a store; restore its dcr.json from a copy, or choose another place",
            key=objects.url,
            expected="nothing",
            found=", ".join(remains),
        )
    if weights := sorted(filter(is_weights, names)):
        raise InvalidInputError(
            "this is a checkpoint, not a place for a store; were the arguments swapped?",
            key=objects.url,
            found=weights[0],
        )
    if foreign := sorted(name for name in names if name not in _NO_ONES and not name.startswith(".")):
        raise ConflictError(
            "the place is not empty, and a store shares it with nothing; choose another place, a new directory in it "
            "for example",
            key=objects.url,
            expected="nothing",
            found=", ".join(foreign[:5]),
        )


class Store:
    """An open store. Make one with ``create`` or ``open``.

    Attributes
    ----------
    url, store_id, codec : str
        Where it is, which one it is, how chunks are encoded.
    chunk_elements : int
        Elements of a chunk.
    """

    def __init__(
        self,
        objects: ObjectStore,
        document: StoreDocument,
        store_sha256: str,
        *,
        opened: tuple[Url, Mapping[str, Any] | None] | None = None,
        signing: Signing = UNSIGNED,
    ) -> None:
        self._objects = objects
        self._opened = opened
        self._document = document
        self._catalog = Catalog(objects, document, store_sha256, signing)
        self._baselines: dict[str, Baseline] = {}
        self._used: weakref.WeakSet[Baseline] = weakref.WeakSet()
        self._slice_baselines: dict[tuple[str, str], SliceBaseline] = {}
        self._joined: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()
        self.url = objects.url
        self.store_id = document.store_id
        self.codec = document.codec
        self.chunk_elements = document.chunk_elements

    def __repr__(self) -> str:
        return f"<dcr_store.Store {self.url}>"

    # ------------------------------------------------------------------ publishing

    @overload
    def begin(
        self,
        line: str = "main",
        *,
        base: str | None = None,
        message: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        owner: str | None = None,
        takeover: bool = False,
        baseline: Url | None = None,
        max_ahead: int | None = None,
        ahead_of: Iterable[str] = (),
        writers: None = None,
    ) -> Transaction: ...
    @overload
    def begin(
        self,
        line: str = "main",
        *,
        base: str | None = None,
        message: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        owner: str | None = None,
        takeover: bool = False,
        baseline: Url | None = None,
        max_ahead: int | None = None,
        ahead_of: Iterable[str] = (),
        writers: Sequence[str],
        writer: str | None = None,
        tensors: Mapping[str, tuple[str, Sequence[int]]] | None = None,
        aliases: Mapping[str, str] | None = None,
        slices: Slices | None = None,
    ) -> SliceTransaction: ...
    def begin(
        self,
        line: str = "main",
        *,
        base: str | None = None,
        message: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        owner: str | None = None,
        takeover: bool = False,
        baseline: Url | None = None,
        max_ahead: int | None = None,
        ahead_of: Iterable[str] = (),
        writers: Sequence[str] | None = None,
        writer: str | None = None,
        tensors: Mapping[str, tuple[str, Sequence[int]]] | None = None,
        aliases: Mapping[str, str] | None = None,
        slices: Slices | None = None,
    ) -> Transaction | SliceTransaction:
        """Begin the next version of a line, or resume the one that this owner (or a dead process) left open.

        Parameters
        ----------
        line : str
            Made by its first version.
        base : str, optional
            The version that must be the head, as ``line@number`` or a root; otherwise whatever the head is.
        message : str, optional
        metadata : mapping, optional
            JSON: step, reward, code revision.
        owner : str, optional
            Who publishes, the same for all restarts of one run; by default this process.
        takeover : bool
            Take over an open transaction of an owner that you know to be dead.
        baseline : path, optional
            Directory of the local copy of the last version, kept for the next run; by default a temporary one. If it
            still advances to what was committed last, that is waited for. With writers, the copy of what this one
            writes, in a place of its own below the directory, ``<line>/<writer>``, so that all may name the same one;
            locked until this store is closed, or another baseline is named. By default it is in memory, as with
            "pinned", which means page-locked memory of torch, for which there must be CUDA.
        max_ahead : int, optional
            Refuse to begin a version that comes more than so many after the active one of a group of `ahead_of`.
        ahead_of : iterable of str
            Names of groups that follow the line.
        writers : sequence of str, optional
            The names of all writers, where there are several: each writes slices and seals, the one that begins commits
            for all, the others ``join``.
        writer : str, optional
            Which of them this process is; the first by default.
        tensors : mapping of str to (str, sequence of int), optional
            With writers: dtype, as safetensors names it (``BF16``), and shape of each tensor of the version. By default
            those of the head, which also stay, in their order and untied where they were, if these are the same.
        aliases : mapping of str to str, optional
            With tensors: further names, each of one of the tensors, or of an alias before it.
        slices : sequence of AffineMap, or function that returns it for a layout, optional
            With writers: all that this one is going to write. Then what it has encoded is stored as soon as that is
            whole; otherwise much of it when it seals.

        Returns
        -------
        Transaction, or with writers SliceTransaction

        Raises
        ------
        ConflictError
            If somebody else's transaction is open, the head is not `base`, or another process uses the baseline, be it
            for an advance after its last commit, or as the same writer.
        LagError
            If the version would be more than `max_ahead` ahead of a group: wait, and begin again.
        InvalidInputError
            If a name or the metadata cannot be stored.
        """
        from dcr_store.publish.flow import Flow
        from dcr_store.publish.intents import check_base, intent_of
        from dcr_store.publish.opening import abandon, begin
        from dcr_store.publish.transaction import Transaction

        self._check_writable()
        intent = intent_of(line, base, message, metadata, owner, takeover=takeover)
        if writers is None:
            given = {"writer": writer, "tensors": tensors, "slices": slices, "aliases": aliases}
            if lone := [name for name, value in given.items() if value is not None]:
                raise InvalidInputError("is for several writers alone", key=lone[0], expected="writers too")
        flow = Flow(self._catalog, line, ahead_of)
        flow.check_max_ahead(max_ahead)
        flow.require_followers()

        def check(state: LineState) -> None:
            check_base(state, base)
            if max_ahead is not None:
                flow.require_near(state.next_version, max_ahead)

        if writers is not None:
            names = check_writers(writers)
            return self._begin_joint(line, intent, check, names, writer, tensors, aliases, slices, baseline)
        held, release = self._acquire_baseline(line, baseline)
        try:
            with self._lock:
                self._used.add(held)
            # Not with the line's transaction open, which others wait for. For an anchor, too: an advance would note its
            # version over that of the anchor.
            held.wait()
            log = self._catalog.log(line)
            pending = begin(log, intent, check)
            try:
                return Transaction(self._catalog, log, pending, held, release)
            except BaseException as error:
                abandon(log, pending, f"could not start: {type(error).__name__}: {error}"[:500])
                raise
        except BaseException:
            release()
            raise

    def _begin_joint(
        self,
        line: str,
        intent: Intent,
        check: Callable[[LineState], None],
        writers: tuple[str, ...],
        writer: str | None,
        tensors: Mapping[str, tuple[str, Sequence[int]]] | None,
        aliases: Mapping[str, str] | None,
        slices: Slices | None,
        baseline: Url | None,
    ) -> SliceTransaction:
        from dcr_store.layout.layout import layout_of
        from dcr_store.publish.joint import SliceTransaction
        from dcr_store.publish.opening import abandon, begin

        mine = writers[0] if writer is None else writer
        if mine not in writers:  # before anything is begun, or taken up, in its name
            raise InvalidInputError("is none of the writers", key="writer", expected=list(writers), found=mine)
        log = self._catalog.log(line)
        head = log.refresh().head
        if tensors is not None:
            layout = layout_of(tensors, aliases)
            sha256 = layout.sha256
            if head is not None and self._serves(head, layout):
                sha256 = head.layout
            if head is None or head.layout != sha256:
                # Before the record that names it, which others read.
                self._objects.put(layout_key(sha256), layout.to_json_bytes())
        elif aliases is not None:
            raise InvalidInputError("aliases are of tensors", key="aliases", expected="tensors too", found="no tensors")
        elif head is not None:
            sha256 = head.layout
        else:
            raise InvalidInputError(
                "the line has no version yet, whose tensors this one could have; say which there are",
                key=line,
                expected="tensors",
            )

        def check_layout(state: LineState) -> None:
            check(state)
            if tensors is None and state.head is not None and state.head.layout != sha256:
                raise ConflictError(
                    "somebody has just published other tensors; begin again",
                    key=line,
                    expected=sha256,
                    found=state.head.layout,
                )

        held, release = self._acquire_slice_baseline(line, mine, baseline)
        try:
            pending = begin(log, replace(intent, writers=writers, layout=sha256), check_layout)
            try:
                transaction = SliceTransaction(
                    self._catalog, log, pending, mine, held, release, is_committer=True, slices=slices
                )
                self._joined[line, mine] = pending.txid
                return transaction
            except BaseException as error:
                abandon(log, pending, f"could not start: {type(error).__name__}: {error}"[:500])
                raise
        except BaseException:
            release()
            raise

    def _serves(self, head: VersionRow, layout: Layout) -> bool:
        """Whether a new version can have the head's layout: then it is a delta, as one publisher's would be."""
        if head.layout == layout.sha256:
            return True
        try:
            return self._catalog.layout(head.layout).serves(layout)
        except IntegrityError:
            return False  # the history is damaged, and a state stored whole is what ends that

    def join(
        self,
        txid: str | None = None,
        *,
        writer: str,
        line: str = "main",
        writers: Sequence[str] | None = None,
        slices: Slices | None = None,
        baseline: Url | None = None,
        timeout_s: float | None = None,
    ) -> SliceTransaction:
        """Take part, as one of its writers, in the transaction that is open on a line.

        Parameters
        ----------
        txid : str, optional
            Which one; by default the next one that this process has not been in, as soon as it is begun. Passed over
            are those of other writers, and those whose owner is known to be dead.
        writer : str
            One of the names that it was begun with. Whoever joins again under a name, after a crash, goes on.
        writers : sequence of str, optional
            Without `txid`: wait for a transaction of exactly these, rather than of any that `writer` is among.
        slices : sequence of AffineMap, or function that returns it for a layout, optional
            As of ``begin``.
        baseline : path, optional
            As of ``begin``, with writers.
        timeout_s : float, optional
            How long to wait for it to be begun; for ever by default.

        Raises
        ------
        LagError
            If it was not begun in time; names whose transaction is open instead.
        FencedError
            If it has ended.
        ConflictError
            If another process, or another transaction of this one, uses the baseline as the same writer.
        InvalidInputError
            If `writer` is none of the writers of `txid`, or the baseline's place has files of somebody else.
        """
        from dcr_store.publish.joint import SliceTransaction
        from dcr_store.publish.slice_files import place_of
        from dcr_store.publish.waiting import awaited

        self._check_writable()
        check_line(line)
        place_of(baseline)  # before it waits, for an hour maybe
        log = self._catalog.log(line)
        wanted = None if writers is None else check_writers(writers)
        pending = awaited(log, writer, txid, self._joined.get((line, writer)), timeout_s, wanted)
        held, release = self._acquire_slice_baseline(line, writer, baseline)
        try:
            transaction = SliceTransaction(
                self._catalog, log, pending, writer, held, release, is_committer=False, slices=slices
            )
        except BaseException:
            release()
            raise
        self._joined[line, writer] = pending.txid
        return transaction

    def _acquire_slice_baseline(
        self, line: str, writer: str, baseline: Url | None
    ) -> tuple[SliceBaseline, Callable[[], None]]:
        """Return the baseline of one of several writers, and how to give it back."""
        from dcr_store.publish.slice_baseline import SliceBaseline
        from dcr_store.publish.slice_files import open_memory

        place = (line, writer)
        with self._lock:
            held = self._slice_baselines.pop(place, None)
        try:
            memory = open_memory(baseline, None if held is None else held.memory, *place)
        except BaseException:
            if held is not None:  # a place that cannot be is no reason to read all slices anew
                with self._lock:
                    self._slice_baselines.setdefault(place, held)
            raise
        if held is None or held.memory is not memory:
            held = SliceBaseline(self.chunk_elements, memory)
        kept = held

        def release() -> None:
            with self._lock:
                other = self._slice_baselines.setdefault(place, kept)
            if other is not kept:
                kept.memory.close()

        return held, release

    def _acquire_baseline(self, line: str, directory: Url | None) -> tuple[Baseline, Any]:
        from dcr_store.publish.baseline import Baseline

        if directory is not None:
            held = Baseline(directory, self.store_id, line, self.chunk_elements)
            return held, held.close
        with self._lock:
            kept = self._baselines.pop(line, None)
        if kept is not None and not kept.is_of_this_process:
            kept.close()
            kept = None
        held = kept or Baseline(None, self.store_id, line, self.chunk_elements)

        def release() -> None:
            with self._lock:
                other = self._baselines.setdefault(line, held)
            if other is not held:
                held.close()

        return held, release

    # ------------------------------------------------------------------ maintenance

    def anchor(
        self, version: str, *, executor: Executor | None = None, owner: str | None = None, takeover: bool = False
    ) -> EdgeInfo:
        """Store a version whole, so that reading it, and what follows it, needs nothing before it.

        Parameters
        ----------
        version : str
            ``line@number``, a line (its head), or a root.
        executor : Executor, optional
            Any of ``concurrent.futures``, or of a cluster: one task for each partition, which opens the store itself.
            By default a thread of this process, and all cores in it.
        owner : str, optional
            Who does this, the same for all restarts; by default this process.
        takeover : bool
            Take over from an owner that you know to be dead.

        Raises
        ------
        NotFoundError
            If there is no such version, or it has expired.
        ConflictError
            If another owner is at it.
        IntegrityError
            If the store does not hold what the version's digests say.
        """
        return self._add_edge(version, None, executor, owner, takeover=takeover)

    def anchor_if_due(
        self,
        line: str = "main",
        *,
        every: int | None = None,
        cost: float | None = None,
        executor: Executor | None = None,
        owner: str | None = None,
        takeover: bool = False,
    ) -> EdgeInfo | None:
        """Store the head of a line whole if that is due, for whoever looks after a store, as often as he likes.

        Parameters
        ----------
        every : int, optional
            It is due if at least so many versions lie between the head and the anchor from which its path begins.
        cost : float, optional
            Or if that path takes more than so many times the bytes of the anchor.
        executor, owner, takeover
            As of ``anchor``, whose errors these are.
        """
        from dcr_store.maintain.policy import due

        located = due(self._catalog, line, every=every, cost=cost)
        if located is None:
            return None
        return self.anchor(located.name, executor=executor, owner=owner, takeover=takeover)

    def fold(
        self,
        base: str,
        version: str,
        *,
        executor: Executor | None = None,
        owner: str | None = None,
        takeover: bool = False,
    ) -> EdgeInfo:
        """Store the deltas from `base` to `version` as one, for those who come from `base`.

        Parameters and errors are those of ``anchor``; `base` is an older version of the same line and tensors.
        """
        return self._add_edge(version, base, executor, owner, takeover=takeover)

    def expire(
        self,
        line: str = "main",
        *,
        keep_last: int = 1,
        keep_every: int | None = None,
        older_than_s: float | None = None,
        keep_tagged: bool = True,
        dry_run: bool = False,
        executor: Executor | None = None,
        owner: str | None = None,
        takeover: bool = False,
    ) -> Expiry:
        """Let versions of a line expire: they are not to be read any more, and ``gc`` may delete what only they need.

        The head is always kept, and so is what a pin, a group, another line or a work of maintenance needs. Where
        what lies before a version that is kept goes, that is stored whole, or as a fold, first.

        Parameters
        ----------
        keep_last : int
            Keep so many of the newest versions.
        keep_every : int, optional
            Keep those whose number is a multiple of it.
        older_than_s : float, optional
            Keep those that were committed less than so many seconds ago, by the object store's clock.
        keep_tagged : bool
            Keep those that have a tag.
        dry_run : bool
            Only say what would be done.
        executor, owner, takeover
            As of ``anchor``.

        Raises
        ------
        ConflictError
            If another expiry of the line is under way.
        StorageError
            If the store does not tell when it stored what, as a relay.
        """
        from dcr_store.maintain.retention import Keep, expire

        self._check_writable()
        keep = Keep(keep_last, keep_every, older_than_s, keep_tagged)
        return expire(self._place(), line, keep, dry_run=dry_run, executor=executor, owner=owner, takeover=takeover)

    def gc(self, *, grace_s: float = 86400, dry_run: bool = False) -> Collected:
        """Delete what expired or was aborted at least `grace_s` seconds ago; see ``maintain.collect``."""
        from dcr_store.maintain.collect import collect

        self._document.check_writable()
        return collect(self._catalog, grace_s=grace_s, dry_run=dry_run)

    def tag(self, version: str, name: str, message: str | None = None) -> Named:
        """Name a version: ``line@name`` is another way to say which; see ``maintain.marks``."""
        from dcr_store.maintain.marks import put_tag

        self._check_writable()
        return put_tag(self._catalog, self._catalog.resolve(version), name, message)

    def tags(self, line: str = "main") -> list[Named]:
        """Return the tags of a line, by name."""
        from dcr_store.maintain.marks import tags

        return tags(self._catalog, line)

    def delete_tag(self, line: str, name: str) -> None:
        """Take a tag away; ``NotFoundError`` if there is none."""
        from dcr_store.maintain.marks import delete_tag

        self._check_writable()
        delete_tag(self._catalog, line, name)

    def pin(self, version: str, name: str, *, until: datetime | None = None, message: str | None = None) -> Named:
        """Keep a version from expiring, until a time with a zone if one is given; see ``maintain.marks``."""
        from dcr_store.maintain.marks import put_pin

        self._check_writable()
        return put_pin(self._catalog, self._catalog.resolve(version), name, message, until)

    def pins(self) -> list[Named]:
        """Return all pins, by name."""
        from dcr_store.maintain.marks import pins

        return pins(self._catalog)

    def delete_pin(self, name: str) -> None:
        """Take a pin away; ``NotFoundError`` if there is none."""
        from dcr_store.maintain.marks import delete_pin

        self._check_writable()
        delete_pin(self._catalog, name)

    def fork(self, version: str, name: str) -> str:
        """Begin a line that goes on from a version and shares all up to it; return the version's name there.

        Raises
        ------
        ConflictError
            If there is another line of that name.
        NotFoundError
            If there is no such version, or it has expired.
        """
        from dcr_store.maintain.forks import fork

        self._check_writable()
        return fork(self._catalog, self._catalog.resolve(version), name).name

    def _check_writable(self) -> None:
        """Refuse what would add to a log, or name a version, in a store of a newer format, or in a copy."""
        self._document.check_writable()
        if self._document.is_copy and self._objects.size(DETACHED_KEY) is None:
            raise InvalidInputError(
                "the store is a copy, whose lines go on where its source's do; publish and maintain there",
                key=self.url,
                advice="if the source is gone for good, detach the copy and go on with it: dcr detach COPY",
            )

    # ------------------------------------------------------------------ exchange

    def copy_to(
        self,
        url: Url,
        *,
        lines: Iterable[str] | None = None,
        since: str | None = None,
        repair: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Copied:
        """Copy what is committed into a copy of this store, made if there is none; only what it lacks.

        The copy has the same records, versions, roots and tags. It takes no publishes until it is detached. Killed at
        any moment, it is a store with fewer versions, and the same call goes on. Groups and pins are not copied. The
        keys that are trusted here are those that are trusted there.

        Parameters
        ----------
        url : str or path
            An empty place, or a copy of this store.
        lines : iterable of str, optional
            All by default; of a fork also the line that it goes on from.
        since : str, optional
            A version: those before it are left out where the line is new in the copy. The first that is there is the
            first from this one on that is stored whole.
        repair : bool
            Also read all that the copy has of these lines, and put again what is missing or damaged there.
        storage_options : mapping, optional
            Of `url`.

        Raises
        ------
        ConflictError
            If a line has gone on in the copy by itself, or the copy was detached.
        InvalidInputError
            If there is another store at `url`, or no version from `since` on can be read without those before.
        IntegrityError, FormatError
            If something is damaged here; what counts on it was not put.
        """
        from dcr_store.exchange.copy_checks import check_copy
        from dcr_store.exchange.copying import asked, copy

        first = None if since is None else self._catalog.resolve(since)
        names = asked(self._catalog, None if lines is None else list(lines), first)
        try:
            target = _opened(url, storage_options, self._catalog.signing)
        except NotFoundError:
            data = copy_document(self._objects.get(STORE_KEY))
            target = _created(url, storage_options, data, self._catalog.signing)
        check_copy(self._catalog, target._catalog)
        target._document.check_writable()
        return copy(self._catalog, target._catalog, names, first, repair=repair)

    def export(
        self,
        first: str,
        last: str,
        directory: Url,
        *,
        format: str = "safetensors",
        encoding: str = "xor",
        checksum: str = "adler32",
        with_first: bool = True,
    ) -> Exported:
        """Write a range of versions into a directory, in a folder for each; again, only those that are not there.

        Parameters
        ----------
        first, last : str
            Versions of one line.
        format : {"safetensors", "slime"}
            Whole checkpoints, which share the files that do not change (``exchange.folders``); or delta directories
            as slime, miles and SGLang read them (``exchange.export_deltas``).
        encoding, checksum, with_first
            Of delta directories.
        """
        located = self._catalog.resolve(first), self._catalog.resolve(last)
        if format == "safetensors":
            from dcr_store.exchange.folders import export_folders

            return export_folders(self._catalog, *located, directory)
        if format != "slime":
            raise InvalidInputError("unknown format", key="format", expected="safetensors or slime", found=repr(format))
        from dcr_store.exchange.export_deltas import export_deltas

        return export_deltas(
            self._catalog, *located, directory, encoding=encoding, checksum=checksum, with_first=with_first
        )

    def import_series(
        self, directory: Url, line: str = "main", *, base: Url | None = None, at: int | None = None
    ) -> Imported:
        """Publish what a series of delta directories of slime, miles or SGLang has beyond the newest version of a line.

        Parameters
        ----------
        directory : path
            Holds ``weight_v000001``, …
        base : path, optional
            The checkpoint on which the first delta builds, where the line has no version yet.
        at : int, optional
            Which version of the series the newest version of the line is, where that was not imported.
        """
        from dcr_store.exchange.import_deltas import import_deltas

        self._check_writable()
        return import_deltas(self._catalog, self.begin, directory, check_line(line), base=base, at=at)

    def detach(self) -> list[str]:
        """Make this copy a store of its own, which can be published into; see ``exchange.detaching``."""
        from dcr_store.exchange.detaching import detach

        self._document.check_writable()
        return detach(self._catalog)

    def _info(self, located: Located) -> VersionInfo:
        return info_of(self._catalog.complete(located), is_kept=not self._catalog.is_expired(located))

    def _place(self) -> StorePlace:
        from dcr_store.versions.places import StorePlace

        url, options = self._opened or (self.url, None)
        return StorePlace(os.fspath(url), options, self._catalog)

    def _add_edge(
        self, version: str, base: str | None, executor: Executor | None, owner: str | None, *, takeover: bool
    ) -> EdgeInfo:
        from dcr_store.maintain.edges import EdgeInfo, add_edge

        self._check_writable()
        goal = self._catalog.resolve(version)
        start = None if base is None else self._catalog.resolve(base)
        found = add_edge(self._place(), goal, start, executor=executor, owner=owner, takeover=takeover)
        return EdgeInfo.of(goal, start, found)

    # ------------------------------------------------------------------ looking

    def lines(self) -> list[str]:
        """Return the names of the lines, sorted."""
        return self._catalog.lines()

    def log(self, line: str = "main", *, where: str | None = None, limit: int | None = None) -> list[VersionInfo]:
        """Return the versions of a line, oldest first; none for a store in which nothing has been published.

        Parameters
        ----------
        where : str, optional
            Which versions, by what the log tells of them: ``"step >= 100 and not reward < 0.5"``; see
            ``history.where``.
        limit : int, optional
            At most so many, the newest.

        Warns
        -----
        UserWarning
            If `where` asks for a name that no version of the line has.

        Raises
        ------
        NotFoundError
            If there are other lines, but not this one.
        InvalidInputError
            If `where` is no filter, or `limit` no number of 1 or more.
        """
        test = None
        if where is not None:
            from dcr_store.history.where import parse

            test = parse(where)
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise InvalidInputError("is no number of versions", key="limit", expected="1 or more", found=limit)
        log = self._catalog.log(line)
        if log.refresh().length == 0 and self.lines():
            self._catalog.fresh(line)
        newest_first = (self._info(Located(line, row)) for row in reversed(self._catalog.rows(line)))
        if test is None:
            return list(itertools.islice(newest_first, limit))[::-1]
        once, again = itertools.tee(newest_first)  # metadata that are long are read from their record: once
        found = list(itertools.islice(filter(test, once), limit))[::-1]
        for doubt in test.doubts(line, again):
            warnings.warn(doubt, stacklevel=2)
        return found

    def show(self, version: str) -> VersionDetail:
        """Return what a version consists of; of one that has expired what the log and its layout tell."""
        return detail_of(self._catalog, self._catalog.complete(self._catalog.resolve(version)))

    def read(
        self,
        version: str = "main",
        tensors: Iterable[str] | Mapping[str, Index | None] | None = None,
        *,
        framework: Literal["numpy", "torch"] = "numpy",
    ) -> dict[str, Any]:
        """Return the tensors of a version, whole, by name, or parts of them; see ``history.read``.

        ``read("main@17", {"w": (slice(0, 64), ...)})`` fetches no more than the chunks that hold these rows.
        """
        from dcr_store.history.read import read

        if framework not in ("numpy", "torch"):
            raise InvalidInputError("unknown framework", key="framework", expected="numpy or torch", found=framework)
        named = None if tensors is None else _names(tensors)
        return read(self._catalog, self._catalog.resolve(version), named, framework)

    def iter_states(
        self,
        line: str = "main",
        start: int = 0,
        stop: int | None = None,
        step: int = 1,
        *,
        tensors: Mapping[str, Index | None] | None = None,
        framework: Literal["numpy", "torch"] = "numpy",
    ) -> Iterator[State]:
        """Walk along a line, each version brought on from the one before; see ``history.walk``.

        ``for info, tensors in store.iter_states("main", step=10, tensors={"w": (slice(0, 64), ...)}): …``
        """
        from dcr_store.history.walk import iter_states

        return iter_states(self._catalog, line, start, stop, step, tensors, framework)

    def diff(self, a: str, b: str, *, n_rows: int = 5, only_counts: bool = False) -> Diff:
        """Compare two versions, tensor by tensor: how much changed, which way, how far; see ``history.changed``.

        Parameters
        ----------
        a, b : str
            The version before, and the one after; in any order, of any lines.
        n_rows : int
            How many of the rows that changed most to name of each tensor.
        only_counts : bool
            Do not look which way and how far values went: then neighbours are compared by the delta between them, and
            no anchor is read.

        Raises
        ------
        NotFoundError
            If there is no such version, or it has expired.
        IntegrityError
            If the store does not hold what its digests say.
        """
        from dcr_store.history.diff import diff

        located = self._catalog.resolve(a), self._catalog.resolve(b)
        return diff(self._catalog, *located, n_rows=n_rows, only_counts=only_counts)

    def blame(self, version: str, tensor: str, index: Index | None = None) -> Blame:
        """Say for each row of a tensor, or of a part of it, which version changed it last; see ``history.blame``.

        ``store.blame("main@17", "w", (slice(0, 64), ...))`` reads the deltas backwards until all rows are found.
        """
        from dcr_store.history.blame import blame

        return blame(self._catalog, self._catalog.resolve(version), tensor, index)

    def report(
        self, start: str | None = None, stop: str = "main", *, n_looked_into: int = 120, n_measured: int = 8
    ) -> Report:
        """Tell what a line shows from one version to another: rates, bytes, metrics, layers; see ``report.gather``.

        ``Path("report.html").write_text(store.report("main@100", "main@200").to_html())`` makes a page of it.
        """
        from dcr_store.report.gather import report

        return report(self._catalog, start, stop, n_looked_into=n_looked_into, n_measured=n_measured)

    def identify(self, path: Url, *, strict: bool = False) -> Identified:
        """Say which version a directory of safetensors, or one such file, holds; see ``history.identify``.

        Digests decide, or with `strict` every bit, compared with the version as it is read from the store.
        """
        from dcr_store.history.identify import identify

        return identify(self._catalog, path, strict=strict)

    def verify(
        self,
        version: str | None = None,
        deep: bool = False,
        *,
        depth: Literal["log", "objects", "replay"] | None = None,
        heads: Sequence[str] = (),
        executor: Executor | None = None,
        report: Url | None = None,
    ) -> VerifyReport:
        """Check the store, or what one version needs; problems are listed, not raised.

        Parameters
        ----------
        version : str, optional
            All lines and versions by default.
        deep : bool
            The depth ``replay``.
        depth : {"log", "objects", "replay"}
            ``log``: the logs and what is derived from them, groups, names, manifests. ``objects``, which is the
            default: also every object by its SHA-256, and the roots. ``replay``: also the bits, chunk by chunk.
        heads : sequence of str
            Stamps ``line@number#root`` of versions that this store had once: without one of them it was set back, or
            rewritten.
        executor : Executor, optional
            Any of ``concurrent.futures``, or of a cluster, whose tasks open the store themselves. By default a thread
            of this process, and all cores in it.
        report : path, optional
            A file for what was found, in JSON. A run that is stopped leaves there what it found sound, and the same
            call goes on from it.

        Raises
        ------
        NotFoundError
            If there is no such version, or it has expired.
        InvalidInputError
            If an argument cannot be used, or the file is the report of something else.
        """
        from dcr_store.history.report_file import ReportFile, scope_of
        from dcr_store.history.verify import verify

        if deep and depth not in (None, "replay"):
            raise InvalidInputError("deep is a depth of its own", key="depth", expected="replay", found=depth)
        chosen, file = "replay" if deep else depth or "objects", None
        if report is not None:
            trusted = self._catalog.signing.trusted
            keys = None if trusted is None else trusted.public_keys
            scope = scope_of(self.url, self.store_id, self._catalog.store_sha256, chosen, version, heads, keys)
            file = ReportFile(report, scope)
        return verify(self._place(), version, depth=chosen, heads=heads, executor=executor, report_file=file)

    def compare_directory(self, version: str, directory: Url) -> VerifyReport:
        """Compare a directory with a version, bit for bit; reads only."""
        from dcr_store.history.compare import compare_directory

        return compare_directory(self._catalog, self._catalog.resolve(version), directory)

    # ------------------------------------------------------------------ receiving

    @overload
    def checkout(
        self,
        version: str,
        directory: Url,
        *,
        force: bool = False,
        format: Literal["published"] = "published",
        tensors: None = None,
    ) -> PullResult: ...
    @overload
    def checkout(self, version: str, directory: Url, *, force: bool = False, format: Literal["dcp"]) -> Written: ...
    @overload
    def checkout(
        self,
        version: str,
        directory: Url,
        *,
        force: bool = False,
        tensors: Iterable[str] | Mapping[str, Index | None],
    ) -> Written: ...
    def checkout(
        self,
        version: str,
        directory: Url,
        *,
        force: bool = False,
        format: str = "published",
        tensors: Iterable[str] | Mapping[str, Index | None] | None = None,
    ) -> PullResult | Written:
        """Write a version's checkpoint, or some of its tensors, into a directory.

        Parameters
        ----------
        force : bool
            Also where the directory holds something that no version accounts for; of ``dcp`` and `tensors`, where a
            checkout of the same kind is, which is replaced.
        format : {"published", "dcp"}
            Byte for byte as it was published (see ``pull``), or a folder that ``torch.distributed.checkpoint`` loads,
            in which tied names are tensors of their own; that needs torch.
        tensors : iterable of str, or mapping of str to index, optional
            Only these, or these parts of them, as ``model.safetensors`` in a new directory; see
            ``history.checkout_tensors``. No more is fetched than the chunks that hold them.
        """
        if format not in ("published", "dcp"):
            raise InvalidInputError("unknown format", key="format", expected="published or dcp", found=repr(format))
        if tensors is not None:
            from dcr_store.history.checkout_tensors import checkout_tensors

            if format != "published":
                raise InvalidInputError("is for whole versions", key="format", expected="no tensors", found=format)
            located = self._catalog.resolve(version)
            return checkout_tensors(self._catalog, located, directory, _names(tensors), force=force)
        if format == "dcp":
            from dcr_store.history.checkout_dcp import checkout_dcp

            return checkout_dcp(self._catalog, self._catalog.resolve(version), directory, force=force)
        return self.pull(directory, version, force=force)

    @overload
    def pull(
        self, directory: Url, version: str | None = None, *, mode: Literal["in-place"] = "in-place", force: bool = False
    ) -> PullResult: ...
    @overload
    def pull(
        self, directory: Url, version: str | None = None, *, mode: Literal["copy"], keep: int = 1, force: bool = False
    ) -> CopyResult: ...
    def pull(
        self,
        directory: Url,
        version: str | None = None,
        *,
        mode: str = "in-place",
        keep: int | None = None,
        force: bool = False,
    ) -> PullResult | CopyResult:
        """Bring a directory to a version (``main``'s head by default).

        Parameters
        ----------
        mode : {"in-place", "copy"}
            Write the directory's own files (``receive.pull``), or build the version in a directory of its own inside
            and let the link ``current`` lead to it (``receive.copying``).
        keep : int, optional
            With ``copy``: how many of the versions that were current before are kept, 1 by default.
        force : bool
            Also where the directory holds something that no version accounts for.
        """
        version = "main" if version is None else version
        if mode == "copy":
            from dcr_store.receive.copying import check_keep, pull_copy

            keep = check_keep(1 if keep is None else keep)
            return pull_copy(self._catalog, self._catalog.resolve(version), directory, keep=keep, force=force)
        if mode != "in-place":
            raise InvalidInputError("unknown mode", key="mode", expected="in-place or copy", found=repr(mode))
        if keep is not None:
            raise InvalidInputError("keeps no other versions", key="keep", expected="mode copy", found=repr(mode))
        from dcr_store.receive.pull import pull

        return pull(self._catalog, self._catalog.resolve(version), directory, force=force)

    def load_into(self, target: object, version: str = "main") -> PullResult:
        """Bring live tensors to a version, in place, whatever they hold; only what differs is fetched and written.

        Parameters
        ----------
        target : mapping of str to ndarray or torch.Tensor, or torch.nn.Module
            On any device; of a module, what its ``state_dict()`` has. Must have exactly the version's tensors.
        version : str

        Raises
        ------
        InvalidInputError
            If the tensors are not the version's; names them. Nothing was written.
        IntegrityError
            If the store is damaged; names the key. Calling again heals.

        See Also
        --------
        dcr_store.receive.memory_bringer.StateDictBringer : for going on from version to version without looking at
            all tensors each time.
        """
        from dcr_store.receive.memory_bringer import StateDictBringer

        return StateDictBringer(target).load(self._catalog, self._catalog.resolve(version))

    def patches(
        self, base: str, version: str = "main", *, state: object = None, framework: Literal["numpy", "torch"] = "numpy"
    ) -> Iterator[TensorPatch]:
        """Iterate over what changes from one version to another, for engines with a patch API; see ``receive.patches``.

        Parameters
        ----------
        base, version : str
            In any order, of any lines.
        state : mapping of str to ndarray or torch.Tensor, or torch.nn.Module, optional
            Tensors that hold `base`; without them the history since the anchor is read.
        framework : {"numpy", "torch"}
            Of indices and values.

        Returns
        -------
        iterator of TensorPatch
            One for each tensor that changes: indices and new values, or the whole tensor where that is less.
        """
        from dcr_store.receive.patches import patches

        if framework not in ("numpy", "torch"):
            raise InvalidInputError("unknown framework", key="framework", expected="numpy or torch", found=framework)
        base_located, goal = self._catalog.resolve(base), self._catalog.resolve(version)
        return patches(self._catalog, base_located, goal, state=state, framework=framework)

    def receiver(
        self,
        target: object,
        *,
        group: str | None = None,
        name: str | None = None,
        line: str | None = None,
        spool: Url | None = None,
        spool_nbytes: int | None = None,
    ) -> Receiver:
        """Return a receiver, which keeps a target at the newest version and fetches ahead; see ``Receiver``.

        Parameters
        ----------
        target : path, mapping of str to tensor, torch.nn.Module, or Bringer
            A directory of safetensors, or live tensors, in place; or what else can be kept at a version.
        group, name : str, optional
            The group whose decisions it follows, and its name there.
        line : str, optional
            By default the group's, or ``main``. May have no version yet.
        spool : path, optional
            Directory for what is fetched before it is needed; by default in the target's directory, or a temporary
            one. Several receivers may share it.
        spool_nbytes : int, optional
            The most bytes to keep there, by default a tenth of the disk, and 16 GiB at least.

        Raises
        ------
        InvalidInputError
            If an argument cannot be used.
        NotFoundError
            If there is no such group.
        """
        from dcr_store.receive.receiver import open_receiver

        return open_receiver(
            self._catalog,
            target,
            group=group,
            name=name,
            line=line,
            spool=spool,
            spool_nbytes=spool_nbytes,
        )

    def async_receiver(
        self,
        target: object,
        *,
        group: str | None = None,
        name: str | None = None,
        line: str | None = None,
        spool: Url | None = None,
        spool_nbytes: int | None = None,
    ) -> AsyncReceiver:
        """Return the asyncio twin of ``receiver``."""
        from dcr_store.receive.aio import AsyncReceiver

        receiver = self.receiver(target, group=group, name=name, line=line, spool=spool, spool_nbytes=spool_nbytes)
        return AsyncReceiver(receiver)

    # ------------------------------------------------------------------ groups

    def create_group(
        self,
        name: str,
        expected: Iterable[str] = (),
        *,
        line: str = "main",
        admission: Literal["expected", "anyone"] = "expected",
        proposing: Literal["newest", "manual"] = "newest",
        drop_after_s: int | None = None,
    ) -> Group:
        """Create a group: receivers that change their version together.

        Parameters
        ----------
        name : str
        expected : iterable of str
            Names of receivers without which nothing is promoted, until each has come once. One at least, unless
            `admission` is ``anyone``.
        line : str
            The line that it follows; may not have a version yet.
        admission : {"expected", "anyone"}
            Who may come by itself.
        proposing : {"newest", "manual"}
            Whether members propose the newest version by themselves.
        drop_after_s : int, optional
            After how many seconds members that have prepared, or applied, a version drop one that has not.

        Raises
        ------
        ConflictError
            If there is a group of this name.
        InvalidInputError
            If an argument cannot be used, or nobody could ever come.
        """
        from dcr_store.receive.group import create_group

        self._document.check_writable()
        return create_group(
            self._catalog,
            name,
            expected,
            line=line,
            admission=admission,
            proposing=proposing,
            drop_after_s=drop_after_s,
        )

    def group(self, name: str) -> Group:
        """Return a group; ``NotFoundError`` if there is none of this name."""
        from dcr_store.receive.group import Group

        return Group(self._catalog, name)

    def groups(self) -> list[str]:
        """Return the names of the groups, sorted."""
        from dcr_store.log.group import group_names

        return group_names(self._objects)

    def status(self) -> Status:
        """Return where all lines and groups are, and what each member is doing."""
        from dcr_store.receive.status import status

        return status(self._catalog)

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Wait until the baselines of what was committed have advanced; remove temporary ones, unlock the others.

        The store may be used afterwards: what it needs is made anew, the baseline read from the store again, and to be
        closed again. Transactions that are open are not ended; end them before.

        Raises
        ------
        BaseException
            What an advance met that nobody expects, such as ``MemoryError``. The version is committed, the other
            baselines are waited for, and that one is mended when it is used next.
        """
        with self._lock:
            kept, self._baselines = self._baselines, {}
            used = list(self._used)
            of_slices, self._slice_baselines = self._slice_baselines, {}
        for held in of_slices.values():
            held.memory.close()
        for baseline in kept.values():
            baseline.close()
        with contextlib.ExitStack() as stack:
            for baseline in used:
                stack.callback(baseline.wait)  # each, also where one raises

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _names(tensors: Iterable[str] | Mapping[str, Index | None]) -> Iterable[str] | Mapping[str, Index | None]:
    """Return names, or names with indices, as given; ``InvalidInputError`` if they are none, as one name is."""
    if isinstance(tensors, str) or not isinstance(tensors, Iterable):
        raise InvalidInputError("is no list of names", key="tensors", expected="names in a list", found=repr(tensors))
    return tensors
