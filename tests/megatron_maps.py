"""The maps of a model in Megatron's slices, as a user makes them: of dcr_store's builders, and of sharded tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron import Array, Model, Place, Topology

from dcr_store.layout import slices
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.from_megatron import map_of_megatron


def places(mapped: AffineMap, starts: Mapping[str, int]) -> Array:
    """Where the values of a slice lie, as numbers of values of the model; -1 for those that are nobody's."""
    found = np.full(math.prod(mapped.shape), -1)
    for name in mapped.tensors:
        there = mapped.canonical_of(name, np.arange(len(found)))
        found = np.where(there >= 0, there + starts[name], found)
    return found.reshape(mapped.shape)


def built(model: Model, topology: Topology, rank: int) -> dict[str, AffineMap]:
    """The map of each of a rank's slices that the checkpoint has bit for bit."""
    builder = _Builder(model, topology, topology.place(rank))
    tensors, computed = model.tensors(), model.reasons()
    found = dict(builder.all())
    return {
        name: mapped
        for name, mapped in found.items()
        if all(model.is_exported(tensor) and tensor not in computed and tensor in tensors for tensor in mapped.tensors)
    }


def shared_out(all_maps: list[dict[str, AffineMap]]) -> list[dict[str, AffineMap]]:
    """Of what several ranks hold alike, the first's; of tied tensors, the first stage's."""
    seen: set[str] = set()
    found: list[dict[str, AffineMap]] = []
    for maps in all_maps:
        mine = {name: mapped for name, mapped in maps.items() if mapped.n_values and mapped.digest not in seen}
        seen |= {mapped.digest for mapped in mine.values()}
        found.append(mine)
    return found


