"""Adapters on transformers models whose experts and FP8 linears run on fp8moe."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from fp8moe import FP8Linear, GroupedExperts
from fp8moe.decode import GraphDecoder
from fp8moe.hf import load_model, optimize
from fp8moe.weights import quantize_checkpoint
from tests.errors import relative_error
from tests.transformers_models import (
    BASE,
    MLA,
    TOKENS,
    modules_named,
    newer_than_5_17,
    random_model,
    write_checkpoints,
)

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from peft.tuners.lora.layer import LoraLayer  # noqa: E402
from transformers.integrations import finegrained_fp8  # noqa: E402

from fp8moe.peft import merge_and_unload, register  # noqa: E402
from fp8moe.peft.experts import LoraExperts  # noqa: E402
from fp8moe.peft.layer import FP8LoraLayer, LoraFP8Linear  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "registered", "fp8_without_gpu")

SHAPE = BASE | {"hidden_size": 128, "max_position_embeddings": 64, "initializer_range": 0.03}
MODELS = {
    "mixtral": {"intermediate_size": 256, "num_local_experts": 4, "num_key_value_heads": 2},
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 8, "num_key_value_heads": 2, "head_dim": 16},
    "deepseek_v3": MLA,
}
EXCHANGED = MODELS | {
    "glm4_moe": {name: value for name, value in MLA.items() if "rank" not in name} | {"head_dim": 16},
    "nemotron_h": {  # experts without gates
        **{"layers_block_type": ["attention", "moe"], "moe_shared_expert_intermediate_size": 64, "head_dim": 16},
        **{"moe_intermediate_size": 64, "n_routed_experts": 8, "num_key_value_heads": 2},
    },
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def write(model_type, directory):
    """(bf16 checkpoint, FP8 checkpoint)"""
    model = random_model(model_type, SHAPE | EXCHANGED[model_type], dtype=torch.bfloat16)
    return write_checkpoints(model, directory)


@pytest.fixture(scope="module", params=MODELS)
def checkpoints(request, tmp_path_factory):
    return write(request.param, tmp_path_factory.mktemp(request.param))


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
    targets = {"target_modules": ["o_proj"], "target_parameters": EXPERTS}
    return peft.LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM"} | targets | options)


def adapt(model, **options):
    torch.manual_seed(1)
    return peft.get_peft_model(model, register(config(**options), model))


def merged_names(model):
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            yield from (f"{name}.{projection}" for projection in ("gate_up_proj", "down_proj"))
        elif name.endswith(".o_proj") and isinstance(module, FP8Linear | finegrained_fp8.FP8Linear):
            yield name


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
    assert errors.keys() == set(merged_names(merged))
    if kind == "load_model":
        merged.save_pretrained(tmp_path / "merged")
        assert torch.equal(logits(load_model(tmp_path / "merged")), logits(merged))
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
    adapted = adapt(model, init_lora_weights=False, target_modules=[])
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


# Adapters across peft and fp8moe: the same files, peft's own.

VARIANTS = {
    "mixtral": {"use_rslora": True},
    "qwen3_moe": {
        "rank_pattern": {"experts.down_proj": 2, "o_proj": 8},
        "alpha_pattern": {"experts.gate_up_proj": 32, r"layers\.1\..*o_proj": 1},
    },
    "deepseek_v3": {"modules_to_save": ["gate"]},
    "glm4_moe": {"lora_dropout": 0.1, "target_parameters": ["experts.down_proj"]},
    "nemotron_h": {"target_parameters": ["experts.up_proj", "experts.down_proj"]},
}
KINDS = {"mixtral": "FP8 of transformers", "nemotron_h": "bfloat16 experts"}


def plain(directory, adapter, dtype=torch.bfloat16):
    """What peft alone makes of the bfloat16 checkpoint and an adapter."""
    own = peft.LoraConfig.from_pretrained(adapter)
    own.lora_dropout = 0.0  # peft takes none for parameters
    base = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return peft.PeftModel.from_pretrained(base, adapter, config=own).eval()


def in_fp8(base, adapter):
    """The same of fp8moe."""
    own = register(peft.LoraConfig.from_pretrained(adapter), base)
    return peft.PeftModel.from_pretrained(base, adapter, config=own).eval()


def saved(model, directory):
    """The file of its adapter."""
    model.save_pretrained(directory, save_embedding_layers=False)
    return load_file(directory / "adapter_model.safetensors")


def same_bits(factors, others):
    return factors.keys() == others.keys() and all(torch.equal(factors[name], others[name]) for name in factors)


def products(model):
    """What adapters add to each weight, by name, in float32."""
    found = {}
    for path, layer in model.get_base_model().named_modules():
        if isinstance(layer, FP8LoraLayer):
            stored = layer.stored(["default"])[0]
            found[layer.name] = torch.stack([stored.add(expert) for expert in range(len(stored.data))])
        elif isinstance(layer, LoraLayer):
            found[path] = layer.float().get_delta_weight("default")
    return found


def check_exchanged(model, bf16):
    """The weights that peft merges in float32 are those with our products, and the models agree on the logits."""
    result = logits(model)
    before = transformers.AutoModelForCausalLM.from_pretrained(bf16, dtype=torch.float32).state_dict()
    adapter = model.peft_config["default"].adapter
    merged = plain(bf16, adapter, torch.float32).merge_and_unload().state_dict()
    found = products(model)
    for name, product in found.items():
        key = name if name in before else f"{name}.weight"
        total = before[key] + product.detach().view_as(before[key])
        assert relative_error(total, merged[key]) <= 1e-6, name
        assert relative_error(before[key], merged[key]) > 1e-2, name
    assert sum(not torch.equal(before[name], merged[name]) for name in before if "gate.weight" not in name) == len(
        found
    )
    expected = logits(plain(bf16, adapter))
    assert F.cosine_similarity(result, expected, dim=-1).median() >= 0.99


@pytest.mark.parametrize("model_type", EXCHANGED)
def test_adapters_across_peft_and_fp8moe(model_type, tmp_path):
    bf16, fp8 = write(model_type, tmp_path)
    load = LOADERS[KINDS.get(model_type, "load_model")]
    ours = adapt(load(bf16, fp8), init_lora_weights=False, **VARIANTS[model_type]).eval()
    first = saved(ours, tmp_path / "ours")
    second = saved(plain(bf16, tmp_path / "ours"), tmp_path / "peft")
    again = in_fp8(load(bf16, fp8), tmp_path / "peft")
    assert same_bits(first, second) and same_bits(second, saved(again, tmp_path / "again"))
    assert torch.equal(logits(again), logits(ours))
    again.peft_config["default"].adapter = tmp_path / "again"
    check_exchanged(again, bf16)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_adapters_of_single_experts(model_type, tmp_path):
    """Files from before transformers put experts together; peft turns them into its own for experts."""
    bf16, fp8 = write(model_type, tmp_path)
    names = ["w1", "w3", "w2"] if model_type == "mixtral" else ["gate_proj", "up_proj", "down_proj"]
    block = "block_sparse_moe" if model_type == "mixtral" else "mlp"
    hidden, size = SHAPE["hidden_size"], 256 if model_type == "mixtral" else 64
    factors, generator = {}, torch.Generator().manual_seed(0)
    for layer, expert, name in itertools.product(range(2), range(4 if model_type == "mixtral" else 8), names):
        rows, columns = (hidden, size) if name == names[2] else (size, hidden)
        for factor, shape in (("A", (4, columns)), ("B", (rows, 4))):
            key = f"base_model.model.model.layers.{layer}.{block}.experts.{expert}.{name}.lora_{factor}.weight"
            factors[key] = 0.3 * torch.randn(shape, generator=generator)
    adapter = tmp_path / "old"
    peft.LoraConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM").save_pretrained(adapter)
    save_file(factors, adapter / "adapter_model.safetensors")
    ours = in_fp8(load_model(fp8), adapter)
    assert same_bits(saved(ours, tmp_path / "ours"), saved(plain(bf16, adapter), tmp_path / "peft"))
    ours.peft_config["default"].adapter = tmp_path / "ours"
    check_exchanged(ours, bf16)
    found = products(ours)["model.layers.1.mlp.experts.gate_up_proj"][2]
    prefix = f"base_model.model.model.layers.1.{block}.experts.2"
    wanted = [
        2 * factors[f"{prefix}.{name}.lora_B.weight"] @ factors[f"{prefix}.{name}.lora_A.weight"] for name in names
    ]
    assert relative_error(found, torch.cat(wanted[:2])) <= 1e-6


@pytest.mark.parametrize("kind", LOADERS)
def test_adapters_that_were_not_registered_are_refused(checkpoints, kind):
    """peft would add them to FP8 values without their scales."""
    adapted = peft.get_peft_model(LOADERS[kind](*checkpoints), config(target_modules=[]))
    with pytest.raises((RuntimeError, ValueError), match=r"parametrization"):
        adapted(TOKENS)


@pytest.mark.parametrize("kind", LOADERS)
def test_base_weights_that_would_get_no_gradient_are_refused(checkpoints, kind):
    adapted = adapt(LOADERS[kind](*checkpoints))
    for layer in [module for module in adapted.modules() if isinstance(module, FP8LoraLayer)]:
        weight = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight")).requires_grad_()
        with pytest.raises(ValueError, match=r"^[\w.]*(_proj|weight): expected a frozen parameter beside adapters"):
            adapted(TOKENS)
        weight.requires_grad_(False)
    adapted(TOKENS)


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


@torch.no_grad()
def test_an_adapter_is_exchanged_by_hotswap(tmp_path):
    """Of the same rank, or of a larger one; of a smaller one peft mixes factors of experts, which is refused."""
    from peft.utils.hotswap import hotswap_adapter

    _, fp8 = write("mixtral", tmp_path)

    def made(r):
        model = adapt(load_model(fp8), r=r, lora_alpha=2 * r)
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.normal_(std=0.1)
        return model.eval()

    for rank in (4, 8, 2):
        model, other = made(4), made(rank)
        other.save_pretrained(tmp_path / f"rank {rank}", save_embedding_layers=False)
        if rank == 2:
            model.peft_config["default"].r = 4
        hotswap_adapter(model, tmp_path / f"rank {rank}", adapter_name="default", torch_device="cpu")
        if rank == 2:
            with pytest.raises(ValueError, match="rank 2 into 'default' of rank 4, and mixed those of several experts"):
                model(TOKENS)
            continue
        assert torch.equal(model(TOKENS).logits, other(TOKENS).logits)
        assert same_bits(saved(model, tmp_path / "again"), saved(other, tmp_path / "other"))
        if rank == 4:
            with pytest.raises(ValueError, match="without gradients into 'default', and half of it would be trained"):
                model.train()(TOKENS)


@pytest.mark.parametrize(
    "kind", [pytest.param("FP8 of transformers", marks=newer_than_5_17("refuses it itself")), "load_model"]
)
def test_trainer_refuses_frozen_weights_alone(kind, tmp_path):
    """With adapters, masters, or weights that are not in FP8, it trains."""
    bf16, fp8 = write("mixtral", tmp_path)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=1, report_to="none", use_cpu=True, save_strategy="no"
    )
    batch = {"input_ids": TOKENS[0], "labels": TOKENS[0]}

    def trainer(model):
        return transformers.Trainer(model, arguments, train_dataset=[batch])

    model = LOADERS[kind](bf16, fp8)
    with pytest.raises(
        ValueError, match=r"^model: its weights in FP8 are frozen, .* adapters .* masters .* fp8moe.refit"
    ):
        trainer(model)
    adapted = adapt(model)
    before = {name: value.clone() for name, value in adapted.named_parameters() if value.requires_grad}
    trainer(adapted).train()
    assert any(not torch.equal(adapted.get_parameter(name), value) for name, value in before.items())
    if kind == "load_model":
        trainer(LOADERS["bfloat16 experts"](bf16, fp8).requires_grad_(False))
        model = load_model(fp8)
        for name, module in [*model.named_modules()]:
            if name.endswith(".experts"):
                model.set_submodule(name, GroupedExperts.from_experts(module, master_dtype=torch.bfloat16))
        trainer(model)
