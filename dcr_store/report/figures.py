"""What a report tells, as frozen values with ``to_json``; ``Report.to_html`` draws them.

What the log says is told of every version, in columns: runs of neighbouring versions where there are many. What only
the deltas say is told of the versions that were looked into.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcr_store.format.names import version_name
from dcr_store.history.changed import Measured

if TYPE_CHECKING:
    from dcr_store.receive.status import GroupStatus


@dataclass(frozen=True, slots=True)
class Column:
    """Neighbouring versions, as the log tells of them.

    Attributes
    ----------
    first, last : int
        The numbers of the versions, both included.
    n_whole : int
        How many of them were committed whole; all else is about the others, the deltas.
    n_expired : int
        How many of all have expired.
    changed, elements : int
        Elements that differ from the base, and all elements, summed over the deltas.
    lowest_rate, highest_rate : float or None
        Of single deltas; None if there is none.
    nbytes : int
        What the deltas added to the store.
    state_nbytes : int
        What their states take whole.
    whole_nbytes : int
        What the versions that were committed whole added to the store.
    dense_nbytes : int
        What the states of all versions take whole.
    """

    first: int
    last: int
    n_whole: int
    n_expired: int
    changed: int
    elements: int
    lowest_rate: float | None
    highest_rate: float | None
    nbytes: int
    state_nbytes: int
    whole_nbytes: int
    dense_nbytes: int

    @property
    def n_versions(self) -> int:
        """How many versions."""
        return self.last - self.first + 1

    @property
    def n_deltas(self) -> int:
        """How many of them are deltas."""
        return self.n_versions - self.n_whole

    @property
    def rate(self) -> float | None:
        """``changed / elements``; None without any delta."""
        return _share(self.changed, self.elements) if self.n_deltas else None

    @property
    def nbytes_each(self) -> float | None:
        """What a delta added on average; None without any."""
        return self.nbytes / self.n_deltas if self.n_deltas else None

    @property
    def ratio(self) -> float | None:
        """What the deltas added as a share of their states; None without any."""
        return _share(self.nbytes, self.state_nbytes) if self.n_deltas else None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "first": self.first,
            "last": self.last,
            "n_whole": self.n_whole,
            "n_expired": self.n_expired,
            "changed": self.changed,
            "elements": self.elements,
            "rate": self.rate,
            "lowest_rate": self.lowest_rate,
            "highest_rate": self.highest_rate,
            "nbytes": self.nbytes,
            "state_nbytes": self.state_nbytes,
            "ratio": self.ratio,
            "whole_nbytes": self.whole_nbytes,
            "dense_nbytes": self.dense_nbytes,
        }


@dataclass(frozen=True, slots=True)
class Spread:
    """The values that the versions of one column have of a metric."""

    n: int
    mean: float
    lowest: float
    highest: float

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"n": self.n, "mean": self.mean, "lowest": self.lowest, "highest": self.highest}


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that versions carry in their metadata.

    Attributes
    ----------
    name : str
        Of nested objects the keys, joined by dots.
    columns : tuple of Spread or None
        One for each column; None where no version of it has the number.
    """

    name: str
    columns: tuple[Spread | None, ...]

    @property
    def found(self) -> list[Spread]:
        """The columns that have values."""
        return [item for item in self.columns if item is not None]

    @property
    def is_constant(self) -> bool:
        """Whether all values are the same, and there are several."""
        found = self.found
        return sum(item.n for item in found) > 1 and (
            min(item.lowest for item in found) == max(item.highest for item in found)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"name": self.name, "columns": [None if item is None else item.to_json() for item in self.columns]}


@dataclass(frozen=True, slots=True)
class Layer:
    """Some tensors, and how much of them changed in the versions that were looked into.

    Attributes
    ----------
    name : str
        What their names begin with; of several layers that are told as one, the first and the last.
    n_layers, n_tensors : int
        In the layout of the last version.
    changed, elements : int
        Summed over the versions that were looked into.
    rates : tuple of float or None
        One for each column; None where no version was looked into.
    """

    name: str
    n_layers: int
    n_tensors: int
    changed: int
    elements: int
    rates: tuple[float | None, ...]

    @property
    def rate(self) -> float:
        """``changed / elements``; 0 for none."""
        return _share(self.changed, self.elements)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "n_layers": self.n_layers,
            "n_tensors": self.n_tensors,
            "changed": self.changed,
            "elements": self.elements,
            "rate": self.rate,
            "rates": list(self.rates),
        }


