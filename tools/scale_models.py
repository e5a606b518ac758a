"""Models by their tensors' real shapes, and how several writers hold them, for simulate_scale.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcr_store.layout.layout import Layout
from dcr_store.layout.pieces import pieces
from dcr_store.layout.slices import sharded
from dcr_store.publish.ownership import owned_box

if TYPE_CHECKING:
    from dcr_store.layout.affine_map import AffineMap

Shape = tuple[int, ...]
CHUNK_ELEMENTS = 1 << 20
N_SHARED = 8
"""Writers that share a tensor that is no expert's, where layers are staged."""
N_STAGES = 16


# ---------------------------------------------------------------------- models


@dataclass(frozen=True)
class Model:
    """The tensors of a model, by name, those of one layer in the layer's order. ``experts``: names of whole ones."""

    name: str
    n_layers: int
    tensors: dict[str, Shape]

    def layer(self, name: str) -> int:
        """Return the layer of a tensor; what is before the first belongs to it, what is behind the last to that."""
        parts = name.split(".")
        if "layers" in parts:
            return int(parts[parts.index("layers") + 1])
        return 0 if "embed" in name else self.n_layers - 1


def is_expert(name: str) -> bool:
    return ".experts." in name


def qwen3_moe(
    name: str, n_layers: int, hidden: int, n_experts: int, inner: int, n_heads: int, vocabulary: int = 151936
) -> Model:
    """Return the tensors of a Qwen3 MoE: 4 heads of keys and values, of 128 each."""
    head, n_kv = 128, 4
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for index in range(n_layers):
        at = f"model.layers.{index}."
        tensors |= {
            f"{at}self_attn.q_proj.weight": (n_heads * head, hidden),
            f"{at}self_attn.k_proj.weight": (n_kv * head, hidden),
            f"{at}self_attn.v_proj.weight": (n_kv * head, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, n_heads * head),
            f"{at}self_attn.q_norm.weight": (head,),
            f"{at}self_attn.k_norm.weight": (head,),
            f"{at}mlp.gate.weight": (n_experts, hidden),
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
        }
        tensors |= experts(f"{at}mlp.experts.", n_experts, hidden, inner)
    return Model(name, n_layers, tensors | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)})


def experts(at: str, n_experts: int, hidden: int, inner: int) -> dict[str, Shape]:
    found: dict[str, Shape] = {}
    for expert in range(n_experts):
        found[f"{at}{expert}.gate_proj.weight"] = (inner, hidden)
        found[f"{at}{expert}.up_proj.weight"] = (inner, hidden)
        found[f"{at}{expert}.down_proj.weight"] = (hidden, inner)
    return found


def latent_moe(name: str) -> Model:
    """Return the tensors of Kimi K2: 61 layers, the first dense, 384 experts, multi-head latent attention."""
    n_layers, hidden, n_experts, inner, dense, vocabulary = 61, 7168, 384, 2048, 18432, 163840
    n_heads, q_rank, kv_rank, nope, rope, value = 64, 1536, 512, 128, 64, 128
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for index in range(n_layers):
        at = f"model.layers.{index}."
        tensors |= {
            f"{at}self_attn.q_a_proj.weight": (q_rank, hidden),
            f"{at}self_attn.q_a_layernorm.weight": (q_rank,),
            f"{at}self_attn.q_b_proj.weight": (n_heads * (nope + rope), q_rank),
            f"{at}self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
            f"{at}self_attn.kv_a_layernorm.weight": (kv_rank,),
            f"{at}self_attn.kv_b_proj.weight": (n_heads * (nope + value), kv_rank),
            f"{at}self_attn.o_proj.weight": (hidden, n_heads * value),
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
        }
        shared = f"{at}mlp." if index == 0 else f"{at}mlp.shared_experts."
        width = dense if index == 0 else inner
        tensors |= {
            f"{shared}gate_proj.weight": (width, hidden),
            f"{shared}up_proj.weight": (width, hidden),
            f"{shared}down_proj.weight": (hidden, width),
        }
        if index:
            tensors[f"{at}mlp.gate.weight"] = (n_experts, hidden)
            tensors |= experts(f"{at}mlp.experts.", n_experts, hidden, inner)
    return Model(name, n_layers, tensors | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)})


MODELS = {
    "small": lambda: qwen3_moe("small", 2, 256, 4, 128, 4, 1024),
    "30B": lambda: qwen3_moe("30B", 48, 2048, 128, 768, 32),
    "235B": lambda: qwen3_moe("235B", 94, 4096, 128, 1536, 64),
    "1T": lambda: latent_moe("1T"),
}


# ---------------------------------------------------------------------- who holds what


def parts_of(model: Model, n_writers: int, topology: str) -> dict[int, list[tuple[str, int, int]]]:
    """Return what each writer holds: tensor, which part of it, of how many in its first dimension."""
    found: dict[int, list[tuple[str, int, int]]] = {writer: [] for writer in range(n_writers)}
    if topology == "flat":
        stages = [range(n_writers)] * model.n_layers
    else:
        n_stages = min(N_STAGES, model.n_layers, max(1, n_writers // N_SHARED))
        cuts = [stage * n_writers // n_stages for stage in range(n_stages + 1)]
        stages = [
            range(cuts[(s := layer * n_stages // model.n_layers)], cuts[s + 1]) for layer in range(model.n_layers)
        ]
    of_stage: dict[range, list[str]] = {}
    for name in model.tensors:
        if is_expert(name):
            of_stage.setdefault(stages[model.layer(name)], []).append(name)
            continue
        stage = stages[model.layer(name)]
        n_parts = min(len(stage), model.tensors[name][0])
        if topology != "flat":
            n_parts = min(n_parts, N_SHARED if len(model.tensors[name]) > 1 else 1)
        for part in range(n_parts):
            found[stage[part]].append((name, part, n_parts))
    for stage, names in of_stage.items():
        for index, name in enumerate(names):
            found[stage[index * len(stage) // len(names)]].append((name, 0, 1))
    return found


@dataclass(frozen=True)
class Share:
    """What one writer has to do with the chunks: elements by place, and the boxes that it owns."""

    chunks: dict[tuple[str, int], int]
    boxes: dict[str, tuple[Any, ...]]

    @property
    def n_elements(self) -> int:
        return sum(self.chunks.values())


def share_of(model: Model, layout: Layout, parts: Sequence[tuple[str, int, int]]) -> Share:
    chunks: dict[tuple[str, int], int] = {}
    boxes: dict[str, tuple[Any, ...]] = {}
    for name, part, n_parts in parts:
        mapped: AffineMap = sharded(name, "BF16", model.tensors[name], 0, part, n_parts)
        boxes[name] = tuple(map(owned_box, mapped.boxes[name]))
        for piece in pieces(mapped, layout, CHUNK_ELEMENTS):
            place = piece.space, piece.chunk
            chunks[place] = chunks.get(place, 0) + piece.n_elements
    return Share(chunks, boxes)
