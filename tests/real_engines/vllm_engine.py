"""vLLM's own models and their ``load_weights``, on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}  # before it is imported

import torch
from torch import nn
from vllm.config import (
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader.utils import initialize_model


class Engine:
    """One rank of it."""

    def __init__(self, rank: int, tp: int, rendezvous: str) -> None:
        self._rank, self._tp, self._rendezvous = rank, tp, rendezvous
        self._directory: Path | None = None

    def build(self, directory: Path) -> tuple[nn.Module, Callable[[Any], object]]:
        """Return a model without weights and the function that loads them into it."""
        config = VllmConfig(
            model_config=ModelConfig(str(directory), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True),
            parallel_config=ParallelConfig(
                tensor_parallel_size=self._tp, distributed_executor_backend="mp" if self._tp > 1 else None
            ),
            device_config=DeviceConfig("cpu"),
            load_config=LoadConfig(),
        )
        with _as_engine(config):
            if self._directory is None:
                init_distributed_environment(self._tp, self._rank, self._rendezvous, self._rank, backend="gloo")
            if self._directory != directory:
                destroy_model_parallel()  # there are groups for experts only if the model has some
                initialize_model_parallel(self._tp)
                self._directory = directory
            model = initialize_model(vllm_config=config)

        def load_weights(weights: Any) -> object:
            with _as_engine(config):
                return model.load_weights(weights)

        return model, load_weights


@contextmanager
def _as_engine(config: VllmConfig) -> Iterator[None]:
    """Be as vLLM is while it makes and loads a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config):
            yield
    finally:
        torch.set_default_dtype(before)
