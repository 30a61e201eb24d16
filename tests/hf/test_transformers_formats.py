"""Formats of checkpoints through transformers: load_model computes with the values, from_pretrained loses none."""

import json
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from fp8moe import FP8Linear, GroupedExperts, dequantize
from fp8moe.weights import (
    DEFAULT_SKIP,
    CheckpointError,
    convert_checkpoint,
    find_format,
    quantize_checkpoint,
    save_fp8_checkpoint,
)
from tests.checkpoint_formats import LAYOUTS, Source
from tests.small_checkpoints import same
from tests.tiny_moe_models import MODELS, TinyModel
from tests.transformers_models import newer_than_5_17

transformers = pytest.importorskip("transformers")
from fp8moe.hf import formats, load_model, report  # noqa: E402
from tools.format_matrix import COLUMNS, FILE, SIZES, row_of, source_of, versions, wanted  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread", "registered", "fp8_without_gpu"),
    pytest.mark.filterwarnings("ignore:.*static scales"),
]

IDS = torch.arange(24).view(2, 12)
RECORDED = json.loads(FILE.read_text())
DECODED = ("block", "compressed-tensors channel", "GPT-OSS")


def cosine(*models):
    """Of the logits of the median token."""
    with torch.no_grad():
        logits = [model(IDS).logits.float() for model in models]
    return float(torch.cosine_similarity(*logits, dim=-1).median())


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return source_of("block", tmp_path_factory.mktemp("qwen"))


def test_every_layout_is_recorded():
    assert list(RECORDED["layouts"]) == list(LAYOUTS)
    assert not [text for row in RECORDED["layouts"].values() for text in row["cells"].values() if "wrong" in text]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(tmp_path, name):
    """What is recorded is what happens. `python -m tools.format_matrix` records it, with decoding, which takes long."""
    columns = [column for column in COLUMNS if column != "decode" or name in DECODED]
    row, recorded = row_of(name, tmp_path, columns), RECORDED["layouts"][name]
    assert row["format"] == recorded["format"]
    for column, text in row["cells"].items():
        theirs = column == "from_pretrained" and versions() != RECORDED["versions"]
        assert text.startswith(("yes", "refused")) if theirs else text == recorded["cells"][column], column


def test_experts_that_transformers_does_not_dequantize(tmp_path, qwen):
    """Where another quantizer takes an FP8 checkpoint, of which transformers makes noise or an error."""
    config = transformers.AutoConfig.from_pretrained(qwen.directory)
    config._experts_implementation = "fp8moe"
    fused = source_of("block, config in text_config", tmp_path / "fused")
    for source, name, method, refused in (
        (qwen, "compressed-tensors channel", "compressed-tensors", False),
        (qwen, "compressed-tensors INT4", "compressed-tensors", False),
        (qwen, "compressed-tensors block", "compressed-tensors", True),
        (qwen, "compressed-tensors NVFP4", "compressed-tensors", True),
        (qwen, "fbgemm_fp8", "fbgemm_fp8", True),
        (fused, "compressed-tensors channel", "compressed-tensors", True),
        (fused, "compressed-tensors tensor", "compressed-tensors", True),
    ):
        source.write(LAYOUTS[name], tmp_path / name, wanted(name))
        quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method=method))
        refusal = pytest.raises(ValueError, match=r"from_pretrained would not run model.*layers.0.mlp.experts\.")
        with refusal if refused else nullcontext():
            formats._check(SimpleNamespace(config=config), [tmp_path / name / "model.safetensors"], quantizer)


def test_fp8_modules_without_scales_are_refused_when_they_are_loaded(tmp_path, qwen):
    """Where modules_to_not_convert does not say what is unquantized, or transformers leaves out what is FP8."""
    qwen.write(LAYOUTS["block"], tmp_path, lambda name: wanted("block")(name) and "q_proj" not in name)
    config = json.loads((tmp_path / "config.json").read_text())
    missing, left = r"q_proj\.weight_scale_inv, which is missing", r"k_proj\.weight_scale_inv, which has no place in"
    for kept, why in (([], missing), (["q_proj", "k_proj"], left)):
        config["quantization_config"]["modules_to_not_convert"] = ["lm_head", *kept]
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=rf"from_pretrained would compute without .*{why}"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="fp8moe")


