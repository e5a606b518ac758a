"""Verify a store: the log's chain, then every object that a committed version needs by its SHA-256; deep: replay too.

Lists problems instead of raising, so that one damaged object does not hide another. Reads everything it vouches for.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from typing import Final

from dcr_store import events
from dcr_store.errors import DcrError, FormatError, IntegrityError, StorageError
from dcr_store.format import canonical
from dcr_store.format.documents import JournalEntry, Manifest, ObjectRef
from dcr_store.format.names import STORE_KEY, layout_key
from dcr_store.history.group_check import check_group_log
from dcr_store.history.log_check import LogCheck, check_log
from dcr_store.history.report import Problem, VerifyReport
from dcr_store.layout.layout import Layout
from dcr_store.log.fold import VersionRow
from dcr_store.log.group import group_names
from dcr_store.objects.threads import Threads
from dcr_store.payload import version as payload
from dcr_store.targets.space_file import SpaceFiles
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.path import ZERO
from dcr_store.versions.replay import everywhere, replay
from dcr_store.versions.route import route

_N_READERS: Final = 4


class _Findings:
    """What has been found so far; a key is reported once."""

    def __init__(self) -> None:
        self.problems: dict[str, Problem] = {}
        self.checked: dict[str, int] = {}
        self.referenced: set[str] = {STORE_KEY}

    def add(self, problem: Problem) -> None:
        self.problems.setdefault(problem.key, problem)


def verify(catalog: Catalog, version: str | None = None, *, deep: bool = False) -> VerifyReport:
    """Check a store.

    Parameters
    ----------
    version : str, optional
        Check only what this version needs, back to its anchor, and the log of its line.
    deep : bool
        Replay the versions too and compare every chunk with its digest.
    """
    findings = _Findings()
    _check_store_document(catalog, findings)
    chosen: Located | None = None
    chain: list[Located] = []
    if version is not None:
        try:
            chosen = catalog.resolve(version)
            chain = catalog.chain(chosen)
        except (IntegrityError, FormatError) as error:
            findings.add(Problem.of(error, version))
    lines = _lines(catalog, findings) if chosen is None else [chosen.line]
    versions: list[Located] = []
    for line in lines:
        try:
            checked = check_log(catalog, line)
        except StorageError as error:
            if error.key is None:  # of this process, not of a place in the store
                raise
            findings.add(Problem.of(error))
            continue
        _take_log(findings, checked)
        versions += chain if version is not None else [Located(line, row) for row in checked.rows]
    if chosen is None and version is None:
        _check_groups(catalog, findings)
    total, done = sum(located.row.counts.nbytes for located in versions), 0
    for located in versions:
        _check_version(catalog, located, findings)
        done += located.row.counts.nbytes
        events.progress("verify", done, total)
    if deep:
        _replay_all(catalog, versions, findings)
    unreferenced = [] if version is not None else sorted(_list(catalog, "", findings) - findings.referenced)
    return VerifyReport(
        list(findings.problems.values()),
        len(findings.checked),
        sum(findings.checked.values()),
        [located.name for located in versions],
        unreferenced,
    )


def _check_groups(catalog: Catalog, findings: _Findings) -> None:
    try:
        names = group_names(catalog.objects)
    except StorageError as error:
        findings.add(Problem.of(error, "groups/"))
        return
    for name in names:
        try:
            checked = check_group_log(catalog, name)
        except DcrError as error:
            if isinstance(error, StorageError) and error.key is None:  # of this process, not of a place in the store
                raise
            findings.add(Problem.of(error, f"groups/{name}/"))
            continue
        for problem in checked.problems:
            findings.add(problem)
        findings.checked.update({key: checked.sizes.get(key, 0) for key in checked.read})
        findings.referenced.update(checked.sizes)


def _lines(catalog: Catalog, findings: _Findings) -> list[str]:
    try:
        return catalog.lines()
    except StorageError as error:
        findings.add(Problem.of(error, "log/"))
        return []


def _list(catalog: Catalog, prefix: str, findings: _Findings) -> set[str]:
    """Return all keys below a prefix but those of places that may not be listed or looked at, which are findings."""
    objects = catalog.objects
    try:
        return set(objects.list(prefix))
    except StorageError as error:
        try:
            names = objects.list_names(prefix)
        except StorageError:
            findings.add(Problem.of(error, prefix or objects.url))
            return set()
    found: set[str] = set()
    for key in (prefix + name for name in names):
        try:
            is_object = objects.size(key) is not None
        except StorageError as error:
            findings.add(Problem.of(error, key))
            continue
        found |= {key} if is_object else _list(catalog, f"{key}/", findings)
    return found


def _check_store_document(catalog: Catalog, findings: _Findings) -> None:
    try:
        data = catalog.objects.get(STORE_KEY)
        canonical.check_sha256(data, catalog.store_sha256, STORE_KEY)
        findings.checked[STORE_KEY] = len(data)
    except DcrError as error:
        findings.add(Problem.of(error, STORE_KEY))


def _take_log(findings: _Findings, checked: LogCheck) -> None:
    for problem in checked.problems:
        findings.add(problem)
    findings.checked.update(checked.sizes)
    findings.referenced.update(checked.sizes)


def _check_refs(catalog: Catalog, refs: Iterable[ObjectRef], findings: _Findings) -> None:
    """Read objects, in parallel, and compare them with their references."""

    def look(ref: ObjectRef) -> tuple[ObjectRef, DcrError | None]:
        try:
            payload.fetch(catalog.objects, ref)
        except DcrError as error:
            return ref, error
        return ref, None

    todo = {ref.key: ref for ref in refs if ref.key not in findings.checked}
    with Threads(_N_READERS) as pool:
        for ref, error in pool.map(look, todo.values()):
            findings.referenced.add(ref.key)
            findings.checked[ref.key] = ref.nbytes
            if error is not None:
                findings.add(Problem.of(error, ref.key))


def _check_version(catalog: Catalog, located: Located, findings: _Findings) -> None:
    """Check all that a version's commit record leads to."""
    row = located.row
    findings.referenced.add(row.manifest.key)
    layout = _check_layout(catalog, row, findings)
    try:
        manifest = catalog.manifest(located)
        findings.checked[row.manifest.key] = row.manifest.nbytes
    except DcrError as error:
        findings.add(Problem.of(error, row.manifest.key))
        return
    _check_refs(catalog, _refs_of(catalog, manifest, findings), findings)
    if layout is not None and not any(key in findings.problems for key in _keys_of(manifest)):
        try:
            payload.read_tables(catalog.objects, manifest, layout, catalog.document.chunk_elements)
        except DcrError as error:
            findings.add(Problem.of(error, located.name))


