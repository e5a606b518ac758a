"""The documents agree with what they describe."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TRAINERS = (ROOT / "docs/trainers.md").read_text("utf-8")


def test_each_design_note_has_a_number_of_its_own() -> None:
    notes = sorted((ROOT / "docs/design").glob("*.md"))
    assert [int(note.name[:3]) for note in notes] == list(range(1, len(notes) + 1))
    for note in notes:
        assert note.read_text("utf-8").startswith(f"# {note.name[:3]}: ")


def test_cli_reference_is_current() -> None:
    from dcr_store.cli.reference import reference

    found = (ROOT / "docs/cli.md").read_text("utf-8")
    assert found == reference(), "run: python -m dcr_store.cli.reference > docs/cli.md"


def test_the_json_of_each_verb_is_described() -> None:
    from dcr_store.cli.parser import build
    from dcr_store.cli.reference import parsers

    rows = re.findall(
        r"^\| (`[^|]*) \|", (ROOT / "docs/cli.md").read_text("utf-8").partition("## dcr")[0], re.MULTILINE
    )
    described = [name for row in rows for name in re.findall(r"`(.*?)`", row)]
    verbs = parsers(build())
    with_json = {
        name
        for name, verb in verbs.items()
        if any("--json" in parser._option_string_actions for parser in (verb, *parsers(verb).values()))
    }
    assert sorted(described) == sorted(with_json)


def test_options_are_shown_by_all_their_names() -> None:
    page = (ROOT / "docs/cli.md").read_text("utf-8")
    assert "| `-o, --output DIR` |" in page
    assert "-o|--output DIR" in page
    assert "| `--keep-tagged, --no-keep-tagged` | keep versions that have a tag (default), or let them expire" in page


def test_the_permissions_of_each_verb_are_said() -> None:
    from dcr_store.cli.parser import build
    from dcr_store.cli.reference import parsers

    table = (ROOT / "docs/s3.md").read_text("utf-8").partition("| who | needs")[2].partition("\n\n")[0]
    who = [row.split("|")[1] for row in table.splitlines() if row.startswith("| ")]
    told = {name for cell in who for name in re.findall(r"`(\w+)", cell)}
    assert set(parsers(build())) <= told


def test_the_recipe_for_maps_of_your_own_publishes(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import ml_dtypes
    import numpy as np

    import dcr_store

    (recipe,) = re.findall(r"```python\n(from dcr_store.layout import slices as maps\n.*?)```", TRAINERS, re.DOTALL)
    q = np.random.default_rng(0).random((4096, 1024), np.float32).astype(ml_dtypes.bfloat16)

    def act(rank: int) -> None:
        with dcr_store.open(tmp_path / "s") as store:
            given = {"store": store, "rank": rank, "n_ranks": 2, "names": ["a", "b"], "scratch": tmp_path / "baseline"}
            for number in range(2):
                given["local"] = np.split(q + number, 2)[rank]
                exec(recipe, given)

    with dcr_store.create(tmp_path / "s") as store, ThreadPoolExecutor(2) as pool:
        list(pool.map(act, range(2)))
        for number in range(2):
            assert store.read(f"main@{number}")["q.weight"].tobytes() == (q + number).tobytes()


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_the_recipe_for_optimizer_state_publishes_it(tmp_path: Path) -> None:
    import torch

    import dcr_store

    (recipe,) = re.findall(r"```python\n(with store.begin\(line=\"optimizer\".*?)```", TRAINERS, re.DOTALL)
    module = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(4)).sum().backward()
    optimizer.step()
    with dcr_store.create(tmp_path / "s", chunk_elements=64) as store:
        given = {"store": store, "optimizer": optimizer, "step": 1}
        exec(recipe, given)
        assert store.log("optimizer")[0].metadata == {"step": 1}
    expected = {f"{i}.{key}": value for i, of in optimizer.state_dict()["state"].items() for key, value in of.items()}
    assert len(expected) == 6
    assert given["state"].keys() == expected.keys()
    assert all(torch.equal(given["state"][name], value) for name, value in expected.items())


def test_the_recipe_for_exporters_publishes_what_they_export(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    from megatron import Exporter, Model, Topology, held, next_training_state, training_state

    import dcr_store

    (recipe,) = re.findall(r"```python\n(found = .*?)```", TRAINERS, re.DOTALL)
    rng = np.random.default_rng(0)
    all_slices = [{"up": rng.random((4, 6), np.float32), "norm": np.full(6, 0.5, np.float32)} for _ in range(2)]

    def export(ranks: list[dict[str, np.ndarray]]) -> list[tuple[str, np.ndarray]]:
        rows = np.concatenate([rank["up"] for rank in ranks])
        return [("gate.weight", rows[::2]), ("up.weight", rows[1::2]), ("norm.weight", ranks[0]["norm"] + 1)]

    model, topology = Model(kv="copied"), Topology(tp=4, ep=2, etp=2)
    states = [training_state(model, 0)]
    states.append(next_training_state(model, states[0], 1))
    cases = [(export, [all_slices])]
    cases.append((Exporter(model, topology), [[held(model, topology, r, s) for r in range(4)] for s in states]))
    for number, (exporter, steps) in enumerate(cases):

        def act(rank: int, exporter: Any = exporter, steps: Any = steps, url: Path = tmp_path / str(number)) -> None:
            with dcr_store.open(url) as store:
                for all_slices in steps:
                    given = {
                        "dcr_store": dcr_store,
                        "store": store,
                        "export": exporter,
                        "all_slices": all_slices,
                        "slices": all_slices[rank],
                        "names": [f"rank{other}" for other in range(len(all_slices))],
                        "rank": rank,
                        "exported": dict(exporter(all_slices)).__getitem__,
                    }
                    exec(recipe, given)

        n_ranks = len(steps[0])
        with dcr_store.create(tmp_path / str(number)) as store, ThreadPoolExecutor(n_ranks) as pool:
            list(pool.map(act, range(n_ranks)))
            for version, all_slices in enumerate(steps):
                found = store.read(f"main@{version}")
                for name, array in exporter(all_slices):
                    assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name
