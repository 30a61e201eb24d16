"""The GEMM kernels with weights in four bits: the bits of FP8 blocks of the same values, and float64."""

import itertools
from dataclasses import replace

import pytest
import torch

from benchmarks.operands import rounded_error
from fp8moe import (
    FP8Tensor,
    batch_invariant,
    experts,
    gemm,
    grouped_gemm,
    grouped_gemm_masked,
    quantize_1x128,
    quantize_int4,
    quantize_mxfp4,
)
from fp8moe.kernels.activation import Activation
from fp8moe.kernels.gemm import checks, tiles
from fp8moe.kernels.gemm.launch import GemmOperands, multiply_with
from fp8moe.kernels.gemm.sm90 import fits, with_stages
from fp8moe.kernels.gemm.tiles import Grouping
from fp8moe.quant.checks import weight_operand
from fp8moe.quant.packed import quantize_nvfp4
from tests.gemm_cases import exact, offsets
from tests.kernels.test_packed_weights import FORMS, in_blocks, multiplied, part, uneven

pytestmark = pytest.mark.gpu
E2M1 = ("mxfp4", "nvfp4")
ERROR = 3e-4  # beyond the rounding of the result
ROWS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 130, 300)
WEIGHTS = ((8, 32), (24, 96), (136, 160), (576, 576), (136, 2880), (256, 2048), (64, 7168))
SIZES = (0, 1, 7, 8, 9, 0, 16, 33, 64, 65, 2, 330)


def to_gpu(t):
    return type(t)(*(value.cuda() if isinstance(value, torch.Tensor) else value for value in t))


def rows_of(m, k, seed=0):
    return quantize_1x128(torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).cuda())


def weights(form, *shape, seed=0):
    return to_gpu(FORMS[form][0](uneven(*shape, seed=seed)))


def blocks(packed, matrices=1):
    cpu = (value.cpu() if isinstance(value, torch.Tensor) else value for value in packed)
    return to_gpu(in_blocks(type(packed)(*cpu), matrices))


@pytest.mark.parametrize(("n", "k"), WEIGHTS)
@pytest.mark.parametrize("form", FORMS)
def test_dense(form, n, k):
    if k % FORMS[form][1]:
        pytest.skip("K is no multiple of the group")
    b = weights(form, n, k)
    for m, dtype in itertools.product(ROWS, (torch.float32, torch.bfloat16)):
        a, bias = rows_of(m, k, m), torch.randn(n, device="cuda")
        out = gemm(a, b, bias=bias, out=torch.full((m, n), torch.nan, dtype=dtype, device="cuda"))
        assert rounded_error(out, exact(a, multiplied(b), bias)) < ERROR, (m, dtype)


@pytest.mark.parametrize(("n", "k"), WEIGHTS)
@pytest.mark.parametrize("form", E2M1)
def test_dense_has_the_bits_of_blocks(form, n, k):
    b = weights(form, 1, n, k)
    b, same = part(b, 0), part(blocks(b), 0)
    for m in ROWS:
        a = rows_of(m, k, m)
        with batch_invariant():
            assert torch.equal(gemm(a, b, out_dtype=torch.float32), gemm(a, same, out_dtype=torch.float32)), m


@pytest.mark.parametrize(("n", "k"), [(576, 2880), (256, 768), (136, 2048)])
@pytest.mark.parametrize("form", E2M1)
def test_every_tile_has_the_bits_of_blocks(form, n, k):
    """With as many parts of K; in every layout of the groups, and twenty times the same."""
    b = weights(form, len(SIZES), n, k)
    same, bounds, m = blocks(b), offsets(list(SIZES)).cuda(), sum(SIZES)
    a = rows_of(m, k)
    problem = tiles.GroupedProblem(m, len(SIZES), m / len(SIZES), n, k, 132, packed=form)
    wrong = {}
    for tile in {replace(one, stages=0) for one in tiles.grouped_candidates(problem)}:
        outs = []
        for weight, packed in ((same, None), (FP8Tensor(*weight_operand("b", b)), form)):
            config = with_stages(replace(tile, packed=packed, blocks_per_sm=tile.blocks_per_sm if packed else 1), k)
            if not fits(config, k):
                break
            out = torch.full((m, n), torch.nan, device="cuda")
            operands = GemmOperands(*a, *checks.weights(weight.data, weight.scale), groups=bounds)
            for _ in range(20 if packed else 1):
                multiply_with(config, operands, out, Grouping())
                outs.append(out.clone())
        if len(outs) > 1 and not all(torch.equal(outs[0], out) for out in outs[1:]):
            wrong[tile.name] = [i for i, out in enumerate(outs) if not torch.equal(outs[0], out)]
    assert not wrong


