"""What runs where in a transformers model: `report`, and the warning of experts that stay with transformers."""

import copy
import warnings

import pytest
import torch
from torch import nn

from fp8moe import GroupedExperts, replace_linears
from fp8moe.hf import load_model, report
from fp8moe.weights import quantize_checkpoint
from tests.transformers_models import modules_named

transformers = pytest.importorskip("transformers")
from transformers.integrations import finegrained_fp8  # noqa: E402
from transformers.quantizers import quantizer_finegrained_fp8  # noqa: E402

from tests.tiny_moe_models import MODELS  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "registered")

NO_CHOICE = {
    "DbrxForCausalLM": "DbrxExperts",
    "JetMoeForCausalLM": "JetMoeParallelExperts",
    "Llama4ForCausalLM": "Llama4TextExperts",
    "LongcatFlashForCausalLM": "LongcatFlashExperts",
}
"""Models whose experts do not go through transformers' experts interface, and the class of these."""

TOKENS = torch.arange(3, 15)[None]


def rows_of(model, kind):
    return [row for row in report(model) if kind in row.module_class]


def messages(caught):
    return {str(warning.message) for warning in caught if "fp8moe" in str(warning.message)}


# The warning.


@pytest.mark.parametrize("name", NO_CHOICE)
def test_experts_that_take_no_implementation_are_named(name, tmp_path):
    expected = f"{NO_CHOICE[name]} does not run on fp8moe with experts_implementation='fp8moe': its forward does not go"
    with pytest.warns(UserWarning, match=expected):
        MODELS[name].build(experts_implementation="fp8moe")
    model = MODELS[name].build(experts_implementation="eager")
    with pytest.warns(UserWarning, match=expected):
        model.set_experts_implementation("fp8moe")
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=expected):
        model = MODELS[name].auto_class.from_pretrained(tmp_path, experts_implementation="fp8moe")
    rows = rows_of(model, NO_CHOICE[name])
    assert rows and all(row.runs_on == "transformers" and "experts interface" in row.why for row in rows)


class Offloaded(dict):
    """Tensors that go to a device when they are read, as those of compressed-tensors."""

    def __getitem__(self, name):
        return super().__getitem__(name).to("cpu")

    def items(self):
        return [(name, self[name]) for name in self]


def test_models_of_compressed_tensors():
    """Packed linears have no weight, and after the first forward parameters are loaded when they are read."""
    model = MODELS["Qwen3MoeForCausalLM"].build(experts_implementation="fp8moe")
    linear, experts = model.model.layers[0].self_attn.q_proj, model.model.layers[0].mlp.experts
    linear.weight_packed = nn.Parameter(linear.weight.byte(), requires_grad=False)
    del linear.weight
    experts.__dict__["_parameters"] = Offloaded(experts._parameters)
    rows = {row.name: row for row in report(model)}
    assert rows["model.layers.0.self_attn.q_proj"].why == "its weight is packed, in a format of another library"
    assert rows["model.layers.0.mlp.experts"].runs_on == "fp8moe"


