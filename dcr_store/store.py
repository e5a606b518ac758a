"""The facade: ``create`` and ``open`` a store, publish, read, pull, ask. Wires the floors below, adds nothing to them.

Refuses backends on which put-if-absent is not atomic, and stores of another format version.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from dcr_store.errors import ConflictError, IntegrityError, InvalidInputError, NotFoundError, StorageError
from dcr_store.format import canonical
from dcr_store.format.documents import CODECS, StoreDocument
from dcr_store.format.fields import now
from dcr_store.format.names import STORE_KEY, VersionRef, check_line, check_writers, layout_key, new_txid, version_name
from dcr_store.log.fold import LineState
from dcr_store.objects.open import open_objects
from dcr_store.targets.own_directories import refuse_inside_store
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.info import VersionDetail, VersionInfo, detail_of, info_of

if TYPE_CHECKING:
    from dcr_store.history.checkout_dcp import DcpResult
    from dcr_store.history.diff import Diff
    from dcr_store.history.report import VerifyReport
    from dcr_store.layout.layout import Layout
    from dcr_store.log.fold import OpenTransaction, VersionRow
    from dcr_store.log.line import LineLog
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

Url = str | os.PathLike[str]


def create(
    url: Url,
    *,
    codec: str = "dcr.delta",
    chunk_elements: int = 1 << 20,
    storage_options: Mapping[str, Any] | None = None,
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
    from dcr_store.objects.probe import probe

    objects = open_objects(url, storage_options)
    if objects.size(STORE_KEY) is not None:
        raise ConflictError("there is a store already; open it, or choose another place", key=objects.url)
    _check_place(objects)
    try:
        probe(objects)
    except StorageError as error:
        raise StorageError(f"cannot hold a store: {error.args[0]}", key=objects.url) from error
    document = StoreDocument(new_txid(), codec, chunk_elements, now())
    if not objects.put_if_absent(STORE_KEY, document.to_bytes()):
        raise ConflictError("somebody else has just created a store there; open it", key=objects.url)
    return Store(objects, document, canonical.sha256(document.to_bytes()))


def open(url: Url, *, storage_options: Mapping[str, Any] | None = None) -> Store:
    """Open a store, by its place, by relays (``http://host:port``), or by several ways separated by commas.

    Raises
    ------
    NotFoundError
        If there is none.
    FormatError
        If it is of another format version, or no store.
    """
    objects = open_objects(url, storage_options)
    try:
        data = objects.get(STORE_KEY)
    except NotFoundError as error:
        raise NotFoundError("there is no store here; create one with: dcr init STORE", key=objects.url) from error
    return Store(objects, StoreDocument.from_bytes(data), canonical.sha256(data))


def _check_place(objects: ObjectStore) -> None:
    """Refuse a directory inside of a store, the remains of a store, and a checkpoint."""
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
    if weights := [name for name in names if name.endswith(".safetensors")]:
        raise InvalidInputError(
            "this is a checkpoint, not a place for a store; were the arguments swapped?",
            key=objects.url,
            found=weights[0],
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

    def __init__(self, objects: ObjectStore, document: StoreDocument, store_sha256: str) -> None:
        self._objects = objects
        self._document = document
        self._catalog = Catalog(objects, document, store_sha256)
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
            still advances to what was committed last, that is waited for.
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
            With writers: dtype and shape of each tensor of the version. By default those of the head, which also stay,
            in their order and untied where they were, if these are the same.
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
            for an advance after its last commit.
        LagError
            If the version would be more than `max_ahead` ahead of a group: wait, and begin again.
        InvalidInputError
            If a name or the metadata cannot be stored.
        """
        from dcr_store.publish.flow import Flow
        from dcr_store.publish.opening import abandon, begin
        from dcr_store.publish.transaction import Transaction

        intent = self._intent(line, base, message, metadata, owner, takeover)
        if writers is None:
            given = {"writer": writer, "tensors": tensors, "slices": slices, "aliases": aliases}
            if lone := [name for name, value in given.items() if value is not None]:
                raise InvalidInputError("is for several writers alone", key=lone[0], expected="writers too")
        elif baseline is not None:
            raise InvalidInputError(
                "writers keep what they own in memory; they have no baseline directory", key="baseline", found=baseline
            )
        flow = Flow(self._catalog, line, ahead_of)
        if (max_ahead is None) == bool(flow.groups):
            raise InvalidInputError(
                "max_ahead and ahead_of go together",
                key="max_ahead",
                expected="both or neither",
                found=f"max_ahead {max_ahead}, ahead_of {', '.join(flow.groups) or 'no group'}",
            )
        if max_ahead is not None and (isinstance(max_ahead, bool) or not isinstance(max_ahead, int) or max_ahead < 1):
            raise InvalidInputError("is no distance", key="max_ahead", expected="1 or more", found=max_ahead)
        flow.require_followers()

        def check(state: LineState) -> None:
            _check_base(state, base)
            if max_ahead is not None:
                flow.require_near(state.next_version, max_ahead)

        if writers is not None:
            return self._begin_joint(line, intent, check, check_writers(writers), writer, tensors, aliases, slices)
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
            except Exception as error:
                abandon(log, pending, f"could not start: {error}"[:500])
                raise
        except BaseException:
            release()
            raise

    def _intent(
        self,
        line: str,
        base: str | None,
        message: str | None,
        metadata: Mapping[str, Any] | None,
        owner: str | None,
        takeover: bool,
    ) -> Intent:
        """Return what a caller of begin wants; refuses what cannot be stored."""
        from dcr_store.publish.opening import Intent
        from dcr_store.publish.owner import default_owner

        self._document.check_writable()
        check_line(line)
        if base is not None:
            VersionRef.parse(base)
        if message is not None and not isinstance(message, str):
            raise InvalidInputError(
                "the message is no text", key="message", expected="text", found=type(message).__name__
            )
        if owner is not None and not (isinstance(owner, str) and owner):
            raise InvalidInputError("the owner is no text", key="owner", expected="text, not empty", found=repr(owner))
        if metadata is not None and not isinstance(metadata, Mapping):
            raise InvalidInputError("the metadata is no mapping", key="metadata", found=type(metadata).__name__)
        # As it will come back, so that a resumed transaction compares equal; refuses what JSON cannot say.
        told = _told(metadata or {})
        return Intent(owner or default_owner(), message, told, base, takeover)

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
    ) -> SliceTransaction:
        from dcr_store.layout.layout import LayoutBuilder
        from dcr_store.publish.opening import abandon, begin

        mine = writers[0] if writer is None else writer
        if mine not in writers:  # before anything is begun, or taken up, in its name
            raise InvalidInputError("is none of the writers", key="writer", expected=list(writers), found=mine)
        log = self._catalog.log(line)
        head = log.refresh().head
        if tensors is not None:
            builder = LayoutBuilder()
            for name, (dtype, shape) in tensors.items():
                builder.add(name, dtype, tuple(shape))
            for alias, of in (aliases or {}).items():
                builder.add_alias(alias, of)
            layout = builder.build()
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

        pending = begin(log, replace(intent, writers=writers, layout=sha256), check_layout)
        try:
            transaction = self._slice_transaction(log, pending, mine, slices, is_committer=True)
            self._joined[line, mine] = pending.txid
            return transaction
        except Exception as error:
            abandon(log, pending, f"could not start: {error}"[:500])
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
        timeout_s: float | None = None,
    ) -> SliceTransaction:
        """Take part, as one of its writers, in the transaction that is open on a line.

        Parameters
        ----------
        txid : str, optional
            Which one; by default the next one that this process has not been in, as soon as it is begun.
        writer : str
            One of the names that it was begun with. Whoever joins again under a name, after a crash, goes on.
        writers : sequence of str, optional
            Without `txid`: wait for a transaction of exactly these, whose owner is not known to be dead.
        slices : sequence of AffineMap, or function that returns it for a layout, optional
            As of ``begin``.
        timeout_s : float, optional
            How long to wait for it to be begun.

        Raises
        ------
        LagError
            If it was not begun in time.
        FencedError
            If it has ended.
        InvalidInputError
            If `writer` is none of its writers.
        """
        from dcr_store.publish.joint import awaited

        self._document.check_writable()
        check_line(line)
        log = self._catalog.log(line)
        wanted = None if writers is None else check_writers(writers)
        pending = awaited(log, txid, self._joined.get((line, writer)), timeout_s, wanted)
        transaction = self._slice_transaction(log, pending, writer, slices, is_committer=False)
        self._joined[line, writer] = pending.txid
        return transaction

    def _slice_transaction(
        self,
        log: LineLog,
        pending: OpenTransaction,
        writer: str,
        slices: Slices | None,
        *,
        is_committer: bool,
    ) -> SliceTransaction:
        from dcr_store.publish.joint import SliceTransaction
        from dcr_store.publish.slice_baseline import SliceBaseline

        place = (log.line, writer)
        with self._lock:
            held = self._slice_baselines.pop(place, None)
        held = held or SliceBaseline(self.chunk_elements)

        def release() -> None:
            with self._lock:
                self._slice_baselines.setdefault(place, held)

        try:
            return SliceTransaction(
                self._catalog, log, pending, writer, held, release, is_committer=is_committer, slices=slices
            )
        except BaseException:
            release()
            raise

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

    # ------------------------------------------------------------------ looking

    def lines(self) -> list[str]:
        """Return the names of the lines, sorted."""
        return self._catalog.lines()

    def log(self, line: str = "main") -> list[VersionInfo]:
        """Return the versions of a line, oldest first; none for a store in which nothing has been published.

        Raises
        ------
        NotFoundError
            If there are other lines, but not this one.
        """
        log = self._catalog.log(line)
        if log.refresh().length == 0 and self.lines():
            self._catalog.fresh(line)
        return [info_of(Located(line, log.complete(row))) for row in log.rows()]

    def show(self, version: str) -> VersionDetail:
        """Return what a version consists of."""
        located = self._catalog.resolve(version)
        row = self._catalog.log(located.line).complete(located.row)
        return detail_of(self._catalog, Located(located.line, row))

    def read(
        self,
        version: str = "main",
        tensors: Iterable[str] | None = None,
        *,
        framework: Literal["numpy", "torch"] = "numpy",
    ) -> dict[str, Any]:
        """Return the tensors of a version, whole or by name; see ``history.read``."""
        from dcr_store.history.read import read

        if framework not in ("numpy", "torch"):
            raise InvalidInputError("unknown framework", key="framework", expected="numpy or torch", found=framework)
        if isinstance(tensors, str) or not (tensors is None or isinstance(tensors, Iterable)):
            raise InvalidInputError(
                "is no list of names", key="tensors", expected="names in a list", found=repr(tensors)
            )
        return read(self._catalog, self._catalog.resolve(version), tensors, framework)

    def diff(self, a: str, b: str) -> Diff:
        """Compare two versions, tensor by tensor."""
        from dcr_store.history.diff import diff

        return diff(self._catalog, self._catalog.resolve(a), self._catalog.resolve(b))

    def verify(self, version: str | None = None, deep: bool = False) -> VerifyReport:
        """Check the store, or what one version needs; problems are listed, not raised.

        Parameters
        ----------
        version : str, optional
            All lines and versions by default.
        deep : bool
            Decode and replay every version too, and compare chunk digests and roots.
        """
        from dcr_store.history.verify import verify

        return verify(self._catalog, version, deep=deep)

    def compare_directory(self, version: str, directory: Url) -> VerifyReport:
        """Compare a directory with a version, bit for bit; reads only."""
        from dcr_store.history.compare import compare_directory

        return compare_directory(self._catalog, self._catalog.resolve(version), directory)

    # ------------------------------------------------------------------ receiving

    @overload
    def checkout(
        self, version: str, directory: Url, *, force: bool = False, format: Literal["published"] = "published"
    ) -> PullResult: ...
    @overload
    def checkout(self, version: str, directory: Url, *, force: bool = False, format: Literal["dcp"]) -> DcpResult: ...
    def checkout(
        self, version: str, directory: Url, *, force: bool = False, format: str = "published"
    ) -> PullResult | DcpResult:
        """Write a version's checkpoint into a directory.

        Parameters
        ----------
        force : bool
            Also where the directory holds something that no version accounts for; of ``dcp``, where a distributed
            checkpoint is, which is replaced.
        format : {"published", "dcp"}
            Byte for byte as it was published (see ``pull``), or a folder that ``torch.distributed.checkpoint`` loads,
            in which tied names are tensors of their own; that needs torch.
        """
        if format == "dcp":
            from dcr_store.history.checkout_dcp import checkout_dcp

            return checkout_dcp(self._catalog, self._catalog.resolve(version), directory, force=force)
        if format != "published":
            raise InvalidInputError("unknown format", key="format", expected="published or dcp", found=repr(format))
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
            self._objects,
            self._document,
            self._catalog.store_sha256,
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
        """Wait until the baselines of what was committed have advanced; remove temporary ones.

        Raises
        ------
        BaseException
            What an advance met that nobody expects, such as ``MemoryError``. The version is committed, the other
            baselines are waited for, and that one is mended when it is used next.
        """
        with self._lock:
            kept, self._baselines = self._baselines, {}
            used = list(self._used)
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


def _told(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata as it will come back; ``InvalidInputError`` names the key whose value cannot."""
    try:
        data = canonical.encode(dict(metadata), canonical.MAX_METADATA_DEPTH)
    except InvalidInputError as error:
        for name, value in metadata.items():
            try:
                canonical.encode({name: value}, canonical.MAX_METADATA_DEPTH)
            except InvalidInputError as its:
                raise InvalidInputError(str(its.args[0]), key=f"metadata {name!r:.80}") from error
        raise
    told: dict[str, Any] = canonical.decode(data, "metadata")
    return told


def _check_base(state: LineState, base: str | None) -> None:
    """Refuse to begin on a head other than `base`."""
    if base is None:
        return
    ref, head = VersionRef.parse(base), state.head
    is_head = head is not None and (
        (ref.number is not None and (ref.line, ref.number) == (state.line, head.version))
        or (ref.root_prefix is not None and head.root.startswith(ref.root_prefix))
        or (ref.number is None and ref.line == state.line)
    )
    if not is_head:
        raise ConflictError(
            f"the head of line {state.line} is not the base you named; look at what was published and begin again",
            key=state.line,
            expected=base,
            found="no version" if head is None else f"{version_name(state.line, head.version)} {head.root[:16]}",
        )
