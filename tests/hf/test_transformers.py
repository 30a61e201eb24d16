"""transformers models on fp8moe: the experts implementation, the FP8 linears and load_model, on the CPU."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fp8moe import replace_linears
from fp8moe.decode import GraphDecoder
from fp8moe.hf import experts, linears, load_model
from fp8moe.kernels.linear.forward import apply as linear
from fp8moe.layers import master
from fp8moe.layers.experts import GroupedExperts
from fp8moe.layers.linear import FP8Linear
from fp8moe.quant.quantize import dequantize, quantize_128x128
from fp8moe.weights import DEFAULT_SKIP, CheckpointError, quantize_checkpoint, save_fp8_checkpoint
from tests.errors import relative_error
from tests.transformers_models import BASE, MLA, TOKENS, modules_named, random_model, write_checkpoints

transformers = pytest.importorskip("transformers")
from transformers.integrations import finegrained_fp8, moe  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "registered")

# Small weights: routing must not hang on the last bit of a score.
SHAPE = BASE | {"hidden_size": 128, "max_position_embeddings": 64, "initializer_range": 0.03}
MODELS = {
    "mixtral": {"intermediate_size": 256, "num_local_experts": 4, "num_key_value_heads": 2},
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 8, "num_key_value_heads": 2, "head_dim": 16},
    "deepseek_v3": MLA,
    "deepseek_v32": MLA | {"index_topk": 8, "index_head_dim": 32, "index_n_heads": 16},
}
# Each token takes all experts: of these routers too many scores are nearly a tie.
GPT_OSS = {
    **{"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 4},
    **{"num_key_value_heads": 2, "head_dim": 16},
}


def make_model(name, dtype=torch.bfloat16, **changes):
    return random_model(name, SHAPE | MODELS[name] | changes, dtype=dtype)


def make_gpt_oss():
    """A model whose experts have biases, and rows of gate and up in turns."""
    model = random_model("gpt_oss", SHAPE | GPT_OSS, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("_proj_bias"):
                value.normal_(std=0.05)
    return model


@torch.no_grad()
def logits(model):
    return model(TOKENS).logits


def with_grouped_experts(model, linears=False):
    """The model with our layers in the places where they belong."""
    for name, module in list(model.named_modules()):
        if name.endswith(".experts"):
            model.set_submodule(name, GroupedExperts.from_experts(module))
    if linears:
        replace_linears(model, skip=DEFAULT_SKIP)
    return model


@pytest.fixture(scope="module", params=MODELS)
def checkpoints(request, tmp_path_factory):
    """(name, bf16 checkpoint, FP8 checkpoint)"""
    return request.param, *write_checkpoints(make_model(request.param), tmp_path_factory.mktemp(request.param))


# Experts in bfloat16.


@pytest.mark.parametrize("name", [*MODELS, "gpt_oss"])
def test_close_to_eager_and_equal_to_grouped_experts(name):
    model = make_gpt_oss() if name == "gpt_oss" else make_model(name)
    model.set_experts_implementation("eager")
    eager = logits(model)
    model.set_experts_implementation("fp8moe")
    ours = logits(model)
    # E4M3 keeps 3 bits of mantissa, a relative error of 2.6% in the mean square. Five roundings (input, gate, up,
    # intermediate, down) make that about 6% of what the experts contribute, and they are only a part of the logits.
    assert 0 < relative_error(ours, eager) < 0.06
    assert torch.equal(ours, logits(with_grouped_experts(model)))


def test_from_pretrained(checkpoints):
    name, directory, _ = checkpoints
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, experts_implementation="fp8moe")
    expected = make_model(name)
    expected.set_experts_implementation("fp8moe")
    assert torch.equal(logits(model), logits(expected))


@pytest.fixture
def built(monkeypatch):
    """The modules that a GroupedExperts is made of."""
    modules, build = [], experts.grouped_experts
    monkeypatch.setattr(experts, "grouped_experts", lambda module: modules.append(module) or build(module))
    return modules


def test_weights_are_quantized_once_until_they_change(built):
    model = make_model("mixtral")
    model.set_experts_implementation("fp8moe")
    first, second = modules_named(model, "experts")
    before = logits(model)
    assert torch.equal(logits(model), before)
    assert built == [first, second]

    with torch.no_grad():
        second.down_proj.zero_()
    changed = logits(model)
    assert built == [first, second, second] and not torch.equal(changed, before)
    first.gate_up_proj = nn.Parameter(first.gate_up_proj.detach().clone())
    assert torch.equal(logits(model), changed)
    assert built == [first, second, second, first]
    model.load_state_dict(make_model("mixtral").state_dict())
    assert torch.equal(logits(model), before)
    assert built[4:] == [first, second]


def test_invalidate_after_writes_that_no_version_shows(built):
    model = make_model("mixtral")
    model.set_experts_implementation("fp8moe")
    modules = modules_named(model, "experts")
    before = logits(model)
    for module in modules:
        module.down_proj.data.zero_()
    other = nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    torch.optim.SGD([other]).step()
    assert torch.equal(logits(model), before) and built == modules  # also after an optimizer step
    master.invalidate()
    after = logits(model)
    assert built == modules * 2 and not torch.equal(after, before)
    assert torch.equal(after, logits(with_grouped_experts(model)))


def test_new_weights_at_an_old_address_are_noticed(built):
    module = modules_named(make_model("mixtral"), "experts")[0]
    module.config._experts_implementation = "fp8moe"
    arguments = torch.randn(3, 128), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
    with torch.no_grad():
        before = module(*arguments)
    shape = module.down_proj.shape
    address = module.down_proj.data_ptr()
    for _ in range(20):
        module.down_proj = None
        module.down_proj = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
        if module.down_proj.data_ptr() == address:
            break
    with torch.no_grad():
        assert not module(*arguments).any() and before.any()


def test_the_copy_is_no_part_of_the_model():
    model = make_model("mixtral")
    names, count = list(model.state_dict()), sum(1 for _ in model.modules())
    model.set_experts_implementation("fp8moe")
    expected = logits(model)
    assert list(model.state_dict()) == names and sum(1 for _ in model.modules()) == count
    module = modules_named(model, "experts")[0]
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other._fp8moe.layer is None
    assert torch.equal(logits(copy.deepcopy(model)), expected)


def test_experts_of_other_ranks_add_nothing():
    """Expert parallelism: a rank's module has its share of the weights; num_experts stands for every other expert."""
    module = modules_named(make_model("qwen3_moe"), "experts")[0]
    module.config._experts_implementation = "fp8moe"
    x = torch.randn(9, 128, dtype=torch.bfloat16)
    index = torch.stack([torch.randperm(8)[:2] for _ in range(9)])
    weights = torch.rand(9, 2)
    with torch.no_grad():
        whole = module(x.float(), index, weights)
        parts = []
        for first in (0, 4):
            rank = copy.deepcopy(module)
            rank.num_experts = 4
            rank._is_expert_parallel = True
            rank.gate_up_proj = nn.Parameter(module.gate_up_proj[first : first + 4].clone())
            rank.down_proj = nn.Parameter(module.down_proj[first : first + 4].clone())
            away = index // 4 != first // 4
            parts.append(rank(x.float(), torch.where(away, 4, index - first), weights.masked_fill(away, 0)))
    assert all(part.any() for part in parts)
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compile(fullgraph, fresh_compiler):
    model = make_model("mixtral", torch.float32, num_hidden_layers=1)
    model.set_experts_implementation("fp8moe")
    module = modules_named(model, "experts")[0]
    arguments = torch.randn(5, 128), torch.randint(4, (5, 2)), torch.rand(5, 2)
    with torch.no_grad():
        compiled = torch.compile(module, backend="aot_eager", fullgraph=fullgraph)
        if fullgraph:
            module(*arguments)  # quantizes, which no graph can hold
        torch.testing.assert_close(compiled(*arguments), module(*arguments))


