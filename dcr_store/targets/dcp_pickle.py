"""The pickles of a torch distributed checkpoint (DCP), read as plain data: no class of torch's, no code of the file's.

A checkpoint may come from anybody, and a pickle may call whatever it names. Here each name that DCP and ``torch.save``
use for tensors stands for a record of ours; any other is refused by name. torch is not imported.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dcr_store.errors import FormatError
from dcr_store.layout.dtypes import shown
from dcr_store.layout.tensors import torch_dtypes

_DCP: Final = "torch.distributed.checkpoint"
_ADVICE: Final = "load it with torch where you trust it, and save it again"
# What no version can hold, but torch can name: refused where a tensor has it, with the tensor's name.
_MORE_DTYPES: Final = ("complex32", "qint8", "quint8", "qint32", "quint4x2", "quint2x4")
_STORAGES: Final = {
    "BoolStorage": "BOOL",
    "ByteStorage": "U8",
    "CharStorage": "I8",
    "ShortStorage": "I16",
    "IntStorage": "I32",
    "LongStorage": "I64",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "C128",
}


class _Record:
    """An object of the pickle, with its fields."""

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
            raise pickle.UnpicklingError("an object's fields are no mapping")
        self.__dict__.update({key: value for key, value in state.items() if not key.startswith("__")})


class _Properties(_Record):
    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or not state:
            raise pickle.UnpicklingError("a tensor's properties are no tuple")
        self.dtype = state[0]


class _Index(_Record):
    """The place of a tensor's chunk; a key of mappings."""

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and self._key() == other._key()

    def _key(self) -> Hashable:
        return getattr(self, "fqn", None), getattr(self, "offset", None)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as ``torch.save`` wrote it.

    Attributes
    ----------
    storage : str
        The name of its storage in the archive.
    dtype : str
        As in safetensors, or as torch says it where there is no such.
    offset : int
        Of its first value in the storage, in values.
    shape, strides : tuple of int
        In values.
    """

    storage: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Call:
    """A function that a pickle may call, and do nothing else with: of a function itself, it could change the fields."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a function is given fields")


@_Call
def _get_layout(name: str) -> str:
    return name


@_Call
def _path(*parts: str) -> str:
    return "/".join(parts)


@_Call
def _number(value: int) -> int:
    return value


@_Call
def _member(of: object, name: object) -> object:
    """``getattr``, by which Python before 3.11.4 pickles members of enumerations: for the one that DCP has, no more."""
    if of is not _number or not isinstance(name, str):
        raise pickle.UnpicklingError("asks for an attribute of what is no enumeration")
    return name


def _dtypes() -> dict[tuple[str, str], Any]:
    known = {("torch", name.removeprefix("torch.")): name for name in torch_dtypes()}
    return known | {("torch", name): f"torch.{name}" for name in _MORE_DTYPES}


_METADATA: Final[dict[tuple[str, str], Any]] = _dtypes() | {
    **{
        (f"{_DCP}.metadata", name): _Record
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "StorageMeta",
        )
    },
    (f"{_DCP}.metadata", "TensorProperties"): _Properties,
    (f"{_DCP}.metadata", "MetadataIndex"): _Index,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _number,
    ("builtins", "getattr"): _member,
    (f"{_DCP}.filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _get_layout,
    **{("pathlib", name): _path for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")},
    **{("pathlib._local", name): _path for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")},
}


@_Call
def _rebuild_v2(
    storage: tuple[str, str | None],
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: object = None,
    hooks: object = None,
    views: object = None,
) -> StoredTensor:
    return _stored(storage, offset, shape, strides, storage[1], views)


@_Call
def _rebuild_v3(
    storage: tuple[str, str | None],
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: object,
    hooks: object,
    dtype: object,
    views: object = None,
) -> StoredTensor:
    return _stored(storage, offset, shape, strides, dtype, views)


def _stored(
    storage: tuple[str, str | None],
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: object,
    views: object,
) -> StoredTensor:
    if views:
        raise pickle.UnpicklingError("a lazily conjugated or negated tensor, or one of a class of its own")
    return StoredTensor(storage[0], str(dtype), offset, tuple(shape), tuple(strides))


def _is_sound(tensor: StoredTensor) -> bool:
    """Return whether the numbers can be those of a tensor; asked last, since a pickle can change what it has made."""
    if not all(type(item) is tuple for item in (tensor.shape, tensor.strides)):
        return False
    numbers = (tensor.offset, *tensor.shape, *tensor.strides)
    return all(type(number) is int and number >= 0 for number in numbers) and len(tensor.shape) == len(tensor.strides)


@_Call
def _rebuild_parameter(data: StoredTensor, requires_grad: object = None, hooks: object = None) -> StoredTensor:
    return data


@_Call
def _no_hooks(*nothing: object) -> dict[str, object]:
    if nothing:
        raise pickle.UnpicklingError("a tensor has hooks")
    return {}


_TENSORS: Final[dict[tuple[str, str], Any]] = _dtypes() | {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch", "Size"): tuple,
    ("torch.storage", "UntypedStorage"): "",
    ("collections", "OrderedDict"): _no_hooks,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, known: Mapping[tuple[str, str], Any], key: str) -> None:
        super().__init__(io.BytesIO(data))
        self._known, self._key = known, key

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._known[module, name]
        except KeyError:
            raise FormatError(
                f"names something that no tensor needs, and is not called; {_ADVICE}",
                key=self._key,
                expected="what DCP writes for tensors",
                found=shown(f"{module}.{name}"),
            ) from None

    def persistent_load(self, pid: Any) -> tuple[str, str | None]:
        if not isinstance(pid, tuple) or len(pid) < 3 or pid[0] != "storage" or not isinstance(pid[1], str):
            raise pickle.UnpicklingError("refers to something that is no storage")
        return str(pid[2]), pid[1] or None


def read_metadata(data: bytes, key: str) -> Any:
    """Return the ``Metadata`` of a checkpoint as plain records; dtypes are text, as ``str(torch.bfloat16)``.

    Raises
    ------
    FormatError
        If it is no metadata, or names what DCP does not.
    """
    found = _load(data, _METADATA, key)
    if not isinstance(getattr(found, "state_dict_metadata", None), dict) or not isinstance(
        getattr(found, "storage_data", None), dict
    ):
        raise FormatError(
            "is no metadata of a distributed checkpoint; save the checkpoint again",
            key=key,
            expected="state_dict_metadata and storage_data",
            found=type(found).__name__,
        )
    return found


def read_tensor(data: bytes, key: str) -> StoredTensor:
    """Return what a ``data.pkl`` of ``torch.save`` says of its tensor; ``FormatError`` if it is of none."""
    found = _load(data, _TENSORS, key)
    if not isinstance(found, StoredTensor):
        raise FormatError("holds no tensor", key=key, expected="a dense tensor", found=type(found).__name__)
    if not _is_sound(found):
        raise FormatError("holds a tensor whose shape is none", key=key, expected="numbers", found=shown(str(found)))
    return found


def _load(data: bytes, known: Mapping[tuple[str, str], Any], key: str) -> Any:
    try:
        return _Unpickler(data, known, key).load()
    except FormatError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise FormatError(
            f"cannot be read: {type(error).__name__}: {error}; save the checkpoint again",
            key=key,
            expected="a pickle of DCP's",
            found=f"{len(data)} bytes",
        ) from error
