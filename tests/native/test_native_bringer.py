"""A live engine from version to version: old or new whatever happens, healed, back and forth, over overwrites."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
import torch
from copies import cloned
from handmade import Part, zeros
from handmade import publish as publish_by_hand
from torch import nn

import dcr_store
from dcr_store import events
from dcr_store.errors import IntegrityError, InvalidInputError, StorageError
from dcr_store.payload.version import SealedPartition, fetch
from dcr_store.receive import native_bringer
from dcr_store.receive.native_bringer import NativeBringer
from dcr_store.receive.receiver import Receiver
from dcr_store.store import Store
from native.checkpoints import (
    Bits,
    assert_same,
    bring,
    bringer,
    first,
    layout_of,
    new_store,
    octets,
    publish,
    step,
    tensors,
)
from native.parallel_engine import Config, Engine, Rank, checkpoint_shapes

CONFIG = Config(n_layers=2, transposed=True)
SHAPES = checkpoint_shapes(CONFIG)
RANK = Rank(1, 2)


class Faulty(Engine):
    """An engine whose loader fails when it is told to; it also scales one tensor, which therefore gets values."""

    fail_at: str | None = None
    scaled = "model.layers.0.self_attn.o_proj.weight"

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        def watched() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if name == self.fail_at:
                    raise MemoryError("no memory left")
                yield name, tensor * 2 if name == self.scaled else tensor

        return super().load_weights(watched())


@functools.cache
def published(n_versions: int, seed: int) -> tuple[Store, list[Bits]]:
    """Make a store, once, and return it with its versions' bits: both to be copied."""
    rng = np.random.default_rng(seed)
    store, series = new_store(), [first(SHAPES, rng)]
    for _ in range(n_versions - 1):
        series.append(step(series[-1], rng))
    for bits in series:
        publish(store, SHAPES, bits)
    return store, series


class Case:
    """A store, its versions' bits, an engine and its bringer, and what full loads give."""

    def __init__(self, n_versions: int = 4, seed: int = 0) -> None:
        template, series = published(n_versions, seed)
        self.store, self.bits = cloned(template), list(series)
        self.engine = Faulty(CONFIG, RANK)
        self.target = bringer(self.engine.load_weights, self.engine)

    def bring(self, version: int) -> Any:
        return bring(self.store, self.target, f"main@{version}")

    def assert_is(self, version: int) -> None:
        full = Faulty(CONFIG, RANK)
        full.load_weights(tensors(SHAPES, self.bits[version]).items())
        assert_same(self.engine, full, but=("inv_freq", "expert_load"))

    def held(self) -> str | None:
        held = self.target.held(self.store._catalog)
        return None if held is None else held.name


@pytest.fixture
def case() -> Iterator[Case]:
    case = Case()
    with case.store:
        yield case
    case.target.close()


def test_any_version_from_any_other(case: Case) -> None:
    for version in (0, 3, 1, 2, 0, 2, 2, 3):
        case.bring(version)
        case.assert_is(version)
        assert case.held() == f"main@{version}"


def test_only_changes_are_fetched_and_only_once(case: Case) -> None:
    whole = case.bring(0).nbytes_fetched
    delta = case.bring(1).nbytes_fetched
    assert 0 < delta < whole / 3
    assert case.bring(1).nbytes_fetched == 0


def test_what_was_read_ahead_is_not_read_again(case: Case) -> None:
    catalog = case.store._catalog
    read: list[str] = []

    def fetcher(item: SealedPartition) -> bytes:
        read.append(item.ref.sha256)
        return fetch(catalog.objects, item.ref)

    case.bring(0)
    before = octets(case.engine)
    for goal in (2, 1, 1):  # another goal takes the place of the first, and the same one again is read once
        case.target.ready(catalog, catalog.resolve(f"main@{goal}"), fetcher)
    assert len(read) == len(set(read)) + 1  # the change to main@1 leads to main@2 too
    assert octets(case.engine) == before
    n_read = len(read)
    outcome = case.target.bring(catalog, catalog.resolve("main@1"), fetcher)
    case.assert_is(1)
    assert len(read) == n_read
    assert outcome.nbytes_fetched > 0
    case.target.ready(catalog, catalog.resolve("main@2"), fetcher)
    case.bring(3)  # not where it was made ready for
    case.assert_is(3)
    case.target.ready(catalog, catalog.resolve("main@0"), fetcher)
    n_read = len(read)
    with torch.no_grad():
        parameter = next(iter(case.engine.parameters()))
        parameter.data = torch.zeros_like(parameter)  # elsewhere: nothing is known of it
    case.target.bring(catalog, catalog.resolve("main@0"), fetcher)
    assert len(read) > n_read
    case.assert_is(0)


