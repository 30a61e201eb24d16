"""The transposed FP8 weights have the bits of the originals, and nothing else is written."""

import pytest
import torch

from fp8moe.quant import transpose
from fp8moe.quant.formats import ceil_div
from fp8moe.quant.quantize import has_vector_rows, quantize_128x128
from fp8moe.quant.transpose import transpose_fp8
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
