"""What a report tells, against the states that it tells of."""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Iterator
from typing import Any

import handmade
import numpy as np
import pytest
from histories import Past, State, bits, changed, drawn, first_state
from hypothesis import given, settings
from hypothesis import strategies as st
from upkeep import through
from watched import Watched

import dcr_store
from dcr_store.errors import InvalidInputError, NotFoundError
from dcr_store.history.steps import histogram, steps
from dcr_store.layout.layout import LayoutBuilder
from dcr_store.objects.memory import MemoryObjects
from dcr_store.report import gather
from dcr_store.report.figures import Report
from dcr_store.report.layers import layer_of
from dcr_store.versions.catalog import Catalog


@pytest.fixture
def past() -> Iterator[Past]:
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=64) as store:
        yield Past(store)


def publish(past: Past, n: int, *, rate: float = 0.1, **state: Any) -> None:
    """Publish versions 0 to n - 1 with ``step`` and ``run.reward`` in their metadata."""
    rng = np.random.default_rng(n)
    now: State = {**first_state(rng), **state}
    for number in range(n):
        past.publish("main", now, step=number, run={"reward": number % 3}, seed=7, note="text", ok=True)
        now = {name: changed(array, rate, rng) for name, array in now.items()}


def n_changed(old: State, new: State) -> Counter[str]:
    """Return how many elements changed, by layer."""
    found: Counter[str] = Counter()
    for name, array in new.items():
        found[layer_of(name)] += int((bits(old[name]) != bits(array)).sum())
    return found


def n_elements(state: State) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, array in state.items():
        found[layer_of(name)] += bits(array).size
    return found


def nbytes(state: State) -> int:
    return sum(array.nbytes for array in state.values())


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_every_number_is_that_of_the_states(data: st.DataObject) -> None:
    with drawn(data, n_versions=5, expiring=data.draw(st.booleans())) as past:
        line = data.draw(st.sampled_from(sorted(past.states)))
        states = past.states[line]
        first = data.draw(st.integers(0, len(states) - 1))
        if past.store.log(line)[first].is_kept:
            report = past.store.report(f"{line}@{first}", line)
        else:
            first, report = 0, past.store.report(None, line)
        assert [(item.first, item.last) for item in report.columns] == [(n, n) for n in range(first, len(states))]
        assert (report.total.first, report.total.last) == (first, len(states) - 1)
        deltas = [n for n in range(first, len(states)) if (line, n) not in past.anchors]
        assert set(report.looked_into) <= set(deltas)
        kept = {int(name.rpartition("@")[2]) for name in past.kept() if name.startswith(f"{line}@")}
        readable = {n for n in deltas if n in kept and n - 1 in kept}
        assert readable <= set(report.looked_into), "its delta is the way, or is kept for it"
        for item in report.columns:
            n = item.first
            assert item.dense_nbytes == nbytes(states[n])
            assert item.n_expired == (n not in kept)
            if n in deltas:
                by_layer = n_changed(states[n - 1], states[n])
                assert (item.n_whole, item.changed, item.elements) == (
                    0,
                    by_layer.total(),
                    n_elements(states[n]).total(),
                )
                assert item.rate == item.lowest_rate == item.highest_rate == item.changed / item.elements
                assert item.state_nbytes == nbytes(states[n])
                assert item.nbytes == past.store.log(line)[n].nbytes
            else:
                assert (item.n_whole, item.rate, item.nbytes_each, item.ratio) == (1, None, None, None)
        last = n_elements(states[-1])
        for layer in report.layers:
            expected = []
            for n in range(first, len(states)):
                is_known = n in report.looked_into
                here, sizes = (n_changed(states[n - 1], states[n]), n_elements(states[n])) if is_known else ({}, {})
                names = set(sizes) - set(last) if layer.name == "(other layers)" else {layer.name}
                part, whole = (sum(found.get(name, 0) for name in names) for found in (here, sizes))
                expected.append(part / whole if whole else None)
            assert layer.rates == tuple(expected), layer.name
        for moved in report.moved:
            old, new = states[moved.version - 1], states[moved.version]
            found, up, largest = np.zeros(64, np.int64), 0, 0
            for name, dtype in {
                "net.a.weight": "BF16",
                "net.b.weight": "BF16",
                "net.a.bias": "F32",
                "step": "I32",
            }.items():
                its = steps(dtype, bits(old[name]), bits(new[name]))
                found += histogram(its.distance)
                up += int(its.is_up.sum())
                largest = max(largest, int(its.distance.max(initial=0)))
            for name in set(new) - {"net.a.weight", "net.b.weight", "net.a.bias", "step"}:
                dtype = "C128" if name == "c" else "I64"
                its = steps(dtype, bits(old[name]), bits(new[name]))
                found += histogram(its.distance)
                up += int(its.is_up.sum())
                largest = max(largest, int(its.distance.max(initial=0)))
            assert moved.measured.steps == tuple(np.trim_zeros(found, "b").tolist())
            assert (moved.measured.up, moved.measured.largest_ulp) == (up, largest)
            assert moved.measured.up + moved.measured.down == found.sum()