def _check_layout(catalog: Catalog, row: VersionRow, findings: _Findings) -> Layout | None:
    key = layout_key(row.layout)
    findings.referenced.add(key)
    try:
        layout = payload.read_layout(catalog.objects, row.layout)
    except DcrError as error:
        findings.add(Problem.of(error, key))
        return None
    findings.checked[key] = len(layout.to_json_bytes())
    return layout


def _keys_of(manifest: Manifest) -> list[str]:
    return [ref.key for item in manifest.digests.values() for ref in (item.zarr, item.table)]


def _refs_of(catalog: Catalog, manifest: Manifest, findings: _Findings) -> list[ObjectRef]:
    """Return all objects that a manifest leads to."""
    refs = [ref for item in manifest.digests.values() for ref in (item.zarr, item.table)]
    refs += [file.ref for file in manifest.files]
    for seal_ref in manifest.seals:
        refs.append(seal_ref.ref)
        try:
            entry = JournalEntry.from_bytes(payload.fetch(catalog.objects, seal_ref.ref), seal_ref.ref.key)
        except DcrError as error:
            findings.add(Problem.of(error, seal_ref.ref.key))
            continue
        if entry.seal is None:
            continue
        refs += [array.zarr for array in entry.seal.arrays]
        refs += [entry.seal.contributions, *entry.seal.journal, *entry.seal.files]
        refs += [] if entry.seal.ownership is None else [entry.seal.ownership]
        try:
            refs += [item.ref for item in payload.sealed_partitions(manifest, entry)]
        except DcrError as error:
            findings.add(Problem.of(error, seal_ref.ref.key))
    return refs


def _replay_all(catalog: Catalog, versions: list[Located], findings: _Findings) -> None:
    """Replay versions in order, each from the one before where it can, onto flat files in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="dcr-verify-") as directory:
        files: SpaceFiles | None = None
        before: Located | None = None
        for located in versions:
            events.reached("verify.replay", located.name)
            try:
                way = route(catalog, located)
                goes_on = (
                    before is not None and located.row.base is not None and before.row.root == located.row.base.root
                )
                if files is None or not goes_on:
                    if files is not None:
                        files.close()
                    # One state at a time: the one before makes room.
                    shutil.rmtree(f"{directory}/state", ignore_errors=True)
                    layout = catalog.layout(located.row.layout)
                    files = SpaceFiles(f"{directory}/state", layout, way.path.chunk_elements, create=True)
                    places = everywhere(way.path, ZERO)
                else:
                    places = everywhere(way.path, way.path.goal - 1)
                replay(catalog.objects, way.path, files, places)
                before = located
            except DcrError as error:
                findings.add(Problem.of(error, located.name))
                files, before = None, None
