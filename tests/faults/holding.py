"""What a child keeps at a version, and what it says of it: files, tensors in memory, an engine behind its own loader.

Everything that a target holds has one *image*, bytes that a test can also make from the checkpoint that is expected. A
child notes a digest of it whenever it says to anybody which version it holds (a *claim*).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from states import raw, tree

from dcr_store import events
from dcr_store.layout.dtypes import DTYPES, n_elements, uint_dtype, width
from dcr_store.layout.tensors import to_array
from dcr_store.targets import copy_directory
from dcr_store.targets.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from dcr_store.receive.receiver import Receiver
    from dcr_store.store import Store

Table = Iterable[tuple[str, str, tuple[int, ...]]]
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Name → dtype, shape, bytes."""

ALIGNMENT_NBYTES = 64
GARBAGE = 0x5A  # what memory holds before anything is loaded
FUSED = ("layers.0.q.weight", "layers.0.mlp.weight")  # an engine keeps them side by side in one parameter
IN_MEMORY = ("memory", "shared")

# ---------------------------------------------------------------------- images


def read_tensors(directory: Path) -> Tensors:
    """Return the tensors of a checkpoint; ``DcrError`` if it is none."""
    found: Tensors = {}
    with open_checkpoint(directory) as checkpoint:
        assert checkpoint.tensors.keys(), "refuses what is in two files"
        for file in checkpoint.files:
            data = (directory / file.path).read_bytes()
            found |= {t.name: (t.dtype, t.shape, data[t.begin : t.end]) for t in file.header.tensors}
    return found


def image_of_files(directory: Path) -> bytes:
    """Return the image of a directory: all its files but the target's own notes."""
    return b"".join(f"{path} {len(data)}\n".encode() + data for path, data in tree(directory).items())


def image_of_tensors(tensors: Tensors) -> bytes:
    """Return the image of tensors in memory."""
    return _joined({name: data for name, (_, _, data) in tensors.items()})


def memory_of(tensors: Tensors) -> bytes:
    """Return memory that holds tensors where ``places_of`` says."""
    places, nbytes = places_of((name, dtype, shape) for name, (dtype, shape, _) in tensors.items())
    memory = bytearray([GARBAGE]) * nbytes
    for name, start in places.items():
        memory[start : start + len(tensors[name][2])] = tensors[name][2]
    return bytes(memory)


def image_in_engine(tensors: Tensors) -> bytes:
    """Return the bytes of the parameters of an ``Engine``."""
    fused = [np.frombuffer(tensors[n][2], np.uint16).reshape(tensors[n][1]) for n in FUSED]
    alone = {name: data for name, (_, _, data) in tensors.items() if name not in FUSED}
    return _joined({**alone, "fused": np.concatenate(fused, axis=1).tobytes()})


def _joined(data: Mapping[str, bytes]) -> bytes:
    return b"".join(name.encode() + data[name] for name in sorted(data))


def places_of(table: Table) -> tuple[dict[str, int], int]:
    """Return where each tensor begins in memory that holds all of them, and the bytes of that memory."""
    places, end = {}, 0
    for name, dtype, shape in sorted(table):
        places[name] = end
        row = DTYPES[dtype]
        nbytes = n_elements(row, shape) * width(row.space)
        end += -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
    return places, end


# ---------------------------------------------------------------------- targets


def tensors_in(memory: Any, table: Table) -> dict[str, Any]:
    """Return tensors that lie in memory."""
    table = list(table)
    places, _ = places_of(table)
    tensors = {}
    for name, dtype, shape in table:
        row = DTYPES[dtype]
        bits = np.frombuffer(memory, uint_dtype(row.space), n_elements(row, shape), places[name])
        tensors[name] = to_array(bits, dtype, shape)
    return tensors


def engine_of(table: Table) -> Any:
    """Return an engine that keeps two matrices in one parameter, and has its own ``load_weights``."""
    import torch
    from torch import nn

    class Engine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._parts: dict[str, tuple[int, int]] = {}
            shapes = {name: shape for name, _, shape in table}
            n_columns = 0
            for name in FUSED:
                self._parts[name] = (n_columns, shapes[name][1])
                n_columns += shapes[name][1]
            for name, dtype, shape in table:
                if name in FUSED:
                    continue
                row = DTYPES[dtype]
                bits = np.full(n_elements(row, shape), GARBAGE, uint_dtype(row.space))
                made = to_array(bits, dtype, shape, "torch")
                self.register_parameter(_attribute(name), nn.Parameter(made, requires_grad=False))
            fused = torch.empty(shapes[FUSED[0]][0], n_columns, dtype=torch.bfloat16).fill_(float("nan"))
            self.fused = nn.Parameter(fused, requires_grad=False)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                if name in self._parts:
                    self.fused.narrow(1, *self._parts[name]).data.copy_(tensor)
                else:
                    self.get_parameter(_attribute(name)).data.copy_(tensor)

        def image(self) -> bytes:
            return _joined({name.replace("/", "."): raw(tensor) for name, tensor in self.named_parameters()})

    return Engine()


