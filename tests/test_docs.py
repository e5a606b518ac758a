"""The documents agree with what they describe."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_design_note_has_a_number_of_its_own() -> None:
    notes = sorted((ROOT / "docs/design").glob("*.md"))
    assert [int(note.name[:3]) for note in notes] == list(range(1, len(notes) + 1))
    for note in notes:
        assert note.read_text("utf-8").startswith(f"# {note.name[:3]}: ")


def test_cli_reference_is_current() -> None:
    from dcr_store.cli.reference import reference

    found = (ROOT / "docs/cli.md").read_text("utf-8")
    assert found == reference(), "run: python -m dcr_store.cli.reference > docs/cli.md"


def test_the_recipe_for_exporters_publishes_what_they_export(tmp_path: Path) -> None:
    import re
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    import dcr_store

    text = (ROOT / "docs/trainers.md").read_text("utf-8")
    (recipe,) = re.findall(r"```python\n(found = .*?)```", text, re.DOTALL)
    rng = np.random.default_rng(0)
    all_slices = [{"up": rng.random((4, 6), np.float32), "norm": np.full(6, 0.5, np.float32)} for _ in range(2)]

    def export(ranks: list[dict[str, np.ndarray]]) -> list[tuple[str, np.ndarray]]:
        rows = np.concatenate([rank["up"] for rank in ranks])
        return [("gate.weight", rows[::2]), ("up.weight", rows[1::2]), ("norm.weight", ranks[0]["norm"] + 1)]

    def act(rank: int) -> None:
        with dcr_store.open(tmp_path / "s") as store:
            given = {
                "dcr_store": dcr_store,
                "store": store,
                "export": export,
                "all_slices": all_slices,
                "slices": all_slices[rank],
                "names": ["a", "b"],
                "rank": rank,
                "exported": dict(export(all_slices)).__getitem__,
            }
            exec(recipe, given)

    with dcr_store.create(tmp_path / "s") as store, ThreadPoolExecutor(2) as pool:
        list(pool.map(act, range(2)))
        found = store.read()
        for name, array in export(all_slices):
            assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name
