"""Formats of checkpoints through transformers: load_model computes with the values, from_pretrained loses none."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from fp8moe.integrations.checkpoints import CheckpointError, find_format, quantize_checkpoint
from tests.checkpoint_formats import LAYOUTS, write_layout
from tests.small_checkpoints import same
from tests.tiny_moe_models import MODELS, TinyModel

transformers = pytest.importorskip("transformers")
from fp8moe.integrations.transformers import load_model, report  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread", "registered", "fp8_without_gpu"),
    pytest.mark.filterwarnings("ignore:.*static scales"),
]

SIZES = {"hidden_size": 160, "moe_intermediate_size": 96, "num_hidden_layers": 1, "tie_word_embeddings": False}
IDS = torch.arange(24).view(2, 12)
LOST = ("ModelOpt", "AutoFP8", "no quant", "compression_config", "MLX", "MXFP8", "FP4", "W4AFP8", "Mistral", "64x64")
"""Layouts that transformers would load without their scales, or whose errors would not name the format."""


class Source:
    """An unquantized checkpoint of a tiny model."""

    def __init__(self, directory, tiny):
        model = tiny.build()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.1)
        model.save_pretrained(directory)
        self.directory, self.kind = directory, type(model)
        self.tensors = load_file(directory / "model.safetensors")
        self.config = json.loads((directory / "config.json").read_text())

    def write(self, layout, directory, wanted=lambda name: name.endswith("_proj.weight"), config=None):
        """A checkpoint in this layout, and the logits of the values that it holds."""
        content = self.config | (config or {})
        values = write_layout(layout, directory, self.tensors, wanted, content)
        tensors = {name: values[name].float() if name in values else value for name, value in self.tensors.items()}
        own = transformers.AutoConfig.from_pretrained(self.directory)
        model = self.kind.from_pretrained(None, config=own, state_dict=tensors, dtype=torch.float32)
        with torch.no_grad():
            return model(IDS).logits


def cosine(model, expected):
    with torch.no_grad():
        logits = model(IDS).logits.float()
    return float(torch.cosine_similarity(logits, expected, dim=-1).median())


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return Source(tmp_path_factory.mktemp("qwen"), TinyModel("qwen3_moe", "AutoModelForCausalLM", SIZES))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "text_config" not in name])
def test_layout(tmp_path, qwen, name):
    layout, directory = LAYOUTS[name], tmp_path / "checkpoint"
    expected = qwen.write(layout, directory)
    if layout.loads:
        assert cosine(load_model(directory, dtype=torch.float32), expected) >= 0.99
    else:
        with pytest.raises(CheckpointError) as error:
            load_model(directory)
        assert error.value.problems == [find_format(directory).reason]
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, experts_implementation="fp8moe", dtype=torch.float32
        )
    except ValueError as error:
        assert any(part in name for part in LOST), error
        assert find_format(directory).reason in str(error)
    except ImportError as error:  # a package that transformers wants for this method
        assert layout.config["quant_method"] in ("compressed-tensors", "quark", "fbgemm_fp8", "gptq"), error
    else:
        assert cosine(model, expected) >= 0.99


@pytest.mark.parametrize("name", ["block, config in text_config", "block, E8M0", "ModelOpt FP8"])
def test_multimodal_models(tmp_path, name):
    """Qwen3-VL's published layout: fused experts (E, K, N), and what others make of it."""
    source = Source(tmp_path / "source", MODELS["Qwen3VLMoeForConditionalGeneration"])
    fused = [name for name in source.tensors if name.endswith(("gate_up_proj", "down_proj")) and "visual" not in name]
    assert fused and source.tensors[fused[0]].dim() == 3
    expected = source.write(
        LAYOUTS[name],
        tmp_path / "x",
        lambda name: name in fused or ("language_model.layers" in name and "_proj." in name),
    )
    assert cosine(load_model(tmp_path / "x", dtype=torch.float32), expected) >= 0.99