def test_backward_says_that_there_is_none():
    model = make_model("mixtral", num_hidden_layers=1)
    model.set_experts_implementation("fp8moe")
    with pytest.raises(RuntimeError, match="has no backward"):
        model(TOKENS).logits.sum().backward()


# What cannot run.


def forward(module, hidden=128, dtype=torch.bfloat16):
    module.config._experts_implementation = "fp8moe"
    with torch.no_grad():
        return module(torch.randn(2, hidden, dtype=dtype), torch.tensor([[0, 1]] * 2), torch.rand(2, 2))


def fp8_experts(block_size=(128, 128), activation_scheme="dynamic", intermediate_size=256, **options):
    config = transformers.AutoConfig.for_model("mixtral", **(SHAPE | MODELS["mixtral"] | options))
    config.intermediate_size = intermediate_size
    module = moe.use_experts_implementation(
        finegrained_fp8.FP8Experts, experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    )(config, block_size=block_size, activation_scheme=activation_scheme)
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            getattr(module, name).view(torch.uint8).random_(0, 0x48)
            getattr(module, f"{name}_scale_inv").uniform_(0.01, 0.02)
    return module.requires_grad_(False)


def experts_with_a_gate_of_their_own():
    module = modules_named(make_model("mixtral"), "experts")[0]

    class TanhExperts(type(module)):
        def _apply_gate(self, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            return gate.tanh() * up

    module.__class__ = TanhExperts
    return module


CAST = "FP8Experts cannot run .*gate_up_proj: expected float8_e4m3fn beside its scales"  # of the weights before


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fp8_experts(None), ValueError, "FP8Experts .*one scale per tensor; expected blocks of 128x128"),
        (lambda: fp8_experts((64, 64)), ValueError, r"FP8Experts .*expected weight blocks of 128x128, got \(64, 64\)"),
        (lambda: fp8_experts(activation_scheme="static"), ValueError, "FP8Experts .*dynamic activation .* 'static'"),
        (lambda: fp8_experts(intermediate_size=192), ValueError, r"expected scales of shape \(4, 4, 1\).*\(4, 3, 1\)"),
        (lambda: fp8_experts().to(torch.bfloat16), TypeError, CAST),
        (lambda: fp8_experts().to(torch.float32), TypeError, CAST),
        (experts_with_a_gate_of_their_own, ValueError, "TanhExperts .*its activation is none of those"),
    ],
)
def test_experts_that_are_refused(make, error, message):
    with pytest.raises(error, match=message) as raised:
        forward(make())
    assert "cannot run with experts_implementation='fp8moe'" in str(raised.value)


