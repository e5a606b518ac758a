"""Stores with a past: versions on several lines, forks, folds, anchors, other layouts, expiry, beside all states."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from states import raw

import dcr_store
from dcr_store.store import Store

Array = np.ndarray[Any, Any]
State = dict[str, Array]


class Past:
    """A store, and what each version of each line was, expired or not.

    Attributes
    ----------
    states : dict of str to list of dict
        By line.
    anchors : set of (str, int)
        Versions that were committed whole.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.states: dict[str, list[State]] = {"main": []}
        self.anchors: set[tuple[str, int]] = set()

    def publish(self, line: str, state: State, **metadata: Any) -> None:
        past = self.states[line]
        if not past or layout_of(past[-1]) != layout_of(state):
            self.anchors.add((line, len(past)))
        with self.store.begin(line, metadata=metadata) as transaction:
            for name, array in state.items():
                transaction.write(name, array)
        past.append(dict(state))

    def fork(self, line: str, number: int, name: str) -> None:
        self.store.fork(f"{line}@{number}", name)
        self.states[name] = self.states[line][: number + 1]
        self.anchors |= {(name, at) for its, at in self.anchors if its == line and at <= number}

    def names(self) -> list[str]:
        return [f"{line}@{number}" for line, states in self.states.items() for number in range(len(states))]

    def state(self, name: str) -> State:
        line, _, number = name.partition("@")
        return self.states[line][int(number)]

    def kept(self) -> set[str]:
        return {info.version for line in self.states for info in self.store.log(line) if info.is_kept}


def layout_of(state: State) -> list[tuple[str, Any, Any]]:
    return [(name, array.dtype, array.shape) for name, array in state.items()]


def bits(array: Array) -> Array:
    """Return an array's elements as the store has them: uintN, shape (n,)."""
    width = {"complex64": 8, "complex128": 8}.get(str(array.dtype), array.dtype.itemsize)
    return np.frombuffer(raw(array), f"<u{width}")


def changed(array: Array, rate: float, rng: np.random.Generator) -> Array:
    """Return `array` with about `rate` of its elements changed."""
    new = bits(array).copy()
    hit = rng.random(new.shape) < rate
    new[hit] ^= rng.integers(1, 1 << 8, int(hit.sum())).astype(new.dtype) << new.dtype.type(rng.choice([0, 8]))
    return new.view(array.dtype).reshape(array.shape)


def first_state(rng: np.random.Generator, complex_dtype: type = np.complex128) -> State:
    return {
        "net.a.weight": rng.normal(0, 1, (19, 7)).astype(ml_dtypes.bfloat16),
        "net.a.bias": rng.normal(0, 1, 11).astype(np.float32),
        "net.b.weight": rng.normal(0, 1, (5, 3, 9)).astype(ml_dtypes.bfloat16),
        "c": (rng.normal(0, 1, (3, 2)) + 1j).astype(complex_dtype),
        "step": np.array(0, np.int32),
    }


@contextmanager
def drawn(
    data: st.DataObject, *, n_versions: int = 7, expiring: bool = False, for_files: bool = False
) -> Iterator[Past]:
    """Make a past that hypothesis chooses, of tensors that safetensors files can hold if they are `for_files`."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    codec = data.draw(st.sampled_from(["dcr.delta", "portable"]))
    with dcr_store.create(f"memory://{secrets.token_hex(8)}", codec=codec, chunk_elements=64) as store:
        past = Past(store)
        past.publish("main", first_state(rng, np.complex64 if for_files else np.complex128))
        for _ in range(data.draw(st.integers(1, n_versions))):
            line = data.draw(st.sampled_from(sorted(past.states)))
            state = past.states[line][-1]
            what = data.draw(st.sampled_from(["step"] * 6 + ["back", "layout", "fork", "fold", "anchor"]))
            last = len(past.states[line]) - 1
            if what == "fork" and len(past.states) < 3:
                past.fork(line, data.draw(st.integers(0, last)), f"line{len(past.states)}")
            elif what in ("fold", "anchor") and last:
                low = data.draw(st.integers(0, last - 1))
                own = range(low + 1, last + 1)
                _maintain(past, line, low, data.draw(st.sampled_from(own)), what)
            elif what == "layout":
                name = f"new{last}"
                past.publish(line, {**state, name: rng.integers(0, 9, 4)} if name not in state else state)
            elif what == "back":
                old = past.states[line][data.draw(st.integers(0, last))]
                past.publish(line, old)
            else:
                rate = data.draw(st.sampled_from([0.0, 0.01, 0.1, 1.0]))
                past.publish(line, {k: changed(v, rate if rng.random() < 0.6 else 0, rng) for k, v in state.items()})
        if expiring:
            for line in past.states:
                keep = {
                    "keep_last": data.draw(st.integers(1, 3)),
                    "keep_every": data.draw(st.sampled_from([None, 2, 3])),
                }
                store.expire(line, **keep)
        yield past


def _maintain(past: Past, line: str, start: int, goal: int, what: str) -> None:
    """Add an edge, where there can be one."""
    try:
        if what == "fold":
            past.store.fold(f"{line}@{start}", f"{line}@{goal}")
        else:
            past.store.anchor(f"{line}@{goal}")
    except dcr_store.errors.DcrError:
        pass
