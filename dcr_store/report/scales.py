"""Where values stand on an axis, and the texts at its ticks. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from dcr_store import wording

Unit = Literal["number", "share", "nbytes"]
_N_INTERVALS: Final = 4
_LEAST: Final = 1e-300
"""What is nearer to zero stands at zero: parts of it are no numbers any more."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis.

    Attributes
    ----------
    low, high : float
        Its ends; `high` is larger.
    ticks : tuple of (float, str)
        Values from `low` to `high`, and their texts.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def place(self, value: float) -> float:
        """Return where a value stands: 0 at `low`, 1 at `high`."""
        return (value - self.low) / (self.high - self.low)


def axis(values: Sequence[float], unit: Unit, *, from_zero: bool = True) -> Axis:
    """Return an axis of round ticks that holds all values.

    Parameters
    ----------
    from_zero : bool
        Begin at 0 where no value is below.
    """
    low, high = (0.0 if abs(end) < _LEAST else end for end in (min(values, default=0.0), max(values, default=1.0)))
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        room = abs(high) / 2 or 1.0
        low, high = (0.0 if from_zero and low >= 0 else low - room), high + room
    factor = 1.0
    if unit == "share":
        factor = 0.01
    elif unit == "nbytes":
        factor = 1024.0 ** max(0, int(math.log(max(abs(low), abs(high), 1.0), 1024)))
    step = _round_step((high - low) / factor)
    first, last = math.floor(low / factor / step + 1e-9), math.ceil(high / factor / step - 1e-9)
    ticks = tuple(
        (number * step * factor, _text(number * step, step, factor, unit)) for number in range(first, last + 1)
    )
    return Axis(ticks[0][0], ticks[-1][0], ticks)


def _round_step(length: float) -> float:
    """Return 1, 2 or 5 times a power of ten that cuts a length into few intervals."""
    rough = length / _N_INTERVALS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= rough * (1 - 1e-9))


def _text(value: float, step: float, factor: float, unit: Unit) -> str:
    value = 0.0 if abs(value) < step / 2 else value
    if unit == "nbytes":
        name = wording.nbytes(int(factor)).split()[1]
        return f"{value:.{_decimals(step)}f} {name}" if value else "0"
    if unit == "share":
        return f"{value:.{_decimals(step)}f} %"
    if value and not 1e-4 <= max(abs(value), step) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.{_decimals(step)}f}"


def _decimals(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))


def number(value: float) -> str:
    """Return a number of a metric, to five digits; whole ones in full."""
    if value == int(value) and abs(value) < 1e15:
        return wording.count(int(value))
    return f"{value:.5g}"


def share(value: float | None) -> str:
    """Return a share in percent, to three digits; a dash for None."""
    if value is None:
        return "–"
    if value in (0, 1):
        return f"{100 * value:.0f} %"
    percent = 100 * value
    return f"{percent:.2f} %" if percent >= 1 else f"{percent:.3g} %"


class Classes:
    """Cuts shares above 0 into classes, each so many times the one before.

    Attributes
    ----------
    low, high : float
        Where the first begins, and the last ends; 0 if there are no shares. The few that are lower than nearly all,
        as of a layer of some hundred elements, are in the first class, too.
    """

    N: Final = 9
    _WIDEST: Final = 1000.0

    def __init__(self, values: Sequence[float]) -> None:
        found = sorted(value for value in values if value > 0) or [0.0]
        self.high = found[-1]
        self.low = max(found[len(found) // 20], self.high / self._WIDEST)

    @property
    def times(self) -> float:
        """How many times as much a class begins with as the one before."""
        return (self.high / self.low) ** (1 / self.N) if self.low else 1.0

    def of(self, value: float) -> int:
        """Return the class of a share: 0 for nothing, else 1 up to ``N``."""
        if value <= 0:
            return 0
        if self.high <= self.low * (1 + 1e-9):
            return (self.N + 1) // 2
        place = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return min(self.N, 1 + int(place * self.N))
