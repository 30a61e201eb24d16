"""Weights with a scale for each output channel, on a GPU."""

import pytest
import torch

from fp8moe import gemm
from fp8moe.kernels.gemm.launch import GemmOperands, multiply_with
from fp8moe.kernels.gemm.sm90 import TileConfig
from tests import channel_cases
from tests.channel_cases import rows, weight
from tests.gpu.checks import captured

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("n", [8, 136, 1536, 2112])
@pytest.mark.parametrize("m", [1, 7, 64, 130, 1024, 4096])
@pytest.mark.parametrize("k", [16, 528, 2048])
def test_dense(m, n, k):
    channel_cases.check_dense("cuda", m, n, k)


@pytest.mark.parametrize("n", [264, 576, 2112])
def test_a_last_wave_of_few_tiles(n):
    """Halve last tiles whose second half has no features."""
    m = 128 * (132 // -(-n // 256) + 1)
    a, b, outs = rows("cuda", m, 2048), weight("cuda", n, 2048), []
    for tile in (TileConfig(128, 256, half_tiles=True), TileConfig(128, 128)):
        outs.append(torch.full((m, n), torch.nan, dtype=torch.bfloat16, device="cuda"))
        multiply_with(tile, GemmOperands(*a, *b), outs[-1])
    assert torch.equal(*outs) and channel_cases.is_close(outs[0], channel_cases.exact(a, b))


@pytest.mark.parametrize("sizes", [[1], [3, 0, 1, 17], [130, 64, 0, 700], [2000, 1, 0, 3000]])
@pytest.mark.parametrize(("n", "k"), [(136, 272), (2048, 1408), (768, 4096)])
def test_groups(sizes, n, k):
    channel_cases.check_grouped("cuda", sizes, n, k)
    channel_cases.check_swiglu("cuda", sizes, n // 2 // 16 * 16, k)


@pytest.mark.parametrize(("hidden", "size"), [(144, 72), (100, 50), (2048, 768)])
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_layers(tokens, hidden, size):
    layer, x, index, routing = channel_cases.check_layers("cuda", tokens, 8, hidden, size)
    graph, out = captured(lambda: layer(x, index, routing))
    x.mul_(-0.5)
    graph.replay()
    assert torch.equal(out, layer(x, index, routing))


def test_a_nan_stays_in_its_row():
    a, b = rows("cuda", 70, 512), weight("cuda", 256, 512)
    a.data.view(torch.uint8)[3, 5] = 0x7F
    out = gemm(a, b)
    assert out[3].isnan().all() and out[:3].isfinite().all() and out[4:].isfinite().all()
    b.scale[9] = torch.nan
    assert gemm(a, b)[:, 9].isnan().all() and gemm(a, b)[:3, :9].isfinite().all()
