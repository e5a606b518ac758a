"""Digests of the blocks of a module's memory, over the bytes that masks are moved into; advanced with each mask.

A rank may hold any part of a canonical chunk, so a live module is checked by blocks of its own storage. The digest of a
block is CRC-64/NVME of its bytes, those that no mask is moved into taken as zeros: they may change while an engine
runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dcr_store.codec.digest import crc64, linear, zeros_digest
from dcr_store.targets.native.geometry import Geometry, Runs, union

if TYPE_CHECKING:
    from dcr_store.targets.native.memory import Region

BLOCK_NBYTES: Final = 1 << 20
_N_TOGETHER: Final = 64
_ZEROS: Final = np.zeros(BLOCK_NBYTES, np.uint8)


def blocks_of(place: Geometry) -> range:
    """Return the indices of the blocks of its region that a view's span meets."""
    return range(place.start // BLOCK_NBYTES, (place.stop - 1) // BLOCK_NBYTES + 1)


class Block(NamedTuple):
    """A block of a region: their indices."""

    region: int
    block: int


class Blocks:
    """The digests that the blocks of a module's memory ought to have.

    Parameters
    ----------
    regions : sequence of Region
    writes : iterable of (int, Geometry)
        Region and geometry of all that masks are moved into.
    pool : Executor
        For work at memory speed.
    """

    def __init__(self, regions: Sequence[Region], writes: Iterable[tuple[int, Geometry]], pool: Executor) -> None:
        self._regions = regions
        self._pool = pool
        self._lock = threading.Lock()
        places: dict[int, list[Geometry]] = {}
        for region, place in writes:
            places.setdefault(region, []).append(place)
        self._covered: dict[int, Runs] = {region: union(found) for region, found in places.items()}
        self._digests: dict[Block, int] = {}
        self._pending: dict[Block, int] = {}
        self._refilled: frozenset[Block] | None = None

    def take(self) -> None:
        """Take the digests from the memory as it is."""
        self._digests = dict(self._read())
        self._pending = {}

    def zero(self, blocks: Iterable[Block] | None = None) -> None:
        """Expect zeros in blocks, all by default: whole values are added next.

        What is added until `advance` or `forget` then counts in these blocks alone: the values of a tensor reach into
        others too, which have them already.
        """
        if blocks is None:
            self._digests, self._refilled, found = {}, None, list(self._all())
        else:
            found = list(blocks)
            self._refilled = frozenset(found)
        for block in found:
            self._digests[block] = zeros_digest(self._n_bytes(block))

    def add(self, region: int, place: Geometry, image: NDArray[np.uint8]) -> None:
        """Say that bytes change by a mask.

        Parameters
        ----------
        place : Geometry
            Which bytes.
        image : ndarray of uint8, shape (place.stop - place.start,)
            The mask from the first byte to the last, zeros between them where the view has none.
        """
        found = [
            (Block(region, index), part)
            for index, part in _contributions(place.start, image, self._regions[region].nbytes)
            if part
        ]
        with self._lock:
            for block, part in found:
                if self._refilled is None or block in self._refilled:
                    self._pending[block] = self._pending.get(block, 0) ^ part

    def advance(self) -> None:
        """Expect what was added."""
        for block, part in self._pending.items():
            self._digests[block] ^= part
        self.forget()

    def forget(self) -> None:
        """Expect what was expected before anything was added."""
        self._pending, self._refilled = {}, None

    def failing(self, blocks: Iterable[Block] | None = None) -> list[Block]:
        """Return the blocks (of all, by default) whose bytes are not as expected, ascending."""
        return sorted(block for block, digest in self._read(blocks) if digest != self._digests[block])

    def _n_bytes(self, block: Block) -> int:
        return min(BLOCK_NBYTES, self._regions[block.region].nbytes - block.block * BLOCK_NBYTES)

    def _all(self) -> Iterator[Block]:
        for region, covered in self._covered.items():
            firsts, lasts = covered.starts // BLOCK_NBYTES, (covered.stops - 1) // BLOCK_NBYTES
            touched = np.zeros(-(-self._regions[region].nbytes // BLOCK_NBYTES) + 1, np.int64)
            np.add.at(touched, firsts, 1)
            np.add.at(touched, lasts + 1, -1)
            for index in np.flatnonzero(np.cumsum(touched)).tolist():
                yield Block(region, index)

    def _read(self, blocks: Iterable[Block] | None = None) -> Iterator[tuple[Block, int]]:
        groups: dict[tuple[int, int], list[Block]] = {}
        for block in self._all() if blocks is None else blocks:
            groups.setdefault((block.region, block.block // _N_TOGETHER), []).append(block)
        for found in self._pool.map(self._read_group, groups.values()):
            yield from found

    def _read_group(self, blocks: list[Block]) -> list[tuple[Block, int]]:
        first, last = blocks[0].block * BLOCK_NBYTES, (blocks[-1].block + 1) * BLOCK_NBYTES
        octets = self._regions[blocks[0].region].octets[first:last].cpu().numpy()
        found = []
        for block in blocks:
            start = block.block * BLOCK_NBYTES - first
            found.append((block, self._digest(block, octets[start : start + BLOCK_NBYTES])))
        return found

    def _digest(self, block: Block, octets: NDArray[np.uint8]) -> int:
        covered = self._covered[block.region]
        start = block.block * BLOCK_NBYTES
        low = int(np.searchsorted(covered.stops, start, side="right"))
        high = int(np.searchsorted(covered.starts, start + len(octets), side="left"))
        starts = np.maximum(covered.starts[low:high] - start, 0)
        stops = np.minimum(covered.stops[low:high] - start, len(octets))
        if len(starts) == 1 and starts[0] == 0 and stops[0] == len(octets):
            return crc64(octets)
        edges = np.zeros(len(octets) + 1, np.int8)
        edges[starts] += 1
        edges[stops] -= 1
        return crc64(np.where(np.cumsum(edges[:-1], dtype=np.int8) != 0, octets, np.uint8(0)))


def image_of(changes: torch.Tensor, like: torch.Tensor, place: Geometry) -> NDArray[np.uint8]:
    """Return the bytes of a mask as they lie in memory, from the first to the last, with zeros in gaps.

    Parameters
    ----------
    changes : torch.Tensor
        Integers.
    like : torch.Tensor
        The view that they are XORed into, of the same shape and width, whose geometry is `place`.
    """
    order = sorted(range(like.dim()), key=lambda dim: (like.stride(dim), like.size(dim)), reverse=True)
    ordered = changes.permute(order)
    if place.is_run:
        flat = ordered.contiguous().reshape(-1)
    else:
        flat = torch.zeros((place.stop - place.start) // like.itemsize, dtype=changes.dtype, device=changes.device)
        flat.as_strided([like.size(dim) for dim in order], [like.stride(dim) for dim in order]).copy_(ordered)
    octets: NDArray[np.uint8] = flat.cpu().view(torch.uint8).numpy()
    return octets


def _contributions(start: int, image: NDArray[np.uint8], nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield block index and L of what of an image at `start` lies in the block."""
    for index in range(start // BLOCK_NBYTES, (start + len(image) - 1) // BLOCK_NBYTES + 1):
        block, length = index * BLOCK_NBYTES, min(BLOCK_NBYTES, nbytes - index * BLOCK_NBYTES)
        low, high = max(block, start), min(block + length, start + len(image))
        digest = crc64(image[low - start : high - start], zeros_digest(low - block))
        if high < block + length:
            digest = crc64(_ZEROS[: block + length - high], digest)
        yield index, linear(digest, length)
