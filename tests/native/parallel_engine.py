"""A tensor-parallel engine whose layers load themselves the way vLLM's do; one object is one rank.

Column-parallel layers narrow rows, row-parallel layers columns; q, k and v, and gate and up, are fused; the vocabulary
is padded and its padding filled with zeros; experts are stacked, transposed or not; the head may be tied. A checkpoint
has the names of Mixtral in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

Weights = Iterable[tuple[str, torch.Tensor]]
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Config:
    vocabulary: int = 99
    hidden: int = 32
    head: int = 4
    n_heads: int = 8
    n_kv_heads: int = 2
    intermediate: int = 24
    n_experts: int = 4
    n_layers: int = 2
    padding: int = 16
    tied: bool = True
    transposed: bool = False
    attention_bias: bool = True


@dataclass(frozen=True)
class Rank:
    index: int = 0
    n: int = 1


def parameter(*shape: int, loader: Callable[..., None], dtype: torch.dtype = BF16) -> nn.Parameter:
    made = nn.Parameter(torch.empty(*shape, dtype=dtype).fill_(float("nan")), requires_grad=False)
    made.weight_loader = loader  # type: ignore[attr-defined]
    return made


def default_loader(param: nn.Parameter, loaded: torch.Tensor) -> None:
    if param.numel() == 1 and loaded.numel() == 1:
        param.data.copy_(loaded.view(param.shape))
        return
    assert param.size() == loaded.size(), (param.size(), loaded.size())
    param.data.copy_(loaded)


class QKVParallelLinear(nn.Module):
    def __init__(self, config: Config, rank: Rank) -> None:
        super().__init__()
        self.rank, self.head = rank, config.head
        self.n_heads = config.n_heads // rank.n
        self.n_kv_heads = max(1, config.n_kv_heads // rank.n)
        self.n_replicas = max(1, rank.n // config.n_kv_heads)
        rows = (self.n_heads + 2 * self.n_kv_heads) * self.head
        self.weight = parameter(rows, config.hidden, loader=self.load)
        if config.attention_bias:
            self.bias = parameter(rows, loader=self.load)

    def load(self, param: nn.Parameter, loaded: torch.Tensor, shard: str) -> None:
        q, kv = self.n_heads * self.head, self.n_kv_heads * self.head
        offset, size = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[shard]
        index = self.rank.index if shard == "q" else self.rank.index // self.n_replicas
        data = param.data.narrow(0, offset, size)
        loaded = loaded.narrow(0, index * size, size)
        assert data.shape == loaded.shape
        data.copy_(loaded)


class MergedColumnParallelLinear(nn.Module):
    def __init__(self, config: Config, rank: Rank) -> None:
        super().__init__()
        self.rank, self.size = rank, config.intermediate // rank.n
        self.weight = parameter(2 * self.size, config.hidden, loader=self.load)

    def load(self, param: nn.Parameter, loaded: torch.Tensor, shard: int) -> None:
        part = loaded.chunk(self.rank.n, dim=0)[self.rank.index]
        param.data[shard * self.size : (shard + 1) * self.size].copy_(part)


class RowParallelLinear(nn.Module):
    def __init__(self, n_in: int, n_out: int, rank: Rank) -> None:
        super().__init__()
        self.rank = rank
        self.weight = parameter(n_out, n_in // rank.n, loader=self.load)

    def load(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        size = param.shape[1]
        param.data.copy_(loaded.narrow(1, self.rank.index * size, size))


class VocabParallelEmbedding(nn.Module):
    def __init__(self, config: Config, rank: Rank) -> None:
        super().__init__()
        padded = -(-config.vocabulary // config.padding) * config.padding
        self.size = padded // rank.n
        self.start = min(rank.index * self.size, config.vocabulary)
        self.stop = min(self.start + self.size, config.vocabulary)
        self.weight = parameter(self.size, config.hidden, loader=self.load)

    def load(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        loaded = loaded.narrow(0, self.start, self.stop - self.start)
        param[: loaded.shape[0]].data.copy_(loaded)
        param[loaded.shape[0] :].data.fill_(0)


class FusedMoE(nn.Module):
    def __init__(self, config: Config, rank: Rank) -> None:
        super().__init__()
        self.rank, self.transposed, self.size = rank, config.transposed, config.intermediate // rank.n
        n, hidden = config.n_experts, config.hidden
        w13, w2 = (n, 2 * self.size, hidden), (n, hidden, self.size)
        if self.transposed:
            w13, w2 = (n, hidden, 2 * self.size), (n, self.size, hidden)
        self.w13_weight = parameter(*w13, loader=self.load)
        self.w2_weight = parameter(*w2, loader=self.load)
        self.register_buffer("expert_load", torch.zeros(n, dtype=torch.int64), persistent=False)

    def load(self, param: nn.Parameter, loaded: torch.Tensor, shard: str, expert: int) -> None:
        data = param.data[expert]
        dim = 1 if shard == "w2" else 0
        loaded = loaded.narrow(dim, self.rank.index * self.size, self.size)
        if self.transposed:
            loaded, dim = loaded.t().contiguous() if shard == "w3" else loaded.transpose(0, 1), 1 - dim
        if shard != "w2":
            data = data.narrow(dim, 0 if shard == "w1" else self.size, self.size)
        data.copy_(loaded)


class DenseMLP(nn.Module):
    def __init__(self, config: Config, rank: Rank) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(config, rank)
        self.down_proj = RowParallelLinear(config.intermediate, config.hidden, rank)


class Attention(nn.Module):
    def __init__(self, config: Config, rank: Rank) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(config, rank)
        self.o_proj = RowParallelLinear(config.n_heads * config.head, config.hidden, rank)
        self.register_buffer("inv_freq", torch.rand(config.head), persistent=False)


class SparseMLP(nn.Module):
    def __init__(self, config: Config, rank: Rank) -> None:
        super().__init__()
        self.gate = nn.Module()
        self.gate.weight = parameter(config.n_experts, config.hidden, loader=default_loader)
        self.gate.bias = parameter(config.n_experts, loader=default_loader, dtype=torch.float32)
        self.experts = FusedMoE(config, rank)


class Layer(nn.Module):
    def __init__(self, config: Config, rank: Rank, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, rank)
        self.mlp = SparseMLP(config, rank) if index % 2 else DenseMLP(config, rank)
        self.input_layernorm = nn.Module()
        self.input_layernorm.weight = parameter(config.hidden, loader=default_loader)


class Engine(nn.Module):
    """One rank. ``load_weights`` is what an engine calls with the tensors of a checkpoint."""

    STACKED = (("qkv_proj", "q_proj", "q"), ("qkv_proj", "k_proj", "k"), ("qkv_proj", "v_proj", "v"),
               ("gate_up_proj", "gate_proj", 0), ("gate_up_proj", "up_proj", 1))  # fmt: skip

    def __init__(self, config: Config, rank: Rank, *, n_threads: int = 0) -> None:
        super().__init__()
        self.config, self.n_threads = config, n_threads
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(config, rank)
        self.model.layers = nn.ModuleList([Layer(config, rank, i) for i in range(config.n_layers)])
        self.model.norm = nn.Module()
        self.model.norm.weight = parameter(config.hidden, loader=default_loader)
        self.lm_head = nn.Module()
        self.lm_head.weight = (
            self.model.embed_tokens.weight if config.tied else VocabParallelEmbedding(config, rank).weight
        )

    def load_weights(self, weights: Weights) -> set[str]:
        params = dict(self.named_parameters(remove_duplicate=False))
        loaded: set[str] = set()
        with ThreadPoolExecutor(max(1, self.n_threads)) as threads:
            tasks = []
            for name, tensor in weights:
                for call, target in self._calls(name, tensor, params):
                    loaded.add(target)
                    if self.n_threads:
                        tasks.append(threads.submit(call))
                    else:
                        call()
            for task in tasks:
                task.result()
        return loaded

    def _calls(
        self, name: str, tensor: torch.Tensor, params: dict[str, nn.Parameter]
    ) -> Iterator[tuple[Callable[[], None], str]]:
        if "rotary_emb.inv_freq" in name:
            return
        if ".experts." in name:
            for expert in range(self.config.n_experts):
                for shard, fused in (("w1", "w13_weight"), ("w3", "w13_weight"), ("w2", "w2_weight")):
                    if f".experts.{expert}.{shard}.weight" in name:
                        target = name.replace(f"{expert}.{shard}.weight", fused)
                        param: Any = params[target]
                        yield partial(param.weight_loader, param, tensor, shard, expert), target
            return
        for fused, part, shard in self.STACKED:
            if f".{part}." in name:
                target = name.replace(part, fused)
                param = params[target]
                yield partial(param.weight_loader, param, tensor, shard), target
                return
        param = params[name]
        yield partial(getattr(param, "weight_loader", default_loader), param, tensor), name


def checkpoint_shapes(config: Config) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the checkpoint's tensors: dtype and shape by name."""
    c = config
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {"model.embed_tokens.weight": ("BF16", (c.vocabulary, c.hidden))}
    for i in range(c.n_layers):
        at = f"model.layers.{i}."
        for part, n in (("q", c.n_heads), ("k", c.n_kv_heads), ("v", c.n_kv_heads)):
            shapes[f"{at}self_attn.{part}_proj.weight"] = ("BF16", (n * c.head, c.hidden))
            if c.attention_bias:
                shapes[f"{at}self_attn.{part}_proj.bias"] = ("BF16", (n * c.head,))
        shapes[f"{at}self_attn.o_proj.weight"] = ("BF16", (c.hidden, c.n_heads * c.head))
        shapes[f"{at}self_attn.rotary_emb.inv_freq"] = ("F32", (c.head,))
        if i % 2:
            shapes[f"{at}mlp.gate.weight"] = ("BF16", (c.n_experts, c.hidden))
            shapes[f"{at}mlp.gate.bias"] = ("F32", (c.n_experts,))
            for e in range(c.n_experts):
                shapes[f"{at}mlp.experts.{e}.w1.weight"] = ("BF16", (c.intermediate, c.hidden))
                shapes[f"{at}mlp.experts.{e}.w2.weight"] = ("BF16", (c.hidden, c.intermediate))
                shapes[f"{at}mlp.experts.{e}.w3.weight"] = ("BF16", (c.intermediate, c.hidden))
        else:
            shapes[f"{at}mlp.gate_proj.weight"] = ("BF16", (c.intermediate, c.hidden))
            shapes[f"{at}mlp.up_proj.weight"] = ("BF16", (c.intermediate, c.hidden))
            shapes[f"{at}mlp.down_proj.weight"] = ("BF16", (c.hidden, c.intermediate))
        shapes[f"{at}input_layernorm.weight"] = ("BF16", (c.hidden,))
    shapes["model.norm.weight"] = ("BF16", (c.hidden,))
    if not c.tied:
        shapes["lm_head.weight"] = ("BF16", (c.vocabulary, c.hidden))
    return shapes
