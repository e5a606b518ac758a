"""The callback publishes from loops like that of transformers' Trainer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dcr_store
from dcr_store.errors import InvalidInputError

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    with dcr_store.create(tmp_path / "s", chunk_elements=64) as made:
        yield made


def trained(callback: Any, n_steps: int, *, save_every: int = 0, wrapped: Any = lambda module: module) -> Any:
    """A loop in the order of Trainer's: the loss of a step is logged after the step's end."""
    import torch
    from torch import nn

    module = nn.Linear(4, 3)
    state = SimpleNamespace(global_step=0, epoch=0.0, log_history=[])
    for step in range(1, n_steps + 1):
        with torch.no_grad():
            module.weight += 1
        state.global_step, state.epoch = step, step / 8
        callback.on_step_end(None, state, None, model=wrapped(module), optimizer=None)
        state.log_history.append({"loss": 1 / step if step < 4 else float("nan"), "step": step})
        if save_every and step % save_every == 0:
            callback.on_save(None, state, None, model=wrapped(module))
    callback.on_train_end(None, state, None, model=wrapped(module))
    return module


def test_every_so_many_steps_and_at_the_end(store: Any) -> None:
    from dcr_store.publish.callback import PublishCallback

    callback = PublishCallback(store, 2, metadata={"run": "a"}, line="policy", message="step")
    module = trained(callback, 5, save_every=1)
    assert [info.metadata for info in store.log("policy")] == [
        {"run": "a", "step": 2, "epoch": 0.25, "loss": 1.0, "loss_step": 1},
        {"run": "a", "step": 4, "epoch": 0.5, "loss": 1 / 3, "loss_step": 3},
        {"run": "a", "step": 5, "epoch": 0.625, "loss": "nan", "loss_step": 5},
    ]
    assert callback.published == store.log("policy")[-1]
    assert store.read("policy")["weight"].tobytes() == module.weight.detach().numpy().tobytes()


def test_whenever_the_loop_saves(store: Any) -> None:
    from dcr_store.publish.callback import PublishCallback

    trained(PublishCallback(store), 6, save_every=3)
    assert [info.metadata["step"] for info in store.log()] == [3, 6]


@pytest.mark.parametrize("every", [0, -1, True, 2.0])
def test_steps_are_counted_in_whole_numbers(store: Any, every: Any) -> None:
    from dcr_store.publish.callback import PublishCallback

    with pytest.raises(InvalidInputError, match="every: is no number of steps"):
        PublishCallback(store, every)


def test_what_cannot_publish_is_refused_at_once(store: Any) -> None:
    from torch import nn

    from dcr_store.publish.callback import PublishCallback

    with pytest.raises(InvalidInputError, match=r"bogus: is no option of publish_module .expected baseline, dtype"):
        PublishCallback(store, bogus=2)
    with pytest.raises(InvalidInputError, match=r"store: is no store; open it first.*found '/store'"):
        PublishCallback("/store")  # type: ignore[arg-type]
    for call in ("on_step_end", "on_save", "on_train_end"):
        callback = PublishCallback(store, None if call == "on_save" else 1)
        with pytest.raises(InvalidInputError, match=r"state: the loop's state .*global_step, found NoneType"):
            getattr(callback, call)(None, None, None, model=nn.Linear(2, 2))


def test_wrappers_are_taken_off(store: Any) -> None:
    from torch import nn

    from dcr_store.publish.callback import PublishCallback

    def wrapped(module: Any) -> Any:
        outer = type("DistributedDataParallel", (nn.Module,), {})()
        outer.module = type("OptimizedModule", (nn.Module,), {})()
        outer.module._orig_mod = module
        return outer

    trained(PublishCallback(store), 1, wrapped=wrapped)
    assert set(store.read()) == {"weight", "bias"}


SCRIPT = """
import sys
import torch
import dcr_store
from dcr_store.publish.callback import PublishCallback

with dcr_store.create(sys.argv[1]) as store:
    early = PublishCallback(store, 1)
    assert type(early) is PublishCallback
    assert "transformers" not in sys.modules
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler

    callback = PublishCallback(store, 2)
    assert isinstance(callback, TrainerCallback) and isinstance(callback, PublishCallback)
    assert type(PublishCallback(store)) is type(callback)
    module = torch.nn.Linear(2, 2)
    handler = CallbackHandler([callback], module, None, None, None)
    state, control = TrainerState(), TrainerControl()
    for state.global_step in range(1, 6):
        handler.on_step_begin(None, state, control)
        handler.on_step_end(None, state, control)
        handler.on_log(None, state, control, {"loss": 0.5})
    handler.on_train_end(None, state, control)
    assert [info.metadata["step"] for info in store.log()] == [2, 4, 5]
"""


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_it_is_one_of_transformers_where_that_is_imported(tmp_path: Path) -> None:
    script = [sys.executable, "-c", SCRIPT, str(tmp_path / "s")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