def test_what_was_read_ahead_is_told_as_moved(case: Case) -> None:
    def moved(receiver: Receiver, version: str) -> tuple[int, int]:
        receiver.prepare(version)
        applied = receiver.apply()
        return applied.nbytes_spooled, applied.nbytes_fetched

    for spool_nbytes in (None, 0):
        target = dcr_store.NativeLoaderTarget(case.engine.load_weights, case.engine)
        with case.store.receiver(target, spool_nbytes=spool_nbytes) as receiver:
            receiver.prepare("main@0")
            spooled, fetched = moved(receiver, "main@1")
            assert (spooled > 0, fetched > 0) == (spool_nbytes is None, spool_nbytes == 0)
            receiver.prepare("main@3")  # and then another one: what that took is not of this one
            assert moved(receiver, "main@2")[spool_nbytes == 0] > 0
            assert moved(receiver, "main@2") == (0, 0)
            case.assert_is(2)


NAMES = [name for name in SHAPES if "rotary" not in name]


@pytest.mark.parametrize("fail_at", [NAMES[0], NAMES[7], NAMES[-1], "model.layers.1.mlp.experts.3.w2.weight"])
def test_an_exception_in_the_middle_leaves_the_old_bits(case: Case, fail_at: str) -> None:
    case.bring(0)
    before = octets(case.engine)
    case.engine.fail_at = fail_at
    with pytest.raises(StorageError, match=r"no memory left.*taken back"):
        case.bring(2)
    assert octets(case.engine) == before
    assert case.held() == "main@0"
    case.engine.fail_at = None
    case.bring(2)
    case.assert_is(2)


def test_an_interrupt_at_any_tensor_leaves_the_old_bits(case: Case) -> None:
    case.bring(0)
    before = octets(case.engine)
    for at in range(0, len(SHAPES), 5):
        seen = [0]

        def interrupt(event: events.Event, at: int = at, seen: list[int] = seen) -> None:
            if event.name == "native.tensor.given":
                seen[0] += 1
                if seen[0] > at:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), events.listening(interrupt):
            case.bring(1)
        assert octets(case.engine) == before
        assert case.held() == "main@0"
    case.bring(1)
    case.assert_is(1)


def test_a_failure_of_the_first_load_is_known(case: Case) -> None:
    case.target._target.rehearse(layout_of(case.store), lambda names: {n: case.bits[0][n] for n in names},
                                 case.target._pool)  # fmt: skip
    case.engine.fail_at = NAMES[9]
    with pytest.raises(StorageError):
        case.bring(0)
    assert case.held() is None
    case.engine.fail_at = None
    case.bring(0)
    case.assert_is(0)


def test_foreign_bits_are_healed_and_nothing_else_is_loaded(case: Case) -> None:
    case.bring(0)
    weight = case.engine.model.layers[0].self_attn.qkv_proj.weight
    weight.data.view(torch.int16)[3, 5] ^= 1 << 9
    outcome = case.bring(1)
    assert outcome.chunks_healed == 1
    case.assert_is(1)
    assert case.bring(2).chunks_healed == 0
    case.assert_is(2)


def test_every_byte_that_masks_went_into_is_checked(case: Case) -> None:
    case.bring(0)
    skipped = ("inv_freq", "expert_load")
    for name, param in case.engine.named_parameters():
        if name in (Faulty.scaled, *skipped):
            continue
        flat = param.data.view(-1)
        flat.view(torch.uint8)[-1 if "embed" not in name else 0] ^= 0x40
        assert case.bring(0).chunks_healed == 1, name
        case.assert_is(0)


