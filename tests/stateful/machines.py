"""How long the state machines run, and what is made of a failure.

A run that fails is told as it was drawn: to shrink one of these takes Hypothesis five minutes and more, of which a test
run has none. It stays among the examples that are tried first, so that ``DCR_SHRINK=1`` shortens it in the same
checkout, as does what ``@reproduce_failure`` is told elsewhere. ``DCR_EXAMPLES`` is how many runs there are of each.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


def machine(n_runs: int, n_steps: int) -> settings:
    """Return the settings of a state machine: by default `n_runs` of at most `n_steps` each."""
    return settings(
        max_examples=int(os.environ.get("DCR_EXAMPLES", n_runs)),
        stateful_step_count=n_steps,
        phases=(*_PHASES, Phase.shrink) if os.environ.get("DCR_SHRINK") == "1" else _PHASES,
        print_blob=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
