"""Experts in four bits of checkpoints: load_model keeps them, save_fp8_checkpoint stores them again."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8moe import GroupedExperts, batch_invariant, quantize_int4, quantize_mxfp4, refit
from fp8moe.cli import main
from fp8moe.weights import (
    DEFAULT_SKIP,
    CheckpointError,
    find_format,
    inspect_checkpoint,
    load_fp8_checkpoint,
    quantize_checkpoint,
    save_fp8_checkpoint,
)
from tests.checkpoint_formats import LAYOUTS
from tests.small_checkpoints import same
from tests.tiny_moe_models import TinyModel
from tests.transformers_models import newer_than_5_17

pytest.importorskip("transformers")
from fp8moe.hf import load_model  # noqa: E402
from tools.format_matrix import SIZES, source_of, wanted  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread", "registered"),
    pytest.mark.filterwarnings("ignore:.*static scales"),
]
MXFP4 = ("GPT-OSS", "FP8 with FP4 experts", "compressed-tensors MXFP4", "quark block, MXFP4 experts")
NVFP4 = ("ModelOpt NVFP4", "ModelOpt NVFP4 experts, hf_quant_config.json", "compressed-tensors NVFP4")
IDS = torch.arange(24).view(2, 12)


def write(name, directory, layout=None):
    """A checkpoint in a layout; of INT4 only its experts. Returns the model of its values."""
    of_experts = None if name in (*MXFP4, *NVFP4, "W4AFP8") else lambda tensor: "experts" in tensor
    return source_of(name, directory / "source").write(
        layout or LAYOUTS[name], directory / "stored", of_experts or wanted(name)
    )


def experts_of(model):
    return [module for module in model.modules() if isinstance(module, GroupedExperts)]


def logits(model):
    with torch.no_grad(), batch_invariant():
        return model(IDS).logits


def nbytes(model):
    return sum(value.nbytes for module in experts_of(model) for value in module.parameters())


@pytest.mark.parametrize("name", [*MXFP4, *NVFP4])
def test_fp4_stays_and_computes_what_blocks_do(tmp_path, name):
    write(name, tmp_path)
    kept, blocks = load_model(tmp_path / "stored"), load_model(tmp_path / "stored", experts="fp8")
    assert {layer.weight_format for layer in experts_of(kept)} == {LAYOUTS[name].name}
    assert {layer.weight_format for layer in experts_of(blocks)} == {"fp8"}
    assert nbytes(kept) < 0.75 * nbytes(blocks)  # small sizes are padded
    assert torch.equal(logits(kept), logits(blocks))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int4(tmp_path, dtype):
    name = "compressed-tensors INT4"

    def quantize(weight):
        made = LAYOUTS[name].quantize(weight)
        return made._replace(stored=made.stored | {"weight_scale": made.stored["weight_scale"].to(dtype)})

    expected = write(name, tmp_path, LAYOUTS[name]._replace(quantize=quantize))
    model = load_model(tmp_path / "stored", dtype=torch.float32)
    for layer in experts_of(model):
        assert layer.weight_format == "int4-32" and layer.down_proj_scale.dtype is dtype
    cosine = torch.cosine_similarity(logits(model), logits(expected).float(), dim=-1)
    assert float(cosine.median()) > 0.999
    with pytest.raises(CheckpointError, match="experts: expected 'stored', got 'fp8': 'stored' keeps INT4"):
        load_model(tmp_path / "stored", experts="fp8")


@pytest.mark.parametrize("name", [*MXFP4, *NVFP4, "compressed-tensors INT4", "W4AFP8"])
def test_saved_and_loaded_again(tmp_path, name):
    write(name, tmp_path)
    model = load_model(tmp_path / "stored")
    save_fp8_checkpoint(model, tmp_path / "saved")
    stored, saved = (load_file(tmp_path / part / "model.safetensors") for part in ("stored", "saved"))
    of_experts = {key: value for key, value in saved.items() if ".experts." in key and not key.endswith("_bias")}
    if name == "compressed-tensors NVFP4":
        assert {key for key in stored if ".experts." in key and "input" not in key} == of_experts.keys()
        of_experts = {key: value for key, value in of_experts.items() if "global_scale" not in key}
    if "ModelOpt" not in name and name not in ("FP8 with FP4 experts", "quark block, MXFP4 experts", "W4AFP8"):
        assert of_experts and all(torch.equal(value, stored[key]) for key, value in of_experts.items())
    assert inspect_checkpoint(tmp_path / "saved").problems == []
    assert find_format(tmp_path / "saved").name == find_format(tmp_path / "stored").name
    again = load_model(tmp_path / "saved")
    same(again.state_dict(), model.state_dict())
    assert torch.equal(logits(again), logits(model))
    for load in (load_fp8_checkpoint, refit):
        for value in again.parameters():
            value.data.zero_()
        load(again, tmp_path / "stored")
        assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    ("model_type", "forms", "message"),
    [
        ("gpt_oss", ("int4-32", "int4-32"), "GPT-OSS's checkpoints have experts in MXFP4, got int4 in groups of 32"),
        ("qwen3_moe", ("mxfp4", "int4-32"), "expected one format .* got int4 in groups of 32 and mxfp4"),
        ("qwen3_moe", ("int4", "int4-32"), "expected one format .* got int4 in groups of 128 and int4 in groups of 32"),
    ],
)
def test_experts_are_saved_in_one_format(tmp_path, model_type, forms, message):
    """Before anything is written: a configuration declares one, and that of GPT-OSS is MXFP4."""
    sizes = SIZES | {"num_hidden_layers": 2}
    model = TinyModel(model_type, "AutoModelForCausalLM", sizes).build(torch.bfloat16)
    for layer, form in zip(model.model.layers, forms, strict=True):
        layer.mlp.experts = GroupedExperts(num_experts=4, hidden_size=128, intermediate_size=128, weight_format=form)
    with pytest.raises(ValueError, match=f"model: {message}"):
        save_fp8_checkpoint(model, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_refusals(tmp_path):
    source_of("compressed-tensors INT4", tmp_path / "source").write(
        LAYOUTS["compressed-tensors INT4"], tmp_path / "all"
    )
    with pytest.raises(CheckpointError, match="INT4 in a linear, which fp8moe does not run"):
        load_model(tmp_path / "all")
    with pytest.raises(ValueError, match="experts: expected one of"):
        load_model(tmp_path / "all", experts="four")


def quantize(source, directory, weight_format):
    """Quantize the checkpoint of a model; NVFP4, which quantize_checkpoint does not write, from a layer for each."""
    if weight_format != "nvfp4":
        quantize_checkpoint(directory, f"{directory}-x", experts=weight_format)
        return
    quantize_checkpoint(directory, f"{directory}-in-fp8")
    model = load_model(f"{directory}-in-fp8")
    for layer, own in zip(model.model.layers, source.model.layers, strict=True):
        layer.mlp.experts = GroupedExperts.from_experts(own.mlp.experts, weight_format="nvfp4")
    save_fp8_checkpoint(model, f"{directory}-x")


@pytest.mark.parametrize("weight_format", ["mxfp4", "int4", "nvfp4"])
def test_linears_beside_them_are_stored_as_compressed_tensors_has_them(tmp_path, weight_format):
    sizes = SIZES | {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 1}
    source = TinyModel("qwen3_moe", "AutoModelForCausalLM", sizes).build(torch.bfloat16)
    source.save_pretrained(tmp_path / "new")
    quantize(source, tmp_path / "new", weight_format)
    model = load_model(tmp_path / "new-x")
    save_fp8_checkpoint(model, tmp_path / "again")
    for directory in (tmp_path / "new-x", tmp_path / "again"):
        stored = load_file(directory / "model.safetensors")
        fp8 = {key for key, value in stored.items() if key.endswith(".weight") and value.dtype is torch.float8_e4m3fn}
        assert fp8 and not any(key.endswith("_scale_inv") for key in stored)
        for key in fp8:
            assert stored[f"{key}_scale"].shape == tuple(-(-size // 128) for size in stored[key].shape)
        assert torch.equal(logits(load_model(directory)), logits(model))


@pytest.mark.parametrize("weight_format", ["mxfp4", "int4", "int4-32", "nvfp4"])
def test_refit(tmp_path, weight_format):
    """From experts one by one or fused: the bits of the quantized checkpoint, where the old weights were."""
    sizes = SIZES | {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 1}
    for seed, name in enumerate(("old", "new")):
        torch.manual_seed(seed)
        source = TinyModel("qwen3_moe", "AutoModelForCausalLM", sizes).build(torch.bfloat16)
        source.save_pretrained(tmp_path / name)
        quantize(source, tmp_path / name, weight_format)
    fresh = load_model(tmp_path / "new-x")
    given = load_file(tmp_path / "new" / "model.safetensors")
    (key,) = (key for key in given if key.endswith("layers.0.mlp.experts.3.up_proj.weight"))
    quantize_checkpoint(tmp_path / "new", tmp_path / "new-fp8")
    for tensors in (given, source.state_dict(), source, tmp_path / "new", tmp_path / "new-x"):
        model = load_model(tmp_path / "old-x")
        places = [value.data_ptr() for value in model.state_dict(keep_vars=True).values()]
        assert refit(model, tensors).left == ()
        same(model.state_dict(), fresh.state_dict())
        assert [value.data_ptr() for value in model.state_dict(keep_vars=True).values()] == places
        assert torch.equal(logits(model), logits(fresh))
    bad, name = given[key].clone(), key.removesuffix("weight")
    bad[5, 70] = torch.nan
    for tensors, problem in (
        (given | {key: bad}, f"{name}weight: holds a NaN or an infinity"),
        (given | {key: bad[:, 32:]}, rf"{name}weight: shape \(128, 224\), expected \(128, 256\)"),
        ([(other, value) for other, value in given.items() if other != key], f"one: {name}weight: missing$"),
        (fresh.state_dict(), r"gate_up_proj(_tensor_scale)?: the model has these experts in four bits; expected"),
        (tmp_path / "new-fp8", "down_proj.weight: dtype F8_E4M3, but the model's module has weights in four bits"),
    ):
        with pytest.raises(ValueError, match=problem):
            refit(model, tensors)
    refit(model, given)
    same(model.state_dict(), fresh.state_dict())
    left = [name for name in refit(model, {key: given[key]}, strict=False).left if "experts" in name]
    down = key.replace(".3.up_proj.weight", ".down_proj")
    assert {*left} == {name for name in given if "experts" in name and "down" not in name} - {key} | {down}


def test_adapters(tmp_path):
    """A step of training is that over FP8 blocks of equal values, and the adapter is loaded again."""
    peft = pytest.importorskip("peft")
    from fp8moe.hf.training import check_trained
    from fp8moe.peft import merge_and_unload
    from fp8moe.peft import register as adaptable

    write("compressed-tensors MXFP4", tmp_path)
    found, targets = [], ["experts.gate_up_proj", "experts.down_proj"]
    for experts in ("stored", "fp8"):
        model = load_model(tmp_path / "stored", experts=experts)
        config = peft.LoraConfig(r=4, target_parameters=targets, target_modules=["o_proj"], init_lora_weights=False)
        if experts == "stored":
            with pytest.raises(ValueError, match="^model: its experts in four bits are frozen, .* train adapters"):
                check_trained(model)
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, adaptable(config, model)).train()
        check_trained(model)
        trained = {name: value for name, value in adapted.named_parameters() if value.requires_grad}
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
        adapted(IDS, labels=IDS).loss.backward()
        grads = {name: value.grad for name, value in trained.items()}
        optimizer.step()
        found.append(grads | {"logits": logits(adapted.eval())})
        if experts == "stored":
            adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
            with pytest.raises(ValueError, match="to merge into, got four bits"):
                merge_and_unload(adapted)
    same(*found)
    assert all(value.any() for value in found[0].values())
    base = load_model(tmp_path / "stored")
    config = adaptable(peft.LoraConfig.from_pretrained(tmp_path / "adapter"), base)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", config=config)
    assert torch.equal(logits(loaded.eval()), found[0]["logits"])
    base.model.layers[-1].mlp.experts.get_base_layer().down_proj.data.zero_()
    refit(loaded, tmp_path / "stored")
    assert torch.equal(logits(loaded), found[0]["logits"])


def test_decoder(tmp_path):
    from fp8moe.decode import GraphDecoder

    write("GPT-OSS", tmp_path)
    model = load_model(tmp_path / "stored", dtype=torch.float32)
    decoder = GraphDecoder(model, batch_sizes=(2,), max_length=40)
    expected = model.generate(IDS, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert torch.equal(decoder.generate(IDS, max_new_tokens=8, eos_token_id=()), expected)
    decoder.close()


@pytest.mark.parametrize("weight_format", ["mxfp4", "int4", "int4-32"])
def test_quantized_from_a_bfloat16_checkpoint(tmp_path, weight_format, capsys):
    """Experts are rounded to nearest; the rest is what it is beside experts in FP8."""
    sizes, group = SIZES | {"hidden_size": 256, "moe_intermediate_size": 128}, 32 if weight_format == "int4-32" else 128
    source = TinyModel("qwen3_moe", "AutoModelForCausalLM", sizes).build(torch.bfloat16)
    source.save_pretrained(tmp_path / "source")
    command = ["quantize", str(tmp_path / "source"), str(tmp_path / "x"), "--experts", weight_format]
    assert main(command) == 0
    assert f"{weight_format.partition('-')[0]}, loads" in capsys.readouterr().out.splitlines()[0]
    model = load_model(tmp_path / "x")
    quantize_checkpoint(tmp_path / "source", tmp_path / "fp8")
    fp8 = load_model(tmp_path / "fp8").state_dict()
    for name, value in model.state_dict().items():
        if "experts" not in name:
            assert torch.equal(value.float(), fp8[name].float()), name
    for layer, own in zip(model.model.layers, source.model.layers, strict=True):
        assert layer.mlp.experts.weight_format == weight_format
        state = layer.mlp.experts.state_dict()
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(own.mlp.experts, name)
            made = quantize_mxfp4(weight) if weight_format == "mxfp4" else quantize_int4(weight, group=group)
            assert torch.equal(state[name], made.data) and torch.equal(state[f"{name}_scale"], made.scale)
    save_fp8_checkpoint(model, tmp_path / "saved")
    same(*(load_file(tmp_path / part / "model.safetensors") for part in ("saved", "x")))


@newer_than_5_17("saves no experts of a GPT-OSS that was loaded from MXFP4")
def test_gpt_oss_quantized(tmp_path):
    """Values that MXFP4 holds become the tensors that are published."""
    write("GPT-OSS", tmp_path)
    published = load_file(tmp_path / "stored" / "model.safetensors")
    theirs = source_of("GPT-OSS", tmp_path / "other").kind.from_pretrained(tmp_path / "stored", dtype=torch.bfloat16)
    theirs.config.__dict__.pop("quantization_config", None)
    theirs.save_pretrained(tmp_path / "source")
    with pytest.raises(CheckpointError, match="has unquantized weights beside experts in four bits; skip"):
        quantize_checkpoint(tmp_path / "source", tmp_path / "x", experts="mxfp4")
    with pytest.raises(CheckpointError, match="experts: expected 'mxfp4' for experts of GPT-OSS"):
        quantize_checkpoint(tmp_path / "source", tmp_path / "x", experts="int4-32")
    with pytest.warns(UserWarning, match="2 experts modules have biases"):
        quantize_checkpoint(tmp_path / "source", tmp_path / "x", experts="mxfp4", skip=(*DEFAULT_SKIP, "*.self_attn.*"))
    made = load_file(tmp_path / "x" / "model.safetensors")
    assert torch.equal(logits(load_model(tmp_path / "x")), logits(load_model(tmp_path / "stored")))
    assert made.keys() == published.keys()


def test_what_is_not_quantized_to_four_bits(tmp_path):
    source_of("block", tmp_path / "source")
    for experts, why in (
        ("int4", r"down_proj.weight: 96 columns, expected a multiple of 128"),
        ("fp4", "expected one of"),
    ):
        with pytest.raises(ValueError, match=why):
            quantize_checkpoint(tmp_path / "source", tmp_path / "x", experts=experts)
    with pytest.raises(ValueError, match="scale_format: expected 'float32' beside experts in four bits"):
        quantize_checkpoint(tmp_path / "source", tmp_path / "x", experts="mxfp4", scale_format="ue8m0")
    with pytest.raises(CheckpointError, match="expected 'fp8' for a checkpoint without experts"):
        quantize_checkpoint(tmp_path / "source", tmp_path / "x", experts="mxfp4", skip=(*DEFAULT_SKIP, "*experts*"))
    source_of("block, config in text_config", tmp_path / "fused")
    with pytest.raises(CheckpointError, match="gate_up_proj: fused experts, which fp8moe stores in FP8 only"):
        quantize_checkpoint(tmp_path / "fused", tmp_path / "x", experts="mxfp4", skip=(*DEFAULT_SKIP, "*visual*"))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "version"), [("GPTQ experts", "gptq"), ("GPTQ experts", "gptq_v2"), ("AWQ experts", None)]
)
def test_gptq_and_awq(tmp_path, name, version):
    """The codes and scales of compressed-tensors' form; what is not symmetric, or in another order, is refused."""
    layout = LAYOUTS[name]
    layout = layout._replace(config=layout.config | {"checkpoint_format": version})
    source = source_of(name, tmp_path / "source")
    experts_only = wanted(name)
    source.write(layout, tmp_path / "x", experts_only)
    source.write(LAYOUTS["compressed-tensors INT4 experts"], tmp_path / "other", experts_only)
    file = tmp_path / "x" / "model.safetensors"
    tensors = load_file(file)
    for key, value in tensors.items():
        if key.endswith("qzeros") and version == "gptq_v2":
            value.fill_(int.from_bytes(b"\x88" * 4, signed=True))
    save_file(tensors, file, {"format": "pt"})
    model = load_model(tmp_path / "x")
    if version is not None:  # AWQ has other scales, in float16
        same(dict(model.state_dict()), dict(load_model(tmp_path / "other").state_dict()))
    assert inspect_checkpoint(tmp_path / "x").problems == []
    zeros, order = "INT4 with zero points, which", "INT4 with an order of columns of its own, which"
    for end, change, what in (
        ("qzeros", lambda value: value.add_(1), f"{zeros} fp8moe does not run"),
        ("qzeros", None, None if version else "missing, expected the zero points of AWQ"),
        ("g_idx", lambda value: value.copy_(value.flip(0)), f"{order} fp8moe does not run"),
        ("g_idx", lambda value: value.resize_(1), f"{order} fp8moe does not run"),
    ):
        changed = {key: value.clone() for key, value in tensors.items()}
        key = next((key for key in changed if key.endswith(f"3.up_proj.{end}")), None)
        if key is None or what is None:
            continue
        if change is None:
            del changed[key]
        else:
            change(changed[key])
        save_file(changed, file, {"format": "pt"})
        (problem,) = inspect_checkpoint(tmp_path / "x").problems
        assert problem.removeprefix("awq: ") == f"{key}: {what}"
        for read in (load_model, lambda path: load_fp8_checkpoint(model, path)):
            with pytest.raises(CheckpointError) as error:
                read(tmp_path / "x")
            assert error.value.problems == [problem]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("GPTQ experts", "sym", False),
        ("GPTQ experts", "desc_act", True),
        ("GPTQ experts", "bits", 8),
        ("GPTQ experts", "group_size", -1),
        ("GPTQ experts", "checkpoint_format", "marlin"),
        ("AWQ experts", "zero_point", True),
        ("AWQ experts", "version", "gemv"),
        ("W4AFP8", "group_size", 64),
    ],
)
def test_other_settings_are_refused(tmp_path, name, key, value):
    layout, source = LAYOUTS[name], source_of(name, tmp_path / "source")
    source.write(layout._replace(config=layout.config | {key: value}), tmp_path / "x", wanted(name))
    method = layout.config["quant_method"]
    with pytest.raises(CheckpointError, match=rf"{method} with {key} {value!r}, which fp8moe does not run"):
        load_model(tmp_path / "x")
