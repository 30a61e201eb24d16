"""integrations/sglang on SGLang's own layers, dispatcher structures and command line, which need no GPU.

`python -m tools.sglang_serving` runs this with what SGLang imports; a whole server is run there as well.
"""

import importlib
import json
import logging
import sys
from contextlib import ExitStack
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fp8moe
from tests.errors import refused
from tests.experts_cases import dense

if find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)

DISTRIBUTION = Path(__file__).parents[2] / "integrations/sglang"
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 256, 128, 8, 2
QUANTIZATION = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODEL = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN, "head_dim": 128}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 512}
MODEL |= {"moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
MODEL |= {"dtype": "bfloat16", "max_position_embeddings": 256}


def attributes():
    """Map the names of the attributes of SGLang's modules and of their classes to the objects that they are."""
    found = {}
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "sglang"]:
        for name, value in list(vars(module).items()):
            found[module.__name__, name] = value
            if isinstance(value, type) and value.__module__.partition(".")[0] == "sglang":
                found |= {(value.__module__, value.__qualname__, name): own for name, own in vars(value).items()}
    return found


@pytest.fixture(scope="module")
def sglang(tmp_path_factory):
    """SGLang's modules in this process: the plug-in is registered, `--quantization fp8moe` is parsed and published."""
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(MODEL | {"quantization_config": QUANTIZATION}))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DISTRIBUTION))
        patch.setenv("FP8MOE_BACKEND", "reference")
        import fp8moe_sglang
        from fp8moe_sglang import quantization

        parts = "layers.linear", "layers.moe.fused_moe_triton", "layers.moe.moe_runner.base", "layers.moe.topk"
        parts += "layers.moe.token_dispatcher.standard", "layers.quantization", "layers.quantization.unquant"
        parts += "plugins.hook_registry", "runtime_context", "server_args", "configs.model_config", "layers.moe.utils"
        modules = {part.rpartition(".")[2]: importlib.import_module(f"sglang.srt.{part}") for part in parts}
        modules |= {"ours": quantization, "before": attributes()}
        fp8moe_sglang.register()
        fp8moe_sglang.register()  # SGLang may call it again
        modules["hook_registry"].HookRegistry.apply_hooks()
        modules["after"] = attributes()
        command = ["--model-path", str(model), "--quantization", "fp8moe", "--device", "cpu"]
        args = modules["args"] = modules["server_args"].prepare_server_args(command)
        args.resolve_once()
        context = modules["runtime_context"]
        context.publish(args, role="scheduler", ranks=context.SpawnRanks(world_rank=0, gpu_id=0))
        yield SimpleNamespace(**modules)


@pytest.fixture
def config(sglang):
    sglang.ours._say.cache_clear()
    return sglang.quantization.get_quantization_config("fp8moe").from_config(dict(QUANTIZATION))


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "sglang.fp8moe")
    yield lambda: [record.getMessage() for record in caplog.records if record.name == "sglang.fp8moe"]


def test_sglang_finds_the_plugin(sglang):
    import fp8moe_sglang

    found = entry_points(group="sglang.srt.plugins", name="fp8moe")
    if not found:
        pytest.skip("the distribution fp8moe-sglang is not installed")
    assert found["fp8moe"].load().__module__ == fp8moe_sglang.__name__
    assert importlib.import_module("sglang.srt.plugins").GENERAL_PLUGINS_GROUP == "sglang.srt.plugins"


def test_nothing_of_sglang_is_wrapped_or_replaced(sglang):
    assert len(sglang.before) > 10000 and sglang.before.keys() == sglang.after.keys()
    assert [name for name, value in sglang.before.items() if sglang.after[name] is not value] == []
    assert ("sglang.srt.layers.quantization.fp8", "Fp8MoEMethod", "apply") in sglang.before
    assert not sglang.hook_registry.HookRegistry._hooks and not sglang.hook_registry.HookRegistry._patched


def test_command_line(sglang):
    model = sglang.model_config.ModelConfig.from_server_args(sglang.args)
    assert sglang.args.quantization == model.quantization == "fp8moe"


