"""Publish a torch module from all ranks of its trainer: plain, FSDP2, HSDP, tensor-parallel, or both.

Each rank writes what it owns of ``module.state_dict()``, straight from its own shards: nothing is gathered, and no
collective is called. What several ranks hold alike is written by one of them, which all choose alike. Refuses entries
that are no tensors, modules of FSDP1 (whose ``state_dict`` gathers), and ranks that do not agree about the tensors.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from dcr_store.errors import DcrError, FencedError, InvalidInputError, LagError
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.dtypes import dtype as dtype_row
from dcr_store.layout.from_dtensor import is_dtensor, local_tensor, map_of_dtensor, replicas_of_dtensor
from dcr_store.layout.layout import Layout
from dcr_store.layout.placements import Maker
from dcr_store.layout.tensors import memory_key, name_of_torch_dtype
from dcr_store.publish.joint import SliceTransaction
from dcr_store.versions.info import VersionInfo

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT_S: Final = 1800.0
_GRACE_S: Final = 5.0
_MAX_TOLD: Final = 5
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
    held = _held(module, rename, dtype, made_by)
    ranks, mesh = _ranks(held, mesh, 1 if writers is None else len(writers))
    names = tuple(writers) if writers is not None else tuple(f"rank{number}" for number in ranks)
    place = _place(rank, ranks, names)
    plan = _Plan(tuple(_item(name, tensor, made, mesh, ranks, dtype) for name, (tensor, made) in held.items()), ranks)
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
            # Without slices and baseline, with which it has failed. For one not begun yet nobody waits for this rank.
            left = store.join(txid, line=common["line"], writer=common["writer"], writers=names, timeout_s=0)
            left.abort(f"writer {common['writer']} could not join: {type(error).__name__}: {error}"[:500])
        except (LagError, FencedError):
            pass
        except DcrError as second:
            error.add_note(f"the transaction could not be aborted either: {second}")
        raise
    return found


def _write(transaction: SliceTransaction, plan: _Plan, rank: int, timeout_s: float | None) -> VersionInfo:
    try:
        with transaction:  # an error ends it for all ranks
            plan.require(transaction.layout, transaction.version)
            for item in plan.owned(transaction.layout, rank):
                transaction.write_slice(item.local(), item.mapped)
            return transaction.commit(timeout_s=timeout_s)
    except LagError as error:
        error.advice = _AGAIN  # not what a transaction's caller could do: it has ended
        raise


# ---------------------------------------------------------------------- what this rank holds


@dataclass(frozen=True, slots=True)
class _Item:
    """What this rank holds of one name.

    Attributes
    ----------
    tensor : torch.Tensor
        Of the module; a DTensor, or plain.
    ranks : tuple of int
        Who holds the same.
    tie : hashable or None
        What tied names have in common; None if this rank holds no value of it.
    """

    name: str
    tensor: Any
    mapped: AffineMap
    ranks: tuple[int, ...]
    tie: Hashable | None
    dtype: torch.dtype | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.mapped.tensors[self.name]

    @property
    def nbytes(self) -> int:
        """Of what this rank holds."""
        row = dtype_row(self.mapped.dtype)
        return self.mapped.n_values * row.bits // 8

    def local(self) -> Any:
        """Return this rank's values."""
        local = local_tensor(self.tensor) if is_dtensor(self.tensor) else self.tensor.detach()
        return local if self.dtype is None else local.to(self.dtype)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is published, as one rank sees it: all names alike on all ranks, and its own part of each."""

    items: tuple[_Item, ...]
    ranks: tuple[int, ...]

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape by name, without aliases."""
        aliases = self.aliases
        return {item.name: (item.mapped.dtype, item.shape) for item in self.items if item.name not in aliases}

    @property
    def aliases(self) -> dict[str, str]:
        """Names of tensors that a name before them has too."""
        firsts: dict[Hashable, str] = {}
        found = {}
        for item in self.items:
            if item.tie is not None and firsts.setdefault(item.tie, item.name) != item.name:
                found[item.name] = firsts[item.tie]
        return found

    def require(self, layout: Layout, version: str) -> None:
        """Check that a layout is of these tensors."""
        there, here = set(layout.names()), {item.name for item in self.items}
        if there != here:
            raise InvalidInputError(
                f"the rank that began {version} has other tensors; give all ranks the same module and `rename`",
                key=min(there ^ here),
                expected=_told(there - here) + " too" if there - here else f"no {_told(here - there)}",
                found=f"{len(here)} names on this rank",
            )
        ties: dict[str, _Item] = {}
        for item in self.items:
            entry = layout.entry(item.name)
            if (entry.dtype, tuple(entry.shape)) != (item.mapped.dtype, item.shape):
                raise InvalidInputError(
                    f"the rank that began {version} has another tensor of this name; give all ranks the same module",
                    key=item.name,
                    expected=f"{entry.dtype} {list(entry.shape)}",
                    found=f"{item.mapped.dtype} {list(item.shape)}",
                )
            if item.tie is not None and ties.setdefault(entry.name, item).tie != item.tie:
                raise InvalidInputError(
                    f"is tied to {ties[entry.name].name} on the rank that began {version}; tie them on all ranks",
                    key=item.name,
                    expected="one tensor of two names",
                    found="two tensors on this rank",
                )

    def owned(self, layout: Layout, rank: int) -> Iterator[_Item]:
        """Yield what this rank writes: of what several hold, its share by bytes."""
        items: dict[str, _Item] = {}
        for item in self.items:
            entry = layout.find(item.name)
            if entry is not None:
                items.setdefault(entry.name, item)
        groups: dict[tuple[int, ...], list[_Item]] = {}
        for item in items.values():
            groups.setdefault(item.ranks, []).append(item)
        mine: set[str] = set()
        for ranks, group in groups.items():
            # All of them have the same group, since what they hold alike makes it; and so come to the same.
            loads = dict.fromkeys(ranks, 0)
            for item in sorted(group, key=lambda item: (-item.nbytes, item.name)):
                owner = min(ranks, key=lambda number: loads[number])
                loads[owner] += item.nbytes
                if owner == rank:
                    mine.add(item.name)
        yield from (item for item in items.values() if item.name in mine)

    def maps(self, layout: Layout, rank: int) -> list[AffineMap]:
        """Return the maps of what this rank writes, as far as the layout has it."""
        return [
            item.mapped
            for item in self.owned(layout, rank)
            if (entry := layout.entry(item.name)).dtype == item.mapped.dtype and tuple(entry.shape) == item.shape
        ]