@pytest.mark.parametrize("name", ["FP8 with FP4 experts", "block, E8M0", "block, .scale"])
def test_deepseek_v4_as_published(tmp_path, name):
    """The grouped linear is in FP8, too; experts in FP8 or in FP4."""
    source = Source(tmp_path / "source", MODELS["DeepseekV4ForCausalLM"])
    quantized = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")
    wanted = {name for name in source.tensors if name.split(".")[-2:][0] in quantized and "compressor" not in name}
    assert any("wo_a" in name for name in wanted) and any(".experts.3.w2." in name for name in wanted)
    expected = source.write(LAYOUTS[name], tmp_path / "x", wanted.__contains__)
    model = load_model(tmp_path / "x", dtype=torch.float32)
    assert cosine(model, expected) >= 0.99
    assert {row.runs_on for row in report(model) if "experts" in row.name} == {"fp8moe"}


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.float32), (None, torch.float32), ("float16", torch.float16)]
)
def test_dtypes_by_name(tmp_path, qwen, dtype, expected):
    qwen.write(LAYOUTS["block"], tmp_path / "x")
    assert load_model(tmp_path / "x", dtype=dtype).model.embed_tokens.weight.dtype is expected
    with pytest.raises(CheckpointError, match="dtype: expected a torch.dtype, its name or 'auto', got 'flaot'"):
        load_model(tmp_path / "x", dtype="flaot")


def test_unquantized_checkpoints_say_that_nothing_runs_on_fp8moe(qwen):
    with pytest.warns(UserWarning, match="no weight is quantized; nothing of it runs on fp8moe"):
        load_model(qwen.directory)


def test_an_output_layer_that_the_configuration_ties(tmp_path, qwen):
    expected = qwen.write(LAYOUTS["block"], tmp_path / "x", config={"tie_word_embeddings": True})
    model = load_model(tmp_path / "x", dtype=torch.float32)
    assert cosine(model, expected) >= 0.99 and not model.config.tie_word_embeddings


def test_saved_by_transformers(tmp_path):
    """save_pretrained of a model of load_model: the same weights for load_model, close ones for transformers itself."""
    sizes = SIZES | {"moe_intermediate_size": 256}  # transformers 5.17 cannot load scales with a size of one
    source = Source(tmp_path / "source", TinyModel("qwen3_moe", "AutoModelForCausalLM", sizes))
    expected = source.write(LAYOUTS["block"], tmp_path / "x")
    model = load_model(tmp_path / "x", dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    again = load_model(tmp_path / "saved", dtype=torch.float32)
    same(dict(again.state_dict()), dict(model.state_dict()))
    options = {"experts_implementation": "fp8moe", "dtype": torch.float32}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options)
    assert cosine(theirs, expected) >= 0.99


def test_linears_to_whose_dtype_a_model_casts(tmp_path):
    """Mamba's output layer in FP8 would have codes as its input: it gets bfloat16, and is not quantized."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 1, "vocab_size": 256, "tie_word_embeddings": False}
    config = transformers.MambaConfig(**sizes)
    source = Source(tmp_path / "source", SimpleNamespace(build=lambda: transformers.MambaForCausalLM(config)))
    wanted = {"lm_head.weight", "backbone.layers.0.mixer.in_proj.weight"}
    expected = source.write(LAYOUTS["block"], tmp_path / "x", wanted.__contains__)
    model = load_model(tmp_path / "x", dtype=torch.float32)
    assert type(model.lm_head) is torch.nn.Linear
    assert cosine(model, expected) >= 0.99
    with pytest.warns(UserWarning, match=r"lm_head \(1\): the model casts its input to the dtype of its weight"):
        quantize_checkpoint(source.directory, tmp_path / "quantized", skip=("dt_proj",))
    assert cosine(load_model(tmp_path / "quantized", dtype=torch.float32), expected) >= 0.99


@pytest.mark.parametrize("name", ["ModelOpt FP8", "compressed-tensors tensor", "FP8 with FP4 experts", "MXFP8"])
def test_what_was_stored_otherwise_is_saved_as_what_it_is(tmp_path, qwen, name):
    expected = qwen.write(LAYOUTS[name], tmp_path / "x")
    model = load_model(tmp_path / "x", dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    found = find_format(tmp_path / "saved")
    assert (found.name, found.loads) == ("fp8-block", True)
    same(dict(load_model(tmp_path / "saved", dtype=torch.float32).state_dict()), dict(model.state_dict()))
    options = {"experts_implementation": "fp8moe", "dtype": torch.float32}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", **options)
    assert cosine(theirs, expected) >= 0.99


def test_channels_are_not_saved_by_transformers(tmp_path, qwen):
    qwen.write(LAYOUTS["compressed-tensors channel"], tmp_path / "x")
    model = load_model(tmp_path / "x")
    with pytest.raises(ValueError, match="save_pretrained: the model has a scale for each output channel; save_fp8"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
