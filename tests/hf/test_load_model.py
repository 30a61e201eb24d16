"""load_model: the names and layouts that it takes, what it refuses, and that it leaves other threads alone."""

import json
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fp8moe import FP8Linear, GroupedExperts, quantize_128x128
from fp8moe.hf import load_model
from fp8moe.hf.versions import has_styles
from fp8moe.weights import (
    DEFAULT_SKIP,
    CheckpointError,
    convert_checkpoint,
    inspect_checkpoint,
    load_fp8_checkpoint,
    quantize_checkpoint,
    save_fp8_checkpoint,
)
from tests.small_checkpoints import same
from tests.transformers_models import BASE, newer_than_5_17, random_model

transformers = pytest.importorskip("transformers")
from tests.tiny_moe_models import MODELS  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = BASE | {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 64, "num_key_value_heads": 2}
MIXTRAL = SHAPE | {"num_local_experts": 4, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mixtral")
    random_model("mixtral", MIXTRAL, dtype=torch.bfloat16).save_pretrained(directory / "source")
    quantize_checkpoint(directory / "source", directory / "fp8")
    return directory / "fp8"


def tensors_of(directory):
    return load_file(directory / "model.safetensors")


def rewritten(source, directory, tensors, **config):
    """A checkpoint with other tensors, and changes of config.json."""
    directory.mkdir(exist_ok=True)
    save_file({name: value.clone() for name, value in tensors.items()}, directory / "model.safetensors")
    content = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(content | config))
    return directory


def assert_equal_states(model, expected):
    actual, expected = model.state_dict(), expected.state_dict()
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype and torch.equal(actual[name].float(), value.float()), name


