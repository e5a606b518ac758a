"""Live tensors as a target: a mapping of names to tensors, or a module's parameters and persistent buffers, in place.

Tensors may be NumPy's or torch's, on any device, of any strides, tied or not, leaves that require gradients or not.
Before anything is written all of them are compared with the layout: missing and further tensors, other dtypes and
shapes, expanded tensors, and memory that two tensors of the version would share are refused, by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from dcr_store.errors import InvalidInputError
from dcr_store.layout.dtypes import DTYPES, Bits, uint_dtype
from dcr_store.layout.layout import Layout, TensorEntry
from dcr_store.layout.tensors import describe, memory_key
from dcr_store.targets.chunks import check_chunk, spoil
from dcr_store.targets.extents import Extent, extent_of, overlapping
from dcr_store.targets.live_tensor import DeviceTensor, LiveTensor, live_tensor
from dcr_store.wording import first_of

if TYPE_CHECKING:
    import torch

_N_SHOWN: Final = 5


class StateDictTarget:
    """Tensors that somebody else owns; satisfies ``ports.ScatterTarget``. Made by ``state_target``.

    A tensor that the version has under several names is found under any of them. Where the names are separate tensors
    here, all are written, and a chunk in which they differ reads as bits that are neither's.
    """

    def __init__(self, layout: Layout, chunk_elements: int, bound: Mapping[str, Sequence[LiveTensor]]) -> None:
        self.layout = layout
        self.chunk_elements = chunk_elements
        self._bound = bound
        self._on_devices = [x for copies in bound.values() for x in copies if isinstance(x, DeviceTensor)]
        self.is_far = bool(self._on_devices)

    def read_chunk(self, space: str, chunk: int, out: Bits) -> None:
        """Copy a chunk's current bits into `out`; zeros where no tensor is."""
        start, stop = check_chunk(self.layout, space, chunk, out, self.chunk_elements, writable=True)
        end, torn = 0, False
        for entry, first, last, offset in self.layout.pieces(space, start, stop):
            out[end:offset] = 0
            end = offset + last - first
            copies = [out[offset:end], *(np.empty_like(out[offset:end]) for _ in self._bound[entry.name][1:])]
            for tensor, copy in zip(self._bound[entry.name], copies, strict=True):
                tensor.read(first, last, copy)
            torn = torn or any(bool((copy != copies[0]).any()) for copy in copies[1:])
        out[end:] = 0
        if torn:
            spoil(out)

    def write_chunk(self, space: str, chunk: int, bits: Bits) -> None:
        """Overwrite a chunk; elements of no tensor are dropped."""
        start, stop = check_chunk(self.layout, space, chunk, bits, self.chunk_elements)
        for entry, first, last, offset in self.layout.pieces(space, start, stop):
            # The copy that counts comes last: interrupted between two copies, the chunk reads as not yet written.
            for tensor in reversed(self._bound[entry.name]):
                tensor.write(first, last, bits[offset : offset + last - first])

    def xor_chunk(
        self, space: str, chunk: int, positions: NDArray[np.uint32], masks: NDArray[np.unsignedinteger]
    ) -> None:
        """XOR masks into elements of a chunk, each where its tensor is; elements of no tensor are passed over.

        Raises
        ------
        InvalidInputError
            If the positions are not ascending ones of the chunk, or the masks do not fit them; nothing was written.
        """
        n = self.chunk_elements
        is_ascending = positions.ndim == 1 and bool(np.all(positions[1:] > positions[:-1]))
        if positions.dtype != np.uint32 or not is_ascending or (len(positions) and positions[-1] >= n):
            raise InvalidInputError(
                f"cannot change elements of chunk {chunk} of space {space}",
                expected=f"ascending positions below {n}, uint32",
                found=f"{positions.dtype} of shape {positions.shape}",
            )
        if masks.dtype != uint_dtype(space) or masks.shape != positions.shape:
            raise InvalidInputError(
                f"cannot change elements of chunk {chunk} of space {space}",
                expected=f"{uint_dtype(space)} of shape {positions.shape}",
                found=f"{masks.dtype} of shape {masks.shape}",
            )
        for entry, first, last, offset in self.layout.pieces(space, chunk * n, (chunk + 1) * n):
            ends = np.array((offset, offset + last - first), np.uint32)  # of another dtype, all would be converted
            inside = slice(*np.searchsorted(positions, ends).tolist())
            if inside.start < inside.stop:
                for tensor in reversed(self._bound[entry.name]):
                    tensor.xor(first, positions[inside] - np.uint32(offset), masks[inside])

    def settle(self) -> None:
        """Wait until everything that was written is there for whoever uses the tensors next."""
        for tensor in self._on_devices:
            tensor.wait()


