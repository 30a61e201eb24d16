"""quantize_checkpoint asks transformers what it can have in FP8; from_pretrained and load_model load the result."""

import importlib.util
import json
import re
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8moe import FP8Linear, GroupedExperts, dequantize, refit
from fp8moe.hf import load_model
from fp8moe.weights import DEFAULT_SKIP, CheckpointError, inspect_checkpoint, quantize_checkpoint, save_fp8_checkpoint
from tests.errors import relative_error
from tests.small_checkpoints import same
from tests.transformers_models import TOKENS

transformers = pytest.importorskip("transformers")
from tests.tiny_moe_models import MODELS  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "registered", "fp8_without_gpu")

SAMPLE = (  # each with conversions, or with modules, that the others do not have; tools.model_matrix runs all
    *("MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV4ForCausalLM", "Ernie4_5_MoeForCausalLM"),
    *("ExaoneMoeForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM", "InklingForCausalLM"),
    *("JetMoeForCausalLM", "KimiLinearForCausalLM", "Lfm2MoeForCausalLM", "LongcatFlashForCausalLM"),
    *("MiMoV2FlashForCausalLM", "NemotronHForCausalLM", "PhimoeForCausalLM", "Dots3NoteForConditionalGeneration"),
    *("MiniMaxM3SparseForConditionalGeneration", "MuseSparkForConditionalGeneration"),
    *("Qwen3VLMoeForConditionalGeneration", "UnlimitedOcrForConditionalGeneration"),
)


@torch.no_grad()
def varied(model):
    """Weights whose blocks of 64x64 differ in size up to 16 times, so that no block does with another one's scale."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.dim() >= 2 and min(weight.shape[-2:]) >= 32:
            rows, columns = weight.shape[-2:]
            factors = torch.exp2(torch.randint(-2, 3, (rows // 64 + 1, columns // 64 + 1), generator=generator))
            weight.mul_(factors.repeat_interleave(64, 0)[:rows].repeat_interleave(64, 1)[:, :columns])
    return model


def quantized(name, directory, **options):
    """(the model, directory of its FP8 checkpoint, what quantize_checkpoint warned of)"""
    model = varied(MODELS[name].build())
    model.save_pretrained(directory / "source")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantize_checkpoint(directory / "source", directory / "fp8", **options)
    return model, directory / "fp8", [str(warning.message) for warning in caught]


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS).logits


def dequantized(model):
    """The model's parameters by name, those of FP8 modules as they were before, rounded."""
    values = {name: value.detach() for name, value in model.named_parameters() if not name.endswith("_scale_inv")}
    for name, module in model.named_modules():
        if isinstance(module, FP8Linear):
            values[f"{name}.weight"] = dequantize((module.weight, module.weight_scale_inv))
        if isinstance(module, GroupedExperts):
            trained = GroupedExperts.from_experts(module, master_dtype=torch.float32)
            values |= {f"{name}.{key}": value.detach() for key, value in trained.named_parameters()}
    return values


def refitted_to_the_same_bits(model, tensors):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    refit(model, reversed(tensors.items()))
    same(model.state_dict(), before)


@pytest.mark.parametrize("name", [name for name in SAMPLE if name in MODELS])
def test_what_is_quantized_loads(name, tmp_path):
    """Every weight is where it was, to the rounding of E4M3, and logits are the same whoever loads it."""
    model, directory, _ = quantized(name, tmp_path)
    ours = load_model(directory, dtype=torch.float32)
    values, expected = dequantized(ours), dict(model.named_parameters())
    assert values.keys() == expected.keys()
    in_fp8 = [key for key, value in ours.named_parameters() if value.dtype == torch.float8_e4m3fn]
    assert in_fp8
    for key, value in expected.items():
        assert relative_error(values[key], value) < (0.04 if key in in_fp8 else 1e-7), key

    experts = any(isinstance(module, GroupedExperts) for module in ours.modules())
    theirs, info = MODELS[name].auto_class.from_pretrained(
        directory,
        dtype=torch.float32,
        output_loading_info=True,
        **({"experts_implementation": "fp8moe"} if experts else {}),
    )
    assert not any(info.values())
    assert torch.allclose(logits(ours), logits(theirs), rtol=1e-5, atol=1e-5)
    assert torch.cosine_similarity(logits(ours).flatten(), logits(model).flatten(), dim=0) > 0.85
    refitted_to_the_same_bits(ours, load_file(tmp_path / "source" / "model.safetensors"))