class Wide(nn.Module):
    """One tensor of three blocks and a bit, and a small one that shares no block with it."""

    shapes: Final = {"wide": ("BF16", (13, 1 << 17)), "small": ("BF16", (5,))}

    def __init__(self) -> None:
        super().__init__()
        for name, (_, shape) in self.shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_buffer(name).copy_(tensor)


@pytest.mark.parametrize("damaged", [[0], [6], [0, 12]])
def test_healing_one_block_of_a_tensor_leaves_what_is_expected_of_the_others(damaged: list[int]) -> None:
    rng = np.random.default_rng(3)
    engine, full = Wide(), Wide()
    target = bringer(engine.load_weights, engine)
    bits = first(Wide.shapes, rng)
    with new_store(1 << 16) as store:
        for version in range(3):
            publish(store, Wide.shapes, bits)
            if version == 1:
                for row in damaged:
                    engine.wide.view(torch.int16)[row, 77] ^= 1 << 9
            assert bring(store, target).chunks_healed == (len(damaged) if version == 1 else 0)
            full.load_weights(tensors(Wide.shapes, bits).items())
            assert_same(engine, full)
            assert target._target.is_intact()
            bits = step(bits, rng)
    target.close()


def test_what_the_loader_does_not_fill_may_change(case: Case) -> None:
    case.bring(0)
    experts = case.engine.model.layers[1].mlp.experts
    experts.expert_load += 17
    case.engine.model.layers[0].self_attn.inv_freq.fill_(float("nan"))
    assert case.bring(1).chunks_healed == 0
    assert experts.expert_load.tolist() == [17] * 4
    case.assert_is(1)


def test_memory_that_moved_is_loaded_whole(case: Case) -> None:
    case.bring(0)
    gate = case.engine.model.layers[1].mlp.gate
    gate.weight.data = torch.full_like(gate.weight, 7)
    assert case.held() is None
    case.bring(1)
    case.assert_is(1)
    gate.bias = nn.Parameter(torch.zeros_like(gate.bias), requires_grad=False)
    gate.bias.weight_loader = lambda param, tensor: param.data.copy_(tensor)
    case.bring(2)
    case.assert_is(2)
    case.bring(3)
    case.assert_is(3)


def test_a_loader_that_is_refused_stays_refused_and_writes_nothing() -> None:
    """Its memory moved, and it scales now: what an earlier rehearsal showed is no reason to run it."""
    engine, rng = Wide(), np.random.default_rng(7)
    is_scaling = False

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        engine.load_weights((name, tensor * 2 if is_scaling else tensor) for name, tensor in weights)

    target = bringer(load_weights, engine, fallback=False)
    with new_store(1 << 16) as store:
        bits = first(Wide.shapes, rng)
        publish(store, Wide.shapes, bits)
        publish(store, Wide.shapes, step(bits, rng))
        bring(store, target, "main@0")
        engine.small = torch.full_like(engine.small, 7)
        is_scaling = True
        before = octets(engine)
        for _ in range(2):
            names: list[str] = []
            with pytest.raises(InvalidInputError), events.listening(lambda e, names=names: names.append(e.name)):
                bring(store, target, "main@1")
            assert "native.load.before" not in names
            assert octets(engine) == before
        is_scaling = False
        bring(store, target, "main@1")
    target.close()


def test_a_loader_that_changed_its_mind_is_rehearsed_again(case: Case) -> None:
    case.bring(0)
    case.engine.scaled = "model.layers.0.input_layernorm.weight"
    case.bring(1)
    full = Faulty(CONFIG, RANK)
    full.scaled = case.engine.scaled
    full.load_weights(tensors(SHAPES, case.bits[1]).items())
    assert_same(case.engine, full, but=("inv_freq", "expert_load"))