def state_target(state: object, layout: Layout, chunk_elements: int) -> StateDictTarget:
    """Return live tensors as a target for the versions of a layout.

    Parameters
    ----------
    state : mapping of str to ndarray or torch.Tensor, or torch.nn.Module
        Of a module, what its ``state_dict()`` has.

    Raises
    ------
    InvalidInputError
        If the tensors are not exactly the layout's, or cannot be written in place; names them. Nothing was written.
    """
    tensors = tensors_of(state)
    chosen = _choose(tensors, layout)
    bound = {name: [live_tensor(copy, tensors[copy]) for copy in copies] for name, copies in chosen.items()}
    return StateDictTarget(layout, chunk_elements, bound)


def tensors_of(state: object) -> dict[str, Any]:
    """Return the tensors of a mapping or module by name.

    Raises
    ------
    InvalidInputError
        If `state` is neither, or a module's ``state_dict()`` shows a tensor that is not the module's own memory.
    """
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(state, torch_module.nn.Module):
        return _module_tensors(state)
    if isinstance(state, Mapping):
        return dict(state)
    raise InvalidInputError(
        "holds no tensors by name",
        key="target",
        expected="a mapping of names to tensors, or a torch module",
        found=type(state).__name__,
    )


def _module_tensors(module: torch.nn.Module) -> dict[str, Any]:
    import torch

    # Also of buffers that are not persistent: a module may show them under another name.
    own = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*module.parameters(), *module.buffers())
        if not hasattr(tensor, "__tensor_flatten__") and not torch.nn.parameter.is_lazy(tensor)
    }
    result = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue  # extra state of a module that keeps more than tensors
        describe(name, tensor)
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in own:
            raise InvalidInputError(
                "is made by the module when it is asked for its state, and writing to it would change nothing; give a "
                "mapping of the tensors that the version has",
                key=name,
                expected="a parameter or buffer of the module",
                found="memory of none",
            )
        result[name] = tensor
    return result


def _choose(tensors: Mapping[str, Any], layout: Layout) -> dict[str, list[str]]:
    """Return for each tensor of the layout the names of its separate copies in memory, the first one counting."""
    chosen: dict[str, list[str]] = {}
    seen = set()
    extents: dict[str, Extent] = {}
    missing, wrong = [], []
    for entry in layout.tensors:
        names = [name for name in (entry.name, *entry.aliases) if name in tensors]
        if not names:
            missing.append(repr(entry.name))
        copies: dict[Any, str] = {}
        for name in names:
            dtype, shape = describe(name, tensors[name])
            if not _is_same(entry, dtype, shape):
                wrong.append(
                    f"{name!r}, which has dtype {dtype} and shape {shape} here, {entry.dtype} and {entry.shape} there"
                )
                continue
            key = memory_key(tensors[name])
            seen.add(key)
            copies.setdefault(key, name)
            extent = extent_of(tensors[name])
            if extent is not None and copies[key] == name:
                extents[name] = extent
        chosen[entry.name] = list(copies.values())
    known = set(layout.names())
    foreign = [repr(name) for name in tensors if name not in known and not _is_tied(name, tensors[name], seen)]
    problems = {
        "missing here:": missing,
        "not in the version (give a mapping without them):": foreign,
        "of another dtype or shape:": wrong,
        "several of its elements are the same memory (give contiguous tensors):": list(_expanded(extents)),
        "sharing memory, though not one tensor in the version (untie them):": list(_shared(extents)),
    }
    if any(problems.values()):
        listed = "; ".join(f"{what} {first_of(names, _N_SHOWN)}" for what, names in problems.items() if names)
        raise InvalidInputError(
            f"the tensors are not those of the version; nothing was written: {listed}",
            expected=f"{len(layout.tensors)} tensors as in the version",
            found=f"{sum(map(len, problems.values()))} that are not, {len(tensors)} in all",
        )
    return chosen


def _is_same(entry: TensorEntry, dtype: str, shape: tuple[int, ...]) -> bool:
    if (dtype, shape) == (entry.dtype, entry.shape):
        return True
    return DTYPES[entry.dtype].packed and (dtype, shape) == ("U8", (entry.n_elements,))  # as versions are read


def _is_tied(name: str, tensor: object, seen: set[Any]) -> bool:
    """Whether a tensor that the version does not name is a further name of one that it has."""
    describe(name, tensor)
    key = memory_key(tensor)
    return key is not None and key in seen


def _expanded(extents: Mapping[str, Extent]) -> Iterator[str]:
    return (repr(name) for name, extent in extents.items() if extent.overlaps_itself)


def _shared(extents: Mapping[str, Extent]) -> Iterator[str]:
    return (f"{a!r} and {b!r}" for a, b in overlapping(extents))