@dataclass(frozen=True, slots=True)
class Moved:
    """Which way and how far the values of one version went, against the version before."""

    version: int
    measured: Measured

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        measured = self.measured
        return {
            "version": self.version,
            "up": measured.up,
            "down": measured.down,
            "largest_ulp": measured.largest_ulp,
            "steps": list(measured.steps),
        }


@dataclass(frozen=True, slots=True)
class StoredPartition:
    """A partition of a delta.

    Attributes
    ----------
    version : int
    writer, array : str
        Whose it is, and of which array: ``u16/mask``.
    index : int
        Its place in the array.
    seconds : float or None
        From the record that began the version until it was stored, by the object store's times; None where that does
        not tell any.
    n_tensors : int
        How many tensors meet it; `first` and `last` are two of them.
    """

    version: int
    writer: str
    array: str
    index: int
    nbytes: int
    seconds: float | None
    n_tensors: int
    first: str
    last: str

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "version": self.version,
            "writer": self.writer,
            "array": self.array,
            "index": self.index,
            "nbytes": self.nbytes,
            "seconds": self.seconds,
            "n_tensors": self.n_tensors,
            "first": self.first,
            "last": self.last,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """A line from one version to another.

    Attributes
    ----------
    store, line : str
        Where.
    first, last : int
        The numbers of the versions, both included.
    made_at : str
        When this was gathered, by the clock of this machine.
    begun_at, ended_at : str
        When the first and the last version were committed, by the clocks of those who did.
    state_nbytes : int
        What the last version takes whole.
    metrics : tuple of Metric
        Those that most versions have; `n_metrics` counts all.
    looked_into : tuple of int
        The versions whose deltas were counted.
    layers : tuple of Layer
        Empty if none was looked into.
    moved : tuple of Moved
        The versions whose values were compared with those before.
    largest, slowest : tuple of StoredPartition
        Of the versions looked into: those that take most, and those that were stored last after their version was
        begun.
    groups : tuple of GroupStatus
        Those that follow the line, as they are now.
    """

    store: str
    line: str
    first: int
    last: int
    made_at: str
    begun_at: str
    ended_at: str
    state_nbytes: int
    columns: tuple[Column, ...]
    metrics: tuple[Metric, ...]
    n_metrics: int
    looked_into: tuple[int, ...]
    layers: tuple[Layer, ...]
    moved: tuple[Moved, ...]
    largest: tuple[StoredPartition, ...]
    slowest: tuple[StoredPartition, ...]
    groups: tuple[GroupStatus, ...]

    @property
    def total(self) -> Column:
        """All columns as one."""
        return joined(self.columns)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form: what the page says, in full."""
        return {
            "store": self.store,
            "line": self.line,
            "from": version_name(self.line, self.first),
            "to": version_name(self.line, self.last),
            "made_at": self.made_at,
            "begun_at": self.begun_at,
            "ended_at": self.ended_at,
            "state_nbytes": self.state_nbytes,
            "columns": [item.to_json() for item in self.columns],
            "metrics": [item.to_json() for item in self.metrics],
            "n_metrics": self.n_metrics,
            "looked_into": list(self.looked_into),
            "layers": [item.to_json() for item in self.layers],
            "moved": [item.to_json() for item in self.moved],
            "largest": [item.to_json() for item in self.largest],
            "slowest": [item.to_json() for item in self.slowest],
            "groups": [item.to_json() for item in self.groups],
        }

    def to_html(self) -> str:
        """Return the page: one document that needs nothing else."""
        from dcr_store.report.page import page

        return page(self)


def joined(columns: tuple[Column, ...]) -> Column:
    """Return neighbouring columns, one at least, as one."""
    rates = [rate for item in columns for rate in (item.lowest_rate, item.highest_rate) if rate is not None]
    return Column(
        columns[0].first,
        columns[-1].last,
        sum(item.n_whole for item in columns),
        sum(item.n_expired for item in columns),
        sum(item.changed for item in columns),
        sum(item.elements for item in columns),
        min(rates, default=None),
        max(rates, default=None),
        sum(item.nbytes for item in columns),
        sum(item.state_nbytes for item in columns),
        sum(item.whole_nbytes for item in columns),
        sum(item.dense_nbytes for item in columns),
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
