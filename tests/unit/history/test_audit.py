"""Diff, blame and identify against brute force over pasts with forks, folds, anchors, other layouts and expiry."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path
from typing import Any

import handmade
import numpy as np
import pytest
from histories import Array, Past, State, bits, changed, drawn, first_state
from hypothesis import given, settings
from hypothesis import strategies as st
from states import write_hf
from watched import Watched

import dcr_store
from dcr_store.errors import IntegrityError, InvalidInputError, NotFoundError
from dcr_store.history.blame import Blame, blame
from dcr_store.history.changed import Diff, TensorDiff
from dcr_store.history.diff import diff
from dcr_store.layout.layout import LayoutBuilder
from dcr_store.store import Store
from dcr_store.versions import pairs
from dcr_store.versions.catalog import Catalog


def place(n_bits: int, kind: str, value: int) -> int:
    """Return where bits stand in the order of the values of a dtype, by arithmetic."""
    top = 1 << (n_bits - 1)
    if kind == "i":
        return value - 2 * top if value >= top else value
    return -(value % top) - 1 if value >= top else value


def expected(name: str, old: Array, new: Array) -> dict[str, Any]:
    """Return what a diff has to say of a tensor, one element after the other."""
    a, b = bits(old), bits(new)
    where = [at for at in range(a.size) if a[at] != b[at]]
    kind = "i" if old.dtype.kind == "i" else "f"
    moves = [place(8 * a.itemsize, kind, int(b[at])) - place(8 * a.itemsize, kind, int(a[at])) for at in where]
    n_steps = max((abs(move).bit_length() for move in moves), default=0)
    per_row = a.size // old.shape[0] if old.shape else 1
    rows: dict[int, int] = {}
    for at in where:
        rows[at // per_row] = rows.get(at // per_row, 0) + 1
    return {
        "name": name,
        "status": "changed" if where else "same",
        "changed": len(where),
        "elements": a.size,
        "up": sum(move > 0 for move in moves),
        "down": sum(move < 0 for move in moves),
        "largest_ulp": max(map(abs, moves), default=0),
        "steps": [sum(abs(move).bit_length() == k + 1 for move in moves) for k in range(n_steps)],
        "rows_changed": len(rows),
        "top_rows": [{"row": row, "changed": n} for row, n in sorted(rows.items(), key=lambda r: (-r[1], r[0]))[:3]],
    }


def check_diff(found: Diff, old: State, new: State, *, only_counts: bool) -> None:
    assert [item.name for item in found.tensors] == [*new, *(name for name in old if name not in new)]
    for item in found.tensors:
        if item.name not in old or item.name not in new:
            assert item.status == ("added" if item.name in new else "removed")
            assert (item.measured, item.rows_changed, item.top_rows) == (None, None, ())
            continue
        right = expected(item.name, old[item.name], new[item.name])
        if only_counts and right["changed"]:
            right |= dict.fromkeys(("up", "down", "largest_ulp", "steps"))
        document = item.to_json()
        assert {key: document[key] for key in right} == right
        assert document["rate"] == (right["changed"] / right["elements"] if right["elements"] else 0.0)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_diff_is_that_of_brute_force(data: st.DataObject) -> None:
    with drawn(data, expiring=data.draw(st.booleans())) as past, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "BATCH_NBYTES", data.draw(st.sampled_from([1, 512, 1 << 26])))
        kept = past.kept()
        for _ in range(4):
            a, b = (data.draw(st.sampled_from(past.names())) for _ in range(2))
            only_counts = data.draw(st.booleans())
            if not {a, b} <= kept:
                with pytest.raises(NotFoundError, match="expired"):
                    past.store.diff(a, b, only_counts=only_counts)
                continue
            found = past.store.diff(a, b, n_rows=3, only_counts=only_counts)
            assert (found.a, found.b) == (a, b)
            check_diff(found, past.state(a), past.state(b), only_counts=only_counts)
            other = past.store.diff(a, b, only_counts=not only_counts)
            assert [item.nbytes for item in other.tensors] == [item.nbytes for item in found.tensors]


def new_store(chunk_elements: int = 64) -> Store:
    return dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=chunk_elements)


def steps(store: Store, n: int, seed: int = 0) -> list[State]:
    rng = np.random.default_rng(seed)
    past, state = Past(store), first_state(rng)
    for _ in range(n):
        past.publish("main", state)
        state = {name: changed(array, 0.1, rng) for name, array in state.items()}
    return past.states["main"]


def partitions_of(store: Store, version: str) -> list[str]:
    return [item.key for item in store._catalog.contents(store._catalog.resolve(version)).partitions]


class TestDiff:
    @pytest.mark.parametrize(("a", "b"), [(1, 2), (0, 1), (2, 0), (1, 1)])
    def test_neighbours_are_counted_without_their_anchor(self, a: int, b: int) -> None:
        with new_store() as store:
            states = steps(store, 3)
            for key in partitions_of(store, "main@0"):
                store._objects.delete(key)
            found = store.diff(f"main@{a}", f"main@{b}", n_rows=3, only_counts=True)
            check_diff(found, states[a], states[b], only_counts=True)
            if a != b:
                with pytest.raises(IntegrityError, match="missing"):
                    store.diff(f"main@{a}", f"main@{b}")

    def test_versions_of_two_lines_are_counted_from_where_they_part(self) -> None:
        with new_store() as store:
            states = steps(store, 3)
            past = Past(store)
            past.states["main"] = states
            past.fork("main", 1, "exp")
            rng = np.random.default_rng(9)
            past.publish("exp", {name: changed(array, 0.1, rng) for name, array in states[1].items()})
            for key in partitions_of(store, "main@0"):
                store._objects.delete(key)
            for a, b in (("main@2", "exp@2"), ("exp@2", "main@2"), ("main@1", "exp@2"), ("exp@1", "main@2")):
                found = store.diff(a, b, n_rows=3, only_counts=True)
                check_diff(found, past.state(a), past.state(b), only_counts=True)

    def test_only_what_changed_is_read(self) -> None:
        """Of a store with many partitions, those of chunks that are the same are left alone."""
        with new_store() as store:
            rng = np.random.default_rng(0)
            state = {name: rng.integers(0, 9, 64 * 700, np.uint8) for name in ("a", "b")}
            past = Past(store)
            past.publish("main", state)
            past.publish("main", {**state, "a": np.where(np.arange(64 * 700) == 5, 77, state["a"]).astype(np.uint8)})
            watched = Watched(store._objects)
            catalog = Catalog(watched, store._document, store._catalog.store_sha256)
            found = diff(catalog, catalog.resolve("main@0"), catalog.resolve("main@1"))
            assert [item.changed for item in found.tensors] == [1, 0]
            keys = [*partitions_of(store, "main@0"), *partitions_of(store, "main@1")]
            assert len(keys) > 2
            assert sum(watched.count("get", key) for key in keys) == 2, "one of the anchor, one of the delta"

    def test_overwrites_that_leave_a_value_are_no_changes(self) -> None:
        builder = LayoutBuilder()
        entry = builder.add("w", "U16", (40, 5))
        layout = builder.build()
        rng = np.random.default_rng(0)
        with new_store() as store:
            base = handmade.zeros(layout)
            base["u16"][:] = rng.integers(1, 100, layout.spaces["u16"])
            first = handmade.publish(store, layout, [handmade.Part(mask=base)], None)
            present = (rng.random(layout.spaces["u16"]) < 0.3).astype(np.uint8)
            value = np.where(rng.random(present.size) < 0.5, first["u16"], 7777).astype(np.uint16)
            mask = np.where((rng.random(present.size) < 0.1) & (present == 0), 3, 0).astype(np.uint16)
            part = handmade.Part(mask={"u16": mask}, present={"u16": present}, value={"u16": value})
            second = handmade.publish(store, layout, [part], first)
            a, b = ({"w": each["u16"][: entry.n_elements].reshape(40, 5)} for each in (first, second))
            for only_counts in (False, True):
                found = store.diff("main@0", "main@1", n_rows=3, only_counts=only_counts)
                rows = int((a["w"] != b["w"]).any(axis=1).sum())
                assert (found.changed, found.tensors[0].rows_changed) == (int((a["w"] != b["w"]).sum()), rows)
            last = [rows_of(store.blame("main@1", "w"))[row] for row in range(40)]
            assert last == [
                ("main@1", True) if (a["w"] != b["w"])[row].any() else ("main@0", False) for row in range(40)
            ]

    def test_masks_that_miss_the_digests_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with new_store() as store:
            steps(store, 2)
            catalog = store._catalog
            tables = {space: table.copy() for space, table in catalog.tables(catalog.resolve("main@0")).items()}
            tables["u16"][0] ^= np.uint64(1)
            right = Catalog.tables
            monkeypatch.setattr(
                Catalog, "tables", lambda self, its: tables if its.row.version == 0 else right(self, its)
            )
            with pytest.raises(IntegrityError, match="chunk 0 of u16: its deltas do not lead from main@0"):
                store.diff("main@0", "main@1", only_counts=True)

    def test_modules(self) -> None:
        with new_store() as store:
            steps(store, 2)
            found = store.diff("main@0", "main@1")
            by_name = {item.name: item for item in found.tensors}
            groups = {
                None: {"net.a": ["net.a.weight", "net.a.bias"], "net.b": ["net.b.weight"], "": ["c", "step"]},
                1: {"net": ["net.a.weight", "net.a.bias", "net.b.weight"], "": ["c", "step"]},
                9: {"net.a": ["net.a.weight", "net.a.bias"], "net.b": ["net.b.weight"], "": ["c", "step"]},
            }
            for depth, names in groups.items():
                modules = {item.name: item for item in found.modules(depth)}
                assert set(modules) == set(names)
                for name, members in names.items():
                    check_module(modules[name].to_json(), [by_name[member] for member in members])
            assert all(item.measured is None for item in store.diff("main@0", "main@1", only_counts=True).modules())
            for depth in (0, -1, True):
                with pytest.raises(InvalidInputError, match="depth"):
                    found.modules(depth)

    def test_table(self) -> None:
        with new_store() as store:
            past = Past(store)
            past.publish("main", {"a": np.arange(4, dtype=np.int16), "gone": np.zeros(2, np.int8)})
            past.publish("main", {"a": np.array([0, 4, 2, 0], np.int16), "new": np.zeros((3, 1), np.int8)})
            table = store.diff("main@0", "main@1").to_table()
            assert {name: column.dtype.kind for name, column in table.items()} == {
                "name": "O", "status": "O", "dtype": "O", "shape": "O", "elements": "i", "changed": "i", "rate": "f",
                "nbytes": "i", "rows_changed": "f", "up": "f", "down": "f", "largest_ulp": "f", "ulp_1": "f",
                "ulp_2": "f",
            }  # fmt: skip
            assert table["name"].tolist() == ["a", "new", "gone"]
            assert table["shape"].tolist() == [(4,), (3, 1), (2,)]
            assert table["changed"].tolist() == [2, 3, 2]
            for name, value in {
                "up": 1,
                "down": 1,
                "largest_ulp": 3,
                "ulp_1": 0,
                "ulp_2": 2,
                "rows_changed": 2,
            }.items():
                assert table[name][0] == value
                assert np.isnan(table[name][1:]).all()
            assert {column.shape for column in table.values()} == {(3,)}

    def test_arguments(self) -> None:
        with new_store() as store:
            steps(store, 1)
            for n_rows in (-1, True, "3"):
                with pytest.raises(InvalidInputError, match="n_rows"):
                    store.diff("main", "main", n_rows=n_rows)  # type: ignore[arg-type]


def check_module(found: dict[str, Any], members: list[TensorDiff]) -> None:
    for name in ("elements", "changed", "nbytes"):
        assert found[name] == sum(getattr(item, name) for item in members)
    assert found["n_tensors"] == len(members)
    assert found["n_changed"] == sum(item.status == "changed" for item in members)
    measured = [item.measured for item in members if item.measured is not None]
    assert (found["up"], found["down"]) == (sum(m.up for m in measured), sum(m.down for m in measured))
    assert found["largest_ulp"] == max(m.largest_ulp for m in measured)
    assert sum(found["steps"]) == found["up"] + found["down"]
    assert len(found["steps"]) == found["largest_ulp"].bit_length()


def rows_of(found: Blame) -> dict[int, tuple[str, bool]]:
    """Return what was found of each row."""
    result: dict[int, tuple[str, bool]] = {}
    for run in found.runs:
        for row in range(run.start, run.stop, run.step):
            assert row not in result
            result[row] = run.version, run.is_exact
    assert list(result) == sorted(result)
    assert all(a != b for a, b in zip(list(found.runs), found.runs[1:], strict=False))
    return result


indices = st.sampled_from([
    None, ..., 3, slice(2, 9), slice(None, None, 2), slice(None, None, -3), (slice(0, 0), ...), (slice(1, 4), 2),
    (slice(None), slice(0, 3)), (..., slice(1, 5, 2)), (4, 1), (slice(2, 5), slice(1, 2), slice(None, None, -4)),
])  # fmt: skip


def selected(array: Array, index: Any) -> dict[int, Array]:
    """Return which elements of each row an index selects, as NumPy understands it: row → bool of shape (n,)."""
    marks = np.zeros(array.shape, bool)
    marks[... if index is None else index] = True
    rows = marks.reshape(array.shape[0] if array.shape else 1, -1)
    return {row: mark for row, mark in enumerate(rows) if mark.any()}


@settings(max_examples=14, deadline=None)
@given(st.data())
def test_blame_is_that_of_brute_force(data: st.DataObject) -> None:
    expiring = data.draw(st.booleans())
    with drawn(data, expiring=expiring) as past:
        kept = past.kept()
        for _ in range(4):
            asked = data.draw(st.sampled_from(past.names()))
            line, _, number = asked.partition("@")
            name = data.draw(st.sampled_from(sorted(past.state(asked))))
            index, array = data.draw(indices), past.state(asked)[name]
            if asked not in kept:
                with pytest.raises(NotFoundError, match="expired"):
                    past.store.blame(asked, name, index)
                continue
            try:
                rows = selected(array, index)
            except IndexError:
                with pytest.raises(InvalidInputError):
                    past.store.blame(asked, name, index)
                continue
            found = past.store.blame(asked, name, index)
            assert (found.version, found.tensor) == (asked, name)
            assert list(rows_of(found)) == list(rows)
            assert {run.version: run.is_kept for run in found.runs} == {
                run.version: run.version in kept for run in found.runs
            }
            for row, (version, is_exact) in rows_of(found).items():
                states = [
                    bits(state[name]).reshape(len(rows) if not array.shape else array.shape[0], -1)[row]
                    if name in state
                    else None
                    for state in past.states[line]
                ]
                mark = np.repeat(rows[row], 2) if array.dtype == np.complex128 else rows[row]
                at = int(version.partition("@")[2])
                same = [s is not None and bool((s[mark] == states[int(number)][mark]).all()) for s in states]
                assert same[at]
                if is_exact:
                    assert not same[at - 1]
                    assert (line, at) not in past.anchors
                if not expiring:
                    last = next(
                        (w for w in range(int(number), 0, -1) if (line, w) in past.anchors or not same[w - 1]), 0
                    )
                    assert (at, is_exact) == (last, last > 0 and (line, last) not in past.anchors)
                else:
                    assert all(same[w] for w in range(at, int(number) + 1) if f"{line}@{w}" in kept)


class TestBlame:
    def test_reads_no_anchor(self) -> None:
        with new_store() as store:
            steps(store, 4)
            before = store.blame("main", "net.a.weight")
            for key in partitions_of(store, "main@0"):
                store._objects.delete(key)
            assert store.blame("main", "net.a.weight") == before

    def test_stops_when_all_is_found(self) -> None:
        with new_store() as store:
            past = Past(store)
            for value in range(4):
                past.publish("main", {"a": np.full((5, 2), value), "b": np.full(3, value // 3)})
            for key in store._objects.list("versions/main/"):
                if not key.startswith("versions/main/000000000003-"):
                    store._objects.delete(key)
            store = dcr_store.open(store.url)
            assert [run.to_json() for run in store.blame("main", "a").runs] == [
                {"start": 0, "stop": 5, "step": 1, "version": "main@3", "exact": True, "kept": True}
            ]

    def test_a_delta_tells_more_than_a_fold(self) -> None:
        with new_store() as store:
            past = Past(store)
            for value in range(4):
                past.publish("main", {"a": np.array([value, min(value, 2), min(value, 1), 7])})
            store.fold("main@0", "main@3")
            right = {0: ("main@3", True), 1: ("main@2", True), 2: ("main@1", True), 3: ("main@0", False)}
            assert rows_of(store.blame("main", "a")) == right
            assert rows_of(store.blame("main", "a", slice(None, None, 2))) == {0: right[0], 2: right[2]}

    def test_beyond_a_fold_it_is_one_of_several(self) -> None:
        with new_store() as store:
            past = Past(store)
            for value in range(5):
                past.publish("main", {"a": np.array([value, min(value, 2), 7])})
            store.fold("main@0", "main@3")
            edges = Catalog.edges_to
            with pytest.MonkeyPatch.context() as patch:  # as if the deltas that the fold stands for had been dropped
                patch.setattr(
                    Catalog,
                    "edges_to",
                    lambda self, line, n: [e for e in edges(self, line, n) if n != 3 or e.start == 0],
                )
                found = rows_of(store.blame("main", "a"))
            assert found == {0: ("main@4", True), 1: ("main@3", False), 2: ("main@0", False)}

    def test_by_an_alias_and_without_dimensions(self) -> None:
        with new_store() as store:
            a, c = np.arange(6.0), np.array(1.5)
            for step in range(3):
                with store.begin() as transaction:
                    array = a + (np.arange(6) == 2) * step
                    transaction.write("x", array)
                    transaction.write("y", array)
                    transaction.write("c", c + step // 2)
            assert rows_of(store.blame("main", "y"))[2] == ("main@2", True)
            assert rows_of(store.blame("main", "y"))[1] == ("main@0", False)
            assert rows_of(store.blame("main@1", "c")) == {0: ("main@0", False)}
            assert rows_of(store.blame("main@2", "c")) == {0: ("main@2", True)}

    def test_packed_dtypes(self) -> None:
        builder = LayoutBuilder()
        for name, shape in (("even", (6, 4)), ("odd", (3, 3)), ("one", (1, 3))):
            builder.add(name, "F4", shape)
        layout = builder.build()
        with new_store() as store:
            base = handmade.zeros(layout)
            base["u8"][:] = 1
            first = handmade.publish(store, layout, [handmade.Part(mask=base)], None)
            mask = handmade.zeros(layout)["u8"]
            mask[5] = 1
            handmade.publish(store, layout, [handmade.Part(mask={"u8": mask})], first)
            assert {row for row, it in rows_of(store.blame("main", "even")).items() if it[1]} == {2}
            assert rows_of(store.blame("main", "one")) == {0: ("main@0", False)}
            for name, index in (("odd", None), ("even", 2)):
                with pytest.raises(InvalidInputError, match="smaller than a byte"):
                    store.blame("main", name, index)
            found = {item.name: item for item in store.diff("main@0", "main@1").tensors}
            assert (found["even"].top_rows, found["even"].measured) == (((2, 1),), None)
            assert found["odd"].rows_changed is None

    def test_what_overwrites_a_base_that_is_gone_ends_the_search(self, monkeypatch: pytest.MonkeyPatch) -> None:
        builder = LayoutBuilder()
        builder.add("w", "U16", (64,))
        layout = builder.build()
        with new_store() as store:
            base = handmade.zeros(layout)
            base["u16"][:] = 5
            first = handmade.publish(store, layout, [handmade.Part(mask=base)], None)
            present, value = np.zeros(64, np.uint8), np.zeros(64, np.uint16)
            present[3], value[3] = 1, 6
            mask = np.zeros(64, np.uint16)
            mask[9] = 1
            part = handmade.Part(mask={"u16": mask}, present={"u16": present}, value={"u16": value})
            handmade.publish(store, layout, [part], first)
            catalog = store._catalog
            located = catalog.resolve("main@1")
            assert rows_of(blame(catalog, located, "w"))[3] == ("main@1", True)
            monkeypatch.setattr(Catalog, "path_from_zero", lambda self, located: None)
            found = rows_of(blame(catalog, located, "w"))
            assert found[9] == ("main@1", True)
            assert found[3] == found[0] == ("main@1", False)

    def test_arguments(self) -> None:
        with new_store() as store:
            steps(store, 1)
            with pytest.raises(NotFoundError, match="did you mean"):
                store.blame("main", "net.a.weigh")
            with pytest.raises(InvalidInputError, match="out of bounds"):
                store.blame("main", "net.a.weight", 19)
            assert store.blame("main", "net.a.weight", slice(3, 3)).runs == ()


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_identify_is_that_of_brute_force(data: st.DataObject) -> None:
    with (
        drawn(data, expiring=data.draw(st.booleans()), for_files=True) as past,
        tempfile.TemporaryDirectory() as directory,
    ):
        kept = past.kept()
        own = {info.version: info for line in past.states for info in past.store.log(line)}
        for n in range(3):
            name = data.draw(st.sampled_from(past.names()))
            state = dict(past.state(name))
            rng = np.random.default_rng(n)
            spoiled = data.draw(st.sampled_from(["", "", "net.a.weight", "c"]))
            if spoiled:
                state[spoiled] = changed(state[spoiled], 0.2, rng)
            shuffled = {key: state[key] for key in rng.permutation(list(state))}
            path = write_hf(Path(directory) / str(n), shuffled, data.draw(st.integers(1, 3)))
            strict = data.draw(st.booleans())
            equal = [v for v in past.names() if same_state(past.state(v), state)]
            if strict and equal and not set(equal) & kept:
                with pytest.raises(NotFoundError, match="expired"):
                    past.store.identify(path, strict=True)
                continue
            found = past.store.identify(path, strict=strict)
            assert found.is_exact == bool(equal)
            if found.is_exact:
                assert found.version == found.versions[0]
                assert (found.version in kept) == bool(set(equal) & kept)
                assert set(found.versions) <= set(equal)
                assert {own[v].root for v in equal} >= {own[v].root for v in found.versions} == {found.root}
                assert set(found.expired) == set(found.versions) - kept
                assert (found.is_proven, found.tensors) == (strict, ())
                continue
            assert (found.versions, found.expired, found.is_proven) == ((), (), False)
            assert found.version in kept
            nearest = past.state(found.version)
            wrong = {
                key: int((bits(array) != bits(state[key])).sum()) for key, array in nearest.items() if key in state
            }
            right = {key: ("differs", n_wrong) for key, n_wrong in wrong.items() if n_wrong}
            right |= {key: ("missing", bits(array).size) for key, array in nearest.items() if key not in state}
            right |= {key: ("extra", bits(array).size) for key, array in state.items() if key not in nearest}
            assert {item.name: (item.status, item.differing) for item in found.tensors} == right
            if layout_fits(nearest, state):
                candidates = [past.state(v) for v in kept if layout_fits(past.state(v), state)]
                assert found.chunks_equal == max(n_equal(each, state) for each in candidates)


def test_the_root_is_of_the_tensors_that_fit_also_where_only_others_are_kept(tmp_path: Path) -> None:
    old = {"a": np.arange(9, dtype=np.float32), "b": np.arange(5, dtype=np.int64)}
    other = {**old, "a": old["a"] + 1}
    stores = [dcr_store.create(f"memory://{secrets.token_hex(8)}") for _ in range(2)]
    for store, states in zip(stores, [[old, {"b": old["b"]}], [other]], strict=True):
        for state in states:
            with store.begin() as transaction:
                for name, array in state.items():
                    transaction.write(name, array)
    stores[0].expire(keep_last=1)
    found = stores[0].identify(write_hf(tmp_path / "other", other))
    assert (found.version, found.is_exact, found.root) == ("main@1", False, stores[1].log()[0].root)


def same_state(a: State, b: State) -> bool:
    return layout_fits(a, b) and all((bits(a[name]) == bits(b[name])).all() for name in a)


def layout_fits(a: State, b: State) -> bool:
    return {n: (x.dtype, x.shape) for n, x in a.items()} == {n: (x.dtype, x.shape) for n, x in b.items()}


def n_equal(version: State, state: State, size: int = 64) -> int:
    """Return how many chunks two states have in common, in the layout of the first."""
    spaces: dict[int, tuple[bytes, bytes]] = {}
    for name, array in version.items():
        width = bits(array).itemsize
        a, b = spaces.get(width, (b"", b""))
        pad = bytes(-len(a) % 64)
        spaces[width] = a + pad + bits(array).tobytes(), b + pad + bits(state[name]).tobytes()
    return sum(
        a[at : at + size * width] == b[at : at + size * width]
        for width, (a, b) in spaces.items()
        for at in range(0, len(a), size * width)
    )
