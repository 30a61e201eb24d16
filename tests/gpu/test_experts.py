"""GroupedExperts on the CUDA backend."""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8moe import batch_invariant, experts
from fp8moe.kernels.decoder_ops import router
from fp8moe.kernels.decoder_ops.norm_route import norm_route
from fp8moe.kernels.decoder_ops.rms_norm import rms_norm
from fp8moe.kernels.experts import sort_by_expert
from fp8moe.kernels.experts.operands import Norm
from fp8moe.layers.experts import PACKED_WEIGHTS, GroupedExperts
from fp8moe.quant.arranged import ARRANGED
from fp8moe.quant.formats import FP8Tensor
from fp8moe.quant.quantize import dequantize, quantize_1x128
from tests import experts_cases
from tests.backends import on_reference
from tests.contracts import memory_of_nan
from tests.errors import relative_error
from tests.experts_cases import VARIANTS, from_intermediate, packed, quantized_intermediate
from tests.gpu.checks import captured, memory_of, same_bits, same_every_time
from tests.small_checkpoints import bits

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NAN = float("nan")
RULE = router.RoutingRule(4, "softmax", normalize=True)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = 1e-2
# Fewer results round to bfloat16 up to a fifth better or worse by chance, so backends cannot be compared on them.
ENOUGH_VALUES = 1000
FUNCTIONS = {"silu": F.silu, "gelu": F.gelu, "relu2": lambda v: F.relu(v) ** 2}
route = partial(experts_cases.route, device=DEVICE)


def make(num_experts=8, hidden_size=272, intermediate_size=208, seed=0, **options):
    return experts_cases.make(num_experts, hidden_size, intermediate_size, seed, device=DEVICE, **options)


def exact(layer, x, index, weights):
    """The layer in float64 over the quantized operands, expert by expert, with an intermediate of its own."""
    limit, alpha, function = layer.activation.limit, layer.activation.alpha, FUNCTIONS[layer.activation.name]
    up, up_scale, down, down_scale = (getattr(layer, name) for name in layer.weight_names)
    size, blocks = down.shape[2], down_scale.shape[2]
    rows = dequantize(quantize_1x128(x), dtype=torch.float64)
    out = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
    for expert in range(layer.num_experts):
        tokens, k = torch.where(index == expert)
        if not len(tokens):
            continue
        *gate, value = (
            rows[tokens] @ dequantize(part, dtype=torch.float64).T
            for part in zip(up[expert].split(size), up_scale[expert].split(blocks), strict=True)
        )
        if limit is not None:
            value, gate = value.clamp(-limit, limit), [gate[0].clamp(max=limit)]
        if not gate:
            value = function(value)
        elif alpha is None:
            value = function(gate[0]) * value
        else:
            value = gate[0] * torch.sigmoid(alpha * gate[0]) * (value + 1)
        value = dequantize(quantize_1x128(value.float()), dtype=torch.float64)
        value = value @ dequantize((down[expert], down_scale[expert]), dtype=torch.float64).T
        out.index_add_(0, tokens, value * weights[tokens, k, None].double())
    return out


def on_cuda(call, *arguments):
    return call(*arguments)


def own_error(run, layer, x, index, weights):
    """Error of the layer on one backend, over what that quantizes between the GEMMs."""
    intermediate = run(quantized_intermediate, layer, x, index)
    return relative_error(run(layer, x, index, weights), from_intermediate(layer, index, weights, intermediate))


