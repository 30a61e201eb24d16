"""Adapters on transformers models whose experts and FP8 linears run on fp8moe."""

import pytest
import torch

from fp8moe import FP8Linear, GroupedExperts
from fp8moe.integrations.checkpoints import quantize_checkpoint
from fp8moe.integrations.decode import GraphDecoder
from fp8moe.integrations.transformers import load_model, optimize
from tests.errors import relative_error
from tests.transformers_models import BASE, MLA, TOKENS, modules_named, random_model, write_checkpoints

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from transformers.integrations import finegrained_fp8  # noqa: E402

from fp8moe.integrations.peft import merge_and_unload, register  # noqa: E402
from fp8moe.integrations.peft.experts import LoraExperts  # noqa: E402
from fp8moe.integrations.peft.layer import LoraFP8Linear  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "registered", "fp8_without_gpu")

SHAPE = BASE | {"hidden_size": 128, "max_position_embeddings": 64, "initializer_range": 0.03}
MODELS = {
    "mixtral": {"intermediate_size": 256, "num_local_experts": 4, "num_key_value_heads": 2},
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 8, "num_key_value_heads": 2, "head_dim": 16},
    "deepseek_v3": MLA,
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoints(request, tmp_path_factory):
    """(bf16 checkpoint, FP8 checkpoint)"""
    model = random_model(request.param, SHAPE | MODELS[request.param], dtype=torch.bfloat16)
    return write_checkpoints(model, tmp_path_factory.mktemp(request.param))


def from_pretrained(directory):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, experts_implementation="fp8moe", dtype=torch.bfloat16
    )
    return model.eval()


LOADERS = {
    "bfloat16 experts": lambda bf16, fp8: from_pretrained(bf16),
    "FP8 of transformers": lambda bf16, fp8: from_pretrained(fp8),
    "load_model": lambda bf16, fp8: load_model(fp8),
}


def config(**options):
    return peft.LoraConfig(**{"r": 4, "target_modules": ["o_proj", "experts"], "task_type": "CAUSAL_LM"} | options)


def adapt(model, **options):
    torch.manual_seed(1)
    return peft.get_peft_model(model, register(config(**options), model))


def is_merged(name, module):
    quantized = isinstance(module, FP8Linear | finegrained_fp8.FP8Linear)
    return name.endswith(".experts") or (name.endswith(".o_proj") and quantized)


@torch.no_grad()
def logits(model):
    return model(TOKENS).logits.float()


@pytest.mark.parametrize("kind", LOADERS)
def test_from_training_to_merging(checkpoints, kind, tmp_path):
    model = LOADERS[kind](*checkpoints)
    before = logits(model)
    adapted = adapt(model)
    assert relative_error(logits(adapted), before) < 0.1  # with adapters the result of GEMM 1 is rounded
    kinds = [type(module) for module in adapted.modules()]
    assert LoraExperts in kinds and (LoraFP8Linear in kinds) == (kind != "bfloat16 experts")

    optimizer = torch.optim.AdamW([value for value in adapted.parameters() if value.requires_grad], lr=2e-2)
    losses = []
    for _ in range(6):
        loss = adapted.train()(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    trained = logits(adapted.eval())

    adapted.save_pretrained(tmp_path, save_embedding_layers=False)
    other = LOADERS[kind](*checkpoints)
    own = register(peft.LoraConfig.from_pretrained(tmp_path), other)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(other, tmp_path, config=own)), trained)

    merged, errors = merge_and_unload(adapted, safe_merge=True)
    assert type(merged) is type(other) and not any("lora" in name for name in merged.state_dict())
    assert relative_error(logits(merged) - before, trained - before) < 0.3
    assert errors.keys() == {name for name, module in merged.named_modules() if is_merged(name, module)}
    largest = 5e-3 if kind == "bfloat16 experts" else 3e-2
    assert all(0 < error.weight < largest and 0 < error.adapter < 1 for error in errors.values())


@pytest.mark.parametrize("kind", LOADERS)
def test_gradients_are_those_of_grouped_experts(checkpoints, kind):
    """Through the router too."""
    model = LOADERS[kind](*checkpoints)
    twin = LOADERS[kind](*checkpoints)
    for name, module in list(twin.named_modules()):
        if name.endswith(".experts") and not isinstance(module, GroupedExperts):
            twin.set_submodule(name, GroupedExperts.from_experts(module))
    found = []
    for one in (model, twin):
        adapted = adapt(one, modules_to_save=["gate"], init_lora_weights=False)
        adapted(TOKENS, labels=TOKENS).loss.backward()
        found.append({name: value.grad for name, value in adapted.named_parameters() if value.requires_grad})
    assert found[0].keys() == found[1].keys() and any("gate" in name for name in found[0])
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]) and grad.any(), name


def test_merged_scales_of_a_byte_stay_powers_of_two(checkpoints, tmp_path):
    quantize_checkpoint(checkpoints[0], tmp_path, scale_format="ue8m0")
    model = from_pretrained(tmp_path)
    scales = [value for name, value in model.named_parameters() if name.endswith("scale_inv")]
    before = logits(model)
    adapted = adapt(model, init_lora_weights=False)
    change = logits(adapted) - before
    merged, _ = merge_and_unload(adapted)
    after = [value for name, value in merged.named_parameters() if name.endswith("scale_inv")]
    assert [value.dtype for value in scales] == [value.dtype for value in after]
    assert all((torch.frexp(value.float())[0] == 0.5).all() for value in after)
    assert relative_error(logits(merged) - before, change) < 0.5