def test_experts_of_which_transformers_in_fp8_leaves_out_a_norm(tmp_path):
    tiny = MODELS.get("MuseSparkForConditionalGeneration")
    if tiny is None:
        pytest.skip("this transformers has no MuseSpark")
    tiny.build(torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"experts\.post_expert_norm\.weight, which has no place"):
        tiny.auto_class.from_pretrained(
            tmp_path, experts_implementation="fp8moe", quantization_config=transformers.FineGrainedFP8Config()
        )


def test_linears_that_transformers_puts_together(tmp_path):
    """MiniMax-M3's shared experts: gate and up are FP8 weights of one linear of its model, which gets bfloat16."""
    source = Source.of_random(tmp_path / "source", MODELS["MiniMaxM3SparseForConditionalGeneration"].build())
    in_fp8 = re.compile(r"language_model.*(experts|self_attn).*(w\d|_proj)\.weight")
    fp8 = set(filter(in_fp8.match, source.tensors))
    assert any("shared_experts.gate_proj" in name for name in fp8) and any("experts.0.w1" in name for name in fp8)
    expected = source.write(LAYOUTS["MXFP8"], tmp_path / "x", fp8.__contains__)
    model = load_model(tmp_path / "x")
    assert cosine(model, expected) >= 0.99
    kinds = {name.rpartition(".")[2]: type(module).__name__ for name, module in model.named_modules()}
    assert kinds["gate_up_proj"] == "Linear" and kinds["q_proj"] == "FP8Linear" and kinds["experts"] == "GroupedExperts"


@pytest.mark.parametrize("name", ["block, E8M0", "ModelOpt FP8"])
def test_multimodal_models(tmp_path, name):
    """Qwen3-VL's published layout: fused experts (E, K, N), and what others make of it."""
    source = source_of("block, config in text_config", tmp_path / "source")
    assert any(weight.endswith("experts.gate_up_proj") and wanted(name)(weight) for weight in source.tensors)
    expected = source.write(LAYOUTS[name], tmp_path / "x", wanted(name))
    assert cosine(load_model(tmp_path / "x"), expected) >= 0.99


@newer_than_5_17("cannot run DeepSeek-V4 in bfloat16")
@pytest.mark.parametrize("name", ["FP8 with FP4 experts", "block, E8M0", "block, .scale"])
def test_deepseek_v4_as_published(tmp_path, name):
    """The grouped linear is in FP8, too; experts in FP8 or in FP4."""
    source = Source.of_random(tmp_path / "source", MODELS["DeepseekV4ForCausalLM"].build())
    quantized = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")
    wanted = {name for name in source.tensors if name.split(".")[-2:][0] in quantized and "compressor" not in name}
    assert any("wo_a" in name for name in wanted) and any(".experts.3.w2." in name for name in wanted)
    expected = source.write(LAYOUTS[name], tmp_path / "x", wanted.__contains__)
    model = load_model(tmp_path / "x", experts="fp8")
    assert cosine(model, expected) >= 0.99
    assert {row.runs_on for row in report(model) if "experts" in row.name} == {"fp8moe"}
    model.save_pretrained(tmp_path / "saved")
    convert_checkpoint(tmp_path / "x", tmp_path / "converted")
    for directory in ("saved", "converted"):  # a configuration that says FP4 would have transformers make FP4 experts
        again = transformers.AutoConfig.from_pretrained(tmp_path / directory)
        assert again.quantization_config.get("expert_dtype", "fp8") == "fp8"
        same(dict(load_model(tmp_path / directory).state_dict()), dict(model.state_dict()))


