"""The worked chunks of docs/spec/v1.md, section 6.2: what the document says is what the code does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dcr_store.codec import chunk

SPEC = Path(__file__).parents[3] / "docs" / "spec" / "v1.md"


def examples() -> list[tuple[str, np.ndarray, bytes]]:
    text = SPEC.read_text("utf-8").split("<!-- chunk-examples -->")[1].split("<!-- /chunk-examples -->")[0]
    found = []
    for row in text.strip().splitlines()[2:]:
        name, width, n, elements, encoded = (cell.strip() for cell in row.strip("|").split("|"))
        mask = np.zeros(int(n), f"u{width}")
        for run in [] if elements == "none" else elements.split(";"):
            where, content = run.split(":")
            first, _, last = where.partition("..")
            values = [int(value, 16) for value in content.split()]
            stop = int(last) + 1 if last else int(first) + len(values)
            mask[int(first) : stop] = values
        found.append((name, mask, bytes.fromhex(encoded.strip("`"))))
    return found


EXAMPLES = examples()


@pytest.mark.parametrize(("name", "mask", "encoded"), EXAMPLES, ids=[name for name, _, _ in EXAMPLES])
def test_example(name: str, mask: np.ndarray, encoded: bytes, engine: str) -> None:
    assert np.array_equal(chunk.decode(encoded, mask.dtype, len(mask)), mask)
    positions, values = chunk.decode_sparse(encoded, mask.dtype, len(mask))
    assert np.array_equal(positions, np.flatnonzero(mask))
    assert np.array_equal(values, mask[positions])
    made = chunk.encode(mask)
    if "zstd" in name:  # other versions of zstd make other frames
        assert made[:8] == encoded[:8]
    else:
        assert made == encoded


def test_examples_cover_the_format() -> None:
    assert {encoded[0] for _, _, encoded in EXAMPLES} == set(chunk.METHODS)
    assert {encoded[3] for _, _, encoded in EXAMPLES if encoded[0] in (chunk.SPARSE, chunk.BITMAP)} == {0, 1}
    assert any(encoded[0] == chunk.SPARSE and encoded[2] for _, _, encoded in EXAMPLES)
    assert any(encoded[0] == chunk.SPARSE and b"\xff" in encoded[11:] for _, _, encoded in EXAMPLES)
    assert any(b"\x28\xb5\x2f\xfd" in encoded for _, _, encoded in EXAMPLES)
