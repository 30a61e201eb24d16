"""Batch invariance on the kernels: the bits of a row alone, and in batches of up to 4096 rows."""

from functools import partial

import pytest
import torch

import fp8moe
from benchmarks.operands import rounded_error
from fp8moe.kernels.decoder_ops.router import router_logits
from fp8moe.kernels.gemm.launch import GemmOperands, multiply_with
from fp8moe.kernels.gemm.tiles import dense_candidates, invariant_parts
from fp8moe.quant.formats import FP8Tensor, empty_mn_major
from tests import experts_cases, gemm_cases
from tests.gemm_cases import exact
from tests.gpu.checks import captured

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BATCHES = (1, 2, 7, 17, 40, 64, 65, 130, 300, 513, 1000, 2049, 4096)
WEIGHTS = ((576, 7168), (2112, 7168), (4096, 7168), (7168, 2048), (24576, 1536), (136, 144), (1000, 4096))
operands = partial(gemm_cases.operands, spread=4, device=DEVICE)


@pytest.fixture(autouse=True)
def invariant():
    with fp8moe.batch_invariant():
        yield


def rows_of(a, rows):
    scale = empty_mn_major((len(a.scale[rows]), a.scale.shape[1]), device=DEVICE)
    return FP8Tensor(a.data[rows], scale.copy_(a.scale[rows]))