def _told(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:_MAX_TOLD]) + (" and more" if len(found) > _MAX_TOLD else "")


def _held(
    module: torch.nn.Module, rename: Callable[[str], str | None] | None, dtype: Any, made_by: Maker | None
) -> dict[str, tuple[Any, Maker | None]]:
    """Return the module's tensors by name, and who sharded each."""
    try:
        import torch
    except ImportError as error:
        raise InvalidInputError("modules need torch; pip install dcr-store[torch]", key="module") from error
    if not isinstance(module, torch.nn.Module):
        raise InvalidInputError("is no module", key="module", expected="torch.nn.Module", found=type(module).__name__)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidInputError("is none to convert to", key="dtype", expected="a floating dtype", found=repr(dtype))
    kinds = {base.__name__ for part in module.modules() for base in type(part).__mro__}
    if "FullyShardedDataParallel" in kinds:
        raise InvalidInputError(
            "a module of FSDP1 gathers its tensors to give them; shard it with fully_shard (FSDP2)",
            key="module",
            expected="a plain module, or one with DTensors",
            found="FullyShardedDataParallel",
        )
    parameters = made_by or ("fully_shard" if "FSDPModule" in kinds else None)
    found: dict[str, tuple[Any, Maker | None]] = {}
    for key, tensor in module.state_dict(keep_vars=True).items():
        name = key if rename is None else rename(key)
        if name is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise InvalidInputError(
                "is no tensor; leave it out with a `rename` that returns None for it",
                key=key,
                expected="a tensor",
                found=type(tensor).__name__,
            )
        if "_orig_mod" in name.split("."):
            raise InvalidInputError(
                "is named by torch.compile's wrapper; give module._orig_mod, or names without it by `rename`",
                key=key,
                expected="a name without _orig_mod",
                found=name,
            )
        if name in found:
            raise InvalidInputError(
                "is the name of two entries; give each its own", key=name, expected="one", found=f"{key} too"
            )
        found[name] = tensor, parameters if isinstance(tensor, torch.nn.Parameter) else made_by
    if not found:
        raise InvalidInputError("the module has no tensors", key="module", expected="one at least", found="none")
    return found


