"""The safety rules of maintenance, each taken out alone, as in ``removals``."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, Final

from sim.taking_out import Removal, patched

from dcr_store.errors import FencedError
from dcr_store.format.ranges import Ranges
from dcr_store.format.records import Anchor, Expire, Fold
from dcr_store.log import fold
from dcr_store.log.fold import LineState
from dcr_store.maintain import collect, edges, marks, ranges, retention
from dcr_store.receive.member import Member
from dcr_store.versions import moving
from dcr_store.versions.catalog import Catalog

Patched = contextlib.AbstractContextManager[None]


# ---------------------------------------------------------------------- collecting


def grace() -> Patched:
    """What is dead is deleted at once."""
    return patched((collect, "_clock", lambda *arguments, **options: float("inf")))


def grace_of_shared_files() -> Patched:
    """The grace of a file begins when the version is gone that stored it, whoever else has it."""
    return patched((collect, "_led_to_lately", lambda *arguments: set()))


def open_works() -> Patched:
    """What belongs to an open anchor or fold is taken for dead."""
    known = collect._fold

    def fold_line(catalog: Any, line: str, length: int) -> Any:
        found, state = known(catalog, line, length), catalog.log(line).state
        transaction = set() if state.open is None else {state.open.txid}
        found.ended |= dict.fromkeys(found.open - transaction, 0.0)
        found.open &= transaction
        return found

    return patched((collect, "_fold", fold_line))


def open_transactions() -> Patched:
    """What belongs to an open transaction is taken for dead."""
    known = collect._fold

    def fold_line(catalog: Any, line: str, length: int) -> Any:
        found = known(catalog, line, length)
        works = {work.txid for work in catalog.log(line).state.history.works}
        found.ended |= dict.fromkeys(found.open - works, 0.0)
        found.open &= works
        return found

    return patched((collect, "_fold", fold_line))


def what_edges_lead_to() -> Patched:
    """Of a version that is kept by an anchor, what its own commit stored is dead: also its files and digests."""
    needed = collect._needed

    def of_edges(catalog: Any, states: Any) -> Any:
        lines = {
            line: replace(state, history=replace(state.history, expired=state.history.expired | state.history.dead))
            for line, state in states.items()
        }
        return needed(catalog, lines)

    return patched((collect, "_needed", of_edges))


def files_of_others() -> Patched:
    """What lies under the prefix of a version that has expired is dead, whoever else refers to it."""
    led_to = collect._led_to

    def own(catalog: Any, ref: Any, use: Any) -> Any:
        prefix = ref.key.partition("/attempts/")[0]
        return [item for item in led_to(catalog, ref, use) if item.key.startswith(prefix)]

    return patched((collect, "_led_to", own))


def acknowledgements_that_stand() -> Patched:
    """Acknowledgements of versions that are active or proposed go, too."""
    return patched((collect, "_acks", _all_acks))


def _all_acks(catalog: Any, objects: Any, grace_s: float) -> Any:
    return {key: size for key, size in objects.list("groups/").items() if "/acks/" in key}


# ---------------------------------------------------------------------- letting expire


def names_after_the_intent() -> Patched:
    """Who expires reads names and groups before it says in the log what it is about, and not again."""
    needed = retention._needed
    seen: dict[int, Any] = {}

    def once(catalog: Any, line: str, keep: Any) -> Any:
        if id(keep) not in seen:
            seen[id(keep)] = keep, needed(catalog, line, keep)
        return seen[id(keep)][1]

    return patched((retention, "_needed", once))


def _without_names(*prefixes: str) -> Patched:
    return patched(
        *((marks, name, lambda *arguments: []) for name in prefixes if name in ("pins", "tags")),
        *((retention, name, lambda *arguments: []) for name in prefixes if name == "group_names"),
    )


def pins_keep() -> Patched:
    """Who expires does not look at pins."""
    return _without_names("pins")


def tags_keep() -> Patched:
    """Who expires does not look at tags."""
    return _without_names("tags")


def groups_keep() -> Patched:
    """Who expires does not look at groups."""
    return _without_names("group_names")


def forks_keep() -> Patched:
    """A version expires although another line goes on from it."""
    needed, apply = retention._needed_by_log, fold.apply

    def without_forks(state: LineState) -> LineState:
        return replace(state, history=replace(state.history, forks=()))

    def lenient(state: LineState, record: Any, data: bytes) -> Any:
        if not isinstance(record, Expire):
            return apply(state, record, data)
        found = apply(without_forks(state), record, data)
        return replace(found, history=replace(found.history, forks=state.history.forks))

    return patched((retention, "_needed_by_log", lambda state: needed(without_forks(state))), (fold, "apply", lenient))


def a_way_stays() -> Patched:
    """What is kept and has no way but over versions that go loses that."""
    plan = retention._plan

    def only_clean(catalog: Any, state: Any, line: str, gone: Any, *, is_final: bool) -> Any:
        found = plan(catalog, state, line, gone, is_final=is_final)
        found.anchors.clear()
        found.folds.clear()
        kept = [n for n in range(state.first, state.next_version) if n not in state.history.expired | gone]
        ended = [
            edge
            for number in range(state.first, state.next_version)
            for edge in catalog.edges_to(line, number)
            if number not in kept or edge.start not in (-1, *kept)
        ]
        own = {row.version: row.txid for row in catalog.log(line).rows()}
        found.deltas = Ranges.of(edge.version for edge in ended if own[edge.version] == edge.txid)
        return found

    return patched((retention, "_plan", only_clean))


def edges_that_count() -> Patched:
    """Who expires takes an anchor or a fold for there as soon as the log has its intent."""
    plan = retention._plan

    def hopeful(catalog: Any, state: Any, line: str, gone: Any, *, is_final: bool) -> Any:
        found = plan(catalog, state, line, gone, is_final=is_final)
        if is_final:
            planned = {number for work in state.history.works if work.purpose != "expire" for number in work.versions}
            own = {row.version: row for row in catalog.log(line).rows()}
            found.deltas = found.deltas | Ranges.of(
                number
                for number in planned
                if number in own and own[number].base is not None and number not in state.history.dead
            )
        return found

    def begun(place: Any, goal: Any, base: Any = None, *, executor: Any, owner: Any, takeover: bool) -> None:
        log = place.catalog.fresh(goal.line)
        edges._open(place.catalog, log, goal, base, owner, takeover=takeover)

    return patched((retention, "_plan", hopeful), (retention, "add_edge", begun))


# ---------------------------------------------------------------------- names, groups


def log_after_the_name() -> Patched:
    """Who puts a tag or a pin does not read the log afterwards."""
    return patched((marks, "_require_stays", lambda *arguments: None))


def log_before_prepared() -> Patched:
    """A member says that it is prepared without reading the line's log."""
    acknowledge = Member._acknowledge

    def prepared(self: Any, version: Any, base_root: Any, root: str) -> None:
        acknowledge(self, "prepared", version, base_root, root)
        self._prepared = version

    return patched((Member, "prepared", prepared), (Member, "_without_expired", lambda self, state: state))


