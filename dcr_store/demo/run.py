"""The demonstration itself: train, publish, and learn from what the receivers sampled with exactly that version.

A store that an earlier demonstration made is gone on with: the policy is its head, restored from the store. Refuses
every other store that holds anything, and a directory that is no store and not empty.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import dcr_store
from dcr_store.demo import policy, rendering
from dcr_store.demo.cluster import LINE
from dcr_store.demo.recipe import Recipe
from dcr_store.demo.rendering import Outcome
from dcr_store.demo.session import MARK, Session
from dcr_store.errors import InvalidInputError, NotFoundError

if TYPE_CHECKING:
    from rich.console import Console

    from dcr_store.store import Store


def run(store_url: str, steps: int, *, as_json: bool, console: Console, recipe: Recipe | None = None) -> int:
    """Run the demonstration and print what came of it.

    Parameters
    ----------
    store_url : str
        Where to create the store; one that a demonstration made gets further versions.
    steps : int
        Training steps, each of which publishes a version.
    as_json : bool
        Print one JSON document to standard output instead of the table.
    console : rich.console.Console
        Where progress and the table go.

    Returns
    -------
    int
        0 if every version arrived bit for bit and the training curve is the reference run's, else 1.

    Raises
    ------
    InvalidInputError
        If a package is missing, or something else is where the store should be.
    DcrError
        If the store, a receiver or the relay fails.
    """
    recipe = recipe or Recipe()
    begun_s = time.perf_counter()
    policy.require_packages()
    with (
        console.status("starting") as status,
        _open(store_url, recipe) as store,
        tempfile.TemporaryDirectory(prefix="dcr-demo-") as scratch,
    ):
        rows, drills = Session(store, store_url, Path(scratch), recipe, status.update).run(steps)
    outcome = Outcome(store_url, tuple(rows), tuple(drills), time.perf_counter() - begun_s)
    if as_json:
        print(json.dumps(outcome.to_json()))
    else:
        _print(outcome, console)
    return 0 if outcome.equal else 1


def _print(outcome: Outcome, console: Console) -> None:
    console.print(rendering.introduction(outcome), end="\n\n", highlight=False)
    console.print(rendering.table(outcome))
    if outcome.drills:
        console.print()
        console.print(rendering.drill_table(outcome))
    console.print(f"\n{rendering.verdict(outcome)}", highlight=False)
    console.print(f"\n{outcome.seconds:.0f} s in all. Go on with:", highlight=False)
    for command, remark in rendering.next_commands(outcome):
        console.print(
            f"  {command}" + (f"    # {remark}" if remark else ""), markup=False, highlight=False, soft_wrap=True
        )


def _open(store_url: str, recipe: Recipe) -> Store:
    """Open or create the store; refuse what is not ours."""
    if store_url.startswith("memory:"):
        raise InvalidInputError("no other process sees a store in memory; name another place (--store)", key=store_url)
    try:
        store = dcr_store.open(store_url)
    except NotFoundError:
        local = Path(store_url.removeprefix("file://"))
        if local.is_dir() and any(local.iterdir()):
            raise InvalidInputError(
                "the directory is not empty and no store; name another one (--store)", key=store_url
            ) from None
        return dcr_store.create(store_url, chunk_elements=recipe.chunk_elements)
    others = set(store.lines()) - {LINE}
    versions = [] if others else store.log(LINE)
    if others or (versions and MARK not in versions[-1].metadata):
        store.close()
        raise InvalidInputError("the store was not made by the demo; name another one (--store)", key=store_url)
    return store
