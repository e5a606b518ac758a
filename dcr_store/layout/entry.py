"""One tensor of a layout, and what may name one (docs/spec/v1.md §5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_NAME_NBYTES: Final = 65_536


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor and where it lies.

    Attributes
    ----------
    name, dtype : str
        Its name, and its dtype as in safetensors.
    shape : tuple of int
        In values.
    space : str
        The space that holds it.
    start : int
        The address of its first element.
    n_elements : int
        The addresses it takes; 0 for a tensor without values.
    aliases : tuple of str
        Further names of the same storage, in the order in which they were added.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    space: str
    start: int
    n_elements: int
    aliases: tuple[str, ...] = ()

    @property
    def stop(self) -> int:
        """The address after its last element."""
        return self.start + self.n_elements

    def chunks(self, chunk_elements: int) -> range:
        """Return the chunks of its space that hold elements of it."""
        return range(self.start // chunk_elements, -(-self.stop // chunk_elements) if self.n_elements else 0)


def name_problem(name: object) -> str | None:
    """Return why `name` cannot name a tensor (docs/spec/v1.md §5), or None if it can."""
    if not isinstance(name, str):
        return "it is not text"
    if not name:
        return "it is empty"
    if "\0" in name:
        return "it contains NUL"
    try:
        nbytes = len(name) if name.isascii() else len(name.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    return None if nbytes <= MAX_NAME_NBYTES else f"it has {nbytes} bytes, over the {MAX_NAME_NBYTES} allowed"
