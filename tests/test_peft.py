"""Adapters on FP8 experts and linears against float64 of W + BA, on the reference backend."""

import copy
import logging
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
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
from fp8moe.integrations.peft import merge_and_unload, register  # noqa: E402
from tests.peft_reference import Model, adapted, additions, expected, run, scaled  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Against float64 of the dequantized weights plus BA: what quantized activations and gradients cost.
STRAIGHT = 6e-2
# The same where the inputs of the FP8 products are quantized too: what is left are gradients.
QUANTIZED = 4e-2
# And where a limit clamps: a value rounded to the other side of it has a gradient that the exact one has not.
CLAMPED = {"straight": 0.4, "quantized": 0.12}
UP, DOWN = "gate_up_proj", "down_proj"


def check(layer, *arguments, straight=STRAIGHT, quantized=QUANTIZED, **masks):
    out, grads = run(layer, *arguments)
    assert out.dtype == grads["x"].dtype == arguments[0].dtype and grads["routing"].dtype == arguments[2].dtype
    for as_in_fp8, tolerance in ((False, straight), (True, quantized)):
        value, values = expected(layer, *arguments, as_in_fp8=as_in_fp8, **masks)
        errors = {"out": relative_error(out, value)}
        errors |= {name: relative_error(grads[name], value) for name, value in values.items()}
        assert max(errors.values()) <= tolerance, (as_in_fp8, errors)
    return out, grads


def model(**options):
    """An adapted `Model` with values in all factors, and the one that it was."""
    base = Model()
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["proj", "experts"], "init_lora_weights": False} | options
    return peft.get_peft_model(copy.deepcopy(base), register(peft.LoraConfig(**options), base)), base


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
    for name, grad in grads.items():
        assert torch.equal(grads_again[name.replace("lora", "_orig_mod.lora")], grad), name


# Several adapters.


def second_adapter(layer, **options):
    options = {"r": 3, "lora_alpha": 3, "init_lora_weights": False} | options
    config = peft.LoraConfig(target_modules=["experts"], **options)
    layer.update_layer("second", options["r"], lora_alpha=options["lora_alpha"], config=config)


def test_two_active_adapters_add_up():
    layer = adapted()
    second_adapter(layer)
    layer.set_adapter(["default", "second"])
    _, grads = check(layer, *inputs())
    assert all(grad.any() for grad in grads.values())


def test_adapters_are_switched_disabled_and_deleted():
    layer, (x, index, weights, grad) = adapted(), inputs()
    base, one = layer.base_layer(x.requires_grad_(), index, weights), layer(x, index, weights)
    second_adapter(layer)
    assert torch.equal(layer(x, index, weights), one)
    layer.set_adapter("second")
    assert all(value.requires_grad == ("second" in name) for name, value in layer.named_parameters())
    check(layer, x, index, weights, grad)
    layer.enable_adapters(False)
    assert torch.equal(layer(x, index, weights), base)
    layer.enable_adapters(True)
    layer.delete_adapter("second")
    layer.set_adapter("default")
    assert torch.equal(layer(x, index, weights), one)
    layer.set_adapter([])
    assert torch.equal(layer(x, index, weights), base)


def test_active_adapters_with_other_dropouts_are_refused():
    layer = adapted()
    second_adapter(layer, lora_dropout=0.5)
    layer.set_adapter(["default", "second"])
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
    layer.set_scale("default", 0.25)
    assert layer.scaling == {"default": 0.5}
    check(layer, *inputs())


def test_weighted_adapters_of_experts_are_refused():
    adapted_model, base = model()
    config = register(peft.LoraConfig(r=4, target_modules=["proj", "experts"], init_lora_weights=False), base)
    adapted_model.add_adapter("second", config)
    before = adapted_model(X)
    with pytest.raises(AttributeError, match="add_weighted_adapter: expected adapters of single matrices, got those"):
        adapted_model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "both", combination_type="linear")
    adapted_model.delete_adapter("both")
    assert torch.equal(adapted_model(X), before)
    assert adapted_model.base_model.model.experts.r.keys() == {"default", "second"}


# Through peft.


