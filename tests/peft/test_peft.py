"""Adapters on FP8 experts and linears against float64 of W + BA, on the reference backend."""

import copy
import logging
import subprocess
import sys
import warnings
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from fp8moe import FP8Linear, GroupedExperts, dequantize
from fp8moe.distributed import ExpertParallel
from fp8moe.kernels.experts import backward as rows_kernels
from fp8moe.quant.formats import FP8Tensor
from tests.errors import relative_error
from tests.experts_cases import VARIANTS, inputs, make, make_trained
from tests.processes import in_processes

peft = pytest.importorskip("peft")
from fp8moe.peft import merge_and_unload, register  # noqa: E402
from tests.peft_reference import (  # noqa: E402
    Model,
    adapted,
    additions,
    by_projection,
    expected,
    in_blocks,
    run,
    scaled,
)

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Against float64 of the dequantized weights plus BA: what quantized activations and gradients cost.
STRAIGHT = 6e-2
# The same where the inputs of the FP8 products are quantized too: what is left are gradients.
QUANTIZED = 4e-2
# And where a limit clamps: a value rounded to the other side of it has a gradient that the exact one has not.
CLAMPED = {"straight": 0.4, "quantized": 0.12}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def check(layer, *arguments, straight=STRAIGHT, quantized=QUANTIZED, **masks):
    out, grads = run(layer, *arguments)
    assert out.dtype == grads["x"].dtype == arguments[0].dtype and grads["routing"].dtype == arguments[2].dtype
    for as_in_fp8, tolerance in ((False, straight), (True, quantized)):
        value, values = expected(layer, *arguments, as_in_fp8=as_in_fp8, **masks)
        errors = {"out": relative_error(out, value)}
        errors |= {name: relative_error(grads[name], value) for name, value in values.items()}
        assert max(errors.values()) <= tolerance, (as_in_fp8, errors)
    return out, grads


def model(base=None, **options):
    """An adapted `Model` with values in all factors, and the one that it was."""
    base = Model() if base is None else base
    targets = {"target_modules": ["proj"], "target_parameters": EXPERTS}
    options = {"r": 4, "lora_alpha": 8, **targets, "init_lora_weights": False} | options
    twin = copy.deepcopy(base)
    return peft.get_peft_model(twin, register(peft.LoraConfig(**options), twin)), base


X = torch.randn(2, 20, 144, generator=torch.Generator().manual_seed(0)).bfloat16()


# Numbers.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_results_and_gradients(variant, dtype):
    tolerances = CLAMPED if "swiglu_limit" in VARIANTS[variant] else {}
    check(adapted(make(**VARIANTS[variant])), *inputs(dtype=dtype), **tolerances)


@pytest.mark.parametrize("variant", ["plain", "gelu", "relu2, no gate"])
def test_adapters_are_as_exact_as_bfloat16(variant):
    layer = adapted(scaled(make(**VARIANTS[variant]), 1e-4))
    arguments = inputs()
    (out, grads), (value, values) = run(layer, *arguments), expected(layer, *arguments)
    assert relative_error(out, value) <= 8e-3
    for name in values:
        assert relative_error(grads[name], values[name]) <= 8e-3, name


@pytest.mark.parametrize("sizes", [(128, 128), (272, 200), (131, 77), (256, 384)])
@pytest.mark.parametrize("variant", ["plain", "gelu"])
def test_sizes(sizes, variant):
    check(adapted(make(3, *sizes, **VARIANTS[variant])), *inputs(200, 3, hidden=sizes[0]))


@pytest.mark.parametrize("r", [1, 8, 16])
def test_ranks(r):
    check(adapted(r=r, alpha=r), *inputs())


@settings(max_examples=15)
@given(
    tokens=st.integers(0, 12),
    num_experts=st.integers(1, 6),
    top_k=st.integers(0, 4),
    hidden_size=st.integers(9, 150),
    intermediate_size=st.integers(9, 150),
    r=st.integers(1, 9),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 1000),
)
def test_any_size_and_routing(tokens, num_experts, top_k, hidden_size, intermediate_size, r, index_dtype, seed):
    layer = adapted(make(num_experts, hidden_size, intermediate_size, seed), r=r)
    # Indices of other ranks on both sides, experts without tokens, and the same expert twice.
    index = torch.randint(-1, num_experts + 2, (tokens, top_k), dtype=index_dtype)
    arguments = torch.randn(tokens, hidden_size), index, torch.rand(tokens, top_k), torch.randn(tokens, hidden_size)
    out, grads = run(layer, *arguments)
    value, values = expected(layer, *arguments, as_in_fp8=True)
    assert value.norm() < 1e-6 or relative_error(out, value) <= 0.2  # few values, each rounded to E4M3
    for name, grad in grads.items():
        assert grad.isfinite().all(), name
        if name in values and values[name].norm() > 1e-3:
            # Each weight's gradient is one sum, in which values may cancel.
            assert relative_error(grad, values[name]) <= 0.5, name


