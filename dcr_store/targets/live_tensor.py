"""One tensor's own memory as elements of a space, in row-major order: read and changed in place, wherever it is.

Memory of the host is seen through one NumPy view of any strides. Memory of a device is changed there: whole ranges are
copied to it, single elements by masks and their indices. Refuses tensors whose memory cannot be written in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dcr_store.codec import kernels
from dcr_store.errors import InvalidInputError
from dcr_store.layout.dtypes import Bits

if TYPE_CHECKING:
    import torch

_SIGNED: Final = {1: np.dtype(np.uint8), 2: np.dtype(np.int16), 4: np.dtype(np.int32), 8: np.dtype(np.int64)}


class LiveTensor(Protocol):
    """A tensor of `n` elements; ranges ``[first, last)`` are of them."""

    def read(self, first: int, last: int, out: Bits) -> None:
        """Copy elements into `out`, uintN of shape (last - first,)."""

    def write(self, first: int, last: int, bits: Bits) -> None:
        """Overwrite elements by `bits`, uintN of shape (last - first,)."""

    def xor(self, first: int, positions: NDArray[np.uint32], masks: Bits) -> None:
        """XOR `masks` into the elements at ``first + positions``, which are distinct and within the tensor."""


def boxes(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[slice, ...]]:
    """Cut a range of the elements of an array, in row-major order, into boxes: at most two for each dimension.

    Yields
    ------
    tuple of slice
        Indices of one box; boxes in order, and the elements of each in row-major order, make up the range.
    """
    if first >= last:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    (row, start), (last_row, stop) = divmod(first, inner), divmod(last, inner)
    if row == last_row:
        yield from ((slice(row, row + 1), *rest) for rest in boxes(shape[1:], start, stop))
        return
    if start:
        yield from ((slice(row, row + 1), *rest) for rest in boxes(shape[1:], start, inner))
        row += 1
    if row < last_row:
        yield (slice(row, last_row),)
    yield from ((slice(last_row, last_row + 1), *rest) for rest in boxes(shape[1:], 0, stop))


class HostTensor:
    """A tensor in the memory of the host; satisfies ``LiveTensor``.

    Parameters
    ----------
    elements : ndarray of uintN
        A writable view of the tensor's memory, of any strides: see ``numpy_elements`` and ``torch_elements``.
    owner : torch.Tensor, optional
        Whose memory it is: autograd is told of changes, so that a backward pass over the old values fails, as ever.
    """

    def __init__(self, elements: Bits, owner: torch.Tensor | None = None) -> None:
        self._elements = elements
        self._owner = owner
        # Of an array with contiguous memory `reshape` makes a view, so what is written to it is written to the tensor.
        self._flat = elements.reshape(-1) if elements.flags.c_contiguous else None

    def read(self, first: int, last: int, out: Bits) -> None:
        """Copy elements into `out`."""
        if self._flat is not None:
            out[:] = self._flat[first:last]
            return
        done = 0
        for box in boxes(self._elements.shape, first, last):
            part = self._elements[box]
            out[done : done + part.size].reshape(part.shape)[...] = part
            done += part.size

    def write(self, first: int, last: int, bits: Bits) -> None:
        """Overwrite elements."""
        self._tell()
        if self._flat is not None:
            self._flat[first:last] = bits
            return
        done = 0
        for box in boxes(self._elements.shape, first, last):
            part = self._elements[box]
            part[...] = bits[done : done + part.size].reshape(part.shape)
            done += part.size

    def xor(self, first: int, positions: NDArray[np.uint32], masks: Bits) -> None:
        """XOR masks into elements."""
        self._tell()
        if self._flat is not None:
            kernels.engine().xor_at(self._flat[first:], positions, masks)
        else:
            index = positions.astype(np.int64) + first
            self._elements[np.unravel_index(index, self._elements.shape)] ^= masks

    def _tell(self) -> None:
        if self._owner is not None:
            import torch

            torch.autograd.graph.increment_version(self._owner)


class DeviceTensor:
    """A torch tensor of any device; satisfies ``LiveTensor``.

    Nothing larger than what is read, written or XORed is made on the host or on the device.

    Parameters
    ----------
    elements : torch.Tensor
        Its memory as signed integers (bytes: unsigned), of any strides: see ``torch_elements``.
    """

    def __init__(self, elements: torch.Tensor) -> None:
        self._elements = elements
        self._is_flat = elements.is_contiguous()

    def read(self, first: int, last: int, out: Bits) -> None:
        """Copy elements into `out`."""
        self._copy(first, last, out, to_host=True)

    def write(self, first: int, last: int, bits: Bits) -> None:
        """Overwrite elements."""
        self._copy(first, last, bits if bits.flags.writeable else bits.copy(), to_host=False)

    def _copy(self, first: int, last: int, bits: Bits, *, to_host: bool) -> None:
        import torch

        host = _as_torch(bits)
        with torch.inference_mode(self._elements.is_inference()):
            done = 0
            whole = self._elements.view(-1) if self._is_flat else self._elements
            for box in boxes(whole.shape, first, last):
                part = whole[box]
                piece = host[done : done + part.numel()].view(part.shape)
                if to_host:
                    piece.copy_(part)
                else:
                    part.copy_(piece)
                done += part.numel()

    def xor(self, first: int, positions: NDArray[np.uint32], masks: Bits) -> None:
        """XOR masks into elements, on the device."""
        import torch

        whole, device = self._elements, self._elements.device
        places: tuple[torch.Tensor, ...]
        with torch.inference_mode(whole.is_inference()):
            # Counted from `first`, less than a chunk: 32 bits are enough for the way, and 64 for the tensor's length.
            index = torch.from_numpy(positions.astype(np.int32)).to(device).long() + first
            new = _as_torch(masks if masks.flags.writeable else masks.copy()).to(device)
            if self._is_flat:
                whole, places = whole.view(-1), (index,)
            else:
                places = torch.unravel_index(index, whole.shape)
            whole.index_put_(places, whole[places] ^ new)

    def wait(self) -> None:
        """Return when what was written is there: reading an element back waits for what was asked for before."""
        first = self._elements[(slice(0, 1),) * self._elements.ndim]
        first.cpu()


def numpy_elements(name: str, array: np.ndarray[Any, Any]) -> Bits:
    """Return a writable view of an array's memory as elements: uintN, of the array's strides.

    Raises
    ------
    InvalidInputError
        If the array is read-only or not in native byte order; names it.
    """
    if not isinstance(array, np.ndarray) or not array.flags.writeable:
        raise InvalidInputError(
            "cannot be written; give an array of your own memory (a copy of it)",
            key=name,
            expected="a writable array",
            found="a read-only one" if isinstance(array, np.ndarray) else type(array).__name__,
        )
    if not array.dtype.isnative:
        raise InvalidInputError(
            "is not in native byte order; convert it with array.astype(array.dtype.newbyteorder('='))",
            key=name,
            expected="native byte order",
            found=f"dtype {array.dtype.str}",
        )
    plain = array.view(np.ndarray)
    if plain.dtype.itemsize <= 8:
        return plain.view(f"u{plain.dtype.itemsize}")
    halves = plain.real.view(np.uint64)  # complex128: real and imaginary part, 8 bytes apart
    return np.lib.stride_tricks.as_strided(halves, (*plain.shape, 2), (*plain.strides, 8))


def torch_elements(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's memory as elements: signed integers (bytes: unsigned), of the tensor's strides.

    Raises
    ------
    InvalidInputError
        If the tensor is a lazy view whose memory holds other values; names it.
    """
    import torch

    if tensor.is_conj() or tensor.is_neg():
        raise InvalidInputError(
            "is a conjugated or negated view of other values; give resolve_conj().resolve_neg()",
            key=name,
            expected="a tensor that holds its own values",
            found=f"a lazy view of dtype {tensor.dtype}",
        )
    plain = tensor.detach()  # shares memory and version counter, and is no leaf that autograd guards
    if plain.itemsize == 16:
        plain = torch.view_as_real(plain)
    return plain.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.itemsize])


def live_tensor(name: str, tensor: object) -> LiveTensor:
    """Return a tensor's memory: of the host where it is there, else of its device.

    Parameters
    ----------
    name : str
        For errors.
    tensor : ndarray or torch.Tensor
        That ``layout.tensors.describe`` accepts.
    """
    if isinstance(tensor, (np.ndarray, np.generic)):
        return HostTensor(numpy_elements(name, tensor))  # type: ignore[arg-type]
    elements = torch_elements(name, tensor)  # type: ignore[arg-type]
    if not is_on_host(elements):
        return DeviceTensor(elements)
    return HostTensor(elements.numpy().view(f"u{elements.itemsize}"), elements)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether a torch tensor's memory is the host's."""
    return tensor.device.type == "cpu"


def _as_torch(bits: Bits) -> torch.Tensor:
    import torch

    return torch.from_numpy(bits.view(_SIGNED[bits.dtype.itemsize]))
