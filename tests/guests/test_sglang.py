"""integrations/sglang on SGLang's structures and hooks, which need no GPU: `import sglang` and its Python are enough.

What SGLang imports at once and these parts do not use (torchvision, IPython, datasets) is replaced where it is missing.
"""

import importlib
import logging
import sys
import types
from importlib.machinery import ModuleSpec
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
    pytest.skip("sglang is not installed; its Python files and orjson are enough", allow_module_level=True)

DISTRIBUTION = Path(__file__).parents[2] / "integrations/sglang"
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 256, 128, 8, 2


class Anything(type):
    """Classes with any attribute, each such a class."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Missing:
    """Finds modules that are not installed, in which any name is `Anything`."""

    def __init__(self, *names):
        self.names = [name for name in names if find_spec(name) is None]

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.names else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__version__ = "0"
        module.__getattr__ = lambda name: getattr(Anything(spec.name, (), {}), name)
        return module

    def exec_module(self, module):
        pass


@pytest.fixture(scope="module")
def sglang():
    """SGLang's modules in this process, with the hooks applied as its load_plugins does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "meta_path", [*sys.meta_path, Missing("torchvision", "IPython", "datasets")])
        patch.syspath_prepend(str(DISTRIBUTION))
        patch.setenv("FP8MOE_SGLANG", "1")
        patch.setenv("FP8MOE_BACKEND", "reference")
        patch.delenv("FP8MOE_STRICT", raising=False)
        import fp8moe_sglang

        parts = "plugins.hook_registry", "layers.moe.moe_runner.base", "layers.moe.moe_runner.triton"
        parts += "layers.moe.topk", "layers.moe.token_dispatcher.standard", "layers.quantization.fp8_utils"
        modules = {part.rpartition(".")[2]: importlib.import_module(f"sglang.srt.{part}") for part in parts}
        fp8moe_sglang.register()
        modules["hook_registry"].HookRegistry.apply_hooks()
        yield SimpleNamespace(**modules)


@pytest.fixture
def log(sglang, caplog):
    from fp8moe_sglang import hooks

    hooks._say.cache_clear()
    caplog.set_level(logging.INFO, "sglang.fp8moe")
    yield lambda: [record.getMessage() for record in caplog.records if record.name == "sglang.fp8moe"]


def test_sglang_finds_the_plugin(sglang):
    import fp8moe_sglang

    found = entry_points(group="sglang.srt.plugins", name="fp8moe")
    if not found:
        pytest.skip("the distribution fp8moe-sglang is not installed")
    assert found["fp8moe"].load().__module__ == fp8moe_sglang.__name__
    assert importlib.import_module("sglang.srt.plugins").GENERAL_PLUGINS_GROUP == "sglang.srt.plugins"


def quantized(*shape):
    return fp8moe.quantize_128x128(torch.randn(shape) * shape[-1] ** -0.5)


def layer(sglang, **options):
    up, down = quantized(EXPERTS, 2 * INTERMEDIATE, HIDDEN), quantized(EXPERTS, HIDDEN, INTERMEDIATE)
    scales = {"w13_scale": up.scale, "w2_scale": down.scale, "block_shape": [128, 128], "use_fp8_w8a8": True}
    return up, down, sglang.triton.TritonMoeQuantInfo(up.data, down.data, **scales | options)


def dispatched(sglang, tokens):
    x, logits = torch.randn(tokens, HIDDEN).bfloat16(), torch.rand(tokens, EXPERTS)
    ids = logits.argsort(1)[:, :TOP_K].int()
    routing = sglang.topk.StandardTopKOutput(torch.rand(tokens, TOP_K), ids, logits)
    return sglang.standard.StandardDispatchOutput(x, None, routing)


def config(sglang, **options):
    """One of two ranks."""
    return sglang.base.MoeRunnerConfig(num_experts=2 * EXPERTS, num_local_experts=EXPERTS, **options)


def fused(sglang):
    return sglang.base.FusedOpPool.get_fused_func("none", "triton")


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("scaling", [None, 2.5])
def test_experts(sglang, log, monkeypatch, tokens, scaling):
    monkeypatch.setenv("FP8MOE_STRICT", "1")
    up, down, quant_info = layer(sglang)
    tokens = dispatched(sglang, tokens)
    x, (weights, ids, _) = tokens.hidden_states, tokens.topk_output
    ids[::2, 0] = -1  # elsewhere
    before = x.clone()
    result = fused(sglang)(tokens, quant_info, config(sglang, routed_scaling_factor=scaling))
    assert isinstance(result, sglang.standard.StandardCombineInput) and torch.equal(x, before)
    expected = dense(up, down, x, weights * (scaling or 1.0), ids)
    assert (result.hidden_states - expected).norm() <= 0.06 * expected.norm()
    assert log() == ["fp8moe: experts (8, 128, 256, 2): on fp8moe"]


def test_other_runners_are_sglangs(sglang):
    pool = sglang.base.FusedOpPool
    assert pool.get_fused_func("none", "no such runner") is None
    assert all(func is pool.get_fused_func(*key) for key, func in pool._fused_funcs.items() if key[1] != "triton")


