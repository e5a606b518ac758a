"""Finding versions: references, lines, chains and routes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from watched import Watched

import dcr_store
from dcr_store.errors import IntegrityError, InvalidInputError, NotFoundError
from dcr_store.store import Store
from dcr_store.versions import catalog as catalog_module
from dcr_store.versions.catalog import Catalog, LazyStates
from dcr_store.versions.route import route


@pytest.fixture
def store() -> Iterator[Store]:
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=64) as store:
        yield store


def publish(store: Store, line: str, *values: int, shape: int = 10) -> None:
    for value in values:
        with store.begin(line) as transaction:
            transaction.write("a", np.full(shape, value, np.int32))


def catalog(store: Store, objects: object = None) -> Catalog:
    """A catalog that knows nothing yet."""
    return Catalog(objects or store._objects, store._document, store._catalog.store_sha256)  # type: ignore[arg-type]


class TestResolve:
    def test_by_number_by_line_and_by_root(self, store: Store) -> None:
        publish(store, "main", 1, 2, 3)
        publish(store, "exp", 7)
        for number in range(3):
            located = catalog(store).resolve(f"main@{number}")
            assert (located.name, located.row.version) == (f"main@{number}", number)
            for n_digits in (8, 20, 64):
                assert catalog(store).resolve(located.row.root[:n_digits]).name == f"main@{number}"
        assert catalog(store).resolve("main").name == "main@2"
        assert catalog(store).resolve("exp").name == "exp@0"

    @pytest.mark.parametrize("reference", ["main@3", "main@999999999999", "other", "other@0", "0" * 64, "00000000"])
    def test_what_is_not_there(self, store: Store, reference: str) -> None:
        publish(store, "main", 1, 2, 3)
        with pytest.raises(NotFoundError) as caught:
            catalog(store).resolve(reference)
        assert caught.value.key is not None

    def test_errors_say_what_there_is(self, store: Store) -> None:
        with pytest.raises(NotFoundError, match="nothing has been published yet"):
            catalog(store).resolve("main")
        publish(store, "main", 1, 2)
        with pytest.raises(NotFoundError, match="the head of main is main@1"):
            catalog(store).resolve("main@2")
        with pytest.raises(NotFoundError, match="other lines: main"):
            catalog(store).resolve("mian")

    def test_a_line_that_was_begun_only_has_no_version(self, store: Store) -> None:
        transaction = store.begin("main")
        with pytest.raises(NotFoundError, match="no version on line 'main'"):
            catalog(store).resolve("main")
        transaction.abort()
        with pytest.raises(NotFoundError, match="no version on line 'main'"):
            catalog(store).resolve("main@0")

    def test_a_root_that_stands_twice(self, store: Store) -> None:
        """Equal states have one root: no ambiguity."""
        publish(store, "main", 1, 2, 1)
        publish(store, "exp", 1)
        root = catalog(store).resolve("main@0").row.root
        assert catalog(store).resolve("main@2").row.root == root
        assert catalog(store).resolve(root).row.root == root
        assert {located.name for located in catalog(store).find_root(root)} == {"main@0", "main@2", "exp@0"}

    def test_an_ambiguous_prefix(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """No two roots begin alike here, so their roots are made to."""
        publish(store, "main", 1, 2)
        real = Catalog.find_root

        def find_root(self: Catalog, prefix: str) -> object:
            return [
                located for located in real(self, "") if prefix == "abcdef01" or located.row.root.startswith(prefix)
            ]

        monkeypatch.setattr(Catalog, "find_root", find_root)
        with pytest.raises(
            InvalidInputError, match=r"the root prefix abcdef01 is ambiguous: main@1 .*, main@0 .*; give"
        ):
            catalog(store).resolve("abcdef01")

    def test_a_line_named_like_a_root(self, store: Store) -> None:
        publish(store, "deadbeef", 1)
        publish(store, "main", 2)
        assert catalog(store).resolve("deadbeef").name == "deadbeef@0"
        assert catalog(store).resolve("deadbeef@0").name == "deadbeef@0"
        root = catalog(store).resolve("main").row.root
        publish(store, root[:12], 3)
        assert catalog(store).resolve(root[:12]).name == "main@0", "a root first"
        assert catalog(store).resolve(f"{root[:12]}@0").name == f"{root[:12]}@0"
        assert catalog(store).resolve(root[:8]).name == "main@0"

    def test_a_shorter_prefix_is_a_line(self, store: Store) -> None:
        publish(store, "main", 1)
        root = catalog(store).resolve("main").row.root
        with pytest.raises(NotFoundError, match="no version on line"):
            catalog(store).resolve(root[:7])

    @pytest.mark.parametrize("reference", ["", "a/b", "main@", "../x", None, 3])
    def test_no_request_for_what_is_no_reference(self, store: Store, reference: object) -> None:
        watched = Watched(store._objects)
        with pytest.raises(InvalidInputError):
            catalog(store, watched).resolve(reference)  # type: ignore[arg-type]
        assert watched.requests == []

    def test_foreign_things_below_log_are_no_lines(self, store: Store) -> None:
        publish(store, "main", 1)
        root = catalog(store).resolve("main").row.root
        for key in ("log/.hidden/x", "log/ä/00000000000000000000.json", "log/a b/c", "log/_x/y"):
            store._objects.put(key, b"hello")
        assert catalog(store).lines() == ["main"]
        assert store.lines() == ["main"]
        assert catalog(store).resolve(root).name == "main@0"
        assert store.verify().ok


class TestChains:
    def test_back_to_the_anchor(self, store: Store) -> None:
        publish(store, "main", 1, 2, 3)
        publish(store, "main", 4, 5, shape=11)
        chains = [
            [f"main@{edge.version}" for edge in catalog(store).path(catalog(store).resolve(f"main@{number}"))]
            for number in range(5)
        ]
        assert chains == [
            ["main@0"], ["main@0", "main@1"], ["main@0", "main@1", "main@2"], ["main@3"], ["main@3", "main@4"],
        ]  # fmt: skip

    @pytest.mark.parametrize("what", ["missing", "another root"])
    def test_a_chain_with_a_hole_is_an_error(self, store: Store, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
        publish(store, "main", 1, 2)
        found = catalog(store)
        located = found.resolve("main@1")
        before = found.log("main").row(0)
        assert before is not None
        other = None if what == "missing" else replace(before, root="0" * 64)
        monkeypatch.setattr(
            type(found.log("main")), "row", lambda self, version: other if version == 0 else located.row
        )
        with pytest.raises(IntegrityError, match="a version starts from a base that is not there") as caught:
            found.path(located)
        assert caught.value.key == "main@1"

    def test_route_forwards_and_back(self, store: Store) -> None:
        publish(store, "main", 1, 2, 3, 4)
        found = catalog(store)
        goal = found.resolve("main@1")
        way = route(found, goal, [found.resolve("main@3")])
        assert (len(way.path.states), way.path.goal) == (4, 1)
        assert way.between(["main@3"]) == [3, 2, 1]
        assert way.between(["main@0", "main@3"])[-1] == 1
        assert sorted(way.between(["main@0", "main@3"])) == [0, 1, 2, 3]
        assert way.between([None, "other@7"]) == [1]

    def test_a_route_does_not_go_past_an_anchor(self, store: Store) -> None:
        publish(store, "main", 1, 2)
        publish(store, "main", 3, shape=11)
        found = catalog(store)
        way = route(found, found.resolve("main@1"), [found.resolve("main@2")])
        assert (len(way.path.states), way.path.goal) == (2, 1)

    def test_other_lines_do_not_lengthen_a_route(self, store: Store) -> None:
        publish(store, "main", 1)
        publish(store, "exp", 1, 2)
        found = catalog(store)
        assert len(route(found, found.resolve("main@0"), [found.resolve("exp@1")]).path.states) == 1

    def test_states_are_read_when_asked_for(self, store: Store) -> None:
        publish(store, "main", *range(5))
        watched = Watched(store._objects)
        found = catalog(store, watched)
        states = LazyStates(found, "main", found.path(found.resolve("main@4")))
        watched.requests.clear()
        assert len(states) == 5
        assert watched.requests == []
        assert states[3].name == "main@3"
        assert not watched.count(part="000000000002-")
        assert [item.name for item in states[1:3]] == ["main@1", "main@2"]


def test_a_manifest_that_is_not_that_of_its_commit(store: Store) -> None:
    """The commit names the manifest of another version: by its SHA-256, so everything before this check is fine."""
    publish(store, "main", 1, 2)
    found = catalog(store)
    one, two = found.resolve("main@0"), found.resolve("main@1")
    forged = replace(two, row=replace(two.row, manifest=one.row.manifest))
    with pytest.raises(IntegrityError, match="the manifest is not that of its commit") as caught:
        found.contents(forged)
    assert caught.value.key == one.row.manifest.key


def test_the_cache_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "CACHE_NBYTES", 1 << 18)
    publish(store, "main", *range(80))
    found = catalog(store)
    for number in range(80):
        found.contents(found.resolve(f"main@{number}"))
    assert found._cached_nbytes <= catalog_module.CACHE_NBYTES
    assert len(found._cache) < 80
