"""Copies of stores with drawn pasts, brought up to date in any order, with deaths, against a dict of states."""

from __future__ import annotations

import secrets

import numpy as np
from copies import cloned, readable, require_prefix, require_whole_or_not_yet
from histories import Past, changed, drawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from upkeep import KilledError, Mortal, through

import dcr_store
from dcr_store.errors import InvalidInputError
from dcr_store.exchange import copying
from dcr_store.store import Store


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=True)
@given(st.data())
def test_copies_of_any_past(data: st.DataObject) -> None:
    with drawn(data, n_versions=5) as past:
        url = f"memory://{secrets.token_hex(8)}"
        past.store.copy_to(url, lines=["main"])
        copy = dcr_store.open(url)
        if data.draw(st.booleans()):
            copy = begun_with_less(past, data) or copy
        for _ in range(data.draw(st.integers(1, 3))):
            go_on(past, data)
            dies_at = data.draw(st.integers(1, 60))
            mortal = Mortal(copy._objects, dies_at, after=data.draw(st.booleans()))
            try:
                copying.copy(past.store._catalog, through(copy, mortal)._catalog, past.store.lines())
            except KilledError:
                require_whole_or_not_yet(past, dcr_store.open(copy.url))
                if data.draw(st.booleans()):
                    go_on(past, data)
            require_prefix(past.store, copy)
            if data.draw(st.booleans()):
                dcr_store.open(copy.url).gc(grace_s=data.draw(st.sampled_from([0, 3600])))
        past.store.copy_to(copy.url)
        copy = dcr_store.open(copy.url)
        absent = {line: copy._catalog.absences.read(line) for line in copy.lines()}
        left_out = {f"{line}@{number}" for line, item in absent.items() for number in (item.versions if item else ())}
        for line in past.states:
            source = past.store._catalog.log(line).state.source
            left_out |= {
                name
                for name in past.names()
                if source
                and name.startswith(f"{line}@")
                and f"{source.line}@{name.partition('@')[2]}" in left_out
                and int(name.partition("@")[2]) <= source.row.version
            }
        assert readable(past, copy) == past.kept() - left_out
        assert copy.verify(deep=True).ok
        past.store.copy_to(copy.url, since="main@0")
        past.store.copy_to(copy.url)
        assert readable(past, dcr_store.open(copy.url)) >= past.kept() - left_out
        assert past.store.copy_to(copy.url).n_objects == 0


def begun_with_less(past: Past, data: st.DataObject) -> Store | None:
    """Return a copy that begins with a later version, where one can."""
    url = f"memory://{secrets.token_hex(8)}"
    since = data.draw(st.integers(0, len(past.states["main"]) - 1))
    try:
        past.store.copy_to(url, since=f"main@{since}")
    except InvalidInputError:
        return None
    return cloned(dcr_store.open(url))


def go_on(past: Past, data: st.DataObject) -> None:
    """Publish, anchor, let expire, collect."""
    line = data.draw(st.sampled_from(sorted(past.states)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    past.publish(line, {name: changed(array, 0.1, rng) for name, array in past.states[line][-1].items()})
    what = data.draw(st.sampled_from(["", "anchor", "expire", "tag"]))
    if what == "anchor":
        past.store.anchor(line)
    elif what == "expire":
        past.store.expire(line, keep_last=data.draw(st.integers(1, 3)))
        past.store.gc(grace_s=0)
    elif what == "tag":
        past.store.tag(line, f"t{secrets.token_hex(4)}")