# ---------------------------------------------------------------------- edges, readers


def fencing_of_works() -> Patched:
    """An anchor or a fold counts as long as its work is open, whoever took it over meanwhile."""

    def require_ours(state: Any, work: Any) -> None:
        if state.history.work(work.txid) is None:
            raise FencedError("the work is over", key=work.txid)

    apply = fold.apply

    def lenient(state: LineState, record: Any, data: bytes) -> Any:
        if isinstance(record, Anchor | Fold):
            works = tuple(
                replace(work, attempt=record.attempt) if work.txid == record.txid else work
                for work in state.history.works
            )
            state = replace(state, history=replace(state.history, works=works))
        return apply(state, record, data)

    return patched((edges, "_require_ours", require_ours), (fold, "apply", lenient))


def proven_folds() -> Patched:
    """A fold joins masks alone, and nobody compares what comes out with the digests of both versions."""
    compose, at = ranges._fold, ranges.chunks_at

    def zeros(*arguments: Any) -> Any:
        return {chunk: 0 * bits for chunk, bits in at(*arguments).items()}

    def masks_alone(place: Any, job: Any, base: Any, steps: Any) -> Any:
        before, after = base.tables[job.space], steps[-1].tables[job.space]
        return [
            replace(item, row=(item.chunk, int(before[item.chunk] ^ after[item.chunk]), *item.row[2:]))
            for item in compose(place, job, base, steps)
        ]

    return patched(
        (ranges, "chunks_at", zeros), (ranges, "_fold", masks_alone), (ranges, "_check", lambda *arguments: None)
    )


def missing_judged_by_the_log() -> Patched:
    """An object that is missing is damage, wherever the log leads now."""
    return patched((moving, "have_moved", lambda *arguments: False))


def expired_are_refused() -> Patched:
    """A version that has expired is read while what leads to it is there."""
    return patched(
        (Catalog, "check_kept", lambda self, located: None), (Catalog, "is_expired", lambda *arguments: False)
    )


HISTORY_REMOVALS: Final[dict[str, tuple[Removal, str]]] = {
    "grace of what is dead": (grace, "history"),
    "grace of shared files": (grace_of_shared_files, "history, graces"),
    "open anchors and folds are not collected": (open_works, "history"),
    "open transactions are not collected": (open_transactions, "history"),
    "files and digests of versions kept by anchors": (what_edges_lead_to, "history"),
    "files of other versions": (files_of_others, "history"),
    "acknowledgements that stand": (acknowledgements_that_stand, "history, named"),
    "names read after the intent": (names_after_the_intent, "history, named"),
    "pins keep": (pins_keep, "history, named"),
    "tags keep": (tags_keep, "history, named"),
    "groups keep": (groups_keep, "history, named"),
    "forks keep": (forks_keep, "history"),
    "a way stays": (a_way_stays, "history"),
    "edges count from their record on": (edges_that_count, "history"),
    "log read after a name is put": (log_after_the_name, "history, named"),
    "log read before prepared": (log_before_prepared, "history, named"),
    "fencing of anchors and folds": (fencing_of_works, "history"),
    "proven folds": (proven_folds, "history"),
    "missing objects judged by the log": (missing_judged_by_the_log, "history, read"),
    "expired versions are refused": (expired_are_refused, "history"),
}
