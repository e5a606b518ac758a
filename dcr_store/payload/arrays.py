"""``zarr.json`` of the arrays that a version stores (docs/spec/v1.md §6.1, §7).

Written here as canonical JSON, so that publishing needs no zarr import; the tests open every one with zarr-python.
Readers of committed versions do not read them: the seal says what the arrays are. Pure.
"""

from __future__ import annotations

from typing import Any, Final

from dcr_store.codec.portable import get_codec
from dcr_store.format import canonical
from dcr_store.layout.dtypes import width

_LITTLE: Final[dict[str, Any]] = {"name": "bytes", "configuration": {"endian": "little"}}


def element_width(array: str) -> int:
    """Return the bytes of one element of ``<space>/<kind>``."""
    space, _, kind = array.partition("/")
    return 1 if kind == "present" else width(space)


def _metadata(n_elements: int, data_type: str, grid: int, codecs: list[dict[str, Any]]) -> bytes:
    return canonical.encode(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [n_elements],
            "data_type": data_type,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [grid]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": codecs,
            "attributes": {},
            "storage_transformers": [],
        }
    )


def payload_metadata(array: str, n_elements: int, chunk: int, shard: int, codec: str) -> bytes:
    """Return the ``zarr.json`` of a payload array; lengths in elements."""
    nbytes = element_width(array)
    sharding = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [chunk],
            "codecs": get_codec(codec).zarr_inner_codecs(nbytes),
            "index_codecs": [_LITTLE, {"name": "crc32c"}],
            "index_location": "end",
        },
    }
    return _metadata(n_elements, f"uint{8 * nbytes}", shard, [sharding])


def table_metadata(n_chunks: int) -> bytes:
    """Return the ``zarr.json`` of a digest table."""
    return _metadata(n_chunks, "uint64", n_chunks, [_LITTLE])
