"""Verify a store, in three depths: its logs and manifests; every object that they lead to; the bits of every version.

Lists problems instead of raising, so that one damaged object does not hide another. Reads everything it vouches for,
or, where it goes on from a report file, has read it then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Final

from dcr_store import events
from dcr_store.errors import DcrError, FormatError, IntegrityError, InvalidInputError, NotFoundError, StorageError
from dcr_store.format import canonical
from dcr_store.format.copies import DETACHED_KEY, Detached, absent_key, chain_sha256
from dcr_store.format.documents import ObjectRef
from dcr_store.format.marks import Named
from dcr_store.format.names import STORE_KEY, VersionRef, layout_key
from dcr_store.history.group_check import check_group_log
from dcr_store.history.log_check import LogCheck, check_log, check_origin, unreached
from dcr_store.history.object_units import EdgeUnit, Reach, SharedUnit
from dcr_store.history.replay_units import replay_units
from dcr_store.history.report import Problem, VerifyReport
from dcr_store.history.report_file import DEPTHS, ReportFile
from dcr_store.history.units import Found, Unit, look
from dcr_store.log.group import group_names
from dcr_store.log.history import History
from dcr_store.payload import version as payload
from dcr_store.versions.catalog import Catalog, Located, edge_of
from dcr_store.versions.edges import Edge
from dcr_store.versions.places import StorePlace, worked_on

_SHARED_TOGETHER: Final = 64


class _Findings:
    """What has been found so far; a key is reported once."""

    def __init__(self) -> None:
        self.problems: dict[str, Problem] = {}
        self.checked: dict[str, int] = {}
        self.referenced: set[str] = {STORE_KEY}
        self.versions: list[str] = []
        self.unreferenced: list[str] = []

    def add(self, problem: Problem) -> None:
        self.problems.setdefault(problem.key, problem)

    def take(self, found: Found) -> None:
        for problem in found.problems:
            self.add(problem)
        self.checked.update(found.read)
        self.referenced.update(found.referenced)

    def report(self) -> VerifyReport:
        return VerifyReport(
            list(self.problems.values()),
            len(self.checked),
            sum(self.checked.values()),
            self.versions,
            self.unreferenced,
        )


def verify(
    place: StorePlace,
    version: str | None = None,
    *,
    depth: str = "objects",
    heads: Sequence[str] = (),
    executor: Executor | None = None,
    report_file: ReportFile | None = None,
) -> VerifyReport:
    """Check a store.

    Parameters
    ----------
    version : str, optional
        Check only what this version needs, back to its anchor, and the log of its line.
    depth : {"log", "objects", "replay"}
        How far to look; each includes the ones before. The logs, what is derived from them, groups and names, and the
        manifests; every object by its SHA-256, and the roots by the digest tables; every chunk by its digest.
    heads : sequence of str
        Versions that were the heads of lines once, as ``line@number#root``.
    executor : Executor, optional
        Where objects are read and versions replayed, by default one thread, in which each uses all cores. What runs
        elsewhere opens the store itself.
    report_file : ReportFile, optional
        Where what was found sound is kept for the next run.

    Raises
    ------
    NotFoundError
        If there is no such version, or it has expired, be it meanwhile.
    InvalidInputError
        If an argument cannot be used.
    """
    if depth not in DEPTHS:
        raise InvalidInputError("unknown depth", key="depth", expected=", ".join(DEPTHS), found=repr(depth))
    if version is not None:
        VersionRef.parse(version)  # before anything is asked for
    for head in heads:
        ref = VersionRef.parse(head)
        if ref.number is None or ref.root_prefix is None:
            raise InvalidInputError("is no head to look for", key="head", expected="LINE@NUMBER#ROOT", found=head)
    catalog = place.catalog
    while True:
        before = _told(catalog)
        run = _Run(place, depth, executor, report_file)
        try:
            report = run.verify(version, heads)
        except BaseException:
            if report_file is not None:
                report_file.write(run.findings.report())  # for the run that goes on
            raise
        # What expired meanwhile may have been collected.
        if report.ok or _told(catalog) == before:
            if report_file is not None:
                report_file.finish(report)
            return report


def _told(catalog: Catalog) -> dict[str, History]:
    """Return what maintenance did to each line whose log can be read, as of now."""
    found: dict[str, History] = {}
    with contextlib.suppress(DcrError):
        for line in catalog.lines():
            with contextlib.suppress(DcrError):
                found[line] = replace(_history(catalog, line), works=())
    return found


def _history(catalog: Catalog, line: str) -> History:
    catalog.log(line).refresh()
    return catalog.history(line)


class _Run:
    """One look at a store."""

    def __init__(
        self, place: StorePlace, depth: str, executor: Executor | None, report_file: ReportFile | None
    ) -> None:
        self._place, self._catalog = place, place.catalog
        self._depth, self._executor, self._file = depth, executor, report_file
        self.findings = _Findings()

    def verify(self, version: str | None, heads: Sequence[str]) -> VerifyReport:
        catalog, findings = self._catalog, self.findings
        _check_store_document(catalog, findings)
        chosen: Located | None = None
        chain: list[Located] = []
        if version is not None:
            try:
                chosen = catalog.resolve(version)
                chain = catalog.along(chosen.line, catalog.path(chosen))
            except (IntegrityError, FormatError) as error:
                findings.add(Problem.of(error, version))
        lines = _lines(catalog, findings) if chosen is None else [chosen.line]
        versions: list[Located] = []
        edges: list[tuple[str, Edge]] = []
        for line in lines:
            try:
                checked = check_log(catalog, line)
            except StorageError as error:
                if error.key is None:  # of this process, not of a place in the store
                    raise
                findings.add(Problem.of(error))
                continue
            _take_log(findings, checked)
            if checked.origin is not None and (problem := check_origin(catalog, line, checked.origin)) is not None:
                findings.add(problem)
            with contextlib.suppress(DcrError):  # told by the check
                catalog.log(line).refresh()
            history = checked.history
            if catalog.document.is_copy:
                found = _check_absent(catalog, line, checked, findings)
                if found is None:
                    continue  # what the copy has is not known
                history = found
            elif version is None:  # in a copy, that is no damage
                for problem in unreached(line, checked.rows, history):
                    findings.add(problem)
            kept = [Located(line, row) for row in checked.rows if row.version not in history.expired]
            versions += chain if version is not None else kept
            if version is None:
                edges += [(line, edge_of(line, edge)) for edge in history.edges]
        if chosen is None and version is None:
            _check_groups(catalog, findings)
            _check_names(catalog, findings)
        if chosen is not None and chain:
            edges += [(chosen.line, edge) for edge in catalog.path(chosen)]
        _check_heads(catalog, heads, findings)
        findings.versions = [located.name for located in versions]
        self._look_at_objects(versions, edges)
        if self._depth == "replay":
            self._replay(versions, edges)
        if version is None and self._depth != "log":
            findings.unreferenced = sorted(_list(catalog, "", findings) - findings.referenced)
        return findings.report()

    def _look_at_objects(self, versions: list[Located], edges: list[tuple[str, Edge]]) -> None:
        """Look at what each edge consists of, and at what several of them lead to."""
        catalog, findings = self._catalog, self.findings
        if self._depth != "log":
            for sha256 in dict.fromkeys(located.row.layout for located in versions):
                _check_layout(catalog, sha256, findings)
        shared: dict[str, ObjectRef] = {}
        units = [unit for unit in self._edge_units(versions, edges) if isinstance(unit, EdgeUnit)]
        for found in self._looked_at(units, "verify"):
            shared |= {ref.key: ref for ref in found.elsewhere}
        if self._depth == "log":
            return
        rest = [ref for key, ref in sorted(shared.items()) if key not in findings.checked]
        together = [SharedUnit(tuple(rest[i : i + _SHARED_TOGETHER])) for i in range(0, len(rest), _SHARED_TOGETHER)]
        for _ in self._looked_at(together, "verify files"):
            pass

    def _edge_units(self, versions: list[Located], edges: list[tuple[str, Edge]]) -> Iterator[EdgeUnit]:
        catalog = self._catalog
        reach = Reach.MANIFEST if self._depth == "log" else Reach.OBJECTS
        for located in versions:
            line = catalog.owner(located.line, located.row.version)
            is_dead, head = located.row.version in catalog.history(line).dead, catalog.log(line).state.head
            is_head = head is not None and head.version == located.row.version and not catalog.document.is_copy
            yield EdgeUnit(line, located.row, None, is_dead, reach, is_head)
        for line, edge in edges:
            row = catalog.row(line, edge.version)
            if row is not None and edge.txid != row.txid:  # else looked at with its version
                yield EdgeUnit(edge.line, row, edge, False, reach)

    def _replay(self, versions: list[Located], edges: list[tuple[str, Edge]]) -> None:
        catalog, units = self._catalog, []
        own = [(item.line, edge) for item in versions for edge in _edges_to(catalog, item)]
        for unit in replay_units(catalog, versions, [*own, *edges]):
            if isinstance(unit, Problem):
                self.findings.add(unit)
            else:
                units.append(unit)
        for _ in self._looked_at(units, "verify bits"):
            pass

    def _looked_at(self, units: Sequence[Unit], task: str) -> Iterator[Found]:
        """Look at units, but for what the report file vouches for; take in what is found, and yield it too."""
        todo = [unit for unit in map(self._shortened, units) if unit is not None]
        total, done = sum(unit.nbytes for unit in todo), 0
        for unit, found in worked_on(self._place, look, todo, self._executor):
            self.findings.take(found)
            done += unit.nbytes
            events.progress(task, done, total)
            if self._file is not None:
                self._file.add(unit.id, found, self.findings.report)
            yield found

    def _shortened(self, unit: Unit) -> Unit | None:
        """Return a unit as it is still to be looked at; None if not at all."""
        if self._file is None or not self._file.vouches_for(unit.id):
            return unit
        if isinstance(unit, EdgeUnit):
            return replace(unit, reach=min(unit.reach, Reach.SEALS))
        if isinstance(unit, SharedUnit):
            self.findings.checked.update({ref.key: ref.nbytes for ref in unit.refs})
        return None


def _edges_to(catalog: Catalog, located: Located) -> list[Edge]:
    try:
        return catalog.edges_to(located.line, located.row.version)
    except DcrError:  # told by whoever looks for the path
        return []


def _check_heads(catalog: Catalog, heads: Iterable[str], findings: _Findings) -> None:
    """Look for versions that were there once: a log whose last records are gone is as sound as it was before them."""
    for head in heads:
        ref = VersionRef.parse(head)
        try:
            catalog.resolve(head)
        except NotFoundError as error:
            message = (
                "the store does not have this version, and is said to have had it: it is mistyped, or the log was set "
                "back, or rewritten; restore it from a copy"
            )
            found = "no such version" if error.found is None else f"root {error.found}"
            findings.add(Problem(head.partition("#")[0], message, f"root {ref.root_prefix}", found))
        except DcrError as error:
            findings.add(Problem.of(error, head))


def _check_names(catalog: Catalog, findings: _Findings) -> None:
    """Check tags and pins: each is one, of a version that is there and has its root."""
    for prefix in ("tags/", "pins/"):
        for key in sorted(_list(catalog, prefix, findings)):
            findings.referenced.add(key)
            try:
                data = catalog.objects.get(key)
                named = Named.from_bytes("tag" if prefix == "tags/" else "pin", data, key)
                named.check_key(key)
                catalog.resolve(f"{named.version}#{named.root}")
                findings.checked[key] = len(data)
            except DcrError as error:
                findings.add(Problem.of(error, key))


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
        if not catalog.document.is_copy or chain_sha256(data) != catalog.store_sha256:
            canonical.check_sha256(data, catalog.store_sha256, STORE_KEY)
        findings.checked[STORE_KEY] = len(data)
    except DcrError as error:
        findings.add(Problem.of(error, STORE_KEY))
    if catalog.document.is_copy:
        findings.referenced.add(DETACHED_KEY)
        try:
            data = catalog.objects.get(DETACHED_KEY)
            Detached.from_bytes(data)
            findings.checked[DETACHED_KEY] = len(data)
        except NotFoundError:
            pass  # it is a copy still
        except DcrError as error:
            findings.add(Problem.of(error, DETACHED_KEY))


def _check_absent(catalog: Catalog, line: str, checked: LogCheck, findings: _Findings) -> History | None:
    """Return what a line's log tells but for what a copy does not have; None if that is damaged, which is a finding."""
    key = absent_key(line)
    findings.referenced.add(key)
    try:
        absent = catalog.absences.read(line)
        if absent is not None:
            findings.checked[key] = len(absent.to_bytes())
        return catalog.history(line, checked.history)
    except DcrError as error:
        findings.add(Problem.of(error, key))
        return None


def _take_log(findings: _Findings, checked: LogCheck) -> None:
    for problem in checked.problems:
        findings.add(problem)
    findings.checked.update(checked.sizes)
    findings.referenced.update(checked.sizes)


def _check_layout(catalog: Catalog, sha256: str, findings: _Findings) -> None:
    key = layout_key(sha256)
    findings.referenced.add(key)
    try:
        layout = payload.read_layout(catalog.objects, sha256)
    except DcrError as error:
        findings.add(Problem.of(error, key))
        return
    findings.checked[key] = len(layout.to_json_bytes())
