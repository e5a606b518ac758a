"""Sees the writes into a module's memory that no followed tensor takes part in: fills, and computations in place.

A dispatch mode belongs to one thread. A load enters it in the thread that calls the loader, and in every other thread
in which a mask or a followed value is touched. There it stays, and passes everything on once the load is over.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

from dcr_store.targets.native.moves import written
from dcr_store.targets.native.tensors import MaskTensor, ValueTensor

if TYPE_CHECKING:
    from dcr_store.targets.native.load import Load


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode of one target; ``load`` is the load in progress, if any."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.load: Load | None = None
        self._of_thread = threading.local()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch need not import its compiler for this mode, nor ask it at each operator."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let the load judge what writes; run the rest."""
        kwargs = kwargs or {}
        load = self.load
        if load is None or self.is_ours or any(issubclass(kind, MaskTensor | ValueTensor) for kind in types):
            return func(*args, **kwargs)
        targets = written(func, args, kwargs)
        if not targets:
            return func(*args, **kwargs)
        return load.plain_write(func, args, kwargs, targets)

    @property
    def is_ours(self) -> bool:
        """Whether this thread is inside of our own work, which is nobody's write."""
        return bool(getattr(self._of_thread, "depth", 0))

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Say that what follows in this thread is our own work."""
        self._of_thread.depth = getattr(self._of_thread, "depth", 0) + 1
        try:
            yield
        finally:
            self._of_thread.depth -= 1

    def enter_thread(self) -> None:
        """Watch this thread from now on, if it is not watched."""
        if not getattr(self._of_thread, "watched", False):
            self._of_thread.watched = True
            self.__enter__()  # type: ignore[no-untyped-call]

    @contextmanager
    def watching(self, load: Load) -> Iterator[None]:
        """Watch this thread while `load` runs."""
        was_watched = getattr(self._of_thread, "watched", False)
        self.load = load
        self._of_thread.watched = True
        try:
            if was_watched:
                yield
            else:
                with self:
                    yield
        finally:
            self._of_thread.watched = was_watched
            self.load = None
