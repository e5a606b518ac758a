"""The chunk codecs that a store can be created with, behind one interface.

``dcr.delta`` is this package's own (``chunk``); ``portable`` uses codecs of the Zarr core only, so that any Zarr v3
implementation reads the masks (docs/spec/v1.md, section 6.3). Refuses other names, and portable chunks whose header
promises anything but the chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numcodecs import blosc

from dcr_store.codec import chunk, kernels
from dcr_store.codec.arguments import check_out, check_target, checked_bits, checked_dtype, checked_sparse
from dcr_store.errors import FormatError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    Bits = NDArray[np.unsignedinteger[Any]]
    Bytes = bytes | bytearray | memoryview

BLOSC_CNAME: Final = "zstd"
BLOSC_CLEVEL: Final = 1
BLOSC_SHUFFLE: Final = "shuffle"
BLOSC_BLOCKSIZE: Final = 1 << 19  # blosc's own choice at this level is slower and up to a third larger
_BLOSC_HEADER_NBYTES: Final = 16
_BLOSC_VERSION: Final = 2


class Codec(Protocol):
    """Encodes and decodes the chunks of one array. The functions are those of ``codec.chunk``, with their errors."""

    @property
    def name(self) -> str:
        """The codec's name in ``dcr.json``."""

    def zarr_inner_codecs(self, width: int) -> list[dict[str, Any]]:
        """Return the Zarr v3 metadata of the inner chunks' codecs, for elements of `width` bytes."""

    def encode(self, mask: Bits, base: Bits | None = None) -> bytes:
        """Encode a chunk given whole."""

    def encode_sparse(
        self, positions: NDArray[np.uint32], values: Bits, n_elements: int, base: Bits | None = None
    ) -> bytes:
        """Encode a chunk given by its non-zero elements."""

    def decode(self, data: Bytes, dtype: DTypeLike, n_elements: int, out: Bits | None = None) -> Bits:
        """Decode a chunk whole."""

    def decode_sparse(self, data: Bytes, dtype: DTypeLike, n_elements: int) -> tuple[NDArray[np.uint32], Bits]:
        """Decode the non-zero elements of a chunk."""

    def lists(self, data: Bytes) -> bool:
        """Whether the chunk lists its non-zero elements, so that ``decode_sparse`` makes no dense mask of it."""

    def apply(self, data: Bytes, bits: Bits, base: Bits | None = None) -> int:
        """XOR a chunk into bits, in place; return the number of elements that changed."""


class DeltaCodec:
    """``dcr.delta``: the functions of ``codec.chunk``."""

    name = "dcr.delta"
    encode = staticmethod(chunk.encode)
    encode_sparse = staticmethod(chunk.encode_sparse)
    decode = staticmethod(chunk.decode)
    decode_sparse = staticmethod(chunk.decode_sparse)
    lists = staticmethod(chunk.lists)
    apply = staticmethod(chunk.apply)

    def zarr_inner_codecs(self, width: int) -> list[dict[str, Any]]:
        """Return the Zarr v3 metadata of the inner chunks' codecs; the same for each `width`."""
        return [{"name": self.name, "configuration": {}}]


class PortableCodec:
    """``portable``: what Zarr's codecs ``bytes`` and ``blosc`` make of the dense chunk, byte for byte."""

    name = "portable"

    def zarr_inner_codecs(self, width: int) -> list[dict[str, Any]]:
        """Return the Zarr v3 metadata of the inner chunks' codecs, for elements of `width` bytes."""
        return [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {
                "name": "blosc",
                "configuration": {
                    "typesize": width,
                    "cname": BLOSC_CNAME,
                    "clevel": BLOSC_CLEVEL,
                    "shuffle": BLOSC_SHUFFLE,
                    "blocksize": BLOSC_BLOCKSIZE,
                },
            },
        ]

    def encode(self, mask: Bits, base: Bits | None = None) -> bytes:
        """Encode a chunk given whole, as ``chunk.encode`` does."""
        mask = checked_bits(mask, "mask")
        encoded: bytes = blosc.compress(mask, BLOSC_CNAME.encode(), BLOSC_CLEVEL, blosc.SHUFFLE, BLOSC_BLOCKSIZE)
        return encoded

    def encode_sparse(
        self, positions: NDArray[np.uint32], values: Bits, n_elements: int, base: Bits | None = None
    ) -> bytes:
        """Encode a chunk given by its non-zero elements, as ``chunk.encode_sparse`` does."""
        values = checked_sparse(positions, values, n_elements)
        mask = np.zeros(n_elements, values.dtype)
        mask[positions] = values
        return self.encode(mask)

    def decode(self, data: Bytes, dtype: DTypeLike, n_elements: int, out: Bits | None = None) -> Bits:
        """Decode a chunk whole, as ``chunk.decode`` does."""
        dtype = checked_dtype(dtype)
        nbytes = dtype.itemsize * n_elements
        view = memoryview(data).cast("B")
        if len(view) < _BLOSC_HEADER_NBYTES or view[0] != _BLOSC_VERSION:
            raise FormatError("not a blosc chunk", expected="a blosc header, version 2", found=bytes(view[:4]).hex())
        promised = tuple(int.from_bytes(view[i : i + 4], "little") for i in (4, 12))
        if promised != (nbytes, len(view)):
            raise FormatError("blosc chunk of another length", expected=(nbytes, len(view)), found=promised)
        if out is None:
            out = np.empty(n_elements, dtype)
        check_out(out, dtype, n_elements)
        try:
            blosc.decompress(view, out)
        except (RuntimeError, ValueError) as error:
            raise FormatError(f"blosc chunk damaged: {error}", expected=f"{nbytes} bytes", found="none") from error
        return out

    def decode_sparse(self, data: Bytes, dtype: DTypeLike, n_elements: int) -> tuple[NDArray[np.uint32], Bits]:
        """Decode the non-zero elements of a chunk, as ``chunk.decode_sparse`` does."""
        mask = self.decode(data, dtype, n_elements)
        return kernels.engine(mask.nbytes).find_nonzero(mask)

    def lists(self, data: Bytes) -> bool:
        """Return False: these chunks are dense."""
        return False

    def apply(self, data: Bytes, bits: Bits, base: Bits | None = None) -> int:
        """XOR a chunk into bits in place, as ``chunk.apply`` does."""
        check_target(bits)
        mask = self.decode(data, bits.dtype, len(bits))
        np.bitwise_xor(bits, mask, out=bits)
        return int(np.count_nonzero(mask))


_CODECS: Final[dict[str, Codec]] = {codec.name: codec for codec in (DeltaCodec(), PortableCodec())}


def get_codec(name: str) -> Codec:
    """Return the codec that ``dcr.json`` names.

    Raises
    ------
    FormatError
        There is none of that name.
    """
    if name not in _CODECS:
        raise FormatError(
            "unknown codec; a newer dcr_store may know it", expected=" or ".join(_CODECS), found=repr(name)
        )
    return _CODECS[name]
