"""Parts of tensors as NumPy's basic indices name them: ``x[3, 0:64, ..., ::-1]``, from Python or from a command line.

Pure, and parsed without NumPy. Refuses what NumPy refuses, and what is no basic index (arrays, masks, None), naming the
tensor.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Final, TypeAlias

from dcr_store.errors import InvalidInputError

if TYPE_CHECKING:
    from dcr_store.layout.affine_map import AffineMap

Index: TypeAlias = "int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]"

_NUMBER: Final = r"-?[0-9]{1,19}"
_PART: Final = re.compile(rf"(\.\.\.)|({_NUMBER})|({_NUMBER})?\s*:\s*({_NUMBER})?\s*(?::\s*({_NUMBER})?)?")
_NAMED: Final = re.compile(r"(?P<name>.+?)\[(?P<index>[^\[\]]*)\]", re.DOTALL)
_UNCLOSED: Final = re.compile(r".+\[[-0-9:., ]*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Selection:
    """What an index selects of a tensor.

    Attributes
    ----------
    offsets, steps, sizes : tuple of int
        For each dimension: the first value, the distance to the next (1 or more), how many.
    flipped : tuple of int
        Dimensions in which they are wanted in the other order.
    shape : tuple of int
        What an array of it has: without the dimensions in which one number was given.
    """

    offsets: tuple[int, ...]
    steps: tuple[int, ...]
    sizes: tuple[int, ...]
    flipped: tuple[int, ...]
    shape: tuple[int, ...]

    def affine_map(self, name: str, dtype: str, shape: Sequence[int]) -> AffineMap:
        """Return where its values, of shape `sizes` and not flipped, lie in the tensor."""
        from dcr_store.layout.affine_map import AffineMap
        from dcr_store.layout.slices import boxes_between, strides_of

        strides = strides_of(shape)
        there = [stride * step for stride, step in zip(strides, self.steps, strict=True)]
        origin = sum(stride * offset for stride, offset in zip(strides, self.offsets, strict=True))
        boxes = boxes_between(self.sizes, strides_of(self.sizes), [0] * len(self.sizes), there, [0] * len(self.sizes))
        return AffineMap.of(dtype, self.sizes, {name: shape}, {name: [item.moved(there=origin) for item in boxes]})


def select(name: str, shape: Sequence[int], index: Index) -> Selection:
    """Return what `index` selects of a tensor of `shape`, as NumPy's basic indexing does.

    Raises
    ------
    InvalidInputError
        If it is no basic index, has too many parts, or a number is out of bounds.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    n_ellipses = sum(part is ... for part in parts)
    if n_ellipses > 1 or len(parts) - n_ellipses > len(shape):
        raise InvalidInputError("the index does not fit", key=name, expected=f"of shape {list(shape)}", found=index)
    at = next((place for place, part in enumerate(parts) if part is ...), len(parts))
    n_missing = len(shape) - (len(parts) - n_ellipses)
    parts[at : at + n_ellipses] = [slice(None)] * n_missing
    offsets: list[int] = []
    steps: list[int] = []
    sizes: list[int] = []
    flipped: list[int] = []
    kept: list[int] = []
    for dim, (part, size) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, slice):
            try:
                start, stop, step = part.indices(size)
            except (TypeError, ValueError) as error:
                raise InvalidInputError(f"the index is wrong: {error}", key=name, found=part) from error
            n = len(range(start, stop, step))
            if step < 0:
                flipped.append(len(kept))
                start, step = start + (n - 1) * step, -step
            kept.append(n)
        else:
            start, step, n = _number(name, part, size, dim), 1, 1
        offsets.append(start if n else 0)
        steps.append(step if n > 1 else 1)  # a step beyond the tensor need not be a number of 64 bits
        sizes.append(n)
    return Selection(tuple(offsets), tuple(steps), tuple(sizes), tuple(flipped), tuple(kept))


def _number(name: str, part: object, size: int, dim: int) -> int:
    try:
        number = operator.index(part)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidInputError(
            "the index is wrong", key=name, expected="numbers, slices and ...", found=repr(part)[:80]
        ) from error
    if isinstance(part, bool) or not -size <= number < size:
        raise InvalidInputError(
            f"the index is out of bounds in dimension {dim}", key=name, expected=f"{-size} to {size - 1}", found=part
        )
    return number % size


def parse(text: str) -> tuple[str, Index | None]:
    """Return the tensor and the index that ``NAME`` or ``NAME[0:64, ..., 3]`` names; None stands for all of it.

    A name that itself ends in brackets, or in what looks like an index without its closing bracket, is to be followed
    by ``[...]``.
    """
    match = _NAMED.fullmatch(text)
    if match is None:
        if _UNCLOSED.fullmatch(text):
            raise InvalidInputError(
                "the closing bracket of the index is missing", key=text[:200], expected="NAME[0:64, ...]"
            )
        return text, None
    parts: list[int | slice | EllipsisType] = []
    for item in match["index"].split(",") if match["index"].strip() else []:
        found = _PART.fullmatch(item.strip())
        if found is None or re.fullmatch("-?0+", found[5] or "1"):
            raise InvalidInputError(
                "the index is wrong",
                key=text[:200],
                expected="numbers, FIRST:STOP:STEP and ...",
                found=item.strip()[:80] or "nothing",
            )
        if found[1]:
            parts.append(...)
        elif found[2]:
            parts.append(int(found[2]))
        else:
            parts.append(slice(*(None if number is None else int(number) for number in found.groups()[2:])))
    return match["name"], tuple(parts)


def text_of(index: Index) -> str:
    """Return an index as it is written between brackets: ``0:64, ..., 3``."""
    parts = index if isinstance(index, tuple) else (index,)
    return ", ".join(map(_text_of_part, parts))


def _text_of_part(part: int | slice | EllipsisType) -> str:
    if isinstance(part, slice):
        first, stop, step = (
            "" if number is None else str(operator.index(number)) for number in (part.start, part.stop, part.step)
        )
        return f"{first}:{stop}:{step}" if step else f"{first}:{stop}"
    return "..." if isinstance(part, EllipsisType) else str(operator.index(part))
