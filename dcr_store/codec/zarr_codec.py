"""``dcr.delta`` as a Zarr v3 array-to-bytes codec, found through the entry point group ``zarr.codecs``.

With it Zarr reads a mask array as the dense mask, alone or as the inner codec of ``sharding_indexed``. Chunks of
several dimensions are taken in row-major order. Refuses dtypes other than uint8, uint16, uint32 and uint64, and
unknown configuration. The only module of this floor that imports zarr.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from zarr.abc.codec import ArrayBytesCodec

from dcr_store.codec import chunk
from dcr_store.errors import FormatError, InvalidInputError

if TYPE_CHECKING:
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer, NDBuffer
    from zarr.core.common import JSON

NAME = "dcr.delta"
DTYPES = ("uint8", "uint16", "uint32", "uint64")


@dataclass(frozen=True)
class DcrDelta(ArrayBytesCodec):
    """The codec ``{"name": "dcr.delta", "configuration": {}}`` of docs/spec/v1.md, section 6.2."""

    is_fixed_size = False

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """Make the codec from array metadata.

        Raises
        ------
        FormatError
            The metadata is another codec's, or has configuration that this version does not know.
        """
        if data.get("name") != NAME or data.get("configuration", {}) != {}:
            raise FormatError(
                "codec metadata not understood; a newer dcr_store may", expected=cls().to_dict(), found=data
            )
        return cls()

    def to_dict(self) -> dict[str, JSON]:
        """Return the codec's array metadata."""
        return {"name": NAME, "configuration": {}}

    def validate(self, *, shape: tuple[int, ...], dtype: Any, chunk_grid: Any) -> None:
        """Refuse an array of another dtype with ``InvalidInputError``."""
        _checked_dtype(dtype)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Raise NotImplementedError, as Zarr wants of a codec whose output length depends on the content."""
        raise NotImplementedError("the encoded length of a dcr.delta chunk depends on its content")

    def _decode_sync(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        dtype = _checked_dtype(chunk_spec.dtype)
        bits = chunk.decode(chunk_data.as_numpy_array().data, dtype, int(np.prod(chunk_spec.shape, dtype=np.int64)))
        return chunk_spec.prototype.nd_buffer.from_numpy_array(bits.reshape(chunk_spec.shape))

    def _encode_sync(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer:
        dtype = _checked_dtype(chunk_spec.dtype)
        bits = np.asarray(chunk_data.as_numpy_array(), dtype).reshape(-1)
        return chunk_spec.prototype.buffer.from_bytes(chunk.encode(bits))

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        return await asyncio.to_thread(self._decode_sync, chunk_data, chunk_spec)

    async def _encode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer:
        return await asyncio.to_thread(self._encode_sync, chunk_data, chunk_spec)


def _checked_dtype(dtype: Any) -> np.dtype[Any]:
    native: np.dtype[Any] = dtype.to_native_dtype()
    if native.name not in DTYPES:
        raise InvalidInputError(
            "dcr.delta encodes unsigned integers; store the bits", expected=DTYPES, found=native.name
        )
    return native.newbyteorder("=")
