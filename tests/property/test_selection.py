"""Parts of tensors: what NumPy's own indexing gives, of any version, from the chunks that hold it alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import dcr_store
from dcr_store.errors import InvalidInputError
from dcr_store.layout.selection import parse, select
from dcr_store.store import Store

SHAPES = {"scalar": (), "row": (300,), "matrix": (37, 29), "cube": (5, 9, 13), "empty": (4, 0)}


@pytest.fixture(scope="module")
def states() -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(5)
    made = {name: generator.integers(0, 1 << 16, shape).astype(np.uint16) for name, shape in SHAPES.items()}
    result = [made]
    for _ in range(4):
        made = {name: array.copy() for name, array in made.items()}
        for array in made.values():
            if array.size:
                array.reshape(-1)[generator.integers(0, array.size, 3)] ^= 1
        result.append(made)
    return result


@pytest.fixture(scope="module")
def store(states: list[dict[str, np.ndarray]]) -> Store:
    made = dcr_store.create("memory://selection", chunk_elements=64)
    for state in states:
        with made.begin() as transaction:
            for name, array in state.items():
                transaction.write(name, array)
    return made


@given(st.data())
def test_parts_are_those_of_numpy(store: Store, states: list[dict[str, np.ndarray]], data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(SHAPES)), min_size=1, unique=True))
    wanted = {name: data.draw(st.none() | hnp.basic_indices(SHAPES[name], allow_newaxis=False)) for name in names}
    version = data.draw(st.integers(0, len(states) - 1))
    found = store.read(f"main@{version}", wanted)
    assert list(found) == names
    for name, index in wanted.items():
        expected = states[version][name][... if index is None else index]
        np.testing.assert_array_equal(found[name], expected)
        assert found[name].shape == np.shape(expected)


@pytest.mark.parametrize("step", [1 << 63, -(1 << 63), 9999999999999999999, -9999999999999999999])
def test_steps_beyond_all_tensors(store: Store, states: list[dict[str, np.ndarray]], step: int) -> None:
    index = (slice(None, None, step), slice(3, None, step))
    found = store.read("main", {"matrix": index})["matrix"]
    np.testing.assert_array_equal(found, states[-1]["matrix"][index])
    assert [(run.start, run.stop) for run in store.blame("main", "matrix", index).runs] == [
        (row, row + 1) for row in range(37)[slice(None, None, step)]
    ]


@given(st.data())
def test_an_index_is_read_as_it_is_written(data: st.DataObject) -> None:
    part = st.builds(
        slice, *[st.none() | st.integers(-99, 99)] * 2, st.none() | st.integers(1, 9) | st.integers(-9, -1)
    )
    parts = data.draw(st.lists(part | st.integers(-99, 99) | st.just(...), max_size=4))
    words = []
    for item in parts:
        if isinstance(item, slice):
            numbers = ["" if number is None else str(number) for number in (item.start, item.stop, item.step)]
            words.append(":".join(numbers if numbers[2] else numbers[:2]))
        else:
            words.append("..." if item is ... else str(item))
    assert parse(f"a.b[{data.draw(st.sampled_from([', ', ',']))}".rstrip(", ") + ", ".join(words) + "]") == (
        "a.b",
        tuple(parts),
    )


@pytest.mark.parametrize(
    ("text", "name"), [("a", "a"), ("a[0]b", "a[0]b"), ("a]", "a]"), ("[0]", "[0]"), ("a[b", "a[b")]
)
def test_what_is_no_index_is_a_name(text: str, name: str) -> None:
    assert parse(text) == (name, None)


@pytest.mark.parametrize("text", ["a[0:2", "a[", "a[0][..., -1 :2", "a[b[0:2", "a\n[0"])
def test_an_index_without_its_closing_bracket_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="the closing bracket of the index is missing"):
        parse(text)
    assert parse(f"{text}[...]") == (text, (...,))


@pytest.mark.parametrize("text", ["a[x]", "a[1.5]", "a[1:2:3:4]", "a[1,,2]", "a[None]", "a[:x]", "a[....]"])
def test_wrong_indices_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="the index is wrong"):
        parse(text)


@pytest.mark.parametrize(
    ("shape", "index"),
    [
        ((3,), 3), ((3,), -4), ((3,), (0, 0)), ((3,), (..., ...)), ((3,), True), ((3,), "a"), ((3,), [0]),
        ((3,), slice(0, 3, 0)), ((), 0), ((3,), slice("a")),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(shape: tuple[int, ...], index: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        select("the tensor", shape, index)  # type: ignore[arg-type]
    assert caught.value.key == "the tensor"


@given(st.data())
def test_walks_give_every_version_as_it_is(
    store: Store, states: list[dict[str, np.ndarray]], data: st.DataObject
) -> None:
    start, step = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 4))
    stop = data.draw(st.none() | st.integers(0, 7))
    wanted = data.draw(st.none() | st.fixed_dictionaries({}, optional={
        name: st.none() | hnp.basic_indices(shape, allow_newaxis=False) for name, shape in SHAPES.items()
    }))  # fmt: skip
    found = list(store.iter_states("main", start, stop, step, tensors=wanted))
    numbers = list(range(len(states)))[start : len(states) if stop is None else stop : step]
    assert [state.info.version for state in found] == [f"main@{number}" for number in numbers]
    for number, state in zip(numbers, found, strict=True):
        for name, index in (dict.fromkeys(SHAPES) if wanted is None else wanted).items():
            expected = states[number][name][... if index is None else index]
            np.testing.assert_array_equal(state.tensors[name], expected)


def test_a_walk_reads_each_delta_once(store: Store) -> None:
    from watched import Watched

    watched = Watched(store._objects)
    with_watch = Store(watched, store._document, store._catalog.store_sha256)
    assert len(list(with_watch.iter_states("main"))) == 5
    partitions = [key for verb, key, *_ in watched.requests if "/c/" in key and "digests" not in key]
    assert len(partitions) == len(set(partitions))
