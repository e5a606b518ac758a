"""A small model in Megatron's slices: which rank holds what of it, and the exporter that puts it together again.

Both are NumPy on full tensors and know nothing of dcr_store's maps, so they judge them. A model is given by its
*training* tensors, under the names and in the shapes of the checkpoint; most of them are exported as they are, some
are cast, get one added or are dequantised. ``held`` cuts any arrays of those shapes, and so also arrays of numbers:
then each slice says where its values lie.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
State = dict[str, Array]
Slices = dict[str, Array]
NUMPY = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclass(frozen=True)
class Model:
    """What kind of layers, how large, and in which of the ways that frameworks and checkpoints have.

    `layers` are of kinds: attention with an MLP (``mlp``), with experts (``moe``), with a gate on its output and
    experts (``gated``), or ``mamba``.
    """

    layers: tuple[Literal["mlp", "moe", "gated", "mamba"], ...] = ("mlp", "moe", "mamba", "gated")
    hidden: int = 16
    n_heads: int = 8
    n_groups: int = 2
    head: int = 4
    ffn: int = 16
    n_experts: int = 4
    expert_ffn: int = 8
    n_mamba_groups: int = 8
    mamba_inner: int = 32
    mamba_state: int = 2
    vocabulary: int = 45
    is_tied: bool = True
    kv: Literal["cut", "copied"] = "cut"
    """Where there are more ranks than groups: whether ranks share a group's rows, or each has all of k and v."""
    experts: Literal["each", "stacked", "transposed"] = "each"
    """How the checkpoint has them."""
    is_grouped: bool = False
    """Whether a rank holds its experts as one parameter, transposed, or each as one."""
    router_bias: Literal["BF16", "F32"] = "BF16"
    """What the float32 buffer is exported as."""
    is_zero_centred: bool = True
    fp8: Literal["dequantised", "kept"] | None = None
    """Whether the MLP's down projection is held in FP8 with a scale for each row."""

    @property
    def mamba_heads(self) -> int:
        return self.n_mamba_groups

    @property
    def mamba_parts(self) -> dict[str, int]:
        n_states = self.n_mamba_groups * self.mamba_state
        return {"z": self.mamba_inner, "x": self.mamba_inner, "B": n_states, "C": n_states, "dt": self.mamba_heads}

    @property
    def conv_parts(self) -> dict[str, int]:
        return {name: n for name, n in self.mamba_parts.items() if name in "xBC"}

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each training tensor, by its name in the checkpoint."""
        hidden, rows = self.hidden, self.n_heads * self.head
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            "model.embed_tokens.weight": ("BF16", (self.vocabulary, hidden))
        }
        for index, kind in enumerate(self.layers):
            layer: dict[str, tuple[str, tuple[int, ...]]] = {"input_layernorm.weight": ("BF16", (hidden,))}
            if kind == "mamba":
                parts, conv = self.mamba_parts, self.conv_parts
                layer |= {
                    "mixer.in_proj.weight": ("BF16", (sum(parts.values()), hidden)),
                    "mixer.conv1d.weight": ("BF16", (sum(conv.values()), 1, 4)),
                    "mixer.conv1d.bias": ("BF16", (sum(conv.values()),)),
                    "mixer.A_log": ("F32", (self.mamba_heads,)),
                    "mixer.D": ("F32", (self.mamba_heads,)),
                    "mixer.dt_bias": ("BF16", (self.mamba_heads,)),
                    "mixer.norm.weight": ("BF16", (self.mamba_inner,)),
                    "mixer.out_proj.weight": ("BF16", (hidden, self.mamba_inner)),
                }
            else:
                layer |= {
                    "self_attn.q_proj.weight": ("BF16", (rows * (2 if kind == "gated" else 1), hidden)),
                    "self_attn.k_proj.weight": ("BF16", (self.n_groups * self.head, hidden)),
                    "self_attn.v_proj.weight": ("BF16", (self.n_groups * self.head, hidden)),
                    "self_attn.o_proj.weight": ("BF16", (hidden, rows)),
                    "post_attention_layernorm.weight": ("BF16", (hidden,)),
                }
            if kind == "mlp":
                layer |= {f"mlp.{name}_proj.weight": ("BF16", (self.ffn, hidden)) for name in ("gate", "up")}
                layer["mlp.down_proj.weight"] = ("F8_E4M3" if self.fp8 else "BF16", (hidden, self.ffn))
                if self.fp8:
                    layer["mlp.down_proj.weight_scale_inv"] = ("F32", (hidden, 1))
            elif kind != "mamba":
                layer |= {
                    "mlp.gate.weight": ("BF16", (self.n_experts, hidden)),
                    "mlp.gate.e_score_correction_bias": ("F32", (self.n_experts,)),
                    "mlp.gate.tokens_per_expert": ("F32", (self.n_experts,)),
                    **self._expert_tensors(),
                }
            found |= {f"model.layers.{index}.{name}": row for name, row in layer.items()}
        found["model.norm.weight"] = ("BF16", (hidden,))
        if not self.is_tied:
            found["lm_head.weight"] = found["model.embed_tokens.weight"]
        return found

    def _expert_tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        n, f, h = self.n_experts, self.expert_ffn, self.hidden
        if self.experts == "stacked":
            return {"mlp.experts.gate_up_proj": ("BF16", (n, 2 * f, h)), "mlp.experts.down_proj": ("BF16", (n, h, f))}
        if self.experts == "transposed":
            return {"mlp.experts.gate_up_proj": ("BF16", (n, h, 2 * f)), "mlp.experts.down_proj": ("BF16", (n, f, h))}
        shapes = {"gate": (f, h), "up": (f, h), "down": (h, f)}
        return {f"mlp.experts.{e}.{name}_proj.weight": ("BF16", shapes[name]) for e in range(n) for name in shapes}

    # ------------------------------------------------------------------ what is exported

    def reasons(self) -> dict[str, str]:
        """Those training tensors of which the checkpoint has other bits, and the word for why."""
        return {name: why for name in self.tensors() if (why := self._reason(name))}

    def _reason(self, name: str) -> str:
        if self.is_zero_centred and name.endswith("norm.weight") and "mixer" not in name:
            return "added"
        if name.endswith("A_log") or (self.router_bias == "BF16" and name.endswith("correction_bias")):
            return "cast"
        return "scaled" if self.fp8 == "dequantised" and name.endswith("mlp.down_proj.weight") else ""

    def is_exported(self, name: str) -> bool:
        is_scale = name.endswith("scale_inv") and self.fp8 == "dequantised"
        return not name.endswith("tokens_per_expert") and not is_scale

    def exported(self, training: Mapping[str, Array]) -> State:
        """The checkpoint of a training state."""
        return {name: self.converted(name, training) for name in self.tensors() if self.is_exported(name)}

    def converted(self, name: str, training: Mapping[str, Array]) -> Array:
        reason, tensor = self._reason(name), training[name]
        if reason == "added":
            return tensor + tensor.dtype.type(1)
        if reason == "cast":
            return tensor.astype(NUMPY["BF16"])
        if reason == "scaled":
            return (tensor.astype(np.float32) * training[f"{name}_scale_inv"]).astype(NUMPY["BF16"])
        return tensor


@dataclass(frozen=True)
class Topology:
    """How many ranks share what; in the order tensor, data, pipeline, of which experts have their own reading.

    `stages` says how many layers each stage of the pipeline has; by default as many each.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    stages: tuple[int, ...] = ()

    @property
    def n_ranks(self) -> int:
        return self.tp * self.dp * self.pp

    def place(self, rank: int) -> Place:
        inner = rank % (self.tp * self.dp)
        return Place(
            tp=inner % self.tp,
            dp=inner // self.tp,
            pp=rank // (self.tp * self.dp),
            etp=inner % self.etp,
            ep=inner // self.etp % self.ep,
            edp=inner // (self.etp * self.ep),
        )

    def layers_of(self, stage: int, n_layers: int) -> range:
        stages = self.stages or (n_layers // self.pp,) * self.pp
        assert (len(stages), sum(stages)) == (self.pp, n_layers)
        return range(sum(stages[:stage]), sum(stages[: stage + 1]))

    def __str__(self) -> str:
        return "-".join(f"{name}{getattr(self, name)}" for name in ("tp", "pp", "ep", "etp", "dp"))


@dataclass(frozen=True)
class Place:
    tp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


# ---------------------------------------------------------------------- states


def training_state(model: Model, seed: int) -> State:
    """Any bits where they are moved, NaNs among them; ordinary numbers where the exporter computes."""
    rng = np.random.default_rng(seed)
    computed = model.reasons()
    found = {}
    for name, (dtype, shape) in model.tensors().items():
        row = NUMPY[dtype]
        if name in computed or name.endswith("scale_inv"):
            found[name] = rng.normal(size=shape).astype(row)
        else:
            found[name] = np.frombuffer(rng.bytes(math.prod(shape) * row.itemsize), row).reshape(shape).copy()
    return found


def next_training_state(model: Model, state: State, seed: int, rate: float = 0.03) -> State:
    """A few values anew; those of the last expert of all layers stay."""
    rng = np.random.default_rng(seed)
    fresh = training_state(model, seed + 10_000)
    found = {}
    for name, array in state.items():
        is_changed = rng.random(array.shape) < rate
        if f".experts.{model.n_experts - 1}." in name:
            is_changed[:] = False
        elif ".experts." in name and model.experts != "each":
            is_changed[-1] = False
        found[name] = np.where(is_changed, fresh[name], array)
    return found


def numbered(model: Model) -> tuple[State, dict[str, int]]:
    """For each training tensor, numbers of its values among all; and where each tensor begins among them."""
    found, starts, start = {}, {}, 0
    for name, (_, shape) in model.tensors().items():
        starts[name] = start
        found[name] = np.arange(start, start + math.prod(shape)).reshape(shape)
        start += math.prod(shape)
    return found, starts


# ---------------------------------------------------------------------- slices


def held(model: Model, topology: Topology, rank: int, full: Mapping[str, Array], *, padding: int = 0) -> Slices:
    """What a rank holds of full tensors, by Megatron's names; `padding` stands where it holds nothing of them."""
    place = topology.place(rank)
    found: Slices = {}
    is_first, is_last = place.pp == 0, place.pp == topology.pp - 1
    if is_first:
        embed = padded(full["model.embed_tokens.weight"], topology.tp, padding)
        found["embedding.word_embeddings.weight"] = np.split(embed, topology.tp)[place.tp]
    for local, index in enumerate(topology.layers_of(place.pp, len(model.layers))):
        layer = _Layer(model, topology, place, full, f"model.layers.{index}.")
        kind = model.layers[index]
        parts = layer.mamba() if kind == "mamba" else layer.attention(kind)
        parts |= layer.mlp() if kind == "mlp" else layer.moe() if kind != "mamba" else {}
        found |= {f"decoder.layers.{local}.{name}": np.ascontiguousarray(part) for name, part in parts.items()}
    if is_last:
        found["decoder.final_layernorm.weight"] = full["model.norm.weight"]
        if not model.is_tied or not is_first:
            head = full["model.embed_tokens.weight" if model.is_tied else "lm_head.weight"]
            found["output_layer.weight"] = np.split(padded(head, topology.tp, padding), topology.tp)[place.tp]
    return found


def padded(rows: Array, tp: int, padding: int = 0) -> Array:
    """A vocabulary padded to a multiple of four rows for each tensor-parallel rank."""
    n = -(-len(rows) // (4 * tp)) * 4 * tp
    return np.concatenate([rows, np.full((n - len(rows), *rows.shape[1:]), padding, rows.dtype)])


@dataclass(frozen=True)
class _Layer:
    model: Model
    topology: Topology
    place: Place
    full: Mapping[str, Array]
    prefix: str

    def __getitem__(self, name: str) -> Array:
        return self.full[self.prefix + name]

    def of_tp(self, array: Array, dim: int = 0) -> Array:
        return np.split(array, self.topology.tp, dim)[self.place.tp]

    def of_etp(self, array: Array, dim: int = 0) -> Array:
        return np.split(array, self.topology.etp, dim)[self.place.etp]

    def attention(self, kind: str) -> Slices:
        return {
            "self_attention.linear_qkv.layer_norm_weight": self["input_layernorm.weight"],
            "self_attention.linear_qkv.weight": self._qkv(is_gated=kind == "gated"),
            "self_attention.linear_proj.weight": self.of_tp(self["self_attn.o_proj.weight"], 1),
        }

    def _qkv(self, *, is_gated: bool) -> Array:
        """For each group its heads of q (then of the gate), k and v."""
        model, (n_ranks, rank) = self.model, (self.topology.tp, self.place.tp)
        q = self["self_attn.q_proj.weight"].reshape(model.n_groups, -1, 2 if is_gated else 1, model.head, model.hidden)
        k, v = (self[f"self_attn.{name}_proj.weight"].reshape(model.n_groups, -1, model.hidden) for name in "kv")
        if model.kv == "copied" and n_ranks > model.n_groups:
            per = n_ranks // model.n_groups
            group, which = divmod(rank, per)
            mine = np.split(q[group], per)[which]
            parts = [*(mine[:, i].reshape(-1, model.hidden) for i in range(mine.shape[1])), k[group], v[group]]
            return np.concatenate(parts)
        groups = []
        for group in range(model.n_groups):
            groups += [q[group][:, i].reshape(-1, model.hidden) for i in range(q.shape[2])]
            groups += [k[group], v[group]]
        return self.of_tp(np.concatenate(groups))

    def mlp(self) -> Slices:
        found = {
            "mlp.linear_fc1.layer_norm_weight": self["post_attention_layernorm.weight"],
            "mlp.linear_fc1.weight": np.concatenate(
                [self.of_tp(self[f"mlp.{name}_proj.weight"]) for name in ("gate", "up")]
            ),
            "mlp.linear_fc2.weight": self.of_tp(self["mlp.down_proj.weight"], 1),
        }
        if self.model.fp8:
            found["mlp.linear_fc2.weight_scale_inv"] = self["mlp.down_proj.weight_scale_inv"]
        return found

    def moe(self) -> Slices:
        found = {
            "pre_mlp_layernorm.weight": self["post_attention_layernorm.weight"],
            "mlp.router.weight": self["mlp.gate.weight"],
            "mlp.router.expert_bias": self["mlp.gate.e_score_correction_bias"],
            "mlp.router.local_tokens_per_expert": self["mlp.gate.tokens_per_expert"],
        }
        n_each = self.model.n_experts // self.topology.ep
        first, second = [], []
        for expert in range(self.place.ep * n_each, (self.place.ep + 1) * n_each):
            gate, up, down = self._expert(expert)
            first.append(np.concatenate([self.of_etp(gate), self.of_etp(up)]))
            second.append(self.of_etp(down, 1))
        if self.model.is_grouped:
            found["mlp.experts.weight1"] = np.stack([fc1.T for fc1 in first]).reshape(self.model.hidden, -1)
            found["mlp.experts.weight2"] = np.stack([fc2.T for fc2 in second]).reshape(-1, self.model.hidden)
            return found
        for index, (fc1, fc2) in enumerate(zip(first, second, strict=True)):
            found[f"mlp.experts.linear_fc1.weight{index}"] = fc1
            found[f"mlp.experts.linear_fc2.weight{index}"] = fc2
        return found

    def _expert(self, index: int) -> tuple[Array, Array, Array]:
        if self.model.experts == "each":
            gate, up, down = (self[f"mlp.experts.{index}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            return gate, up, down
        both, down = self["mlp.experts.gate_up_proj"][index], self["mlp.experts.down_proj"][index]
        if self.model.experts == "transposed":
            both, down = both.T, down.T
        gate, up = np.split(both, 2)
        return gate, up, down

    def mamba(self) -> Slices:
        return {
            "mixer.in_proj.layer_norm_weight": self["input_layernorm.weight"],
            "mixer.in_proj.weight": self._sections(self["mixer.in_proj.weight"], self.model.mamba_parts),
            "mixer.conv1d.weight": self._sections(self["mixer.conv1d.weight"], self.model.conv_parts),
            "mixer.conv1d.bias": self._sections(self["mixer.conv1d.bias"], self.model.conv_parts),
            "mixer.A_log": self.of_tp(self["mixer.A_log"]),
            "mixer.D": self.of_tp(self["mixer.D"]),
            "mixer.dt_bias": self.of_tp(self["mixer.dt_bias"]),
            "mixer.norm.weight": self.of_tp(self["mixer.norm.weight"]),
            "mixer.out_proj.weight": self.of_tp(self["mixer.out_proj.weight"], 1),
        }

    def _sections(self, array: Array, sizes: Mapping[str, int]) -> Array:
        cuts = np.cumsum(list(sizes.values()))[:-1]
        return np.concatenate([self.of_tp(part) for part in np.split(array, cuts)])


# ---------------------------------------------------------------------- the exporter


class Exporter:
    """Puts the slices of all ranks together as Megatron's converters do, all from the first ranks that have it."""

    def __init__(self, model: Model, topology: Topology) -> None:
        self.model, self.topology = model, topology

    def __call__(self, ranks: Sequence[Slices]) -> Iterator[tuple[str, Array]]:
        model, topology = self.model, self.topology
        merged: State = {}
        n_inner = topology.tp * topology.dp
        first, last = ranks[: topology.tp], ranks[-n_inner:][: topology.tp]
        embed = np.concatenate([rank["embedding.word_embeddings.weight"] for rank in first])
        merged["model.embed_tokens.weight"] = embed[: model.vocabulary]
        for stage in range(topology.pp):
            peers = ranks[stage * n_inner : (stage + 1) * n_inner]
            for local, index in enumerate(topology.layers_of(stage, len(model.layers))):
                layer = self._layer(peers, f"decoder.layers.{local}.", model.layers[index])
                merged |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
        merged["model.norm.weight"] = last[0]["decoder.final_layernorm.weight"]
        if not model.is_tied:
            merged["lm_head.weight"] = np.concatenate([rank["output_layer.weight"] for rank in last])[
                : model.vocabulary
            ]
        for name in merged:
            if model.is_exported(name):
                yield name, model.converted(name, merged)

    def _layer(self, peers: Sequence[Slices], prefix: str, kind: str) -> State:
        def of(name: str) -> list[Array]:
            return [rank[prefix + name] for rank in peers[: self.topology.tp]]

        if kind == "mamba":
            return self._mamba(of)
        found = {
            "input_layernorm.weight": of("self_attention.linear_qkv.layer_norm_weight")[0],
            **self._attention(of("self_attention.linear_qkv.weight"), is_gated=kind == "gated"),
            "self_attn.o_proj.weight": np.concatenate(of("self_attention.linear_proj.weight"), 1),
        }
        if kind == "mlp":
            halves = [np.split(part, 2) for part in of("mlp.linear_fc1.weight")]
            found["post_attention_layernorm.weight"] = of("mlp.linear_fc1.layer_norm_weight")[0]
            found["mlp.gate_proj.weight"] = np.concatenate([gate for gate, _ in halves])
            found["mlp.up_proj.weight"] = np.concatenate([up for _, up in halves])
            found["mlp.down_proj.weight"] = np.concatenate(of("mlp.linear_fc2.weight"), 1)
            if self.model.fp8:
                found["mlp.down_proj.weight_scale_inv"] = of("mlp.linear_fc2.weight_scale_inv")[0]
            return found
        found["post_attention_layernorm.weight"] = of("pre_mlp_layernorm.weight")[0]
        found["mlp.gate.weight"] = of("mlp.router.weight")[0]
        found["mlp.gate.e_score_correction_bias"] = of("mlp.router.expert_bias")[0]
        return found | self._experts(peers, prefix)

    def _attention(self, parts: list[Array], *, is_gated: bool) -> State:
        model, hidden = self.model, self.model.hidden
        n_kinds, per_rank = (2 if is_gated else 1), self.topology.tp // model.n_groups
        if model.kv == "copied" and self.topology.tp > model.n_groups:
            n_q = model.n_heads * model.head // self.topology.tp
            q = [part[: n_kinds * n_q].reshape(n_kinds, -1, model.head, hidden).swapaxes(0, 1) for part in parts]
            firsts = [part[n_kinds * n_q :] for part in parts[::per_rank]]
            k, v = (np.concatenate([np.split(part, 2)[i] for part in firsts]) for i in range(2))
            return _attention_of(np.concatenate(q), k, v, hidden)
        fused = np.concatenate(parts).reshape(model.n_groups, -1, model.head, hidden)
        n_heads = model.n_heads // model.n_groups
        q = fused[:, : n_kinds * n_heads].reshape(model.n_groups, n_kinds, n_heads, model.head, hidden).swapaxes(1, 2)
        return _attention_of(q, fused[:, -2], fused[:, -1], hidden)

    def _experts(self, peers: Sequence[Slices], prefix: str) -> State:
        model, topology = self.model, self.topology
        n_each = model.n_experts // topology.ep
        experts = []
        for expert in range(model.n_experts):
            start, local = expert // n_each * topology.etp, expert % n_each
            fc1, fc2 = [], []
            for rank in peers[start : start + topology.etp]:
                if model.is_grouped:
                    fc1.append(rank[prefix + "mlp.experts.weight1"].reshape(n_each, model.hidden, -1)[local].T)
                    fc2.append(rank[prefix + "mlp.experts.weight2"].reshape(n_each, -1, model.hidden)[local].T)
                else:
                    fc1.append(rank[f"{prefix}mlp.experts.linear_fc1.weight{local}"])
                    fc2.append(rank[f"{prefix}mlp.experts.linear_fc2.weight{local}"])
            gates, ups = zip(*[np.split(part, 2) for part in fc1], strict=True)
            experts.append((np.concatenate(gates), np.concatenate(ups), np.concatenate(fc2, 1)))
        if model.experts == "each":
            return {
                f"mlp.experts.{index}.{name}_proj.weight": part
                for index, parts in enumerate(experts)
                for name, part in zip(("gate", "up", "down"), parts, strict=True)
            }
        both = np.stack([np.concatenate([gate, up]) for gate, up, _ in experts])
        down = np.stack([down for _, _, down in experts])
        if model.experts == "transposed":
            both, down = both.swapaxes(1, 2), down.swapaxes(1, 2)
        return {"mlp.experts.gate_up_proj": both, "mlp.experts.down_proj": down}

    def _mamba(self, of: Any) -> State:
        model, tp = self.model, self.topology.tp

        def sections(name: str, sizes: Mapping[str, int]) -> Array:
            cuts = np.cumsum([n // tp for n in sizes.values()])[:-1]
            parts = [np.split(part, cuts) for part in of(name)]
            return np.concatenate([part[index] for index in range(len(sizes)) for part in parts])

        return {
            "input_layernorm.weight": of("mixer.in_proj.layer_norm_weight")[0],
            "mixer.in_proj.weight": sections("mixer.in_proj.weight", model.mamba_parts),
            "mixer.conv1d.weight": sections("mixer.conv1d.weight", model.conv_parts),
            "mixer.conv1d.bias": sections("mixer.conv1d.bias", model.conv_parts),
            **{
                f"mixer.{name}": np.concatenate(of(f"mixer.{name}"))
                for name in ("A_log", "D", "dt_bias", "norm.weight")
            },
            "mixer.out_proj.weight": np.concatenate(of("mixer.out_proj.weight"), 1),
        }


def _attention_of(q: Array, k: Array, v: Array, hidden: int) -> State:
    return {f"self_attn.{name}_proj.weight": part.reshape(-1, hidden) for name, part in (("q", q), ("k", k), ("v", v))}


# ---------------------------------------------------------------------- who owns what


def owned(model: Model, topology: Topology) -> list[Slices]:
    """For each rank where the values lie that its slices are the first to hold, as numbers of values; else -1.

    Nothing lies in what the exporter computes, or leaves out.
    """
    full, _ = numbered(model)
    for name in full:
        if name in model.reasons() or not model.is_exported(name):
            full[name] = np.full_like(full[name], -1)
    n_values = sum(math.prod(shape) for _, shape in model.tensors().values())
    is_taken = np.zeros(n_values + 1, bool)
    found = []
    for rank in range(topology.n_ranks):
        mine = held(model, topology, rank, full, padding=-1)
        for name, places in mine.items():
            mine[name] = np.where(is_taken[places], -1, places)
            is_taken[places[places >= 0]] = True
        found.append(mine)
    return found
