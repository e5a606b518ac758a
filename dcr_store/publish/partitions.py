"""One writer's partitions: collect encoded chunks, assemble shards, upload them while encoding goes on, journal, seal.

Bounded memory: open partitions hold their encoded chunks (spooled to a temporary file where tensors come in any
order), and so many bytes are being uploaded (``publish.uploads``). What an earlier incarnation of the same transaction
stored is recognised by its SHA-256 and not uploaded again; a writer that is bound by it is refused other bits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from dcr_store import events
from dcr_store.errors import ConflictError
from dcr_store.format.documents import KINDS, SPACES, Array, JournalEntry, ObjectRef, Partition, Seal, SealRef
from dcr_store.format.names import TransactionKeys
from dcr_store.layout.dtypes import width
from dcr_store.payload import arrays, contributions, shard
from dcr_store.payload.contributions import Rows
from dcr_store.ports import ObjectStore
from dcr_store.publish.journaled import Durable, Journaled
from dcr_store.publish.spool import ChunkSpool
from dcr_store.publish.uploads import Uploads

PARTITION_NBYTES: Final = 64 << 20
MAX_PARTITION_CHUNKS: Final = 256  # with tiny chunks the index would outgrow them
JOURNAL_FIRST_PARTITIONS: Final = 1
JOURNAL_PARTITIONS: Final = 8
JOURNAL_INTERVAL_S: Final = 1.0


@dataclass(slots=True)
class _Open:
    """A partition that still waits for chunks."""

    n_seen: int = 0
    chunks: dict[int, bytes | None] = field(default_factory=dict)


class PartitionWriter:
    """The mask arrays of one incarnation of one writer.

    Parameters
    ----------
    durable : mapping
        (array, index, sha256) → partition entry of earlier incarnations of the same transaction.
    spool : ChunkSpool or None
        Where encoded chunks wait; None keeps them in memory.
    keep : bool
        Whether they stay in the spool after their partition was stored.
    bound : Journaled, optional
        What binds this incarnation, if anything: other bits than those that were journaled are then refused.
    """

    def __init__(
        self,
        objects: ObjectStore,
        keys: TransactionKeys,
        writer: str,
        incarnation: str,
        attempt: int,
        codec: str,
        chunk_elements: int,
        durable: Durable,
        spool: ChunkSpool | None,
        *,
        keep: bool = True,
        bound: Journaled | None = None,
    ) -> None:
        self.objects, self.keys = objects, keys
        self.writer, self.incarnation, self.attempt = writer, incarnation, attempt
        self.codec, self.chunk_elements, self.durable, self.spool = codec, chunk_elements, durable, spool
        self._keep, self._bound = keep, bound
        self._open: dict[tuple[str, int], _Open] = {}
        self._arrays: set[str] = set()
        self._uploads = Uploads()
        self._lock = threading.Lock()
        self._sealed: list[Partition] = []
        self._unjournaled: list[Partition] = []
        self._journal: list[ObjectRef] = []
        self._objects: dict[str, ObjectRef] = {}
        self._seal: Seal | None = None
        self._doubtful: tuple[ObjectRef, JournalEntry] | None = None  # an entry whose put failed: it may be there
        self._journaled_at = time.monotonic()
        self._is_ending = False

    def chunks_per_partition(self, space: str) -> int:
        """Return how many chunks a partition of `space` holds."""
        return min(MAX_PARTITION_CHUNKS, max(1, PARTITION_NBYTES // (self.chunk_elements * width(space))))

    def add(self, space: str, chunk: int, data: bytes | None, n_chunks: int | None) -> None:
        """Take one chunk of the mask, each exactly once, in any order; not from several threads at once.

        Parameters
        ----------
        data : bytes or None
            The encoded mask; None where nothing changed.
        n_chunks : int or None
            Number of chunks of the space; None while it is not known.
        """
        per = self.chunks_per_partition(space)
        index = chunk // per
        n_expected = per if n_chunks is None else min(per, n_chunks - index * per)
        self.add_part(f"{space}/mask", chunk, data, n_expected)

    def add_part(self, array: str, chunk: int, data: bytes | None, n_expected: int) -> None:
        """Take one chunk of an array, as ``add`` does.

        Parameters
        ----------
        n_expected : int
            How many chunks come of its partition; the partition is stored with the last one.
        """
        per = self.chunks_per_partition(array.partition("/")[0])
        index, place = divmod(chunk, per)
        part = self._open.setdefault((array, index), _Open())
        part.n_seen += 1
        if data is not None:
            if self.spool is not None:
                self.spool.put(_place(array), chunk, data)
            part.chunks[place] = None if self.spool is not None else data
        if part.n_seen == n_expected:
            self._store(array, index)

    def _store(self, array: str, index: int) -> None:
        """Assemble a partition and hand it to the uploaders; waits while too much is in flight."""
        part = self._open.pop((array, index))
        if not part.chunks:
            return
        blob = self._assembled(array, index, part.chunks)
        self._arrays.add(array)
        self._uploads.start(len(blob), self._upload, array, index, blob, len(part.chunks))

    def _assembled(self, array: str, index: int, encoded: Mapping[int, bytes | None]) -> bytes:
        per = self.chunks_per_partition(array.partition("/")[0])
        chunks = {}
        for place in sorted(encoded):
            data = encoded[place]
            if data is None and self.spool is not None:
                find = self.spool.get if self._keep else self.spool.pop
                data = find(_place(array), index * per + place)
            assert data is not None
            chunks[place] = data
        return shard.assemble(chunks, per)

    def _upload(self, array: str, index: int, blob: bytes, n_chunks: int) -> None:
        """Store a partition unless an earlier incarnation did; runs in an uploader's thread."""
        key = self.keys.partition(self.writer, self.incarnation, array, index)
        ref = ObjectRef.of(key, blob)
        self._require_bound(key, array, index, ref.sha256)
        partition = self.durable.get((array, index, ref.sha256))
        if partition is None:
            events.reached("publish.partition.before", key)
            self.objects.put(key, blob)
            events.reached("publish.partition.stored", key)
            partition = Partition(array, index, self.incarnation, len(blob), ref.sha256, n_chunks)
        with self._lock:
            self._sealed.append(partition)
            self._unjournaled.append(partition)
            # The first one at once, unless the seal comes next: receivers can begin.
            n_wanted = JOURNAL_PARTITIONS if self._journal or self._is_ending else JOURNAL_FIRST_PARTITIONS
            due = time.monotonic() - self._journaled_at >= JOURNAL_INTERVAL_S
            if due or len(self._unjournaled) >= n_wanted:
                self._journal_now(None)

    def _require_bound(self, key: str, array: str, index: int, found: str | None) -> None:
        """Refuse a partition, or that there is none, if any earlier incarnation said something else."""
        if self._bound is None:
            return
        named = self._bound.named.get((array, index))
        is_new = named is None and (found is None or not self._bound.is_sealed)
        if not is_new and named != {found}:
            raise ConflictError(
                f"writer {self.writer} has other bits than it stored before in this transaction; give the same "
                "weights again, or abort and begin again",
                key=key,
                expected=" and ".join(sorted(named)) if named else "nothing changed there",
                found=found or "nothing changed there",
            )

    def _journal_now(self, seal: Seal | None) -> ObjectRef:
        """Put a journal entry of what became durable since the last one; the caller holds the lock."""
        if self._doubtful is not None:
            self._put_entry(*self._doubtful)  # no key has two contents: whoever has seen it looks no more
            if seal is not None:
                seal = self._seal = replace(seal, journal=tuple(self._journal))
        named = sorted(self._unjournaled, key=lambda item: (item.array, item.index))
        entry = JournalEntry(
            self.keys.line,
            self.keys.txid,
            self.attempt,
            self.writer,
            self.incarnation,
            len(self._journal),
            self._journal[-1].sha256 if self._journal else None,
            tuple(named),
            seal,
        )
        ref = ObjectRef.of(self.keys.journal(self.writer, self.incarnation, entry.seq), entry.to_bytes())
        self._doubtful = ref, entry
        self._put_entry(ref, entry)
        return ref

    def _put_entry(self, ref: ObjectRef, entry: JournalEntry) -> None:
        # A crash just before: the partitions are stored but not known, and are stored again; just after: recognised.
        events.reached("publish.journal.before", ref.key)
        self.objects.put(ref.key, entry.to_bytes())
        events.reached("publish.journal.stored", ref.key)
        self._doubtful = None
        self._journal.append(ref)
        self._unjournaled = [item for item in self._unjournaled if item not in entry.partitions]
        self._journaled_at = time.monotonic()

    def take(self, partitions: Iterable[Partition]) -> None:
        """Take partitions that are stored already, by others in the name of this incarnation or an earlier one."""
        with self._lock:
            for partition in partitions:
                self._arrays.add(partition.array)
                self._sealed.append(partition)
                self._unjournaled.append(partition)
            due = time.monotonic() - self._journaled_at >= JOURNAL_INTERVAL_S
            if self._unjournaled and (due or len(self._unjournaled) >= JOURNAL_PARTITIONS):
                self._journal_now(None)

    def flush(self) -> None:
        """Store the partitions that are still open and wait for all uploads."""
        self._is_ending = True
        self._store_open()
        self._uploads.wait()

    def _store_open(self) -> None:
        for array, index in sorted(self._open):
            self._store(array, index)

    def seal(
        self,
        lengths: Mapping[str, int],
        rows: Mapping[str, Rows],
        files: Iterable[ObjectRef],
        changed: int,
        ownership: ObjectRef | None = None,
    ) -> SealRef:
        """Store array metadata, contributions and the seal.

        Parameters
        ----------
        lengths : mapping of str to int
            Elements of each space.
        rows : mapping of str to ndarray of uint64, shape (n, 4)
            The contributions.
        files : iterable of ObjectRef
            The files that this incarnation stored.
        changed : int
            Elements that differ from the base.
        ownership : ObjectRef, optional
            Which elements the writer owns; None for a sole writer.
        """
        self._is_ending = True
        self._store_open()
        stored = {"contributions.bin": contributions.encode(rows)}
        described = []
        for space, array in ((space, f"{space}/{kind}") for space in SPACES for kind in KINDS):
            if array not in self._arrays:
                continue
            shard_elements = self.chunks_per_partition(space) * self.chunk_elements
            metadata = arrays.payload_metadata(array, lengths[space], self.chunk_elements, shard_elements, self.codec)
            stored[f"{array}/zarr.json"] = metadata
            ref = self._ref(f"{array}/zarr.json", metadata)
            described.append(Array(array, lengths[space], self.chunk_elements, shard_elements, self.codec, ref))
        # Beside the last partitions: only the seal has to come after everything that it names.
        for name, data in stored.items():
            self._uploads.start_small(self._put, name, data)
        self.flush()
        contributed = self._ref("contributions.bin", stored["contributions.bin"])
        partitions = sorted(self._sealed, key=_order)
        if self._bound is not None:
            places = {(item.array, item.index) for item in partitions}
            for array, index in sorted(set(self._bound.named) - places):
                key = self.keys.partition(self.writer, self.incarnation, array, index)
                self._require_bound(key, array, index, None)
        with self._lock:
            self._seal = Seal(
                tuple(described), tuple(partitions), contributed, tuple(self._journal), tuple(files), changed, ownership
            )
            return self._put_seal()

    def reseal(self, attempt: int) -> SealRef:
        """Seal the same again, for another attempt; nothing else is stored."""
        with self._lock:
            assert self._seal is not None
            self.attempt = attempt
            self._seal = replace(self._seal, journal=tuple(self._journal))
            return self._put_seal()

    def _put_seal(self) -> SealRef:
        events.reached("publish.seal.before", self.keys.prefix)
        ref = self._journal_now(self._seal)
        events.reached("publish.seal.stored", ref.key)
        return SealRef(self.writer, self.incarnation, ref)

    @property
    def sealed(self) -> Seal | None:
        """What was sealed last."""
        return self._seal

    def _ref(self, name: str, data: bytes) -> ObjectRef:
        return ObjectRef.of(self.keys.data(self.writer, self.incarnation) + name, data)

    def _put(self, name: str, data: bytes) -> None:
        """Store an object of this incarnation; runs in an uploader's thread."""
        ref = self._ref(name, data)
        events.reached("publish.object.before", ref.key)
        self.objects.put(ref.key, data)
        events.reached("publish.object.stored", ref.key)
        with self._lock:
            self._objects[ref.key] = ref

    def put_now(self, name: str, data: bytes) -> ObjectRef:
        """Store an object of this incarnation, durably when this returns."""
        self._put(name, data)
        return self._ref(name, data)

    def put_file(self, data: bytes) -> ObjectRef:
        """Store a side file or header under its content, durably by the next ``flush``."""
        name = f"files/{ObjectRef.of('', data).sha256}"
        self._uploads.start(len(data), self._put, name, data)
        return self._ref(name, data)

    @property
    def n_sealed(self) -> int:
        """The number of partitions stored so far."""
        return len(self._sealed)

    def sealed_objects(self) -> list[ObjectRef]:
        """Return all objects that the seal leads to, itself included."""
        stored = [item.ref(self.keys, self.writer) for item in self._sealed]
        return [*stored, *self._objects.values(), *self._journal]

    def close(self) -> None:
        """Stop the uploaders; what has not started is dropped."""
        self._uploads.close()


def _place(array: str) -> str:
    """Return under which name a spool holds chunks of an array: those of masks under their space's."""
    space, _, kind = array.partition("/")
    return space if kind == "mask" else array


def _order(item: Partition) -> tuple[int, int, int]:
    space, _, kind = item.array.partition("/")
    return SPACES.index(space), KINDS.index(kind), item.index
