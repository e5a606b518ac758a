"""Tensors as bits and back: every dtype of numpy and torch, odd memory, and what must be refused."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from dcr_store.errors import InvalidInputError
from dcr_store.layout.dtypes import DTYPES, n_elements, uint_dtype
from dcr_store.layout.tensors import as_bits, memory_key, to_array

SHAPES = [(), (1,), (7,), (3, 4), (2, 3, 2), (0,), (2, 0, 4)]


def random_bits(name: str, shape: tuple[int, ...]) -> Any:
    row = DTYPES[name]
    octets = np.random.default_rng(len(name) + len(shape)).integers(
        0, 256, n_elements(row, shape) * row.width, np.uint8
    )
    return octets.view(uint_dtype(row.space))


def comes_back_packed(name: str, shape: tuple[int, ...], framework: str) -> bool:
    return name.startswith("F6_") or (name == "F4" and (framework == "numpy" or not shape or shape[-1] % 2 == 1))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_there_and_back(name: str, shape: tuple[int, ...], framework: Any) -> None:
    bits = random_bits(name, shape)
    array = to_array(bits, name, shape, framework)
    if comes_back_packed(name, shape, framework):
        name, shape = "U8", bits.shape
    if name == "F4":
        assert array.dtype == torch.float4_e2m1fn_x2
    result = as_bits("a", array)
    assert (result.dtype, result.shape) == (name, shape)
    assert result.bits.dtype == bits.dtype
    assert result.bits.tobytes() == bits.tobytes()
    assert result.shares_memory == (bits.size > 0)
    if bits.size:
        assert result.bits.ctypes.data == bits.ctypes.data


@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("BF16", [0x0000, 0x8000, 0x7FC0, 0x7F81, 0xFFFF, 0x7F80, 0xFF80, 0x0001, 0x807F, 0x3F80]),
        ("F16", [0x0000, 0x8000, 0x7E00, 0x7C01, 0xFFFF, 0x7C00, 0x0001, 0x83FF]),
        ("F32", [0x00000000, 0x80000000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x00000001, 0x807FFFFF]),
        ("F64", [0, 1 << 63, 0x7FF8000000000000, 0x7FF0000000000001, (1 << 64) - 1, 1]),
        ("F8_E4M3", [0x00, 0x80, 0x7F, 0xFF, 0x01, 0x7E]),
        ("F8_E5M2", [0x00, 0x80, 0x7D, 0x7E, 0x7F, 0xFD, 0x7C]),
        ("F8_E8M0", [0x00, 0xFF, 0x7F]),
        ("F8_E4M3FNUZ", [0x00, 0x80, 0x7F, 0xFF]),
        ("F8_E5M2FNUZ", [0x00, 0x80, 0x7F, 0xFF]),
        ("BOOL", [0, 1, 2, 255]),
        ("C64", [0x7F80000180000000, 0x800000007FC00001, 0x1]),
    ],
)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_nans_zeros_and_subnormals_keep_their_bits(name: str, patterns: list[int], framework: Any) -> None:
    bits = np.array(patterns, uint_dtype(DTYPES[name].space))
    array = to_array(bits, name, (len(patterns),), framework)
    assert as_bits("a", array).bits.tolist() == patterns
    strided = array[::2]
    assert as_bits("a", strided).bits.tolist() == patterns[::2]
    assert not as_bits("a", strided).shares_memory


def test_all_bfloat16_values_pass_through_both_frameworks() -> None:
    bits = np.arange(1 << 16, dtype="<u2")
    for framework in ("numpy", "torch"):
        array = to_array(bits, "BF16", (256, 256), framework)  # type: ignore[arg-type]
        assert np.array_equal(as_bits("a", array.T).bits, bits.reshape(256, 256).T.reshape(-1))


@pytest.mark.parametrize("dtype", [np.float16, np.int32, np.float64, np.complex64, np.complex128, np.bool_, np.uint8])
def test_memory_of_numpy_arrays(dtype: Any) -> None:
    base = np.arange(60).reshape(3, 4, 5).astype(dtype)
    for array in (base, base[::2], base[:, 1:3], base[::-1], base.transpose(2, 0, 1), np.asfortranarray(base)):
        expected = np.ascontiguousarray(array)
        result = as_bits("a", array)
        assert result.shape == array.shape
        assert result.bits.tobytes() == expected.tobytes()
        assert result.shares_memory == bool(array.flags.c_contiguous)
        assert result.bits.flags.aligned
        assert result.bits.ndim == 1
    swapped = base.astype(base.dtype.newbyteorder(">"))
    result = as_bits("a", swapped)
    assert result.bits.tobytes() == base.tobytes()
    assert result.shares_memory == (base.itemsize == 1)


def test_big_endian_signalling_nans_keep_their_payload() -> None:
    bits = np.array([0x7F800001, 0x80000000, 0xFFC12345], "<u4")
    big = bits.byteswap().view(">f4")
    assert as_bits("a", big).bits.tolist() == bits.tolist()


def test_unaligned_memory_is_copied() -> None:
    octets = np.arange(9, dtype=np.uint8)
    result = as_bits("a", octets[1:].view("<u4"))
    assert result.bits.tobytes() == octets[1:].tobytes()
    assert result.bits.flags.aligned
    assert not result.shares_memory


def test_read_only_memory_stays_read_only() -> None:
    array = np.arange(4, dtype=np.float32)
    array.flags.writeable = False
    result = as_bits("a", array)
    assert result.shares_memory
    assert not result.bits.flags.writeable
    back = to_array(result.bits, "F32", (4,), "torch")
    back[0] = 9  # a copy: torch has no read-only tensors
    assert array[0] == 0
    assert to_array(result.bits, "F32", (4,)).ctypes.data == array.ctypes.data


def test_numpy_scalars() -> None:
    result = as_bits("a", np.float32(1.5))
    assert (result.dtype, result.shape, result.bits.tolist()) == ("F32", (), [0x3FC00000])
    assert not result.shares_memory
    assert as_bits("a", ml_dtypes.bfloat16(1)).bits.tolist() == [0x3F80]


def test_shared_memory_can_be_written() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    as_bits("a", parameter).bits[1] = 0x3F800000
    assert parameter.tolist() == [0, 1, 0]


def test_lazy_torch_tensors_are_resolved() -> None:
    z = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, -0.0]))
    conjugated = z.conj()
    assert conjugated.is_conj()
    result = as_bits("a", conjugated)
    assert result.bits.tobytes() == z.numpy().conj().tobytes()
    assert not result.shares_memory
    negative = conjugated.imag
    assert negative.is_neg()
    assert as_bits("a", negative).bits.view("<f4").tolist() == [-3.0, 0.0]


def test_torch_views() -> None:
    base = torch.arange(24, dtype=torch.int16).reshape(4, 6)
    for tensor in (base, base.t(), base[1:3, ::2], base[0].expand(3, 6), base[2, 3]):
        result = as_bits("a", tensor)
        assert result.bits.view("<i2").tolist() == tensor.reshape(-1).tolist()
        assert result.shape == tuple(tensor.shape)
    assert as_bits("a", base[2, 3]).shares_memory


class Wrapper(torch.Tensor):
    """A tensor whose data are elsewhere, as DTensor is."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (lambda: torch.zeros(2).to_sparse(), "sparse"),
        (lambda: torch.zeros(2, 2).to_sparse_csr(), "sparse"),
        (lambda: torch.zeros(2, device="meta"), "meta"),
        (lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "quantised"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "nested"),
        (lambda: torch.zeros(2).as_subclass(Wrapper), "Wrapper without storage"),
        (lambda: torch.zeros(2, dtype=torch.complex32), "complex32"),
        (lambda: torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "scalar"),
        (lambda: np.array(["text"]), "<U4"),
        (lambda: np.array([b"text"]), "S4"),
        (lambda: np.array([None]), "object"),
        (lambda: np.zeros(2, "i4,f4"), "f0"),
        (lambda: np.zeros(2, "V2"), "V2"),
        (lambda: np.zeros(2, np.longdouble), "dtype"),
        (lambda: np.zeros(2, np.clongdouble), "dtype"),
        (lambda: np.zeros(2, "M8[s]"), "datetime64"),
        (lambda: np.ma.masked_array([1.0, 2.0], [True, False]), "masked"),
        (lambda: np.zeros(2, ml_dtypes.float4_e2m1fn), "float4_e2m1fn"),
        (lambda: np.zeros(2, ml_dtypes.float8_e4m3b11fnuz), "float8_e4m3b11fnuz"),
        (lambda: np.zeros(2, ml_dtypes.int4), "int4"),
        (lambda: [1.0], "list"),
        (lambda: 1.0, "float"),
        (lambda: None, "NoneType"),
    ],
)
def test_what_cannot_be_stored_is_refused(tensor: Callable[[], Any], match: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = tensor()
    with pytest.raises(InvalidInputError, match=match) as caught:
        as_bits("layers.0.q_proj.weight", value)
    assert "layers.0.q_proj.weight" in str(caught.value)
    assert "expected None" not in str(caught.value)


@pytest.mark.parametrize(
    ("bits", "dtype", "shape", "framework"),
    [
        (np.zeros(4, "<u4"), "BF16", (4,), "numpy"),
        (np.zeros(4, "<u2"), "BF16", (5,), "numpy"),
        (np.zeros((2, 2), "<u2"), "BF16", (2, 2), "numpy"),
        (np.zeros(4, "<i2"), "BF16", (4,), "numpy"),
        (np.zeros(4, "<u2"), "BF17", (4,), "numpy"),
        (np.zeros(4, "<u2"), "BF16", (4,), "jax"),
    ],
)
def test_bits_that_do_not_fit_are_refused(bits: Any, dtype: str, shape: tuple[int, ...], framework: Any) -> None:
    with pytest.raises(InvalidInputError):
        to_array(bits, dtype, shape, framework)


def test_a_dtype_that_this_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    with pytest.raises(InvalidInputError, match="no dtype for F8_E8M0"):
        to_array(np.zeros(2, np.uint8), "F8_E8M0", (2,), "torch")


def test_strided_bits_are_accepted() -> None:
    bits = np.arange(8, dtype="<u2")[::2]
    assert to_array(bits, "U16", (2, 2)).tolist() == [[0, 2], [4, 6]]
    assert to_array(bits, "U16", (2, 2), "torch").tolist() == [[0, 2], [4, 6]]


def test_tied_tensors_have_one_key() -> None:
    embed = torch.nn.Embedding(4, 3)
    head = torch.nn.Linear(3, 4, bias=False)
    head.weight = embed.weight
    assert memory_key(embed.weight) == memory_key(head.weight) == memory_key(embed.weight.detach())
    base = np.arange(12.0).reshape(3, 4)
    assert memory_key(base) == memory_key(base[:]) == memory_key(base.view())
    assert memory_key(base[:1]) == memory_key(np.lib.stride_tricks.as_strided(base, (1, 4), (8, 8)))


@pytest.mark.parametrize(
    "other",
    [
        lambda t: t.t(),
        lambda t: t[:2],
        lambda t: t[1:],
        lambda t: t.reshape(-1),
        lambda t: t.view(torch.int32),
        lambda t: t.clone(),
        lambda t: t[::2],
    ],
)
def test_other_views_of_the_same_memory_have_other_keys(other: Callable[[Any], Any]) -> None:
    tensor = torch.arange(9, dtype=torch.float32).reshape(3, 3)
    view = other(tensor)
    assert memory_key(tensor) != memory_key(view)
    assert memory_key(tensor) is not None


def test_lazy_views_and_small_floats_have_other_keys() -> None:
    z = torch.zeros(2, dtype=torch.complex64)
    assert memory_key(z) != memory_key(z.conj())
    octets = np.zeros(4, np.uint8)
    assert memory_key(octets.view(ml_dtypes.float8_e4m3fn)) != memory_key(octets.view(ml_dtypes.float8_e5m2))


def test_tensors_without_memory_have_no_key() -> None:
    for tensor in (np.zeros(0), np.float32(1), 1.0, None, torch.zeros(0), torch.zeros(2, device="meta")):
        assert memory_key(tensor) is None


def test_torch_is_not_imported_for_numpy_arrays() -> None:
    code = (
        "import sys, numpy as np\n"
        "from dcr_store.layout.tensors import as_bits, memory_key, to_array\n"
        "a = as_bits('a', np.zeros(3)); to_array(a.bits, a.dtype, a.shape); memory_key(np.zeros(3))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", [name for name in DTYPES if not DTYPES[name].packed])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 0), (0, 3), (1, 1)])
def test_torch_tensors_of_few_values_and_any_stride(name: str, shape: tuple[int, ...]) -> None:
    bits = random_bits(name, (40,))
    memory = to_array(bits, name, (40,), "torch")
    found = as_bits("a", memory.as_strided(shape, [7, 2][: len(shape)], 1))
    assert (found.dtype, found.shape) == (name, shape)
    assert found.bits.tobytes() == bits.reshape(40, -1)[1 : 1 + int(np.prod(shape))].tobytes()
