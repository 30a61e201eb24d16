"""Experts with biases, on a GPU."""

import pytest
import torch

import fp8moe
from fp8moe.quant.formats import FP8Tensor
from tests import bias_cases, experts_cases
from tests.backends import on_reference
from tests.bias_cases import DTYPES, FORMS, KINDS, make_layer
from tests.errors import relative_error

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def inputs(tokens, hidden, top_k=2, dtype=torch.bfloat16):
    return experts_cases.inputs(tokens, 4, top_k, hidden, dtype, device=DEVICE)[:3]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [[1], [3, 0, 1, 17], [130, 64, 0, 700], [2000, 1, 0, 3000]])
@pytest.mark.parametrize(("n", "k"), [(136, 272), (2048, 1408), (768, 4096), (2880, 2880)])
def test_groups(sizes, n, k, dtype, kind):
    bias_cases.check_groups(DEVICE, sizes, n, k, kind, dtype)
    bias_cases.check_swiglu(DEVICE, sizes, n // 2 // 16 * 16, k, kind, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_a_last_wave_of_few_tiles(kind):
    """Halve a last tile whose second half has no features, as prompts of 2000 tokens do with GPT-OSS-20b."""
    bias_cases.check_groups(DEVICE, [128] * 34, 2880, 2880, kind, torch.bfloat16)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("hidden", "size"), [(144, 72), (100, 50), (2048, 768), (2880, 2880)])
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_layers(tokens, hidden, size, form):
    bias_cases.check_layer(DEVICE, tokens, hidden, size, form)
    bias_cases.check_layer(DEVICE, tokens, hidden, size, form, weight_scales="channel", dtype=torch.float32)


@pytest.mark.parametrize("options", [{}, {"weight_scales": "channel"}], ids=str)
def test_any_address(options):
    layer = make_layer(DEVICE, 4, 144, 96, **options)
    x, index, routing = inputs(40, 144)
    expected = layer(x, index, routing)
    scales = layer.weight_names[1::2] if options else ()
    for name in (*layer.bias_names, *scales):
        value = getattr(layer, name).data
        memory = torch.empty(value.numel() + 1, dtype=value.dtype, device=DEVICE)[1:]
        getattr(layer, name).data = memory.view(value.shape).copy_(value)
        assert getattr(layer, name).data_ptr() % 8
    assert torch.equal(layer(x, index, routing), expected)


@torch.no_grad()
def test_parts_and_rows():
    layer = make_layer(DEVICE, 4, 2048, 768, **FORMS["gpt-oss"])
    x, index, routing = inputs(300, 2048)
    parts = [experts_cases.part(layer, x, index, routing, *part) for part in ((0, 1), (1, 4))]
    expected = bias_cases.exact_layer(layer, x, index, routing)
    assert relative_error(sum(parts), expected) <= 1e-2
    ends = torch.tensor([0, 7, 7, 130, 297], dtype=torch.int32, device=DEVICE)
    rows = layer.forward_rows(x, ends)
    assert not rows[297:].any()
    assert relative_error(rows, on_reference(layer.forward_rows, x, ends)) <= 1e-2


@torch.no_grad()
def test_batch_invariance():
    layer = make_layer(DEVICE, 4, 2880, 2880, **FORMS["gpt-oss"])
    x, index, routing = inputs(700, 2880)
    with fp8moe.batch_invariant():
        whole = layer(x, index, routing)
        for rows in (slice(5, 6), slice(100, 117), slice(0, 300)):
            assert torch.equal(layer(x[rows], index[rows], routing[rows]), whole[rows])


def test_one_matrix():
    """Biases and channel scales of `gemm` go the same way."""
    a = fp8moe.quantize_1x128(torch.randn(300, 528, device=DEVICE))
    b = fp8moe.quantize_128x128(torch.randn(136, 528, device=DEVICE))
    bias = torch.randn(137, device=DEVICE)
    out = fp8moe.gemm(a, b, bias=bias[1:])
    assert torch.equal(out, fp8moe.gemm(a, b, bias=bias[1:].clone()))
    scale = torch.ones(137, 1, device=DEVICE)[1:]
    expected = fp8moe.gemm(a, FP8Tensor(b.data, scale.clone()))
    assert torch.equal(fp8moe.gemm(a, FP8Tensor(b.data, scale)), expected)
