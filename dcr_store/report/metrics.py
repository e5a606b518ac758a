"""The numbers that versions carry in their metadata, by column. Pure; passes over what is no number.

Names come from strangers: as many are kept as a report can use, in the order in which they turn up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from dcr_store.report.figures import Metric, Spread

N_METRICS: Final = 24
_N_KEPT: Final = 256
_MAX_DEPTH: Final = 4


class Metrics:
    """Collects the numbers of versions."""

    def __init__(self, n_columns: int) -> None:
        self._n_columns = n_columns
        self._spreads: dict[str, dict[int, Spread]] = {}

    @property
    def n_names(self) -> int:
        """How many different names there were, as far as they are counted."""
        return len(self._spreads)

    def add(self, column: int, metadata: Mapping[str, Any]) -> None:
        """Take the numbers of one version of a column."""
        for name, value in _numbers(metadata, "", 1):
            if name not in self._spreads and len(self._spreads) >= _N_KEPT:
                continue
            spreads = self._spreads.setdefault(name, {})
            spreads[column] = _with(spreads.get(column), value)

    def result(self) -> tuple[Metric, ...]:
        """Return the metrics that most versions have, at most ``N_METRICS``, in the order in which they turned up."""
        n_values = {name: sum(item.n for item in spreads.values()) for name, spreads in self._spreads.items()}
        chosen = set(sorted(n_values, key=lambda name: -n_values[name])[:N_METRICS])
        return tuple(
            Metric(name, tuple(spreads.get(column) for column in range(self._n_columns)))
            for name, spreads in self._spreads.items()
            if name in chosen
        )


def _numbers(found: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, float]]:
    for name, value in found.items():
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            yield from _numbers(value, f"{prefix}{name}.", depth + 1)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:  # an integer of hundreds of digits
                continue
            # Sums of what is larger are no numbers any more.
            if math.isfinite(number) and abs(number) < 1e300:
                yield f"{prefix}{name}", number


def _with(spread: Spread | None, value: float) -> Spread:
    if spread is None:
        return Spread(1, value, value, value)
    n = spread.n + 1
    mean = spread.mean + (value - spread.mean) / n
    return Spread(n, mean, min(spread.lowest, value), max(spread.highest, value))