# transformers' FP8 models.


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_fp8_model_of_transformers(checkpoints, fp8_without_gpu, built, tmp_path, scale_format):
    """Equal bits whoever loads the checkpoint, and no copy of the experts' weights."""
    _, bf16, directory = checkpoints
    if scale_format == "ue8m0":
        directory = tmp_path / "fp8"
        quantize_checkpoint(bf16, directory, scale_format="ue8m0")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, experts_implementation="fp8moe")
    modules = modules_named(model, "experts")
    assert all(type(module) is finegrained_fp8.FP8Experts for module in modules)
    assert any(type(module) is finegrained_fp8.FP8Linear for module in model.modules())
    out = logits(model)
    assert built == modules
    for module in modules:
        for name in ("gate_up_proj", "down_proj"):
            assert getattr(module._fp8moe.layer, name).data_ptr() == getattr(module, name).data_ptr()
    assert torch.equal(out, logits(load_model(directory)))


def test_fp8_linear_is_routed():
    theirs = finegrained_fp8.FP8Linear(272, 136, block_size=(128, 128), has_bias=True).requires_grad_(False)
    quantized = quantize_128x128(torch.randn(136, 272))
    theirs.weight.data, theirs.weight_scale_inv.data = quantized
    theirs.bias.data = torch.randn(136)
    x = torch.randn(2, 5, 272, dtype=torch.bfloat16)
    assert torch.equal(theirs(x), linear(x, *quantized, theirs.bias))

    exact = x.double() @ dequantize(quantized, dtype=torch.float64).T + theirs.bias.double()
    assert relative_error(theirs(x), exact) < 0.04  # the activations' rounding


def test_gradients_are_not_recorded_for_the_weights_of_fp8_linears():
    theirs = finegrained_fp8.FP8Linear(128, 128, block_size=(128, 128))
    theirs.weight.data, theirs.weight_scale_inv.data = quantize_128x128(torch.randn(128, 128))
    assert theirs.weight.requires_grad
    assert not theirs(torch.randn(2, 128)).requires_grad


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        ({}, True),
        ({"block_size": [128, 128]}, True),
        ({"block_size": (64, 64)}, False),
        ({"block_size": None}, False),
        ({"activation_scale": torch.ones(())}, False),
        ({"weight": torch.zeros(128, 64, dtype=torch.int8)}, False),
    ],
)
def test_other_formats_stay_with_transformers(changes, ours):
    calls = []

    def fp8_linear(*arguments):
        calls.append(arguments)
        return "theirs"

    quantized = quantize_128x128(torch.randn(128, 128))
    arguments = {
        "input": torch.randn(2, 128),
        "weight": quantized.data,
        "weight_scale_inv": quantized.scale,
        "block_size": (128, 128),
        "bias": None,
        "activation_scale": None,
        "allow_deepgemm": False,
    } | changes
    routed = linears.routed(fp8_linear)
    for out in (routed(**arguments), routed(*arguments.values())):
        assert isinstance(out, torch.Tensor) == ours
    if not ours:
        assert calls == 2 * [tuple(arguments.values())]


