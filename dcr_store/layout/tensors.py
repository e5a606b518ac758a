"""Tensors as bits and back: numpy and torch tensors as 1-D little-endian uintN views in canonical order.

Bits are never converted: NaN payloads, -0.0 and subnormals pass. Memory is copied only where a tensor is not
contiguous, not aligned, not little-endian, lazily conjugated or on a device. Refuses what has no dtype of format 1 or
no plain storage (objects, text, structured and masked arrays, sparse, quantised, meta and wrapped tensors) with
``InvalidInputError`` that names the tensor. torch is used only if the caller has imported it, or asks for its tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import ml_dtypes
import numpy as np

from dcr_store.errors import InvalidInputError
from dcr_store.layout.dtypes import DTYPES, Bits, dtype, n_elements, uint_dtype

if TYPE_CHECKING:
    import torch

_NUMPY: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F32": np.dtype("<f4"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F64": np.dtype("<f8"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "C64": np.dtype("<c8"),
    "C128": np.dtype("<c16"),
}
_NAMES: Final = {value: name for name, value in _NUMPY.items()}

_TORCH: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
    "BF16": "bfloat16",
    "F16": "float16",
    "U16": "uint16",
    "I16": "int16",
    "F32": "float32",
    "U32": "uint32",
    "I32": "int32",
    "F64": "float64",
    "U64": "uint64",
    "I64": "int64",
    "C64": "complex64",
    "C128": "complex128",
}
_TORCH_NAMES: Final = {f"torch.{value}": name for name, value in _TORCH.items()}


@dataclass(frozen=True, slots=True)
class TensorBits:
    """A tensor's bits.

    Attributes
    ----------
    dtype : str
        As in safetensors.
    shape : tuple of int
        In values.
    bits : ndarray of little-endian uintN, shape (n_elements,)
        Row-major; read-only if the caller's memory is.
    shares_memory : bool
        Whether `bits` is the caller's own memory: it changes with the tensor, and writing it writes the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: Bits
    shares_memory: bool


def as_bits(name: str, tensor: object) -> TensorBits:
    """Return the bits of a tensor, without a copy where its memory already has canonical order.

    Parameters
    ----------
    name : str
        For errors.
    tensor : numpy.ndarray, numpy scalar, or torch.Tensor
        On any device, with any strides. A torch ``float4_e2m1fn_x2`` tensor becomes F4 with twice as many values in
        its last dimension.

    Raises
    ------
    InvalidInputError
        If format 1 cannot hold it; names tensor and dtype.
    """
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(tensor, torch_module.Tensor):
        return _torch_bits(name, tensor)
    if isinstance(tensor, np.ndarray | np.generic):
        return _numpy_bits(name, tensor)
    raise _no_tensor(name, tensor)


def describe(name: str, tensor: object, *, may_be_meta: bool = False) -> tuple[str, tuple[int, ...]]:
    """Return a tensor's dtype and shape, as `as_bits` does and with its errors, without reading its values.

    With `may_be_meta`, of a meta tensor as well, which has no values.
    """
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(tensor, torch_module.Tensor):
        return _describe_torch(name, tensor, may_be_meta=may_be_meta)
    if isinstance(tensor, np.ndarray | np.generic):
        return _describe_numpy(name, tensor)
    raise _no_tensor(name, tensor)


def name_of_torch_dtype(name: str, dtype: object) -> str:
    """Return a torch dtype as in safetensors; ``InvalidInputError`` with the tensor's `name` if format 1 has it not."""
    found = _TORCH_NAMES.get(str(dtype))
    if found is None:
        raise _unsupported(name, dtype)
    return found


def torch_dtypes() -> dict[str, str]:
    """Return torch's dtypes that can be stored, as text, and what they are in safetensors; torch is not asked."""
    return dict(_TORCH_NAMES)