def test_one_expert_twice_and_indices_of_other_ranks():
    x, index, weights, grad = inputs()
    index[:, 1] = index[:, 0]
    index[3] = torch.tensor([-1, 4])
    index[5, 1] = 2**40
    _, grads = check(adapted(), x, index, weights, grad)
    assert not grads["x"][3].any() and not grads["routing"][3].any() and not grads["routing"][5, 1]


def test_experts_without_tokens_get_zero_gradients():
    x, index, weights, grad = inputs(num_experts=2)
    _, grads = run(adapted(), x, index + 1, weights, grad)
    for name in (name for name in grads if "lora_" in name):
        assert not grads[name][[0, 3]].any() and all(value.any() for value in grads[name][1:3])


def test_dropout_of_tokens_and_of_rows(monkeypatch):
    layer = adapted(lora_dropout=0.5)
    x, *others = inputs()
    generator = torch.Generator().manual_seed(2)
    dropped = 2 * (torch.rand(x.shape, generator=generator) > 0.5)
    mask = torch.rand(80, 128, generator=generator) > 0.5
    monkeypatch.setattr(F, "dropout", lambda x, p: x * dropped if p == 0.5 else None)
    monkeypatch.setattr(torch, "native_dropout", lambda h, p, train: (h * mask / (1 - p), mask) if train else None)
    check(layer, x, *others, dropped=dropped, mask=2 * mask)
    assert relative_error(layer.eval()(x, *others[:2]), expected(layer, x, *others)[0]) <= STRAIGHT


def test_dropout_draws_masks():
    layer = adapted(scaled(make(), 1e-6), lora_dropout=0.25)
    x, index, weights, _ = inputs()
    torch.manual_seed(3)
    mean = sum(layer(x, index, weights).detach().double() for _ in range(60)) / 60
    torch.manual_seed(3)
    first, second = (layer(x, index, weights) for _ in range(2))
    torch.manual_seed(3)
    assert not torch.equal(first, second) and torch.equal(first, layer(x, index, weights))
    assert relative_error(first.detach(), layer.eval()(x, index, weights).detach()) > 0.1
    assert relative_error(mean, layer(x, index, weights).detach()) < 0.3


@pytest.mark.parametrize("use_rslora", [False, True])
def test_scaling(use_rslora):
    layer = adapted(r=4, alpha=12, use_rslora=use_rslora)
    assert layer.scaling == {"default": 12 / (2 if use_rslora else 4)}
    check(layer, *inputs())


def test_equal_inputs_give_equal_bits():
    layer, arguments = adapted(), inputs()
    (out, grads), (again, grads_again) = run(layer, *arguments), run(layer, *arguments)
    assert torch.equal(out, again) and all(torch.equal(grads[name], grads_again[name]) for name in grads)


def test_leading_sizes_and_no_gradients():
    layer, (x, index, weights, _) = adapted(), inputs()
    out = layer(x, index, weights)
    with torch.no_grad():
        other = layer(x.view(2, 20, 144), index.view(2, 20, 2), weights.view(2, 20, 2))
    assert torch.equal(other, out.view(2, 20, 144)) and not other.requires_grad


def test_weights_stay_in_fp8(monkeypatch):
    """Nothing reads them but the FP8 products and the transposes of FP8 that these take."""
    layer, arguments = adapted(), inputs()
    want, grads = run(layer, *arguments)
    seen = []

    def record(multiply, a, b, *others, **options):
        seen.append(b)
        return multiply(a, b, *others, **options)

    monkeypatch.setattr(rows_kernels, "grouped_rows", partial(record, rows_kernels.grouped_rows))
    for name in ("dequantize", "quantize_128x128"):
        monkeypatch.setattr(f"fp8moe.quant.quantize.{name}", None)
    monkeypatch.setattr(rows_kernels, "dequantize", None)
    out, again = run(layer, *arguments)
    assert torch.equal(out, want) and torch.equal(again["x"], grads["x"])
    assert len(seen) == 4 and all(weight.data.dtype == torch.float8_e4m3fn for weight in seen)


@pytest.mark.parametrize("variant", ["plain", "gelu"])
def test_values_in_bfloat16_are_freed_before_the_last_gemm(variant, monkeypatch):
    """Only the factors' gradients read them; the input gradient takes memory of its own."""
    made, alive = [], []
    activate, multiply = rows_kernels.activate_backward, rows_kernels.grouped_rows

    def activated(*arguments):
        d = activate(*arguments)
        made.extend(map(weakref.ref, (d.d_projected, d.values)))
        return d

    def multiplied(*arguments, **options):
        alive.append([value() is not None for value in made])
        return multiply(*arguments, **options)

    monkeypatch.setattr(rows_kernels, "activate_backward", activated)
    monkeypatch.setattr(rows_kernels, "grouped_rows", multiplied)
    run(adapted(make(**VARIANTS[variant])), *inputs())
    assert alive == [[], [], [], [False, False]]