def test_experts_of_a_part_that_is_asked_to_change_are_named():
    model = MODELS["Llama4ForConditionalGeneration"].build(experts_implementation="eager")
    with pytest.warns(UserWarning, match="^Llama4TextExperts does not run on fp8moe"):
        model.set_experts_implementation({"text_config": "fp8moe"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.set_experts_implementation({"vision_config": "fp8moe", "text_config": "eager"})
    assert not messages(caught)


@pytest.mark.parametrize("implementation", ["fp8moe", "eager"])
def test_experts_that_a_quantizer_puts_into_the_model_are_named(implementation):
    class PackedExperts(nn.Module):
        """As of GGUF and MXFP4: with a forward of their own."""

    class Quantizer(transformers.quantizers.HfQuantizer):
        is_trainable = is_serializable = False

        def _process_model_before_weight_loading(self, model, **kwargs):
            model.set_submodule("model.layers.0.mlp.experts", PackedExperts())

    model = MODELS["MixtralForCausalLM"].build(experts_implementation=implementation)
    quantizer = Quantizer(transformers.FineGrainedFP8Config(), pre_quantized=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantizer.preprocess_model(model)
    assert any(text.startswith("PackedExperts does not run on fp8moe") for text in messages(caught)) == (
        implementation == "fp8moe"
    )


def test_the_warning_is_shown_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()  # what Python does by default
        for _ in range(2):
            MODELS["Llama4ForCausalLM"].build(experts_implementation="fp8moe")
    assert len([warning for warning in caught if "Llama4TextExperts" in str(warning.message)]) == 1


@pytest.mark.parametrize("implementation", ["fp8moe", "eager"])
def test_no_warning_where_experts_run_or_nothing_was_asked_for(implementation):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MODELS["MixtralForCausalLM"].build(experts_implementation=implementation)
        MODELS["Llama4ForCausalLM"].build(experts_implementation="eager")
    assert not messages(caught)


# The report.


def test_names_and_classes_are_those_of_the_model():
    model = MODELS["DeepseekV32ForCausalLM"].build(experts_implementation="fp8moe")
    rows = report(model)
    modules = dict(model.named_modules())
    assert all(type(modules[row.name]).__name__ == row.module_class for row in rows)
    linears = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    assert linears <= {row.name for row in rows}
    assert {row.runs_on for row in rows if row.name in linears} == {"PyTorch"}
    assert [row.name for row in rows if row.module_class == "DeepseekV32Experts"] == ["model.layers.1.mlp.experts"]
    assert [row.name for row in rows] == [name for name in modules if name in {row.name for row in rows}]


def test_experts_of_another_implementation():
    model = MODELS["MixtralForCausalLM"].build(experts_implementation="eager")
    assert {row[2:] for row in rows_of(model, "Experts")} == {("transformers", "experts_implementation is 'eager'")}
    model.set_experts_implementation("fp8moe")
    why = "on an FP8 copy of its weights, made when it runs first"
    assert {row[2:] for row in rows_of(model, "Experts")} == {("fp8moe", why)}


def test_shared_experts_are_no_experts_of_the_router():
    model = MODELS["InklingForCausalLM"].build(experts_implementation="fp8moe")
    assert {row.module_class for row in rows_of(model, "Experts")} == {"InklingExperts"}
    assert rows_of(MODELS["GraniteMoeSharedForCausalLM"].build(), "GraniteMoeSharedExperts")


@pytest.mark.parametrize("name", ["MuseSparkForConditionalGeneration", "Inkling2ForCausalLM"])
def test_refused_experts_have_the_reason_of_their_first_forward(name):
    if name not in MODELS:
        pytest.skip(f"this transformers has no {name}")
    model = MODELS[name].build(experts_implementation="fp8moe")
    (why,) = {row.why for row in rows_of(model, "Experts") if row.runs_on == "refused"}
    with pytest.raises(ValueError) as raised, torch.no_grad():
        model(TOKENS)
    assert str(raised.value) == why


def test_nothing_is_quantized_or_changed(monkeypatch):
    """Weights of a terabyte take no longer: only their shapes are looked at."""
    model = MODELS["MixtralForCausalLM"].build(experts_implementation="fp8moe")
    devices, build = [], GroupedExperts.from_source
    monkeypatch.setattr(
        GroupedExperts,
        "from_source",
        lambda source: devices.append(source.down.parts[0][0].device.type) or build(source),
    )
    before = copy.deepcopy(model.state_dict())
    report(model)
    assert devices == ["meta"] * 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all("_fp8moe" not in module.__dict__ for module in model.modules())


def fp8_linear(block_size=(128, 128), activation_scheme="dynamic"):
    return finegrained_fp8.FP8Linear(256, 128, block_size=block_size, activation_scheme=activation_scheme)


def test_fp8_linears_of_transformers(monkeypatch):
    model = nn.ModuleList(
        [fp8_linear(), fp8_linear((64, 64)), fp8_linear(None), fp8_linear(activation_scheme="static")]
    )
    ours, *others = report(model)
    assert ours[2:] == ("fp8moe", "on its own FP8 weight")
    assert [row.runs_on for row in others] == ["transformers"] * 3
    for row, reason in zip(others, ("(64, 64)", "None", "static activation scales"), strict=True):
        assert reason in row.why
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", finegrained_fp8.fp8_linear.__wrapped__)
    assert report(model)[0][2:] == ("transformers", "register() has not been called")


def test_indexers():
    options = dict(MODELS["DeepseekV32ForCausalLM"].options)
    small = MODELS["DeepseekV32ForCausalLM"].build()
    large = MODELS["DeepseekV32ForCausalLM"]._replace(options=options | {"index_n_heads": 32}).build()
    assert {row.runs_on for row in rows_of(large, "Indexer")} == {"fp8moe"}
    (row,) = {row[2:] for row in rows_of(small, "Indexer")}
    assert row == ("transformers", "4 heads of 32 values; fp8moe runs 32 or 64 heads of 32 or 64 or 128")


def test_models_of_load_model_and_from_pretrained(tmp_path, monkeypatch):
    MODELS["Qwen3MoeForCausalLM"].build(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "fp8")
    rows = report(load_model(tmp_path / "fp8"))
    assert {row[1:] for row in rows if "mlp.experts" in row.name} == {("GroupedExperts", "fp8moe", "a GroupedExperts")}
    assert {row[1:] for row in rows if "self_attn." in row.name} == {("FP8Linear", "fp8moe", "an FP8Linear")}
    assert {row.runs_on for row in rows if row.name == "lm_head"} == {"PyTorch"}

    quantizer = quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer
    monkeypatch.setattr(quantizer, "validate_environment", lambda self, *arguments, **options: None)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", experts_implementation="fp8moe")
    theirs = {row[1:] for row in report(model) if row.runs_on == "fp8moe"}
    assert theirs == {
        ("FP8Experts", "fp8moe", "on its own FP8 weights"),
        ("FP8Linear", "fp8moe", "on its own FP8 weight"),
    }


def test_modules_to_train():
    model = MODELS["MixtralForCausalLM"].build()
    for module in modules_named(model, "mlp"):
        module.experts = GroupedExperts.from_experts(module.experts, master_dtype=torch.float32)
    replace_linears(model, master_dtype=torch.float32)
    assert {row.why for row in rows_of(model, "GroupedExperts")} == {"a GroupedExperts with weights to train"}
    assert {row.why for row in rows_of(model, "FP8Linear")} == {"an FP8Linear with a weight to train"}


def test_backward_error_names_the_way_to_train():
    model = MODELS["MixtralForCausalLM"].build(experts_implementation="fp8moe")
    with pytest.raises(RuntimeError, match=r"MixtralExperts .*GroupedExperts\.from_experts\(module, master_dtype="):
        model(TOKENS).logits.sum().backward()


def test_linears_in_fp8_of_another_format():
    linear = nn.Linear(16, 8, bias=False)
    linear.weight = nn.Parameter(linear.weight.to(torch.float8_e4m3fn), requires_grad=False)
    linear.weight_scale = nn.Parameter(torch.ones(8, 1))
    (row,) = report(nn.Sequential(linear))
    assert row.runs_on == "PyTorch"
    assert row.why == "its weight is FP8 of another format: torch.float8_e4m3fn without weight_scale_inv"
