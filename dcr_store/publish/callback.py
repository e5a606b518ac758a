"""A callback that publishes from a training loop like that of transformers' ``Trainer``, on every rank.

It is a ``transformers.TrainerCallback`` where transformers has been imported, and else has its hooks: they take
``(args, state, control, model=…)``, and of the state ``global_step``, and ``epoch`` and ``log_history`` if there are.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping
from typing import Any, Final, Self

from dcr_store.errors import InvalidInputError
from dcr_store.publish.torch import Publisher, publish_module, require_store
from dcr_store.versions.info import VersionInfo

_WRAPPERS: Final = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}


class PublishCallback:
    """Publishes the model every so many steps, or whenever the loop saves; and at the end, if its last step was not.

    Parameters
    ----------
    store : Store
        Opened by each rank, and left open.
    every : int, optional
        Publish after each so many steps; without it, when the loop saves a checkpoint.
    metadata : mapping, optional
        For each version, besides ``step``, ``epoch``, and ``loss`` with ``loss_step``, the step at which it was logged
        last.
    **options
        For ``publish_module``: line, mesh, rename, dtype, owner, baseline, timeout_s, …

    Attributes
    ----------
    published : VersionInfo or None
        The last version.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make it a subclass of ``TrainerCallback`` if there is one."""
        found: Self = object.__new__(_with_base(cls))
        return found

    def __init__(
        self,
        store: Publisher,
        every: int | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise InvalidInputError("is no number of steps", key="every", expected="1 or more", found=repr(every))
        require_store(store)
        known = set(inspect.signature(publish_module).parameters) - {"store", "module", "metadata"}
        if unknown := sorted(set(options).difference(known)):
            raise InvalidInputError("is no option of publish_module", key=unknown[0], expected=", ".join(sorted(known)))
        self.published: VersionInfo | None = None
        self._store, self._every, self._options = store, every, options
        self._metadata = dict(metadata or {})
        self._step: int | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Publish, if it is time to."""
        if self._every is not None and _step(state) % self._every == 0:
            self._publish(state, model)

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Publish, if no number of steps says when."""
        if self._every is None:
            self._publish(state, model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Publish the last step."""
        if _step(state):
            self._publish(state, model)

    def _publish(self, state: Any, model: Any) -> None:
        step = _step(state)
        if step == self._step:
            return
        while type(model).__name__ in _WRAPPERS:
            model = getattr(model, _WRAPPERS[type(model).__name__])
        metadata = {**self._metadata, "step": step, **_told(state)}
        self.published = publish_module(self._store, model, metadata=metadata, **self._options)
        self._step = step


def _step(state: Any) -> int:
    """Return the step that a loop's state is at."""
    step = getattr(state, "global_step", None)
    if step is None:
        raise InvalidInputError(
            "the loop's state does not say at which step it is",
            key="state",
            expected="an object with global_step",
            found=type(state).__name__,
        )
    return int(step)


def _told(state: Any) -> dict[str, Any]:
    """Return what the loop's state says of the step."""
    found: dict[str, Any] = {}
    epoch = getattr(state, "epoch", None)
    if epoch is not None:
        found["epoch"] = _number(epoch)
    for row in reversed(getattr(state, "log_history", None) or ()):
        if "loss" in row:
            found |= {"loss": _number(row["loss"]), "loss_step": row.get("step")}
            break
    return found


def _number(value: Any) -> float | str:
    """Return a number as JSON has it: those that are none as text."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _with_base(cls: type[Any]) -> type[Any]:
    """Return the class with transformers' base, if that has been imported: its loop asks for hooks of all kinds."""
    transformers = sys.modules.get("transformers")
    base = None if transformers is None else getattr(transformers, "TrainerCallback", None)
    return cls if base is None or issubclass(cls, base) else _derived(cls, base)


_classes: Final[dict[tuple[type[Any], type[Any]], type[Any]]] = {}


def _derived(cls: type[Any], base: type[Any]) -> type[Any]:
    """Return a class of both, always the same one."""
    if (cls, base) not in _classes:
        _classes[cls, base] = type(cls.__name__, (cls, base), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    return _classes[cls, base]
