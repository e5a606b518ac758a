"""Geometry of strided writes and digests of blocks, against the plain thing: a list of byte addresses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_store.codec.digest import crc64
from dcr_store.targets.native import blocks
from dcr_store.targets.native.blocks import Block, Blocks, blocks_of, image_of
from dcr_store.targets.native.geometry import Geometry, geometry, meetings, runs, union
from dcr_store.targets.native.memory import ModuleMemory, Region, view_of


@st.composite
def views(draw: st.DrawFn, n_elements: int = 240) -> torch.Tensor:
    """Return a view of a buffer of int16, made as loaders make theirs."""
    base = torch.arange(n_elements, dtype=torch.int16)
    view = base.view(*draw(st.sampled_from([(240,), (12, 20), (20, 12), (4, 6, 10), (2, 2, 5, 12)])))
    for _ in range(draw(st.integers(0, 4))):
        dim = draw(st.integers(0, view.dim() - 1)) if view.dim() else 0
        match draw(st.sampled_from(["narrow", "select", "step", "permute", "unsqueeze", "none"])):
            case "narrow" if view.dim() and view.size(dim):
                start = draw(st.integers(0, view.size(dim) - 1))
                view = view.narrow(dim, start, draw(st.integers(0, view.size(dim) - start)))
            case "select" if view.dim() and view.size(dim):
                view = view.select(dim, draw(st.integers(0, view.size(dim) - 1)))
            case "step" if view.dim():
                view = view[(*[slice(None)] * dim, slice(None, None, draw(st.integers(1, 3))))]
            case "permute":
                view = view.permute(draw(st.permutations(range(view.dim()))))
            case "unsqueeze":
                view = view.unsqueeze(0)
    return view


def bytes_of(view: torch.Tensor) -> list[int]:
    """Return the addresses of a view's bytes: its elements are their own positions."""
    return sorted(2 * element + byte for element in view.reshape(-1).tolist() for byte in (0, 1))


def geometry_of(view: torch.Tensor) -> Geometry | None:
    return geometry(2 * view.storage_offset(), 2, view.size(), view.stride())


@given(views())
def test_the_runs_are_the_bytes_of_the_view(view: torch.Tensor) -> None:
    found = geometry_of(view)
    if view.numel() == 0:
        assert found is None
        return
    assert found is not None
    pieces = runs(found)
    addresses = [a for start, stop in zip(*pieces, strict=True) for a in range(start, stop)]
    assert sorted(addresses) == bytes_of(view)
    assert (found.start, found.stop) == (min(addresses), max(addresses) + 1)
    assert found.is_run == (len(pieces.starts) == 1)


