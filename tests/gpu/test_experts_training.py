"""GroupedExperts with a backward on the CUDA backend."""

import copy
import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8moe.kernels.experts import experts_training, sort_by_expert
from fp8moe.kernels.experts.operands import Layer, Masters, Shard
from fp8moe.layers import master as masters
from fp8moe.layers.experts import GroupedExperts
from fp8moe.quant.formats import FP8Tensor
from tests import experts_cases
from tests.backends import on_reference
from tests.errors import relative_error
from tests.experts_cases import VARIANTS, quantized_weights
from tests.experts_training_reference import Block, backward, equal, gradients, recipe, straight_through
from tests.gpu.checks import captured, memory_of
from tests.waiting import no_waiting

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
NAN = float("nan")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Against float64 with every quantization taken for the identity.
STRAIGHT_THROUGH = 6e-2
# Against float64 over the same quantized operands: values near the edge of two FP8 values may fall to the other side,
# more of them than on the reference backend, since the tensor cores sum FP8 products with 14 bits.
TOLERANCE = 2e-2
# Of an error over that of the reference backend, and the part of it that the tensor cores' 14 bits cost.
RATIO, SLACK = 1.05, 1e-3
route = partial(experts_cases.route, device=DEVICE)


def make(num_experts=8, hidden_size=272, intermediate_size=208, **options):
    return experts_cases.make_trained(num_experts, hidden_size, intermediate_size, device=DEVICE, **options)


def inputs(tokens=300, num_experts=8, top_k=2, hidden=272, **options):
    return experts_cases.inputs(tokens, num_experts, top_k, hidden, device=DEVICE, **options)


def check(layer, *arguments):
    out, grads = backward(layer, *arguments)
    assert out.is_contiguous() and all(grad.isfinite().all() for grad in grads.values())
    reference = on_reference(backward, layer, *arguments)[1]
    same_operands, straight = recipe(layer, *arguments), straight_through(layer, *arguments)
    for name, grad in grads.items():
        ours, theirs = relative_error(grad, straight[name]), relative_error(reference[name], straight[name])
        assert ours <= STRAIGHT_THROUGH and ours <= RATIO * theirs + SLACK, (name, ours, theirs)
        assert relative_error(grad, same_operands[name]) <= TOLERANCE, name
    return out, grads


# Numbers.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant, dtype):
    check(make(**VARIANTS[variant]), *inputs(dtype=dtype))


@pytest.mark.parametrize("sizes", [(256, 128), (272, 96), (272, 200), (144, 320), (131, 77), (2048, 768)])
@pytest.mark.parametrize("variant", ["plain", "relu2, no gate"])
def test_sizes(sizes, variant):
    layer = make(4, *sizes, **VARIANTS[variant])
    for tokens in (130, 1000):
        check(layer, *inputs(tokens, 4, hidden=sizes[0]))


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (2, 2), (64, 6), (256, 8), (1024, 1)])
def test_number_of_experts(num_experts, top_k):
    check(make(num_experts, 272, 144), *inputs(500, num_experts, top_k))


@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(7168, 2048), (2048, 768), (4096, 14336)])
def test_benchmark_shapes(hidden_size, intermediate_size):
    check(make(2, hidden_size, intermediate_size), *inputs(700, 2, hidden=hidden_size))


@pytest.mark.parametrize("master_dtype", [torch.bfloat16, torch.float32])
def test_master_dtypes(master_dtype):
    _, grads = check(make(master_dtype=master_dtype), *inputs())
    assert grads["up"].dtype == grads["down"].dtype == master_dtype


def test_skewed_routing():
    """One expert has six of ten rows, others none, some indices belong to other ranks, an expert comes up twice."""
    layer = make()
    x, _, _, grad = inputs(500)
    generator = torch.Generator(DEVICE).manual_seed(0)
    index = torch.randint(-2, 6, (500, 3), device=DEVICE, generator=generator)
    index[:300, 0] = 5
    index[300:, 1] = 5
    weights = torch.rand(500, 3, device=DEVICE, generator=generator)
    for dtype in (torch.int32, torch.int64):
        _, grads = check(layer, x, index.to(dtype), weights, grad)
        assert not grads["up"][6:].any() and not grads["down"][6:].any()
        assert not grads["routing"][index < 0].any()


@pytest.mark.parametrize("variant", ["plain", "gelu"])
def test_zero_tokens_and_no_local_experts(variant):
    layer = make(**VARIANTS[variant])
    for tokens, top_k in ((0, 2), (0, 0), (9, 0)):
        _, grads = backward(layer, *inputs(tokens, top_k=top_k))
        assert not any(grad.any() for grad in grads.values())
    x, index, weights, grad = inputs(9)
    for value in (-1, 8, 2**31 - 1, 2**40, -(2**40)):
        _, grads = backward(layer, x, torch.full_like(index, value), weights, grad)
        assert not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_frozen_weights_pass_gradients(variant):
    layer = make(**VARIANTS[variant])
    frozen = GroupedExperts.from_experts(layer)
    out, grads = check(frozen, *inputs())
    expected_out, expected = backward(layer, *inputs())
    assert torch.equal(out, expected_out)
    equal(grads, {name: expected[name] for name in ("x", "routing")})


