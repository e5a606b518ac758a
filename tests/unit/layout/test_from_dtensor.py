"""Maps of real DTensors: four processes shard a model in the usual ways, one plays larger meshes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dcr_store.errors import InvalidInputError
from dcr_store.layout.affine_map import AffineMap, coverage
from dcr_store.layout.placements import Split, map_of_placements

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

ROOT = Path(__file__).parents[3]
Array = np.ndarray[Any, Any]


def played(what: str, folder: Path) -> None:
    script = [sys.executable, "-W", "error", str(ROOT / "tests" / "dtensor_ranks.py"), what, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr


class Ranks:
    """What four ranks wrote."""

    def __init__(self, folder: Path) -> None:
        self.bits: list[dict[str, Array]] = [dict(np.load(folder / f"{rank}.npz")) for rank in range(4)]
        self.notes: list[dict[str, Any]] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]

    def full(self, name: str) -> Array:
        return self.bits[0][f"full/{name}"]

    def mapped(self, rank: int, key: str) -> AffineMap:
        return AffineMap.from_bytes(self.notes[rank]["maps"][key]["map"].encode(), key)

    def scattered(self, key: str) -> tuple[Array, Array]:
        """What all ranks' local values are together, and how many of them hold each."""
        name = key.partition("/")[2]
        full = self.full(name)
        found, counts = np.zeros(full.size, full.dtype), np.zeros(full.size, np.int64)
        for rank, bits in enumerate(self.bits):
            local, mapped = bits[key].ravel(), self.mapped(rank, key)
            assert mapped.dtype == "BF16"
            assert mapped.shape == bits[key].shape
            assert mapped.tensors == {name: full.shape}
            there = mapped.canonical_of(name, np.arange(local.size))
            assert (there >= 0).all()
            is_new = counts[there] == 0
            assert (is_new | (found[there] == local)).all()
            found[there] = local
            counts[there] += 1
        return found.reshape(full.shape), counts.reshape(full.shape)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("ranks")
    played("real", folder)
    return Ranks(folder)


N_HOLDERS = {
    "fsdp2": dict.fromkeys(["embed.weight", "up.weight", "up.bias", "down.weight", "norm.weight", "norm.bias"], 1),
    "hsdp": dict.fromkeys(["embed.weight", "up.weight", "up.bias", "down.weight", "norm.weight", "norm.bias"], 2),
    "tp": {"embed.weight": 1, "up.weight": 1, "up.bias": 1, "down.weight": 1, "norm.weight": 4, "norm.bias": 4},
    "tp_fsdp2": {"embed.weight": 1, "up.weight": 1, "up.bias": 1, "down.weight": 1, "norm.weight": 2, "norm.bias": 2},
    "pair": {"up.weight": 1},
    "columns": {"up.weight": 1},
    "strided": {"up.weight": 1},
    "twice": {"up.weight": 1},
}


@pytest.mark.parametrize("case", N_HOLDERS)
def test_local_tensors_of_all_ranks_are_the_full_tensors_bit_for_bit(ranks: Ranks, case: str) -> None:
    keys = {key for key in ranks.notes[0]["maps"] if key.partition("/")[0] == case}
    assert keys == {f"{case}/{name}" for name in N_HOLDERS[case]}
    for name, n_holders in N_HOLDERS[case].items():
        found, counts = ranks.scattered(f"{case}/{name}")
        assert np.array_equal(found, ranks.full(name)), name
        assert (counts == n_holders).all(), name


@pytest.mark.parametrize("case", [case for case in N_HOLDERS if case != "pair"])
def test_ranks_with_one_replica_index_hold_each_value_once(ranks: Ranks, case: str) -> None:
    for name, n_holders in N_HOLDERS[case].items():
        key = f"{case}/{name}"
        notes = [ranks.notes[rank]["maps"][key] for rank in range(4)]
        for index in range(n_holders):
            maps = [ranks.mapped(rank, key) for rank in range(4) if notes[rank]["index"] == index]
            assert coverage(maps, {name: ranks.full(name).shape}).is_exact
        for rank, note in enumerate(notes):
            assert len(note["ranks"]) == n_holders
            assert note["ranks"][note["index"]] == rank
            assert all(ranks.mapped(other, key) == ranks.mapped(rank, key) for other in note["ranks"])


@pytest.mark.parametrize("case", ["fsdp2", "hsdp", "tp", "tp_fsdp2"])
def test_chunks_of_a_distributed_checkpoint_are_the_slices_of_its_ranks(ranks: Ranks, case: str) -> None:
    for name in N_HOLDERS[case]:
        key = f"{case}/{name}"
        stored = [AffineMap.from_bytes(document.encode(), key) for document in ranks.notes[0]["stored"][key]]
        assert coverage(stored, {key: ranks.full(name).shape}).is_exact
        held = [ranks.mapped(rank, key) for rank in range(4)]
        assert {(m.shape, m.boxes[key]) for m in stored if m.n_values} == {
            (m.shape, m.boxes[name]) for m in held if m.n_values
        }


def test_uneven_sizes_leave_some_ranks_less_and_some_nothing(ranks: Ranks) -> None:
    assert [ranks.mapped(rank, "fsdp2/norm.weight").shape for rank in range(4)] == [(1,), (1,), (1,), (0,)]
    assert [ranks.mapped(rank, "tp/embed.weight").shape for rank in range(4)] == [(2, 6), (2, 6), (2, 6), (1, 6)]
    assert [ranks.mapped(rank, "tp/down.weight").shape for rank in range(4)] == [(6, 3), (6, 3), (6, 3), (6, 1)]
    assert [ranks.mapped(rank, "pair/up.weight").n_values for rank in range(4)] == [30, 30, 0, 0]


