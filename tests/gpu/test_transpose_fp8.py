"""The transposed FP8 weights have the bits of the originals, and nothing else is written."""

import math

import pytest
import torch

from fp8moe.quant import transpose
from fp8moe.quant.formats import ceil_div
from fp8moe.quant.quantize import Places, has_vector_rows, launch_128x128, quantize_128x128
from fp8moe.quant.transpose import backward_operand, quantize_both_ways, transpose_fp8, transposed_weight
from tests.gpu.checks import marked

pytestmark = pytest.mark.gpu

SIZES = (
    *((128, 128), (256, 384), (2048, 7168), (16, 16), (8, 16), (136, 272), (1000, 2064), (127 * 16, 129 * 16)),
    *((264, 40), (131, 261), (1, 1), (1, 300), (300, 1), (144, 24)),
)


def random(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code there is, NaN too, and the bits of any float32 as scales."""
    generator = torch.Generator("cuda").manual_seed(seed)
    *lead, n, k = shape
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device="cuda")
    blocks = (*lead, ceil_div(n, 128), ceil_div(k, 128))
    scale = torch.randint(-(2**31), 2**31 - 1, blocks, dtype=torch.int32, generator=generator, device="cuda")
    return data.view(torch.float8_e4m3fn), scale.view(torch.float32)


def write(data: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes and words that the kernel writes over marks, and that nothing behind them is written."""
    *lead, n, k = data.shape
    launcher = transpose.fp8_launcher(data.get_device(), data, scale, has_vector_rows(data))
    with marked(data.numel(), scale.nbytes) as (data_out, scale_out):
        launcher(data, scale, data_out, scale_out)
    return data_out.view(*lead, k, n), scale_out.view(torch.int32).view(*lead, *reversed(scale.shape[-2:]))


def assert_transposed(data: torch.Tensor, scale: torch.Tensor, data_out: torch.Tensor, scale_out: torch.Tensor) -> None:
    assert torch.equal(data_out.view(torch.uint8), data.view(torch.uint8).mT)
    assert torch.equal(scale_out.view(torch.int32), scale.view(torch.int32).mT)


@pytest.mark.parametrize("n,k", SIZES)
@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 2)])
def test_bits(lead, n, k):
    data, scale = random(*lead, n, k)
    assert_transposed(data, scale, *write(data, scale))


def test_operator():
    data, scale = random(3, 136, 288)
    strided = data.view(torch.uint8)[:, :, 16:].view(data.dtype), random(3, 136, 272)[1].mT.contiguous().mT
    t = transpose_fp8(strided)
    assert t.data.is_contiguous() and t.scale.is_contiguous()
    assert_transposed(*strided, *t)
    quantized = quantize_128x128(torch.randn(2, 200, 400, device="cuda"))
    assert_transposed(*quantized, *transpose_fp8(quantized))
    for shape in ((0, 128), (128, 0), (0, 16, 16)):
        t = transpose_fp8(random(*shape))
        assert t.data.shape == (*shape[:-2], shape[-1], shape[-2]) and not t.data.numel()


def test_past_two_to_the_31_elements():
    data, scale = random(80, 4096, 7168)
    assert data.numel() > 1 << 31
    t = transpose_fp8((data, scale))
    for expert in (0, 41, 79):
        assert_transposed(data[expert], scale[expert], t.data[expert], t.scale[expert])


# ---- weights quantized both ways ----


def write_both_ways(w: torch.Tensor) -> list[torch.Tensor]:
    """The bytes and words that the kernel writes over marks, and that nothing behind them is written."""
    *lead, n, k = w.shape
    blocks = math.prod(lead) * ceil_div(n, 128) * ceil_div(k, 128)
    with marked(*2 * (w.numel(), 4 * blocks)) as results:
        launch_128x128(w, "float32", results[:2], Places(n, ceil_div(n, 128)), results[2:])
    data, scale, data_out, scale_out = results
    sizes = ceil_div(n, 128), ceil_div(k, 128)
    return [
        *(data.view(*lead, n, k), scale.view(torch.float32).view(*lead, *sizes)),
        *(data_out.view(*lead, k, n), scale_out.view(torch.float32).view(*lead, *reversed(sizes))),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("n,k", SIZES)
@pytest.mark.parametrize("lead", [(), (1,), (3,)])
def test_both_ways_have_the_bits_of_quantization_and_transpose(lead, n, k, dtype):
    generator = torch.Generator("cuda").manual_seed(n + k)
    w, below = (torch.randn(*lead, n, k, device="cuda", generator=generator).to(dtype) for _ in range(2))
    if n > 3:
        w[..., 3, k // 2] = float("nan")
        below[..., n - 1, k - 1] = float("inf")
    expected = quantize_128x128(w)
    first = write_both_ways(w)
    assert torch.equal(first[0].view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(first[1].view(torch.int32), expected.scale.view(torch.int32))
    assert_transposed(*expected, *first[2:])
    for _ in range(19):
        for again, once in zip(write_both_ways(w), first, strict=True):
            assert torch.equal(again.view(torch.uint8), once.view(torch.uint8))
    found = quantize_both_ways(w, below)
    other = quantize_128x128(below)
    assert torch.equal(found.data[..., :n, :].view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(found.data[..., n:, :].view(torch.uint8), other.data.view(torch.uint8))
    assert torch.equal(found.scale.view(torch.int32), torch.cat([expected.scale, other.scale], -2).view(torch.int32))
    assert_transposed(*found, *transposed_weight(backward_operand(found)))


def test_both_ways_of_strided_weights_and_in_a_graph():
    w = torch.randn(2, 256, 400, device="cuda", dtype=torch.bfloat16)
    for view in (w[:, :, 8:264], w[:, 128:, :136], w.mT, w[:, :, ::2]):
        found = quantize_both_ways(view)
        transposed = transposed_weight(backward_operand(found))
        assert_transposed(*quantize_128x128(view.contiguous()), *transposed)
        assert torch.equal(found.data.view(torch.uint8), quantize_128x128(view.contiguous()).data.view(torch.uint8))
    graph = torch.cuda.CUDAGraph()
    quantize_both_ways(w)
    with torch.cuda.graph(graph):
        found = quantize_both_ways(w)
        transposed = transposed_weight(backward_operand(found))
    for seed in range(3):
        w.copy_(torch.randn(w.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert_transposed(*quantize_128x128(w), *transposed)


def test_out_that_is_half_of_a_gate_up_proj():
    for n, k in ((128, 256), (200, 144), (70, 33)):
        w = torch.randn(3, n, k, device="cuda")
        whole = torch.zeros(3, 2 * n, k, device="cuda").to(torch.float8_e4m3fn)
        scale = torch.zeros(3, 2 * -(-n // 128), -(-k // 128), device="cuda")
        out = whole[:, n:], scale[:, -(-n // 128) :]
        quantize_128x128(w, out=out)
        expected = quantize_128x128(w)
        assert torch.equal(out[0].view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(out[1], expected.scale)
        assert not whole[:, :n].view(torch.uint8).any() and not scale[:, : -(-n // 128)].any()