def assert_alike(run, whole):
    """run(slice of rows) has the bits of these rows of the whole."""
    for count in BATCHES:
        for first in {0, 5, len(whole) - count}:
            rows = slice(first, first + count)
            if first >= 0 and rows.stop <= len(whole):
                assert torch.equal(run(rows), whole[rows]), (first, count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_gemm(n, k, dtype):
    a, b = operands(4096, n, k)
    whole = torch.full((4096, n), float("nan"), dtype=dtype, device=DEVICE)
    fp8moe.gemm(a, b, out=whole)
    assert rounded_error(whole, exact(a, b)) <= 3e-4
    for _ in range(20):
        assert torch.equal(fp8moe.gemm(a, b, out_dtype=dtype), whole)
    assert_alike(lambda rows: fp8moe.gemm(rows_of(a, rows), b, out_dtype=dtype), whole)


@pytest.mark.parametrize("shape", [(100, 576, 7168), (300, 2112, 7168), (3000, 1000, 4096), (33, 4096, 2048)])
def test_every_tile_has_the_same_bits(shape):
    m, n, k = shape
    (a, b), sms = operands(*shape), torch.cuda.get_device_properties(0).multi_processor_count
    expected, bits = exact(a, b), None
    tiles = dense_candidates(m, n, k, sms, invariant_parts(n, k))
    assert len({(tile.k_parts > 1, tile.keeps_parts) for tile in tiles}) > 1
    for tile in tiles:
        out = torch.full((m, n), float("nan"), device=DEVICE)
        multiply_with(tile, GemmOperands(*a, *b), out)
        assert rounded_error(out, expected) <= 3e-4, tile
        bits = out if bits is None else bits
        assert torch.equal(out, bits), tile


def test_a_bad_row_stays_alone():
    a, b = operands(1000, 2112, 7168)
    clean = fp8moe.gemm(a, b)
    a.scale[300, 2], a.scale[999, 50] = float("nan"), float("inf")
    touched = torch.zeros(1000, dtype=torch.bool, device=DEVICE)
    touched[[300, 999]] = True
    out = fp8moe.gemm(a, b)
    assert not out[touched].isfinite().any() and torch.equal(out[~touched], clean[~touched])


def test_in_a_graph():
    """With inputs that change between replays, and other work that takes memory in between."""
    a, b = operands(1500, 2112, 7168)
    graph, out = captured(lambda: fp8moe.gemm(a, b))
    for seed in range(3):
        new, _ = operands(1500, 2112, 7168, seed=seed)
        for mine, other in zip(a, new, strict=True):
            mine.copy_(other)
        graph.replay()
        assert torch.equal(out, fp8moe.gemm(new, b))


def test_two_streams():
    """Each call has memory of its own for the sums of parts."""
    a, b = operands(4096, 2112, 7168)
    alone = fp8moe.gemm(a, b)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(fp8moe.gemm(a, b))
    torch.cuda.synchronize()
    assert all(torch.equal(result, alone) for result in results)


def test_linear():
    layer = fp8moe.FP8Linear.from_linear(torch.nn.Linear(7168, 2112, device=DEVICE, dtype=torch.bfloat16))
    x = torch.randn(4096, 7168, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        assert_alike(lambda rows: layer(x[rows]), layer(x))


@pytest.mark.parametrize(("groups", "n", "k"), [(2, 576, 7168), (8, 2048, 1024), (64, 4096, 512)])
def test_groups(groups, n, k):
    """A row alone, and in groups of other sizes, in both layouts."""
    b = gemm_cases.weights(groups, n, k, device=DEVICE)
    a = gemm_cases.activations(groups * 300, k, device=DEVICE)
    whole = fp8moe.grouped_gemm(a, b, gemm_cases.offsets([300] * groups, device=DEVICE))
    for count in (1, 3, 20, 100, 299):
        kept = torch.cat([torch.arange(300 * group, 300 * group + count) for group in range(groups)]).to(DEVICE)
        offsets = gemm_cases.offsets([count] * groups, device=DEVICE)
        assert torch.equal(fp8moe.grouped_gemm(rows_of(a, kept), b, offsets), whole[kept])
    scale = empty_mn_major(a.scale.shape, device=DEVICE).copy_(a.scale)
    masked = FP8Tensor(a.data.view(groups, 300, k), scale.unflatten(0, (groups, 300)))
    out = fp8moe.grouped_gemm_masked(masked, b, gemm_cases.int32([300] * groups, DEVICE), expected_m=4)
    assert torch.equal(out.view_as(whole), whole)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_experts(activation):
    layer = experts_cases.make(16, 1040, 416, 0, device=DEVICE, activation=activation)
    x = torch.randn(4096, 1040, device=DEVICE, dtype=torch.bfloat16)
    index, weights = experts_cases.route(4096, 16, 4, device=DEVICE)
    assert_alike(lambda rows: layer(x[rows], index[rows], weights[rows]), layer(x, index, weights))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("experts", "hidden"), [(60, 2048), (128, 2048), (256, 7168), (8, 20000)])
def test_router_logits(experts, hidden, dtype):
    x = torch.randn(4096, hidden, device=DEVICE, dtype=dtype)
    weight = torch.randn(experts, hidden, device=DEVICE, dtype=dtype)
    whole = router_logits(x, weight, dtype=torch.float32)
    assert rounded_error(whole, x.double() @ weight.double().T) <= (3e-4 if dtype is torch.bfloat16 else 2e-3)
    assert_alike(lambda rows: router_logits(x[rows], weight, dtype=torch.float32), whole)


@pytest.mark.parametrize("quantized", [False, True])
def test_decoder(quantized):
    """Tokens and logarithms of probabilities of a sequence alone, among others, and after a batch of other lengths."""
    pytest.importorskip("transformers")
    from fp8moe.decode import GraphDecoder
    from fp8moe.layers import replace_linears
    from tests.gpu.test_decode import make_model, prompts

    model = make_model("qwen3_moe")
    if quantized:
        replace_linears(model, skip=("lm_head", "gate"))
    decoder = GraphDecoder(model, batch_sizes=(1, 4, 80), max_length=96)
    ids = prompts(4, 24)
    new, arguments = 40, dict(max_new_tokens=40, return_logprobs=True)
    for others in (1, 3, 70):
        together = torch.cat([ids[:1], *[ids[1:]] * -(-others // 3)])[: 1 + others]
        shorter = torch.ones_like(together)
        shorter[1:, :9] = 0
        for given in (None, shorter):
            for row in (0, 1):
                tokens, logprobs = decoder.generate(together, attention_mask=given, **arguments)
                one = together[row : row + 1, 0 if given is None or row == 0 else 9 :]
                alone = decoder.generate(one, **arguments)
                assert torch.equal(alone[0][0, -new:], tokens[row, -new:]), (others, row)
                assert torch.equal(alone[1][0], logprobs[row]), (others, row)