def deepseek_names(name):
    for short, long in {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.items():
        name = name.replace(f".{short}.", f".{long}.")
    return name


@pytest.mark.parametrize(
    "spelled",
    [
        deepseek_names,
        lambda name: name.replace(".block_sparse_moe.", ".mlp."),
        lambda name: deepseek_names(name.replace(".block_sparse_moe.", ".mlp.")),
        lambda name: name.replace(".weight_scale_inv", ".scale"),
        lambda name: name.removeprefix("model."),  # as of a MixtralModel without its head
    ],
    ids=["gate_proj", "mlp", "mlp with gate_proj", "scale", "without prefix"],
)
def test_spellings_of_names(mixtral, tmp_path, spelled):
    tensors = {spelled(name): value for name, value in tensors_of(mixtral).items()}
    assert tensors.keys() != tensors_of(mixtral).keys()
    assert_equal_states(load_model(rewritten(mixtral, tmp_path, tensors)), load_model(mixtral))


@pytest.mark.parametrize("form", ["bfloat16", "float8_e8m0fnu", "without sizes of one"])
def test_forms_of_scales(mixtral, tmp_path, form):
    tensors = tensors_of(mixtral)
    for name, value in tensors.items():
        if name.endswith("_scale_inv"):
            power_of_two = torch.exp2(value.log2().ceil())
            tensors[name] = power_of_two.squeeze() if "sizes" in form else power_of_two.to(getattr(torch, form))
    loaded = load_model(rewritten(mixtral, tmp_path, tensors))
    scale = loaded.model.layers[1].mlp.experts.down_proj_scale_inv
    prefix = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    assert scale.dtype == torch.float32
    assert torch.equal(scale[3].flatten(), tensors[f"{prefix}_scale_inv"].float().flatten())
    assert torch.equal(loaded.model.layers[1].mlp.experts.down_proj[3].float(), tensors[prefix].float())


def test_fused_experts_under_the_checkpoints_names(tmp_path):
    """Granite's weights keep the names of its checkpoints, and so do their scales."""
    options = SHAPE | {"num_local_experts": 4, "logits_scaling": 1.0}
    experts = GroupedExperts(num_experts=4, hidden_size=128, intermediate_size=256)
    random_model("granitemoe", options, dtype=torch.bfloat16).save_pretrained(tmp_path / "source")
    tensors = tensors_of(tmp_path / "source")
    for layer in (0, 1):
        block = f"model.layers.{layer}.block_sparse_moe"
        for name, key in (("input_linear", "gate_up_proj"), ("output_linear", "down_proj")):
            tensors[f"{block}.{name}.weight"] = getattr(experts, key).detach()
            tensors[f"{block}.{name}.weight_scale_inv"] = getattr(experts, f"{key}_scale_inv").detach()
    loaded = load_model(rewritten(tmp_path / "source", tmp_path / "fp8", tensors))
    for layer in loaded.model.layers:
        assert_equal_states(layer.block_sparse_moe.experts, experts)


def test_fp8_weights_are_frozen_and_others_are_not(mixtral):
    for name, value in load_model(mixtral).named_parameters():
        assert value.requires_grad == (value.dtype != torch.float8_e4m3fn and not name.endswith("_scale_inv")), name


def test_the_class_is_that_of_the_checkpoint(tmp_path):
    """A model of text and images is not cut down to its language model."""
    name = "Qwen3_5MoeForConditionalGeneration"
    if name not in MODELS:
        pytest.skip(f"transformers {transformers.__version__} does not have it")
    MODELS[name].build(torch.bfloat16).save_pretrained(tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "fp8")
    assert type(load_model(tmp_path / "fp8")).__name__ == name


def test_all_that_does_not_fit_is_listed(mixtral, tmp_path):
    tensors = tensors_of(mixtral)
    block = "model.layers.0.block_sparse_moe.experts"
    tensors[f"{block}.1.w2.weight"] = tensors[f"{block}.1.w2.weight"].to(torch.bfloat16)
    del tensors[f"{block}.2.w1.weight_scale_inv"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:64]
    tensors["model.layers.7.self_attn.q_proj.weight"] = torch.zeros(2)
    tensors["lm_head.weight"] = torch.ones_like(tensors["model.embed_tokens.weight"])
    with pytest.raises(CheckpointError) as caught:
        load_model(rewritten(mixtral, tmp_path, tensors))
    assert sorted(caught.value.problems) == [
        f"{block}.1.w2.weight: BF16, but the model's module is FP8; quantize the checkpoint first (fp8moe quantize)",
        "model.layers.0.mlp.experts.2.gate_proj.weight_scale_inv: missing",
        "model.layers.7.self_attn.q_proj.weight: extra, the model has no such tensor",
        "model.norm.weight: shape (64,), expected (128,)",
    ]
    tensors = tensors_of(mixtral) | {"lm_head.weight": tensors["lm_head.weight"]}
    model = load_model(rewritten(mixtral, tmp_path, tensors))  # as transformers does it, it ties nothing
    assert not model.config.tie_word_embeddings and torch.equal(model.lm_head.weight, tensors["lm_head.weight"])


def test_an_fp8_head_that_the_model_ties_to_its_embedding(mixtral, tmp_path):
    tensors = tensors_of(mixtral)
    head = quantize_128x128(tensors["model.embed_tokens.weight"])
    tensors |= {"lm_head.weight": head.data, "lm_head.weight_scale_inv": head.scale}
    with pytest.raises(CheckpointError) as caught:
        load_model(rewritten(mixtral, tmp_path, tensors))
    assert caught.value.problems[0] == (
        "lm_head.weight: F8_E4M3, but the model ties it to model.embed_tokens.weight, which is not"
    )
    untied = load_model(rewritten(mixtral, tmp_path, tensors, tie_word_embeddings=False))
    assert torch.equal(untied.lm_head.weight.float(), head.data.float())


def test_conversions_are_tried_before_anything_is_read(tmp_path):
    """Kimi-Linear's three convolutions become one."""
    MODELS["KimiLinearForCausalLM"].build(torch.bfloat16).save_pretrained(tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "fp8")
    tensors = tensors_of(tmp_path / "fp8")
    name = "model.layers.0.self_attn.{}_conv1d.weight"
    parts = [tensors[name.format(part)] for part in "qkv"]
    model = load_model(tmp_path / "fp8")
    assert torch.equal(model.get_parameter("model.layers.0.self_attn.conv1d.weight"), torch.cat(parts))

    del tensors[name.format("q")]
    made = [parts[0].shape[0] * 2, *parts[0].shape[1:]]
    with pytest.raises(CheckpointError, match="self_attn.conv1d.weight: transformers makes .* expected") as caught:
        load_model(rewritten(tmp_path / "fp8", tmp_path / "less", tensors))
    assert len(caught.value.problems) == 1 and str(tuple(made)) in caught.value.problems[0]

    tensors |= {name.format(part): value.view(torch.int16) for part, value in zip("qkv", parts, strict=True)}
    with pytest.raises(CheckpointError, match="_conv1d.weight: dtype I16, expected torch.float32"):
        load_model(rewritten(tmp_path / "fp8", tmp_path / "integers", tensors))
    tensors |= {name.format(part): value.view(torch.complex64) for part, value in zip("qkv", parts, strict=True)}
    with pytest.raises(CheckpointError, match="_conv1d.weight: dtype C64, expected torch.float32"):
        load_model(rewritten(tmp_path / "fp8", tmp_path / "complex", tensors))

    tensors |= {name.format(part): value for part, value in zip("qkv", parts, strict=True)}
    tensors[name.format("q")] = parts[0].to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"q_conv1d.weight: F8_E4M3, but transformers makes .* by Concatenate"):
        load_model(rewritten(tmp_path / "fp8", tmp_path / "fp8 conv", tensors))


