"""Write a folder that torch.distributed.checkpoint loads: tensor by tensor, whole or not at all.

Refuses a place where something is, unless that is a distributed checkpoint and may be replaced; dtypes that torch does
not have; calls without torch.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dcr_store.errors import DcrError, InvalidInputError, StorageError
from dcr_store.layout.dtypes import DTYPES
from dcr_store.layout.tensors import torch_dtypes
from dcr_store.targets.dcp import is_dcp
from dcr_store.targets.new_directory import in_place_of


def write_dcp(
    directory: Path,
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    read: Callable[[str], Any],
    *,
    force: bool = False,
) -> int:
    """Write a distributed checkpoint; return the bytes of its files.

    Parameters
    ----------
    directory : Path
        A new or empty one; with `force` also a distributed checkpoint, which is replaced.
    tensors : mapping of str to (str, sequence of int)
        Dtype and shape by name.
    read : function
        Returns a tensor by name, as torch's; called once for each, in order, and kept no longer than it is written.

    Raises
    ------
    InvalidInputError
        If torch is missing, or has no such dtype.
    ConflictError
        If something else is there.
    StorageError
        If it cannot be written.

    What `read` raises of ``DcrError``, and what is no ``Exception``, comes as it is.
    """
    try:
        import torch
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save
    except ImportError as error:
        raise InvalidInputError(
            "distributed checkpoints need torch; pip install dcr-store[torch]", key=str(directory)
        ) from error
    dtypes = {name: text.removeprefix("torch.") for text, name in torch_dtypes().items()}
    blank: dict[str, Any] = {}
    for name, (dtype, shape) in tensors.items():
        found = None if DTYPES[dtype].packed else getattr(torch, dtypes.get(dtype, ""), None)
        if found is None:
            raise InvalidInputError(
                "has a dtype that a distributed checkpoint cannot hold; check the version out as safetensors",
                key=name,
                expected="values of whole bytes that torch has",
                found=dtype,
            )
        blank[name] = torch.empty(tuple(shape), dtype=found, device="meta")
    errors: list[BaseException] = []
    planner = _planner(DefaultSavePlanner, read, errors)
    options = {"no_dist": True} if "no_dist" in inspect.signature(save).parameters else {}
    with in_place_of(directory, "a distributed checkpoint", is_dcp, force=force) as place:
        # Nothing is copied ahead: with CUDA, that would take the tensors in the order of their sizes.
        writer = FileSystemWriter(str(place), thread_count=1, per_thread_copy_ahead=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing is distributed is meant
            try:
                save(blank, storage_writer=writer, planner=planner, **options)
            except CheckpointException as error:  # a BaseException: let none of it out
                cause = _cause(error, errors)
                if cause is not None:
                    raise cause from cause.__cause__
                told = str(errors[0]) if errors else str(error).strip().splitlines()[-1]
                raise StorageError(f"cannot be written: {told}", key=str(directory)) from error
        return sum(path.stat().st_size for path in place.iterdir())


def _cause(error: Any, errors: Sequence[BaseException]) -> BaseException | None:
    """Return what was raised before torch's error, if it is to come out as it is."""
    for cause in (*errors, *(cause for cause, _ in error.failures.values())):
        if isinstance(cause, DcrError) or not isinstance(cause, Exception):  # such as KeyboardInterrupt
            return cause
    return None


def _planner(base: Any, read: Callable[[str], Any], errors: list[BaseException]) -> Any:
    class Planner(base):  # type: ignore[misc]
        """Takes each tensor when it is written."""

        def resolve_data(self, write_item: Any) -> Any:
            try:
                return read(write_item.index.fqn)
            except BaseException as error:
                errors.append(error)
                raise

    return Planner()