def test_a_damaged_store_is_found_before_the_engine_is_touched(case: Case) -> None:
    case.bring(0)
    before = octets(case.engine)
    objects = case.store._objects
    contents = case.store._catalog.contents(case.store._catalog.resolve("main@2"))
    key = contents.partitions[0].key
    data = objects.get(key)
    objects.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    names: list[str] = []
    with pytest.raises(IntegrityError), events.listening(lambda event: names.append(event.name)):
        case.bring(2)
    assert "native.load.before" not in names
    assert octets(case.engine) == before
    assert case.held() == "main@0"
    objects.put(key, data)
    case.bring(2)
    case.assert_is(2)


def test_another_store_is_not_the_same_version(case: Case) -> None:
    case.bring(0)
    other = Case(2, seed=1)
    assert case.target.held(other.store._catalog) is None
    bring(other.store, case.target, "main@0")
    full = Faulty(CONFIG, RANK)
    full.load_weights(tensors(SHAPES, other.bits[0]).items())
    assert_same(case.engine, full, but=("inv_freq", "expert_load"))
    other.store.close()


def test_another_layout_is_rehearsed_and_loaded_whole(case: Case) -> None:
    case.bring(3)
    shapes = {name: shape for name, shape in SHAPES.items() if "rotary" not in name}
    publish(case.store, shapes, {name: case.bits[0][name] for name in shapes})
    bring(case.store, case.target)
    case.assert_is(0)


class TestOverwrites:
    """Versions that no publisher writes yet: new bits where they are present, NaNs among them, beside masks."""

    def versions(self, store: Store, layout: Any, rng: np.random.Generator) -> list[Any]:
        state = publish_by_hand(store, layout, [Part(mask=self.noise(layout, rng, 1.0))], None)
        states = [state]
        for _ in range(3):
            present = {s: (rng.random(len(b)) < 0.1) & self.occupied(layout, s) for s, b in state.items()}
            mask = {s: np.where(present[s], 0, b) for s, b in self.noise(layout, rng, 0.1).items()}
            value = {s: np.where(present[s], b, 0) for s, b in self.noise(layout, rng, 0.9).items()}
            flags = {s: p.astype(np.uint8) for s, p in present.items()}
            part = Part(mask=mask, value=value, present=flags)
            state = publish_by_hand(store, layout, [part], state)
            states.append(state)
        return states

    def occupied(self, layout: Any, space: str) -> np.ndarray:
        found = np.zeros(layout.spaces[space], bool)
        for entry in layout.tensors:
            if entry.space == space:
                found[entry.start : entry.stop] = True
        return found

    def noise(self, layout: Any, rng: np.random.Generator, density: float) -> Any:
        result = zeros(layout)
        for space, bits in result.items():
            chosen = (rng.random(len(bits)) < density) & self.occupied(layout, space)
            bits[chosen] = rng.integers(0, np.iinfo(bits.dtype).max, int(chosen.sum()), bits.dtype, endpoint=True)
        return result

    def test_that_no_masks_lead_back_is_found_out_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rng, n_sought, seek = np.random.default_rng(5), 0, native_bringer._edges

        def counted(*arguments: Any) -> Any:
            nonlocal n_sought
            n_sought += 1
            return seek(*arguments)

        monkeypatch.setattr(native_bringer, "_edges", counted)
        with new_store() as given, dcr_store.create("memory://overwrites-back") as store:
            publish(given, SHAPES, first(SHAPES, rng))
            layout = layout_of(given)
            state = self.versions(store, layout, rng)[0]
            engine, full = Faulty(CONFIG, RANK), Faulty(CONFIG, RANK)
            target = bringer(engine.load_weights, engine)
            bring(store, target, "main@1")
            for _ in range(3):
                target.ready(store._catalog, store._catalog.resolve("main@0"), None)
            assert n_sought == 1
            bring(store, target, "main@0")
            assert n_sought == 1
            full.load_weights(
                tensors(SHAPES, {e.name: state[e.space][e.start : e.stop] for e in layout.tensors}).items()
            )
            assert_same(engine, full, but=("inv_freq", "expert_load"))
            target.close()

    @pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3), (1, 0, 2)])
    def test_are_masked_copies(self, order: tuple[int, ...]) -> None:
        rng = np.random.default_rng(5)
        with new_store() as given, dcr_store.create("memory://overwrites" + str(len(order)) + str(order[0])) as store:
            publish(given, SHAPES, first(SHAPES, rng))
            layout = layout_of(given)
            states = self.versions(store, layout, rng)
            engine, full = Faulty(CONFIG, RANK), Faulty(CONFIG, RANK)
            target = bringer(engine.load_weights, engine)
            for version in order:
                outcome = bring(store, target, f"main@{version}")
                state = states[version]
                bits = {e.name: state[e.space][e.start : e.stop] for e in layout.tensors}
                full.load_weights(tensors(SHAPES, bits).items())
                assert_same(engine, full, but=("inv_freq", "expert_load"))
                assert outcome.chunks_healed == 0
            engine.fail_at = NAMES[-1]
            before = octets(engine)
            if order[-1] < 3:
                with pytest.raises(StorageError):
                    bring(store, target, f"main@{order[-1] + 1}")
                assert octets(engine) == before
            target.close()


