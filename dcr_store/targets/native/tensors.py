"""The tensors that a loader is given: a mask, or the values of a tensor that cannot be moved bit for bit.

Both take part in every operator that touches them, in whatever thread, and hand it to the load in progress. A mask has
no storage, so that what reads memory directly fails; torch also refuses to make it a parameter's data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from dcr_store.targets.native.moves import DEVICE, tensors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dcr_store.targets.native.load import Load


class MaskTensor(torch.Tensor):
    """A mask in the guise of the tensor that it changes.

    Attributes
    ----------
    bits : torch.Tensor
        Integers of the width, shape and strides of the guise: the mask, or new bits where `present`. On the meta
        device where nothing changes, or in a rehearsal.
    present : torch.Tensor or None
        bool, of the same shape: where `bits` are absolute; None if nowhere.
    names : frozenset of str
        The checkpoint's tensors that it was made of.
    root : str or None
        The layout's tensor of whose bits these are a view; None after a copy.
    """

    bits: torch.Tensor
    present: torch.Tensor | None
    names: frozenset[str]
    root: str | None
    load: Load

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        bits: torch.Tensor,
        present: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        names: frozenset[str],
        root: str | None,
        load: Load,
    ) -> MaskTensor:
        """Make a mask; see the attributes."""
        # The keys are those of a meta tensor: set_data refuses to put one in the place of a tensor with memory.
        mask: MaskTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            bits.size(),
            strides=bits.stride(),
            storage_offset=bits.storage_offset(),
            dtype=dtype,
            device=torch.device("meta"),
            dispatch_device=True,
        )
        mask.bits, mask.present, mask.names, mask.root = bits, present, names, root
        mask.load, mask._device = load, device
        return mask

    def __init__(self, *_: object) -> None:
        super().__init__()

    _device: torch.device

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Hand the operator to the load."""
        if func is DEVICE:
            return args[0]._device
        return _load_of(args, kwargs).operate(func, args, kwargs or {})

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        """Whether the guise is on the CPU."""
        return self._device.type == "cpu"

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Whether the guise is on a GPU."""
        return self._device.type == "cuda"

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """False: the guise has values."""
        return False

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"<mask of {', '.join(sorted(self.names))}: {self.dtype} {tuple(self.shape)}>"

    def _refuse(self, what: str) -> NoReturn:
        self.load.refuse(self.names, f"is asked for {what}")

    def numpy(self, *_: object, **__: object) -> NoReturn:
        """Refuse."""
        self._refuse("its memory")

    def tolist(self) -> NoReturn:
        """Refuse."""
        self._refuse("its values")

    def item(self) -> NoReturn:
        """Refuse."""
        self._refuse("its value")

    def data_ptr(self) -> NoReturn:
        """Refuse."""
        self._refuse("its address")

    def untyped_storage(self) -> NoReturn:
        """Refuse."""
        self._refuse("its storage")

    def share_memory_(self) -> NoReturn:
        """Refuse."""
        self._refuse("its storage")

    def __array__(self, *_: object, **__: object) -> NoReturn:
        self._refuse("its memory")

    def __dlpack__(self, *_: object, **__: object) -> NoReturn:
        self._refuse("its memory")


class ValueTensor(torch.Tensor):
    """The values of a tensor that is loaded as it is, followed to where they are written.

    Attributes
    ----------
    plain : torch.Tensor
        The same memory, as an ordinary tensor.
    names : frozenset of str
        The checkpoint's tensors that it was computed from.
    """

    plain: torch.Tensor
    names: frozenset[str]
    load: Load

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, plain: torch.Tensor, names: frozenset[str], load: Load) -> ValueTensor:
        """Wrap a tensor, without a copy."""
        value: ValueTensor = torch.Tensor._make_subclass(cls, plain)
        value.plain, value.names, value.load = plain, names, load
        return value

    def __init__(self, *_: object) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Hand the operator to the load."""
        return _load_of(args, kwargs).operate(func, args, kwargs or {})

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"<values of {', '.join(sorted(self.names))}: {self.plain!r}>"

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Return the values as torch does."""
        self.load.note_thread()
        return self.plain.numpy(*args, **kwargs)

    def tolist(self) -> Any:
        """Return the values as torch does."""
        return self.plain.tolist()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        self.load.note_thread()
        return self.plain.numpy().__array__(*args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        self.load.note_thread()
        return self.plain.__dlpack__(*args, **kwargs)


def _load_of(args: object, kwargs: object) -> Load:
    """Return the load of the first followed tensor among operands."""
    for tensor in tensors([args, kwargs or {}]):
        if isinstance(tensor, MaskTensor | ValueTensor):
            return tensor.load
    raise AssertionError("an operator without a followed tensor was handed here")