def test_fp8_weights_that_transformers_would_cast_are_refused(mixtral, monkeypatch):
    plan = {"o_proj": torch.float32}
    monkeypatch.setattr(transformers.MixtralForCausalLM, "_get_dtype_plan", lambda self, dtype: plan)
    with pytest.raises(CheckpointError, match="keeps it in float32 with dtype=torch.float16") as caught:
        load_model(mixtral, dtype=torch.float16)
    names = [problem.partition(":")[0] for problem in caught.value.problems]
    assert names == [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1)]


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "no_such_model"},
        {"model_type": ["mixtral"]},
        {"hidden_size": "large"},
        {"hidden_size": 130},
        {"num_hidden_layers": -1},
        {"num_attention_heads": 0},
        {"hidden_act": "no_such_function"},
        {"architectures": 7},
        {"rope_parameters": {"rope_type": "no_such_type"}},
        {"dtype": "no_such_dtype"},
        {"quantization_config": "fp8"},
        {"fusion_config": "x"},
        {"num_nextn_predict_layers": "x"},
        {"attn_implementation": "some/kernels"},
    ],
    ids=str,
)
def test_broken_configurations(mixtral, tmp_path, changes):
    with pytest.raises(CheckpointError) as caught:
        load_model(rewritten(mixtral, tmp_path, tensors_of(mixtral), **changes))
    assert all("\n" not in problem for problem in caught.value.problems)


def test_other_threads_build_their_modules_meanwhile(mixtral):
    built, stop = [], threading.Event()

    def build():
        while not stop.is_set():
            built.append(nn.Linear(4, 4, dtype=torch.float32))

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        models = [load_model(mixtral) for _ in range(3)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert len(built) > 100
    assert not any(value.is_meta for linear in built for value in linear.parameters())
    assert not any(value.is_meta for model in models for value in model.state_dict().values())


def test_threads_load_at_once(mixtral, monkeypatch):
    dtype, set_default_dtype, models = torch.get_default_dtype(), torch.set_default_dtype, []

    def slow(dtype):
        set_default_dtype(dtype)
        time.sleep(0.02)  # meanwhile, threads that do not wait read it, or set another one

    monkeypatch.setattr(torch, "set_default_dtype", slow)

    def load():
        for _ in range(3):  # one thread begins a load while another one ends its own
            models.append(load_model(mixtral))

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.get_default_dtype() == dtype
    for model in models:
        assert_equal_states(model, models[0])
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert any(type(module) is FP8Linear for module in model.modules())
    assert len(models) == 9


def test_buffers_that_old_checkpoints_have(tmp_path):
    """transformers leaves them out; a model makes them."""
    random_model("llama", SHAPE, dtype=torch.bfloat16).save_pretrained(tmp_path / "source")
    with pytest.warns(UserWarning, match="nothing of it runs on fp8moe"):
        expected = load_model(tmp_path / "source")
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(16) for layer in (0, 1)}
    rewritten(tmp_path / "source", tmp_path / "old", tensors_of(tmp_path / "source") | buffers)
    with pytest.warns(UserWarning, match="nothing of it runs on fp8moe"):
        assert_equal_states(load_model(tmp_path / "old"), expected)
    quantize_checkpoint(tmp_path / "old", tmp_path / "fp8")
    loaded = load_model(tmp_path / "fp8")
    assert torch.equal(loaded.model.norm.weight, expected.model.norm.weight)
    load_fp8_checkpoint(loaded, tmp_path / "fp8")
    with pytest.raises(CheckpointError, match=r"layers.0.self_attn.inv_freq: extra"):
        others = {name.replace("rotary_emb.", ""): value for name, value in buffers.items()}
        load_model(rewritten(tmp_path / "source", tmp_path / "old", tensors_of(tmp_path / "source") | others))