def test_checkpointing_gives_the_same_gradients():
    layer, (x, index, weights, grad) = adapted(lora_dropout=0.1), inputs()
    x.requires_grad_()
    found = []
    for call in (layer, lambda *args: checkpoint(layer, *args, use_reentrant=False)):
        torch.manual_seed(5)
        layer.zero_grad()
        out = call(x, index, weights)
        leaves = [x, *(value for value in layer.parameters() if value.requires_grad)]
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor_dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_nothing(dtype, factor_dtype):
    layer, arguments = adapted().to(factor_dtype), inputs(dtype=torch.float32)
    out, grads = run(layer, *arguments)
    with torch.autocast("cpu", dtype):
        again, grads_again = run(layer, *arguments)
    assert again.dtype == out.dtype and torch.equal(again, out)
    for name, grad in grads.items():
        assert grads_again[name].dtype == grad.dtype and torch.equal(grads_again[name], grad), name


def test_a_residual_is_added():
    layer, (x, index, weights, grad) = adapted(), inputs()
    out = layer(x, index, weights)
    assert torch.equal(layer(x, index, weights, residual=grad), grad + out)
    layer.enable_adapters(False)
    assert torch.equal(layer(x, index, weights, residual=grad), layer.base_layer(x, index, weights, residual=grad))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend, fresh_compiler):
    layer, arguments = adapted(), inputs()
    out, grads = run(layer, *arguments)
    again, grads_again = run(torch.compile(layer, backend=backend, fullgraph=True), *arguments)
    assert torch.equal(again, out)
    grads_again = {name.removeprefix("_orig_mod."): grad for name, grad in grads_again.items()}
    assert grads_again.keys() == grads.keys() and all(torch.equal(grads_again[name], grads[name]) for name in grads)


# Several adapters.


def both(layer):
    """The layers of both projections, which peft switches and merges together."""
    return by_projection(layer).values()


def second_adapter(layer, **options):
    options = {"r": 3, "lora_alpha": 3, "init_lora_weights": False} | options
    config = peft.LoraConfig(target_parameters=EXPERTS, **options)
    for one in both(layer):
        one.update_layer("second", options["r"], lora_alpha=options["lora_alpha"], config=config)


def test_two_active_adapters_add_up():
    layer = adapted()
    second_adapter(layer)
    for one in both(layer):
        one.set_adapter(["default", "second"])
    _, grads = check(layer, *inputs())
    assert all(grad.any() for grad in grads.values())


def test_adapters_are_switched_disabled_and_deleted():
    adapted_model, base = model()
    one = adapted_model(X)
    with adapted_model.disable_adapter():
        none = adapted_model(X)
    config = register(peft.LoraConfig(r=3, target_modules=["proj"], target_parameters=EXPERTS), base)
    adapted_model.add_adapter("second", config)
    assert torch.equal(adapted_model(X), one)
    adapted_model.set_adapter("second")
    assert all(value.requires_grad == ("second" in name) for name, value in adapted_model.named_parameters())
    assert torch.equal(adapted_model(X), base(X))  # B is zero
    adapted_model.set_adapter("default")
    assert torch.equal(adapted_model(X), one)
    adapted_model.delete_adapter("second")
    assert torch.equal(adapted_model(X), one)
    adapted_model.base_model.set_adapter([])
    with pytest.warns(UserWarning, match="^forward without adapters: default loaded, but .* made none active"):
        assert torch.equal(adapted_model(X), none)


def test_one_projection_alone():
    """The other gets nothing, and no layer of its own."""
    for name, other in (EXPERTS, EXPERTS[::-1]):
        adapted_model, base = model(target_modules=[], target_parameters=[name])
        layer = adapted_model.base_model.model.experts
        assert not hasattr(layer.base_layer, "base_layer") and layer.name == name
        merged = copy.deepcopy(base)
        weight = merged.experts.get_parameter(name.rpartition(".")[2])
        assert weight.shape[1:] == (layer.out_features, layer.in_features)
        before, out = base(X), adapted_model(X)
        with torch.no_grad():
            merged, errors = merge_and_unload(adapted_model)
        assert errors.keys() == {name}
        assert relative_error(out.detach() - before.detach(), merged(X).detach() - before.detach()) < 0.3
        unchanged = other.rpartition(".")[2]
        assert equal([merged.experts.get_parameter(unchanged)], [base.experts.get_parameter(unchanged)])


def test_active_adapters_with_other_dropouts_are_refused():
    layer = adapted()
    second_adapter(layer, lora_dropout=0.5)
    for one in both(layer):
        one.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match="lora_dropout: expected the same of all active adapters.*0.0, 0.5"):
        layer(*inputs()[:3])
    layer.eval()(*inputs()[:3])


