"""Pieces that are encoded together: each as by itself, against whole chunks; what does not decode is refused."""

from __future__ import annotations

import numpy as np
import pytest

from dcr_store.codec.digest import crc64, linear
from dcr_store.codec.portable import get_codec
from dcr_store.errors import IntegrityError
from dcr_store.layout.boxes import Dim, box
from dcr_store.layout.pieces import Piece
from dcr_store.publish.slice_encoding import compare_piece, encode_pieces

SIZE = 4096
CODEC = get_codec("dcr.delta")
PIECES = [Piece("u16", chunk, (box(0, 8 * chunk, [Dim(64, 8, 64), Dim(8, 1, 1)]),)) for chunk in range(5)]
N = 512


def states(seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Base and new of each piece; those with odd numbers do not change, and some new values are zero."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(len(PIECES)):
        base = rng.integers(1, 1 << 16, N).astype(np.uint16)
        new = base.copy()
        if number % 2 == 0:
            new[rng.choice(N, 40, replace=False)] += np.uint16(1)
            new[5] = 0
        found.append((base, new))
    return found


@pytest.mark.parametrize("is_residual", [False, True])
def test_pieces_are_encoded_as_whole_chunks_would_be(is_residual: bool) -> None:
    pairs = states()
    found = [compare_piece(base, crc64(base), new) for base, new in pairs]
    encoded = encode_pieces(
        CODEC, PIECES, [item for item in found if item], SIZE, plain=[False] * 5, is_residual=is_residual
    )
    assert len(encoded) == len(PIECES)
    for piece, (base, new), item in zip(PIECES, pairs, encoded, strict=True):
        chunks = np.zeros((2, SIZE), np.uint16)
        for chunk, packed in zip(chunks, (base, new), strict=True):
            piece.spread(packed, chunk)
        mask = chunks[0] ^ chunks[1]
        assert item.change == linear(crc64(mask), mask.nbytes)
        assert item.difference is not None
        assert item.difference.digest == crc64(new)
        present = (mask != 0).astype(np.uint8)
        whole = {"mask": mask} if not is_residual else {"present": present, "value": np.where(mask != 0, chunks[1], 0)}
        assert item.arrays == {kind: CODEC.encode(chunk) for kind, chunk in whole.items() if mask.any()}


def test_a_base_that_is_another_is_noticed_and_the_new_bits_stay() -> None:
    base, new = states()[0]
    kept = new.copy()
    assert compare_piece(base, crc64(base) ^ 1, new) is None
    assert np.array_equal(new, kept)


def test_what_does_not_decode_to_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [compare_piece(base, crc64(base), new) for base, new in states()]
    codec = get_codec("portable")
    encode, n_calls = codec.encode_sparse, [0]

    def wrong(positions: np.ndarray, values: np.ndarray, n_elements: int) -> bytes:
        n_calls[0] += 1
        return encode(positions, values ^ np.uint16(2) if n_calls[0] == 3 else values, n_elements)

    monkeypatch.setattr(codec, "encode_sparse", wrong)
    with pytest.raises(IntegrityError, match="chunk 4 of u16 does not decode to what was encoded"):
        encode_pieces(codec, PIECES, [item for item in found if item], SIZE, plain=[False] * 5)