@given(views(), views())
def test_equal_geometries_are_equal_bytes(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.numel() and b.numel() and geometry_of(a) == geometry_of(b):
        assert bytes_of(a) == bytes_of(b)


def test_views_that_meet_themselves_have_no_geometry() -> None:
    base = torch.zeros(10)
    for view in (base[:1].expand(3), base.unfold(0, 3, 1), base.as_strided((3, 3), (1, 2))):
        assert geometry(0, 4, view.size(), view.stride()) is None


@given(st.lists(views(), max_size=6))
def test_meetings_name_every_view_that_shares_a_byte(found: list[torch.Tensor]) -> None:
    kept = [view for view in found if view.numel()]
    places = [place for view in kept if (place := geometry_of(view)) is not None]
    sets = [set(bytes_of(view)) for view in kept]
    pairs = {(i, j) for i in range(len(sets)) for j in range(len(sets)) if i != j and sets[i] & sets[j]}
    result = meetings(places)
    assert {tuple(sorted(pair)) for pair in result} <= {tuple(sorted(pair)) for pair in pairs}
    assert {index for pair in result for index in pair} == {index for pair in pairs for index in pair}


@given(st.lists(views(), max_size=6))
def test_the_union_is_merged(found: list[torch.Tensor]) -> None:
    places = [place for view in found if view.numel() and (place := geometry_of(view)) is not None]
    merged = union(places)
    addresses = [a for start, stop in zip(*merged, strict=True) for a in range(start, stop)]
    assert addresses == sorted({a for view in found for a in (bytes_of(view) if view.numel() else [])})
    assert (merged.starts[1:] > merged.stops[:-1]).all()


@settings(deadline=None)
@given(st.lists(views(), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_digests_advance_with_masks(found: list[torch.Tensor], seed: int) -> None:
    rng = np.random.default_rng(seed)
    kept = [view for view in found if view.numel()]
    places = [place for view in kept if (place := geometry_of(view)) is not None]
    memory = torch.from_numpy(rng.integers(0, 65536, 240, np.uint16)).view(torch.int16)
    region = Region(0, memory.view(torch.uint8))
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(blocks, "BLOCK_NBYTES", 64)
        digests = Blocks([region], [(0, place) for place in places], pool)
        digests.take()
        assert digests.failing() == []
        for view, place in zip(kept, places, strict=True):
            mask = torch.from_numpy(rng.integers(0, 65536, view.numel(), np.uint16)).view(torch.int16)
            mask = mask.reshape(view.size())
            mine = memory.as_strided(view.size(), view.stride(), view.storage_offset())
            mine ^= mask
            digests.add(0, place, image_of(mask, mine, place))
        digests.advance()
        assert digests.failing() == []
        covered = {byte for view in kept for byte in bytes_of(view)}
        octets = region.octets.numpy()
        for byte in rng.choice(480, 12, replace=False).tolist():
            octets[byte] ^= 1
            assert digests.failing() == ([Block(0, byte // 64)] if byte in covered else [])
            octets[byte] ^= 1


def test_a_block_s_digest_is_that_of_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_NBYTES", 64)
    memory = torch.arange(200, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as pool:
        digests = Blocks([Region(0, memory)], [(0, Geometry(0, ((150, 1),)))], pool)
        digests.take()
        last = np.concatenate([memory.numpy()[128:150], np.zeros(42, np.uint8)])
        assert [digests._digests[Block(0, i)] for i in range(3)] == [
            crc64(memory.numpy()[:64]), crc64(memory.numpy()[64:128]), crc64(last)
        ]  # fmt: skip
        assert set(digests._digests) == {Block(0, 0), Block(0, 1), Block(0, 2)}
    assert list(blocks_of(Geometry(60, ((5, 1),)))) == [0, 1]


def test_places_in_a_module() -> None:
    module = torch.nn.Linear(6, 4)
    module.register_buffer("view", module.weight.data[1])
    memory = ModuleMemory(module)
    assert len(memory.regions) == 2
    place = memory.place(module.weight.data[1:3, 2:])
    assert place is not None
    assert place.geometry == Geometry(32, ((2, 24), (16, 1)))
    assert memory.label(place.region, 0) == "weight"
    assert memory.place(torch.zeros(3)) is None
    assert memory.place(module.weight.data[:0]) is None
    repeated = memory.place(module.bias.data[1:2].expand(3))
    assert repeated is not None
    assert repeated.meets_itself
    assert view_of(module.weight.data[:, 1:], torch.int32).stride() == (6, 1)


def test_a_module_gets_its_tensors_back() -> None:
    module = torch.nn.Linear(6, 4)
    weight, address = module.weight, module.weight.data_ptr()
    before = module.weight.detach().clone()
    memory = ModuleMemory(module)
    assert memory.changed() == []
    module.weight = torch.nn.Parameter(torch.zeros(4, 6))
    module.bias.data = torch.zeros(4)
    assert memory.changed() == ["weight", "bias"]
    memory.restore()
    assert memory.changed() == []
    assert module.weight is weight
    assert module.weight.data_ptr() == address
    assert torch.equal(module.weight, before)