class TestColumns:
    def test_many_versions_share_few(self, past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gather, "N_COLUMNS", 3)
        publish(past, 8)
        report = past.store.report()
        assert [(item.first, item.last) for item in report.columns] == [(0, 1), (2, 4), (5, 7)]
        log = past.store.log()
        for item in report.columns:
            infos = [info for info in log[item.first : item.last + 1] if info.base is not None]
            rates = [info.changed / info.elements for info in infos]
            assert (item.lowest_rate, item.highest_rate) == (min(rates), max(rates))
            assert item.rate == sum(info.changed for info in infos) / sum(info.elements for info in infos)
            assert item.nbytes_each == sum(info.nbytes for info in infos) / len(infos)
            assert item.n_deltas == len(infos)
        assert report.total.n_whole == 1
        metrics = {item.name: item for item in report.metrics}
        assert list(metrics) == ["run.reward", "seed", "step"], "no text, no truth value"
        assert [item and (item.n, item.mean, item.lowest, item.highest) for item in metrics["step"].columns] == [
            (2, 0.5, 0, 1), (3, 3, 2, 4), (3, 6, 5, 7)
        ]  # fmt: skip
        assert (metrics["seed"].is_constant, metrics["step"].is_constant) == (True, False)
        # Of each column all that were read count.
        assert report.looked_into == (1, 2, 3, 4, 5, 6, 7)
        layer = next(item for item in report.layers if item.name == "net.b")
        found = [n_changed(a, b)["net.b"] for a, b in itertools.pairwise(past.states["main"])]
        assert layer.rates == (found[0] / 135, sum(found[1:4]) / 405, sum(found[4:]) / 405)

    def test_a_sample_is_spread(self, past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
        publish(past, 7)

        def looked_into(start: str | None, n: int) -> tuple[int, ...]:
            return past.store.report(start, n_looked_into=n, n_measured=0).looked_into

        assert looked_into(None, 2) == (3, 6)
        assert looked_into("main@3", 100) == (3, 4, 5, 6)
        assert past.store.report(n_looked_into=0).layers == ()
        monkeypatch.setattr(gather, "N_COLUMNS", 2)
        assert looked_into(None, 4) == (1, 2, 4, 6)

    def test_long_metadata_count(self, past: Past) -> None:
        for number in range(2):
            past.publish("main", {"w": np.arange(4)}, loss=number / 2, text="x" * 5000)
        (metric,) = past.store.report().metrics
        assert [item and item.mean for item in metric.columns] == [0.0, 0.5]


class TestWhatIsRead:
    def test_counts_read_deltas_alone(self, past: Past) -> None:
        publish(past, 4)
        watched = Watched(past.store._objects)
        catalog = through(past.store, watched)._catalog
        report = gather.report(catalog, n_measured=0)
        assert (report.looked_into, report.moved) == ((1, 2, 3), ())
        whole, *deltas = (past.store._catalog.contents(past.store._catalog.resolve(f"main@{n}")) for n in range(4))
        assert all(watched.count("get", item.key) == 1 for contents in deltas for item in contents.partitions)
        assert not any(watched.count("get", item.key) for item in whole.partitions)

    def test_measured_are_those_next_to_anchors(self, past: Past) -> None:
        publish(past, 7)
        past.store.anchor("main@2")
        past.store.anchor("main@4")
        assert [item.version for item in past.store.report(n_measured=2).moved] == [3, 5]

    def test_overwrites_that_leave_a_value_are_no_changes(self, past: Past) -> None:
        builder = LayoutBuilder()
        builder.add("a.w", "U16", (200,))
        builder.add("b.w", "U16", (30,))
        layout, rng = builder.build(), np.random.default_rng(0)
        base = handmade.zeros(layout)
        base["u16"][:] = rng.integers(1, 100, layout.spaces["u16"])
        base["u16"][230:] = 0
        base["u16"][200:224] = 0
        first = handmade.publish(past.store, layout, [handmade.Part(mask=base)], None)
        present = np.zeros(layout.spaces["u16"], np.uint8)
        present[:200] = rng.random(200) < 0.3
        value = np.where(rng.random(present.size) < 0.5, first["u16"], 7777).astype(np.uint16)
        mask = np.zeros(present.size, np.uint16)
        mask[1:200] = np.where((rng.random(199) < 0.1) & (present[1:200] == 0), 3, 0)
        part = handmade.Part(mask={"u16": mask}, present={"u16": present}, value={"u16": value})
        second = handmade.publish(past.store, layout, [part], first)
        report = past.store.report()
        expected = int((first["u16"] != second["u16"]).sum())
        assert {item.name: item.changed for item in report.layers} == {"a": expected, "b": 0}

    def test_what_overwrites_a_base_that_is_gone_is_not_known(
        self, past: Past, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        builder = LayoutBuilder()
        builder.add("w", "U16", (64,))
        layout = builder.build()
        base = handmade.zeros(layout)
        base["u16"][:] = 5
        first = handmade.publish(past.store, layout, [handmade.Part(mask=base)], None)
        present, value = np.zeros(64, np.uint8), np.zeros(64, np.uint16)
        present[3], value[3] = 1, 6
        handmade.publish(past.store, layout, [handmade.Part(present={"u16": present}, value={"u16": value})], first)
        assert past.store.report(n_measured=0).looked_into == (1,)
        monkeypatch.setattr(Catalog, "path_from_zero", lambda self, located: None)
        assert past.store.report(n_measured=0).looked_into == ()

    def test_deltas_of_expired_versions_are_told_while_they_are_there(self, past: Past) -> None:
        publish(past, 6)
        past.store.expire("main", keep_last=1, keep_every=3)
        report = past.store.report()
        assert [item.n_expired for item in report.columns] == [0, 1, 1, 0, 1, 0]
        assert report.total.changed == sum(n_changed(a, b).total() for a, b in itertools.pairwise(past.states["main"]))
        dead = past.store._catalog.log("main").state.history.dead
        assert report.looked_into == tuple(n for n in range(1, 6) if n not in dead)
        assert all(item.version in (0, 3, 5) for item in report.moved)

    def test_what_expires_meanwhile_is_not_known(self, past: Past) -> None:
        publish(past, 4)
        watched = Watched(past.store._objects)
        catalog = through(past.store, watched)._catalog
        (item,) = past.store._catalog.contents(past.store._catalog.resolve("main@2")).partitions[:1]

        def expire(method: str, key: str) -> None:
            if key == item.key:
                watched.before = None
                past.store.expire("main", keep_last=1)
                past.store.gc(grace_s=0)

        watched.before = expire
        report = gather.report(catalog)
        assert report.looked_into == (1,)
        assert report.moved == ()


class TestPartitions:
    def test_largest_and_slowest(self, past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
        publish(past, 3)
        catalog = past.store._catalog
        versions = [catalog.resolve(f"main@{n}") for n in range(1, 3)]
        delays, parts = {}, {}
        for located in versions:
            for item in catalog.contents(located).partitions:
                delays[item.key] = 10.0 * located.row.version + item.partition.nbytes / 1000
                parts[item.key] = (located.row.version, item.array.array, item.partition.nbytes)
        begun = {f"log/main/{located.row.begin_seq:020d}.json": 1000.0 for located in versions}
        right = MemoryObjects.dated

        def dated(self: MemoryObjects, prefix: str) -> dict[str, tuple[int, float]]:
            found = right(self, prefix)
            return {key: (n, begun.get(key, 1000.0 + delays.get(key, 0))) for key, (n, _) in found.items()}

        monkeypatch.setattr(MemoryObjects, "dated", dated)
        report = past.store.report()
        by_nbytes = sorted((nbytes for _, _, nbytes in parts.values()), reverse=True)
        assert [item.nbytes for item in report.largest] == by_nbytes[:10]
        slow = sorted(delays, key=lambda key: -delays[key])[:10]
        assert [(item.version, item.array, item.nbytes) for item in report.slowest] == [parts[key] for key in slow]
        assert [item.seconds for item in report.slowest] == pytest.approx([delays[key] for key in slow])
        item = next(item for item in report.largest if item.array == "u16/mask")
        assert (item.first, item.last, item.n_tensors) == ("net.a.weight", "net.b.weight", 2)

    def test_a_store_that_tells_no_times(self, past: Past) -> None:
        publish(past, 2)
        catalog = through(past.store, Watched(past.store._objects))._catalog
        report = gather.report(catalog)
        assert report.slowest == ()
        assert report.largest
        assert {item.seconds for item in report.largest} == {None}


def test_groups_of_the_line(past: Past) -> None:
    publish(past, 3)
    past.fork("main", 1, "exp")
    past.store.create_group("eu", ["r1"])
    past.store.create_group("us", ["r1"], line="exp")
    assert [(item.group, item.lag) for item in past.store.report().groups] == [("eu", 3)]
    assert [(item.group, item.lag) for item in past.store.report(stop="exp").groups] == [("us", 2)]


def test_a_line_without_values() -> None:
    store = dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=64)
    for _ in range(2):
        with store.begin() as transaction:
            transaction.write("empty", np.zeros((0, 4), np.float32))
    report = store.report()
    assert report.state_nbytes == 0
    assert "main@1" in report.to_html()


def test_a_line_of_one_version(past: Past) -> None:
    publish(past, 1)
    report = past.store.report()
    assert (report.layers, report.moved, report.largest, report.total.rate) == ((), (), (), None)
    assert "100 %" not in report.to_html()


@pytest.mark.parametrize(
    ("start", "stop", "error", "message"),
    [
        ("main@2", "main@1", InvalidInputError, "from an older version .*expected a version of main up to main@1"),
        ("exp@2", "main", InvalidInputError, "found exp@2"),
        ("main@2", "exp", InvalidInputError, "expected a version of exp up to exp@2"),
        ("main@9", "main", NotFoundError, "main@9"),
        (None, "none", NotFoundError, "no version on line 'none'"),
    ],
)
def test_ranges_that_are_none(past: Past, start: str | None, stop: str, error: type[Exception], message: str) -> None:
    publish(past, 3)
    past.fork("main", 1, "exp")
    past.publish(
        "exp", {name: array[..., ::-1] if array.ndim else array for name, array in past.state("exp@1").items()}
    )
    with pytest.raises(error, match=message):
        past.store.report(start, stop)
    assert past.store.report("main@1", "exp").first == 1


@pytest.mark.parametrize("n", [-1, True, 1.5])
def test_numbers_that_are_none(past: Past, n: Any) -> None:
    publish(past, 1)
    with pytest.raises(InvalidInputError, match="n_looked_into"):
        past.store.report(n_looked_into=n)
    with pytest.raises(InvalidInputError, match="n_measured"):
        past.store.report(n_measured=n)


def test_json_is_json(past: Past) -> None:
    import json

    publish(past, 3)
    found = past.store.report().to_json()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["from"], found["to"], found["line"]) == ("main@0", "main@2", "main")
    assert set(found) == {field for field in Report.__slots__ if field not in ("first", "last")} | {"from", "to"}
