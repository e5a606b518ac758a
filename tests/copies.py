"""Copies of stores: how tests make them, and what they must be, told from the raw objects and a dict of states."""

from __future__ import annotations

import json
import secrets

import numpy as np
import pytest
from histories import Past, State, changed
from upkeep import facts, needed_keys

import dcr_store
from dcr_store.errors import NotFoundError
from dcr_store.exchange import copying
from dcr_store.exchange.copied import Copied
from dcr_store.objects.open import open_objects
from dcr_store.store import Store


def place() -> str:
    return f"memory://{secrets.token_hex(8)}"


def step(past: Past, line: str = "main", rate: float = 0.1) -> None:
    rng = np.random.default_rng(len(past.states[line]))
    past.publish(line, {name: changed(array, rate, rng) for name, array in past.states[line][-1].items()})


def copied(past: Past, url: str | None = None, **options: object) -> Store:
    url = url or place()
    past.store.copy_to(url, **options)  # type: ignore[arg-type]
    return dcr_store.open(url)


def copy_through(source: Store, target: Store, lines: list[str] | None = None) -> Copied:
    return copying.copy(source._catalog, target._catalog, lines or source.lines())


def require_prefix(source: Store, copy: Store) -> None:
    """Require that each log of the copy begins as its source's, byte for byte, and that nothing lies beyond its end."""
    for line in copy.lines():
        keys = [key for key in copy._objects.list(f"log/{line}/") if key.count("/") == 2 and "latest" not in key]
        assert sorted(keys) == [f"log/{line}/{seq:020d}.json" for seq in range(len(keys))]
        for key in keys:
            assert copy._objects.get(key) == source._objects.get(key), key


def require_same_objects(source: Store, copy: Store) -> None:
    """Require that each object of the copy is the source's, where that still has it."""
    theirs = source._objects.list("versions/")
    for key in copy._objects.list("versions/"):
        if key in theirs:
            assert copy._objects.get(key) == source._objects.get(key), key


def require_no_waste(copy: Store) -> None:
    """Require that a copy of everything has the objects that its logs lead to, and no others."""
    needed = set().union(*(needed_keys(copy._objects, facts(copy._objects, line)) for line in copy.lines()))
    assert set(copy._objects.list("versions/")) == needed


def readable(past: Past, copy: Store) -> set[str]:
    """Return the versions of a copy that can be read; require the right bits of them, and clear words of the others."""
    found = set()
    for line in copy.lines():
        for info in copy.log(line):
            if info.is_kept:
                require_state(copy.read(info.version), past.state(info.version))
                found.add(info.version)
            else:
                with pytest.raises(NotFoundError, match=r"has expired|not in this copy"):
                    copy.read(info.version)
    return found


def require_state(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name


def require_whole_or_not_yet(past: Past, copy: Store) -> None:
    """Require of every version that the log tells: the right bits, or that it is not here (yet)."""
    for line in copy.lines():
        for info in copy.log(line):
            try:
                found = copy.read(info.version)
            except NotFoundError:
                continue
            require_state(found, past.state(info.version))


def document(store: Store, key: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(store._objects.get(key))
    return found


def cloned(store: Store) -> Store:
    """Return a store at another place that holds the same objects."""
    url = f"memory://{secrets.token_hex(8)}"
    objects = open_objects(url)
    for key in store._objects.list(""):
        objects.put(key, store._objects.get(key))
    return dcr_store.open(url)