def test_scales_that_from_pretrained_leaves_as_they_are_stored():
    """transformers 5.17 does so: bfloat16, bytes, and without sizes of one."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    made = TinyModel("qwen3_moe", "AutoModelForCausalLM", SIZES).build()
    quantizer = FineGrainedFP8HfQuantizer(transformers.FineGrainedFP8Config(), pre_quantized=True)
    quantizer._process_model_before_weight_loading(made)
    linear, experts = made.model.layers[0].self_attn.q_proj, made.model.layers[0].mlp.experts
    expected = [torch.full(linear.weight_scale_inv.shape, 2.0), torch.rand(experts.gate_up_proj_scale_inv.shape)]
    linear.weight_scale_inv = torch.nn.Parameter(torch.full((2, 2), 128, dtype=torch.uint8), requires_grad=False)
    experts.gate_up_proj_scale_inv = torch.nn.Parameter(expected[1].bfloat16().flatten(1))
    quantizer._process_model_after_weight_loading(made)
    assert torch.equal(linear.weight_scale_inv, expected[0])
    assert torch.equal(experts.gate_up_proj_scale_inv, expected[1].bfloat16().float())


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """(its checkpoint as published, the model of its values)"""
    directory = tmp_path_factory.mktemp("gpt_oss")
    source = source_of("GPT-OSS", directory / "source")
    return directory / "x", source.write(LAYOUTS["GPT-OSS"], directory / "x", wanted("GPT-OSS"))


def test_gpt_oss_as_published(tmp_path, gpt_oss):
    """Exact for load_model, and in what is written of it; from_pretrained unpacks experts, of which there is a copy."""
    directory, expected = gpt_oss
    model = load_model(directory, experts="fp8")
    assert cosine(model, expected) >= 0.99
    assert {row.runs_on for row in report(model) if row.name.endswith("experts")} == {"fp8moe"}
    copied = transformers.AutoModelForCausalLM.from_pretrained(
        directory, experts_implementation="fp8moe", dtype=torch.float32
    )
    assert cosine(copied, expected) >= 0.99
    assert {row.why for row in report(copied) if row.name.endswith("experts")} == {
        "on an FP8 copy of its weights, made when it runs first"
    }

    for layer in model.model.layers:  # the values of the checkpoint, without rounding activations
        experts, parts = layer.mlp.experts, []
        for parameter, count in (("gate_up_proj", 2), ("down_proj", 1)):
            data, scale = getattr(experts, parameter), getattr(experts, f"{parameter}_scale_inv")
            apart = (value.unflatten(1, (count, -1)).flatten(0, 1) for value in (data, scale))
            parts.append(dequantize(tuple(apart)).view(data.shape))
        up, bias = parts[0].unflatten(1, (2, -1)), experts.gate_up_proj_bias.unflatten(1, (2, -1))
        theirs = copied.get_submodule(f"model.layers.{layer.self_attn.layer_idx}.mlp.experts")
        assert torch.equal(up.transpose(1, 2).flatten(1, 2).mT, theirs.gate_up_proj)
        assert torch.equal(bias.transpose(1, 2).flatten(1, 2), theirs.gate_up_proj_bias.bfloat16())
        assert torch.equal(parts[1].mT, theirs.down_proj)
        assert torch.equal(experts.down_proj_bias, theirs.down_proj_bias.bfloat16())

    convert_checkpoint(directory, tmp_path / "converted")
    model.save_pretrained(tmp_path / "saved")
    save_fp8_checkpoint(model, tmp_path / "saved by fp8moe")
    for name in ("converted", "saved", "saved by fp8moe"):
        again = load_model(tmp_path / name)
        same(dict(again.state_dict()), dict(model.state_dict()))
        with pytest.raises(ValueError, match="FP8 experts have no biases, as .*_proj has; .*load_model loads it$"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, experts_implementation="fp8moe")


def test_unquantized_gpt_oss(tmp_path):
    """What is quantized of it is what from_experts makes; what is not stays as transformers has it."""
    source = source_of("GPT-OSS", tmp_path / "source")
    model = source.kind.from_pretrained(source.directory, dtype=torch.float32)
    with pytest.warns(UserWarning, match="2 experts modules have biases: load_model loads them, transformers'"):
        quantize_checkpoint(source.directory, tmp_path / "all")
    with pytest.warns(UserWarning, match="FP8 weights have only"):
        quantize_checkpoint(source.directory, tmp_path / "linears", skip=(*DEFAULT_SKIP, "experts"))
    quantize_checkpoint(source.directory, tmp_path / "experts", skip=(*DEFAULT_SKIP, "*.self_attn.*"))
    loaded = load_model(tmp_path / "experts")
    assert cosine(loaded, model) >= 0.99
    for path in ("all", "experts"):
        loaded = load_model(tmp_path / path)
        for layer, own in zip(loaded.model.layers, model.model.layers, strict=True):
            experts = layer.mlp.experts.state_dict()
            made = GroupedExperts.from_experts(own.mlp.experts).state_dict()
            same(dict(experts), {name: value.to(experts[name].dtype) for name, value in made.items()})
            assert isinstance(layer.self_attn.q_proj, FP8Linear) == (path == "all")
    kept = load_file(tmp_path / "linears" / "model.safetensors")
    same(*({name: value for name, value in tensors.items() if "experts" in name} for tensors in (kept, source.tensors)))
    theirs = source.kind.from_pretrained(tmp_path / "linears", experts_implementation="fp8moe", dtype=torch.float32)
    assert {row.runs_on for row in report(theirs) if row.name.endswith(("experts", "q_proj"))} == {"fp8moe"}


def test_gpt_oss_on_triton_kernels_is_refused(gpt_oss, monkeypatch):
    """Before transformers fetches these."""
    from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

    directory, _ = gpt_oss
    monkeypatch.setattr(Mxfp4HfQuantizer, "validate_environment", lambda self, **options: None)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with pytest.raises(ValueError, match=r"x: mxfp4: MXFP4, .* run .*_proj on Triton kernels; .*dequantize=True"):
        load(directory, experts_implementation="fp8moe")
    model = load(
        directory,
        experts_implementation="fp8moe",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    assert type(model.model.layers[0].mlp.experts).__name__ == "GptOssExperts"


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.float32), (None, torch.float32), ("float16", torch.float16)]
)
def test_dtypes_by_name(tmp_path, qwen, dtype, expected):
    qwen.write(LAYOUTS["block"], tmp_path / "x")
    assert load_model(tmp_path / "x", dtype=dtype).model.embed_tokens.weight.dtype is expected
    for wrong in ("flaot", "float64", torch.float64, torch.float8_e4m3fn, torch.int8):
        with pytest.raises(CheckpointError, match="dtype: expected bfloat16, float16, float32, or 'auto' .* got .*"):
            load_model(tmp_path / "x", dtype=wrong)


def test_unquantized_checkpoints_say_that_nothing_runs_on_fp8moe(qwen):
    with pytest.warns(UserWarning, match="no weight is quantized; nothing of it runs on fp8moe"):
        load_model(qwen.directory)


def test_an_output_layer_that_the_configuration_ties(tmp_path, qwen):
    expected = qwen.write(LAYOUTS["block"], tmp_path / "x", config={"tie_word_embeddings": True})
    model = load_model(tmp_path / "x")
    assert cosine(model, expected) >= 0.99 and not model.config.tie_word_embeddings


def test_saved_by_transformers(tmp_path):
    """save_pretrained of a model of load_model: the same weights for load_model, close ones for transformers itself."""
    sizes = SIZES | {"moe_intermediate_size": 256}  # transformers 5.17 cannot load scales with a size of one
    source = Source.of_random(tmp_path / "source", TinyModel("qwen3_moe", "AutoModelForCausalLM", sizes).build())
    expected = source.write(LAYOUTS["block"], tmp_path / "x")
    model = load_model(tmp_path / "x")
    model.save_pretrained(tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    same(dict(again.state_dict()), dict(model.state_dict()))
    options = {"experts_implementation": "fp8moe", "dtype": torch.float32}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options)
    assert cosine(theirs, expected) >= 0.99


def test_linears_to_whose_dtype_a_model_casts(tmp_path):
    """Mamba's output layer in FP8 would have codes as its input: it gets bfloat16, and is not quantized."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 1, "vocab_size": 256, "tie_word_embeddings": False}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
    source = Source.of_random(tmp_path / "source", model)
    wanted = {"lm_head.weight", "backbone.layers.0.mixer.in_proj.weight"}
    expected = source.write(LAYOUTS["block"], tmp_path / "x", wanted.__contains__)
    model = load_model(tmp_path / "x")
    assert type(model.lm_head) is torch.nn.Linear
    assert cosine(model, expected) >= 0.99
    with pytest.warns(UserWarning, match=r"lm_head \(1\): the model casts its input to the dtype of its weight"):
        quantize_checkpoint(source.directory, tmp_path / "quantized", skip=("dt_proj",))
    assert cosine(load_model(tmp_path / "quantized"), expected) >= 0.99


@pytest.mark.parametrize("name", ["ModelOpt FP8", "compressed-tensors tensor", "FP8 with FP4 experts", "MXFP8"])
def test_what_was_stored_otherwise_is_saved_as_what_it_is(tmp_path, qwen, name):
    expected = qwen.write(LAYOUTS[name], tmp_path / "x")
    model = load_model(tmp_path / "x", experts="fp8")
    model.save_pretrained(tmp_path / "saved")
    found = find_format(tmp_path / "saved")
    assert (found.name, found.loads) == ("fp8-block", True)
    same(dict(load_model(tmp_path / "saved").state_dict()), dict(model.state_dict()))
    options = {"experts_implementation": "fp8moe", "dtype": torch.float32}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options)
    assert cosine(theirs, expected) >= 0.99


def test_channels_are_not_saved_by_transformers(tmp_path, qwen):
    qwen.write(LAYOUTS["compressed-tensors channel"], tmp_path / "x")
    model = load_model(tmp_path / "x")
    with pytest.raises(ValueError, match="save_pretrained: the model has a scale for each output channel; save_fp8"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