def _describe_numpy(name: str, tensor: np.ndarray[Any, Any] | np.generic[Any]) -> tuple[str, tuple[int, ...]]:
    if isinstance(tensor, np.ma.MaskedArray):
        raise InvalidInputError(
            "is a masked array; fill it first", key=name, expected="an array", found=f"dtype {tensor.dtype}"
        )
    dtype_name = _NAMES.get(tensor.dtype.newbyteorder("<"))
    if dtype_name is None:
        raise _unsupported(name, tensor.dtype)
    return dtype_name, tensor.shape


def _describe_torch(name: str, tensor: torch.Tensor, *, may_be_meta: bool = False) -> tuple[str, tuple[int, ...]]:
    problem = _torch_problem(tensor, may_be_meta=may_be_meta)
    if problem is not None:
        raise InvalidInputError(
            f"is {problem}", key=name, expected="a dense tensor", found=f"a torch tensor of dtype {tensor.dtype}"
        )
    dtype_name = name_of_torch_dtype(name, tensor.dtype)
    shape = tuple(int(size) for size in tensor.shape)
    if dtype_name == "F4":
        if not shape:
            raise InvalidInputError("is a scalar of two packed values; give it a dimension", key=name)
        shape = (*shape[:-1], 2 * shape[-1])
    return dtype_name, shape


def _numpy_bits(name: str, tensor: np.ndarray[Any, Any] | np.generic[Any]) -> TensorBits:
    dtype_name, shape = _describe_numpy(name, tensor)
    array = np.asarray(tensor)
    little = array.dtype.newbyteorder("<")
    ordered = array
    if array.dtype != little:
        ordered = array.byteswap().view(little)
    flat = np.ascontiguousarray(ordered).reshape(-1)
    bits = np.require(flat.view(uint_dtype(DTYPES[dtype_name].space)), requirements="A")
    shares = isinstance(tensor, np.ndarray) and array.size > 0 and bits.ctypes.data == array.ctypes.data
    return TensorBits(dtype_name, shape, bits, shares)


def _torch_bits(name: str, tensor: torch.Tensor) -> TensorBits:
    dtype_name, shape = _describe_torch(name, tensor)
    import torch

    try:
        plain = tensor.detach().resolve_conj().resolve_neg()
        # Copied as integers: torch makes each true bool 1 when it copies, and owes no NaN payload to anybody.
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        if plain.itemsize in integers:
            plain = plain.view(integers[plain.itemsize])
        flat = plain.contiguous().cpu().reshape(-1)
        if flat.numel() <= 1:
            flat = flat.as_strided((flat.numel(),), (1,))  # contiguous with any stride, but not to be viewed as octets
        octets = flat.view(torch.uint8).numpy()
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError(
            f"cannot be read: {error}", key=name, expected="a dense tensor", found=f"dtype {tensor.dtype}"
        ) from error
    bits = np.require(octets.view(uint_dtype(DTYPES[dtype_name].space)), requirements="A")
    shares = octets.size > 0 and tensor.device.type == "cpu" and bits.ctypes.data == tensor.data_ptr()
    return TensorBits(dtype_name, shape, bits, shares)


def _torch_problem(tensor: torch.Tensor, *, may_be_meta: bool = False) -> str | None:
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        return "a parameter that has no shape yet; run the lazy module once"
    if tensor.is_nested:
        return "a nested tensor; give its parts one by one"
    if tensor.layout != torch.strided:
        return f"sparse ({tensor.layout}); use to_dense()"
    if tensor.is_quantized:
        return "quantised; give its int_repr(), scales and zero points as tensors of their own"
    if tensor.is_meta and not may_be_meta:
        return "a meta tensor without data; load it first"
    if hasattr(tensor, "__tensor_flatten__"):  # DTensor and other wrappers hold their data elsewhere
        return f"a {type(tensor).__name__} without storage of its own; give to_local(), full_tensor() or its parts"
    return None


