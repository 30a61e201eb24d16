"""Bad input to the grouped GEMMs: an error that names the argument, before anything runs."""

import pytest
import torch

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.gemm.api import grouped_gemm, grouped_gemm_masked, grouped_gemm_swiglu
from fp8moe.quant.quantize import quantize_1x128, quantize_128x128
from tests.errors import refused

A, B = quantize_1x128(torch.randn(32, 144)), quantize_128x128(torch.randn(4, 24, 144))
OFFSETS = torch.tensor([0, 8, 16, 24, 32], dtype=torch.int32)
MASKED_A = tuple(t.unflatten(0, (4, 8)) for t in A)
MASKED_M = OFFSETS[:-1] // 3


def fp8(*shape):
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)


BAD_B = {
    "inner sizes": (
        dict(b=(fp8(4, 24, 128), B.scale)),
        ValueError,
        r"^b\.data: expected shape \(E, N, 144\) .*24, 128",
    ),
    "N": (dict(b=(fp8(4, 20, 144), B.scale)), ValueError, r"^b\.data: N must be a multiple of 8 .* got N = 20"),
    "b scale shape": (
        dict(b=(B.data, B.scale[:3])),
        ValueError,
        r"^b\.scale: expected shape \(4, 1, 2\).* \(3, 1, 2\)",
    ),
}
BAD = BAD_B | {
    "K": (
        dict(a=(fp8(32, 8), A.scale), b=(fp8(4, 24, 8), B.scale)),
        ValueError,
        r"^a\.data, b\.data: K must be a multiple of 16 .* got K = 8",
    ),
    "a scale shape": (dict(a=(A.data, A.scale[:, :1])), ValueError, r"^a\.scale: expected shape \(32, 2\).*\(32, 1\)"),
    "offsets length": (
        dict(group_offsets=OFFSETS[:-1]),
        ValueError,
        r"^group_offsets: expected shape \(E \+ 1,\) = \(5,\), got \(4,\)",
    ),
    "out shape": (dict(out=torch.zeros(24, 32)), ValueError, r"^out: expected shape \(32, 24\), got \(24, 32\)"),
    "out transposed": (dict(out=torch.zeros(24, 32).T), ValueError, r"^out: expected row-major, .* got \(1, 32\)"),
    "out rows": (dict(out=torch.zeros(32, 25)[:, :24]), ValueError, r"^out: .* a multiple of 4 .* got \(25, 1\)"),
    "out address": (dict(out=torch.zeros(32, 32)[:, 1:25]), ValueError, r"^out: .* start at a multiple of 16 bytes"),
}
BAD_MASKED = BAD_B | {
    "a rank": (dict(a=A), ValueError, r"^a\.data: expected shape \(E, max_m, K\), got \(32, 144\)"),
    "experts": (
        dict(b=(B.data[:3], B.scale[:3])),
        ValueError,
        r"^b\.data: expected shape \(4, N, K\), .*\(3, 24, 144\)",
    ),
    "a scale": (dict(a=(MASKED_A[0], A.scale)), ValueError, r"^a\.scale: expected shape \(4, 8, 2\).* got \(32, 2\)"),
    "mask length": (dict(masked_m=OFFSETS), ValueError, r"^masked_m: expected shape \(E,\) = \(4,\), got \(5,\)"),
    "expected_m type": (dict(expected_m=2.5), TypeError, r"^expected_m: expected an int or None, got float"),
    "expected_m bool": (dict(expected_m=True), TypeError, r"^expected_m: expected an int or None, got bool"),
    "expected_m negative": (dict(expected_m=-1), ValueError, r"^expected_m: expected a number of rows, got -1"),
    "out shape": (dict(out=torch.zeros(32, 24)), ValueError, r"^out: expected shape \(4, 8, 24\), got \(32, 24\)"),
    "out experts": (
        dict(out=torch.zeros(4, 9, 24)[:, :8]),
        ValueError,
        r"^out: expected all rows .* strides \(192, 24, 1\), got \(216, 24, 1\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    arguments, exception, message = BAD[case]
    refused(exception, message, grouped_gemm, **{"a": A, "b": B, "group_offsets": OFFSETS} | arguments)


@pytest.mark.parametrize("case", BAD_MASKED)
def test_bad_input_masked(case):
    arguments, exception, message = BAD_MASKED[case]
    refused(exception, message, grouped_gemm_masked, **{"a": MASKED_A, "b": B, "masked_m": MASKED_M} | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(gate_up=B), r"^gate_up\.data: expected 2 \* I rows an expert with I a multiple of 16, got 24"),
        (dict(gate_up=(fp8(4, 64, 144), B.scale)), r"^gate_up\.scale: expected shape \(4, 2, 2\)"),
        (dict(max_m=7), r"^a\.data: expected E \* max_m = 4 \* 7 rows, got 32"),
        (dict(groups=MASKED_M), r"^groups: expected shape \(E \+ 1,\) = \(5,\), got \(4,\)"),
        (dict(groups=OFFSETS, max_m=8), r"^groups: expected shape \(E,\) = \(4,\), got \(5,\)"),
    ],
)
def test_bad_input_swiglu(arguments, message):
    gate_up = (fp8(4, 64, 144), torch.ones(4, 2, 2))
    groups = MASKED_M if "max_m" in arguments else OFFSETS
    call = {"a": A, "gate_up": gate_up, "groups": groups, "activation": Activation()} | arguments
    refused(ValueError, message, grouped_gemm_swiglu, **call)