@pytest.mark.parametrize(
    "name",
    [
        *("LagunaForCausalLM", "DeepseekOcr2ForConditionalGeneration", "Dots3NoteForConditionalGeneration"),
        "MistralLarge4ForConditionalGeneration",
    ],
)
def test_what_is_saved_again_is_fp8_where_it_was(name, tmp_path):
    """transformers would rename the model's own names anew, and makes FP8 modules of all that config.json leaves."""
    if name not in MODELS:
        pytest.skip("the installed transformers does not have it")
    _, directory, _ = quantized(name, tmp_path)
    model, expected = load_model(directory, dtype=torch.float32), read_by_transformers(name, directory)
    for experts in ("separate", "fused"):
        save_fp8_checkpoint(model, tmp_path / experts, experts=experts)
        assert not inspect_checkpoint(tmp_path / experts).problems
        same(load_model(tmp_path / experts, dtype=torch.float32).state_dict(), model.state_dict())
        same(read_by_transformers(name, tmp_path / experts), expected)


def read_by_transformers(name, directory):
    model, info = MODELS[name].auto_class.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    return {key: value.float() for key, value in model.state_dict().items()}  # some keep the dtype in the file


@pytest.mark.parametrize(
    "name", ["GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM", "GraniteMoeSharedForCausalLM"]
)
def test_fused_experts_that_transformers_renames_get_its_names(name, tmp_path):
    _, directory, _ = quantized(name, tmp_path)
    model = load_model(directory)
    assert all(type(layer.block_sparse_moe.experts) is GroupedExperts for layer in model.model.layers)
    written = load_file(directory / "model.safetensors")
    block = "model.layers.1.block_sparse_moe"
    assert written[f"{block}.experts.gate_up_proj_scale_inv"].shape == (8, 4, 1)
    assert not any("input_linear" in key or "output_linear" in key for key in written if "block_sparse_moe" in key)

    _, directory, _ = quantized(name, tmp_path / "skipped", skip=[*DEFAULT_SKIP, "input_linear", "output_linear"])
    written = load_file(directory / "model.safetensors")
    assert written[f"{block}.input_linear.weight"].dtype == torch.float32
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert {f"{block}.input_linear", f"{block}.experts"} <= set(config["modules_to_not_convert"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert logits(theirs).isfinite().all()


EXPERTS = "transformers cannot make FP8 experts of it"


@pytest.mark.parametrize(
    ("name", "module", "reason"),
    [
        ("Lfm2MoeForCausalLM", "model.layers.1.feed_forward.experts", EXPERTS),
        ("NemotronHForCausalLM", "model.layers.1.mixer.experts", EXPERTS),
        ("LongcatFlashForCausalLM", "model.layers.0.mlp.experts", " mismatched"),
        ("DeepseekV4ForCausalLM", "model.layers.0.self_attn.o_a_proj", "of class DeepseekV4GroupedLinear"),
        ("DeepseekV4ForCausalLM", "model.layers.0.self_attn.compressor.kv_proj", "keeps it in float32"),
        (
            *("MuseSparkForConditionalGeneration", "model.language_model.layers.0.mlp.experts"),
            "would call its weight unexpected",
        ),
        (
            *(
                "MiniMaxM3SparseForConditionalGeneration",
                "model.language_model.layers.0.mlp.shared_experts.gate_up_proj",
            ),
            "transformers converts it when it loads it (Concatenate), but not its scales",
        ),
    ],
)
def test_what_transformers_cannot_have_in_fp8_is_named_and_stays(tmp_path, name, module, reason):
    if name not in MODELS:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    _, directory, warned = quantized(name, tmp_path)
    (line,) = (line for line in warned if reason in line and line.startswith("not quantized: "))
    assert re.sub(r"\.\d+\.", ".*.", module) + " (" in line
    listed = json.loads((directory / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert module in listed
    submodule = load_model(directory).get_submodule(module)
    assert not isinstance(submodule, FP8Linear | GroupedExperts)
    assert all(value.dtype != torch.float8_e4m3fn for value in submodule.parameters())


def test_a_model_that_transformers_cannot_have_in_fp8_at_all_is_refused_before_the_first_byte(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("no conversion for this model\n(a long report)")

    quantizers = transformers.quantizers.quantizer_finegrained_fp8
    monkeypatch.setattr(quantizers.FineGrainedFP8HfQuantizer, "update_weight_conversions", fails)
    expected = r"transformers cannot load this model with FP8 weights \(RuntimeError: no conversion for this model\)$"
    with pytest.raises(CheckpointError, match=expected):
        quantized("MixtralForCausalLM", tmp_path)
    assert not (tmp_path / "fp8").exists()


def test_experts_whose_scales_transformers_has_no_room_for(tmp_path, monkeypatch):
    """With 192 rows of gate and 192 of up, transformers has three blocks of 128, one of them with rows of both."""
    tiny = MODELS["Qwen3MoeForCausalLM"]
    options = tiny.options | {"moe_intermediate_size": 192}
    monkeypatch.setitem(MODELS, "Qwen3MoeForCausalLM", tiny._replace(options=options))
    model, directory, warned = quantized("Qwen3MoeForCausalLM", tmp_path)
    assert any("load_model loads them, transformers' from_pretrained has no room" in line for line in warned)
    loaded = load_model(directory, dtype=torch.float32)
    assert loaded.model.layers[0].mlp.experts.gate_up_proj_scale_inv.shape[1] == 4
    for key, value in dequantized(loaded).items():
        assert relative_error(value, model.get_parameter(key)) < 0.04


def test_without_transformers_names_decide_and_a_warning_says_so(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    _, directory, warned = quantized("DeepseekV4ForCausalLM", tmp_path)
    assert "not checked against transformers, which is not installed" in warned
    assert load_model(directory).model.layers[0].self_attn.o_a_proj.weight.dtype is torch.bfloat16  # FP8 in the file


def test_of_an_unknown_model_names_decide_and_a_warning_says_so(tmp_path):
    model = varied(MODELS["MixtralForCausalLM"].build())
    model.save_pretrained(tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(config | {"model_type": "a_new_one"}))
    with pytest.warns(UserWarning, match="not checked against transformers: config.json: transformers cannot read it"):
        quantize_checkpoint(tmp_path / "source", tmp_path / "fp8")
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    assert isinstance(load_model(tmp_path / "fp8").model.layers[0].mlp.experts, GroupedExperts)


def test_a_checkpoint_that_lacks_tensors_lacks_no_more_when_quantized(tmp_path):
    """What transformers says of the source anyway is no reason to keep anything unquantized."""
    model = varied(MODELS["MixtralForCausalLM"].build())
    model.save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    tensors = {name: value for name, value in load_file(path).items() if "norm" not in name}
    save_file(tensors | {"extra.weight": torch.randn(128, 128)}, path, metadata={"format": "pt"})
    quantize_checkpoint(tmp_path / "source", tmp_path / "fp8")
    written = load_file(tmp_path / "fp8" / "model.safetensors")
    assert written["extra.weight"].dtype == torch.float8_e4m3fn
    assert sum(value.dtype == torch.float8_e4m3fn for value in written.values()) == 2 * (4 + 3 * 8) + 1
