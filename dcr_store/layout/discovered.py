"""What was discovered, as a document that can be kept (schema/discovery.json), and read back strictly. Pure.

Refuses documents that are damaged or foreign, that are of other slices, that leave out or hold twice any value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from dcr_store.errors import FormatError
from dcr_store.format import canonical
from dcr_store.format.fields import Fields
from dcr_store.layout.affine_map import AffineMap
from dcr_store.layout.boxes import Box, Dim, box
from dcr_store.layout.coverage import covered
from dcr_store.layout.discovery import Discovery, Residual, Slices, ranks_of
from dcr_store.layout.dtypes import DTYPES, dtype, n_values
from dcr_store.layout.tensors import describe

FORMAT: Final = "dcr-discovery"
_VERSION: Final = 2  # of what is found: another one where `discover` finds anything else


def request_of(slices: Slices | Sequence[Slices], key: str) -> str:
    """Return the SHA-256, in hex, of all that a discovery depends on.

    Parameters
    ----------
    slices : mapping of str to tensor, or sequence of them
        As of ``discover``: their names, order, dtypes, shapes and framework count.
    key : str
        Whatever says which exporter it is, of which model, in which version.
    """
    rows = []
    for mine in ranks_of(slices):
        described = [
            (name, *describe(name, tensor, may_be_meta=True), isinstance(tensor, np.ndarray))
            for name, tensor in mine.items()
        ]
        rows.append([[name, kind, list(shape), is_numpy] for name, kind, shape, is_numpy in described])
    told = {"alone": isinstance(slices, Mapping), "key": key, "ranks": rows, "version": _VERSION}
    return canonical.sha256(canonical.encode(told))


def to_bytes(found: Discovery, request: str) -> bytes:
    """Return the document of what was discovered for a request, canonical JSON."""
    body = {
        "format": FORMAT,
        "maps": [
            [{"map": mapped.to_document(), "name": name} for name, mapped in sorted(mine.items())]
            for mine in found.maps
        ],
        "request": request,
        "residual": [
            {"reason": part.reason, "start": part.start, "stop": part.stop, "tensor": part.tensor}
            for part in found.residual
        ],
        "tensors": [
            {"dtype": kind, "name": name, "shape": list(shape)} for name, (kind, shape) in found.tensors.items()
        ],
    }
    return canonical.seal_body(body)


def from_bytes(data: bytes, slices: Slices | Sequence[Slices], request: str, key: str) -> Discovery:
    """Read a document.

    Parameters
    ----------
    slices, request
        What it has to be of.
    key : str
        Of the document, for errors.

    Raises
    ------
    FormatError
        If it is damaged, foreign, or of something else; says where.
    """
    body = canonical.open_body(data, key)
    if body is None:
        raise FormatError("is damaged, or no derived document", key=key, expected="a body and its SHA-256")
    fields = Fields.of(body, key)
    for name, expected in (("format", FORMAT), ("request", request)):
        if fields.text(name) != expected:
            raise FormatError(f"field {name!r} is another one", key=key, expected=expected, found=fields.text(name))
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for row in fields.objects("tensors"):
        kind = dtype(row.text("dtype"), key=row.key, error=FormatError).name
        if row.text("name") in tensors:
            raise FormatError("names a tensor twice", key=row.key, found=row.text("name"))
        tensors[row.text("name")] = kind, tuple(row.counts("shape"))
    held: dict[str, list[Box]] = {name: [] for name in tensors}
    maps = _read_maps(fields, ranks_of(slices), tensors, held)
    residual = []
    for row in fields.objects("residual"):
        part = Residual(row.text("tensor"), row.count("start"), row.count("stop"), row.text("reason"))
        if part.tensor not in tensors or part.start >= part.stop:
            raise FormatError("is no part of a tensor", key=row.key, found=f"{part.tensor} {part.start}:{part.stop}")
        held[part.tensor].append(box(0, part.start, [Dim(part.stop - part.start, 1, 1)]))
        residual.append(part)
    n_values_of = {name: n_values(DTYPES[kind], shape) for name, (kind, shape) in tensors.items()}
    for name, boxes in held.items():
        if any(item.there_stop > n_values_of[name] for item in boxes):
            raise FormatError("holds values past a tensor's end", key=key, found=name)
    coverage = covered(held, n_values_of)
    if not coverage.is_exact:
        raise FormatError(
            "does not say of each value once where it comes from",
            key=key,
            found=f"{coverage.n_missing} values missing, {coverage.n_doubled} twice",
        )
    return Discovery(tensors, maps, tuple(residual))


def _read_maps(
    fields: Fields,
    ranks: Sequence[Slices],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    held: dict[str, list[Box]],
) -> tuple[dict[str, AffineMap], ...]:
    rows = fields.array("maps")
    if len(rows) != len(ranks):
        raise FormatError("has maps of other ranks", key=fields.key, expected=len(ranks), found=len(rows))
    maps = []
    for index, (row, mine) in enumerate(zip(rows, ranks, strict=True)):
        place = Fields({"maps": row}, f"{fields.key}#maps/{index}")
        read = {item.text("name"): AffineMap.from_fields(item.object("map")) for item in place.objects("maps")}
        described = {name: describe(name, tensor, may_be_meta=True) for name, tensor in mine.items()}
        expected = {name: found for name, found in described.items() if not DTYPES[found[0]].packed}
        found = {name: (mapped.dtype, mapped.shape) for name, mapped in read.items()}
        if found != expected or len(row) != len(read):
            raise FormatError("has maps of other slices", key=place.key, expected=expected, found=found)
        for mapped in read.values():
            for name, boxes in mapped.boxes.items():
                if tensors.get(name) != (mapped.dtype, mapped.tensors[name]):
                    raise FormatError("maps to a tensor that the exporter does not give", key=place.key, found=name)
                held[name] += boxes
        maps.append({name: read[name] for name in mine if name in read})
    return tuple(maps)