def _no_tensor(name: str, found: object) -> InvalidInputError:
    return InvalidInputError(
        "is no tensor; give a numpy array or a torch tensor", key=name, expected="a tensor", found=type(found).__name__
    )


def _unsupported(name: str, found: object) -> InvalidInputError:
    return InvalidInputError(
        "has a dtype that format 1 cannot store; convert it, or store its bytes as U8",
        key=name,
        expected=f"one of {', '.join(DTYPES)}",
        found=f"dtype {found}",
    )


def to_array(bits: Bits, dtype_name: str, shape: Sequence[int], framework: Literal["numpy", "torch"] = "numpy") -> Any:
    """Return bits as a tensor: the inverse of `as_bits`.

    Parameters
    ----------
    bits : ndarray of uintN, shape (n_elements,)
        As in the space of the dtype.
    dtype_name : str
        As in safetensors.
    shape : sequence of int
        In values.
    framework : {"numpy", "torch"}
        What to return.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        In the memory of `bits`; torch gets a copy of read-only bits, since it has no read-only tensors. BF16 and F8
        come as ml_dtypes in numpy. Where the framework has no packed dtype (F6; F4 in numpy; F4 in torch with an odd
        last dimension) the packed bytes come as a 1-D uint8 array.

    Raises
    ------
    InvalidInputError
        If the bits do not fit dtype and shape, or the framework has no such dtype.
    """
    row = dtype(dtype_name)
    shape = tuple(shape)
    expected = uint_dtype(row.space)
    if bits.dtype != expected or bits.shape != (n_elements(row, shape),):
        raise InvalidInputError(
            f"bits do not fit a tensor of dtype {dtype_name} and shape {shape}",
            expected=f"{expected} of shape ({n_elements(row, shape)},)",
            found=f"{bits.dtype} of shape {bits.shape}",
        )
    if framework == "torch":
        return _to_torch(np.ascontiguousarray(bits), dtype_name, shape)
    if framework != "numpy":
        raise InvalidInputError("there is no such framework", expected="numpy or torch", found=repr(framework))
    return bits if row.packed else np.ascontiguousarray(bits).view(_NUMPY[dtype_name]).reshape(shape)


def _to_torch(bits: Bits, dtype_name: str, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        import torch
    except ImportError as error:
        raise InvalidInputError("torch tensors need torch; pip install dcr-store[torch]") from error

    octets = torch.from_numpy((bits if bits.flags.writeable else bits.copy()).view(np.uint8))
    if dtype_name == "F4":
        if not shape or shape[-1] % 2:
            return octets
        shape = (*shape[:-1], shape[-1] // 2)
    elif dtype_name not in _TORCH:
        return octets
    torch_dtype = getattr(torch, _TORCH[dtype_name], None)
    if torch_dtype is None:
        raise InvalidInputError(f"torch {torch.__version__} has no dtype for {dtype_name}; use a newer one, or numpy")
    return octets.view(torch_dtype).reshape(shape)


def memory_key(tensor: object) -> Hashable | None:
    """Return what two tensors have in common exactly if they are the same view of the same memory: tied tensors.

    Returns
    -------
    hashable or None
        None for a tensor without values or without memory of its own. Keys may be compared only while all tensors
        concerned are alive: memory that was freed is used again.
    """
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(tensor, torch_module.Tensor):
        if _torch_problem(tensor) is not None or tensor.numel() == 0:
            return None
        layout = _dimensions(tensor.shape, tensor.stride())
        return (
            "torch",
            str(tensor.device),
            tensor.data_ptr(),
            layout,
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )
    if isinstance(tensor, np.ndarray) and tensor.size:
        return ("numpy", tensor.ctypes.data, _dimensions(tensor.shape, tensor.strides), tensor.dtype)
    return None


def _dimensions(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return (size, stride) pairs; the stride of a dimension of size 1 means nothing."""
    return tuple((int(size), int(stride) if size > 1 else 0) for size, stride in zip(shape, strides, strict=True))
