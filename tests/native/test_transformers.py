"""Models of transformers, loaded by name as their checkpoints are, against full loads after each of 20 versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from native.checkpoints import Bits, Shapes, assert_same, bring, bringer, first, new_store, publish, step, tensors

SMALL = {"vocab_size": 67, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 32}  # fmt: skip


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=24, tie_word_embeddings=True))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SMALL, intermediate_size=24, num_local_experts=4))


def qwen_moe() -> Any:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SMALL, intermediate_size=24, moe_intermediate_size=8, shared_expert_intermediate_size=12,
                       num_experts=4, num_experts_per_tok=2)
    )  # fmt: skip


def by_name(model: Any) -> Callable[[Iterable[tuple[str, torch.Tensor]]], None]:
    """Return a loader that copies each tensor of a checkpoint to the entry of that name."""

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        held = model.state_dict()
        for name, tensor in weights:
            held[name].copy_(tensor)

    return load


def by_expert(model: Any) -> Callable[[Iterable[tuple[str, torch.Tensor]]], None]:
    """Return a loader of checkpoints with one tensor for each expert's w1, w2 and w3, which are stacked and joined."""

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        held = model.state_dict()
        experts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
        for name, tensor in weights:
            if ".experts." not in name:
                held[name].copy_(tensor)
                continue
            layer, _, rest = name.partition(".experts.")
            expert, part, _ = rest.split(".")
            found = experts.setdefault(layer, {})
            found[int(expert), part] = tensor
            n_experts = len(held[f"{layer}.experts.down_proj"])
            if len(found) == 3 * n_experts:
                joined = [torch.cat([found[e, "w1"], found[e, "w3"]], dim=0) for e in range(n_experts)]
                held[f"{layer}.experts.gate_up_proj"].copy_(torch.stack(joined))
                held[f"{layer}.experts.down_proj"].copy_(torch.stack([found[e, "w2"] for e in range(n_experts)]))
                experts.pop(layer)

    return load


def split_experts(shapes: Shapes) -> Shapes:
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (kind, shape) in shapes.items():
        layer, _, rest = name.partition(".experts.")
        if rest == "gate_up_proj":
            n_experts, twice, hidden = shape
            for e in range(n_experts):
                found[f"{layer}.experts.{e}.w1.weight"] = (kind, (twice // 2, hidden))
                found[f"{layer}.experts.{e}.w3.weight"] = (kind, (twice // 2, hidden))
        elif rest == "down_proj":
            found |= {f"{layer}.experts.{e}.w2.weight": (kind, shape[1:]) for e in range(shape[0])}
        else:
            found[name] = (kind, shape)
    return found


@pytest.mark.parametrize(
    ("make", "loader"), [(llama, by_name), (mixtral, by_name), (mixtral, by_expert), (qwen_moe, by_name)]
)
def test_twenty_versions(make: Callable[[], Any], loader: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    model, full = make().to(torch.bfloat16), make().to(torch.bfloat16)
    shapes: Shapes = {name: ("BF16", tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    aliases: dict[str, str] = {}
    if make is llama:
        aliases = {"lm_head.weight": "model.embed_tokens.weight"}
        shapes = {name: shape for name, shape in shapes.items() if name not in aliases}
    if loader is by_expert:
        shapes = split_experts(shapes)
    rng = np.random.default_rng(1)
    bits: Bits = first(shapes, rng)
    target = bringer(loader(model), model, fallback=False)
    with new_store() as store:
        for _ in range(20):
            publish(store, shapes, bits, aliases)
            assert bring(store, target).chunks_healed == 0
            given = tensors(shapes, bits)
            loader(full)([*given.items(), *((alias, given[of]) for alias, of in aliases.items())])
            assert_same(model, full)
            bits = step(bits, rng)
    target.close()
