"""Dollars and seconds of a history, and of full checkpoints beside it, for simulate_scale.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scale_history import History
from scale_version import Version
from scale_writer import Clock

from dcr_store.objects.transfer import N_PARALLEL
from dcr_store.publish.partitions import PARTITION_NBYTES
from dcr_store.publish.uploads import N_UPLOADS

GB = 1e9


@dataclass(frozen=True)
class Prices:
    """Dollars: of a request, of a GB stored for a month, of a GB moved to another region."""

    put: float
    get: float
    stored: float
    moved: float


@dataclass(frozen=True)
class Bill:
    """Dollars for all versions."""

    requests: float
    storage: float
    transfer: float

    @property
    def total(self) -> float:
        return self.requests + self.storage + self.transfer


def bill_of(version: Version, history: History, prices: Prices, months: float, n_regions: int) -> Bill:
    """Return what all versions cost, each fetched once by each region, whose receivers a relay serves."""
    puts = version.puts + version.lists
    gets = version.gets + n_regions * version.receiver_gets
    return Bill(
        history.n_versions * (puts * prices.put + gets * prices.get),
        history.nbytes / GB * prices.stored * months,
        history.n_versions * max(0, n_regions - 1) * version.receiver_nbytes / GB * prices.moved,
    )


def full_bill(nbytes: int, n_versions: int, n_writers: int, prices: Prices, months: float, n_regions: int) -> Bill:
    part = PARTITION_NBYTES
    n_parts = math.ceil(nbytes / n_writers / part) * n_writers
    return Bill(
        n_versions * (n_parts * prices.put + n_regions * n_parts * prices.get),
        n_versions * nbytes / GB * prices.stored * months,
        n_versions * max(0, n_regions - 1) * nbytes / GB * prices.moved,
    )


def full_seconds(nbytes: int, n_writers: int, clock: Clock) -> tuple[float, float]:
    """Return how long the writers take to upload a full checkpoint, and a receiver to fetch it."""
    n_uploads, part = N_UPLOADS, PARTITION_NBYTES
    each = nbytes / n_writers
    speed = min(n_uploads * clock.connection, clock.node / clock.writers_per_node)
    send_s = clock.first_byte_s * math.ceil(each / part / n_uploads) + each / speed
    return send_s, clock.first_byte_s + nbytes / min(N_PARALLEL * clock.connection, clock.node)
