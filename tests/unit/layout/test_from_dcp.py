"""Chunks of torch distributed checkpoints: metadata that torch writes, and metadata that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_store.errors import InvalidInputError
from dcr_store.layout.from_dcp import Chunks, maps_of_dcp

torch = pytest.importorskip("torch")
metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")


def entry(shape: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]], dtype: Any = None) -> Any:
    properties = metadata.TensorProperties(dtype=dtype or torch.bfloat16)
    stored = [metadata.ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in chunks]
    return metadata.TensorStorageMetadata(properties, torch.Size(shape), stored)


def read(**entries: Any) -> Chunks:
    return maps_of_dcp(metadata.Metadata(entries))


def test_each_chunk_holds_its_rectangle() -> None:
    full = np.arange(30).reshape(5, 6)
    chunks = [((0, 0), (3, 4)), ((0, 4), (3, 2)), ((3, 0), (2, 6))]
    found = read(w=entry((5, 6), *chunks))
    assert found.tensors == {"w": ("BF16", (5, 6))}
    for mapped, ((row, column), (rows, columns)) in zip(found.maps["w"], chunks, strict=True):
        local = full[row : row + rows, column : column + columns]
        assert mapped.shape == local.shape
        assert mapped.canonical_of("w", np.arange(local.size)).tolist() == local.ravel().tolist()


def test_scalars_empty_chunks_and_other_entries() -> None:
    found = read(
        step=entry((), ((), ()), dtype=torch.int64),
        w=entry((2, 3), ((0, 0), (2, 3)), ((2, 0), (0, 3))),
        none=entry((0, 3), dtype=torch.float32),
        extra=metadata.BytesStorageMetadata(),
    )
    assert found.tensors == {"step": ("I64", ()), "w": ("BF16", (2, 3)), "none": ("F32", (0, 3))}
    assert [mapped.n_values for mapped in found.maps["w"]] == [6, 0]
    assert found.maps["step"][0].n_values == 1
    assert found.maps["none"] == ()
    assert found.others == ("extra",)


@pytest.mark.parametrize(
    ("chunks", "what", "where"),
    [
        (
            [((0, 0), (3, 6)), ((2, 0), (3, 6))],
            "overlap",
            "6 otherwise, first values 12 to 17 of layers.0.w in C order in (3, 6) at (0, 0) and",
        ),
        (
            [((0, 0), (3, 6)), ((0, 0), (5, 6))],
            "overlap",
            "18 otherwise, first values 0 to 17 of layers.0.w in C order",
        ),
        (
            [((0, 0), (2, 6)), ((3, 0), (2, 6))],
            "leave holes",
            "6 otherwise, first values 12 to 17 of layers.0.w in C order",
        ),
        ([((0, 0), (5, 4)), ((0, 4), (5, 1))], "leave holes", "5 otherwise, first value 5 of layers.0.w in C order"),
        ([], "leave holes", "30 otherwise, first values 0 to 29 of layers.0.w in C order"),
        ([((0, 0), (6, 6))], "leaves the tensor", "[6, 6] at [0, 0]"),
        ([((0, 3), (5, 6))], "leaves the tensor", "[5, 6] at [0, 3]"),
        ([((0,), (5,))], "leaves the tensor", "[5] at [0]"),
    ],
)
def test_chunks_that_are_not_the_tensor_are_refused_by_name(chunks: Any, what: str, where: str) -> None:
    with pytest.raises(InvalidInputError, match=what) as caught:
        read(**{"a": entry((2,), ((0,), (2,))), "layers.0.w": entry((5, 6), *chunks)})
    assert caught.value.key == "layers.0.w"
    assert where in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.float4_e2m1fn_x2])
def test_dtypes_without_maps_are_refused_by_name(dtype: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"values of F4|dtype") as caught:
        read(**{"layers.0.w": entry((4,), ((0,), (4,)), dtype=dtype)})
    assert caught.value.key == "layers.0.w"


def test_what_is_no_metadata_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^metadata: .* found str\)$"):
        maps_of_dcp("checkpoint")  # type: ignore[arg-type]


def test_what_torch_saves_is_read(tmp_path: Path) -> None:
    from torch.distributed import checkpoint

    state = {"model": {"w": torch.arange(6.0).view(2, 3), "steps": torch.tensor(3)}, "name": "run"}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        checkpoint.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    found = maps_of_dcp(checkpoint.FileSystemReader(str(tmp_path)).read_metadata())
    assert found.tensors == {"model.w": ("F32", (2, 3)), "model.steps": ("I64", ())}
    assert found.others == ("name",)
    assert [mapped.n_values for mapped in found.maps["model.w"]] == [6]