def test_checkpoints_that_are_refused(sglang, monkeypatch):
    of = sglang.quantization.get_quantization_config("fp8moe")
    refused(ValueError, "does not run checkpoints with weight_block_size None", of)
    for blocks in (None, [32, 32]):
        refused(ValueError, "blocks of \\[128, 128\\]", of.from_config, QUANTIZATION | {"weight_block_size": blocks})
    refused(ValueError, "experts in NVFP4", of.from_config, QUANTIZATION | {"moe_quant_algo": "NVFP4"})
    mxfp4 = of.from_config(dict(QUANTIZATION))
    mxfp4.is_fp4_experts = True  # as SGLang's loader sets it
    refused(ValueError, "experts in MXFP4", mxfp4.get_quant_method, None, "")
    assert mxfp4.get_supported_act_dtypes() == [torch.bfloat16]
    for found, asked in (("fp8", None), ("fp8", "fp8"), ("mxfp8", "fp8moe")):
        assert of.override_quantization_method({"quant_method": found}, asked) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    monkeypatch.delenv("FP8MOE_BACKEND")
    refused(ValueError, "without a Hopper GPU", of.from_config, QUANTIZATION)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    of.from_config(dict(QUANTIZATION))


# ---- linears ----


def quantized(*shape):
    return fp8moe.quantize_128x128(torch.randn(shape) * shape[-1] ** -0.5)