def test_a_new_adapter_changes_nothing_and_only_it_is_trained():
    adapted_model, base = model(init_lora_weights=True)
    for kind in (True, "gaussian"):
        adapted_model, base = model(init_lora_weights=kind)
        assert torch.equal(adapted_model(X), base(X))
    trained = {name for name, value in adapted_model.named_parameters() if value.requires_grad}
    assert len(trained) == 6 and all("lora_" in name for name in trained)
    factors = adapted_model.base_model.model.experts.lora_A["default"]
    assert factors.gate_up_proj.shape == (4, 4, 144) and factors.down_proj.shape == (4, 4, 80)
    assert {value.dtype for value in adapted_model.parameters() if value.requires_grad} == {torch.float32}
    config = register(peft.LoraConfig(target_modules=["proj", "experts"]), base)
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
    adapted_model, base = model(rank_pattern={"experts": 6}, lora_dropout=0.1)
    adapted_model.save_pretrained(tmp_path)
    config = register(peft.LoraConfig.from_pretrained(tmp_path), base)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path, config=config, is_trainable=True)
    experts = loaded.base_model.model.experts
    assert experts.r == {"default": 6} and experts.lora_dropout["default"].p == 0.1
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
    (up, down), _ = additions(layer)
    base = layer.get_base_layer()
    found = {}
    for name, added, parts in ((base.up_name, up, 2), ("down_proj", down, 1)):
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
    sums, before = merged_weights(layer), [value.clone() for value in layer.base_layer.parameters()]
    layer.merge()
    stored = stored_weights(layer)
    assert all(relative_error(stored[name], sums[name]) < 3e-2 for name in sums)
    error = norm(stored[name] - sums[name] for name in sums)
    assert layer.merge_error.weight == pytest.approx(error / norm(sums.values()), rel=1e-3)
    assert layer.merge_error.adapter == pytest.approx(error / norm(additions(layer)[0]), rel=1e-3)
    assert layer.merged_adapters == ["default"]
    arguments = inputs()
    assert torch.equal(layer(*arguments[:3]), layer.base_layer(*arguments[:3]))
    layer.unmerge()
    assert equal(before, layer.base_layer.parameters())
    assert not layer.merged and not layer._before_merge
    layer.unmerge()


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
    layer.set_adapter(["default", "second"])
    sums = merged_weights(layer)
    layer.merge()
    assert all(relative_error(stored_weights(layer)[name], sums[name]) < 2.8e-2 for name in sums)
    other.merge(adapter_names=["default"])
    before = other._before_merge
    with pytest.warns(UserWarning, match="additionally merging second"):
        other.merge(adapter_names=["second"])
    assert other.merged_adapters == ["default", "second"] and other._before_merge is before
    other.unmerge()
    assert torch.equal(other.base_layer.down_proj.float(), make().down_proj.float())


def test_merge_and_unload(caplog):
    adapted_model, base = model()
    with torch.no_grad():
        before = adapted_model(X)
        with caplog.at_level(logging.INFO, "fp8moe"):
            merged, errors = merge_and_unload(adapted_model, safe_merge=True)
        assert type(merged) is Model and {type(merged.proj), type(merged.experts)} == {FP8Linear, GroupedExperts}
        assert not any("lora" in name for name in merged.state_dict())
        assert relative_error(before - base(X), merged(X) - base(X)) < 0.3
    assert errors.keys() == {"proj", "experts"}
    assert all(2e-2 < error.weight < 3e-2 < error.adapter < 1 for error in errors.values())
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "merged ['default'] into proj",
        "merged ['default'] into experts",
    ]


def test_unload_leaves_the_weights_alone():
    adapted_model, base = model()
    assert equal(adapted_model.unload().parameters(), base.parameters())


@pytest.mark.parametrize("name", ["experts.lora_B.default.down_proj", "proj.lora_A.default.weight"])
def test_what_is_not_finite_is_not_merged_safely(name):
    adapted_model, _ = model()
    adapted_model.get_parameter(f"base_model.model.{name}").data.flatten()[7] = float("inf")
    module = name.split(".")[0]
    layer = adapted_model.get_submodule(f"base_model.model.{module}")
    before = [value.clone() for value in layer.base_layer.parameters()]
    with pytest.raises(ValueError, match=f"^{module}: safe_merge: expected finite W"):
        layer.merge(safe_merge=True)
    assert equal(before, layer.base_layer.parameters())
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
    adapted_model.base_model.model.experts.lora_A["default"].gate_up_proj.data[2, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="^experts: safe_merge"):
        merge_and_unload(adapted_model, safe_merge=True)
    assert equal(adapted_model.unload().parameters(), base.parameters())


def test_powers_of_two_stay_powers_of_two():
    layer = adapted(GroupedExperts.from_experts(make_trained(), scale_format="ue8m0"))
    layer.merge()
    for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
        assert (torch.frexp(getattr(layer.base_layer, name))[0] == 0.5).all()


