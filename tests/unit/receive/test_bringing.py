"""Bringers: what a receiver keeps at a version; the one for directories, and which targets there are bringers for."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from states import series, tree, write_hf

import dcr_store
from dcr_store.errors import InvalidInputError
from dcr_store.payload.version import SealedPartition, fetch
from dcr_store.receive.bringing import Bringer, DirectoryBringer, bringer_of
from dcr_store.store import Store
from dcr_store.targets.marker import Marker, read_marker, write_marker
from dcr_store.versions.catalog import Catalog

STATES = series(3, seed=3)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=1024) as store:
        for number, state in enumerate(STATES):
            with store.begin() as transaction:
                transaction.write_checkpoint(write_hf(tmp_path / f"checkpoint{number}", state, step=number))
        yield store


@pytest.fixture
def catalog(store: Store) -> Catalog:
    return store._catalog


def test_a_directory_is_brought_from_version_to_version(catalog: Catalog, tmp_path: Path) -> None:
    bringer = DirectoryBringer(tmp_path / "target")
    assert bringer.held(catalog) is None
    fetched: list[str] = []

    def fetcher(item: SealedPartition) -> bytes:
        fetched.append(item.key)
        return fetch(catalog.objects, item.ref)

    for number in range(3):
        goal = catalog.resolve(f"main@{number}")
        fetched.clear()
        outcome = bringer.bring(catalog, goal, fetcher)
        assert bringer.held(catalog) == goal
        assert tree(tmp_path / "target") == tree(tmp_path / f"checkpoint{number}")
        assert outcome.chunks_written > 0
        wanted = [item.key for item in catalog.contents(goal).partitions]
        assert sorted(fetched) == sorted(wanted), "every partition comes through the fetcher, once"
    again = bringer.bring(catalog, catalog.resolve("main@2"), None)
    assert (again.nbytes_fetched, again.chunks_written, again.chunks_healed) == (0, 0, 0)
    bringer.close()
    bringer.close()


def test_what_a_directory_holds_is_known_only_where_its_marker_is_clean(catalog: Catalog, tmp_path: Path) -> None:
    target = tmp_path / "target"
    bringer = DirectoryBringer(target)
    target.mkdir()
    assert bringer.held(catalog) is None
    bringer.bring(catalog, catalog.resolve("main@1"), None)
    clean = read_marker(target)
    assert isinstance(clean, Marker)
    for other in (
        Marker("dirty", clean.store_id, "main@0", clean.target, clean.root),
        Marker("clean", "0" * 32, None, clean.target, clean.root),
        Marker("clean", clean.store_id, None, "main@9", "0" * 64),
    ):
        write_marker(target, other)
        assert bringer.held(catalog) is None
    # In a store that was restored from a copy the same state has another number.
    write_marker(target, Marker("clean", clean.store_id, None, "main@7", clean.root))
    found = bringer.held(catalog)
    assert found is not None
    assert found.name == "main@1"
    (target / ".dcr" / "marker.json").write_bytes(b"torn")
    assert bringer.held(catalog) is None


def test_which_targets_there_are(tmp_path: Path) -> None:
    found = bringer_of(tmp_path)
    assert isinstance(found, DirectoryBringer)
    assert isinstance(found, Bringer)
    assert bringer_of(found) is found
    assert isinstance(bringer_of(str(tmp_path)), DirectoryBringer)
    for wrong in (None, 3, object(), [tmp_path]):
        with pytest.raises(InvalidInputError, match="nothing that can be kept at a version"):
            bringer_of(wrong)
    with pytest.raises(InvalidInputError, match="is no path"):
        bringer_of("")