def test_agrees_with_the_layer_on_the_cpu():
    layer = make(hidden_size=131, swiglu_limit=0.4)
    arguments = inputs(hidden=131)
    _, expected = backward(copy.deepcopy(layer).cpu(), *(value.cpu() for value in arguments))
    for name, grad in backward(layer, *arguments)[1].items():
        assert relative_error(grad.cpu(), expected[name]) <= TOLERANCE, name


def share(layer, start, end, x, index, weights, grad, **options):
    """The result of experts [start, end) in float32, and gradients by name."""
    up, down = (FP8Tensor(*(part[start:end] for part in weight)) for weight in quantized_weights(layer))
    masters = [value.detach()[start:end].requires_grad_() for value in (layer.gate_up_proj, layer.down_proj)]
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    shard = Shard(**{"first_expert": start, "num_experts": layer.num_experts, "out_dtype": torch.float32} | options)
    out = experts_training(x, index, weights, Layer(up, down, layer.activation), Masters(*masters), shard=shard)
    grads = torch.autograd.grad(out, (x, weights, *masters), grad.to(out.dtype))
    return out.detach(), dict(zip(("x", "routing", "up", "down"), grads, strict=True))


@pytest.mark.parametrize("tokens", [9, 500])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["plain", "alpha", "gelu"])
def test_shares_add_up_to_the_layer(variant, dtype, tokens):
    layer = make(**VARIANTS[variant])
    arguments = inputs(tokens, dtype=dtype)
    index = arguments[1]
    expected, whole = backward(layer, *arguments)
    total, d_x, d_weights = (torch.zeros(shape, device=DEVICE) for shape in (expected.shape,) * 2 + (index.shape,))
    for start in range(0, 8, 2):
        local = (index >= start) & (index < start + 2)
        for num_rows in (None, int(local.sum())):
            out, grads = share(layer, start, start + 2, *arguments, num_rows=num_rows)
            assert out.dtype == torch.float32 and grads["x"].dtype == dtype
            assert not grads["routing"][~local].any()
            for name in ("up", "down"):
                assert relative_error(grads[name], whole[name][start : start + 2]) <= TOLERANCE
        total, d_x, d_weights = total + out, d_x + grads["x"].float(), d_weights + grads["routing"]
    for actual, value in ((total, expected), (d_x, whole["x"]), (d_weights, whole["routing"])):
        assert relative_error(actual, value) <= TOLERANCE


def test_assignments_beyond_the_rows_add_nothing():
    layer = make()
    x, index, weights, grad = inputs()
    kept = sort_by_expert(index, 3, first_expert=1, num_rows=150).rows >= 0
    assert int(kept.sum()) == 150
    out, grads = share(layer, 1, 4, x, index, weights, grad, num_rows=150)
    expected_out, expected = share(layer, 1, 4, x, torch.where(kept, index, -1), weights, grad, num_rows=150)
    assert torch.equal(out, expected_out)
    equal(grads, expected)


# What must not happen.


@pytest.mark.parametrize("hidden_size", [272, 131])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("where", ["x", "grad"])
def test_bad_value_touches_what_depends_on_it_only(where, bad, hidden_size):
    layer = make(hidden_size=hidden_size)
    arguments = dict(zip(("x", "index", "weights", "grad"), inputs(40, hidden=hidden_size), strict=True))
    _, clean = backward(layer, *arguments.values())
    arguments[where][7, -1] = bad
    _, grads = backward(layer, *arguments.values())
    experts = torch.zeros(8, dtype=torch.bool, device=DEVICE)
    experts[arguments["index"][7]] = True
    for name in ("up", "down"):
        assert torch.equal(grads[name][~experts], clean[name][~experts])
        assert all(not value.isfinite().all() for value in grads[name][experts])
    others = torch.arange(40, device=DEVICE) != 7
    for name in ("x", "routing"):
        assert torch.equal(grads[name][others], clean[name][others])
    assert not grads["routing"][7].isfinite().any()
    if where == "grad":
        assert not grads["x"][7].isfinite().any()


def test_nothing_waits_for_the_gpu():
    layers = [make(), make(**VARIANTS["gelu"]), GroupedExperts.from_experts(make())]
    arguments = inputs(9)
    for layer in layers:
        backward(layer, *arguments)
    with no_waiting():
        for layer in layers:
            backward(layer, *arguments)


# Training loops.