def check(layer, x, index, weights):
    out = layer(x, index, weights)
    assert out.shape == x.shape and out.dtype == x.dtype and out.is_contiguous()
    if x.numel() and index.numel():
        expected = exact(layer, x, index, weights)
        assert relative_error(out, expected) <= TOLERANCE
        whole_sizes = x.shape[1] % 16 == 0 and layer.intermediate_size % 16 == 0
        if layer.activation.is_swiglu and whole_sizes and x.numel() >= ENOUGH_VALUES:
            # Near the edge of two E4M3 values, the tensor cores' 14 bits put some on the other side. So either backend
            # is held to its own quantized activations; tests/gpu/test_grouped.py compares these.
            ours, reference = (own_error(run, layer, x, index, weights) for run in (on_cuda, on_reference))
            assert ours <= 1.05 * reference + 3e-4  # of the tensor cores in one GEMM
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("capacity", [None, 64])
def test_variants(variant, dtype, capacity):
    layer = make(decode_capacity=capacity, **VARIANTS[variant])
    for tokens in (1, 5, 64, 300):
        x = torch.randn(tokens, 272, device=DEVICE).mul(2).to(dtype)
        check(layer, x, *route(tokens, 8, 2))


@pytest.mark.parametrize("tokens,hidden_size", [(1, 272), (40, 272), (7, 200), (300, 1024)])
def test_residual_is_added_to_the_rounded_result(tokens, hidden_size):
    layer = make(hidden_size=hidden_size)
    index, weights = route(tokens, 8, 2)
    x, residual = torch.randn(2, tokens, hidden_size, device=DEVICE).bfloat16()
    expected = residual + layer(x, index, weights)
    for _ in range(2):  # with a new plan and with a kept one
        assert torch.equal(layer(x, index, weights, residual=residual), expected)


@pytest.mark.parametrize("sizes", [(272, 96), (272, 200), (144, 320), (131, 77), (1, 1), (2048, 768)])
@pytest.mark.parametrize("variant", ["plain", "gelu"])
def test_sizes(sizes, variant):
    layer = make(4, *sizes, **VARIANTS[variant])
    for tokens in (0, 1, 9, 130):
        check(layer, torch.randn(tokens, sizes[0], dtype=torch.bfloat16, device=DEVICE), *route(tokens, 4, 2))


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (2, 2), (64, 6), (256, 8), (512, 10), (1024, 1)])
def test_number_of_experts(num_experts, top_k):
    layer = make(num_experts, 272, 144)
    for tokens in (1, 33, 500):
        check(layer, torch.randn(tokens, 272, dtype=torch.bfloat16, device=DEVICE), *route(tokens, num_experts, top_k))


@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(7168, 2048), (2048, 768), (4096, 14336)])
def test_benchmark_shapes(hidden_size, intermediate_size):
    layer = make(4, hidden_size, intermediate_size)
    for tokens in (1, 64, 700):
        x = torch.randn(tokens, hidden_size, dtype=torch.bfloat16, device=DEVICE)
        check(layer, x, *route(tokens, 4, 2))


@pytest.mark.parametrize("capacity", [None, 128])
def test_skewed_routing(capacity):
    """One expert has six of ten rows, others none, some indices belong to other ranks, an expert comes up twice."""
    layer = make(decode_capacity=capacity)
    generator = torch.Generator(DEVICE).manual_seed(0)
    index = torch.randint(-2, 6, (100, 3), device=DEVICE, generator=generator)
    index[:60, 0] = 5
    index[60:, 1] = 5
    index[index[:, 2] == index[:, 1], 2] = 7
    for dtype in (torch.int32, torch.int64):
        check(layer, torch.randn(100, 272, device=DEVICE), index.to(dtype), torch.rand(100, 3, device=DEVICE))


def test_indices_outside_the_range_add_nothing():
    layer = make()
    x, weights = torch.randn(9, 272, device=DEVICE), torch.ones(9, 2, device=DEVICE)
    for value in (-1, 8, 2**31 - 1, -(2**31), 2**40, -(2**40)):
        index = torch.full((9, 2), value, dtype=torch.int64, device=DEVICE)
        assert not layer(x, index, weights).any()
        index[4, 1] = 3
        out = layer(x, index, weights)
        assert out[4].any() and not out[[0, 1, 2, 3, 5, 6, 7, 8]].any()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_decode_capacity_changes_little(tokens, variant):
    layer = make(**VARIANTS[variant])
    masked = make(**VARIANTS[variant], decode_capacity=64)
    x = torch.randn(tokens, 272, dtype=torch.bfloat16, device=DEVICE)
    routing = route(tokens, 8, 2)
    assert relative_error(masked(x, *routing), layer(x, *routing)) <= 3e-3