@pytest.mark.parametrize(
    ("quantization", "options", "why"),
    [
        ({"block_shape": None}, {}, r"weights that are not FP8 in blocks of \[128, 128\]"),
        ({"use_fp8_w8a8": False}, {}, "weights that are not FP8"),
        ({"w2_scale": torch.ones(1, dtype=torch.int32)}, {}, "scales in .*, not float32"),
        ({"b2": torch.zeros(1)}, {}, "biases"),
        ({"a2_scale": torch.ones(1)}, {}, "static scales of activations"),
        ({}, {"activation": "gelu"}, "activation gelu"),
        ({}, {"is_gated": False}, "activation silu without a gate"),
        ({}, {"gemm1_clamp_limit": 7.0}, "SwiGLU with a limit or an alpha"),
        ({}, {"apply_router_weight_on_input": True}, "apply_router_weight_on_input"),
        ({}, {"no_combine": True}, "no_combine"),
    ],
)
def test_experts_that_fp8moe_does_not_run_are_sglangs(sglang, log, monkeypatch, quantization, options, why):
    *_, quant_info = layer(sglang, **quantization)
    tokens, theirs = dispatched(sglang, 3), fused(sglang).func
    call = lambda: theirs(lambda *given: given, tokens, quant_info, config(sglang, **options))  # noqa: E731
    assert call()[1] is quant_info and call()[0] is tokens
    (line,) = log()
    assert line.startswith("fp8moe: experts: on SGLang's kernels: ")
    monkeypatch.setenv("FP8MOE_STRICT", "1")
    refused(ValueError, f"fp8moe: experts: .*{why}", call)


@pytest.fixture
def linear(sglang, monkeypatch):
    monkeypatch.setenv("FP8MOE_STRICT", "1")
    return sglang.fp8_utils._dispatch_auto_backend()


@pytest.mark.parametrize("shape", [(0, HIDDEN), (1, HIDDEN), (3, 5, HIDDEN)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(linear, shape, with_bias):
    weight, x = quantized(192, HIDDEN), torch.randn(shape, dtype=torch.bfloat16)
    bias = torch.randn(192, dtype=torch.bfloat16) if with_bias else None
    expected = torch.nn.functional.linear(x.float(), fp8moe.dequantize(weight), bias.float() if with_bias else None)
    out = linear(x, weight.data, [128, 128], weight.scale, input_scale=None, bias=bias)
    assert out.dtype == torch.bfloat16 and out.shape == expected.shape
    assert (out - expected).norm() <= 0.05 * expected.norm()


def test_linear_of_quantized_input(linear):
    weight, x = quantized(192, HIDDEN), fp8moe.quantize_1x128(torch.randn(7, HIDDEN))
    out = linear(x.data, weight.data, [128, 128], weight.scale, input_scale=x.scale.contiguous())
    assert torch.equal(out, fp8moe.gemm(x, weight))


def test_linears_that_fp8moe_does_not_take_are_sglangs(sglang, log, linear, monkeypatch):
    weight, x = quantized(60, HIDDEN), torch.randn(2, HIDDEN).bfloat16()
    with pytest.raises(ValueError, match=r"linears: a weight \(60, 256\): it takes multiples of 8 output"):
        linear(x, weight.data, [128, 128], weight.scale)
    refused(ValueError, "activations in torch.float16", linear, x.half(), weight.data, [128, 128], weight.scale)
    refused(ValueError, "scales in torch.int32", linear, x, weight.data, [128, 128], weight.scale.int())
    refused(ValueError, r"blocks of \[32, 32\]", linear, x, weight.data, [32, 32], weight.scale)
    monkeypatch.delenv("FP8MOE_BACKEND")
    refused(ValueError, "needs a Hopper GPU", linear, x, weight.data, [128, 128], weight.scale)
    monkeypatch.delenv("FP8MOE_STRICT")
    given = linear.func(lambda *given, **more: (given, more), x, weight.data, [128, 128], weight.scale, weight_bf16=1)
    assert given == ((x, weight.data, [128, 128], weight.scale, None, None), {"weight_bf16": 1})
    assert log() == [
        "fp8moe: linears: on SGLang's kernels: it needs a Hopper GPU (sm_90); "
        "FP8MOE_BACKEND=reference runs anywhere, slowly"
    ]


def test_a_server_compiles_before_it_serves(sglang, monkeypatch):
    from fp8moe_sglang import hooks

    warmed = []
    monkeypatch.setattr(fp8moe, "warm", lambda shapes, counts, dtype: warmed.append((shapes, counts, dtype)))
    monkeypatch.setattr(hooks, "_max_tokens", lambda: 8192)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    hooks._warm.cache_clear()
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    for _ in range(48):
        hooks._taken("linear", (192, HIDDEN), on_gpu)
    assert warmed == [([(192, HIDDEN)], [8192], torch.bfloat16)]


@pytest.mark.parametrize(("chunk", "tokens"), [(8192, 8192), (-1, 16384), (None, 16384)])
def test_tokens_of_a_forward_pass(sglang, monkeypatch, chunk, tokens):
    from fp8moe_sglang import hooks

    settings = SimpleNamespace(chunked_prefill_size=chunk, max_prefill_tokens=16384)
    if find_spec("sglang.srt.runtime_context"):
        monkeypatch.setattr("sglang.srt.runtime_context.get_schedule", lambda: settings)
    else:
        monkeypatch.setattr("sglang.srt.server_args.get_global_server_args", lambda: settings)
    assert hooks._max_tokens() == tokens


def test_deterministic_inference_is_batch_invariant(sglang, monkeypatch):
    from contextlib import ExitStack

    from fp8moe_sglang import hooks

    from fp8moe.runtime import config as fp8moe_config

    monkeypatch.setattr("sglang.srt.batch_invariant_ops.is_batch_invariant_mode_enabled", lambda: True)
    with ExitStack() as modes:
        monkeypatch.setattr(hooks, "_modes", modes)
        hooks._follow_batch_invariance.cache_clear()
        hooks._taken("linear", (192, HIDDEN), torch.zeros(1))
        assert fp8moe_config.settings.batch_invariant
    assert not fp8moe_config.settings.batch_invariant
