"""Small checkpoints of the shapes that engines load, and versions of them with any bits at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from native.checkpoints import publish, step, tensors
from safetensors.torch import load_file, save_file

import dcr_store
from dcr_store.layout.tensors import as_bits

N_VERSIONS: Final = 10
_COMMON: Final = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_EXPERTS: Final = {"intermediate_size": 96, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LATENT: Final = {
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_GROUPED: Final = {
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
}
_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model: its configuration, and by the last part of their names, tensors that loaders are known not to move, and
    those that are stored as FP32."""

    config: str
    options: dict[str, Any]
    by_value: frozenset[str] = frozenset()
    in_fp32: frozenset[str] = frozenset()


SHAPES: Final = {
    "llama": Shape("LlamaConfig", {**_COMMON, "intermediate_size": 96, "tie_word_embeddings": True}),
    "qwen3_moe": Shape("Qwen3MoeConfig", {**_COMMON, **_EXPERTS, "num_experts": 4, "head_dim": 16}),
    "mixtral": Shape("MixtralConfig", {**_COMMON, "intermediate_size": 64, "num_local_experts": 4}),
    # Its correction bias is stored as BF16 and held as FP32.
    "deepseek_v3": Shape(
        "DeepseekV3Config",
        {**_COMMON, **_EXPERTS, **_LATENT, **_GROUPED, "num_key_value_heads": 4, "rope_parameters": _YARN},
        frozenset({"e_score_correction_bias"}),
    ),
    # A becomes -exp of what was loaded, in vLLM; SGLang keeps A_log. Both hold FP32 and are given BF16.
    "mamba": Shape(
        "MambaConfig", {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
        frozenset({"A_log"}),
    ),
    # A becomes -exp of what was loaded, in both; copied without a cast before.
    "mamba2": Shape(
        "Mamba2Config",
        {
            "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8,
            "num_heads": 8, "head_dim": 16, "n_groups": 2, "intermediate_size": 128, "rms_norm": True,
        },
        frozenset({"A_log"}),
        in_fp32=frozenset({"A_log"}),
    ),
}  # fmt: skip


def model_directory(directory: Path, kind: str) -> Path:
    """Return the directory of the checkpoint that the engine is made for."""
    return directory / kind / "model"


def store_directory(directory: Path, kind: str) -> Path:
    """Return the directory of the store that the versions were published into."""
    return directory / kind / "store"


def version_tensors(directory: Path, kind: str, number: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a version as they were before they were published."""
    return load_file(_version_file(directory, kind, number))


def make(directory: Path, kind: str) -> None:
    """Write a checkpoint, publish ``N_VERSIONS`` versions of it, and keep a plain file of each beside the store."""
    shape = SHAPES[kind]
    config = getattr(transformers, shape.config)(**shape.options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in shape.in_fp32:
            parameter.data = parameter.data.float()
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(model_directory(directory, kind))
    loaded = load_file(model_directory(directory, kind) / "model.safetensors")
    found = {name: as_bits(name, tensor) for name, tensor in loaded.items()}
    shapes = {name: (bits.dtype, bits.shape) for name, bits in found.items()}
    bits = {name: tensor.bits.copy() for name, tensor in found.items()}
    rng = np.random.default_rng(0)
    with dcr_store.create(store_directory(directory, kind), chunk_elements=4096) as store:
        for number in range(N_VERSIONS):
            publish(store, shapes, bits)
            save_file(tensors(shapes, bits), _version_file(directory, kind, number))
            bits = step(bits, rng)


def _version_file(directory: Path, kind: str, number: int) -> Path:
    return directory / kind / f"{number}.safetensors"
