"""Models whose known parts run in fp8moe's kernels give what they gave before, in every class of transformers."""

import ast
import copy
import importlib.util
import inspect
import re
import textwrap
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers.utils.generic import maybe_autocast

from fp8moe import FP8Linear, GroupedExperts, replace_linears
from fp8moe.hf import optimize, register
from fp8moe.hf.fused import known_forwards, linears
from fp8moe.hf.fused.attention import _whole
from fp8moe.hf.fused.fuse import _fused_tables, is_decoder_layer
from fp8moe.hf.fused.known_forwards import digest, runs_as_written
from fp8moe.hf.versions import LATER_DIGESTS
from fp8moe.kernels.experts import operator
from fp8moe.weights import DEFAULT_SKIP, save_fp8_checkpoint
from tests.tiny_moe_models import MODELS

NAME = "Qwen3MoeForCausalLM"
WHOLE = "norms and residuals, q, k and v as one, heads and cache, router"
LATENT = "norms and residuals, queries and latents as one, latent attention"
WIDE = {"head_dim": 128, "hidden_size": 256, "num_key_value_heads": 1, "num_attention_heads": 2}

# What is fused in some classes: of the layers, and of modules by themselves.
TABLES = "cosines and sines"
PARTS = {
    "Qwen3MoeForCausalLM": {TABLES, "norm", "router", WHOLE},
    "MixtralForCausalLM": {TABLES, "norm", "router", WHOLE},
    "Qwen2MoeForCausalLM": {TABLES, "norm", "router", WHOLE},
    "Glm4MoeForCausalLM": {TABLES, "norm", "router", WHOLE.removesuffix(", router"), WHOLE},
    "DeepseekV3ForCausalLM": {TABLES, "norm", "router", LATENT, f"{LATENT}, router"},
    "OlmoeForCausalLM": {TABLES, "norm", "router", "norms and residuals, router"},
    "JambaForCausalLM": {"norm"},
    "Qwen3NextForCausalLM": {"router"},
    "GptOssForCausalLM": {"norm", "router", WHOLE},
}


def prompt(rows=2, length=12):
    return torch.randint(3, 120, (rows, length), generator=torch.Generator().manual_seed(0))


BROKEN = {"DogeForCausalLM": TypeError, "Llama4ForConditionalGeneration": AttributeError}
"""What transformers' own forward() of a model raises, Doge's in 5.17, Llama4's in 5.24."""


@contextmanager
def skipped_if_broken(name):
    """Skips the test where a model of BROKEN raises that error; no other model, and no other error."""
    try:
        yield
    except BROKEN.get(name, ()) as error:
        pytest.skip(f"the model does not run: {error}")


def logits(model, **arguments):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(input_ids=prompt(), **arguments).logits


def distance(got, expected):
    return (got - expected).norm() / expected.norm()


def fuse(model):
    """Optimize the model, whose logits stay."""
    before = logits(model)
    changed = optimize(model)
    assert distance(logits(model), before) <= 1e-5
    return changed


def in_fp8(name=NAME, dtype=torch.bfloat16, **options):
    """A tiny model with FP8 experts and linears."""
    tiny = MODELS[name]
    model = tiny._replace(options={**tiny.options, **options}).build(dtype)
    for path, module in list(model.named_modules()):
        if isinstance(getattr(module, "down_proj", None), nn.Parameter):
            model.set_submodule(path, GroupedExperts.from_experts(module))
    replace_linears(model, skip=DEFAULT_SKIP)
    return model


@pytest.mark.parametrize("name", [name for name in MODELS if name != "DiffusionGemmaForBlockDiffusion"])
def test_logits_of_every_class(name):
    model = MODELS[name].build()
    with skipped_if_broken(name):
        before = logits(model)
    changed = optimize(model)
    assert distance(logits(model), before) <= 1e-5
    changed.restore()
    assert torch.equal(logits(model), before)
    assert {row.what for row in changed} == PARTS.get(name, {row.what for row in changed})