class Casting(nn.Module):
    """An engine whose loader casts all that it is given, so that nothing of it is checked by blocks."""

    fail_at: str | None = None

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b"):
            self.register_buffer(name, torch.zeros(5, 4, dtype=torch.float32))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == self.fail_at:
                raise MemoryError("no memory left")
            self.get_buffer(name).copy_(tensor.float())


def test_a_whole_load_that_failed_half_way_leaves_no_known_version() -> None:
    shapes, rng = {"a": ("BF16", (5, 4)), "b": ("BF16", (5, 4))}, np.random.default_rng(9)
    engine = Casting()
    target = bringer(engine.load_weights, engine)
    with new_store() as store, new_store() as other:
        bits = first(shapes, rng)
        publish(store, shapes, bits)
        publish(other, shapes, step(bits, rng, rate=1.0))
        publish(other, shapes, bits)
        bring(store, target)
        # No masks lead there from a version of which this line knows nothing.
        catalog = other._catalog
        held = target._held
        assert held is not None
        target._held = replace(held, store_sha256=catalog.store_sha256)
        engine.fail_at = "b"
        with pytest.raises(StorageError):
            bring(other, target, "main@0")
        assert target.held(catalog) is None
    target.close()


class Tied(nn.Module):
    """A head tied to the embedding, or of its own, whose loader is given both names."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(9, 4, dtype=torch.bfloat16), requires_grad=False)
        self.head = self.embedding if tied else nn.Parameter(torch.zeros(9, 4, dtype=torch.bfloat16), False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


@pytest.mark.parametrize("tied_engine", [True, False])
@pytest.mark.parametrize("tied_checkpoint", [True, False])
def test_tied_weights(tied_engine: bool, tied_checkpoint: bool) -> None:
    shapes = {"embedding": ("BF16", (9, 4)), **({} if tied_checkpoint else {"head": ("BF16", (9, 4))})}
    aliases = {"head": "embedding"} if tied_checkpoint else {}
    rng = np.random.default_rng(2)
    engine, full = Tied(tied_engine), Tied(tied_engine)
    target = bringer(engine.load_weights, engine)
    bits = first(shapes, rng)
    with new_store() as store:
        for _ in range(4):
            publish(store, shapes, bits, aliases)
            bring(store, target)
            given = tensors(shapes, bits)
            full.load_weights([*given.items(), *((alias, given[of]) for alias, of in aliases.items())])
            assert_same(engine, full)
            plan = target._target.plan
            assert plan is not None
            # Two tensors in the same bytes cannot be told apart by masks; two names of one tensor can.
            assert set(plan.fallbacks) == ({"embedding", "head"} if tied_engine and not tied_checkpoint else set())
            bits = step(bits, rng, rate=0.3)
    target.close()


def every_move(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Move a tensor in each of the ways that move bits."""
    for name, tensor in weights:
        w: Any = model
        if name == "m":
            w.views.copy_(tensor.view(2, 3, 4).permute(2, 0, 1).unsqueeze(0).squeeze(0).flatten(1).reshape(4, 6))
            w.rows.copy_(torch.stack([*tensor.unbind(0)][::-1]).clone())
            top, bottom = tensor.split([2, 4])
            w.joined.copy_(torch.cat([bottom, top]).contiguous())
            w.strided[:, ::2].copy_(tensor.t())
            w.strided[:, 1::2].copy_(tensor.flip(0).mT)
            w.ints.copy_(tensor.view(torch.int16).roll(1, 0))
            w.chosen.copy_(tensor[torch.tensor([5, 0, 3])])
            w.padded.copy_(torch.nn.functional.pad(tensor, (0, 2), value=1.0))
            w.repeated.copy_(tensor[:1].expand(3, 4))
            w.scalar.copy_(tensor[0, 0])
            torch._foreach_copy_([w.one, w.two], [tensor[0], tensor[1]])
            w.gathered.copy_(tensor.index_select(0, torch.tensor([2, 2])).repeat(2, 1))
            w.moved.copy_(tensor.to("cpu", copy=True).detach().T[1:3])
            w.empty.copy_(tensor[:0])