@pytest.mark.parametrize("shape", [(0, HIDDEN), (1, HIDDEN), (3, 5, HIDDEN)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(sglang, config, log, shape, bias):
    torch.set_default_dtype(torch.bfloat16)  # as SGLang's loader does
    try:
        layer = sglang.linear.ReplicatedLinear(HIDDEN, 192, bias=bias, quant_config=config, prefix="proj")
    finally:
        torch.set_default_dtype(torch.float32)
    weight, x = quantized(192, HIDDEN), torch.randn(shape, dtype=torch.bfloat16)
    layer.weight_loader(layer.weight, weight.data)
    layer.weight_loader(layer.weight_scale_inv, weight.scale)
    if bias:
        layer.bias.data.normal_()
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(layer.weight_scale_inv, weight.scale) and layer.weight_scale_inv.dtype == torch.float32
    out, _ = layer(x)
    expected = torch.nn.functional.linear(x.float(), fp8moe.dequantize(weight), layer.bias.float() if bias else None)
    assert out.dtype == torch.bfloat16 and out.shape == expected.shape
    assert (out - expected).norm() <= 0.05 * expected.norm()
    assert log() == ["fp8moe: linear (192, 256): on fp8moe"]


def test_linear_of_two_shards(sglang, config):
    """Gate and up in one weight: SGLang loads each shard, and its scales, by a loader that it chooses by a name."""
    build = sglang.linear.MergedColumnParallelLinear
    layer = build(HIDDEN, [128, 256], bias=False, quant_config=config, prefix="gate_up")
    for shard, weight in enumerate(weights := [quantized(128, HIDDEN), quantized(256, HIDDEN)]):
        for parameter, loaded in ((layer.weight, weight.data), (layer.weight_scale_inv, weight.scale)):
            parameter.weight_loader(parameter, loaded, shard)
    x = torch.randn(7, HIDDEN).bfloat16()
    expected = torch.cat([fp8moe.linear(x, weight) for weight in weights], 1)
    assert torch.equal(layer(x)[0], expected)


def test_layers_that_the_checkpoint_does_not_quantize(sglang):
    config = sglang.ours.Fp8moeConfig.from_config(QUANTIZATION | {"modules_to_not_convert": ["lm_head"]})
    build = sglang.linear.ReplicatedLinear
    layers = [build(HIDDEN, 64, bias=False, quant_config=config, prefix=name) for name in ("lm_head", "proj")]
    kinds = [sglang.unquant.UnquantizedLinearMethod, sglang.ours.Fp8moeLinearMethod]
    assert [type(layer.quant_method) for layer in layers] == kinds
    assert config.is_linear_unquantized("lm_head") and not config.is_linear_unquantized("proj")


def test_a_method_that_is_not_known_is_refused(sglang, config, monkeypatch):
    """A later SGLang may choose another method for FP8 layers, which must not run in place of fp8moe's."""

    class Later(sglang.ours.Fp8LinearMethod):
        pass

    monkeypatch.setattr(sglang.ours.Fp8Config, "get_quant_method", lambda self, layer, prefix: Later(self))
    refused(ValueError, "layers for which this SGLang takes Later;", config.get_quant_method, None, "")


# ---- experts ----


def experts(sglang, config, **options):
    """A layer of experts as SGLang builds it, on one of two ranks, with random weights."""
    fused = sglang.fused_moe_triton.FusedMoE
    layer = fused.__new__(fused)
    torch.nn.Module.__init__(layer)
    layer.with_bias = options.pop("with_bias", False)
    layer.moe_tp_size, layer.num_local_experts = 1, EXPERTS
    runs = sglang.base.MoeRunnerConfig(num_experts=2 * EXPERTS, num_local_experts=EXPERTS, top_k=TOP_K, **options)
    layer.moe_runner_config = runs
    layer.quant_method = config.get_quant_method(layer, "model.layers.0.mlp.experts")
    assert type(layer.quant_method) is sglang.ours.Fp8moeMoEMethod
    sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size_per_partition": INTERMEDIATE}
    layer.quant_method.create_weights(layer, **sizes, params_dtype=torch.bfloat16, weight_loader=None)
    layer.quant_method.create_moe_runner(layer, runs)
    up, down = quantized(EXPERTS, 2 * INTERMEDIATE, HIDDEN), quantized(EXPERTS, HIDDEN, INTERMEDIATE)
    for name, weight in (("w13_weight", up), ("w2_weight", down)):
        getattr(layer, name).data.copy_(weight.data)
        getattr(layer, f"{name}_scale_inv").data.copy_(weight.scale)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, up, down


def dispatched(sglang, tokens):
    x, logits = torch.randn(tokens, HIDDEN).bfloat16(), torch.rand(tokens, EXPERTS)
    ids = logits.argsort(1)[:, :TOP_K].int()
    routing = sglang.topk.StandardTopKOutput(torch.rand(tokens, TOP_K), ids, logits)
    return sglang.standard.StandardDispatchOutput(x, None, routing)


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("scaling", [None, 2.5])
def test_experts(sglang, config, log, tokens, scaling):
    layer, up, down = experts(sglang, config, routed_scaling_factor=scaling)
    tokens = dispatched(sglang, tokens)
    x, (weights, ids, _) = tokens.hidden_states, tokens.topk_output
    ids[::2, 0] = -1  # elsewhere
    before = x.clone()
    result = layer.quant_method.apply(layer, tokens)
    assert isinstance(result, sglang.standard.StandardCombineInput) and torch.equal(x, before)
    expected = dense(up, down, x, weights * (scaling or 1.0), ids)
    assert (result.hidden_states - expected).norm() <= 0.06 * expected.norm()
    assert layer.quant_method.get_moe_runner_backend(layer).value == "fp8moe"
    assert log() == ["fp8moe: experts (8, 128, 256, 2): on fp8moe"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"with_bias": True}, "experts with biases"),
        ({"activation": "gelu"}, "experts with activation gelu;"),
        ({"is_gated": False}, "experts with activation silu without a gate"),
        ({"gemm1_beta": 1.0}, "experts with a limit, an alpha or a beta in SwiGLU"),
        ({"gemm1_clamp_limit": 7.0}, "experts with a limit, an alpha or a beta in SwiGLU"),
        ({"swiglu_limit": 10.0}, "experts with a limit, an alpha or a beta in SwiGLU"),
        ({"apply_router_weight_on_input": True}, "experts with apply_router_weight_on_input"),
        ({"no_combine": True}, "experts with no_combine"),
    ],
)
def test_experts_that_are_refused(sglang, config, options, what):
    refused(ValueError, f"--quantization fp8moe does not run {what}", experts, sglang, config, **options)


