"""Publish a torch module from all ranks of its trainer: plain, FSDP2, HSDP, tensor-parallel, or both.

Each rank writes what it owns of ``module.state_dict()``, straight from its own shards: nothing is gathered, and no
collective is called. What several ranks hold alike is written by one of them, which all choose alike. Refuses entries
that are no tensors, modules of FSDP1 (whose ``state_dict`` gathers), and ranks that do not agree about the tensors.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from dcr_store.errors import DcrError, FencedError, InvalidInputError, LagError
from dcr_store.layout.placements import Maker
from dcr_store.publish.joint import SliceTransaction
from dcr_store.publish.torch_plan import Plan, held_of, item_of
from dcr_store.publish.torch_ranks import place_of, ranks_of
from dcr_store.versions.info import VersionInfo

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT_S: Final = 1800.0
_GRACE_S: Final = 5.0
_LEAVING_S: Final = 30.0  # for which a rank that is refused waits for the transaction, to end it for the others
_AGAIN: Final = "publish again on all ranks, with a longer timeout_s if one is only slow"


class Publisher(Protocol):
    """What is needed of a ``Store``."""

    @property
    def begin(self) -> Callable[..., Any]:
        """Begin a transaction."""

    @property
    def join(self) -> Callable[..., Any]:
        """Join one."""


def publish_module(
    store: Publisher,
    module: torch.nn.Module,
    *,
    line: str = "main",
    mesh: DeviceMesh | None = None,
    writers: Sequence[str] | None = None,
    rank: int | None = None,
    txid: str | None = None,
    rename: Callable[[str], str | None] | None = None,
    dtype: torch.dtype | None = None,
    made_by: Maker | None = None,
    message: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    owner: str | None = None,
    takeover: bool = False,
    baseline: str | os.PathLike[str] | None = None,
    timeout_s: float | None = TIMEOUT_S,
) -> VersionInfo:
    """Publish a module's parameters and buffers as the next version of a line. Every rank calls it.

    The state root is that of one process which publishes the full ``state_dict()``. The first rank begins the
    transaction and commits it; the others find it in the store.

    Parameters
    ----------
    store : Store
        Each rank opens its own, and keeps it from version to version: it has the baseline of what the rank owns, which
        it reads from the store otherwise, or proves if it is in files.
    module : torch.nn.Module
        Plain (then all ranks hold the same), or with DTensors as ``fully_shard`` and ``parallelize_module`` leave them.
        Of a wrapper, such as DDP's, give what it wraps. Each tensor is copied once while it is read, chunk by chunk:
        weights that an optimizer changes meanwhile are published as they were copied, part old and part new, so let
        it wait until this returns.
    mesh : DeviceMesh, optional
        Of all ranks that publish; by default the one that the module's DTensors were sliced from, without DTensors
        the ranks of the process group, or those that torchrun's environment tells of, or this process alone.
    writers : sequence of str, optional
        A name for each rank, in the order of the mesh; by default ``rank0``, ``rank1``, …
    rank : int, optional
        The place of this process in `writers`; by default that of its rank in the mesh.
    txid : str, optional
        Of a transaction that was begun already, by whoever is to commit it, where the launcher hands it over: then this
        rank joins it.
    rename : function, optional
        From names of ``state_dict()`` to those of the version; None leaves an entry out.
    dtype : torch.dtype, optional
        Floating-point tensors are converted to it as they are written, one at a time.
    made_by : {"fully_shard", "distribute_tensor"}, optional
        As of ``map_of_dtensor``; by default ``fully_shard`` for the parameters of FSDP2 modules.
    message, metadata, owner, takeover
        As of ``Store.begin``; those of the first rank count.
    baseline : path, optional
        As of ``Store.begin`` with writers: a directory, the same for all ranks, in which each keeps what it owns for
        its next run; "pinned"; by default memory.
    timeout_s : float, optional
        How long to wait for the other ranks, each time.

    Returns
    -------
    VersionInfo
        The committed version, on each rank.

    Raises
    ------
    InvalidInputError
        If an entry cannot be published, or the ranks do not agree about the tensors; names it.
    LagError
        If another rank did not come, or did not finish, in time; the transaction is aborted.
    FencedError
        If another rank failed and aborted it.
    """
    require_store(store)
    held = held_of(module, rename, dtype, made_by)
    ranks, mesh = ranks_of(held, mesh, 1 if writers is None else len(writers))
    names = tuple(writers) if writers is not None else tuple(f"rank{number}" for number in ranks)
    place = place_of(rank, ranks, names)
    plan = Plan(tuple(item_of(name, tensor, made, mesh, ranks, dtype) for name, (tensor, made) in held.items()), ranks)
    common = {
        "line": line,
        "writer": names[place],
        "slices": lambda layout: plan.maps(layout, ranks[place]),
        "baseline": baseline,
    }
    known = _known.setdefault(store, set())
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    if place == 0 and txid is None:
        transaction = store.begin(
            **common,
            writers=names,
            tensors=plan.tensors,
            aliases=plan.aliases,
            message=message,
            metadata=metadata,
            owner=owner,
            takeover=takeover,
        )
        found = _write(transaction, plan, ranks[place], timeout_s)
    else:
        transaction = _joined(store, txid, common, names, timeout_s)
        try:
            found = _write(transaction, plan, ranks[place], timeout_s)
        except FencedError as error:
            if txid is not None or (line, names[place]) in known:
                raise
            # It was one that an earlier run had left open, and the first rank has just begun another one.
            left_s = _GRACE_S if deadline is None else min(_GRACE_S, max(deadline - time.monotonic(), 0))
            try:
                transaction = _joined(store, None, common, names, left_s)
            except LagError:
                raise error from None
            found = _write(transaction, plan, ranks[place], timeout_s)
    known.add((line, names[place]))
    return found


def require_store(store: object) -> None:
    """Raise ``InvalidInputError`` for what is no store, such as its place."""
    if not (hasattr(store, "begin") and hasattr(store, "join")):
        raise InvalidInputError(
            "is no store; open it first, with dcr_store.open",
            key="store",
            expected="a Store",
            found=repr(store)[:120] if isinstance(store, str) else type(store).__name__,
        )


_known: Final[weakref.WeakKeyDictionary[Publisher, set[tuple[str, str]]]] = weakref.WeakKeyDictionary()
"""The lines and names under which a store has published here: from then on, no run before this one can be met."""


def _joined(
    store: Publisher, txid: str | None, common: Mapping[str, Any], names: Sequence[str], timeout_s: float | None
) -> SliceTransaction:
    """Join; where that fails although the transaction is there, end it for all ranks, as an error later would."""
    try:
        found: SliceTransaction = store.join(txid, **common, writers=names, timeout_s=timeout_s)
    except FencedError:  # there is none
        raise
    except LagError as error:
        error.advice = _AGAIN
        raise
    except BaseException as error:
        try:
            # Without slices and baseline, with which it has failed. One that is not begun yet will wait for this rank.
            left_s = _LEAVING_S if timeout_s is None else min(_LEAVING_S, timeout_s)
            left = store.join(txid, line=common["line"], writer=common["writer"], writers=names, timeout_s=left_s)
            left.abort(f"writer {common['writer']} could not join: {type(error).__name__}: {error}"[:500])
        except (LagError, FencedError):
            pass
        except DcrError as second:
            error.add_note(f"the transaction could not be aborted either: {second}")
        raise
    return found


def _write(transaction: SliceTransaction, plan: Plan, rank: int, timeout_s: float | None) -> VersionInfo:
    try:
        with transaction:  # an error ends it for all ranks
            plan.require(transaction.layout, transaction.version)
            for item in plan.owned(transaction.layout, rank):
                transaction.write_slice(item.local(), item.mapped)
            return transaction.commit(timeout_s=timeout_s)
    except LagError as error:
        error.advice = _AGAIN  # not what a transaction's caller could do: it has ended
        raise