@pytest.mark.filterwarnings("ignore:.*nothing of it runs on fp8moe", "ignore:FP8 weights have only")
@pytest.mark.parametrize("skip", ["*", "*.experts.*", "*.self_attn.*"])
def test_models_with_unquantized_experts_are_saved_by_transformers(mixtral, tmp_path, skip):
    """transformers would add a dequantization to the fusions of such experts, which saving cannot undo."""
    source = mixtral.parent / "source"
    if skip != "*":
        quantize_checkpoint(source, tmp_path / "x", skip=(*DEFAULT_SKIP, skip))
    loaded = load_model(source if skip == "*" else tmp_path / "x")
    loaded.save_pretrained(tmp_path / "saved")
    assert_equal_states(load_model(tmp_path / "saved"), loaded)


NOT_QUANTIZED = ("Ernie4_5_VLMoeForConditionalGeneration",)
NOT_READ = (  # in FP8, by transformers
    *("GraniteMoeHybridForCausalLM", "NemotronHForCausalLM", "Step3p7ForConditionalGeneration"),
    "UnlimitedOcrForConditionalGeneration",
)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_again_is_read_as_before(name, tmp_path):
    """Both readers find every tensor again, in models of which transformers renames tensors."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    source = MODELS[name].build(torch.bfloat16)
    conversions = get_model_conversion_mapping(source, add_legacy=False)
    if not any(isinstance(conversion, WeightRenaming) for conversion in conversions):
        pytest.skip("transformers renames nothing of it")
    source.save_pretrained(tmp_path / "source")
    try:
        quantize_checkpoint(tmp_path / "source", tmp_path / "fp8")
    except CheckpointError as error:
        assert name in NOT_QUANTIZED or has_styles(), error
        pytest.skip(str(error))
    model, expected = load_model(tmp_path / "fp8"), read_by_transformers(name, tmp_path / "fp8")
    assert expected is not None or name in NOT_READ or has_styles()
    save_fp8_checkpoint(model, tmp_path / "ours")
    assert not inspect_checkpoint(tmp_path / "ours").problems
    model.save_pretrained(tmp_path / "theirs")
    for saved in (tmp_path / "ours", tmp_path / "theirs"):
        assert_equal_states(load_model(saved), model)
        if expected is not None and (saved.name == "ours" or not has_styles()):  # 5.17 loses scales that it has saved
            same(read_by_transformers(name, saved), expected)


def read_by_transformers(name, directory):
    """The values of the model's tensors in bfloat16; None if transformers cannot read them."""
    try:
        model = MODELS[name].auto_class.from_pretrained(directory, dtype=torch.bfloat16)
    except (RuntimeError, ValueError):
        return None
    return {key: value.float() for key, value in model.state_dict().items()}  # some keep the dtype in the file


@pytest.mark.parametrize("task", ["ForSequenceClassification", "Model"])
def test_models_of_other_tasks(mixtral, tmp_path, task):
    """Reward and embedding models: the class is the one that config.json names."""
    kind = getattr(transformers, f"Mixtral{task}")
    source = kind(transformers.MixtralConfig(**MIXTRAL, num_labels=1)).bfloat16().eval()
    source.save_pretrained(tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "fp8")
    loaded, tokens = load_model(tmp_path / "fp8"), torch.arange(3, 15).view(1, 12)
    assert type(loaded) is kind
    with torch.no_grad():
        expected, actual = source(tokens)[0].float(), loaded(tokens)[0].float()
    assert (actual - expected).norm() < 0.2 * expected.norm()


def without(part):
    return lambda tensors: {name: value for name, value in tensors.items() if part not in name}


def other_names(tensors):
    return {f"x.{name}": value for name, value in tensors.items()}