@dataclass(frozen=True)
class _Builder:
    model: Model
    topology: Topology
    place: Place

    def all(self) -> Iterator[tuple[str, AffineMap]]:
        model, is_last = self.model, self.place.pp == self.topology.pp - 1
        if self.place.pp == 0:
            yield "embedding.word_embeddings.weight", self.vocabulary("model.embed_tokens.weight")
        for local, index in enumerate(self.topology.layers_of(self.place.pp, len(model.layers))):
            kind = model.layers[index]
            parts = self.mamba if kind == "mamba" else self.attention
            for name, mapped in parts(f"model.layers.{index}.", kind):
                yield f"decoder.layers.{local}.{name}", mapped
        if is_last:
            yield "decoder.final_layernorm.weight", self.whole("model.norm.weight")
            if not model.is_tied:
                yield "output_layer.weight", self.vocabulary("lm_head.weight")
            elif self.place.pp:
                yield "output_layer.weight", self.vocabulary("model.embed_tokens.weight")

    def of(self, name: str) -> tuple[str, str, tuple[int, ...]]:
        return name, *self.model.tensors()[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.model.tensors()[name][1]

    def whole(self, name: str) -> AffineMap:
        return slices.whole(*self.of(name))

    def rows(self, name: str) -> AffineMap:
        return slices.column_parallel(*self.of(name), self.place.tp, self.topology.tp)

    def columns(self, name: str) -> AffineMap:
        return slices.row_parallel(*self.of(name), self.place.tp, self.topology.tp)

    def vocabulary(self, name: str) -> AffineMap:
        n_padded = padded_rows(self.model, self.topology)
        return slices.padded_vocabulary(*self.of(name), n_padded, self.place.tp, self.topology.tp)

    def qkv(self, prefix: str, kind: str) -> AffineMap:
        names = {part: f"{prefix}self_attn.{part}_proj.weight" for part in "qkv"}
        copied = [names["k"], names["v"]] if self.model.kv == "copied" else []
        at = (self.model.n_groups, self.place.tp, self.topology.tp)
        if kind != "gated":
            return slices.qkv({name: self.shape(name) for name in names.values()}, "BF16", *at, copied=copied)
        onward = gated_heads(self.model, names["q"])
        shapes = {part: mapped.shape for part, mapped in onward.items()}
        shapes |= {names[part]: self.shape(names[part]) for part in "kv"}
        return slices.qkv(shapes, "BF16", *at, copied=copied).then(onward)

    def attention(self, prefix: str, kind: str) -> Iterator[tuple[str, AffineMap]]:
        yield "self_attention.linear_qkv.layer_norm_weight", self.whole(f"{prefix}input_layernorm.weight")
        yield "self_attention.linear_qkv.weight", self.qkv(prefix, kind)
        yield "self_attention.linear_proj.weight", self.columns(f"{prefix}self_attn.o_proj.weight")
        norm = self.whole(f"{prefix}post_attention_layernorm.weight")
        if kind == "mlp":
            shapes = {name: self.shape(name) for name in (f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up"))}
            yield "mlp.linear_fc1.layer_norm_weight", norm
            yield "mlp.linear_fc1.weight", slices.fused(shapes, "BF16", self.place.tp, self.topology.tp)
            yield "mlp.linear_fc2.weight", self.columns(f"{prefix}mlp.down_proj.weight")
            if self.model.fp8:
                yield "mlp.linear_fc2.weight_scale_inv", self.whole(f"{prefix}mlp.down_proj.weight_scale_inv")
            return
        yield "pre_mlp_layernorm.weight", norm
        yield "mlp.router.weight", self.whole(f"{prefix}mlp.gate.weight")
        yield "mlp.router.expert_bias", self.whole(f"{prefix}mlp.gate.e_score_correction_bias")
        yield "mlp.router.local_tokens_per_expert", self.whole(f"{prefix}mlp.gate.tokens_per_expert")
        yield from self.experts(f"{prefix}mlp.experts.")

    def experts(self, prefix: str) -> Iterator[tuple[str, AffineMap]]:
        n_each = self.model.n_experts // self.topology.ep
        mine = range(self.place.ep * n_each, (self.place.ep + 1) * n_each)
        pairs = [self.expert(prefix, expert) for expert in mine]
        if self.model.is_grouped:
            for index, joined in enumerate(zip(*pairs, strict=True)):
                stack = slices.stacked([slices.transposed(part) for part in joined])
                hidden = self.model.hidden
                shape = [hidden, math.prod(stack.shape) // hidden][:: -1 if index else 1]
                yield f"mlp.experts.weight{index + 1}", slices.reshaped(stack, shape)
            return
        for index, pair in enumerate(pairs):
            for number, part in enumerate(pair):
                yield f"mlp.experts.linear_fc{number + 1}.weight{index}", part

    def expert(self, prefix: str, index: int) -> tuple[AffineMap, AffineMap]:
        at = (self.place.etp, self.topology.etp)
        if self.model.experts == "each":
            names = [f"{prefix}{index}.{part}_proj.weight" for part in ("gate", "up", "down")]
            fc1 = slices.fused({name: self.shape(name) for name in names[:2]}, "BF16", *at)
            return fc1, slices.row_parallel(*self.of(names[2]), *at)
        whole = [slices.narrowed(self.whole(f"{prefix}{part}_proj"), 0, index, 1) for part in ("gate_up", "down")]
        both, down = (slices.reshaped(mapped, mapped.shape[1:]) for mapped in whole)
        if self.model.experts == "transposed":
            both, down = slices.transposed(both), slices.transposed(down)
        n = self.model.expert_ffn // at[1]
        halves = [slices.narrowed(both, 0, half * self.model.expert_ffn + at[0] * n, n) for half in range(2)]
        return slices.concatenated(halves), slices.narrowed(down, 1, at[0] * n, n)

    def mamba(self, prefix: str, _: str) -> Iterator[tuple[str, AffineMap]]:
        parts, conv = (list(sizes.values()) for sizes in (self.model.mamba_parts, self.model.conv_parts))
        at = (self.place.tp, self.topology.tp)
        yield "mixer.in_proj.layer_norm_weight", self.whole(f"{prefix}input_layernorm.weight")
        yield "mixer.in_proj.weight", slices.sections(*self.of(f"{prefix}mixer.in_proj.weight"), parts, *at)
        for name in ("conv1d.weight", "conv1d.bias"):
            yield f"mixer.{name}", slices.sections(*self.of(f"{prefix}mixer.{name}"), conv, *at)
        for name in ("A_log", "D", "dt_bias", "norm.weight"):
            yield f"mixer.{name}", self.rows(f"{prefix}mixer.{name}")
        yield "mixer.out_proj.weight", self.columns(f"{prefix}mixer.out_proj.weight")


def padded_rows(model: Model, topology: Topology) -> int:
    return -(-model.vocabulary // (4 * topology.tp)) * 4 * topology.tp


def gated_heads(model: Model, name: str) -> dict[str, AffineMap]:
    """Queries and gates, of all heads, in a checkpoint's q_proj that has for each head both."""
    shape = model.tensors()[name][1]
    heads = slices.reshaped(slices.whole(name, "BF16", shape), [model.n_heads, 2, model.head, model.hidden])
    rows = [model.n_heads * model.head, model.hidden]
    return {
        part: slices.reshaped(slices.narrowed(heads, 1, which, 1), rows) for which, part in enumerate(("q", "gate"))
    }


# ---------------------------------------------------------------------- sharded tensors


@dataclass(frozen=True)
class Sharded:
    """The attributes of Megatron's class."""

    key: str
    data: Any
    dtype: str
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: tuple[int, ...]
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None


@dataclass(frozen=True)
class Shard:
    """One sharded tensor of a rank: of rows `start` to `stop` of a slice, and what leads on from its global tensor."""

    name: str
    start: int
    stop: int
    sharded: Sharded
    canonical_shape: tuple[int, ...] | None
    onward: Mapping[str, AffineMap]

    def mapped(self) -> AffineMap:
        return map_of_megatron(self.sharded, self.canonical_shape).then(self.onward)


TORCH = {"BF16": "torch.bfloat16", "F32": "torch.float32", "F8_E4M3": "torch.float8_e4m3fn"}


def shards(model: Model, topology: Topology, rank: int) -> Iterator[Shard]:
    """A rank's ``sharded_state_dict``, factories applied: gate and up, Mamba's parts; experts have an axis."""
    place = topology.place(rank)
    builder = _Builder(model, topology, place)
    for name, mapped in builder.all():
        replica = (0, 0, place.edp if ".experts." in name else place.dp)
        (first, *_) = mapped.tensors
        dtype, tensors = mapped.dtype, model.tensors()

        def shard(
            key: str,
            local: tuple[int, ...],
            full: tuple[int, ...],
            offset: tuple[int, ...],
            onward: Mapping[str, AffineMap],
            start: int = 0,
            axes: tuple[tuple[int, int], ...] = (),
            replica: tuple[int, ...] = replica,
            canonical: tuple[int, ...] | None = None,
            name: str = name,
            dtype: str = dtype,
        ) -> Shard:
            item = Sharded(
                key,
                None,
                TORCH[dtype],
                local,
                (*(n for n, _ in axes), *full),
                (*(at for _, at in axes), *offset),
                replica,
                len(axes),
                canonical is not None,
            )
            return Shard(name, start, start + local[0], item, canonical, onward)

        shape = mapped.shape
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            full = tensors[first][1]
            is_second = name.startswith("output") and model.is_tied
            at = (place.tp * shape[0], 0)
            wide = (padded_rows(model, topology), model.hidden)
            yield shard(first, shape, wide, at, {}, replica=(int(is_second), 0, place.dp), canonical=full)
        elif name.endswith("linear_qkv.weight"):
            layer = first.rpartition(".self_attn")[0]
            key = f"{layer}.linear_qkv"
            names = {part: f"{layer}.self_attn.{part}_proj.weight" for part in "qkv"}
            is_gated = tensors[names["q"]][1][0] == 2 * model.n_heads * model.head
            onward = gated_heads(model, names["q"]) if is_gated else {}
            parts = {part: m.shape for part, m in onward.items()} or {names["q"]: tensors[names["q"]][1]}
            parts |= {names[part]: tensors[names[part]][1] for part in "kv"}
            fused = slices.interleaved(parts, "BF16", model.n_groups).then(onward)
            yield shard(key, shape, fused.shape, (place.tp * shape[0], 0), {key: fused})
        elif ".linear_fc1.weight" in name:
            is_expert = ".experts." in name
            n_ranks, at = (topology.etp, place.etp) if is_expert else (topology.tp, place.tp)
            key, axes, each = first.rpartition(".mlp")[0] + ".linear_fc1", (), None
            if is_expert:
                local_index = int(name.rpartition("weight")[2])
                n_each = model.n_experts // topology.ep
                axes = ((model.n_experts, place.ep * n_each + local_index),)
                each = [_whole_expert(model, first, expert)[0] for expert in range(model.n_experts)]
            whole = slices.stacked(each) if each else slices.concatenated([builder.whole(t) for t in mapped.tensors])
            half = shape[0] // 2
            for which in range(2):
                offset = ((which * n_ranks + at) * half, 0)
                full = (2 * n_ranks * half, model.hidden)
                yield shard(key, (half, shape[1]), full, offset, {key: whole}, which * half, axes)
        elif ".experts.linear_fc2.weight" in name:
            key = first.rpartition(".mlp")[0] + ".linear_fc2"
            local_index = int(name.rpartition("weight")[2])
            axes = ((model.n_experts, place.ep * (model.n_experts // topology.ep) + local_index),)
            whole = slices.stacked([_whole_expert(model, first, expert)[1] for expert in range(model.n_experts)])
            full = (model.hidden, model.expert_ffn)
            yield shard(key, shape, full, (0, place.etp * shape[1]), {key: whole}, axes=axes)
        elif name.endswith(("in_proj.weight", "conv1d.weight", "conv1d.bias")):
            sizes = model.mamba_parts if "in_proj" in name else model.conv_parts
            start = begin = 0
            for part, n in sizes.items():
                key, local = f"{first}.{part}", (n // topology.tp, *shape[1:])
                onward = {key: slices.narrowed(builder.whole(first), 0, begin, n)}
                yield shard(key, local, (n, *shape[1:]), (place.tp * local[0], *[0] * (len(shape) - 1)), onward, start)
                start, begin = start + local[0], begin + n
        else:
            full = tensors[first][1]
            split = [dim for dim in range(len(full)) if full[dim] != shape[dim]]
            offset = tuple(place.tp * shape[dim] if dim in split else 0 for dim in range(len(full)))
            is_copied = not split and topology.tp > 1
            yield shard(first, shape, full, offset, {}, replica=(0, place.tp if is_copied else 0, replica[2]))


def _whole_expert(model: Model, tensor: str, index: int) -> tuple[AffineMap, AffineMap]:
    alone = _Builder(model, Topology(), Topology().place(0))
    return alone.expert(tensor.partition(".experts.")[0] + ".experts.", index)
