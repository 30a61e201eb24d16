"""FP8Linear on the CUDA backend."""

import copy

import pytest
import torch
from torch import nn

from fp8moe.layers.linear import FP8Linear, replace_linears
from tests.compilers import CUDA_INDUCTOR
from tests.gpu.checks import memory_of
from tests.layers.test_linear import check_compile, test_forward  # noqa: F401
from tests.linear_reference import close

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def test_agrees_with_the_layer_on_the_cpu():
    layer = FP8Linear(272, 136)
    x = torch.randn(3, 5, 272)
    on_gpu = copy.deepcopy(layer).to(DEVICE)
    assert on_gpu.weight.dtype == torch.float8_e4m3fn and on_gpu.weight.is_cuda
    close(on_gpu(x.to(DEVICE)).cpu(), layer(x))


def test_back_to_back_layers_do_not_share_memory():
    """Scratch of one call is free for the next while its kernels still run: the order on the stream must protect it."""
    layers = [FP8Linear(1024, 1024, bias=False, device=DEVICE) for _ in range(8)]
    x = torch.randn(64, 1024, dtype=torch.bfloat16, device=DEVICE)
    expected = []
    with torch.no_grad():
        for layer in layers:
            expected.append(layer(x))
            torch.cuda.synchronize()
        for _ in range(5):
            outs = [layer(x) for layer in layers]
            assert all(torch.equal(*pair) for pair in zip(outs, expected, strict=True))


def test_memory_of_a_call():
    layer = FP8Linear(7168, 7168, device=DEVICE)
    x = torch.randn(64, 7168, dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        out, peak, kept = memory_of(lambda: layer(x))
    assert peak <= out.nbytes + x.numel() + 4 * 64 * 56 + 2048  # with the quantized x
    assert kept <= out.nbytes + 512


@pytest.mark.parametrize("backend", ["aot_eager", CUDA_INDUCTOR])
def test_compile(backend, fresh_compiler):
    check_compile(backend, DEVICE)


def test_replace():
    model = nn.Sequential(nn.Linear(576, 1536), nn.SiLU(), nn.Linear(1536, 576)).to(DEVICE, torch.bfloat16)
    x = torch.randn(64, 576, dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():  # a graph would keep the weights
        expected = model(x)
    before = torch.cuda.memory_allocated()
    assert replace_linears(model) == ["0", "2"]
    assert before - torch.cuda.memory_allocated() > 0.45 * 2 * 2 * 576 * 1536
    assert (model(x) - expected).norm() < 0.08 * expected.norm()
