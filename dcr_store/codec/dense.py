"""Methods 1 and 2, raw and dense: every element, as it is or as byte planes (docs/spec/v1.md, section 6.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dcr_store.codec import kernels
from dcr_store.codec.sparse import append_planes
from dcr_store.codec.streams import StreamReader
from dcr_store.errors import FormatError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bits = NDArray[np.unsignedinteger[Any]]


def encode_body(mask: Bits) -> tuple[int, bytearray]:
    """Return ``k`` and the body of a dense chunk."""
    rotation = 1
    out = bytearray()
    append_planes(out, kernels.engine().split_planes(mask, rotation))
    return rotation, out


def decode_body(body: StreamReader, k: int, out: Bits) -> None:
    """Decode a body into `out`, uintN of shape (N,)."""
    width = out.dtype.itemsize
    if k >= 8 * width:
        raise FormatError("k of a dense chunk out of range", expected=f"below {8 * width}", found=k)
    planes = [body.read_stream(f"byte plane {j}", len(out)) for j in range(width)]
    body.finish()
    kernels.engine().join_planes(planes, k, out)