@pytest.mark.parametrize("name", PARTS)
def test_models_in_bfloat16_are_fused_as_those_in_float32(name):
    assert {row.what for row in optimize(MODELS[name].build(torch.bfloat16))} == PARTS[name]


def test_a_router_in_float32_is_fused_in_a_model_in_bfloat16():
    model = MODELS["DeepseekV3ForCausalLM"].build(torch.bfloat16)
    routers = [layer.mlp.gate.float() for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    x = torch.randn(5, routers[0].weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        before, before_routed = logits(model), routers[0](x)
        assert f"{LATENT}, router" in {row.what for row in optimize(model)}
        logits_of_experts, weights, index = routers[0](x)
    assert logits_of_experts.dtype is torch.float32
    torch.testing.assert_close(logits_of_experts, before_routed[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(index.sort().values, before_routed[2].sort().values)
    torch.testing.assert_close(weights.sum(-1), before_routed[1].sum(-1).float())
    assert distance(logits(model), before) <= 2e-2


@pytest.mark.parametrize("name", [name for name, parts in PARTS.items() if len(parts) > 1])
def test_generate_with_padding_and_a_cache(name):
    model = MODELS[name].build()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    how = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    before = model.generate(prompt(), **how)
    optimize(model)
    assert torch.equal(model.generate(prompt(), **how), before)


def test_caches_that_add_their_layers_later():
    from transformers import DynamicCache

    model = MODELS[NAME].build()
    found = []
    for fuse in (False, True):
        cache = DynamicCache()
        changed = optimize(model) if fuse else None
        first = logits(model, past_key_values=cache, use_cache=True)
        found.append(torch.cat([first, logits(model, past_key_values=cache, use_cache=True)]))
        assert cache.get_seq_length() == 24
    assert changed and distance(found[1], found[0]) <= 1e-5


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_fp8_models(name):
    model = in_fp8(name, torch.float32)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fuse(model)
    for key, value in model.state_dict().items():
        assert torch.equal(value.view(torch.uint8), state[key].view(torch.uint8)), key


def test_experts_of_transformers_take_the_residual_and_the_order():
    register()
    model = MODELS[NAME].build(experts_implementation="fp8moe")
    before = logits(model)
    fuse(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert distance(logits(model), before) <= 1e-5


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_few_assignments_are_sorted_with_the_choice(name, monkeypatch):
    model = in_fp8(name, torch.float32)
    optimize(model)
    experts = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    sorts, sort = [], operator.sort_by_expert
    monkeypatch.setattr(operator, "sort_by_expert", lambda *given, **how: sorts.append(given) or sort(*given, **how))

    def run(rows):
        sorts.clear()
        with torch.no_grad():
            return model(input_ids=prompt(rows)).logits, len(sorts)

    few, by_experts = run(1)
    assert by_experts == 0
    assert run(2)[1] == len(experts)  # of 24 tokens
    for module in experts:
        module.decode_capacity = 100
    again, by_experts = run(1)
    assert by_experts == len(experts) and distance(again, few) <= 1e-5


def test_projections_that_read_the_same_input_are_one():
    model = in_fp8(**WIDE)
    before = logits(model)
    changed = optimize(model)
    assert {row.what for row in changed} >= {"norms and residuals, q, k and v as one, heads and cache, router"}
    attention = model.model.layers[0].self_attn
    parts = [linears.weights(part) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    whole = linears.joined(parts)
    assert whole.data.data_ptr() == attention.q_proj.weight.data_ptr() and whole.data.shape == (512, 256)
    assert torch.equal(logits(model), before)
    attention.k_proj.weight.data = attention.k_proj.weight.data.clone()
    assert linears.joined([linears.weights(part) for part in (attention.q_proj, attention.k_proj)]) is None
    assert torch.equal(logits(model), before)


def test_biases_move_together_too():
    model = in_fp8("Qwen2MoeForCausalLM", torch.float32, **WIDE)
    fuse(model)
    attention = model.model.layers[0].self_attn
    parts = [linears.weights(part) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert linears.joined(parts).bias.shape == (512,)


def test_plain_projections_are_one_until_they_are_parted():
    model = MODELS["Qwen2MoeForCausalLM"].build()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fuse(model)
    before, calls = logits(model), []
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.weight.untyped_storage().data_ptr() == attention.q_proj.weight.untyped_storage().data_ptr()
    shared = model.model.layers[0].mlp.shared_expert  # runs as before, so that its weights need not move
    assert shared.up_proj.weight.untyped_storage().data_ptr() != shared.gate_proj.weight.untyped_storage().data_ptr()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    attention.k_proj.weight.data = attention.k_proj.weight.data.clone()
    assert distance(logits(model), before) <= 1e-5
    attention.v_proj.register_forward_hook(lambda *given: calls.append(given))
    assert distance(logits(model), before) <= 1e-5 and len(calls) == 1


def test_sinks_half_tables_and_the_bias_of_a_router_in_bfloat16():
    model = MODELS["GptOssForCausalLM"].build(torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
            layer.mlp.router.bias.normal_()
            layer.input_layernorm.weight.normal_(1, 0.1)
    before, routed = logits(model), model.model.layers[0].mlp.router(hidden := torch.randn(9, 128).bfloat16())
    optimize(model)
    assert distance(logits(model), before) <= 2e-2
    with torch.no_grad():
        ours = model.model.layers[0].mlp.router(hidden)
    assert torch.equal(ours[0], routed[0]) and torch.equal(ours[2], routed[2])
    torch.testing.assert_close(ours[1], routed[1], rtol=1e-2, atol=1e-3)


def test_tables_are_repeated_again_when_they_change():
    table = torch.randn(1, 3, 8)
    whole = _whole(table)
    assert _whole(table) is whole and torch.equal(whole, torch.cat([table, table], -1))
    table.mul_(2)
    assert torch.equal(_whole(table), 2 * whole)
    with torch.inference_mode():
        table = torch.randn(1, 3, 8)
        before = _whole(table)
        assert torch.equal(_whole(table.mul_(2)), 2 * before)


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize(
    ("one", "other", "packs"),
    [
        (FP8Linear(128, 64, bias=False), FP8Linear(128, 128, bias=False), False),  # no whole blocks, which blocks want
        (FP8Linear(128, 128, bias=False), FP8Linear(256, 128, bias=False), None),
        (FP8Linear(128, 128, bias=False), FP8Linear(128, 128), None),
        (FP8Linear(128, 128, bias=False), nn.Linear(128, 128), None),
        (nn.Linear(128, 128), nn.Linear(128, 128, dtype=torch.bfloat16), None),
        (nn.Linear(128, 128), nn.Linear(128, 128, bias=False), None),
    ],
)
def test_linears_that_cannot_be_one_stay_where_they_are(one, other, packs, blocks):
    places = one.weight.data_ptr(), other.weight.data_ptr()
    assert linears.pack([one, other], blocks=blocks) == (packs is False and not blocks)
    assert (places == (one.weight.data_ptr(), other.weight.data_ptr())) == (packs is None or blocks)


def test_what_saves_a_model_sees_the_same_tensors(tmp_path):
    model, plain = in_fp8(**WIDE), in_fp8(**WIDE)
    optimize(model)
    for which, path in ((model, tmp_path / "fused"), (plain, tmp_path / "plain")):
        save_fp8_checkpoint(which, path)
    from safetensors.torch import load_file

    fused, expected = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("fused", "plain"))
    assert fused.keys() == expected.keys()
    assert all(torch.equal(fused[key].view(torch.uint8), expected[key].view(torch.uint8)) for key in fused)


def test_a_copy_of_the_model_is_fused_by_itself():
    model = MODELS[NAME].build()
    optimize(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    expected = MODELS[NAME].build()
    expected.load_state_dict(other.state_dict())
    assert distance(logits(other), logits(expected)) <= 1e-5


def test_outputs_that_transformers_records_are_recorded():
    model = MODELS[NAME].build()
    how = {"output_router_logits": True, "output_hidden_states": True}
    with torch.no_grad():
        before = model(input_ids=prompt(), **how)
        optimize(model)
        after = model(input_ids=prompt(), **how)
    assert len(before.router_logits) == len(after.router_logits) == 2
    for one, other in zip(
        before.router_logits + before.hidden_states, after.router_logits + after.hidden_states, strict=True
    ):
        assert distance(other, one) <= 1e-5
    layer = model.model.layers[0]
    assert layer.mlp.gate._forward_hooks and runs_as_written(layer.mlp.gate)  # those that recorded are idle now


def test_hooks_run():
    model = MODELS[NAME].build()
    optimize(model)
    seen = []
    layer = model.model.layers[0]
    for module in (layer.input_layernorm, layer.self_attn, layer.self_attn.q_norm, layer.mlp, layer.mlp.gate):
        handle = module.register_forward_hook(lambda module, inputs, output: seen.append(type(module).__name__))
        before = len(seen)
        logits(model)
        assert len(seen) == before + 1
        handle.remove()
        logits(model)
        assert len(seen) == before + 1


def test_gradients_go_through_the_models_own_forward():
    model, expected = MODELS[NAME].build(), MODELS[NAME].build()
    optimize(model)
    for which in (model, expected):
        which(input_ids=prompt(), labels=prompt()).loss.backward()
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        assert parameter.grad is None or torch.equal(parameter.grad, other.grad), name


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_autocast_runs_the_models_own_forwards(name):
    model = MODELS[name].build()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = logits(model)
        optimize(model)
        assert torch.equal(logits(model), expected)


def test_adapters_run():
    peft = pytest.importorskip("peft")
    model = MODELS[NAME].build()
    optimize(model)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted, expected = (peft.get_peft_model(which, config) for which in (model, MODELS[NAME].build()))
    expected.load_state_dict(adapted.state_dict())
    assert distance(logits(adapted.eval()), logits(expected.eval())) <= 1e-5


def test_a_forward_of_other_code_is_not_known():
    model = MODELS[NAME].build()
    layer_class = type(model.model.layers[0])

    class Other(layer_class):
        def forward(self, hidden_states, **arguments):
            return super().forward(hidden_states, **arguments) * 2

    model.model.layers[0].__class__ = Other
    assert not is_decoder_layer(model.model.layers[0]) and is_decoder_layer(model.model.layers[1])
    fuse(model)


KNOWN_IN_EARLIER_VERSIONS = {
    "qwen3_moe": ("Qwen3MoeDecoderLayer", "Qwen3MoeAttention"),
    "mixtral": ("MixtralDecoderLayer", "MixtralAttention"),
    "qwen2_moe": ("Qwen2MoeAttention",),
    "glm4_moe": ("Glm4MoeAttention",),
    "deepseek_v3": ("DeepseekV3Attention",),
    "gpt_oss": ("GptOssDecoderLayer", "GptOssAttention"),
}
"""For each digest of `LATER_DIGESTS` a class that has it; rotary embeddings, which had another body, are below."""


class Rotary(nn.Module):
    """A rotary embedding whose forward is that of transformers 5.17."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** -(torch.arange(0, 64, 2) / 64), persistent=False)
        self.rope_type, self.attention_scaling = "default", 1.25


class EarlierRotary(Rotary):
    def forward(self, x, position_ids):
        inv_freq_expanded = (
            self.inv_freq[None, :, None].expand(position_ids.shape[0], -1, 1).to(dtype=torch.float, device=x.device)
        )
        position_ids_expanded = position_ids[:, None, :].float()
        device_type = x.device.type if isinstance(x.device.type, str) and x.device.type != "mps" else "cpu"
        with maybe_autocast(device_type=device_type, enabled=False):
            freqs = (inv_freq_expanded @ position_ids_expanded).transpose(1, 2)
            emb = torch.cat((freqs, freqs), dim=-1)
            cos = emb.cos() * self.attention_scaling
            sin = emb.sin() * self.attention_scaling
        return (cos.to(dtype=x.dtype), sin.to(dtype=x.dtype))


class EarlierRotaryOfNext(Rotary):
    def forward(self, x, position_ids):
        inv_freq_expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1).to(x.device)
        position_ids_expanded = position_ids[:, None, :].float()
        device_type = x.device.type if isinstance(x.device.type, str) and x.device.type != "mps" else "cpu"
        with maybe_autocast(device_type=device_type, enabled=False):
            freqs = (inv_freq_expanded.float() @ position_ids_expanded.float()).transpose(1, 2)
            emb = torch.cat((freqs, freqs), dim=-1)
            cos = emb.cos() * self.attention_scaling
            sin = emb.sin() * self.attention_scaling
        return (cos.to(dtype=x.dtype), sin.to(dtype=x.dtype))


@pytest.mark.parametrize("kind", [EarlierRotary, EarlierRotaryOfNext])
def test_the_rotary_embedding_of_an_earlier_version_is_known(kind):
    module = kind()
    assert digest(kind.forward) in known_forwards.ROTARY_TABLES
    forward, what = _fused_tables(module)
    x, positions = torch.zeros(1, dtype=torch.bfloat16), torch.tensor([[0, 1, 7, 4095], [3, 8191, 100_000, 2]])
    with torch.no_grad():
        assert what == TABLES and all(map(torch.equal, forward(x, positions), module(x, positions)))


def test_a_forward_of_an_earlier_version_is_known(tmp_path):
    """It is the forward that is installed, with the cache by its earlier name, in a file of its own."""
    classes = [
        getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
        for model, names in KNOWN_IN_EARLIER_VERSIONS.items()
        for name in names
    ]
    sources = []
    for index, cls in enumerate(classes):
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward)))).body[0]
        tree.name, tree.decorator_list, tree.returns = f"forward_{index}", [], None
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                node.annotation = None
        sources.append(re.sub(r"\bcache\b", "past_key_values", ast.unparse(tree)).replace(", kwargs=kwargs)", ")"))
    (tmp_path / "earlier.py").write_text("\n\n".join(sources))
    spec = importlib.util.spec_from_file_location("earlier", tmp_path / "earlier.py")
    spec.loader.exec_module(earlier := importlib.util.module_from_spec(spec))
    for index, cls in enumerate(classes):
        assert digest(getattr(earlier, f"forward_{index}")) == digest(cls.forward), cls
    assert {digest(cls.forward) for cls in classes} == set(LATER_DIGESTS.values()) - known_forwards.ROTARY_TABLES.keys()


def test_a_decoder_says_that_it_cannot_fuse(monkeypatch):
    from fp8moe.decode import decoder

    found = decoder.Capabilities(), {"fused": "the step raised: out of registers"}
    monkeypatch.setattr(decoder, "find_capabilities", lambda *arguments: found)
    with pytest.warns(UserWarning, match="^GraphDecoder: Qwen3MoeForCausalLM runs unfused: .*out of registers$"):
        made = decoder.GraphDecoder(MODELS[NAME].build(), max_length=16)
    assert made.fused == ()


def test_a_model_is_fused_once():
    model = MODELS[NAME].build()
    changed = optimize(model)
    with pytest.raises(ValueError, match="is fused already; call .restore()"):
        optimize(model)
    changed.restore()
    changed.restore()
    assert optimize(model)
    with pytest.raises(TypeError, match="^model: expected an nn.Module, got int"):
        optimize(3)
    assert optimize(nn.Linear(2, 2)) == ()


@pytest.mark.parametrize("name", [NAME, "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"])
def test_compiled(name, fresh_compiler):
    """Looking for known code breaks no graph, and what does break leaves the logits as they are."""
    model = MODELS[name].build()
    fuse(model)
    expected, reasons = logits(model), torch._dynamo.utils.counters["graph_break"]
    reasons.clear()
    assert distance(logits(torch.compile(model, backend="eager")), expected) <= 1e-5
    assert not any("inspect" in reason or "skipped" in reason for reason in reasons), reasons