def test_unquantized_weights_are_quantized_anew_after_a_merge(checkpoints):
    model = from_pretrained(checkpoints[0])
    adapted = adapt(model, init_lora_weights=False, target_modules=["experts"])
    with_adapter = logits(adapted)
    kept = modules_named(model, "base_layer")[-1]._fp8moe.layer
    adapted.merge_adapter()
    merged = logits(adapted)
    assert 0 < relative_error(merged, with_adapter) < 0.3
    assert modules_named(model, "base_layer")[-1]._fp8moe.layer is not kept
    adapted.unmerge_adapter()
    assert torch.equal(logits(adapted), with_adapter)


def test_generation_with_an_adapter(checkpoints):
    model = load_model(checkpoints[1], dtype=torch.float32)
    adapted = adapt(model, init_lora_weights=False).eval()
    plain = adapted.generate(TOKENS, max_new_tokens=4, do_sample=False)
    decoder = GraphDecoder(model, batch_sizes=(len(TOKENS),), max_length=32, capture=False, fuse=False)
    assert torch.equal(decoder.generate(TOKENS, max_new_tokens=4), plain)


def test_what_was_captured_or_cached_with_other_adapters_is_refused(checkpoints):
    """CUDA graphs and a prefix would go on with the adapters of before: switched, scaled, disabled or merged."""
    model = load_model(checkpoints[1], dtype=torch.float32)
    adapted = adapt(model, init_lora_weights=False).eval()
    decoder = GraphDecoder(model, batch_sizes=(1,), max_length=32, capture=False, fuse=False)
    prefix = decoder.prefix(TOKENS[:1, :3])
    decoder.captured = True  # as on a GPU; what it would replay is not reached
    experts = next(module for module in model.modules() if isinstance(module, LoraExperts))
    changes = (
        (adapted.base_model.disable_adapter_layers, adapted.base_model.enable_adapter_layers),
        (lambda: experts.scale_layer(2.0), lambda: experts.unscale_layer(2.0)),
    )
    adapters = "the model's adapters have been switched, scaled or disabled since"
    for change, undo in changes:
        change()
        with pytest.raises(RuntimeError, match=f"^{adapters} the capture"):
            decoder.generate(TOKENS[:1], max_new_tokens=2)
        with pytest.raises(ValueError, match=f"^prefix: {adapters} it was made"):
            prefix.check(decoder)
        undo()
        with decoder.turn():
            prefix.check(decoder)
    adapted.merge_adapter()
    with pytest.raises(RuntimeError, match="^the model's weights have moved or changed since the capture"):
        decoder.generate(TOKENS[:1], max_new_tokens=2)


@pytest.mark.parametrize("adapted_first", [True, False])
def test_optimized_models_run_their_adapters(checkpoints, adapted_first):
    model = load_model(checkpoints[1])
    base = logits(model)
    adapted = adapt(load_model(checkpoints[1]), init_lora_weights=False).eval()
    change = logits(adapted) - base
    if not adapted_first:
        optimize(model)
    other = adapt(model, init_lora_weights=False).eval()
    if adapted_first:
        optimize(model)
    # Another rounding may choose other experts.
    assert relative_error(logits(other) - base, change) < 0.2


def test_names_of_older_checkpoints_are_refused():
    """peft turns them into target_parameters, which add to the weights in each call."""
    model = random_model("qwen3_moe", SHAPE | MODELS["qwen3_moe"], dtype=torch.bfloat16)
    model.set_experts_implementation("fp8moe")
    with pytest.raises(ValueError, match="target_parameters: .* of model.layers.0.mlp.experts.* is in FP8"):
        adapt(model, target_modules=["gate_proj", "up_proj", "down_proj"])


def test_experts_of_other_implementations_are_left_to_peft():
    model = random_model("mixtral", SHAPE | MODELS["mixtral"], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="model: expected FP8Linear or GroupedExperts.*found none in Mixtral"):
        register(config(), model)


def test_experts_of_gpt_oss_are_refused():
    sizes = {"intermediate_size": 64, "num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = random_model("gpt_oss", SHAPE | sizes, dtype=torch.bfloat16)
    model.set_experts_implementation("fp8moe")
    with pytest.raises(
        ValueError, match=r"mlp\.experts: expected .* \(E, rows, columns\) to adapt, got transposed ones"
    ):
        adapt(model)
    for layer in model.model.layers:
        layer.mlp.experts = GroupedExperts.from_experts(layer.mlp.experts)
    with pytest.raises(
        ValueError, match=r"mlp\.experts: expected experts without biases to adapt, got gate_up_proj_bias"
    ):
        adapt(model)


def test_fp8_linears_of_other_formats_are_refused():
    model = torch.nn.Sequential(finegrained_fp8.FP8Linear(128, 128, block_size=(64, 64)))
    with pytest.raises(ValueError, match=r"^0: expected FP8 weights that fp8moe runs, got weight blocks \(64, 64\)"):
        peft.get_peft_model(model, register(peft.LoraConfig(target_modules=["0"]), model))
