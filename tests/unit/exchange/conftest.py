"""A store with a past, for what is copied and healed."""

from __future__ import annotations

import numpy as np
import pytest
from copies import cloned, place, step
from histories import Past, first_state

import dcr_store


@pytest.fixture(scope="session")
def template() -> Past:
    """Ten versions of main, one whole and one folded besides, a fork with two of its own, two tags, a pin."""
    made = Past(dcr_store.create(place(), chunk_elements=64))
    made.publish("main", first_state(np.random.default_rng(1)))
    for _ in range(9):
        step(made)
    made.store.anchor("main@5")
    made.store.fold("main@1", "main@4")
    made.fork("main", 6, "exp")
    step(made, "exp")
    step(made, "exp")
    made.store.tag("main@2", "early")
    made.store.tag("exp@7", "best", "of all")
    made.store.pin("main@3", "kept")
    return made


@pytest.fixture
def past(template: Past) -> Past:
    """The same in a store of the test's own."""
    made = Past(cloned(template.store))
    made.states = {line: list(states) for line, states in template.states.items()}
    return made
