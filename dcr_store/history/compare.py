"""Compare a directory with a version, bit for bit. Reads only; names files and tensors that differ."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping

import numpy as np

from dcr_store.errors import FormatError, InvalidInputError
from dcr_store.format import canonical
from dcr_store.format.documents import SPACES
from dcr_store.history.report import Problem, VerifyReport
from dcr_store.layout.dtypes import Bits
from dcr_store.layout.layout import Layout
from dcr_store.payload.version import Table, root_of
from dcr_store.ports import CopiedSource
from dcr_store.targets.checkpoint import Checkpoint, open_checkpoint
from dcr_store.targets.checkpoint_listing import METADATA
from dcr_store.targets.dcp import is_dcp
from dcr_store.targets.directory import DirectoryTarget, WeightFile
from dcr_store.targets.paths import local_path
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.moving import while_kept
from dcr_store.versions.path import UNKNOWN, Path
from dcr_store.versions.replay import Places, digests, replay
from dcr_store.versions.route import route


class _Comparer:
    """A target that compares the right bits with those of a state, instead of keeping them."""

    def __init__(self, layout: Layout, found: CopiedSource) -> None:
        self.layout = layout
        self.found = found
        self.differing: dict[str, int] = {}
        self._lock = threading.Lock()

    def read_chunk(self, space: str, chunk: int, out: Bits) -> None:
        """Return zeros: whatever is asked for is built from nothing."""
        out[:] = 0

    def write_chunk(self, space: str, chunk: int, bits: Bits) -> None:
        """Count the elements of each tensor that are not as in `bits`, be it in one copy alone."""
        differs = np.zeros(len(bits), bool)
        for here in self.found.copies_of_chunk(space, chunk, np.empty_like(bits)):
            differs |= bits != here
        with self._lock:
            for piece in self.layout.pieces(space, chunk * len(bits), (chunk + 1) * len(bits)):
                stop = piece.offset + piece.tensor_stop - piece.tensor_start
                n = int(np.count_nonzero(differs[piece.offset : stop]))
                if n:
                    self.differing[piece.entry.name] = self.differing.get(piece.entry.name, 0) + n


def compare_directory(catalog: Catalog, located: Located, directory: str | os.PathLike[str]) -> VerifyReport:
    """Compare the checkpoint in `directory` with a version.

    Returns
    -------
    VerifyReport
        Problems carry the names of tensors and files.
    """
    problems: list[Problem] = []
    if is_dcp(local_path(directory, "directory")):
        raise InvalidInputError(
            "is a torch distributed checkpoint, and only directories of safetensors files can be compared; publish it "
            "on a line of its own, and compare the two versions (diff)",
            key=str(directory),
            expected="safetensors files",
            found=METADATA,
        )
    try:
        checkpoint = open_checkpoint(directory)
    except FormatError as error:  # torn files, of a pull that was killed, say
        return VerifyReport([Problem.of(error, str(directory))], 0, 0, [located.name], [])
    with checkpoint:
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
    differing, found = while_kept(catalog, [located], lambda: _compared(catalog, located, layout, checkpoint))
    if differing:
        problems += _held(catalog, located, found, checkpoint)
    order = {entry.name: i for i, entry in enumerate(layout.tensors)}
    for name, n in sorted(differing.items(), key=lambda item: order[item[0]]):
        problems.append(Problem(name, "the tensor has other bits", "0 elements differ", f"{n} differ"))


def _compared(
    catalog: Catalog, located: Located, layout: Layout, checkpoint: Checkpoint
) -> tuple[dict[str, int], Mapping[str, Table]]:
    path = route(catalog, located).path
    weights = [WeightFile(f.path, f.header.raw, f.header.nbytes) for f in checkpoint.files]
    with DirectoryTarget(checkpoint.root, layout, weights, path.chunk_elements) as target:
        found = digests(target, path.all_chunks(), path.chunk_elements)
        places = {s: np.where(found[s] == path.target.tables[s], path.goal, UNKNOWN) for s in SPACES}
        return differing_elements(catalog, path, layout, target, places), found


def differing_elements(
    catalog: Catalog, path: Path, layout: Layout, found: CopiedSource, places: Places
) -> dict[str, int]:
    """Return how many elements of a state are not as in the path's goal, by tensor; those that are the same have none.

    Parameters
    ----------
    places : mapping of str to ndarray of int64, shape (n_chunks,)
        ``UNKNOWN`` for each chunk to compare, the goal for the others.
    """
    comparer = _Comparer(layout, found)
    replay(catalog.objects, path, comparer, places)
    return comparer.differing


def _held(catalog: Catalog, located: Located, found: Mapping[str, Table], checkpoint: Checkpoint) -> Iterator[Problem]:
    """Say which other version the bits are, if they are one."""
    contents = catalog.contents(located)
    root = root_of(contents.layout, dict(found), catalog.document.chunk_elements)
    held = catalog.find_root(root)
    if held:
        names = " or ".join(item.name for item in held)
        yield Problem(str(checkpoint.root), "holds the weights of another version, bit for bit", located.name, names)


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