@pytest.mark.parametrize("name", ["a.data", "a.scale", "b.data", "b.scale", "group_offsets"])
def test_out_that_overlaps_an_operand(name):
    memory = torch.zeros(1 << 16, dtype=torch.uint8)

    def place(like, offset):
        return memory[offset : offset + like.nbytes].view(like.dtype).view(like.shape)

    values = {"a.data": A.data, "a.scale": A.scale, "b.data": B.data, "b.scale": B.scale, "group_offsets": OFFSETS}
    out = place(torch.empty(32, 24), 8192)
    last_byte = 8192 + out.nbytes - 16
    for offset, overlaps in ((last_byte, True), (last_byte + 16, False)):
        placed = values | {name: place(values[name], offset).copy_(values[name])}
        call = (placed["a.data"], placed["a.scale"]), (placed["b.data"], placed["b.scale"]), placed["group_offsets"]
        if overlaps:
            refused(ValueError, rf"^out: .* overlaps {name}", grouped_gemm, *call, out=out)
        else:
            grouped_gemm(*call, out=out)


@pytest.mark.parametrize("columns", [24, 32])
def test_masked_out_of_one_row_each(columns):
    """The stride of a dimension of size 1 is of no consequence, whatever PyTorch sets it to."""
    parent = torch.full((4, columns), 7.0)
    a, rows = tuple(value[:, :1] for value in MASKED_A), parent[:, :24]
    used = torch.tensor([1, 0, 0, 0], dtype=torch.int32)
    for out in (rows.unsqueeze(1), parent.unsqueeze(1)[..., :24], rows.as_strided((4, 1, 24), (columns, 1, 1))):
        parent.fill_(7)
        assert grouped_gemm_masked(a, B, used, out=out) is out
        assert torch.equal(rows[0].bfloat16(), grouped_gemm_masked(a, B, used)[0, 0])
        assert (parent[1:] == 7).all() and (parent[:, 24:] == 7).all()
    for strides in ((8, 24, 1), (25, 24, 1)):
        with pytest.raises(ValueError, match=r"^out: expected row-major, strides .*, got "):
            grouped_gemm_masked(a, B, used, out=torch.zeros(128).as_strided((4, 1, 24), strides))


def test_masked_out_that_overlaps_an_operand():
    out = torch.zeros(4, 8, 24)
    out.view(torch.int32).view(-1)[-4:] = MASKED_M
    with pytest.raises(ValueError, match=r"^out: .* overlaps masked_m"):
        grouped_gemm_masked(MASKED_A, B, out.view(torch.int32).view(-1)[-4:], out=out)
