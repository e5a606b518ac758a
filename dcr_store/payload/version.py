"""The objects of one committed version, read and checked against the references to them (docs/spec/v1.md §11).

Everything returned has the SHA-256 recorded in the log; an object that has not, or is missing, is an ``IntegrityError``
that names its key. Partitions are fetched on request and not kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dcr_store.codec.digest import state_root
from dcr_store.errors import FormatError, IntegrityError, InvalidInputError, NotFoundError
from dcr_store.format import canonical
from dcr_store.format.documents import SPACES, Array, JournalEntry, Manifest, ObjectRef, Partition, Seal
from dcr_store.format.names import TransactionKeys, layout_key, version_name
from dcr_store.layout.layout import Layout
from dcr_store.objects.transfer import map_bounded
from dcr_store.payload import contributions, shard
from dcr_store.ports import ObjectStore

Table = NDArray[np.uint64]


def fetch(objects: ObjectStore, ref: ObjectRef) -> bytes:
    """Return the object that `ref` names.

    Raises
    ------
    IntegrityError
        If it is missing, or of other content.
    FormatError
        If no object can have the key, or the reference tells another length.
    """
    try:
        data = objects.get(ref.key, sha256=ref.sha256)
    except NotFoundError as error:
        raise _missing(ref) from error
    except InvalidInputError as error:
        raise FormatError(f"a document refers to what cannot be an object: {error}", key=ref.key) from error
    canonical.check_sha256(data, ref.sha256, ref.key)
    if len(data) != ref.nbytes:
        raise FormatError(
            "a document refers to it with a wrong length", key=ref.key, expected=ref.nbytes, found=len(data)
        )
    return data


def _missing(ref: ObjectRef) -> IntegrityError:
    return IntegrityError(
        "the object is missing; restore it from a copy of the store",
        key=ref.key,
        expected=f"{ref.nbytes} bytes",
        found="nothing",
    )


def fetch_all(objects: ObjectStore, refs: Sequence[ObjectRef]) -> list[bytes]:
    """Return several objects, fetched side by side where that saves waiting; errors are those of ``fetch``."""
    if objects.is_local or len(refs) < 2:
        return [fetch(objects, ref) for ref in refs]
    return list(map_bounded(lambda ref: fetch(objects, ref), refs))


@dataclass(frozen=True, slots=True)
class SealedPartition:
    """A partition of one writer, with what is needed to read it."""

    array: Array
    partition: Partition
    writer: str
    key: str

    @property
    def ref(self) -> ObjectRef:
        """The object."""
        return ObjectRef(self.key, self.partition.sha256, self.partition.nbytes)

    @property
    def first_chunk(self) -> int:
        """The chunk index, in the space, of the partition's first chunk."""
        return self.partition.index * (self.array.shard // self.array.chunk)

    @property
    def n_chunks(self) -> int:
        """The number of places in the partition."""
        return self.array.shard // self.array.chunk

    def parse(self, data: bytes) -> dict[int, memoryview]:
        """Return the encoded chunks in `data` by their index in the space."""
        return {self.first_chunk + place: chunk for place, chunk in shard.parse(data, self.n_chunks, self.key).items()}


_GAP_NBYTES: Final = 64 << 10
"""Chunks that lie nearer to each other than this are fetched together: a request costs more than these bytes."""


def fetch_chunks(objects: ObjectStore, item: SealedPartition, wanted: Collection[int]) -> dict[int, memoryview]:
    """Return some encoded chunks of a partition by their index in the space, fetching little more than these.

    They are not compared with the partition's SHA-256, which takes the whole: the caller proves what they give.

    Raises
    ------
    IntegrityError
        If the partition is missing, cut off, or its index is damaged.
    """
    nbytes, tail = item.partition.nbytes, shard.index_nbytes(item.n_chunks)
    try:
        index = objects.get(item.key, max(0, nbytes - tail), nbytes)
        found = shard.parse_index(index, item.n_chunks, nbytes, item.key) if len(index) == tail else None
        if found is None:
            raise IntegrityError("the partition is cut off", key=item.key, expected=f"{nbytes} bytes", found="fewer")
        places = sorted(
            (found[place], place) for place in (chunk - item.first_chunk for chunk in wanted) if place in found
        )
        result: dict[int, memoryview] = {}
        while places:
            (start, stop), n_together = places[0][0], 1
            while n_together < len(places) and places[n_together][0][0] - stop <= _GAP_NBYTES:
                stop = max(stop, places[n_together][0][1])
                n_together += 1
            view = memoryview(objects.get(item.key, start, stop))
            for (first, last), place in places[:n_together]:
                result[item.first_chunk + place] = view[first - start : last - start]
            del places[:n_together]
    except NotFoundError as error:
        raise _missing(item.ref) from error
    return result


@dataclass(frozen=True, slots=True)
class VersionContents:
    """All of a version but its partitions.

    Attributes
    ----------
    tables : mapping of str to ndarray of uint64, shape (n_chunks,)
        The digest of each chunk of each space in this version's state.
    touched : mapping of str to dict of int to tuple
        Per space and chunk that the version changed: XOR over writers of (L of mask, L of overwrite).
    partitions : tuple of SealedPartition
        All that count.
    """

    manifest: Manifest
    layout: Layout
    seals: tuple[tuple[JournalEntry, Seal], ...]
    tables: Mapping[str, Table]
    touched: Mapping[str, Mapping[int, tuple[int, int]]]
    partitions: tuple[SealedPartition, ...]

    @property
    def name(self) -> str:
        """``line@number``."""
        return version_name(self.manifest.line, self.manifest.version)

    @property
    def is_anchor(self) -> bool:
        """Whether the base is the all-zero state."""
        return self.manifest.base is None


def read_layout(objects: ObjectStore, sha256: str) -> Layout:
    """Read and check a layout."""
    key = layout_key(sha256)
    try:
        data = objects.get(key, sha256=sha256)
    except NotFoundError as error:
        raise IntegrityError("the layout is missing; restore it from a copy of the store", key=key) from error
    canonical.check_sha256(data, sha256, key)
    return Layout.from_json_bytes(data, key=key)


def read_manifest(objects: ObjectStore, ref: ObjectRef) -> Manifest:
    """Read and check a manifest."""
    return Manifest.from_bytes(fetch(objects, ref), ref.key)


def read_tables(objects: ObjectStore, manifest: Manifest, layout: Layout, chunk_elements: int) -> dict[str, Table]:
    """Read the digest tables of a version and prove them by its root."""
    refs = _table_refs(manifest, layout)
    return _tables(manifest, layout, chunk_elements, dict(zip(refs, fetch_all(objects, [*refs.values()]), strict=True)))


def _table_refs(manifest: Manifest, layout: Layout) -> dict[str, ObjectRef]:
    """Return the objects of the digest tables of the spaces that have one."""
    refs: dict[str, ObjectRef] = {}
    for space in SPACES:
        if layout.spaces[space] == 0:
            continue
        if space not in manifest.digests:
            raise FormatError(
                "names no digest table",
                key=f"{manifest.line}@{manifest.version}",
                expected=space,
                found=sorted(manifest.digests),
            )
        refs[space] = manifest.digests[space].table
    return refs


def _tables(manifest: Manifest, layout: Layout, chunk_elements: int, stored: Mapping[str, bytes]) -> dict[str, Table]:
    """Decode the digest tables of a version and prove them by its root."""
    tables: dict[str, Table] = {}
    for space in SPACES:
        n_chunks, data = layout.n_chunks(space, chunk_elements), stored.get(space, b"")
        if len(data) != 8 * n_chunks:
            key = manifest.digests[space].table.key
            raise FormatError("the digest table is too short", key=key, expected=8 * n_chunks, found=len(data))
        tables[space] = np.frombuffer(data, "<u8").astype(np.uint64, copy=False)
    found = root_of(layout, tables, chunk_elements)
    if found != manifest.root:
        raise IntegrityError(
            "the digest tables do not give the version's root",
            key=f"{manifest.line}@{manifest.version}",
            expected=manifest.root,
            found=found,
        )
    return tables


def root_of(layout: Layout, tables: Mapping[str, Table], chunk_elements: int) -> str:
    """Return the state root (§7) of a layout and its digest tables."""
    return state_root(layout.sha256, [(layout.spaces[space], chunk_elements, tables[space]) for space in SPACES])


def sealed_partitions(manifest: Manifest, entry: JournalEntry) -> list[SealedPartition]:
    """Return the partitions of a seal, each with its array; ``FormatError`` if one is of no array, or named twice."""
    assert entry.seal is not None
    keys = TransactionKeys(manifest.line, manifest.version, manifest.txid)
    arrays = {array.array: array for array in entry.seal.arrays}
    result: dict[tuple[str, int], SealedPartition] = {}
    for item in entry.seal.partitions:
        key = keys.partition(entry.writer, item.incarnation, item.array, item.index)
        array = arrays.get(item.array)
        if array is None:
            raise FormatError(
                "the seal names a partition of no array", key=key, expected=sorted(arrays), found=item.array
            )
        if item.index * array.shard >= array.shape:
            raise FormatError(
                "the seal names a partition past the end of its array",
                key=key,
                expected=f"an index below {-(-array.shape // array.shard)}",
                found=item.index,
            )
        if (item.array, item.index) in result:
            raise FormatError("the seal names a partition twice", key=key, expected="one object for each", found="two")
        result[item.array, item.index] = SealedPartition(array, item, entry.writer, key)
    return list(result.values())


def own_refs(manifest: Manifest) -> list[ObjectRef]:
    """Return the objects of a version besides the delta or anchor that a manifest tells of: digest tables and files."""
    refs = [ref for item in manifest.digests.values() for ref in (item.zarr, item.table)]
    return [*refs, *(file.ref for file in manifest.files)]


def sealed_refs(seal: Seal) -> list[ObjectRef]:
    """Return the objects that a seal leads to besides its partitions (``sealed_partitions``)."""
    refs = [array.zarr for array in seal.arrays]
    refs += [seal.contributions, *seal.journal, *seal.files]
    return refs if seal.ownership is None else [*refs, seal.ownership]


def owner_refs(objects: ObjectStore, manifest: Manifest) -> list[ObjectRef]:
    """Return the seals of a manifest and what they say of who owns what: the next version's seals may refer to that."""
    seals = [seal.ref for seal in manifest.seals]
    entries = [
        JournalEntry.from_bytes(data, seal.key) for seal, data in zip(seals, fetch_all(objects, seals), strict=True)
    ]
    owned = (entry.seal.ownership for entry in entries if entry.seal is not None)
    return [*seals, *(ref for ref in owned if ref is not None)]


def led_to(objects: ObjectStore, ref: ObjectRef, *, is_edge: bool) -> list[ObjectRef]:
    """Return the objects to which a manifest leads, itself among them: of an edge also those of its seals."""
    manifest = read_manifest(objects, ref)
    refs = [ref, *own_refs(manifest)]
    seals = [seal.ref for seal in manifest.seals] if is_edge else []
    for seal, data in zip(seals, fetch_all(objects, seals), strict=True):
        entry = JournalEntry.from_bytes(data, seal.key)
        refs.append(seal)
        if entry.seal is not None:
            refs += [*sealed_refs(entry.seal), *(item.ref for item in sealed_partitions(manifest, entry))]
    return refs


def read_contents(objects: ObjectStore, manifest: Manifest, layout: Layout, chunk_elements: int) -> VersionContents:
    """Read what a manifest leads to.

    Raises
    ------
    IntegrityError, FormatError
        If an object is missing, damaged, or does not belong to this version.
    """
    seals: list[tuple[JournalEntry, Seal]] = []
    partitions: list[SealedPartition] = []
    for seal_ref, data in zip(manifest.seals, fetch_all(objects, [seal.ref for seal in manifest.seals]), strict=True):
        entry = JournalEntry.from_bytes(data, seal_ref.ref.key)
        named = (entry.line, entry.txid, entry.attempt, entry.writer, entry.incarnation)
        expected = (manifest.line, manifest.txid, manifest.attempt, seal_ref.writer, seal_ref.incarnation)
        if named != expected or entry.seal is None:
            raise FormatError("is not the seal of this version", key=seal_ref.ref.key, expected=expected, found=named)
        seals.append((entry, entry.seal))
        for array in entry.seal.arrays:
            _check_array(array, layout, chunk_elements, seal_ref.ref.key)
        partitions += sealed_partitions(manifest, entry)
    contributed, tables = [seal.contributions for _, seal in seals], _table_refs(manifest, layout)
    stored = fetch_all(objects, [*contributed, *tables.values()])
    touched: dict[str, dict[int, tuple[int, int]]] = {space: {} for space in SPACES}
    for ref, data in zip(contributed, stored, strict=False):
        _add_contributions(touched, data, ref.key, layout, chunk_elements)
    digests = _tables(manifest, layout, chunk_elements, dict(zip(tables, stored[len(contributed) :], strict=True)))
    return VersionContents(manifest, layout, tuple(seals), digests, touched, tuple(partitions))


def _add_contributions(
    touched: dict[str, dict[int, tuple[int, int]]], data: bytes, key: str, layout: Layout, chunk_elements: int
) -> None:
    for space, chunk, mask, overwrite, _ in contributions.by_chunk(contributions.decode(data, key)):
        if chunk >= layout.n_chunks(space, chunk_elements):
            raise FormatError(
                f"contributes to a chunk past the end of {space}",
                key=key,
                expected=f"below {layout.n_chunks(space, chunk_elements)}",
                found=chunk,
            )
        before = touched[space].get(chunk, (0, 0))
        touched[space][chunk] = before[0] ^ mask, before[1] ^ overwrite


def _check_array(array: Array, layout: Layout, chunk_elements: int, key: str) -> None:
    space = array.array.partition("/")[0]
    if (array.shape, array.chunk) != (layout.spaces[space], chunk_elements):
        raise FormatError(
            f"array {array.array} does not fit the layout",
            key=key,
            expected=(layout.spaces[space], chunk_elements),
            found=(array.shape, array.chunk),
        )
