"""Adapters on FP8 experts and linears on the CUDA backend."""

import pytest
import torch

from tests.backends import on_reference
from tests.errors import relative_error
from tests.experts_cases import VARIANTS, inputs, make
from tests.waiting import no_waiting

peft = pytest.importorskip("peft")
from fp8moe.kernels.experts.lora import adapter_product  # noqa: E402
from fp8moe.peft import merge_and_unload, register  # noqa: E402
from tests.gpu.checks import captured  # noqa: E402
from tests.peft_reference import Model, adapted, expected, in_blocks, run, scaled  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# As in tests/peft/test_peft.py; where a limit clamps, a value rounded to the other side has a gradient of its own.
STRAIGHT, CLAMPED = 6e-2, 0.4


def check(layer, *arguments, tolerance=STRAIGHT):
    out, grads = run(layer, *arguments)
    assert out.is_cuda and out.is_contiguous()
    value, values = expected(layer, *arguments)
    reference_out, reference = on_reference(run, layer, *arguments)
    assert relative_error(out, value) <= tolerance and relative_error(out, reference_out) <= tolerance
    for name, exact in values.items():
        error, of_reference = (relative_error(found[name], exact) for found in (grads, reference))
        assert error <= tolerance, name
        # No less exact than the reference backend, but for what the tensor cores' 14 bits cost.
        assert error <= 1.2 * of_reference + 5e-3 or tolerance == CLAMPED, (name, error, of_reference)
    return out, grads


def cases(num_experts=8, hidden=272, size=208, tokens=300, top_k=2, dtype=torch.bfloat16, r=4, **options):
    layer = adapted(make(num_experts, hidden, size, **options), r=r, device=DEVICE)
    return layer, *inputs(tokens, num_experts, top_k, hidden, dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_results_and_gradients(variant, dtype):
    options = VARIANTS[variant]
    check(*cases(dtype=dtype, **options), tolerance=CLAMPED if "swiglu_limit" in options else STRAIGHT)


@pytest.mark.parametrize("form", ["mxfp4", "int4", "nvfp4"])
def test_four_bits_have_the_bits_of_their_blocks(form):
    layer = make(8, 256, 384, weight_format=form).to(DEVICE)
    layers, arguments = (layer, in_blocks(layer)), inputs(300, 8, hidden=256, device=DEVICE)
    (out, grads), (value, values) = (run(adapted(one, device=DEVICE), *arguments) for one in layers)
    assert torch.equal(out, value) and all(torch.equal(grads[name], values[name]) for name in values)


@pytest.mark.parametrize("variant", ["plain", "gelu", "relu2, no gate"])
def test_adapters_are_as_exact_as_bfloat16(variant):
    layer = adapted(scaled(make(**VARIANTS[variant]), 1e-4), device=DEVICE)
    arguments = inputs(device=DEVICE)
    (out, grads), (value, values) = run(layer, *arguments), expected(layer, *arguments)
    errors = {"out": relative_error(out, value)}
    errors |= {name: relative_error(grads[name], exact) for name, exact in values.items()}
    assert max(errors.values()) <= 8e-3, errors


@pytest.mark.parametrize("sizes", [(256, 128), (272, 96), (131, 77), (2048, 768)])
@pytest.mark.parametrize("r", [1, 16, 64])
def test_sizes_and_ranks(sizes, r):
    check(*cases(4, *sizes, r=r))


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (64, 6), (256, 8)])
def test_number_of_experts(num_experts, top_k):
    check(*cases(num_experts, 272, 144, top_k=top_k, r=16))


def test_experts_without_rows_and_indices_of_other_ranks():
    layer, x, index, weights, grad = cases()
    index = index % 3 + 1
    index[3] = torch.tensor([-1, 8], device=DEVICE)
    index[5, 1] = 2**40
    index[7, 1] = index[7, 0]
    _, grads = check(layer, x, index, weights, grad)
    assert not grads["x"][3].any() and not grads["routing"][3].any()
    for name in (name for name in grads if "lora_" in name):
        assert not grads[name][[0, 4, 5, 6, 7]].any()


@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (9, 0)])
def test_nothing_to_do(tokens, top_k):
    layer, *arguments = cases(tokens=tokens, top_k=top_k)
    out, grads = run(layer, *arguments)
    assert not out.any() and not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize("rank", [8, 64])
def test_grouped_products(rank):
    """Groups of any size, at any row, some of them empty, and rows of none."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    groups = torch.tensor([0, 0, 5, 133, 133, 400], dtype=torch.int32, device=DEVICE)
    rows, ranks = (torch.randn(410, size, generator=generator, device=DEVICE).bfloat16() for size in (384, rank))
    down = torch.randn(5, rank, 384, generator=generator, device=DEVICE).bfloat16()
    for actual, reference in (
        (adapter_product(rows, down.mT, groups)[:400], on_reference(adapter_product, rows, down.mT, groups)[:400]),
        (adapter_product(ranks, down, groups)[:400], on_reference(adapter_product, ranks, down, groups)[:400]),
    ):
        assert relative_error(actual, reference) <= 4e-3


def test_equal_inputs_give_equal_bits_and_nothing_waits():
    layer, *arguments = cases(num_experts=32, top_k=6, r=16)
    out, grads = run(layer, *arguments)
    with no_waiting():
        again, grads_again = run(layer, *arguments)
    assert torch.equal(out, again) and all(torch.equal(grads[name], grads_again[name]) for name in grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype):
    layer, *arguments = cases(dtype=torch.float32)
    out, grads = run(layer, *arguments)
    with torch.autocast(DEVICE, dtype):
        again, grads_again = run(layer, *arguments)
    assert again.dtype == out.dtype and torch.equal(again, out)
    assert all(torch.equal(grads_again[name], grad) for name, grad in grads.items())


def test_a_step_in_a_cuda_graph():
    layer, x, index, weights, grad = cases(num_experts=16, top_k=4, r=16)
    x.requires_grad_()
    leaves = [x, *(value for value in layer.parameters() if value.requires_grad)]

    def step():
        out = layer(x, index, weights)
        return out, *torch.autograd.grad(out, leaves, grad)

    graph, results = captured(step, warmups=3)
    index.copy_(index.roll(1, 0))
    graph.replay()
    assert all(relative_error(replayed, eager) < 1e-3 for replayed, eager in zip(results, step(), strict=True))


def test_dropout():
    layer, x, index, weights, grad = cases()
    for one in (layer, layer.base_layer):
        one.lora_dropout["default"].p = 0.5
    torch.manual_seed(3)
    out, grads = run(layer, x, index, weights, grad)
    torch.manual_seed(3)
    again, _ = run(layer, x, index, weights, grad)
    assert torch.equal(out, again) and not torch.equal(out, layer.eval()(x, index, weights).detach())
    assert all(value.isfinite().all() and value.any() for value in grads.values())


def test_a_model_from_training_to_merging():
    base = Model(DEVICE)
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=16, target_modules=["proj"], target_parameters=experts)
    model = peft.get_peft_model(base, register(config, base), autocast_adapter_dtype=False)
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(4, 50, 144, generator=generator, device=DEVICE).bfloat16()
    with torch.no_grad():
        before = model(x)
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-2)
    losses = []
    for _ in range(10):
        loss = (model(x).float() - x.float().roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    with torch.no_grad():
        change = model(x) - before
        merged, errors = merge_and_unload(model, safe_merge=True)
        assert relative_error(merged(x) - before, change) < 0.3
    assert errors.keys() == {"proj", *experts} and all(error.weight < 3e-2 for error in errors.values())
