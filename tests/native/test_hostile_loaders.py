"""Loaders that do anything but move: those tensors get values and are right, or are refused, nothing written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dcr_store.errors import InvalidInputError
from native.checkpoints import assert_same, bring, bringer, first, new_store, octets, publish, step, tensors

SHAPES = {
    "a": ("BF16", (6, 8)),
    "b": ("BF16", (6, 8)),
    "c": ("F32", (5,)),
    "one": ("BF16", (1,)),
    "good": ("BF16", (7, 3)),
}
Weights = Iterator[tuple[str, torch.Tensor]]


class Model(nn.Module):
    """Parameters of the names and shapes of the checkpoint, and what loaders need besides."""

    def __init__(self, loader: Callable[[Model, Weights], None]) -> None:
        super().__init__()
        self.loader = loader
        for name, (kind, shape) in SHAPES.items():
            dtype = torch.bfloat16 if kind == "BF16" else torch.float32
            self.register_parameter(name, nn.Parameter(torch.full(shape, 0.25, dtype=dtype), requires_grad=False))
        self.register_buffer("both", torch.full((6, 8), 0.25, dtype=torch.bfloat16))
        self.register_buffer("narrow_c", torch.full((5,), 0.25, dtype=torch.bfloat16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.later: list[Any] = []

    def load_weights(self, weights: Weights) -> None:
        self.loader(self, weights)

    def usual(self, name: str, tensor: torch.Tensor) -> None:
        getattr(self, name).data.copy_(tensor)


def by_name(**special: Callable[[Model, torch.Tensor], object]) -> Callable[[Model, Weights], None]:
    """Return a loader that copies each tensor, but does something else with some."""

    def load(model: Model, weights: Weights) -> None:
        for name, tensor in weights:
            if name in special:
                special[name](model, tensor)
            else:
                model.usual(name, tensor)

    return load


def average(model: Model, weights: Weights) -> None:
    found = dict(weights)
    model.both.copy_((found["a"] + found["b"]) / 2)
    for name in ("a", "b", "c", "one", "good"):
        model.usual(name, found[name])


def composed(model: Model, tensor: torch.Tensor) -> None:
    model.a.data.copy_(tensor)
    model.a.data.copy_(-torch.exp(model.a.float()))


def in_thread(work: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(work).result()


def zeroed(model: Model, tensor: torch.Tensor) -> None:
    model.a.data.zero_()
    model.a.data[:, :4].copy_(tensor[:, :4])
    model.a.data[:, 4:].copy_(tensor[:, 4:])


def through_memory(model: Model, tensor: torch.Tensor) -> None:
    aside = torch.empty_like(tensor)
    aside.copy_(tensor)
    model.a.data.copy_(aside)


def overlapping(model: Model, tensor: torch.Tensor) -> None:
    model.a.data[:4].copy_(tensor[:4])
    model.a.data[2:].copy_(tensor[2:])


def swallowed(model: Model, tensor: torch.Tensor) -> None:
    try:
        tensor.sum().item()
    except Exception:
        return
    model.a.data.copy_(tensor)


def keeping(model: Model, weights: Weights) -> None:
    for tensor in model.later:
        model.both.copy_(tensor)
    model.later = []
    for name, tensor in weights:
        model.usual(name, tensor)
        if name == "a":
            model.later.append(tensor)


def joined_with_values(model: Model, weights: Weights) -> None:
    found = dict(weights)
    joined = torch.cat([found.pop("a")[:3], found.pop("b")[3:] * 2])
    model.both.copy_(joined)
    for name, tensor in found.items():
        model.usual(name, tensor)


def add_to_zeros(model: Model, tensor: torch.Tensor) -> None:
    model.a.data.zero_()
    model.a.data.add_(tensor)


def permuted(model: Model, tensor: torch.Tensor) -> None:
    model.a.data.index_put_((torch.tensor([5, 4, 3, 2, 1, 0]),), tensor)


def by_numpy(model: Model, tensor: torch.Tensor) -> None:
    model.a.data.copy_(torch.from_numpy(tensor.view(torch.int16).numpy().copy()).view(torch.bfloat16))


def by_item(model: Model, tensor: torch.Tensor) -> None:
    model.one.data.fill_(tensor.item())


def two_into_one(model: Model, weights: Weights) -> None:
    for name, tensor in weights:
        model.usual("a" if name == "b" else name, tensor)


def only_some(model: Model, tensor: torch.Tensor) -> None:
    where = tensor > 0
    model.a.data[where] = tensor[where]
    model.a.data[~where] = 0


@dataclass(frozen=True)
class Case:
    """A loader, the tensors that have to fall back, and words that the reasons have in common."""

    name: str
    loader: Callable[[Model, Weights], None]
    names: str
    reason: str = ""


CASES = [
    Case("adds 1", by_name(a=lambda m, t: m.a.copy_(t + 1)), "a", "aten.add"),
    Case(
        "casts by the copy",
        by_name(c=lambda m, t: m.narrow_c.copy_(t)),
        "c",
        "cast from torch.float32 to torch.bfloat16",
    ),
    Case("casts before", by_name(c=lambda m, t: m.narrow_c.copy_(t.to(torch.bfloat16))), "c", "is cast from"),
    Case("casts after", by_name(a=lambda m, t: m.a.copy_(t.float())), "a", "is cast from"),
    Case("averages", average, "a b", "aten.add"),
    Case("scales in place", by_name(a=lambda m, t: m.a.copy_(t.mul_(2))), "a", "aten.mul_"),
    Case("scales into place", by_name(a=lambda m, t: torch.mul(t, 2, out=m.a.data)), "a", "aten.mul"),
    Case("copies, then computes", by_name(a=composed), "a", "written by the loader itself"),
    Case(
        "the same in a thread", by_name(a=lambda m, t: in_thread(lambda: composed(m, t))), "a", "by the loader itself"
    ),
    Case("adds 1 in a thread", by_name(a=lambda m, t: in_thread(lambda: m.a.copy_(t + 1))), "a", "aten.add"),
    Case("zeroes before copying", by_name(a=zeroed), "a", "written by the loader itself"),
    Case("adds to zeros", by_name(a=add_to_zeros), "a", "aten.add_"),
    Case("copies through other memory", by_name(a=through_memory), "a", "no parameter or buffer"),
    Case("writes bytes twice", by_name(a=overlapping), "a", "written twice"),
    Case("writes two to the same bytes", two_into_one, "a b", "written by"),
    Case("keeps tensors for later", keeping, "a", "is kept"),
    Case("keeps tensors for nothing", by_name(a=lambda m, t: m.later.append(t) or m.usual("a", t)), "a", "is kept"),
    Case("asks for the value", by_name(one=by_item), "one", "is asked for its"),
    Case("asks for the memory", by_name(a=by_numpy), "a", "is asked for its"),
    Case("swallows refusals", by_name(a=swallowed), "a", "aten.sum"),
    Case("scatters", by_name(a=permuted), "a", "aten.index_put_"),
    Case("chooses by value", by_name(a=only_some), "a", "aten.gt"),
    Case("joins with what it computed", joined_with_values, "a b", "aten"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_for_what_cannot_be_moved(case: Case) -> None:
    rng = np.random.default_rng(1)
    model, full = Model(case.loader), Model(case.loader)
    target = bringer(model.load_weights, model)
    bits = first(SHAPES, rng)
    with new_store() as store:
        for _ in range(4):
            publish(store, SHAPES, bits)
            outcome = bring(store, target)
            full.load_weights(iter(tensors(SHAPES, bits).items()))
            assert_same(model, full, but=("both",) if case.loader is keeping else ())
            assert outcome.chunks_healed == 0
            plan = target._target.plan
            assert plan is not None
            assert set(plan.fallbacks) == set(case.names.split())
            assert all(case.reason in reason for reason in plan.fallbacks.values()), plan.fallbacks
            assert "good" in plan.moved
            bits = step(bits, rng, rate=0.2)
    target.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused_by_name_before_anything_is_written(case: Case) -> None:
    model = Model(case.loader)
    before = octets(model)
    target = bringer(model.load_weights, model, fallback=False)
    with new_store() as store:
        publish(store, SHAPES, first(SHAPES, np.random.default_rng(1)))
        with pytest.raises(InvalidInputError, match="Nothing was written") as caught:
            bring(store, target)
    for name in case.names.split():
        assert f"{name} is " in str(caught.value)
    assert caught.value.expected == "copies of all its bits"
    assert str(caught.value.found).endswith(" that are not copied so")
    assert octets(model) == before
    target.close()


def takes_as_data(model: Model, tensor: torch.Tensor) -> None:
    model.a.data = tensor


def takes_as_parameter(model: Model, tensor: torch.Tensor) -> None:
    model.a = nn.Parameter(tensor, requires_grad=False)


def fills_fresh_memory(model: Model, tensor: torch.Tensor) -> None:
    fresh = torch.empty_like(model.a)
    fresh.copy_(tensor)
    model.a.data = fresh


def fails(model: Model, tensor: torch.Tensor) -> None:
    raise KeyError("no such layer")


@pytest.mark.parametrize(
    ("special", "message"),
    [
        (takes_as_data, "replaces parameters"),
        (takes_as_parameter, "replaces parameters"),
        (fills_fresh_memory, "replaces parameters"),
        (fails, "no such layer"),
    ],
)
def test_refused_whatever_is_allowed(special: Callable[[Model, torch.Tensor], None], message: str) -> None:
    model = Model(by_name(a=special))
    before, parameter = octets(model), model.a
    target = bringer(model.load_weights, model)
    with new_store() as store:
        publish(store, SHAPES, first(SHAPES, np.random.default_rng(1)))
        with pytest.raises(InvalidInputError, match=message) as caught:
            bring(store, target)
        assert target.held(store._catalog) is None
    assert caught.value.key == "a"
    assert model.a is parameter
    assert octets(model) == before
    target.close()


class TestUnseen:
    """A thread of the loader's own that touches no tensor that it was given computes on a parameter."""

    def make(self) -> tuple[Callable[[Model, Weights], None], Queue[Any]]:
        queue: Queue[Any] = Queue()

        def work() -> None:
            while (model := queue.get()) is not None:
                model.a.data.neg_()
                queue.task_done()

        threading.Thread(target=work, daemon=True).start()

        def load(model: Model, weights: Weights) -> None:
            for name, tensor in weights:
                model.usual(name, tensor)
            queue.put(model)
            queue.join()

        return load, queue

    def test_is_found_by_the_digests(self) -> None:
        load, queue = self.make()
        rng = np.random.default_rng(3)
        model, full = Model(load), Model(load)
        target = bringer(model.load_weights, model)
        bits = first(SHAPES, rng)
        with new_store() as store:
            for version in range(3):
                publish(store, SHAPES, bits)
                outcome = bring(store, target)
                full.load_weights(iter(tensors(SHAPES, bits).items()))
                assert_same(model, full)
                assert (outcome.chunks_healed > 0) == (version == 0)
                plan = target._target.plan
                assert plan is not None
                assert set(plan.fallbacks) == {"a"}
                bits = step(bits, rng)
        queue.put(None)
        target.close()

    def test_is_refused(self) -> None:
        load, queue = self.make()
        model = Model(load)
        target = bringer(model.load_weights, model, fallback=False)
        with new_store() as store:
            publish(store, SHAPES, first(SHAPES, np.random.default_rng(3)))
            with pytest.raises(InvalidInputError, match="does not stay in a"):
                bring(store, target)
            assert target.held(store._catalog) is None
        queue.put(None)
        target.close()
