"""Real ranks publish real sharded modules: the same roots and bits as one process that publishes the full state."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from states import write_hf

import dcr_store
from dcr_store.errors import FencedError, InvalidInputError, LagError, StorageError

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

TESTS = Path(__file__).parents[2]
CHUNK_ELEMENTS = 64  # several chunks a tensor, and several tensors a chunk


def published(
    tmp_path: Path, cases: str, n_ranks: int, first: int, last: int, *, fails: int = -1
) -> dict[str, list[list[dict[str, Any]]]]:
    """What each rank was answered, by case."""
    environment = os.environ | {
        "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
        "OMP_NUM_THREADS": "1",
        "DCR_TEST_FAILS": str(fails),
    }
    for case in cases.split(","):
        if not (tmp_path / f"s-{case}").exists():
            dcr_store.create(tmp_path / f"s-{case}", chunk_elements=CHUNK_ELEMENTS).close()
    arguments = [cases, str(n_ranks), str(tmp_path / "s"), str(first), str(last), str(tmp_path)]
    script = [sys.executable, "-W", "error", str(TESTS / "module_ranks.py"), *arguments]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return {
        case: [json.loads((tmp_path / f"answers-{case}-{first}-{rank}.json").read_text()) for rank in range(n_ranks)]
        for case in cases.split(",")
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], list[dict[str, bytes]]]]:
    """Roots and bits of one publisher of the full states, by kind."""
    import torch
    from module_ranks import model

    found = {}
    for kind in ("tied", "untied", "run"):
        states: list[dict[str, bytes]] = []
        with dcr_store.create(tmp_path_factory.mktemp("alone") / "s", chunk_elements=CHUNK_ELEMENTS) as store:
            for number in range(5):
                state = model(number, kind).state_dict()
                with store.begin() as transaction:
                    for name, tensor in state.items():
                        transaction.write(name, tensor)
                states.append(
                    {
                        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                        for name, tensor in state.items()
                    }
                )
            found[kind] = [info.root for info in store.log()], states
    return found


def require(tmp_path: Path, case: str, answers: list[list[dict[str, Any]]], alone: Any) -> None:
    from module_ranks import CASES

    roots, states = alone[CASES[case][1]]
    with dcr_store.open(tmp_path / f"s-{case}") as store:
        log = store.log()
        assert [info.root for info in log] == roots[: len(log)], case
        assert [info.base for info in log] == [None, *(info.version for info in log[:-1])], case
        for number, state in enumerate(states[: len(log)]):
            found = {name: array.tobytes() for name, array in store.read(f"main@{number}").items()}
            assert found == state, case
        assert store.verify(deep=True).ok
        told = [info.to_json() for info in log]
        for mine in answers:
            assert mine == told[len(told) - len(mine) :], case
        assert [row["metadata"] for row in told] == [{"number": n, "loss": 0.5} for n in range(len(told))]


@pytest.mark.parametrize(
    ("n_ranks", "cases"),
    [(2, "plain,run,tp"), (3, "plain,tp"), (4, "fsdp2,hsdp,tp,tp_fsdp2"), (8, "hsdp,tp_fsdp2")],
)
def test_ranks_publish_what_one_process_publishes_of_the_full_state(
    tmp_path: Path, alone: Any, n_ranks: int, cases: str
) -> None:
    last = 2 if n_ranks < 8 else 1
    for case, answers in published(tmp_path, cases, n_ranks, 0, last).items():
        require(tmp_path, case, answers, alone)


def test_the_number_of_ranks_may_change_between_versions(tmp_path: Path, alone: Any) -> None:
    published(tmp_path, "fsdp2", 4, 0, 1)
    answers = published(tmp_path, "fsdp2", 3, 2, 4)
    require(tmp_path, "fsdp2", answers["fsdp2"], alone)


def test_a_rank_with_another_module_ends_it_for_all(tmp_path: Path) -> None:
    answers = published(tmp_path, "fsdp2", 2, 0, 0, fails=1)["fsdp2"]
    assert answers[1][0]["error"].startswith("InvalidInputError: unexpected: the rank that began main@0 has other")
    assert answers[0][0]["error"].startswith("FencedError")
    assert max(row[0]["s"] for row in answers) < 30
    with dcr_store.open(tmp_path / "s-fsdp2") as store:
        assert store.log() == []


# ---------------------------------------------------------------------- in one process


def acted(url: Path, module_of: Any, n_ranks: int, **options: Any) -> list[Any]:
    """What ranks get, each in a thread of its own, with a store of its own."""
    from dcr_store.publish.torch import publish_module

    names = [f"w{rank}" for rank in range(n_ranks)]

    def act(rank: int) -> Any:
        with dcr_store.open(url) as store:
            return publish_module(store, module_of(rank), writers=names, rank=rank, timeout_s=20, **options)

    with ThreadPoolExecutor(n_ranks) as pool:
        return list(pool.map(act, range(n_ranks)))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    with dcr_store.create(tmp_path / "s", chunk_elements=CHUNK_ELEMENTS) as made:
        yield made


def owned_by(store: Any, version: str) -> dict[str, set[str]]:
    """Which tensors each writer owned anything of."""
    contents = store._catalog.contents(store._catalog.resolve(version))
    return {
        ref.writer: {row["name"] for row in json.loads(store._objects.get(seal.ownership.key))["tensors"]}
        for ref, seal in contents.seals
    }


def test_replicas_share_the_bytes_and_always_alike(store: Any) -> None:
    import torch
    from torch import nn

    module = nn.ModuleDict({f"m{i}": nn.Linear(8 * (i + 1), 16, bias=False) for i in range(7)})
    infos = acted(store.url, lambda rank: module, 3)
    assert len({info.root for info in infos}) == 1
    first = owned_by(store, "main@0")
    assert sorted(name for names in first.values() for name in names) == sorted(module.state_dict())
    sizes = {name: tensor.numel() for name, tensor in module.state_dict().items()}
    loads = [sum(sizes[name] for name in names) for names in first.values()]
    assert max(loads) - min(loads) <= max(sizes.values()) // 2
    with torch.no_grad():
        module["m6"].weight[0, 0] += 1
    acted(store.url, lambda rank: module, 3)
    assert owned_by(store, "main@1") == first
    assert store.show("main").info.changed == 1


def test_one_process_alone_needs_no_ranks_and_keeps_the_order_and_ties_of_the_head(store: Any) -> None:
    import torch
    from torch import nn

    from dcr_store.publish.torch import publish_module

    module = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False), nn.BatchNorm1d(3))
    state = module.state_dict()
    with store.begin() as transaction:
        for name in reversed(state):
            transaction.write(name, state[name])
    module[1].weight = module[0].weight  # tied now, which a delta need not say
    info = publish_module(store, module, message="again", metadata={"step": 3})
    assert (info.version, info.base, info.message, info.metadata) == ("main@1", "main@0", "again", {"step": 3})
    with store.begin() as transaction:
        for name, tensor in module.state_dict().items():
            transaction.write(name, tensor)
    assert store.show("main@2").info.root == info.root
    found = store.read("main@1", framework="torch")
    assert all(torch.equal(found[name], tensor) for name, tensor in module.state_dict().items())


def test_files_beside_the_weights_go_on_while_the_tensors_are_the_same(store: Any, tmp_path: Path) -> None:
    """A checkpoint that leaves out a tied name, as transformers writes it: ``rename`` leaves it out too."""
    import torch
    from torch import nn

    from dcr_store.publish.torch import publish_module

    module = nn.ModuleDict({"embed": nn.Embedding(6, 4), "lm_head": nn.Linear(4, 6, bias=False)})
    module["lm_head"].weight = module["embed"].weight
    with store.begin() as transaction:
        transaction.write_checkpoint(
            write_hf(tmp_path / "run", {"embed.weight": module["embed"].weight.detach().numpy()})
        )
    files = store.show("main@0").files
    assert len(files) > 1
    with torch.no_grad():
        module["embed"].weight[2] += 1
    info = publish_module(store, module, rename=lambda name: None if name == "lm_head.weight" else name)
    assert (info.base, store.show("main@1").files) == ("main@0", files)
    info = publish_module(store, module)
    assert (info.base, store.show("main@2").files) == (None, [])


def test_a_rank_that_starts_again_finds_its_baseline(store: Any, tmp_path: Path) -> None:
    """By ``publish_module``, and by a callback."""
    import torch
    from torch import nn

    from dcr_store import events
    from dcr_store.publish.callback import PublishCallback
    from dcr_store.publish.torch import publish_module

    module, state = nn.Linear(30, 20), SimpleNamespace(global_step=2)
    names: list[str] = []
    for number in range(3):
        with torch.no_grad():
            module.weight[number] += 1
        with dcr_store.open(store.url) as again, events.listening(lambda event: names.append(event.name)):
            if number < 2:
                publish_module(again, module, baseline=tmp_path / "baseline")
            else:
                callback = PublishCallback(again, baseline=tmp_path / "baseline")
                callback.on_save(None, state, None, model=module)
    assert names.count("slices.noted") == 3
    assert {"slices.read", "slices.followed"}.isdisjoint(names)
    assert torch.equal(store.read("main@2", framework="torch")["weight"], module.weight)


def test_names_and_dtypes_may_be_others(store: Any) -> None:
    import torch
    from torch import nn

    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    names = {"0.weight": "up.weight", "0.bias": "up.bias", "1.num_batches_tracked": "n"}
    acted(store.url, lambda rank: module, 2, rename=names.get, dtype=torch.bfloat16)
    found = store.read("main", framework="torch")
    state = module.state_dict()
    assert set(found) == set(names.values())
    for name, renamed in names.items():
        wanted = state[name].to(torch.bfloat16) if state[name].is_floating_point() else state[name]
        assert found[renamed].dtype == wanted.dtype
        assert torch.equal(found[renamed], wanted)


class Odd:
    """Modules that cannot be published, by what is wrong with them."""

    @staticmethod
    def extra() -> Any:
        from torch import nn

        class Extra(nn.Linear):
            def get_extra_state(self) -> Any:
                return {"scale": 1}

        return Extra(2, 2)

    @staticmethod
    def fsdp1() -> Any:
        from torch import nn

        kind = type("FullyShardedDataParallel", (nn.Module,), {})
        return nn.Sequential(kind())

    @staticmethod
    def nothing() -> Any:
        from torch import nn

        return nn.ReLU()

    @staticmethod
    def text() -> Any:
        return "module"


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("extra", {}, "_extra_state: is no tensor; leave it out with a `rename` that returns None"),
        ("extra", {"rename": lambda name: "one"}, "one: is the name of two entries.*bias too"),
        ("extra", {"rename": {"weight": "w"}}, "rename: is no function of names; .* its get.*found dict"),
        ("extra", {"rename": lambda name: 1}, "weight: has no name by rename .*found int"),
        ("fsdp1", {}, "module: a module of FSDP1 gathers .*fully_shard"),
        ("nothing", {}, "module: the module has no tensors"),
        ("text", {}, "module: is no module .*torch.nn.Module.*str"),
        ("extra", {"dtype": "bf16"}, "dtype: is none to convert to"),
        ("extra", {"rename": {"weight": "w"}.get, "writers": ["a", "b"], "rank": 2}, "rank: is no rank .*0 to 1"),
    ],
)
def test_what_cannot_be_published_is_refused_before_anything_is_begun(
    store: Any, what: str, options: dict[str, Any], message: str
) -> None:
    from dcr_store.publish.torch import publish_module

    with pytest.raises(InvalidInputError, match=message):
        publish_module(store, getattr(Odd, what)(), **options)
    assert store.lines() == []


def test_writers_and_ranks_have_to_be_as_many(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import nn

    from dcr_store.publish.torch import publish_module

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidInputError, match=r"writers: there is not one writer for each rank.*2, for ranks 0, 1"):
        publish_module(store, nn.Linear(2, 2), writers=["a", "b", "c"])
    with pytest.raises(LagError, match="nobody has begun a transaction"):
        publish_module(store, nn.Linear(2, 2), timeout_s=0.1)


def test_ranks_that_disagree_about_a_tensor_end_it(store: Any) -> None:
    from torch import nn

    def module_of(rank: int) -> Any:
        return nn.Linear(2, 3 + rank)

    with pytest.raises((InvalidInputError, FencedError)):
        acted(store.url, module_of, 2)
    with dcr_store.open(store.url) as other:
        assert other.log() == []
        assert other._catalog.log("main").refresh().open is None


class FailsToJoin:
    """A store whose first `n_failures` joins fail when the transaction was found; as when a read of it fails."""

    def __init__(self, store: Any, n_failures: int) -> None:
        self._store, self._n_failures = store, n_failures
        self.begin = store.begin

    def join(self, txid: str | None, **options: Any) -> Any:
        def fails(layout: Any) -> Any:
            raise StorageError("cannot be read", key="layout")

        if self._n_failures:
            self._n_failures -= 1
            options["slices"] = fails
        return self._store.join(txid, **options)


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_a_rank_that_cannot_join_ends_it_for_all(store: Any, is_handed_over: bool) -> None:
    from torch import nn

    from dcr_store.publish.torch import publish_module

    module = nn.Linear(4, 4, bias=False)
    begun = store.begin(writers=["a", "b"], tensors={"weight": ("F32", (4, 4))}) if is_handed_over else None
    options: dict[str, Any] = {"writers": ["a", "b"], "timeout_s": 60, "txid": begun and begun.txid}
    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool, dcr_store.open(store.url) as other, dcr_store.open(store.url) as third:
        answer = pool.submit(publish_module, other, module, rank=0, **options)
        with pytest.raises(StorageError, match="layout: cannot be read") as caught:
            publish_module(FailsToJoin(third, 1), module, rank=1, **options)
        with pytest.raises(FencedError):
            answer.result(timeout=50)
    assert time.monotonic() - start < 30
    assert not hasattr(caught.value, "__notes__")
    assert store._catalog.log("main").refresh().open is None
    assert store.log() == []


def test_a_rank_whose_baseline_cannot_be_used_ends_it_for_all(store: Any, tmp_path: Path) -> None:
    from torch import nn

    from dcr_store.publish.torch import publish_module

    (tmp_path / "baseline" / "main" / "b").mkdir(parents=True)
    (tmp_path / "baseline" / "main" / "b" / "notes.txt").write_text("mine")
    module = nn.Linear(4, 4, bias=False)
    options: dict[str, Any] = {"writers": ["a", "b"], "timeout_s": 60, "baseline": tmp_path / "baseline"}
    with ThreadPoolExecutor(1) as pool, dcr_store.open(store.url) as other, dcr_store.open(store.url) as third:
        answer = pool.submit(publish_module, other, module, rank=0, **options)
        with pytest.raises(InvalidInputError, match="files of somebody else"):
            publish_module(third, module, rank=1, **options)
        with pytest.raises(FencedError):
            answer.result(timeout=50)
    assert store.log() == []


def test_a_rank_that_cannot_even_end_it_is_named_to_all_in_time(store: Any) -> None:
    from torch import nn

    from dcr_store.publish.torch import publish_module

    module = nn.Linear(4, 4)
    options: dict[str, Any] = {"writers": ["a", "b", "c"], "timeout_s": 2}
    start = time.monotonic()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        others = [stack.enter_context(dcr_store.open(store.url)) for _ in range(3)]
        answers = [pool.submit(publish_module, others[rank], module, rank=rank, **options) for rank in (0, 2)]
        with pytest.raises(StorageError, match="layout: cannot be read") as caught:
            publish_module(FailsToJoin(others[1], 2), module, rank=1, **options)
        assert "could not be aborted either" in caught.value.__notes__[0]
        for answer in answers:
            with pytest.raises((LagError, FencedError), match=r"(have not sealed main@0 .*|not sealed by )\bb\b"):
                answer.result(timeout=50)
    assert time.monotonic() - start < 30
    assert store.log() == []
    assert store._catalog.log("main").refresh().open is None


def test_a_rank_that_cannot_join_to_abort_either_says_so(store: Any) -> None:
    from torch import nn

    from dcr_store.publish.torch import publish_module

    begun = store.begin(writers=["a", "b"], tensors={"weight": ("F32", (4, 4))})
    with pytest.raises(InvalidInputError, match="was begun for other writers") as caught:
        publish_module(store, nn.Linear(4, 4, bias=False), writers=["c"], rank=0, txid=begun.txid, timeout_s=1)
    assert "could not be aborted either" in caught.value.__notes__[0]
    begun.abort()


def test_a_transaction_that_another_run_left_open_is_no_trap_for_the_first_publish(store: Any) -> None:
    """Of an owner of whom nothing is known: ranks that come before the first one take it for theirs."""
    from torch import nn

    from dcr_store.publish.torch import publish_module

    module = nn.Linear(4, 4)
    tensors = {"weight": ("F32", (4, 4)), "bias": ("F32", (4,))}
    with dcr_store.open(store.url) as gone:
        left = gone.begin(writers=["a", "b"], tensors=tensors, owner="run 7", message="an earlier one")
        left._close()

    def second() -> Any:
        with dcr_store.open(store.url) as other:
            return publish_module(other, module, writers=["a", "b"], rank=1, timeout_s=20)

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(second)
        deadline = time.monotonic() + 10
        while not any("journal/b." in key for key in keys_of(store)) and time.monotonic() < deadline:
            time.sleep(0.01)  # it has joined what was left
        info = publish_module(store, module, writers=["a", "b"], rank=0, owner="run 7", timeout_s=20)
        assert answer.result(timeout=20) == info
    assert info.version == "main@0"


def keys_of(store: Any) -> list[str]:
    return [str(path) for path in Path(store.url).rglob("*")]


def test_a_transaction_of_other_writers_is_waited_out(store: Any) -> None:
    from torch import nn

    from dcr_store.publish.torch import publish_module

    module = nn.Linear(4, 4)
    other = store.begin()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(acted_one, store.url, module)
        time.sleep(0.2)
        assert not answer.done()
        other.abort()
        info = publish_module(store, module, writers=["a", "b"], rank=0, timeout_s=20)
        assert answer.result(timeout=20) == info


def acted_one(url: str, module: Any) -> Any:
    from dcr_store.publish.torch import publish_module

    with dcr_store.open(url) as store:
        return publish_module(store, module, writers=["a", "b"], rank=1, timeout_s=20)


def test_a_launcher_may_hand_the_transaction_over(store: Any) -> None:
    from torch import nn

    from dcr_store.publish.torch import publish_module

    module = nn.Linear(4, 4, bias=False)
    tensors = {"weight": ("F32", (4, 4))}
    begun = store.begin(writers=["launcher", "a"], tensors=tensors)
    with ThreadPoolExecutor(1) as pool, dcr_store.open(store.url) as other:
        answer = pool.submit(publish_module, other, module, writers=["a"], txid=begun.txid, timeout_s=20)
        info = begun.commit(timeout_s=20)
        assert answer.result(timeout=20) == info


def test_what_is_no_store_or_has_names_of_a_wrapper_is_refused(store: Any) -> None:
    import torch
    from torch import nn

    from dcr_store.publish.torch import publish_module

    module = nn.Linear(4, 4, bias=False)
    with pytest.raises(InvalidInputError, match=r"store: is no store; open it first, with dcr_store.open"):
        publish_module(store.url, module)
    wrapped = nn.Sequential(torch.compile(module, backend="eager"))
    for given in (wrapped, wrapped[0]):
        with pytest.raises(InvalidInputError, match=r"_orig_mod.weight: is named by .*; give module._orig_mod"):
            publish_module(store, given)
    parallel = type("Ours", (type("DistributedDataParallel", (nn.Module,), {}),), {})()
    parallel.module = module
    for given, key in ((parallel, "module.weight"), (nn.Sequential(parallel), "0.module.weight")):
        with pytest.raises(InvalidInputError, match=rf"^{key}: is named by .* give what it wraps, its \.module"):
            publish_module(store, given)
    assert store.lines() == []
    publish_module(store, wrapped[0], rename=lambda name: name.removeprefix("_orig_mod."))
    publish_module(store, parallel, rename=lambda name: name.removeprefix("module."))
    assert list(store.read()) == ["weight"]
    plain = nn.Module()
    plain.module = module  # a name like another
    assert list(store.read(publish_module(store, plain).version)) == ["module.weight"]


def test_a_dtensor_is_not_written_as_a_tensor(store: Any) -> None:
    import torch

    class Placed(torch.nn.Parameter):
        placements, device_mesh = (), None

    with store.begin() as transaction:
        with pytest.raises(
            InvalidInputError, match=r"^w: is a DTensor.* with dcr_store\.publish\.torch\.publish_module"
        ):
            transaction.write("w", Placed(torch.zeros(2)))
        transaction.write("w", torch.zeros(2))


def test_the_advice_of_a_rank_that_waited_is_for_who_called(store: Any) -> None:
    from torch import nn

    from dcr_store.publish.torch import publish_module

    for rank in range(2):
        with pytest.raises(LagError, match="; publish again on all ranks") as caught:
            publish_module(store, nn.Linear(2, 2), writers=["a", "b"], rank=rank, timeout_s=0.05)
        assert "commit again" not in str(caught.value)
        assert "join again" not in str(caught.value)
