"""Check what a commit, an anchor or a fold leads to: the manifest, the seals, every object by its SHA-256, the root."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from dcr_store.errors import DcrError
from dcr_store.format.documents import JournalEntry, Manifest, ObjectRef
from dcr_store.format.names import TransactionKeys, layout_key, version_name
from dcr_store.format.rows import VersionRow
from dcr_store.history.report import Problem
from dcr_store.history.units import Found
from dcr_store.objects.threads import Threads
from dcr_store.payload import version as payload
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.edges import Edge
from dcr_store.versions.places import StorePlace

_N_READERS: Final = 4


class Reach(IntEnum):
    """How far a look at an edge goes."""

    MANIFEST = 0
    """The manifest."""
    SEALS = 1
    """And the seals: what there has to be is known then, but not read."""
    OBJECTS = 2
    """And all that they lead to."""


@dataclass(frozen=True, slots=True)
class EdgeUnit:
    """What one edge consists of.

    Attributes
    ----------
    line : str
        Whose log tells it.
    row : VersionRow
        The version to which it leads.
    edge : Edge or None
        An anchor or a fold; None for what the commit stored.
    is_dead : bool
        Whether what the commit stored leads to the version no more: then only its tables and files count.
    is_head : bool
        Whether the line goes on from the version: then who owns what of it counts, too.
    """

    line: str
    row: VersionRow
    edge: Edge | None
    is_dead: bool
    reach: Reach
    is_head: bool = False

    @property
    def id(self) -> str:
        """The edge, and how much of it."""
        name = version_name(self.line, self.row.version)
        return f"edge {name} {self._manifest.sha256}{self._kind}"

    @property
    def _kind(self) -> str:
        return "" if not self.is_dead else " dead head" if self.is_head else " dead"

    @property
    def nbytes(self) -> int:
        """All that the edge takes."""
        return self.row.counts.nbytes if self.edge is None else self.edge.nbytes

    @property
    def _manifest(self) -> ObjectRef:
        return self.row.manifest if self.edge is None else self.edge.manifest

    @property
    def _prefix(self) -> str:
        txid = self.row.txid if self.edge is None else self.edge.txid
        return TransactionKeys(self.line, self.row.version, txid).prefix

    def look(self, place: StorePlace) -> Found:
        """Look at it."""
        catalog, ref, found = place.catalog, self._manifest, Found()
        found.referenced.add(ref.key)
        located = Located(self.line, self.row)
        try:
            edge = self.edge
            manifest = catalog.manifest(located) if edge is None else catalog.manifest_of_edge(edge, self.row)
        except DcrError as error:
            found.problems.append(Problem.of(error, ref.key))
            return found
        found.read[ref.key] = ref.nbytes
        if self.reach == Reach.MANIFEST:
            return found
        refs = payload.own_refs(manifest) if self.is_dead else _refs_of(catalog, manifest, found)
        if self.is_dead and self.is_head:
            try:
                refs += payload.owner_refs(catalog.objects, manifest)
            except DcrError as error:
                found.problems.append(Problem.of(error, ref.key))
        found.referenced.update(item.key for item in refs)
        found.elsewhere = [item for item in refs if not item.key.startswith(self._prefix)]
        mine = [item for item in refs if item.key.startswith(self._prefix)]
        if self.reach == Reach.SEALS:
            found.read.update({item.key: item.nbytes for item in mine})
            return found
        _read(catalog, mine, found)
        if self.edge is None and not any(problem.key in _keys_of(manifest) for problem in found.problems):
            self._prove_root(catalog, located, manifest, found)
        return found

    def _prove_root(self, catalog: Catalog, located: Located, manifest: Manifest, found: Found) -> None:
        try:
            layout = catalog.layout(self.row.layout)
        except DcrError as error:
            found.problems.append(Problem.of(error, layout_key(self.row.layout)))
            return
        try:
            payload.read_tables(catalog.objects, manifest, layout, catalog.document.chunk_elements)
        except DcrError as error:
            found.problems.append(Problem.of(error, located.name))


@dataclass(frozen=True, slots=True)
class SharedUnit:
    """Objects that several versions lead to, as files that stayed the same."""

    refs: tuple[ObjectRef, ...]

    @property
    def id(self) -> str:
        """Which objects, by content."""
        told = "".join(f"{ref.key} {ref.sha256}\n" for ref in self.refs)
        return f"shared {hashlib.sha256(told.encode()).hexdigest()}"

    @property
    def nbytes(self) -> int:
        """All of them."""
        return sum(ref.nbytes for ref in self.refs)

    def look(self, place: StorePlace) -> Found:
        """Read them."""
        found = Found()
        _read(place.catalog, self.refs, found)
        return found


def _read(catalog: Catalog, refs: Iterable[ObjectRef], found: Found) -> None:
    """Read objects, in parallel, and compare them with their references."""

    def compare(ref: ObjectRef) -> tuple[ObjectRef, DcrError | None]:
        try:
            payload.fetch(catalog.objects, ref)
        except DcrError as error:
            return ref, error
        return ref, None

    todo = {ref.key: ref for ref in refs if ref.key not in found.read}
    with Threads(_N_READERS) as pool:
        for ref, error in pool.map(compare, todo.values()):
            found.referenced.add(ref.key)
            found.read[ref.key] = ref.nbytes
            if error is not None:
                found.problems.append(Problem.of(error, ref.key))


def _keys_of(manifest: Manifest) -> list[str]:
    return [ref.key for item in manifest.digests.values() for ref in (item.zarr, item.table)]


def _refs_of(catalog: Catalog, manifest: Manifest, found: Found) -> list[ObjectRef]:
    """Return all objects that a manifest leads to; reads the seals."""
    refs = payload.own_refs(manifest)
    for seal_ref in manifest.seals:
        refs.append(seal_ref.ref)
        try:
            entry = JournalEntry.from_bytes(payload.fetch(catalog.objects, seal_ref.ref), seal_ref.ref.key)
            found.read[seal_ref.ref.key] = seal_ref.ref.nbytes
        except DcrError as error:
            found.problems.append(Problem.of(error, seal_ref.ref.key))
            continue
        if entry.seal is None:
            continue
        refs += payload.sealed_refs(entry.seal)
        try:
            refs += [item.ref for item in payload.sealed_partitions(manifest, entry)]
        except DcrError as error:
            found.problems.append(Problem.of(error, seal_ref.ref.key))
    return refs