def test_agrees_with_the_layer_on_the_cpu():
    layer = make(hidden_size=131, swiglu_limit=0.4)
    x, routing = torch.randn(5, 131, device=DEVICE), route(5, 8, 2)
    expected = copy.deepcopy(layer).cpu()(x.cpu(), *(t.cpu() for t in routing))
    assert relative_error(layer(x, *routing).cpu(), expected) <= 5e-3


@pytest.mark.parametrize("capacity", [None, 64])
@pytest.mark.parametrize("tokens", [1, 16, 64, 200])
def test_graph_replays_with_other_routing(tokens, capacity):
    layer = make(16, 576, 208, decode_capacity=capacity)
    x = torch.randn(tokens, 576, dtype=torch.bfloat16, device=DEVICE)
    index, weights = route(tokens, 16, 4)
    graph, out = captured(lambda: layer(x, index, weights))
    for seed in range(1, 6):
        x.normal_()
        for static, new in zip((index, weights), route(tokens, 16, 4, seed), strict=True):
            static.copy_(new)
        if seed == 3:
            index.fill_(5)  # all to one expert
            index[:, 1:] = -1
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, layer(x, index, weights))
        assert relative_error(out, exact(layer, x, index, weights)) <= TOLERANCE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(16, 576, 208), (16, 200, 72), (8, 2048, 512)])
def test_assignments_that_are_sorted_already(sizes, dtype):
    """Also where GEMM 1 counts its tiles, and sorts into memory of its own; twice, with a new plan and a kept one."""
    layer, gelu = make(*sizes), make(*sizes, activation="gelu", bias=True)
    for tokens in (1, 7, 64, 300, 3000):
        x, (index, weights) = torch.randn(tokens, sizes[1], device=DEVICE).to(dtype), route(tokens, sizes[0], 4)
        index[0, 0] = -1
        order = sort_by_expert(index, sizes[0])._asdict()
        before = {name: value.clone() for name, value in order.items()}
        apart = {name: torch.stack([value, -value], -1)[..., 0] for name, value in order.items()}
        for one in (layer, gelu):
            expected = one(x, index, weights, residual=x)
            for given in (order, order, apart):
                assert torch.equal(one(x, index, weights, residual=x, **given), expected)
        assert all(torch.equal(order[name], value) for name, value in before.items())


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_graph_replays_of_what_the_router_has_sorted(tokens):
    """Router and two layers in a chain over memory that is not theirs alone, each kernel started early."""
    layers = [make(16, 576, 208, seed) for seed in range(2)]
    x, logits = torch.randn(tokens, 576, device=DEVICE).bfloat16(), torch.randn(tokens, 16, device=DEVICE)

    def run(sort):
        out = x * 1.0
        for i, layer in enumerate(layers):
            routing = router.route(logits * (i + 1), RULE, dtype=torch.float32, sort=sort)
            order = {"groups": routing.groups, "rows": routing.rows}
            out = layer(out, routing.index, routing.weights, residual=out, **order)
        return out

    graph, out = captured(lambda: run(True))
    for seed in range(5):
        torch.manual_seed(seed)
        x.normal_(), logits.normal_(), out.fill_(NAN)
        if seed == 3:
            logits[:, :4] += 100.0
        graph.replay()
        assert torch.equal(out, run(False))


