"""One small model kept at a version in each of the ways that there are: in place, copy, memory, native.

``head`` is tied to ``embed`` in each of them; ``q`` and ``k`` are fused by the engine's loader.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from dcr_store.layout.tensors import to_array
from dcr_store.publish.transaction import Transaction
from dcr_store.receive.bringing import Bringer, DirectoryBringer
from dcr_store.receive.copying import CopyBringer
from dcr_store.receive.memory_bringer import StateDictBringer
from dcr_store.receive.native_bringer import NativeBringer
from dcr_store.store import Store
from dcr_store.targets.native.target import NativeLoaderTarget

SHAPES: Final = {"embed": (40, 8), "q": (8, 8), "k": (4, 8), "norm": (90,)}
CHUNK_ELEMENTS: Final = 64
Bits = dict[str, np.ndarray]


def states(n: int, seed: int = 0) -> list[Bits]:
    """Return bits of BF16 tensors, of which some change in each step; those of ``norm`` only with the last."""
    rng = np.random.default_rng(seed)
    bits = {name: rng.integers(0x3C00, 0x3F00, int(np.prod(shape)), np.uint16) for name, shape in SHAPES.items()}
    found = []
    for number in range(n):
        found.append(bits)
        rate = {"norm": 0.0 if number < n - 2 else 0.1}
        bits = {
            name: np.where(rng.random(len(old)) < rate.get(name, 0.1), old ^ np.uint16(3), old)
            for name, old in bits.items()
        }
    return found


def publish(store: Store, bits: Bits) -> str:
    """Publish a state; ``head`` is another name of ``embed``."""
    with store.begin(owner="test") as transaction:
        write(transaction, bits)
        return transaction.commit().version


def write(transaction: Transaction, bits: Bits) -> None:
    """Write a state into a transaction."""
    given = {
        name: to_array(array.copy(), "BF16", SHAPES.get(name, array.shape), "torch") for name, array in bits.items()
    }
    for name, tensor in {**given, "head": given["embed"]}.items():
        transaction.write(name, tensor)


def octets(bits: Bits) -> dict[str, bytes]:
    """Return what each tensor's bytes are."""
    found = {name: array.tobytes() for name, array in bits.items()}
    return {**found, "head": found["embed"]}


class Kept(ABC):
    """One target.

    Attributes
    ----------
    refuses_foreign : bool
        Whether it holds something that outlives its process and says whose it is, so that it is not another store's to
        overwrite.
    """

    refuses_foreign = False

    @abstractmethod
    def start(self) -> Bringer:
        """Return the target as a process that starts has it."""

    @abstractmethod
    def found(self) -> dict[str, bytes]:
        """Return the bytes of each tensor, as whoever serves them reads them."""

    @abstractmethod
    def flip(self, name: str, element: int = -1) -> None:
        """Change a bit of an element, as an outsider would: nobody is told."""


def _header(path: Path) -> tuple[dict[str, Any], int]:
    data = path.read_bytes()
    nbytes = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + nbytes]), 8 + nbytes


class InPlace(Kept):
    """A directory."""

    refuses_foreign = True

    def __init__(self, root: Path) -> None:
        self.root = root / "target"

    def start(self) -> Bringer:
        return DirectoryBringer(self.root)

    @property
    def place(self) -> Path:
        """Where the files are."""
        return self.root

    def found(self) -> dict[str, bytes]:
        path = self.place / "model.safetensors"
        header, start = _header(path)
        data = path.read_bytes()[start:]
        return {name: data[slice(*row["data_offsets"])] for name, row in header.items() if name != "__metadata__"}

    def flip(self, name: str, element: int = -1) -> None:
        path = self.place / "model.safetensors"
        header, start = _header(path)
        first, last = header[name]["data_offsets"]
        at = start + (last if element < 0 else first) + 2 * element
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 4]))


class Copy(InPlace):
    """A directory of versions side by side."""

    def start(self) -> Bringer:
        return CopyBringer(self.root)

    @property
    def place(self) -> Path:
        return self.root / "current"


class Memory(Kept):
    """Live tensors, with ``head`` the same one as ``embed``."""

    def __init__(self, root: Path) -> None:
        self.tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
        self.tensors["head"] = self.tensors["embed"]

    def start(self) -> Bringer:
        return StateDictBringer(self.tensors)

    def found(self) -> dict[str, bytes]:
        return {name: _bytes_of(tensor).tobytes() for name, tensor in self.tensors.items()}

    def flip(self, name: str, element: int = -1) -> None:
        _bytes_of(self.tensors[name])[2 * element] ^= 4


class Native(Kept):
    """An engine with a loader of its own, with ``head`` the same parameter as ``embed``."""

    def __init__(self, root: Path) -> None:
        self.engine = Engine()

    def start(self) -> Bringer:
        return NativeBringer(NativeLoaderTarget(self.engine.load_weights, self.engine))

    def found(self) -> dict[str, bytes]:
        engine = self.engine
        n_q = SHAPES["q"][0]
        parts = {"q": engine.qk[:n_q], "k": engine.qk[n_q:], "embed": engine.embed, "norm": engine.norm}
        return {name: _bytes_of(part).tobytes() for name, part in {**parts, "head": engine.head}.items()}

    def flip(self, name: str, element: int = -1) -> None:
        engine = self.engine
        n_q = SHAPES["q"][0]
        parts = {"q": engine.qk[:n_q], "k": engine.qk[n_q:], "embed": engine.embed, "norm": engine.norm}
        _bytes_of(parts[name])[2 * element] ^= 4


class Engine(nn.Module):
    """Fuses q and k, ties its head."""

    def __init__(self) -> None:
        super().__init__()
        n_rows = SHAPES["q"][0] + SHAPES["k"][0]
        made = {"embed": SHAPES["embed"], "qk": (n_rows, SHAPES["q"][1]), "norm": SHAPES["norm"]}
        for name, shape in made.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False))
        self.head = self.embed

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        n_q = SHAPES["q"][0]
        for name, tensor in weights:
            if name in ("q", "k"):
                (self.qk.data[:n_q] if name == "q" else self.qk.data[n_q:]).copy_(tensor)
            else:
                getattr(self, name).data.copy_(tensor)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


KINDS: Final[Mapping[str, type[Kept]]] = {"in place": InPlace, "copy": Copy, "memory": Memory, "native": Native}