def test_masters_are_added_to():
    layer = adapted(make_trained())
    arguments = inputs()
    before = layer(*arguments[:3]).detach()
    master = layer.base_layer.down_proj.detach().clone()
    layer.merge()
    assert layer.merge_error.weight < 1e-6
    assert relative_error(layer.base_layer.down_proj.detach() - master, additions(layer)[0][1].detach()) < 1e-5
    assert relative_error(layer(*arguments[:3]).detach(), before) < 0.1


# Importing, and what is refused.


def test_peft_is_imported_when_it_is_used():
    script = "import sys, fp8moe.integrations.peft; print('peft' in sys.modules, 'transformers' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert output.split() == ["False", "False"]


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
        ({"target_modules": [], "target_parameters": ["experts.down_proj"]}, "target_parameters: down_proj of experts"),
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
    options = {"target_modules": ["gate", "proj", "experts"]} | options
    with pytest.raises(ValueError, match=message):
        register(peft.LoraConfig(**options), base)
    with pytest.raises(ValueError, match=message):  # of a model that has adapters
        register(peft.LoraConfig(**options), model()[0].base_model.model)


def test_more_than_plain_lora_is_left_to_other_layers():
    base = Model()
    adapted_model = peft.get_peft_model(base, register(peft.LoraConfig(target_modules=["gate"], use_dora=True), base))
    assert adapted_model.base_model.model.gate.use_dora["default"]
    changed = register(peft.LoraConfig(target_modules=["experts"]), Model())
    changed.use_dora = True
    with pytest.raises(ValueError, match="use_dora: expected none for the FP8 weights of experts"):
        peft.get_peft_model(Model(), changed)


def test_shared_weights_are_refused():
    """peft would adapt the first module only, and merging would add to shared weights twice."""
    for share in (lambda base: base.experts, lambda base: copy.deepcopy(base.experts, sharing(base.experts))):
        base = Model()
        base.other_experts = share(base)
        with pytest.raises(ValueError, match="^other_experts: expected weights of its own to adapt, got those of exp"):
            register(peft.LoraConfig(target_modules=["experts", "other_experts"]), base)
        register(peft.LoraConfig(target_modules=["proj"]), base)


def sharing(module):
    """For `copy.deepcopy`: with the same parameters."""
    return {id(value): value for value in module.parameters()}


def test_layers_that_were_spread_are_not_merged():
    layer = adapted()
    before = [value.clone() for value in layer.base_layer.parameters()]
    layer.base_layer.parallel = object()
    with pytest.raises(ValueError, match="^experts: expected a layer that is whole on this rank"):
        layer.merge()
    assert equal(before, layer.base_layer.parameters()) and not layer.merged


def refused_on_ranks():
    mesh = init_device_mesh("cpu", (2,))
    message = "^experts: expected a layer that is whole on this rank to adapt, got GroupedExperts spread over"
    base = Model()
    config = register(peft.LoraConfig(target_modules=["experts"]), base)
    whole = peft.get_peft_model(copy.deepcopy(base), config)
    parallelize_module(base, mesh, {"experts": ExpertParallel()})
    with pytest.raises(ValueError, match=message):
        peft.get_peft_model(base, config)
    assert base.experts.parallel is not None and type(base.experts) is GroupedExperts
    parallelize_module(whole, mesh, {"base_model.model.experts.base_layer": ExpertParallel()})
    with pytest.raises(ValueError, match=message):
        whole(X)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_layers_on_several_ranks_are_refused():
    in_processes(refused_on_ranks)


def test_adapters_by_sequence_are_refused_for_experts():
    adapted_model, _ = model()
    with pytest.raises(ValueError, match="adapter_names: expected none for the experts experts, got 2"):
        adapted_model.eval()(X, adapter_names=["default", "__base__"])


def test_other_configs_and_models_are_refused():
    with pytest.raises(TypeError, match="config: expected a peft.LoraConfig, got IA3Config"):
        register(peft.IA3Config(), Model())
    with pytest.raises(ValueError, match="model: expected FP8Linear or GroupedExperts.*found none in Linear"):
        register(peft.LoraConfig(), torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="r: expected a rank of at least 1 for experts, got 0"):
        second_adapter(adapted(), r=0)


def test_second_derivatives_are_refused():
    layer, (x, index, weights, _) = adapted(), inputs()
    out = layer(x.requires_grad_(), index, weights)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="there is no double backward"):
        grad.sum().backward()