def test_e8m0_scales_are_converted_once():
    scale = torch.tensor([[0.5, 2.0]]).to(torch.float8_e8m0fnu)
    converted = linears.float_scale(scale)
    assert torch.equal(converted, torch.tensor([[0.5, 2.0]]))
    assert linears.float_scale(scale) is converted
    scale.copy_(torch.tensor([[4.0, 2.0]]))
    assert torch.equal(linears.float_scale(scale), torch.tensor([[4.0, 2.0]]))
    scale.data.copy_(torch.tensor([[8.0, 2.0]]))
    master.invalidate()
    assert torch.equal(linears.float_scale(scale), torch.tensor([[8.0, 2.0]]))
    count = len(linears._float_scales)
    del scale
    assert len(linears._float_scales) == count - 1


# load_model.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_load_model(checkpoints, dtype):
    name, _, directory = checkpoints
    model = load_model(directory, dtype=dtype)
    assert not model.training and model.dtype == dtype
    assert all(type(module) is GroupedExperts for module in modules_named(model, "experts"))
    assert not any(value.is_meta for value in model.state_dict().values())
    expected = with_grouped_experts(make_model(name), linears=True)
    replaced = {path for path, module in expected.named_modules() if type(module) is FP8Linear}
    assert replaced == {path for path, module in model.named_modules() if type(module) is FP8Linear}
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for key, value in expected.state_dict().items():
        assert torch.equal(state[key].float(), value.float()), key
    if dtype == torch.bfloat16:
        assert torch.equal(logits(model), logits(expected))
    else:
        assert relative_error(logits(model), logits(expected)) < 0.3  # bfloat16 moves the routing of single tokens


def test_what_must_stay_in_float32_does(checkpoints):
    name, _, directory = checkpoints
    biases = {key: value for key, value in load_model(directory).state_dict().items() if "correction_bias" in key}
    assert bool(biases) == name.startswith("deepseek")
    assert all(value.dtype == torch.float32 for value in biases.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_are_those_of_from_pretrained(checkpoints, dtype):
    name, directory, _ = checkpoints
    model = load_model(directory, dtype=dtype)
    expected = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).state_dict()
    state = model.state_dict()
    assert {key: value.dtype for key, value in state.items()} == {key: value.dtype for key, value in expected.items()}
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    weights = [value for key, value in state.items() if "weights_proj" in key]
    assert bool(weights) == (name == "deepseek_v32")
    assert all(value.dtype == (torch.float32 if dtype == torch.float16 else dtype) for value in weights)


def test_what_is_loaded_can_be_saved(checkpoints, tmp_path):
    _, _, directory = checkpoints
    model = load_model(directory)
    assert model.config.quantization_config["quant_method"] == "fp8"
    save_fp8_checkpoint(model, tmp_path / "again")
    assert torch.equal(logits(load_model(tmp_path / "again")), logits(model))


def test_tied_embeddings_stay_tied(tmp_path):
    model = with_grouped_experts(make_model("qwen3_moe", tie_word_embeddings=True), linears=True)
    model.generation_config.max_new_tokens = 17
    save_fp8_checkpoint(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.generation_config.max_new_tokens == 17


def test_load_errors(tmp_path):
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        load_model(tmp_path)
    model = with_grouped_experts(make_model("qwen3_moe"), linears=True)
    model.model.layers[1].self_attn.o_proj = FP8Linear(64, 64, bias=False)
    model.model.extra = nn.Linear(8, 8, bias=False)
    save_fp8_checkpoint(model, tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path)
    text = "\n".join(caught.value.problems)
    assert r"layers.1.self_attn.o_proj.weight: shape (64, 64), expected (128, 64)" in text
    assert "model.extra.weight: extra" in text
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: missing or empty"):
        load_model(tmp_path)


def test_graph_decoder_on_a_loaded_model(checkpoints):
    """Routing, FP8 experts and linears inside the decoder's step."""
    _, _, directory = checkpoints
    model = load_model(directory, dtype=torch.float32)
    fuse = model.config.model_type not in ("deepseek_v3", "deepseek_v32")  # absorbed attention quantizes no latents
    out = GraphDecoder(model, batch_sizes=(4,), max_length=24, fuse=fuse).generate(TOKENS, max_new_tokens=10)
    expected = model.generate(
        TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=10, do_sample=False, eos_token_id=None
    )
    assert torch.equal(out, expected)