def test_options_that_are_refused(sglang, config, monkeypatch):
    moe = sglang.utils
    with monkeypatch.context() as patch:
        patch.setattr(sglang.ours, "get_moe_runner_backend", lambda: moe.MoeRunnerBackend.TRITON)
        refused(ValueError, "experts with --moe-runner-backend triton", experts, sglang, config)
    with monkeypatch.context() as patch:
        patch.setattr(sglang.ours, "get_moe_a2a_backend", lambda: moe.MoeA2ABackend.DEEPEP)
        refused(ValueError, "experts with --moe-a2a-backend deepep", experts, sglang, config)
    layer, *_ = experts(sglang, config)
    backend = layer.quant_method.runner.runner_backend
    refused(ValueError, "LoRA on experts", layer.quant_method.get_moe_quant_info, layer, backend)
    settings(sglang, monkeypatch, paged=True)
    refused(ValueError, "experts with --enable-paged-experts", experts, sglang, config)
    settings(sglang, monkeypatch, gemm="triton")
    refused(ValueError, "linears with --fp8-gemm-backend triton", sglang.ours.Fp8moeConfig.from_config, QUANTIZATION)


def settings(sglang, monkeypatch, gemm="auto", paged=False, deterministic=False):
    """Set what SGLang's command line may say besides."""
    found = SimpleNamespace(
        kernel=SimpleNamespace(fp8_gemm_runner_backend=gemm),
        moe=SimpleNamespace(enable_paged_experts=paged),
        deterministic=SimpleNamespace(enable_deterministic_inference=deterministic),
    )
    monkeypatch.setattr(sglang.ours, "get_exec", lambda: found)


# ---- experts and linears ----


def test_a_server_compiles_before_it_serves(sglang, config, monkeypatch):
    warmed = []
    monkeypatch.setattr(fp8moe, "warm", lambda shapes, counts: warmed.append((shapes, counts)))
    monkeypatch.setattr(sglang.ours, "_max_tokens", lambda: 8192)
    for _ in range(48):
        config.taken("linear", (192, HIDDEN))
        config.taken("experts", (EXPERTS, INTERMEDIATE, HIDDEN, TOP_K))
    for _ in range(48):
        config.warm(SimpleNamespace(is_cuda=True))
    assert warmed == [([(EXPERTS, INTERMEDIATE, HIDDEN, TOP_K), (192, HIDDEN)], [8192])]


@pytest.mark.parametrize(("chunk", "tokens"), [(8192, 16384), (-1, 32768), (None, 32768)])
def test_tokens_of_a_forward_pass(sglang, monkeypatch, chunk, tokens):
    schedule = SimpleNamespace(chunked_prefill_size=chunk, max_prefill_tokens=16384)
    monkeypatch.setattr(sglang.ours, "get_schedule", lambda: schedule)
    monkeypatch.setattr(sglang.ours, "get_parallel", lambda: SimpleNamespace(attn_dp_size=2))
    assert sglang.ours._max_tokens() == tokens


def test_settings_are_where_sglang_has_them(sglang):
    context = sglang.runtime_context
    assert context.get_exec().kernel.fp8_gemm_runner_backend == "auto"
    assert (
        context.get_exec().moe.enable_paged_experts is context.get_exec().deterministic.enable_deterministic_inference
    )
    assert sglang.ours._max_tokens() > 0


def test_deterministic_inference_is_batch_invariant(sglang, monkeypatch):
    from fp8moe.runtime import config as fp8moe_config

    settings(sglang, monkeypatch, deterministic=True)
    with ExitStack() as modes:
        monkeypatch.setattr(sglang.ours, "_batch_invariant", modes)
        sglang.ours.Fp8moeConfig.from_config(dict(QUANTIZATION))
        assert fp8moe_config.settings.batch_invariant
    assert not fp8moe_config.settings.batch_invariant