def test_scales_are_set_and_reset():
    adapted_model, base = model()
    adapted_model.eval()
    before = adapted_model(X)
    with peft.helpers.rescale_adapter_scale(adapted_model, 0.0):
        assert torch.equal(adapted_model(X), base(X))
    assert torch.equal(adapted_model(X), before)
    layer = adapted()
    layer.base_layer.set_scale("default", 0.25)
    assert layer.base_layer.scaling == {"default": 0.5} and layer.scaling == {"default": 2}
    check(layer, *inputs())


def test_weighted_adapters_of_experts_are_refused_by_peft():
    adapted_model, base = model()
    config = peft.LoraConfig(r=4, target_modules=["proj"], target_parameters=EXPERTS)
    adapted_model.add_adapter("second", register(config, base))
    with pytest.raises(ValueError, match="add_weighted_adapter does not support targeting nn.Parameter"):
        adapted_model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "both", combination_type="linear")


# Through peft.


def test_a_new_adapter_changes_nothing_and_only_it_is_trained():
    adapted_model, base = model(init_lora_weights=True)
    for kind in (True, "gaussian"):
        adapted_model, base = model(init_lora_weights=kind)
        assert torch.equal(adapted_model(X), base(X))
    trained = {name for name, value in adapted_model.named_parameters() if value.requires_grad}
    assert len(trained) == 6 and all("lora_" in name for name in trained)
    shapes = {name: tuple(value.shape) for name, value in adapted_model.state_dict().items() if "experts.lora" in name}
    prefix = "base_model.model.experts.lora"
    assert shapes == {f"{prefix}_A.default.weight": (16, 80), f"{prefix}_B.default.weight": (144, 16)}
    assert {value.dtype for value in adapted_model.parameters() if value.requires_grad} == {torch.float32}
    config = register(peft.LoraConfig(target_modules=["proj"], target_parameters=EXPERTS), base)
    plain = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    assert {value.dtype for value in plain.parameters() if value.requires_grad} == {torch.bfloat16}


def test_a_linear_is_w_plus_ba():
    adapted_model, _ = model()
    layer = adapted_model.base_model.model.proj
    x, grad = torch.randn(33, 144, requires_grad=True), torch.randn(33, 144)
    found = torch.autograd.grad(layer(x), (x, layer.lora_A["default"].weight, layer.lora_B["default"].weight), grad)
    weight = dequantize(FP8Tensor(layer.base_layer.weight, layer.base_layer.weight_scale_inv), dtype=torch.float64)
    a, b = (part["default"].weight.detach().double().requires_grad_() for part in (layer.lora_A, layer.lora_B))
    exact = x.detach().double().requires_grad_()
    out = exact @ (weight + 2 * b @ a).T
    assert relative_error(layer(x).detach(), out.detach()) <= 4e-2
    for value, other in zip(found, torch.autograd.grad(out, (exact, a, b), grad.double()), strict=True):
        assert relative_error(value, other) <= 4e-2


