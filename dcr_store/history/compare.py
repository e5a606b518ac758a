"""Compare a directory with a version, bit for bit. Reads only; names files and tensors that differ."""

from __future__ import annotations

import os

import numpy as np

from dcr_store.format import canonical
from dcr_store.format.documents import SPACES
from dcr_store.history.report import Problem, VerifyReport
from dcr_store.layout.dtypes import Bits, uint_dtype
from dcr_store.layout.layout import Layout
from dcr_store.targets.checkpoint import Checkpoint, open_checkpoint
from dcr_store.targets.directory import DirectoryTarget, WeightFile
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.path import UNKNOWN
from dcr_store.versions.replay import digests, everywhere, replay
from dcr_store.versions.route import route


class _Collector:
    """A target that keeps the chunks written to it."""

    def __init__(self) -> None:
        self.chunks: dict[tuple[str, int], Bits] = {}

    def read_chunk(self, space: str, chunk: int, out: Bits) -> None:
        """Return what was kept, zeros before."""
        kept = self.chunks.get((space, chunk))
        out[:] = 0 if kept is None else kept

    def write_chunk(self, space: str, chunk: int, bits: Bits) -> None:
        """Keep a chunk."""
        self.chunks[space, chunk] = bits.copy()


def compare_directory(catalog: Catalog, located: Located, directory: str | os.PathLike[str]) -> VerifyReport:
    """Compare the checkpoint in `directory` with a version.

    Returns
    -------
    VerifyReport
        Problems carry the names of tensors and files.
    """
    problems: list[Problem] = []
    with open_checkpoint(directory) as checkpoint:
        layout = catalog.layout(located.row.layout)
        _compare_names(layout, checkpoint, problems)
        if not problems:
            _compare_bits(catalog, located, layout, checkpoint, problems)
        _compare_files(catalog, located, checkpoint, problems)
        return VerifyReport(problems, len(checkpoint.files), checkpoint.nbytes, [located.name], [])


def _compare_names(layout: Layout, checkpoint: Checkpoint, problems: list[Problem]) -> None:
    names = layout.names()
    for name in names:
        entry = layout.entry(name)
        found = checkpoint.tensors.get(name)
        if found is None:
            problems.append(Problem(name, "the tensor is missing", f"{entry.dtype} {list(entry.shape)}", "nothing"))
        elif (found[1].dtype, found[1].shape) != (entry.dtype, entry.shape):
            problems.append(
                Problem(
                    name,
                    "the tensor is another one",
                    f"{entry.dtype} {list(entry.shape)}",
                    f"{found[1].dtype} {list(found[1].shape)}",
                )
            )
    for name in sorted(set(checkpoint.tensors) - set(names)):
        problems.append(Problem(name, "the tensor is not in the version", "nothing", "a tensor"))


def _compare_bits(
    catalog: Catalog, located: Located, layout: Layout, checkpoint: Checkpoint, problems: list[Problem]
) -> None:
    path = route(catalog, located).path
    weights = [WeightFile(f.path, f.header.raw, f.header.nbytes) for f in checkpoint.files]
    collector = _Collector()
    with DirectoryTarget(checkpoint.root, layout, weights, path.chunk_elements) as target:
        found = digests(target, path.all_chunks(), path.chunk_elements)
        differing: dict[str, int] = {}
        for space in SPACES:
            for chunk in np.flatnonzero(found[space] != path.target.tables[space]).tolist():
                # One chunk at a time: however much differs, memory holds one.
                places = everywhere(path, path.goal)
                places[space][chunk] = UNKNOWN
                collector.chunks.clear()
                replay(catalog.objects, path, collector, places)
                bits = np.empty(path.chunk_elements, uint_dtype(space))
                target.read_chunk(space, chunk, bits)
                differs = bits != collector.chunks[space, chunk]
                for piece in layout.pieces(space, chunk * path.chunk_elements, (chunk + 1) * path.chunk_elements):
                    n = int(
                        np.count_nonzero(differs[piece.offset : piece.offset + piece.tensor_stop - piece.tensor_start])
                    )
                    if n:
                        differing[piece.entry.name] = differing.get(piece.entry.name, 0) + n
    for name, n in differing.items():
        problems.append(Problem(name, "the tensor has other bits", "0 elements differ", f"{n} differ"))


def _compare_files(catalog: Catalog, located: Located, checkpoint: Checkpoint, problems: list[Problem]) -> None:
    sides = {side.path for side in checkpoint.side_files}
    headers = {file.path: file.header.raw for file in checkpoint.files}
    for file in catalog.contents(located).manifest.files:
        if file.kind == "weights":
            raw = headers.get(file.path)
        else:
            raw = checkpoint.read_side_file(file.path) if file.path in sides else None
        if raw is None:
            problems.append(Problem(file.path, "the file is missing", f"{file.nbytes} bytes", "nothing"))
        elif canonical.sha256(raw) != file.ref.sha256:
            what = "the header differs" if file.kind == "weights" else "the file differs"
            problems.append(Problem(file.path, what, f"sha256 {file.ref.sha256[:16]}", canonical.sha256(raw)[:16]))