@pytest.mark.parametrize("master_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [16, 500])
def test_graph_replays_with_other_routing_and_weights(tokens, master_dtype):
    layer = make(16, 576, 208, master_dtype=master_dtype)
    x, index, weights, grad = inputs(tokens, 16, 4, 576)
    x.requires_grad_(), weights.requires_grad_()
    leaves = (x, weights, layer.gate_up_proj, layer.down_proj)

    def step():
        out = layer(x, index, weights)
        return out, *torch.autograd.grad(out, leaves, grad)

    graph, results = captured(step)
    for seed in range(1, 6):
        with torch.no_grad():
            x.normal_(), grad.normal_()
            for static, new in zip((index, weights), route(tokens, 16, 4, seed), strict=True):
                static.copy_(new)
            if seed == 3:
                index.fill_(5)  # all to one expert
                index[:, 1:] = -1
            if seed == 4:
                layer.down_proj.mul_(0.5)
                layer.gate_up_proj.neg_()
            for value in results:
                value.fill_(NAN)
        graph.replay()
        for actual, expected in zip(results, step(), strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    block, x = Block(make()), torch.randn(300, 272, device=DEVICE)
    expected = gradients(block, block, x)
    equal(gradients(block, lambda x: checkpoint(block, x, use_reentrant=use_reentrant), x), expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend, fresh_compiler):
    block = Block(make())
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (3, 40, 41):
        x = torch.randn(tokens, 272, device=DEVICE)
        expected = gradients(block, block, x)
        for name, grad in gradients(block, compiled, x).items():
            assert relative_error(grad, expected[name]) <= (0 if backend == "aot_eager" else 3e-2), name


@pytest.mark.parametrize("form", ["foreach", "fused"])
def test_optimizers(form, monkeypatch):
    count, quantize = [], masters._quantize
    monkeypatch.setattr(masters, "_quantize", lambda weight, **options: count.append(0) or quantize(weight, **options))
    block = Block(make())
    optimizer = torch.optim.AdamW(block.parameters(), lr=3e-3, **{form: True})
    x, target = torch.randn(2, 300, 272, device=DEVICE)
    losses = []
    for step in range(1, 16):
        optimizer.zero_grad()
        for part in (slice(0, 150), slice(150, 300)):
            loss = F.mse_loss(block(x[part]), target[part])
            loss.backward()
        torch.nn.utils.clip_grad_norm_(block.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
        assert len(count) == 2 * step
    assert losses[-1] < 0.9 * losses[0]


# Memory.


class BF16Experts(nn.Module):
    """The same layer in bfloat16, with PyTorch's grouped GEMM."""

    def __init__(self, layer):
        super().__init__()
        self.gate_up_proj = nn.Parameter(layer.gate_up_proj.detach().bfloat16())
        self.down_proj = nn.Parameter(layer.down_proj.detach().bfloat16())

    def forward(self, x, index, weights):
        experts = torch.arange(len(self.down_proj), device=x.device)
        order = index.flatten().argsort(stable=True)
        tokens = order // index.shape[1]
        offsets = (index.flatten()[:, None] == experts).sum(0).cumsum(0).int()
        gate, up = torch._grouped_mm(x[tokens], self.gate_up_proj.mT, offs=offsets).chunk(2, dim=-1)
        y = torch._grouped_mm(F.silu(gate) * up, self.down_proj.mT, offs=offsets)
        y = y * weights.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(x).index_add(0, tokens, y)


def memory(layer, x, index, weights, grad):
    """Bytes held between forward and backward, and at most during both, beside weights, FP8 copies, inputs, output."""
    leaves = (x.detach().requires_grad_(), weights.detach().requires_grad_(), *layer.parameters())

    def step():
        out = layer(leaves[0], index, leaves[1])
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before - out.nbytes
        grads = torch.autograd.grad(out, leaves, grad)
        torch.cuda.synchronize()
        assert len(grads) == 4
        return kept, torch.cuda.max_memory_allocated() - before - out.nbytes

    before = 0
    step()
    gc.collect()  # what other tests left must not be freed within the measurement
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return step()


def test_memory_beside_bfloat16():
    layer = make(8, 2048, 1024, master_dtype=torch.bfloat16)
    plain = BF16Experts(layer)
    for tokens, of_peak in ((2048, 1.0), (16384, 0.85)):  # the gradients of the weights take the same in both
        arguments = inputs(tokens, 8, 4, 2048)
        (kept, peak), (plain_kept, plain_peak) = (memory(each, *arguments) for each in (layer, plain))
        assert kept <= 0.3 * plain_kept, (tokens, kept, plain_kept)
        assert peak <= of_peak * plain_peak, (tokens, peak, plain_peak)
    _, ours = backward(layer, *arguments)
    x, index, weights, grad = arguments
    x.requires_grad_(), weights.requires_grad_()
    theirs = torch.autograd.grad(plain(x, index, weights), (x, weights, *plain.parameters()), grad)
    for actual, expected in zip(ours.values(), theirs, strict=True):
        assert relative_error(actual, expected) <= 0.15


@pytest.mark.parametrize("trained", ["all", "none"])
def test_memory_kept_for_the_backward(trained):
    """As documented by experts_training."""
    tokens, experts, top_k, hidden, size = 2048, 8, 4, 2048, 1024
    layer = make(experts, hidden, size)
    rows = tokens * top_k
    documented = 4 * rows * size + 4 * rows + 4 * (experts + 1)
    if trained == "none":
        layer = GroupedExperts.from_experts(layer)
    x, index, weights, _ = inputs(tokens, experts, top_k, hidden)
    x.requires_grad_()
    out, _, kept = memory_of(lambda: layer(x, index, weights))
    kept -= out.nbytes
    assert documented <= kept + (1 << 10) and kept <= documented + (1 << 20)  # the allocator rounds up