def _attribute(name: str) -> str:
    return name.replace(".", "/")


class Holding:
    """One target in this process.

    Attributes
    ----------
    target : object
        As ``Store.receiver`` takes it.
    image : callable
        Returns the image of what it holds now.
    is_atomic : bool
        Whether that is a whole version at any time, though not always the one that is served.
    """

    def __init__(self, job: Mapping[str, Any], store: Store) -> None:
        kind, directory = job.get("kind", "directory"), Path(job.get("directory", ""))
        self.is_atomic = False
        self.target: Any = job.get("directory")
        self.image: Callable[[], bytes] = lambda: image_of_files(directory)
        if kind == "copy":
            from dcr_store.receive.copying import CopyBringer

            self.target = CopyBringer(directory, keep=job.get("keep", 1))
            self.image = lambda: _image_of_current(directory)
            self.is_atomic = True
        elif kind in IN_MEMORY:
            table = store.show("main@0").tensors
            memory = self._memory(places_of(table)[1], directory / "memory" if kind == "shared" else None)
            self.target = tensors_in(memory, table)
            self.image = lambda: _joined({name: raw(tensor) for name, tensor in self.target.items()})
        elif kind == "engine":
            from dcr_store.targets.native.target import NativeLoaderTarget

            engine = engine_of(store.show("main@0").tensors)
            self.target = NativeLoaderTarget(engine.load_weights, engine)
            self.image = engine.image

    @staticmethod
    def _memory(nbytes: int, place: Path | None) -> Any:
        if place is None:
            return bytearray([GARBAGE]) * nbytes
        descriptor = os.open(place, os.O_RDWR)
        try:
            return mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)


def _image_of_current(directory: Path) -> bytes:
    with copy_directory.reading(directory) as place:
        return image_of_files(place)


# ---------------------------------------------------------------------- claims


class Claims:
    """Notes what is said of a target, in a file that outlives the process; nothing without a file."""

    def __init__(self, place: str | None, image: Callable[[], bytes]) -> None:
        self._place, self._image = place, image
        self._last: object = None

    def note(self, said: str, version: str) -> None:
        """Note that `version` was said to be held, and a digest of what is."""
        if self._place is not None:
            self._write(said, version, hashlib.sha256(self._image()).hexdigest())

    def _write(self, said: str, version: str, digest: str) -> None:
        if (said, version, digest) != self._last:
            self._last = (said, version, digest)
            data = json.dumps({"said": said, "version": version, "digest": digest, "pid": os.getpid()})
            descriptor = os.open(str(self._place), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(descriptor, data.encode() + b"\n")
            os.close(descriptor)

    def __call__(self, event: events.Event) -> None:
        """Note an acknowledgement that is about to be made."""
        if self._place is None or event.name not in ("member.applied.before", "member.prepared.before"):
            return
        if event.name == "member.applied.before":
            self.note(event.detail, event.detail.split("/")[3])
        else:
            self._write(event.detail, event.detail.split("/")[3], "")

    @contextmanager
    def watching(self, receiver: Receiver, *, is_atomic: bool) -> Iterator[None]:
        """Look all the time whether the target holds what the receiver says is active; if it is atomic, any version."""
        if self._place is None:
            yield
            return
        done = threading.Event()
        watcher = Claims(self._place, self._image)

        def watch() -> None:
            while not done.wait(0.003):
                before = receiver.active()
                if before is not None:
                    digest = hashlib.sha256(self._image()).hexdigest()
                    if is_atomic or receiver.active() == before:
                        watcher._write("active", "" if is_atomic else before.version, digest)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def preload(names: Iterable[str]) -> None:
    """Import what takes long, before any child is forked; without threads, which a fork does not take along."""
    if "torch" in names:
        import torch

        import dcr_store.receive.native_bringer

        torch.set_num_threads(1)
        assert dcr_store.receive.native_bringer.__name__ in sys.modules