O_PROJ, LAST = "model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("source", ["source", "fp8"])
@pytest.mark.parametrize(
    ("changed", "config", "problem"),
    [
        (without("o_proj"), {}, f"{O_PROJ}: missing"),
        (without("layernorm"), {}, "model.layers.0.input_layernorm.weight: missing"),
        (other_names, {}, r"model.norm.weight: (missing|extra)"),
        (dict, {"num_hidden_layers": 1}, f"{LAST}: extra"),
        (dict, {"num_hidden_layers": 3}, "model.layers.2.self_attn.o_proj.weight: missing"),
        pytest.param(
            *(dict, {"vocab_size": 130}, rf"{EMBEDDING}: shape \(128, 128\), expected \(130, 128\)"),
            marks=newer_than_5_17("compares no shapes of quantized checkpoints"),
        ),
        (dict, {"architectures": ["MixtralForSequenceClassification"]}, "score.weight: missing"),
    ],
)
def test_tensors_of_another_model(mixtral, tmp_path, registered, fp8_without_gpu, source, changed, config, problem):
    """Nothing is made at random, and nothing left out, by whatever way a model for fp8moe is loaded."""
    source = mixtral.parent / source
    directory = rewritten(source, tmp_path, changed(tensors_of(source)), **config)
    kind = getattr(transformers, config.get("architectures", ["MixtralForCausalLM"])[0])
    for load in (load_model, lambda path: kind.from_pretrained(path, experts_implementation="fp8moe")):
        with pytest.raises(CheckpointError, match=problem):
            load(directory)


def test_what_may_be_missing_or_left_over(mixtral, tmp_path, registered):
    """Models that do not run on fp8moe, new heads, sizes that the user knows of, no head, what a class makes itself."""
    source, kinds = mixtral.parent / "source", transformers
    theirs = kinds.MixtralForSequenceClassification.from_pretrained(source)
    theirs.set_experts_implementation("fp8moe")
    kinds.MixtralForCausalLM.from_pretrained(rewritten(source, tmp_path, without("o_proj")(tensors_of(source))))
    kinds.AutoModel.from_pretrained(source, experts_implementation="fp8moe")
    options = {"experts_implementation": "fp8moe", "ignore_mismatched_sizes": True, "vocab_size": 130}
    assert kinds.MixtralForCausalLM.from_pretrained(source, **options).config.vocab_size == 130
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    bart = kinds.BartForConditionalGeneration(kinds.BartConfig(vocab_size=64, max_position_embeddings=32, **sizes))
    bart.save_pretrained(tmp_path / "bart")
    rewritten(tmp_path / "bart", tmp_path / "bart", without("final_logits_bias")(tensors_of(tmp_path / "bart")))
    with pytest.warns(UserWarning, match="nothing of it runs on fp8moe"):
        assert not load_model(tmp_path / "bart").final_logits_bias.any()


def test_models_of_tasks_that_transformers_does_not_have(mixtral, tmp_path):
    directory = rewritten(mixtral, tmp_path, tensors_of(mixtral), architectures=["MixtralForProcessRewards"])
    with pytest.raises(CheckpointError, match="cannot make the model .it has no class 'MixtralForProcessRewards'"):
        load_model(directory)


def test_experts_of_llama_4_are_refused_by_name(tmp_path):
    """And the rest of it runs in FP8."""
    MODELS["Llama4ForCausalLM"].build(torch.bfloat16).save_pretrained(tmp_path / "source")
    why = "the experts of Llama 4 scale their input by the router and are stored transposed, which fp8moe does not run"
    with pytest.raises(CheckpointError, match=rf"layers.0.feed_forward.experts: {why}; .*skip 'experts'"):
        quantize_checkpoint(tmp_path / "source", tmp_path / "fp8")
    with pytest.warns(UserWarning, match="FP8 weights have only"):
        quantize_checkpoint(tmp_path / "source", tmp_path / "fp8", skip=(*DEFAULT_SKIP, "experts"))
    assert isinstance(load_model(tmp_path / "fp8").model.layers[0].self_attn.q_proj, FP8Linear)
    tensors, name = tensors_of(tmp_path / "fp8"), "model.layers.0.feed_forward.experts.down_proj"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(8, 2, 1)}
    rewritten(tmp_path / "fp8", tmp_path / "experts", tensors)
    for read in (load_model, lambda directory: convert_checkpoint(directory, tmp_path / "converted")):
        with pytest.raises(CheckpointError) as error:
            read(tmp_path / "experts")
        assert error.value.problems == [f"{name}: {why}"]


def test_gates_of_linear_attention_stay_as_they_are(tmp_path):
    """As in Qwen's own FP8 checkpoints."""
    MODELS["Qwen3_5MoeForCausalLM"].build(torch.bfloat16).save_pretrained(tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "fp8")
    stored = tensors_of(tmp_path / "fp8").items()
    kinds = {name.removesuffix(".weight").rpartition(".")[2]: value.dtype for name, value in stored}
    assert kinds["in_proj_a"] == kinds["in_proj_b"] == torch.bfloat16
    assert kinds["in_proj_qkv"] == kinds["out_proj"] == torch.float8_e4m3fn