class Moves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = {"views": (4, 6), "rows": (6, 4), "joined": (6, 4), "strided": (4, 12), "chosen": (3, 4),
                  "padded": (6, 6), "repeated": (3, 4), "scalar": (), "one": (4,), "two": (4,), "gathered": (4, 4),
                  "moved": (2, 6), "empty": (0, 4)}  # fmt: skip
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.bfloat16))
        self.register_buffer("ints", torch.zeros(6, 4, dtype=torch.int16))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        every_move(self, weights)


@pytest.mark.parametrize("inference", [False, True])
def test_every_move_that_moves_bits(inference: bool) -> None:
    shapes, rng = {"m": ("BF16", (6, 4))}, np.random.default_rng(4)
    with torch.inference_mode(inference):
        engine = Moves()
    full = Moves()
    load = torch.inference_mode()(engine.load_weights) if inference else engine.load_weights
    target = bringer(load, engine, fallback=False)
    bits = first(shapes, rng)
    with new_store() as store:
        for _ in range(5):
            publish(store, shapes, bits)
            assert bring(store, target).chunks_healed == 0
            full.load_weights(tensors(shapes, bits).items())
            assert_same(engine, full)
            bits = step(bits, rng, rate=0.4)
    target.close()


def test_dtypes() -> None:
    shapes = {
        kind: (kind, (4, 6))
        for kind in (
            "BF16",
            "F16",
            "F32",
            "F64",
            "I8",
            "U8",
            "I16",
            "I32",
            "I64",
            "F8_E4M3",
            "F8_E5M2",
            "C64",
            "BOOL",
            "C128",
        )
    }
    shapes["none"] = ("BF16", (0, 3))
    shapes["one"] = ("F32", ())
    rng = np.random.default_rng(6)

    class Any_(nn.Module):  # noqa: N801
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                self.get_buffer(name).copy_(tensor)

    def bits_of(rate: float, before: Bits | None = None) -> Bits:
        found = {}
        for name, tensor in (before or {}).items():
            mask = rng.integers(0, 2 if name == "BOOL" else 256, tensor.nbytes, np.uint8)
            mask[rng.random(len(mask)) > rate] = 0
            found[name] = (tensor.view(np.uint8) ^ mask).view(tensor.dtype)
        return found

    bits = {name: np.zeros_like(b) for name, b in first({n: ("U8", s) for n, (_, s) in shapes.items()}, rng).items()}
    from dcr_store.layout.dtypes import dtype, n_elements, uint_dtype

    bits = {n: np.zeros(n_elements(dtype(k), s), uint_dtype(dtype(k).space)) for n, (k, s) in shapes.items()}
    engine, full = Any_(), Any_()
    for name, tensor in tensors(shapes, bits).items():
        engine.register_buffer(name, tensor.clone())
        full.register_buffer(name, tensor.clone())
    target = bringer(engine.load_weights, engine)
    with new_store() as store:
        for _ in range(4):
            bits = bits_of(0.3, bits)
            publish(store, shapes, bits)
            bring(store, target)
            full.load_weights(tensors(shapes, bits).items())
            assert_same(engine, full)
    plan = target._target.plan
    assert plan is not None
    assert set(plan.fallbacks) == {"BOOL", "C128"}
    target.close()