def test_no_collective_is_called_and_the_guard_would_see_one(ranks: Ranks) -> None:
    for note in ranks.notes:
        assert "a collective was called" in note["refusals"]["guard"]
        assert "c10d.allreduce_" in note["refusals"]["guard of operations"]
        assert "all_gather_into_tensor" in note["refusals"]["gathered"]


def test_what_is_no_slice_is_refused_by_name(ranks: Ranks) -> None:
    for note in ranks.notes:
        partial, plain, mesh = (note["refusals"][key] for key in ("partial", "plain", "mesh"))
        assert partial.startswith("InvalidInputError: layers.0.sum: has values that are still to be summed")
        assert "Partial(sum)" in partial
        assert plain.startswith("InvalidInputError: layers.0.norm: does not say who else holds it")
        for refusal in (mesh, note["refusals"]["other mesh of these names"]):
            assert refusal.startswith("InvalidInputError: layers.0.norm: the tensor's mesh is no part of the mesh")


def test_larger_meshes_hold_what_their_maker_left_them(tmp_path: Path) -> None:
    """FSDP2 over one and two splits, HSDP over one; where it matters who made a tensor, both are met, and asked for."""
    played("alone", tmp_path)
    local: dict[str, Array] = dict(np.load(tmp_path / "alone.npz"))
    n_asked = 0
    for note in json.loads((tmp_path / "alone.json").read_text()):
        placements = [None if placed is None else Split(*placed) for placed in note["placements"]]
        arguments = ("w", "I16", note["shape"], note["mesh_shape"], note["at"], placements)
        mapped = map_of_placements(*arguments, made_by=note["made_by"])
        array = local[note["key"]]
        assert mapped.shape == array.shape, note
        assert mapped.canonical_of("w", np.arange(array.size)).tolist() == array.ravel().tolist(), note
        try:
            assert map_of_placements(*arguments) == mapped, note
        except InvalidInputError:
            n_asked += 1
    assert n_asked > 50


# ---------------------------------------------------------------------- without processes


def like_dtensor(local: Any, shape: tuple[int, ...], placements: Any, at: tuple[int, ...] | None, n: int = 2) -> Any:
    mesh = SimpleNamespace(shape=(n,), get_coordinate=lambda: at, mesh_dim_names=None)
    return SimpleNamespace(placements=placements, device_mesh=mesh, shape=shape, to_local=lambda: local)


def test_a_plain_tensor_is_the_whole() -> None:
    import torch

    from dcr_store.layout.from_dtensor import map_of_dtensor

    mapped = map_of_dtensor("w", torch.zeros(3, 4, dtype=torch.float16).t())
    assert (mapped.dtype, mapped.shape, mapped.n_values) == ("F16", (4, 3), 12)
    scalar = map_of_dtensor("s", torch.nn.Parameter(torch.tensor(1.0)))
    assert (scalar.shape, scalar.n_values) == ((), 1)


def test_a_local_tensor_of_another_shape_is_refused_by_name() -> None:
    import torch
    from torch.distributed.tensor import Shard

    from dcr_store.layout.from_dtensor import map_of_dtensor

    assert map_of_dtensor("w", like_dtensor(torch.zeros(2, 4), (3, 4), [Shard(0)], (0,))).shape == (2, 4)
    with pytest.raises(InvalidInputError, match="another shape") as caught:
        map_of_dtensor("layers.0.w", like_dtensor(torch.zeros(2, 4), (3, 4), [Shard(0)], (1,)))
    assert caught.value.key == "layers.0.w"
    assert caught.value.found == [2, 4]
    assert "[1, 4] of [3, 4]" in str(caught.value)


def test_tensors_without_values_may_have_any_shape_without_values() -> None:
    import torch
    from torch.distributed.tensor import Shard

    from dcr_store.layout.from_dtensor import map_of_dtensor

    mapped = map_of_dtensor("w", like_dtensor(torch.zeros(0, 0), (4, 0), [Shard(0)], (0,)))
    assert (mapped.shape, mapped.tensors) == ((0, 0), {"w": (4, 0)})
    with pytest.raises(InvalidInputError, match="another shape"):
        map_of_dtensor("w", like_dtensor(torch.zeros(0, 4), (4, 4), [Shard(0)], (0,)))


def test_a_placement_that_torch_does_not_have_is_refused_by_name() -> None:
    """A subclass of Shard may split otherwise."""
    import torch
    from torch.distributed.tensor import Shard

    from dcr_store.layout.from_dtensor import map_of_dtensor

    class RoundRobin(Shard):
        pass

    namesake = type("Shard", (RoundRobin,), {})
    with pytest.raises(InvalidInputError, match="a placement of an unknown kind"):
        map_of_dtensor("layers.0.w", like_dtensor(torch.zeros(2), (4,), [namesake(0)], (0,)))
    with pytest.raises(InvalidInputError, match="a placement of an unknown kind") as caught:
        map_of_dtensor("layers.0.w", like_dtensor(torch.zeros(2), (4,), [RoundRobin(0)], (0,)))
    assert caught.value.key == "layers.0.w"


def test_importing_the_builders_does_not_import_torch() -> None:
    script = (
        "import sys, dcr_store\n"
        "from dcr_store.layout import from_dcp, from_dtensor, from_megatron, placements\n"
        "assert 'torch' not in sys.modules"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