@pytest.mark.parametrize("tokens", [1, 8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_graph_replays_of_norms_that_come_with_results(tokens, dtype):
    """Two layers and their routers, each of which reads the norm that the one before gives; all kernels start early."""
    layers = [make(16, 576, 208, seed) for seed in range(2)]
    x, added = torch.randn(2, tokens, 576, device=DEVICE).to(dtype)
    gates, weights = torch.randn(2, 16, 576, device=DEVICE).to(dtype), torch.randn(3, 576, device=DEVICE).to(dtype)

    def run(by_one):
        total, values = x * 1.0, added * 1.0
        for layer, gate, weight in zip(layers, gates, weights[1:], strict=True):
            dtypes = {"logits_dtype": torch.float32, "dtype": torch.float32}
            how = {"residual": total, "quantized": by_one, **dtypes}
            normed, routing = norm_route(values, weights[0], 1e-6, gate, RULE, **how)
            order = {"groups": routing.groups, "rows": routing.rows, "quantized": normed.quantized} if by_one else {}
            options = {"residual": normed.sum, **order}
            inputs = normed.values, routing.index, routing.weights
            quantized = layer is layers[1]
            if by_one:
                total, following = layer.forward_with_norm(*inputs, Norm(weight, 1e-6, quantized), **options)
            else:
                total = layer(*inputs, **options)
                following = rms_norm(total, weight, 1e-6, values=not quantized, quantized=quantized)
            values = following.values
        return total, following.quantized.data.view(torch.uint8), following.quantized.scale

    graph, results = captured(lambda: run(True))
    for seed in range(6):
        torch.manual_seed(seed)
        for value in (x, added, gates, weights):
            value.normal_()
        for _ in range(3):
            for result in results:
                result.fill_(1)
            graph.replay()
        for got, expected in zip(results, run(False), strict=True):
            assert torch.equal(got, expected)


# ---- few tokens, which GEMM 1 reads by index ----


def sorted_and_quantized(x, index, experts):
    return {**sort_by_expert(index, experts)._asdict(), "quantized": quantize_1x128(x)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("sizes", [(16, 576, 208), (128, 2048, 768), (32, 1040, 144), (16, 7168, 512), (16, 200, 72)])
def test_gathered_tokens_have_the_bits_of_permuted_ones(sizes, invariant, dtype, monkeypatch):
    """Spread over experts, all to the same ones, by experts that come up twice and by such that are not here."""
    layer, biased = make(*sizes), make(*sizes, bias=True)
    norm = Norm(torch.randn(sizes[1], device=DEVICE).to(dtype), 1e-6, True)
    for tokens in (1, 2, 3, 4, 5):
        x = torch.randn(tokens, sizes[1], device=DEVICE).to(dtype)
        index, weights = route(tokens, sizes[0], 4, seed=tokens)
        alike, odd = index[:1].expand(tokens, -1).contiguous(), index.clone()
        odd[0, 0], odd[-1, 1], odd[:, 2] = -1, sizes[0], odd[:, 3]
        for one, routed in itertools.product((layer, biased), (index, alike, odd)):
            given = sorted_and_quantized(x, routed, sizes[0])
            with batch_invariant(invariant):
                expected = one.forward_with_norm(x, routed, weights, norm, residual=x)
                for _ in range(2):  # with a new plan and with a kept one
                    got = one.forward_with_norm(x, routed, weights, norm, residual=x, **given)
                    assert same_bits(got, expected)
                assert torch.equal(one(x, routed, weights, **given), one(x, routed, weights))
    if sizes[1] % 16 == 0 and sizes[2] % 16 == 0:  # and nothing was permuted
        monkeypatch.setattr("fp8moe.kernels.experts.workspace.permute_launcher", None)
        x, (index, weights) = torch.randn(4, sizes[1], device=DEVICE).to(dtype), route(4, sizes[0], 3)
        expected = exact(layer, x, index, weights)
        out = layer(x, index, weights, **sorted_and_quantized(x, index, sizes[0]))
        assert relative_error(out, expected) <= TOLERANCE


@pytest.mark.parametrize("top_k", [1, 2, 8, 32])
def test_gathered_tokens_of_each_top_k(top_k):
    experts = 256
    layer = make(experts, 272, 144)
    for tokens in (1, 3, 4):
        x, (index, weights) = torch.randn(tokens, 272, device=DEVICE).bfloat16(), route(tokens, experts, top_k)
        given = sorted_and_quantized(x, index, experts)
        assert torch.equal(layer(x, index, weights, **given), layer(x, index, weights))


def test_gathered_tokens_in_other_layouts():
    layer, (index, weights) = make(16, 576, 208), route(3, 16, 4)
    wide = torch.randn(3, 600, device=DEVICE).bfloat16()
    x = wide[:, 8:584]
    given = sorted_and_quantized(x, index, 16)
    data, scale = given.pop("quantized")
    apart = torch.zeros(3, 592, dtype=torch.uint8, device=DEVICE)
    apart[:, 16:] = data.view(torch.uint8)
    shifted = torch.zeros(scale.shape[1], 5, device=DEVICE)[:, 1:4].t().copy_(scale)
    expected = layer(x, index, weights)
    for codes, scales in itertools.product(
        (data, apart[:, 16:].view(data.dtype), apart.t().contiguous().t()[:, 16:].view(data.dtype)),
        (scale, scale.contiguous(), shifted),
    ):
        assert torch.equal(layer(x, index, weights, quantized=FP8Tensor(codes, scales), **given), expected)


def test_bad_values_of_gathered_tokens_stay_in_their_tokens():
    layer, (index, weights) = make(16, 576, 208), route(4, 16, 4)
    x = torch.randn(4, 576, device=DEVICE).bfloat16()
    clean = layer(x, index, weights)
    for value in (NAN, float("inf")):
        odd = x.clone()
        odd[2, 100] = value
        out = layer(odd, index, weights, **sorted_and_quantized(odd, index, 16))
        others = [token for token in range(4) if token != 2]
        assert not out[2].isfinite().any() and torch.equal(out[others], clean[others])


def test_groups_and_rows_of_gathered_tokens_that_mean_nothing():
    """Garbage gives garbage: no access out of bounds, and the next call is as ever."""
    layer, (index, weights) = make(16, 576, 208), route(4, 16, 4)
    x = torch.randn(4, 576, device=DEVICE).bfloat16()
    given = sorted_and_quantized(x, index, 16)
    expected = layer(x, index, weights, **given)
    for low, high in ((-(2**31), 2**31 - 1), (-3, 40), (36, 37)):
        groups, rows = (
            torch.randint(low, high, t.shape, device=DEVICE).int() for t in (given["groups"], given["rows"])
        )
        layer(x, index, weights, groups=groups, rows=rows, quantized=given["quantized"])
        layer(x, index, weights, **given | {"rows": rows})
        layer(x, index, weights, **given | {"groups": groups.sort().values})
        torch.cuda.synchronize()
    assert torch.equal(layer(x, index, weights, **given), expected)


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_repeats_of_gathered_tokens_have_equal_bits(tokens):
    """Whatever was in the memory that results and scratch get."""
    layer, (index, weights) = make(128, 2048, 768), route(tokens, 128, 8)
    x = torch.randn(tokens, 2048, device=DEVICE).bfloat16()
    expected, given = layer(x, index, weights), sorted_and_quantized(x, index, 128)
    with memory_of_nan():
        assert torch.equal(same_every_time(lambda: layer(x, index, weights, **given)), expected)


@pytest.mark.parametrize("tokens", [1, 4, 5])
@pytest.mark.parametrize("sizes", [(16, 576, 208), (128, 2048, 768)])
def test_graph_replays_from_attention_to_the_next_norm(sizes, tokens):
    """Layers in a chain, the way a decode step runs them; each kernel starts while the one before it runs."""
    experts, hidden, _ = sizes
    layers, rule = [make(*sizes, seed) for seed in range(3)], router.RoutingRule(8, "softmax", True)
    start = torch.randn(2, tokens, hidden, device=DEVICE).bfloat16()
    gates = torch.randn(3, experts, hidden, device=DEVICE).bfloat16().mul_(0.05)
    norms = torch.randn(2, hidden, device=DEVICE).bfloat16()
    dtypes = {"logits_dtype": torch.float32, "dtype": torch.bfloat16}

    def run(together):
        values, total = start[0] * 1.0, start[1] * 1.0
        found = []
        for layer, gate in zip(layers, gates, strict=True):
            if together:
                how = {"residual": total, "quantized": True, **dtypes}
                normed, chosen = norm_route(values, norms[0], 1e-6, gate, rule, **how)
                order = {"groups": chosen.groups, "rows": chosen.rows, "quantized": normed.quantized}
            else:
                normed = rms_norm(values, norms[0], 1e-6, residual=total)
                logits = router.router_logits(normed.values, gate, dtype=torch.float32)
                chosen, order = router.route(logits, rule, dtype=torch.bfloat16), {}
            inputs = normed.values, chosen.index, chosen.weights, Norm(norms[1], 1e-6, False)
            total, following = layer.forward_with_norm(*inputs, residual=normed.sum, **order)
            values = following.values
            found += total, values, chosen.index
        return found

    graph, results = captured(lambda: run(True))
    for seed in range(6):
        torch.manual_seed(seed)
        start.normal_(), norms.normal_(), gates.normal_(0, 0.05)
        for _ in range(3):
            for result in results:
                result.fill_(1)
            graph.replay()
        assert same_bits(results, run(False))


@pytest.mark.parametrize("sizes", [(8, 272, 208), (8, 2048, 512), (8, 200, 208)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_the_result(sizes, dtype):
    layer, masked, biased = make(*sizes), make(*sizes, decode_capacity=64), make(*sizes, bias=True)
    for tokens in (1, 7, 64, 65):
        x, (index, weights) = torch.randn(tokens, sizes[1], device=DEVICE).to(dtype), route(tokens, 8, 2)
        index[0, 0] = -1
        wide = torch.randn(sizes[1] + 1, device=DEVICE).to(dtype)
        for one in (layer, masked, biased):
            expected = one(x, index, weights, residual=x)
            for weight, quantized in itertools.product((wide[:-1], wide[1:]), (False, True)):  # one is not aligned
                norm = Norm(weight, 1e-6, quantized)
                for _ in range(2):  # with a new plan and with a kept one
                    out, normed = one.forward_with_norm(x, index, weights, norm, residual=x)
                    assert torch.equal(out, expected)
                    joins = tokens <= 64 and sizes[1] % 16 == 0 and dtype is not torch.float16
                    assert (normed is not None) == joins
                    if joins:
                        other = rms_norm(expected, weight, 1e-6, values=not quantized, quantized=quantized)
                        assert same_bits(normed.quantized or normed.values, other.quantized or other.values)


def test_back_to_back_layers_do_not_share_memory():
    """Scratch of one call is free for the next while its kernels still run: the order on the stream must protect it."""
    layers = [make(16, 1024, 512, seed) for seed in range(6)]
    x = torch.randn(64, 1024, dtype=torch.bfloat16, device=DEVICE)
    routings = [route(64, 16, 4, seed) for seed in range(6)]
    expected = []
    for layer, routing in zip(layers, routings, strict=True):
        expected.append(layer(x, *routing))
        torch.cuda.synchronize()
    for _ in range(5):
        outs = [layer(x, *routing) for layer, routing in zip(layers, routings, strict=True)]
        assert all(torch.equal(*pair) for pair in zip(outs, expected, strict=True))


@pytest.mark.parametrize("capacity", [None, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_of_a_call(dtype, capacity):
    """As documented by GroupedExperts."""
    tokens, experts, top_k, hidden, size = 1024, 8, 8, 2048, 1024
    layer = make(experts, hidden, size, decode_capacity=capacity)
    x, routing = torch.randn(tokens, hidden, dtype=dtype, device=DEVICE), route(tokens, experts, top_k)
    out, peak, kept = memory_of(lambda: layer(x, *routing))
    rows = tokens * top_k if capacity is None else experts * capacity
    result = 2 if dtype == torch.bfloat16 else 4
    documented = rows * ((1 + result) * hidden + size + (hidden + size) // 32) + 8 * (rows + experts)
    # The allocator rounds up, to a megabyte where it splits a large block.
    assert peak <= out.nbytes + documented + (4 << 20)
    assert kept <= out.nbytes + (1 << 20)


def test_from_experts_needs_memory_for_one_expert():
    module = nn.Module()
    module.gate_up_proj = nn.Parameter(torch.randn(16, 2048, 1024, dtype=torch.bfloat16, device=DEVICE))
    module.down_proj = nn.Parameter(torch.randn(16, 1024, 1024, dtype=torch.bfloat16, device=DEVICE))
    module.act_fn = nn.SiLU()
    layer, peak, _ = memory_of(lambda: GroupedExperts.from_experts(module), warm=False)
    kept = sum(value.nbytes for value in layer.parameters())
    assert peak <= kept + 4 * 2048 * 1024 + (4 << 20)
    x, (index, weights) = torch.randn(64, 1024, dtype=torch.bfloat16, device=DEVICE), route(64, 16, 4)
    expected = torch.zeros(64, 1024, device=DEVICE)
    for expert in range(16):
        gate, up = (x @ module.gate_up_proj[expert].T).chunk(2, dim=-1)
        weight = torch.where(index == expert, weights, 0).sum(-1, keepdim=True)
        expected += weight * ((F.silu(gate) * up) @ module.down_proj[expert].T)
    assert relative_error(layer(x, index, weights), expected) <= 0.08


def test_compile(fresh_compiler):
    layer = make(hidden_size=131, decode_capacity=8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 9, 20):
        x, routing = torch.randn(tokens, 131, device=DEVICE), route(tokens, 8, 2)
        assert torch.equal(compiled(x, *routing), layer(x, *routing))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("form", PACKED_WEIGHTS)
def test_layers_in_four_bits(form, gated):
    """Loaded from both devices, saved again, replayed, and with the bits of the functions and of FP8 blocks."""
    options = {"weight_format": form, "gated": gated, "activation": "silu" if gated else "relu2"}
    whole = experts_cases.make(8, 256, 384, **options)
    state = whole.state_dict()
    layer, other = make(8, 256, 384, seed=1, **options), make(8, 256, 384, seed=2, **options)
    layer.load_state_dict(state)
    other.load_state_dict({name: value.to(DEVICE) for name, value in state.items()})
    for loaded in (layer, other, copy.deepcopy(whole).to(DEVICE)):
        assert all(torch.equal(bits(value.cpu()), bits(state[name])) for name, value in loaded.state_dict().items())
        for name, value in whole.named_parameters():
            assert torch.equal(bits(loaded.get_parameter(name).cpu()), bits(value))
    weights = [packed(other.state_dict(), name, form) for name in (layer.up_name, "down_proj")]
    for tokens in (1, 40, 300):
        x = torch.randn(tokens, 256, device=DEVICE, dtype=torch.bfloat16)
        index, routing = route(tokens, 8, 2)
        out = layer(x, index, routing)
        assert torch.equal(out, experts(x, index, routing, *weights, activation=layer.activation))
        assert torch.equal(layer(x, index, routing, **sorted_and_quantized(x, index, 8)), out)
        graph, replayed = captured(partial(layer, x, index, routing))
        graph.replay()
        assert torch.equal(replayed, out)
        if form in ARRANGED:
            here = layer.local_weights().layer.in_blocks()
            with batch_invariant():
                expected = experts(x, index, routing, here.up, here.down, activation=layer.activation)
                assert torch.equal(layer(x, index, routing), expected)
        else:
            assert relative_error(out.cpu(), whole(x.cpu(), index.cpu(), routing.cpu())) < TOLERANCE
