"""SGLang's own models and their ``load_weights``, on a CPU, as they are for a GPU.

(For a CPU, SGLang would pad and repack for its own kernels, which there are not in a package.)
"""

# What SGLang imports from has to stand in before it is imported.
# ruff: noqa: E402

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers.utils import is_torchvision_available

is_torchvision_available()  # transformers remembers that there is none: it would ask the stand-in for its version


class _StandIn(ModuleType):
    """A module that SGLang imports from and, loading text models' weights, does not use."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for _name in (
    "torchvision", "torchvision.transforms", "torchvision.transforms.functional", "vllm", "vllm._custom_ops"
):  # fmt: skip
    sys.modules[_name] = _StandIn(_name)

from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers.attention.mamba import mamba
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.model_loader.loader import get_model_loader
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

# Kernels that Mamba-1's module wants to have, and that there are for GPUs alone.
for _name in ("causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_fn_triton", "causal_conv1d_update_triton"):
    if not hasattr(mamba, _name):
        setattr(mamba, _name, None)


class Engine:
    """One rank of it."""

    def __init__(self, rank: int, tp: int, rendezvous: str) -> None:
        self._rank, self._tp, self._rendezvous = rank, tp, rendezvous
        self._directory: Path | None = None
        self._n_starts = 0
        logging.disable(logging.WARNING)

    def build(self, directory: Path) -> tuple[nn.Module, Callable[[Any], object]]:
        """Return a model without weights and the function that loads them into it."""
        if self._directory != directory:
            self._start(directory)
        config = ModelConfig(str(directory), dtype="bfloat16")
        loader: Any = get_model_loader(load_config=LoadConfig(), model_config=config)
        model = loader.initialize_model_for_startup(model_config=config, device_config=DeviceConfig("cpu", 0))

        def load_weights(weights: Any) -> object:
            with _as_engine():
                return model.load_weights(weights)

        return model, load_weights

    def _start(self, directory: Path) -> None:
        """Be a rank of an engine that is started for a model."""
        arguments = ServerArgs(
            model_path=str(directory), skip_tokenizer_init=True, dtype="bfloat16", device="cpu", tp_size=self._tp
        )
        if self._directory is not None:
            destroy_model_parallel()
            destroy_distributed_environment()
        publish(arguments, role="weight_cache_daemon", ranks=SpawnRanks(world_rank=self._rank))
        initialize_moe_config()
        self._n_starts += 1
        init_distributed_environment(
            world_size=self._tp,
            rank=self._rank,
            distributed_init_method=f"{self._rendezvous}-{self._n_starts}",
            local_rank=self._rank,
            backend="gloo",
        )
        initialize_model_parallel()
        initialize_dp_attention(arguments)
        self._directory = directory


@contextmanager
def _as_engine() -> Iterator[None]:
    """Be as SGLang is while it loads a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
