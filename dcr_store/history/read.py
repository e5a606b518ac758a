"""A version's tensors in memory, whole or by name. Refuses bits that are not the version's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from dcr_store.format.documents import SPACES
from dcr_store.layout.layout import Layout
from dcr_store.layout.tensors import to_array
from dcr_store.targets.memory import MemoryTarget
from dcr_store.versions.catalog import Catalog, Located
from dcr_store.versions.path import ZERO
from dcr_store.versions.replay import everywhere, replay
from dcr_store.versions.route import route


def read(
    catalog: Catalog,
    located: Located,
    names: Iterable[str] | None = None,
    framework: Literal["numpy", "torch"] = "numpy",
) -> dict[str, Any]:
    """Return tensors of a version by name.

    Parameters
    ----------
    names : iterable of str, optional
        Which; all by default, aliases included. Only chunks that hold them are decoded.
    framework : {"numpy", "torch"}
        What to return. NumPy arrays of BF16 and FP8 have the dtypes of ml_dtypes.

    Returns
    -------
    dict of str to ndarray or torch.Tensor
        In the order of the layout. Aliases share memory.
    """
    layout = catalog.layout(located.row.layout)
    chosen = None if names is None else list(dict.fromkeys(names))
    path = route(catalog, located).path
    target = MemoryTarget(layout, path.chunk_elements, chosen)
    places = everywhere(path, ZERO)
    if chosen is not None:
        needed = _chunks_of(layout, chosen, path.chunk_elements)
        for space in SPACES:
            elsewhere = np.ones(len(places[space]), bool)
            elsewhere[sorted(needed[space])] = False
            places[space][elsewhere] = path.goal
    replay(catalog.objects, path, target, places)
    return {name: to_array(t.bits, t.dtype, t.shape, framework) for name, t in target.tensors().items()}


def _chunks_of(layout: Layout, names: Iterable[str], chunk_elements: int) -> dict[str, set[int]]:
    """Return the chunks of each space that hold elements of the named tensors."""
    needed: dict[str, set[int]] = {space: set() for space in SPACES}
    for name in names:
        entry = layout.entry(name)
        needed[entry.space].update(entry.chunks(chunk_elements))
    return needed