def test_no_mask_outlives_a_bring(case: Case) -> None:
    from dcr_store.targets.native.tensors import MaskTensor

    case.bring(0)
    case.bring(1)
    gc.collect()
    assert not [found for found in gc.get_objects() if type(found) is MaskTensor]


def test_modules_without_plain_memory_are_refused() -> None:
    with torch.device("meta"):
        module = nn.Linear(3, 3)
    with pytest.raises(InvalidInputError, match="meta tensor") as caught:
        dcr_store.NativeLoaderTarget(lambda weights: None, module)
    found = caught.value
    assert (found.key, found.expected, found.found) == ("weight", "a plain tensor of torch", "a meta tensor")
    sparse = nn.Module()
    sparse.register_buffer("few", torch.eye(3).to_sparse())
    with pytest.raises(InvalidInputError, match=r"not strided.*found torch.sparse_coo"):
        dcr_store.NativeLoaderTarget(lambda weights: None, sparse)
    with pytest.raises(InvalidInputError, match="callable"):
        dcr_store.NativeLoaderTarget(None, nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="no module"):
        dcr_store.NativeLoaderTarget(print, {})  # type: ignore[arg-type]


def test_a_store_keeps_an_engine_at_the_head(case: Case) -> None:
    target = dcr_store.NativeLoaderTarget(case.engine.load_weights, case.engine)
    with case.store.receiver(target) as receiver:
        receiver.prepare("main@3")
        receiver.apply()
        case.assert_is(3)
        active = receiver.active()
        assert active is not None


def test_the_bringer_is_its_target_s() -> None:
    from dcr_store.receive.bringing import bringer_of

    module = nn.Linear(1, 1)
    found = bringer_of(dcr_store.NativeLoaderTarget(lambda weights: None, module))
    assert isinstance(found, NativeBringer)
    found.close()
    found.close()


class Fickle(nn.Module):
    """Does with two tensors what it is told to."""

    way = "plain"

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b"):
            self.register_buffer(name, torch.zeros(5, 4, dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            match self.way:
                case "swapped":
                    self.get_buffer({"a": "b", "b": "a"}[name]).copy_(tensor)
                case "skipping" if name == "b":
                    continue
                case "zeroing":
                    self.get_buffer(name).zero_()
                    self.get_buffer(name).copy_(tensor)
                case "negating":
                    self.get_buffer(name).copy_(tensor)
                    self.get_buffer(name).neg_()
                case _:
                    self.get_buffer(name).copy_(tensor)


@pytest.mark.parametrize(
    ("way", "moved", "skipped"),
    [("swapped", "ab", ""), ("skipping", "a", "b"), ("zeroing", "", ""), ("negating", "", "")],
)
def test_a_loader_is_held_to_its_rehearsal(way: str, moved: str, skipped: str) -> None:
    shapes, rng = {"a": ("BF16", (5, 4)), "b": ("BF16", (5, 4))}, np.random.default_rng(8)
    engine, full = Fickle(), Fickle()
    target = bringer(engine.load_weights, engine)
    bits = first(shapes, rng)
    with new_store() as store:
        for version in range(4):
            publish(store, shapes, bits)
            engine.way = full.way = "plain" if version < 2 else way
            names: list[str] = []
            with events.listening(lambda event, names=names: names.append(event.name)):  # type: ignore[misc]
                assert bring(store, target).chunks_healed == 0
            full.load_weights(tensors(shapes, bits).items())
            assert_same(engine, full)
            assert ("native.load.undone" in names) == (version == 2)
            bits = step(bits, rng, rate=0.3)
    plan = target._target.plan
    assert plan is not None
    assert plan.moved == set(moved)
    assert plan.skipped == set(skipped)
    target.close()