@pytest.mark.parametrize("form", FORMS)
def test_groups(form):
    b, bounds = weights(form, len(SIZES), 136, 256), offsets(list(SIZES), start=2).cuda()
    a = rows_of(sum(SIZES) + 3, 256)
    out = grouped_gemm(a, b, bounds, out=torch.full((len(a.data), 136), torch.nan, device="cuda"))
    for e, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
        rows = FP8Tensor(a.data[start:end], a.scale[start:end])
        assert rounded_error(out[start:end], exact(rows, multiplied(part(b, e)))) < ERROR or start == end
    assert out[:2].isnan().all() and out[-1].isnan().all()
    used = torch.tensor(SIZES, dtype=torch.int32, device="cuda").clamp(max=70)
    x = quantize_1x128(torch.randn(len(SIZES), 70, 256, device="cuda"))
    masked = grouped_gemm_masked(x, b, used, out=torch.full((len(SIZES), 70, 136), torch.nan, device="cuda"))
    for e, count in enumerate(used.tolist()):
        rows = FP8Tensor(x.data[e, :count], x.scale[e, :count])
        if count:
            assert rounded_error(masked[e, :count], exact(rows, multiplied(part(b, e)))) < ERROR
        assert masked[e, count:].isnan().all()


@pytest.mark.parametrize("tokens", [1, 8, 64, 300])
@pytest.mark.parametrize(("hidden", "size"), [(256, 128), (2880, 2880), (2048, 768)])
@pytest.mark.parametrize("activation", [Activation(), Activation(limit=7.0, alpha=1.702)])
@pytest.mark.parametrize("form", E2M1)
def test_experts_have_the_bits_of_blocks(form, tokens, hidden, size, activation):
    up, down = weights(form, 8, 2 * size, hidden), weights(form, 8, hidden, size, seed=1)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    index, routed = torch.randint(0, 8, (tokens, 2), device="cuda"), torch.rand(tokens, 2, device="cuda")
    with batch_invariant():
        out = experts(x, index, routed, up, down, activation=activation)
        assert torch.equal(out, experts(x, index, routed, blocks(up, 2), blocks(down), activation=activation))
        assert all(torch.equal(out, experts(x, index, routed, up, down, activation=activation)) for _ in range(20))


def test_scales_at_any_address():
    a, b = rows_of(5, 512), quantize_mxfp4(torch.randn(16, 512)).scale
    packed = to_gpu(quantize_mxfp4(torch.randn(16, 512)))
    shifted = torch.empty(b.numel() + 1, dtype=torch.uint8, device="cuda")[1:].view(b.shape).copy_(packed.scale)
    assert torch.equal(gemm(a, packed), gemm(a, packed._replace(scale=shifted)))


def test_graph():
    b = to_gpu(quantize_int4(torch.randn(64, 256), group=32))
    a = rows_of(9, 256)
    out = gemm(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm(a, b, out=out)
    a.data.copy_(rows_of(9, 256, 1).data)
    graph.replay()
    assert torch.equal(out, gemm(a, b))


@pytest.mark.parametrize("rows", [4, 400])
def test_what_is_not_finite_stays_in_its_row(rows):
    """Nor does what lies behind a stage or a tile in memory count: K and N end within both."""
    a, w = rows_of(rows, 608), torch.randn(2, 264, 608)
    w[0, 5, 70], w[0, 200, 3], w[1, :9, :32] = torch.nan, torch.inf, torch.nan
    bounds = offsets([rows - 1, 1]).cuda()
    out = grouped_gemm(a, to_gpu(quantize_mxfp4(w)), bounds)
    expected = torch.zeros(rows, 264, dtype=torch.bool, device="cuda")
    expected[:-1, [5, 200]], expected[-1, :9] = True, True
    nvfp4 = to_gpu(quantize_nvfp4(w.nan_to_num(0, 0)))
    nvfp4.scale[0, [5, 200], 3], nvfp4.scale[1, :9, 1] = torch.nan, -1.0
    assert torch.equal(grouped_gemm(a, nvfp4, bounds).isnan(), expected)
    assert torch.equal(out.isnan(), expected) and out[~expected].isfinite().all()