def test_adapters_are_saved_and_loaded(tmp_path):
    adapted_model, base = model(rank_pattern={EXPERTS[1]: 6}, lora_dropout=0.1)
    adapted_model.save_pretrained(tmp_path)
    config = register(peft.LoraConfig.from_pretrained(tmp_path), base)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path, config=config, is_trainable=True)
    experts = loaded.base_model.model.experts
    assert experts.r == {"default": 6} and experts.base_layer.r == {"default": 4}
    assert experts.lora_dropout["default"].p == 0.1
    for (name, value), other in zip(adapted_model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(value.float(), other.float()), name
    assert torch.equal(loaded.eval()(X), adapted_model.eval()(X))
    other = Model()
    config = register(peft.LoraConfig.from_pretrained(tmp_path), other)
    other = peft.PeftModel.from_pretrained(other, tmp_path, config=config, low_cpu_mem_usage=True)
    assert torch.equal(other(X), adapted_model(X))
    loaded.load_adapter(tmp_path, "again")
    loaded.set_adapter("again")
    assert torch.equal(loaded(X), adapted_model(X))


def test_an_adapter_is_trained_and_the_router_with_it():
    adapted_model, base = model(init_lora_weights=True, modules_to_save=["gate"])
    before = {name: value.clone() for name, value in adapted_model.named_parameters()}
    optimizer = torch.optim.AdamW([value for value in adapted_model.parameters() if value.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = (adapted_model(X).float() - X.float().roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    for name, value in adapted_model.named_parameters():
        assert torch.equal(value.float(), before[name].float()) != value.requires_grad, name
    assert any("gate" in name and value.requires_grad for name, value in adapted_model.named_parameters())


# Merging.


def merged_weights(layer):
    """W + BA in float64 by name, from before the merge."""
    base = layer.get_base_layer()
    found = {}
    for one, added, parts in zip(both(layer), additions(layer)[0], (2, 1), strict=True):
        name = one.parameter_name
        data, scale = getattr(base, name), getattr(base, f"{name}_scale_inv")
        rows = data.shape[1] // parts
        blocks = -(-rows // 128)
        weight = FP8Tensor(data.unflatten(1, (parts, rows)), scale.unflatten(1, (parts, blocks)))
        found[name] = dequantize(weight, dtype=torch.float64).flatten(1, 2) + added.detach()
    return found


def norm(values):
    return sum(float(value.detach().square().sum()) for value in values) ** 0.5


def equal(parameters, others):
    """Whether FP8 and other weights are the same."""
    return all(torch.equal(value.float(), other.float()) for value, other in zip(parameters, others, strict=True))


def stored_weights(layer):
    base = copy.deepcopy(layer)
    for name, parameter in base.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    return merged_weights(base)


def test_merging_rounds_the_sum_and_says_how_much():
    layer = adapted()
    base = layer.get_base_layer()
    sums, before = merged_weights(layer), [value.clone() for value in base.parameters()]
    for one, added in zip(both(layer), additions(layer)[0], strict=True):
        one.merge()
        total, stored = sums[one.parameter_name], stored_weights(layer)[one.parameter_name]
        error = (stored - total).norm()
        assert error < 3e-2 * total.norm()
        assert one.merge_error.weight == pytest.approx(float(error / total.norm()), rel=1e-3)
        assert one.merge_error.adapter == pytest.approx(float(error / added.norm()), rel=1e-3)
        assert one.merged_adapters == ["default"]
    arguments = inputs()[:3]
    assert torch.equal(layer(*arguments), base(*arguments))
    for one in both(layer):
        one.unmerge()
        assert not one.merged and not one._before_merge
        one.unmerge()
    assert equal(before, base.parameters())


def test_merged_adapters_serve_until_they_are_disabled():
    adapted_model, base = model()
    with torch.no_grad():
        before = adapted_model(X)
        adapted_model.merge_adapter()
        merged = adapted_model(X)
        change = relative_error(before - base(X), merged - base(X))
        assert 0 < change < 0.3
        with adapted_model.disable_adapter():  # which unmerges
            assert torch.equal(adapted_model(X), base(X))
        assert torch.equal(adapted_model(X), before)


def test_a_backward_after_a_merge_is_refused():
    layer, (x, index, weights, grad) = adapted(), inputs()
    out = layer(x, index, weights)
    layer.merge()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(grad)


def test_two_adapters_are_rounded_once():
    layer, other = adapted(), adapted()
    for one in (layer, other):
        second_adapter(one)
        torch.manual_seed(4)
        for name, value in one.named_parameters():
            if "second" in name:
                value.data.uniform_(-0.1, 0.1)
    for one in both(layer):
        one.set_adapter(["default", "second"])
    sums = merged_weights(layer)
    for one in both(layer):
        one.merge()
    assert all(relative_error(stored_weights(layer)[name], sums[name]) < 2.8e-2 for name in sums)
    other.merge(adapter_names=["default"])
    before = other._before_merge
    with pytest.warns(UserWarning, match="additionally merging second"):
        other.merge(adapter_names=["second"])
    assert other.merged_adapters == ["default", "second"] and other._before_merge is before
    other.unmerge()
    assert torch.equal(other.get_base_layer().down_proj.float(), make().down_proj.float())


def test_merge_and_unload(caplog):
    adapted_model, base = model()
    with torch.no_grad():
        before = adapted_model(X)
        with caplog.at_level(logging.INFO, "fp8moe"):
            merged, errors = merge_and_unload(adapted_model, safe_merge=True)
        assert type(merged) is Model and {type(merged.proj), type(merged.experts)} == {FP8Linear, GroupedExperts}
        assert not any("lora" in name for name in merged.state_dict())
        assert relative_error(before - base(X), merged(X) - base(X)) < 0.3
    assert errors.keys() == {"proj", *EXPERTS}
    assert all(2e-2 < error.weight < 3e-2 < error.adapter < 1 for error in errors.values())
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"merged ['default'] into {name}" for name in ("proj", *EXPERTS[::-1])
    ]


def test_unload_leaves_the_weights_alone():
    adapted_model, base = model()
    assert equal(adapted_model.unload().parameters(), base.parameters())


@pytest.mark.parametrize("name", ["experts.lora_B.default.weight", "proj.lora_A.default.weight"])
def test_what_is_not_finite_is_not_merged_safely(name):
    adapted_model, _ = model()
    adapted_model.get_parameter(f"base_model.model.{name}").data.flatten()[7] = float("inf")
    layer = adapted_model.get_submodule(f"base_model.model.{name.split('.')[0]}")
    before = [value.clone() for value in layer.get_base_layer().parameters()]
    with pytest.raises(ValueError, match=f"^{layer.name}: safe_merge: expected finite W"):
        layer.merge(safe_merge=True)
    assert equal(before, layer.get_base_layer().parameters())
    assert not layer.merged


def test_adapters_that_only_some_modules_have():
    adapted_model, base = model()
    config = register(peft.LoraConfig(r=2, target_modules=["proj"], init_lora_weights=False), base)
    adapted_model.add_adapter("second", config)
    experts = [value.clone() for value in base.experts.parameters()]
    merged, errors = merge_and_unload(adapted_model, safe_merge=True, adapter_names=["second"])
    assert errors.keys() == {"proj"}
    assert equal(merged.experts.parameters(), experts) and not equal(merged.proj.parameters(), base.proj.parameters())


def test_nothing_is_merged_where_one_module_is_not_finite():
    adapted_model, base = model()
    adapted_model.base_model.model.experts.base_layer.lora_A["default"].weight.data[9, 0] = float("nan")
    with pytest.raises(ValueError, match=r"^experts.gate_up_proj: safe_merge: .* \(matrix 2\)"):
        merge_and_unload(adapted_model, safe_merge=True)
    assert equal(adapted_model.unload().parameters(), base.parameters())


def test_powers_of_two_stay_powers_of_two():
    layer = adapted(GroupedExperts.from_experts(make_trained(), scale_format="ue8m0"))
    for one in both(layer):
        one.merge()
    for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
        assert (torch.frexp(getattr(layer.get_base_layer(), name))[0] == 0.5).all()


def test_masters_are_added_to():
    layer = adapted(make_trained())
    arguments = inputs()
    before = layer(*arguments[:3]).detach()
    master = layer.get_base_layer().down_proj.detach().clone()
    for one in both(layer):
        one.merge()
        assert one.merge_error.weight < 1e-6
    assert relative_error(layer.get_base_layer().down_proj.detach() - master, additions(layer)[0][1].detach()) < 1e-5
    assert relative_error(layer(*arguments[:3]).detach(), before) < 0.1


# Experts in four bits.


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("mxfp4", {"intermediate_size": 96}),
        ("mxfp4", {"gated": False, "activation": "relu2", "intermediate_size": 256}),
        ("int4", {}),
        ("int4-32", {"intermediate_size": 160, "dtype": torch.float16}),
        ("nvfp4", {"intermediate_size": 160}),
    ],
)
def test_four_bits_have_the_bits_of_their_blocks(form, options, fresh_compiler):
    torch.manual_seed(0)
    sizes = {"num_experts": 4, "hidden_size": 256, "intermediate_size": 128}
    layer = GroupedExperts(**sizes | options, weight_format=form)
    arguments = inputs(hidden=256, dtype=options.get("dtype", torch.bfloat16))
    layers = adapted(layer), adapted(in_blocks(layer)), adapted(layer, lora_dropout=0.5)
    (out, grads), (value, values), (_, dropped) = (run(one, *arguments) for one in layers)
    assert torch.equal(out, value) and grads.keys() == values.keys() == dropped.keys()
    assert all(torch.equal(grads[name], values[name]) and grads[name].any() for name in grads)
    again, grads_again = run(torch.compile(layers[0], backend="eager", fullgraph=True), *arguments)
    assert torch.equal(again, out) and all(map(torch.equal, grads_again.values(), grads.values()))


def test_nothing_is_merged_into_four_bits():
    """Nor into what else the adapter has, by any of the ways to merge; adapters of other layers are."""
    adapted_model, base = model(Model(hidden_size=160, intermediate_size=96, weight_format="mxfp4"))
    x = torch.randn(2, 20, 160, generator=torch.Generator().manual_seed(0)).bfloat16()
    out, proj = adapted_model(x), base.proj.weight.clone()
    ways = (
        lambda: adapted_model.merge_adapter(),
        lambda: adapted_model.merge_adapter(["default"], safe_merge=True),
        lambda: adapted_model.merge_and_unload(),
        lambda: merge_and_unload(adapted_model),
        lambda: merge_and_unload(adapted_model, safe_merge=True, adapter_names=["default"]),
        lambda: adapted_model.base_model.model.experts.merge(),
    )
    for merge in ways:
        with pytest.raises(
            ValueError, match=r"^experts.* expected experts in FP8 or unquantized to merge into, got fo"
        ):
            merge()
        assert torch.equal(adapted_model(x), out) and not adapted_model.base_model.model.proj.merged
    config = register(peft.LoraConfig(r=2, target_modules=["proj"], init_lora_weights=False), base)
    adapted_model.add_adapter("second", config)
    merged, errors = merge_and_unload(adapted_model, adapter_names=["second"])
    assert errors.keys() == {"proj"} and not equal([merged.proj.weight], [proj])
    with pytest.raises(ValueError, match="^modules_to_save: experts is in four bits, which is not trained"):
        register(peft.LoraConfig(target_modules=["proj"], modules_to_save=["experts"]), merged)


# Importing, and what is refused.


def test_peft_is_imported_when_it_is_used():
    script = "import sys, fp8moe.peft; print('peft' in sys.modules, 'transformers' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert output.split() == ["False", "False"]


EXPERTS_B = "base_model.model.experts.lora_B.weight"
PROJ_A = "base_model.model.proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda factors: factors.update({EXPERTS_B: factors[EXPERTS_B][:, :12].contiguous()}),
            r"^experts.down_proj: lora_B of 4 experts, rank 4: expected \(144, 16\) in the adapter, got \(144, 12\)$",
        ),
        (
            lambda factors: factors.update({PROJ_A: factors[PROJ_A].T.contiguous()}),
            r"^proj: lora_A: expected \(4, 144\) in the adapter, got \(144, 4\)$",
        ),
        (
            lambda factors: factors.pop(EXPERTS_B),
            "^experts.down_proj: lora_B of 4 experts, rank 4: expected it in the adapter, found none$",
        ),
        (
            lambda factors: [factors.pop(key) for key in list(factors) if "experts" in key],
            r"^experts.gate_up_proj: lora_A of 4 experts, rank 4: expected .* none \(and 3 more\)$",
        ),
        (
            lambda factors: factors.update({"base_model.model.more.lora_A.weight": torch.zeros(4, 144)}),
            "^more.lora_A.weight: the adapter has this, but the model has nothing for it$",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_refused_before_anything_is_written(change, message, tmp_path):
    model()[0].save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    factors = load_file(file)
    change(factors)
    save_file(factors, file)
    adapted_model, base = model()
    before = copy.deepcopy(adapted_model.state_dict())
    with pytest.raises(ValueError, match=message):
        peft.set_peft_model_state_dict(adapted_model, factors)
    assert equal(before.values(), adapted_model.state_dict().values())
    for low_cpu_mem_usage in (False, True):
        other = Model()
        config = register(peft.LoraConfig.from_pretrained(tmp_path), other)
        with pytest.raises(ValueError, match=message):
            peft.PeftModel.from_pretrained(other, tmp_path, config=config, low_cpu_mem_usage=low_cpu_mem_usage)


def test_a_forward_without_a_loaded_adapter_says_so_once(recwarn):
    warnings.simplefilter("default")
    adapted_model, _ = model()
    with adapted_model.disable_adapter():
        adapted_model(X)
    adapted_model.base_model.set_adapter([])
    assert not recwarn.list
    for _ in range(2):
        adapted_model(X)
    assert [str(warning.message) for warning in recwarn.list] == [
        "forward without adapters: default loaded, but set_adapter has made none active"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora: expected none for the FP8 weights of proj, got True"),
        ({"lora_bias": True}, "lora_bias: expected none for the FP8 weights of proj"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: expected True, False or 'gaussian' for proj, got 'pissa'"),
        ({"use_qalora": True}, "use_qalora: expected none for the FP8 weights of proj, got True"),
        (
            {"layer_replication": [[0, 1]]},
            r"layer_replication: expected none for the FP8 weights of proj, got \[\[0, 1",
        ),
        ({"target_modules": ".*experts"}, r"target_modules: .* \['experts.gate_up_proj', 'experts.down_proj'\]"),
        (
            {"target_modules": ["experts"], "layers_to_transform": [0], "target_parameters": None},
            r"target_modules: .* \['experts.gate_up_proj', 'experts.down_proj'\]",
        ),
        ({"target_parameters": ["proj.weight"]}, "target_parameters: expected projections of experts, got proj.weight"),
        ({"target_parameters": ["down_proj_scale_inv"]}, "target_parameters: expected projections of experts, got exp"),
        ({"lora_dropout": 1.0}, "lora_dropout: expected at least 0 and below 1 for proj, got 1.0"),
        (
            {"target_modules": ["proj"], "modules_to_save": ["experts"]},
            "modules_to_save: experts is in FP8, which is not",
        ),
        ({"target_modules": "all-linear"}, "target_modules: 'all-linear' leaves out FP8Linear and experts; .* as proj"),
    ],
)
def test_more_than_plain_lora_is_refused_before_anything_is_changed(options, message):
    base = Model()
    options = {"target_modules": ["gate", "proj"], "target_parameters": EXPERTS} | options
    with pytest.raises(ValueError, match=message):
        register(peft.LoraConfig(**options), base)
    with pytest.raises(ValueError, match=message):  # of a model that has adapters
        register(peft.LoraConfig(**options), model()[0].base_model.model)


def test_experts_by_the_name_of_their_module():
    base = Model()
    config = register(peft.LoraConfig(r=2, target_modules=["proj", "experts"]), base)
    assert config.target_modules == {"proj"} and config.target_parameters == EXPERTS
    adapted_model = peft.get_peft_model(base, config)
    named = peft.get_peft_model(
        (other := Model()), register(peft.LoraConfig(r=2, target_modules=["proj"], target_parameters=EXPERTS), other)
    )
    assert adapted_model.state_dict().keys() == named.state_dict().keys()


def test_adapters_that_were_not_registered_are_refused():
    for name, layer in (("proj.weight", "FP8Linear"), ("experts.down_proj", "GroupedExperts")):
        adapted_model = peft.get_peft_model(Model(), peft.LoraConfig(target_parameters=[name]))
        with pytest.raises(RuntimeError, match=f"^fp8moe.{layer}: a parametrization cannot change FP8 weights; for ad"):
            adapted_model(X)


def test_more_than_plain_lora_is_left_to_other_layers():
    base = Model()
    adapted_model = peft.get_peft_model(base, register(peft.LoraConfig(target_modules=["gate"], use_dora=True), base))
    assert adapted_model.base_model.model.gate.use_dora["default"]
    changed = register(peft.LoraConfig(target_parameters=EXPERTS), Model())
    changed.use_dora = True
    with pytest.raises(ValueError, match="use_dora: expected none for the FP8 weights of experts.gate_up"):
        peft.get_peft_model(Model(), changed)


def test_shared_weights_are_refused():
    """peft would adapt the first module only, and merging would add to shared weights twice."""
    for share in (lambda base: base.experts, lambda base: copy.deepcopy(base.experts, sharing(base.experts))):
        base = Model()
        base.other_experts = share(base)
        with pytest.raises(ValueError, match="^other_experts: expected weights of its own to adapt, got those of exp"):
            config = peft.LoraConfig(target_parameters=[*EXPERTS, "other_experts.down_proj"])
            register(config, base)
        register(peft.LoraConfig(target_modules=["proj"]), base)


def sharing(module):
    """For `copy.deepcopy`: with the same parameters."""
    return {id(value): value for value in module.parameters()}


def test_layers_that_were_spread_are_not_merged():
    layer = adapted()
    base = layer.get_base_layer()
    before = [value.clone() for value in base.parameters()]
    base.parallel = object()
    with pytest.raises(ValueError, match=r"^experts.down_proj: expected a layer that is whole on this rank"):
        layer.merge()
    assert equal(before, base.parameters()) and not layer.merged


def refused_on_ranks():
    mesh = init_device_mesh("cpu", (2,))
    message = "^experts.*: expected a layer that is whole on this rank to adapt, got GroupedExperts spread over"
    base = Model()
    config = register(peft.LoraConfig(target_parameters=EXPERTS), base)
    whole = peft.get_peft_model(copy.deepcopy(base), config)
    parallelize_module(base, mesh, {"experts": ExpertParallel()})
    with pytest.raises(ValueError, match=message):
        peft.get_peft_model(base, config)
    assert base.experts.parallel is not None and type(base.experts) is GroupedExperts
    parallelize_module(whole, mesh, {"base_model.model.experts.base_layer.base_layer": ExpertParallel()})
    with pytest.raises(ValueError, match=message):
        whole(X)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_layers_on_several_ranks_are_refused():
    in_processes(refused_on_ranks)


def test_adapters_by_sequence_are_refused_for_experts():
    adapted_model, _ = model()
    with pytest.raises(ValueError, match="adapter_names: expected none for the experts experts.down_proj, got 2"):
        adapted_model.eval()(X, adapter_names=["default", "__base__"])


@pytest.mark.parametrize("master_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["experts.gate_up_proj", "experts.down_proj", "proj.weight"])
def test_base_weights_that_would_get_no_gradient_are_refused(name, master_dtype):
    adapted_model, _ = model(Model(master_dtype=master_dtype))
    module, _, parameter = name.rpartition(".")
    layer = adapted_model.base_model.model.get_submodule(module).get_base_layer()
    weight = layer.get_parameter(parameter).requires_grad_()
    with pytest.raises(ValueError, match=rf"^{name}: expected a frozen parameter beside adapters.*requires_grad_"):
        adapted_model(X)
    with torch.no_grad():
        adapted_model(X)
    weight.requires_grad_(False)
    adapted_model(X)


def test_masters_and_the_bias_of_a_linear_get_gradients_beside_adapters():
    for name, options in (("weight", {"master_dtype": torch.bfloat16}), ("bias", {})):
        net = torch.nn.Sequential(FP8Linear(144, 144, **options))
        net = peft.get_peft_model(net, register(peft.LoraConfig(target_modules=["0"]), net))
        parameter = net.base_model.model[0].base_layer.get_parameter(name).requires_grad_()
        net(X).sum().backward()
        assert parameter.grad.any()


def test_other_configs_and_models_are_refused():
    with pytest.raises(TypeError, match="config: expected a peft.LoraConfig, got IA3Config"):
        register(peft.IA3Config(), Model())
    with pytest.raises(ValueError, match="model: expected FP8Linear or GroupedExperts.*found none in Linear"):
        register(peft.LoraConfig(), torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="r: expected a rank of at least 1 for experts.gate_up_proj, got 0"):
        second_adapter(adapted(), r=0)


def test_second_derivatives_are_refused():
    layer, (x, index, weights, _) = adapted(), inputs()
    out = layer(x.requires_grad_(), index, weights)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="there is no double backward"):
        grad.sum().backward()
