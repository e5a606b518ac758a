"""The objects of a committed version: each one that is damaged is named; documents that do not fit are refused."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import dcr_store
from dcr_store.errors import DcrError, FormatError, IntegrityError
from dcr_store.format.documents import JournalEntry, Manifest, ObjectRef
from dcr_store.format.names import TransactionKeys
from dcr_store.payload import version
from dcr_store.store import Store


@pytest.fixture
def store() -> Iterator[Store]:
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", chunk_elements=64) as store:
        rng = np.random.default_rng(0)
        for i in range(2):
            with store.begin() as transaction:
                transaction.write("a", rng.integers(0, 99, 300).astype(np.int16))
                transaction.write("b", np.full(70, i, np.float64))
        yield store


def manifest_of(store: Store) -> Manifest:
    located = store._catalog.resolve("main")
    return version.read_manifest(store._objects, located.row.manifest)


def read(store: Store, manifest: Manifest) -> version.VersionContents:
    layout = version.read_layout(store._objects, manifest.layout)
    return version.read_contents(store._objects, manifest, layout, store.chunk_elements)


def seal_of(store: Store, manifest: Manifest) -> JournalEntry:
    return JournalEntry.from_bytes(store._objects.get(manifest.seals[0].ref.key), "k")


def resealed(store: Store, manifest: Manifest, entry: JournalEntry) -> Manifest:
    """Store another seal and return a manifest that names it."""
    ref = ObjectRef.of("elsewhere/seal.json", entry.to_bytes())
    store._objects.put(ref.key, entry.to_bytes())
    return replace(manifest, seals=(replace(manifest.seals[0], ref=ref),))


def test_contents(store: Store) -> None:
    contents = read(store, manifest_of(store))
    assert contents.name == "main@1"
    assert not contents.is_anchor
    assert [entry.name for entry in contents.layout.tensors] == ["a", "b"]
    assert {item.array.array for item in contents.partitions} == {"u16/mask", "u64/mask"}
    assert sorted(contents.touched["u16"]) == [0, 1, 2, 3, 4]
    assert len(contents.tables["u64"]) == 2
    assert version.root_of(contents.layout, contents.tables, 64) == contents.manifest.root


def test_a_partition_knows_its_chunks(store: Store) -> None:
    for item in read(store, manifest_of(store)).partitions:
        data = version.fetch(store._objects, item.ref)
        found = item.parse(data)
        assert len(found) == item.partition.chunks
        assert all(item.first_chunk <= chunk < item.first_chunk + item.n_chunks for chunk in found)


@pytest.mark.parametrize("how", ["missing", "cut", "flipped", "empty", "longer"])
def test_each_object_that_is_not_the_one_recorded_is_named(store: Store, how: str) -> None:
    """Whatever object a version needs is damaged: reading it raises and names that object, or its digest table."""
    manifest, objects = manifest_of(store), store._objects
    keys = TransactionKeys(manifest.line, manifest.version, manifest.txid)
    seals = {seal.ref.key for seal in manifest.seals}
    needed = [key for key in objects.list(keys.prefix) if not key.endswith("zarr.json")]
    needed = [key for key in needed if "/journal/" not in key or key in seals]  # others told of progress
    needed += [f"layouts/{manifest.layout}.json"]
    assert len(needed) > 6
    assert seals <= set(needed)
    for key in needed:
        data = objects.get(key)
        damaged = {"cut": data[:-1], "flipped": data[:-1] + bytes([data[-1] ^ 1]), "empty": b"", "longer": data + b"x"}
        if how == "missing":
            objects.delete(key)
        else:
            objects.put(key, damaged[how])
        with pytest.raises(IntegrityError) as caught:
            dcr_store.open(store.url).read("main@1")
        assert caught.value.key == key
        assert "restore it from a copy" in str(caught.value)
        objects.put(key, data)
    dcr_store.open(store.url).read("main@1")


def test_a_seal_of_something_else(store: Store) -> None:
    manifest = manifest_of(store)
    entry = seal_of(store, manifest)
    for changed in (
        replace(entry, line="other"),
        replace(entry, txid="0" * 32),
        replace(entry, attempt=5),
        replace(entry, writer="w9"),
        replace(entry, incarnation="0" * 16),
        replace(entry, seal=None),
    ):
        with pytest.raises(FormatError, match="is not the seal of this version") as caught:
            read(store, resealed(store, manifest, changed))
        assert caught.value.key == "elsewhere/seal.json"


def test_a_seal_whose_arrays_do_not_fit_the_layout(store: Store) -> None:
    manifest = manifest_of(store)
    entry = seal_of(store, manifest)
    assert entry.seal is not None
    array = entry.seal.arrays[0]
    for changed in (replace(array, shape=array.shape + 32), replace(array, chunk=128, shard=1280)):
        seal = replace(entry.seal, arrays=(changed, *entry.seal.arrays[1:]))
        with pytest.raises(FormatError, match="does not fit the layout"):
            read(store, resealed(store, manifest, replace(entry, seal=seal)))


def test_a_partition_of_no_array(store: Store) -> None:
    manifest = manifest_of(store)
    entry = seal_of(store, manifest)
    assert entry.seal is not None
    seal = replace(entry.seal, arrays=entry.seal.arrays[1:])
    with pytest.raises(FormatError, match="a partition of no array"):
        read(store, resealed(store, manifest, replace(entry, seal=seal)))


def test_a_partition_past_the_end_of_its_array(store: Store) -> None:
    manifest = manifest_of(store)
    entry = seal_of(store, manifest)
    assert entry.seal is not None
    far = replace(entry.seal.partitions[0], index=10**12)
    seal = replace(entry.seal, partitions=(far, *entry.seal.partitions[1:]))
    with pytest.raises(FormatError, match="past the end"):
        read(store, resealed(store, manifest, replace(entry, seal=seal)))


def test_contributions_past_the_end_of_the_space(store: Store) -> None:
    from dcr_store.payload import contributions

    manifest = manifest_of(store)
    entry = seal_of(store, manifest)
    assert entry.seal is not None
    data = contributions.encode({"u16": np.array([[10**15, 1, 0, 0]], np.uint64)})
    store._objects.put("elsewhere/contributions.bin", data)
    seal = replace(entry.seal, contributions=ObjectRef.of("elsewhere/contributions.bin", data))
    with pytest.raises(FormatError, match="past the end"):
        read(store, resealed(store, manifest, replace(entry, seal=seal)))


def test_digest_tables(store: Store) -> None:
    manifest = manifest_of(store)
    layout = version.read_layout(store._objects, manifest.layout)

    def tables(digests: dict[str, object]) -> object:
        changed = replace(manifest, digests=digests)  # type: ignore[arg-type]
        return version.read_tables(store._objects, changed, layout, 64)

    without = {space: item for space, item in manifest.digests.items() if space != "u64"}
    with pytest.raises(FormatError, match="names no digest table"):
        tables(without)
    swapped = {**manifest.digests, "u64": manifest.digests["u16"]}
    with pytest.raises(FormatError, match="digest table"):
        tables(swapped)
    table = store._objects.get(manifest.digests["u64"].table.key)
    other = table[8:] + table[:8]
    store._objects.put("elsewhere/table", other)
    wrong = {**manifest.digests, "u64": replace(manifest.digests["u64"], table=ObjectRef.of("elsewhere/table", other))}
    with pytest.raises(IntegrityError, match="do not give the version's root"):
        tables(wrong)


def test_references_are_kept_inside(store: Store) -> None:
    """A reference to a key that no store can hold is a problem of the document, not of the caller."""
    for key in ("a\nb", "x" * 2000, ".dcr-tmp/x"):
        with pytest.raises(DcrError) as caught:
            version.fetch(store._objects, ObjectRef(key, "0" * 64, 1))
        assert caught.value.kind == "format", key