def _item(
    name: str,
    tensor: Any,
    made_by: Maker | None,
    mesh: Any,
    ranks: tuple[int, ...],
    dtype: torch.dtype | None,
) -> _Item:
    mapped = map_of_dtensor(name, tensor, made_by)
    cast = dtype if dtype is not None and tensor.dtype.is_floating_point and tensor.dtype != dtype else None
    if cast is not None:
        mapped = replace(mapped, dtype=name_of_torch_dtype(name, cast))
    if not is_dtensor(tensor):
        return _Item(name, tensor, mapped, ranks, memory_key(tensor), cast)
    held = replicas_of_dtensor(name, tensor, None if mesh == tensor.device_mesh else mesh)
    memory = memory_key(local_tensor(tensor))
    tie = None if memory is None else (memory, tuple(tensor.shape), str(tensor.placements), id(tensor.device_mesh))
    return _Item(name, tensor, mapped, held.ranks, tie, cast)


# ---------------------------------------------------------------------- who publishes


def _ranks(held: Mapping[str, tuple[Any, Maker | None]], mesh: Any, n_writers: int) -> tuple[tuple[int, ...], Any]:
    """Return the ranks that publish, the first one first, and their mesh if there is one."""
    if mesh is None:
        mesh = _mesh_around(held)
    if mesh is not None:
        return tuple(int(rank) for rank in mesh.mesh.flatten().tolist()), mesh
    return tuple(range(_world(n_writers)[1])), None


def _mesh_around(held: Mapping[str, tuple[Any, Maker | None]]) -> Any:
    """Return the mesh that the tensors' meshes are parts of."""
    found: dict[str, Any] = {}
    for name, (tensor, _) in held.items():
        if is_dtensor(tensor):
            found.setdefault(name, _root_of(tensor.device_mesh))
    meshes: list[tuple[str, Any]] = []
    for name, root in found.items():
        if not any(root is other or root == other for _, other in meshes):
            meshes.append((name, root))
    if len(meshes) > 1:
        raise InvalidInputError(
            "the module's tensors were sliced from several meshes; give the one of all ranks (mesh=), and slice all"
            " from it",
            key=meshes[1][0],
            expected=f"{meshes[0][1]}, as of {meshes[0][0]}",
            found=str(meshes[1][1]),
        )
    return meshes[0][1] if meshes else None


def _root_of(mesh: Any) -> Any:
    """Return the mesh that a mesh was sliced from; torch has had several ways to ask."""
    from torch.distributed import device_mesh

    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    resources = getattr(device_mesh, "_mesh_resources", None)
    return mesh if resources is None else resources.get_root_mesh(mesh)


def _world(n_ranks: int = 1) -> tuple[int, int]:
    """Return rank and number of ranks: of the process group, or as torchrun says, or else the first of `n_ranks`."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, n_ranks


def _place(rank: int | None, ranks: tuple[int, ...], names: tuple[str, ...]) -> int:
    if len(names) != len(ranks):
        raise InvalidInputError(
            "there is not one writer for each rank; name as many, or none",
            key="writers",
            expected=f"{len(ranks)}, for ranks {_told(map(str, ranks))}",
            found=f"{len(names)}",
        )
    if rank is None:
        number = _world()[0]
        if number not in ranks:
            raise InvalidInputError(
                "this rank is none of those that hold the module; call it on these only, or give the mesh of all",
                key="mesh",
                expected=f"one of {_told(map(str, ranks))}",
                found=f"rank {number}",
            )
        return ranks.index(number)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < len(names):
        raise InvalidInputError("is no rank", key="rank", expected=f"0 to {len(names) - 1}", found=repr(rank))
    return rank
