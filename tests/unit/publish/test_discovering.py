"""Discovery that is kept in a directory: used only where it is whole, of the same slices, and the exporter's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dcr_store
from dcr_store import events
from dcr_store.errors import FormatError, InvalidInputError, StorageError
from dcr_store.format import canonical
from dcr_store.layout import discovered
from dcr_store.layout.discovery import Discovery, differs

BF16 = np.dtype(ml_dtypes.bfloat16)
Array = np.ndarray[Any, Any]
Ranks = list[dict[str, Array]]


def ranks() -> Ranks:
    return [{"fc1": np.zeros((8, 6), BF16), "down": np.zeros((6, 4), BF16), "norm": np.zeros(6, BF16)} for _ in "ab"]


class Exporter:
    """Gate and up of all ranks, transposed columns, a norm plus 1, and a tied name; counts its runs."""

    def __init__(self) -> None:
        self.n_runs = 0

    def __call__(self, given: Ranks) -> Iterator[tuple[str, Array]]:
        self.n_runs += 1
        yield "gate", np.concatenate([mine["fc1"][:4] for mine in given])
        yield "up", np.concatenate([mine["fc1"][4:] for mine in given])
        yield "down", np.concatenate([mine["down"].T for mine in given])
        yield "norm", given[0]["norm"] + BF16.type(1)
        yield "tied", np.concatenate([mine["fc1"][4:] for mine in given])


def told(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns, and what it tells about the cache."""
    seen: list[str] = []

    def note(event: events.Event) -> None:
        if event.name.startswith("discovery.cache"):
            seen.append(f"{event.name} {event.detail}")

    with events.listening(note):
        return call(), seen


def find(export: Any, cache: Path, key: str = "v1", slices: Any = None) -> Discovery:
    return dcr_store.discover(export, ranks() if slices is None else slices, cache=cache, key=key)


def test_what_is_kept_is_what_was_found_and_costs_one_run(tmp_path: Path) -> None:
    plain = dcr_store.discover(Exporter(), ranks())
    first, second = Exporter(), Exporter()
    assert find(first, tmp_path / "cache") == plain
    found, seen = told(lambda: find(second, tmp_path / "cache"))
    assert found == plain
    assert list(found.tensors) == list(plain.tensors)
    assert [list(mine) for mine in found.maps] == [list(mine) for mine in plain.maps]
    assert (first.n_runs > 10, second.n_runs) == (True, 1)
    assert [text.split()[0] for text in seen] == ["discovery.cache.used"]
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".json"]


def test_whatever_the_result_depends_on_is_asked_for_apart(tmp_path: Path) -> None:
    def export(given: Any) -> Iterator[tuple[str, Any]]:
        for index, mine in enumerate(given if isinstance(given, list) else [given]):
            for name, array in mine.items():
                yield f"{name}.{index}", array

    a, b = np.zeros((2, 3), BF16), np.zeros(4, np.float32)
    asked: list[tuple[str, Any]] = [
        ("v1", {"a": a, "b": b}),
        ("v2", {"a": a, "b": b}),
        ("v1", {"b": b, "a": a}),
        ("v1", {"c": a, "b": b}),
        ("v1", {"a": a.T, "b": b}),
        ("v1", {"a": a.astype(np.float16), "b": b}),
        ("v1", [{"a": a, "b": b}]),
        ("v1", [{"a": a}, {"b": b}]),
    ]
    assert len({discovered.request_of(slices, key) for key, slices in asked}) == len(asked)
    for key, slices in asked:
        find(export, tmp_path, key, slices)
    assert len(list(tmp_path.iterdir())) == len(asked)
    for key, slices in asked:
        assert find(export, tmp_path, key, slices) == dcr_store.discover(export, slices)
    torch = pytest.importorskip("torch")
    assert discovered.request_of({"a": torch.zeros(4)}, "") != discovered.request_of({"a": np.zeros(4, np.float32)}, "")


def kept(cache: Path) -> Path:
    (path,) = cache.glob("*.json")
    return path


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The document with another body, and the SHA-256 of that."""
    body = json.loads(path.read_bytes())["body"]
    change(body)
    return canonical.seal_body(body)


def box_of(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["maps"][0][1]["map"]["tensors"][0]["boxes"][0]
    return found


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-9],
        lambda data: data.replace(b'"gate"', b'"gale"'),
        lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
        lambda data: b"\xff" + data,
        lambda data: b"[]",
        lambda data: b'{"body":{},"sha256":"44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"}',
        lambda data: dcr_store.AffineMap.of("F32", [2], {"w": [2]}, {}).to_bytes(),
    ],
)
def test_a_damaged_document_counts_as_missing_and_is_replaced(tmp_path: Path, damage: Any) -> None:
    plain = find(Exporter(), tmp_path)
    path = kept(tmp_path)
    data = path.read_bytes()
    path.write_bytes(damage(data))
    exporter = Exporter()
    found, seen = told(lambda: find(exporter, tmp_path))
    assert (found, exporter.n_runs > 10) == (plain, True)
    assert [text.split()[0] for text in seen] == ["discovery.cache.refused"]
    assert str(path) in seen[0]
    assert path.read_bytes() == data


CHANGES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda body: body.update(format="dcr-layout"), "'format' is another one"),
    (lambda body: body.update(request="0" * 64), "'request' is another one"),
    (lambda body: body["tensors"].append(body["tensors"][0]), "names a tensor twice"),
    (lambda body: body["tensors"][0].update(dtype="F33"), "F33"),
    (lambda body: body["tensors"][0].update(dtype="F16"), "maps to a tensor that the exporter does not give"),
    (lambda body: body["tensors"].append({"name": "x", "dtype": "F32", "shape": [2]}), "2 values missing, 0 twice"),
    (lambda body: body["maps"].pop(), "maps of other ranks"),
    (lambda body: body["maps"][0].pop(), "maps of other slices"),
    (lambda body: body["maps"][0].append(body["maps"][0][0]), "maps of other slices"),
    (lambda body: body["maps"][0][0]["map"].update(shape=[24]), "maps of other slices"),
    (lambda body: body["maps"][0][0]["map"]["tensors"][0].update(name="gone"), "that the exporter does not give"),
    (lambda body: body["maps"][0][0]["map"]["tensors"][0].update(boxes=[]), "24 values missing, 0 twice"),
    (lambda body: box_of(body).update(canonical=1), "values missing, 23 twice|leaves the tensor|1 values missing"),
    (lambda body: body["residual"].pop(), "6 values missing, 0 twice"),
    (lambda body: body["residual"].append(body["residual"][0]), "0 values missing, 6 twice"),
    (lambda body: body["residual"][0].update(tensor="gone"), "no part of a tensor"),
    (lambda body: body["residual"][0].update(stop=0), "no part of a tensor"),
    (lambda body: body["residual"][0].update(stop=7), "past a tensor's end"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_what_does_not_fit_is_refused_though_it_is_whole(tmp_path: Path, change: Any, message: str) -> None:
    plain = find(Exporter(), tmp_path)
    path = kept(tmp_path)
    data, other = path.read_bytes(), changed(path, change)
    with pytest.raises(FormatError, match=message):
        discovered.from_bytes(other, ranks(), path.stem, "k")
    path.write_bytes(other)
    exporter = Exporter()
    assert find(exporter, tmp_path) == plain
    assert exporter.n_runs > 10
    assert path.read_bytes() == data


def test_a_map_that_leads_elsewhere_is_found_out_by_the_run(tmp_path: Path) -> None:
    """A document that fits in all respects, and is of another exporter under the same key."""

    def swapped(given: Ranks) -> Iterator[tuple[str, Array]]:
        for name, array in Exporter()(given):
            yield name, array[[1, 0, *range(2, len(array))]] if name == "down" else array

    plain = find(Exporter(), tmp_path)
    exporter = Exporter()
    for export in (
        swapped,
        lambda given: [(name, array + BF16.type(1) if name == "up" else array) for name, array in Exporter()(given)],
        lambda given: [(name, array.astype(np.float32)) for name, array in Exporter()(given)],
        lambda given: [(name, array.reshape(-1)) for name, array in Exporter()(given)],
        lambda given: [*Exporter()(given)][:-1],
        lambda given: [*Exporter()(given)][::-1],
        lambda given: [*Exporter()(given), ("more", given[0]["norm"])],
    ):
        assert differs(export, ranks(), plain) is not None
        found, seen = told(lambda export=export: find(export, tmp_path))
        assert found == dcr_store.discover(export, ranks())
        assert found != plain or list(found.tensors) != list(plain.tensors)
        assert ["the exporter is another one" in text for text in seen] == [True]
        find(exporter, tmp_path)  # back again: the last one's is no use either
    assert differs(exporter, ranks(), plain) is None


def test_packed_values_are_residual_and_kept(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no packed dtype")
    slices = {"w": torch.zeros(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "v": torch.zeros(3)}

    def export(given: Any) -> Any:
        return list(given.items())

    plain = dcr_store.discover(export, slices)
    assert plain.tensors["w"] == ("F4", (4, 8))
    assert [(part.tensor, part.start, part.stop) for part in plain.residual] == [("w", 0, 16)]
    assert list(plain.maps[0]) == ["v"]
    assert find(export, tmp_path, slices=slices) == plain
    exported, seen = told(lambda: find(export, tmp_path, slices=slices))
    assert (exported, len(seen), "used" in seen[0]) == (plain, 1, True)


def test_a_cache_that_cannot_be_used_is_told_before_the_work(tmp_path: Path) -> None:
    exporter = Exporter()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="the cache cannot be read") as caught:
        find(exporter, tmp_path / "file" / "cache")
    assert str(tmp_path / "file" / "cache") in str(caught.value)
    if os.geteuid():  # a superuser writes anywhere
        (tmp_path / "closed").mkdir(mode=0o555)
        with pytest.raises(StorageError, match="the cache cannot be written"):
            find(exporter, tmp_path / "closed")
    assert exporter.n_runs == 0
    for given in ({"cache": tmp_path}, {"key": "v1"}):
        with pytest.raises(InvalidInputError, match="a cache needs a key"):
            dcr_store.discover(exporter, ranks(), **given)
    assert exporter.n_runs == 0


def test_nothing_half_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageError, match="No space left"):
        find(Exporter(), tmp_path)
    assert list(tmp_path.iterdir()) == []
