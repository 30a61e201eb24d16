"""integrations/vllm on vLLM's Python files, which need no GPU and none of its libraries: `import vllm` is enough.

tools/vllm_serving.py is the test of a whole server.
"""

import logging
import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fp8moe
from tests.checkpoint_formats import int4, nvfp4, nvfp4_of_modelopt
from tests.errors import refused
from tests.experts_cases import dense

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed; its Python files are enough", allow_module_level=True)

DISTRIBUTION = Path(__file__).parents[2] / "integrations/vllm"
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 256, 128, 8, 2
CHECKPOINT = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """vLLM in this process, as far as layers need it: one rank, which has no GPU, and the plug-in."""
    from vllm.config import CompilationConfig, DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.v1.worker.workspace import init_workspace_manager

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DISTRIBUTION))
        patch.setenv("FP8MOE_BACKEND", "reference")
        patch.delenv("FP8MOE_STRICT", raising=False)
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        import fp8moe_vllm

        fp8moe_vllm.register()
        fp8moe_vllm.register()  # as every process may
        config = VllmConfig(
            device_config=DeviceConfig(device="cpu"), compilation_config=CompilationConfig(mode=0, custom_ops=["none"])
        )
        with set_current_vllm_config(config):
            store = f"file://{tmp_path_factory.mktemp('vllm') / 'store'}"
            init_distributed_environment(1, 0, store, 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            init_workspace_manager(torch.device("cpu"))
            config.model_config = SimpleNamespace(dtype=torch.bfloat16)
            yield config
        torch.distributed.destroy_process_group()


@pytest.fixture
def checkpoint(vllm):
    """The quantization of a checkpoint, as vLLM makes it."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    return get_quantization_config("fp8moe").from_config(CHECKPOINT)


@pytest.fixture
def log(vllm):
    """What the plug-in says, however often it has said it."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("vllm.fp8moe")
    from vllm import logger as module

    for once in (module._print_info_once, module._print_warning_once):
        once.cache_clear()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)


def experts_layer(quantization, loaded=True, **options):
    """The routed experts of a layer, with random weights; ids and weights come with the calls."""
    from vllm.model_executor.layers import fused_moe

    make = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    prefix = f"model.layers.{experts_layer.made}.mlp.experts"  # each must have a name of its own
    experts_layer.made += 1
    runner = make(
        **sizes | options, params_dtype=torch.bfloat16, renormalize=True, quant_config=quantization, prefix=prefix
    )
    layer = runner.routed_experts
    layer.runner = (runner,)  # no module of the layer
    for name in ("w13", "w2"):
        weight, blocks = getattr(layer, f"{name}_weight"), hasattr(layer, f"{name}_weight_scale_inv")
        values = torch.randn(weight.shape) * weight.shape[-1] ** -0.5
        data, scale = fp8moe.quantize_128x128(values) if blocks else in_channels(values)
        weight.data.copy_(data)
        getattr(layer, f"{name}_weight_scale_inv" if blocks else f"{name}_weight_scale").data.copy_(scale)
    if loaded:
        layer.quant_method.process_weights_after_loading(layer)
    return layer


experts_layer.made = 0


def routed(tokens, top_k=TOP_K):
    ids = torch.rand(tokens, EXPERTS).argsort(1)[:, :top_k].int()
    return torch.randn(tokens, HIDDEN).bfloat16(), torch.rand(tokens, top_k), ids


def weights_of(layer):
    return (layer.w13_weight, layer.w13_weight_scale_inv), (layer.w2_weight, layer.w2_weight_scale_inv)


@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_experts(checkpoint, tokens):
    layer = experts_layer(checkpoint)
    x, weights, ids = routed(tokens)
    ids[tokens // 2 :, 0] = -1  # of padding
    out = layer.forward_modular(x, weights, ids)
    assert torch.equal(out, fp8moe.experts(x, ids, weights, *weights_of(layer))) and out.dtype == torch.bfloat16
    expected = dense(*weights_of(layer), x, weights, ids)
    assert (out - expected).norm() <= 0.06 * expected.norm()


def test_vllms_router_notes_what_the_experts_get(vllm, checkpoint, monkeypatch):
    """So enable_return_routed_experts needs nothing of the plug-in."""
    from vllm.forward_context import set_forward_context

    x, weights, ids = routed(9)
    layer = experts_layer(checkpoint, custom_routing_function=lambda *args, **how: (weights, ids))
    (runner,), noted, given = layer.runner, [], []
    assert not layer.quant_method.is_monolithic  # of others the capturer would ask the kernel
    runner.router.set_capture_fn(noted.append)
    apply = layer.quant_method.apply
    monkeypatch.setattr(layer.quant_method, "apply", lambda *args, **how: given.append(how) or apply(*args, **how))
    with set_forward_context(None, vllm):
        out = runner(x, torch.randn(9, EXPERTS))
    assert torch.equal(noted[0], ids) and torch.equal(given[0]["topk_ids"], ids)
    assert torch.equal(out, fp8moe.experts(x, ids, weights, *weights_of(layer)))


ELSEWHERE = [-1] * 4


@pytest.mark.parametrize(
    ("here", "first"),
    [
        ([*ELSEWHERE, 0, 1, 2, 3, 4, 5, 6, 7, *ELSEWHERE], 4),
        ([*ELSEWHERE, 0, 2, 1, 3, 4, 5, 6, 7, *ELSEWHERE], None),
        ([0, 1, 2, *ELSEWHERE, 3, 4, 5, *ELSEWHERE, 6, 7], None),
    ],
)
def test_experts_of_another_rank_add_nothing(checkpoint, monkeypatch, here, first):
    layer = experts_layer(checkpoint, loaded=False)
    layer.register_buffer("_expert_map", torch.tensor(here, dtype=torch.int32))
    layer.quant_method.process_weights_after_loading(layer)
    x, weights, _ = routed(9)
    ids = torch.rand(9, len(here)).argsort(1)[:, :TOP_K].int()
    expected = dense(*weights_of(layer), x, weights, layer.expert_map[ids])
    asked, op = [], fp8moe.experts
    monkeypatch.setattr(fp8moe, "experts", lambda *args, **more: asked.append(more) or op(*args, **more))
    out = layer.forward_modular(x, weights, ids)
    assert 0 < (out - expected).norm() <= 0.06 * expected.norm()
    assert asked[0].get("first_expert") == first and ("expert_map" in asked[0]) == (first is None)
    layer.register_buffer("_expert_map", layer.expert_map.flip(0))  # as when there are more ranks later
    moved = layer.forward_modular(x, weights, ids)
    assert torch.equal(moved, op(x, ids, weights, *weights_of(layer), expert_map=layer.expert_map))


def test_router_weights_on_the_input(checkpoint):
    layer = experts_layer(checkpoint, top_k=1, apply_router_weight_on_input=True)
    x, weights, ids = routed(5, top_k=1)
    expected = dense(*weights_of(layer), (x * weights).bfloat16(), torch.ones(5, 1), ids)
    for out in (layer.forward_modular(x, weights, ids), modular_kernel(layer, x, weights, ids)):
        assert (out - expected).norm() <= 0.06 * expected.norm()
    layer = experts_layer(checkpoint, apply_router_weight_on_input=True)
    refused(ValueError, "expected one expert a token, got 2", layer.forward_modular, *routed(5))


def modular_kernel(layer, x, weights, ids):
    """What runs where the method does not call the experts itself: prepare, experts, finalize."""
    return layer.quant_method.moe_kernel.apply(
        x,
        layer.w13_weight,
        layer.w2_weight,
        weights,
        ids,
        activation=layer.activation,
        global_num_experts=EXPERTS,
        expert_map=layer.expert_map,
        apply_router_weight_on_input=layer.apply_router_weight_on_input,
    )


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("mapped", [False, True])
def test_the_modular_kernel_gives_the_same_bits(checkpoint, tokens, mapped):
    layer = experts_layer(checkpoint)
    if mapped:
        layer.register_buffer("_expert_map", torch.tensor([1, -1, 0, -1, 3, 2, 5, 4], dtype=torch.int32))
    x, weights, ids = routed(tokens)
    ids[:1] = -1
    assert torch.equal(modular_kernel(layer, x, weights, ids), layer.forward_modular(x, weights, ids))


@pytest.mark.parametrize("first", [0, EXPERTS])
def test_data_parallel_attention(checkpoint, monkeypatch, first):
    """Rows of both ranks come to each unquantized, and each gives the sums of its experts for all of them."""
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.model_executor.layers.fused_moe.prepare_finalize import naive_dp_ep

    x, weights, _ = routed(9)
    ids = torch.rand(9, 2 * EXPERTS).argsort(1)[:, :TOP_K].int()
    here = slice(0, 4) if first == 0 else slice(4, 9)
    sums = []

    class Group:
        device_communicator = SimpleNamespace(all2all_manager=SimpleNamespace(world_size=2))

        def dispatch(self, *rows, is_sequence_parallel, extra_tensors):
            assert extra_tensors is None and not is_sequence_parallel
            for sent, every in zip(rows, (x, weights, ids), strict=True):
                assert sent.dtype == every.dtype and torch.equal(sent, every[here])
            return x, weights, ids

        def combine(self, out, is_sequence_parallel):
            sums.append(out.clone())
            return out[here]

        def combine_into_output(self, out, result, is_sequence_parallel):  # 0.33, and the next
            result.copy_(self.combine(out, is_sequence_parallel))

        def allocate_combine_input(self, *shape, **more):
            return None

    for module in (all2all_utils, naive_dp_ep):
        monkeypatch.setattr(module, "get_ep_group", Group)
    layer = changed(experts_layer(checkpoint, loaded=False), parallel={"dp_size": 2, "ep_size": 2, "use_ep": True})
    layer.quant_method = method = checkpoint.get_quant_method(layer, "model.layers.0.mlp.experts")
    method.create_weights(torch.nn.Module(), EXPERTS, HIDDEN, INTERMEDIATE, torch.bfloat16, weight_loader=None)
    assert checkpoint._unwarmed == {(): {(EXPERTS, INTERMEDIATE, HIDDEN, TOP_K): 2 * method.moe.max_num_tokens}}
    place = torch.full((2 * EXPERTS,), -1, dtype=torch.int32)
    place[first : first + EXPERTS] = torch.arange(EXPERTS)
    layer.register_buffer("_expert_map", place)
    method.process_weights_after_loading(layer)
    assert method.moe_kernel.fused_experts.first_expert[1] == first
    out = layer.forward_modular(x[here], weights[here], ids[here])
    expected = dense(*weights_of(layer), x, weights, place[ids])
    assert 0 < (sums[0] - expected).norm() <= 0.06 * expected.norm()
    assert torch.equal(out, sums[0][here])


def test_batched_experts(checkpoint):
    from fp8moe_vllm.experts import Fp8moeBatchedExperts
    from vllm.model_executor.layers.fused_moe.modular_kernel import ExpertTokensMetadata

    layer = experts_layer(checkpoint)
    method = layer.quant_method
    experts = Fp8moeBatchedExperts(method.moe, method.moe_quant_config, max_num_tokens=4, num_dispatchers=2)
    *_, shape = experts.workspace_shapes(4, 2 * INTERMEDIATE, HIDDEN, TOP_K, EXPERTS, EXPERTS, None, layer.activation)
    rows = torch.randn(shape)
    counts = torch.tensor([0, 8, 1, 3, 0, 2, 7, 5], dtype=torch.int32)
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16)
    quantized = fp8moe.quantize_1x128(rows)
    operands = {"hidden_states": quantized.data, "a1q_scale": quantized.scale, "w1": layer.w13_weight, "output": out}
    unused = dict.fromkeys(
        ("topk_weights", "topk_ids", "expert_map", "a2_scale", "workspace13", "workspace2"), torch.empty(0)
    )
    experts.apply(
        **operands | unused,
        w2=layer.w2_weight,
        activation=layer.activation,
        global_num_experts=EXPERTS,
        expert_tokens_meta=ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=None),
        apply_router_weight_on_input=False,
    )
    for expert, count in enumerate(counts.tolist()):
        ids, ones = torch.full((count, 1), expert), torch.ones(count, 1)
        expected = dense(*weights_of(layer), rows[expert, :count], ones, ids)
        assert (out[expert, :count] - expected).norm() <= 0.06 * expected.norm()


def linear(quantization, sizes=(256, 128), hidden=HIDDEN, name="gate_up_proj"):
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as vLLM makes models
    try:
        return MergedColumnParallelLinear(
            hidden, [*sizes], bias=False, quant_config=quantization, prefix=f"model.layers.1.mlp.{name}"
        )
    finally:
        torch.set_default_dtype(default)


def load(layer):
    """Puts two quantized weights into a merged linear, as a checkpoint has them; returns both in one."""
    parts = [fp8moe.quantize_128x128(torch.randn(rows, HIDDEN) / 16) for rows in layer.output_partition_sizes]
    for place, (data, scale) in enumerate(parts):
        layer.weight.weight_loader(layer.weight, data, place)
        layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, scale, place)
    layer.quant_method.process_weights_after_loading(layer)
    return torch.cat([fp8moe.dequantize(part) for part in parts])


def test_linear(checkpoint):
    from vllm.model_executor.layers.linear import WEIGHT_LOADER_V2_SUPPORTED
    from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights

    layer = linear(checkpoint)
    assert type(layer.quant_method).__name__ in WEIGHT_LOADER_V2_SUPPORTED
    weight = load(layer)
    assert layer.weight_scale_inv.dtype == torch.float32
    for shape in ((0, HIDDEN), (1, HIDDEN), (3, 5, HIDDEN)):
        x = torch.randn(shape).bfloat16()
        out, _ = layer(x)
        expected = x.float() @ weight.T
        assert out.shape == expected.shape and out.dtype == torch.bfloat16
        assert (out - expected).norm() <= 0.05 * expected.norm()
    assert torch.equal(get_and_maybe_dequant_weights(layer), weight)  # what MLA does with one


def test_linears_that_fp8moe_does_not_take_are_vllms(checkpoint, monkeypatch, log):
    from fp8moe_vllm.linear import Fp8moeLinearMethod
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

    theirs = []
    monkeypatch.setattr(Fp8LinearMethod, "create_weights", lambda self, *sizes, **more: theirs.append(sizes[1:5]))
    method = Fp8moeLinearMethod(checkpoint, "model.layers.0.self_attn.indexer")
    method.create_weights(torch.nn.Module(), HIDDEN, [60], HIDDEN, 60, torch.bfloat16, weight_loader=None)
    assert theirs == [(HIDDEN, [60], HIDDEN, 60)] and method.use_deep_gemm == Fp8LinearMethod(checkpoint).use_deep_gemm
    (line,) = log
    assert line == (
        "fp8moe: indexer: on vLLM's kernels: it takes multiples of 8 output and 16 input features, not 60 and 256"
    )
    monkeypatch.setenv("FP8MOE_STRICT", "1")
    with pytest.raises(ValueError, match="indexer: it takes multiples of 8"):
        method.create_weights(torch.nn.Module(), HIDDEN, [60], HIDDEN, 60, torch.bfloat16, weight_loader=None)


def test_layers_that_the_checkpoint_leaves_out_are_not_quantized(checkpoint):
    from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

    gate = ReplicatedLinear(HIDDEN, EXPERTS, bias=False, quant_config=checkpoint, prefix="model.layers.0.mlp.gate")
    assert type(gate.quant_method) is UnquantizedLinearMethod


def changed(layer, **options):
    """A layer whose configuration differs; of `parallel`, that of its parallelism."""
    from dataclasses import replace

    parallel = replace(layer.moe_config.moe_parallel_config, **options.pop("parallel", {}))
    layer.moe_config = replace(layer.moe_config, moe_parallel_config=parallel, **options)
    return layer


def experts_are_left(config, theirs, layer, why, monkeypatch, log):
    """Check that vLLM's own config is asked for the experts and a line says why, or, with FP8MOE_STRICT=1, an error."""
    log.clear()
    monkeypatch.setattr(theirs, "get_quant_method", lambda self, layer, prefix: "vLLM's")
    assert config.get_quant_method(layer, "model.layers.0.mlp.experts") == "vLLM's"
    (line,) = log
    assert line.startswith("fp8moe: experts: on vLLM's kernels: ") and re.search(why, line)
    monkeypatch.setenv("FP8MOE_STRICT", "1")
    refused(ValueError, f"fp8moe: experts: .*{why}", config.get_quant_method, layer, "model.layers.0.mlp.experts")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"parallel": {"pcp_size": 2, "use_ep": True}}, "prefill context parallelism"),
        (
            {"parallel": {"dp_size": 2, "all2all_backend": "deepep_low_latency"}},
            "--all2all-backend deepep_low_latency is untried; allgather_reducescatter",
        ),
        ({"parallel": {"sp_size": 2, "use_ep": True, "all2all_backend": "nixl_ep"}}, "nixl_ep is untried"),
        ({"parallel": {"all2all_backend": "passthrough"}}, "passthrough is untried"),
        ({"parallel": {"dp_size": 2}}, "untried but with --enable-expert-parallel"),
        ({"parallel": {"dp_size": 2, "ep_size": 4, "use_ep": True}}, "and without tensor parallelism"),
        ({"has_bias": True}, "experts with biases"),
        ({"swiglu_limit": 7.0}, "SwiGLU with a limit of 7.0"),
        ({"swiglu_alpha": 1.702}, "SwiGLU with an alpha of 1.702"),
        ({"is_lora_enabled": True}, "kernel does not support LoRA"),
        ({"hidden_dim": 250}, "kernel does not support 250 hidden dim"),
        ({"activation": "gelu"}, "GELU activation"),
    ],
)
def test_experts_that_fp8moe_does_not_run_are_vllms(checkpoint, monkeypatch, log, options, why):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    if "activation" in options:
        options = {"activation": MoEActivation.from_str(options["activation"])}
    layer = changed(experts_layer(checkpoint), **options)
    experts_are_left(checkpoint, Fp8Config, layer, why, monkeypatch, log)


def test_without_a_hopper_gpu_nothing_runs_unasked(checkpoint, monkeypatch):
    layer = experts_layer(checkpoint)
    monkeypatch.setenv("FP8MOE_STRICT", "1")
    monkeypatch.delenv("FP8MOE_BACKEND")
    for each, name in ((layer, "experts"), (None, "gate_up_proj")):
        with pytest.raises(ValueError, match=f"{name}: it needs a Hopper GPU"):
            checkpoint.get_quant_method(each, "model.layers.0.mlp.experts") if each else linear(checkpoint)


def test_a_vllm_with_other_names_goes_on_without_it(vllm, monkeypatch, log):
    import fp8moe_vllm

    monkeypatch.setitem(sys.modules, "fp8moe_vllm.config", None)
    fp8moe_vllm.register()
    (line,) = log
    assert line.startswith("fp8moe: no --quantization fp8moe, which is tried with vLLM 0.26.0 to 0.33.0: ")


def test_the_user_must_ask_for_it(vllm):
    from vllm.model_executor.layers.quantization import get_quantization_config

    config = get_quantization_config("fp8moe")
    assert config.override_quantization_method(CHECKPOINT, "fp8moe") == "fp8moe" == config.get_name()
    assert config.override_quantization_method(CHECKPOINT, None) is None
    assert config.override_quantization_method({"quant_method": "awq"}, "fp8moe") is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"weight_block_size": [64, 128]}, r"blocks of \[128, 128\].* \[64, 128\]"),
        ({"weight_block_size": None, "activation_scheme": "static"}, "activation_scheme 'static'"),
    ],
)
def test_other_checkpoints_are_refused(checkpoint, change, why):
    with pytest.raises(ValueError, match=why):
        type(checkpoint).from_config(CHECKPOINT | change)
    with pytest.raises(ValueError, match="`fp8moe quantize SOURCE TARGET`.* weight_block_size None"):
        type(checkpoint)()  # for a checkpoint that is not quantized


def test_all_kernels_are_compiled_before_the_first_request(checkpoint, monkeypatch, log):
    warmed = []
    monkeypatch.setattr("fp8moe_vllm.layers.current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(fp8moe, "warm", lambda *given, **how: warmed.append((*map(set, given), how)))
    linears = [linear(checkpoint) for _ in range(3)]
    layers = [experts_layer(checkpoint, loaded=False) for _ in range(2)]
    for each in linears:
        load(each)
    for each in layers:
        each.quant_method.process_weights_after_loading(each)
    shapes = {(384, HIDDEN), (EXPERTS, INTERMEDIATE, HIDDEN, TOP_K)}
    assert warmed == [(shapes, {2048}, {})]
    assert log == ["fp8moe: gate_up_proj (384, 256): on fp8moe", "fp8moe: experts (8, 128, 256, 2): on fp8moe"]


@pytest.mark.parametrize("config", [CHECKPOINT, pytest.param(None, id="channels")])
def test_batch_invariance_is_vllms(checkpoint, monkeypatch, config):
    from contextlib import ExitStack

    import fp8moe_vllm.config as module

    import fp8moe.runtime.config as runtime

    with ExitStack() as modes:
        monkeypatch.setattr(module, "_batch_invariant", modes)
        monkeypatch.setattr(module.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
        type(checkpoint).from_config(config or scheme())
        assert runtime.settings.batch_invariant
    assert not runtime.settings.batch_invariant


# One scale a channel.


def scheme(**changes):
    """The quantization of a checkpoint of compressed-tensors; changes: of its weights."""
    codes = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = codes | {"strategy": "channel", "dynamic": False} | changes
    inputs = codes | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": "float-quantized"}
    how = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    return how | {"config_groups": {"group_0": group}}


@pytest.fixture
def channels(vllm):
    from vllm.model_executor.layers.quantization import get_quantization_config

    return get_quantization_config("fp8moe").from_config(scheme())


def in_channels(weight):
    scale = weight.abs().amax(-1, keepdim=True) / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale


def load_channels(layer):
    parts = [in_channels(torch.randn(rows, HIDDEN) / 16) for rows in layer.output_partition_sizes]
    for place, (data, scale) in enumerate(parts):
        layer.weight.weight_loader(layer.weight, data, place)
        layer.weight_scale.weight_loader(layer.weight_scale, scale, place)
    layer.quant_method.process_weights_after_loading(layer)
    return torch.cat([data.float() * scale for data, scale in parts])


def test_linear_in_channels(channels):
    from vllm.model_executor.layers.linear import WEIGHT_LOADER_V2_SUPPORTED

    layer = linear(channels)
    assert type(layer.quant_method).__name__ in WEIGHT_LOADER_V2_SUPPORTED
    weight = load_channels(layer)
    for shape in ((0, HIDDEN), (1, HIDDEN), (3, 5, HIDDEN)):
        x = torch.randn(shape).bfloat16()
        out, _ = layer(x)
        expected = x.float() @ weight.T
        assert out.shape == expected.shape and out.dtype == torch.bfloat16
        assert (out - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_experts_in_channels(channels, monkeypatch, tokens):
    """Also as another rank has them, and by vLLM's modular kernel."""
    layer = experts_layer(channels)
    weights = [(getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale")) for name in ("w13", "w2")]
    x, shares, ids = routed(tokens)
    out = layer.forward_modular(x, shares, ids)
    assert torch.equal(out, fp8moe.experts(x, ids, shares, *weights))
    assert torch.equal(modular_kernel(layer, x, shares, ids), out)
    up, down = (data.float() * scale for data, scale in weights)
    rows = x.float()
    expected = torch.zeros_like(rows)
    for token in range(tokens):
        for expert, share in zip(ids[token].tolist(), shares[token].tolist(), strict=True):
            gate, other = (rows[token] @ up[expert].T).chunk(2)
            expected[token] += share * (torch.nn.functional.silu(gate) * other) @ down[expert].T
    assert (out - expected).norm() <= 0.06 * expected.norm()


def test_what_the_checkpoint_has_in_another_format_is_vllms(vllm, monkeypatch, log):
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    mixed = scheme()
    of_tensors = scheme(strategy="tensor")["config_groups"]["group_0"] | {"targets": ["re:.*gate_up_proj"]}
    mixed["config_groups"] = {"group_1": of_tensors} | mixed["config_groups"]
    config = get_quantization_config("fp8moe").from_config(mixed)
    monkeypatch.setattr(CompressedTensorsConfig, "get_quant_method", lambda self, layer, prefix: None)
    layer = experts_layer(config, loaded=False)
    assert type(layer.quant_method).__name__ == "Fp8moeChannelsMoEMethod"
    log.clear()
    from vllm.model_executor.layers.linear import LinearBase

    other = LinearBase.__new__(LinearBase)
    torch.nn.Module.__init__(other)
    assert config.get_quant_method(other, "model.layers.0.mlp.gate_up_proj") is None
    assert log == ["fp8moe: gate_up_proj: on vLLM's kernels: the checkpoint has them in float-quantized"]
    monkeypatch.setenv("FP8MOE_STRICT", "1")
    refused(ValueError, "fp8moe: gate_up_proj: the checkpoint has", config.get_quant_method, other, "mlp.gate_up_proj")


def test_transformed_checkpoints_are_vllms(channels, monkeypatch, log):
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    layer = experts_layer(channels)
    channels.transform_config = object()
    experts_are_left(channels, CompressedTensorsConfig, layer, "transforms", monkeypatch, log)
    refused(ValueError, "fp8moe: gate_up_proj: transforms", linear, channels)


def test_linears_in_channels_of_other_sizes_are_vllms(channels, monkeypatch, log):
    from fp8moe_vllm.compressed import Fp8moeChannelsLinearMethod

    made = []
    theirs = SimpleNamespace(
        create_weights=lambda layer, *sizes, **more: made.append(sizes[1:4]),
        process_weights_after_loading=lambda layer: made.append("processed"),
        apply=lambda layer, x, bias: x,
    )
    method = Fp8moeChannelsLinearMethod(channels, "indexer", lambda: theirs)
    layer = torch.nn.Module()
    method.create_weights(layer, HIDDEN, [60], HIDDEN, 60, torch.bfloat16, weight_loader=None)
    method.process_weights_after_loading(layer)
    assert made == [([60], HIDDEN, 60), "processed"] and method.apply(layer, 7) == 7
    (line,) = log
    assert line == (
        "fp8moe: indexer: on vLLM's kernels: it takes multiples of 8 output and 16 input features, not 60 and 256"
    )


def test_a_channel_of_zeros_is_loaded(channels):
    layer = linear(channels)
    for place, rows in enumerate(layer.output_partition_sizes):
        for parameter in (layer.weight, layer.weight_scale):
            parameter.weight_loader(parameter, torch.zeros(rows, parameter.shape[1], dtype=parameter.dtype), place)
    layer.quant_method.process_weights_after_loading(layer)
    out, _ = layer(torch.randn(3, HIDDEN).bfloat16())
    assert not out.any()


def test_linears_without_scales_are_refused(channels):
    """A router, say, that the checkpoint has in bfloat16 but does not name."""
    layer = linear(channels)
    refused(
        ValueError,
        "fp8moe: gate_up_proj: the checkpoint has no",
        layer.quant_method.process_weights_after_loading,
        layer,
    )


@pytest.mark.parametrize(
    "change", [{"strategy": "tensor"}, {"num_bits": 4, "type": "int"}, {"type": "int"}, {"symmetric": False}]
)
def test_other_checkpoints_of_compressed_tensors_are_refused(vllm, change):
    from vllm.model_executor.layers.quantization import get_quantization_config

    config = get_quantization_config("fp8moe")
    assert config.override_quantization_method(scheme(), "fp8moe") == "fp8moe"
    assert config.override_quantization_method(scheme(), None) is None
    with pytest.raises(
        ValueError, match="expected a checkpoint of compressed-tensors with FP8 weights, one scale a ch"
    ):
        config.from_config(scheme(**change))


def test_kernels_for_channels_are_compiled(channels, monkeypatch):
    warmed = []
    monkeypatch.setattr("fp8moe_vllm.layers.current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(fp8moe, "warm", lambda *given, **how: warmed.append((*map(set, given), how)))
    load_channels(linear(channels))
    assert warmed == [({(384, HIDDEN)}, {2048}, {"weight_scales": "channel"})]


# INT4 and NVFP4.


def packed_scheme(weights, form):
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "num_bits": 4} | weights, "input_activations": None}
    return scheme() | {"format": form, "config_groups": {"group_0": group}}


def in_groups(size, **more):
    return packed_scheme({"type": "int", "strategy": "group", "group_size": size, **more}, "pack-quantized")


def in_nvfp4(**more):
    weights = {"type": "float", "strategy": "tensor_group", "group_size": 16, **more}
    return packed_scheme(weights, "nvfp4-pack-quantized")


PACKED = {
    "int4": ("int4", in_groups(128), partial(int4, group=128)),
    "int4-32": ("int4-32", in_groups(32), int4),
    "nvfp4": ("nvfp4", in_nvfp4(), nvfp4),
    "ModelOpt": (
        "nvfp4",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        nvfp4_of_modelopt,
    ),
}
"""Maps checkpoints to the format of their experts, their quantization, and functions that quantize a matrix."""


def packed_experts(form, load=True):
    """Experts with random weights in four bits, as vLLM loads them, and the values: (E, 2I, H) and (E, H, I)."""
    from vllm.model_executor.layers import fused_moe
    from vllm.model_executor.layers.quantization import get_quantization_config

    _, checkpoint, quantize = PACKED[form]
    config = get_quantization_config("fp8moe").from_config(checkpoint)
    make = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    prefix = f"model.layers.{experts_layer.made}.mlp.experts"
    experts_layer.made += 1
    how = {"params_dtype": torch.bfloat16, "renormalize": True, "quant_config": config, "prefix": prefix}
    layer = make(**sizes, **how).routed_experts
    up, down = torch.empty(EXPERTS, 2 * INTERMEDIATE, HIDDEN), torch.empty(EXPERTS, HIDDEN, INTERMEDIATE)
    for expert in range(EXPERTS):
        gate, other = up[expert].chunk(2)
        for shard, values in {"w1": gate, "w3": other, "w2": down[expert]}.items():
            made = quantize(torch.randn(values.shape) * values.shape[1] ** -0.5 * (1 + expert + int(shard[1])))
            values.copy_(made.values)
            for end, part in made.stored.items():
                name = f"{'w2' if shard == 'w2' else 'w13'}_{end}"
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, part, name, shard_id=shard, expert_id=expert)
    if load:
        layer.quant_method.process_weights_after_loading(layer)
    return layer, up, down, config


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("form", PACKED)
def test_experts_in_four_bits(form, tokens, vllm):
    layer, up, down, _ = packed_experts(form)
    assert not layer.w2_weight_scale.numel()
    x, shares, ids = routed(tokens)
    ids[: tokens // 2, 0] = -1  # of padding
    out = layer.forward_modular(x, shares, ids)
    expected = torch.zeros(tokens, HIDDEN)
    for token in range(tokens):
        for expert, share in zip(ids[token].tolist(), shares[token].tolist(), strict=True):
            if expert >= 0:
                gate, other = (x[token].float() @ up[expert].T).chunk(2)
                expected[token] += share * (torch.nn.functional.silu(gate) * other) @ down[expert].T
    assert out.dtype == torch.bfloat16 and (out - expected).norm() <= 0.06 * expected.norm()


@pytest.mark.parametrize("form", PACKED)
def test_experts_in_four_bits_on_another_rank(form, vllm):
    layer, *_ = packed_experts(form)
    x, shares, ids = routed(9)
    here = torch.where(torch.rand(ids.shape) < 0.5, ids, -1)
    expected = layer.forward_modular(x, shares, here)
    layer.register_buffer("_expert_map", torch.tensor([-1] * EXPERTS + [*range(EXPERTS)], dtype=torch.int32))
    assert torch.equal(layer.forward_modular(x, shares, torch.where(here < 0, ids, ids + EXPERTS)), expected)


@pytest.mark.parametrize(
    ("form", "options", "why"),
    [
        ("int4", {"parallel": {"dp_size": 2}}, "data parallel attention"),
        ("int4", {"parallel": {"enable_eplb": True}}, "load balancing"),
        ("int4-32", {"has_bias": True}, "without biases"),
        ("nvfp4", {"swiglu_limit": 7.0}, "SwiGLU with a limit of 7.0"),
        ("int4-32", {"swiglu_beta": 1.0}, "SwiGLU with a beta of 1.0"),
        ("nvfp4", {"is_lora_enabled": True}, "LoRA"),
        ("int4", {"hidden_dim": 192}, "multiples of 128, not 192 and 128"),
        ("int4-32", {"hidden_dim": 250}, "multiples of 32, not 250 and 128"),
        ("ModelOpt", {"parallel": {"pcp_size": 2}}, "prefill context"),
    ],
)
def test_experts_in_int4_and_nvfp4_that_fp8moe_does_not_run_are_vllms(form, options, why, vllm, monkeypatch, log):
    layer, _, _, config = packed_experts(form, load=False)
    experts_are_left(config, type(config).__mro__[2], changed(layer, **options), why, monkeypatch, log)


@pytest.mark.parametrize(("form", "name"), [("int4", "pack-quantized"), ("ModelOpt", "NVFP4")])
def test_linears_in_four_bits_are_vllms(form, name, vllm, monkeypatch, log):
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization import get_quantization_config

    config = get_quantization_config("fp8moe").from_config(PACKED[form][1])
    monkeypatch.setattr(type(config).__mro__[2], "get_quant_method", lambda self, layer, prefix: "vLLM's")
    layer = LinearBase.__new__(LinearBase)
    torch.nn.Module.__init__(layer)
    assert config.get_quant_method(layer, "model.layers.0.self_attn.o_proj") == "vLLM's"
    assert log == [f"fp8moe: o_proj: on vLLM's kernels: the checkpoint has them in {name}"]


@pytest.mark.parametrize(
    ("checkpoint", "why"),
    [
        (in_groups(64), "INT4, symmetric in groups of 32 or 128"),
        (in_groups(128, symmetric=False), "INT4, symmetric"),
        (in_groups(128, num_bits=8), "INT4, symmetric"),
        (in_groups(None, strategy="channel"), "INT4, symmetric"),
        (in_nvfp4(strategy="group", group_size=32), "INT4, symmetric .* or in NVFP4"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            "ModelOpt's checkpoints expected one in NVFP4, got .* 'FP8'",
        ),
    ],
)
def test_other_experts_in_four_bits_are_refused(checkpoint, why, vllm):
    from vllm.model_executor.layers.quantization import get_quantization_config

    with pytest.raises(ValueError, match=why):
        get_quantization_config("fp8moe").from_config(checkpoint)


@pytest.mark.parametrize("form", PACKED)
def test_kernels_for_experts_in_four_bits_are_compiled(form, vllm, monkeypatch):
    warmed = []
    monkeypatch.setattr("fp8moe_vllm.layers.current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(fp8moe, "warm", lambda *given, **how: warmed.append((*map(set, given), how)))
    packed_experts(form)
    ((shapes, counts, how),) = warmed
    assert (shapes, counts) == ({(EXPERTS, INTERMEDIATE, HIDDEN, TOP_K)}, {2048})
    assert (how["weight_format"], how["bias"], how["activation"].key) == (PACKED[form][0], False, "silu")


@pytest.mark.parametrize("order", ["static", "weight", False])
def test_columns_may_be_quantized_in_any_order(order, vllm):
    from vllm.model_executor.layers.quantization import get_quantization_config

    config = get_quantization_config("fp8moe").from_config(in_groups(128, actorder=order))
    assert type(config).__name__ == "Fp8moeCompressedConfig"


# MXFP4.


@pytest.fixture
def four_bits(vllm):
    from vllm.model_executor.layers.quantization import get_quantization_config

    return get_quantization_config("fp8moe").from_config({"quant_method": "mxfp4"})


GPT_OSS = {"has_bias": True, "activation": "swigluoai"}


def of_gpt_oss(quantization, load=True):
    """Experts with random weights in MXFP4, rows of gate and up in turns, and those weights as fp8moe takes them."""
    from vllm.model_executor.layers import fused_moe

    make = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    prefix = f"model.layers.{experts_layer.made}.mlp.experts"
    experts_layer.made += 1
    how = {"params_dtype": torch.bfloat16, "renormalize": True, "quant_config": quantization, "prefix": prefix}
    layer = make(**sizes, **GPT_OSS, **how).routed_experts
    state = {}
    for ours, theirs in (("gate_up_proj", "w13"), ("down_proj", "w2")):
        count, rows, half = getattr(layer, f"{theirs}_weight").shape
        packed = fp8moe.quantize_mxfp4(torch.randn(count, rows, 2 * half) * (2 * half) ** -0.5)
        values = {"weight": packed.data, "weight_scale": packed.scale, "bias": torch.randn(count, rows).bfloat16()}
        for end, (name, value) in zip(("", "_scale", "_bias"), values.items(), strict=True):
            getattr(layer, f"{theirs}_{name}").data.copy_(value)
            apart = torch.cat([value[:, 0::2], value[:, 1::2]], dim=1)
            state[ours + end] = apart if theirs == "w13" else value
    if load:
        layer.quant_method.process_weights_after_loading(layer)
    expected = fp8moe.GroupedExperts(
        **{"num_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "bias": True},
        **{"weight_format": "mxfp4", "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "dtype": torch.bfloat16},
    )
    expected.load_state_dict(state)
    return layer, expected.eval()


@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_experts_of_gpt_oss(four_bits, tokens):
    layer, expected = of_gpt_oss(four_bits)
    assert type(layer.quant_method).__name__ == "Fp8moeMxfp4MoEMethod" and not layer.w13_weight.numel()
    x, shares, ids = routed(tokens)
    ids[: tokens // 2, 0] = -1  # of padding
    out = layer.forward_modular(x, shares, ids)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected(x, ids, shares))


def test_experts_of_gpt_oss_on_another_rank(four_bits):
    layer, expected = of_gpt_oss(four_bits)
    layer.register_buffer("_expert_map", torch.tensor([-1] * EXPERTS + [*range(EXPERTS)], dtype=torch.int32))
    x, shares, ids = routed(9)
    here = torch.where(torch.rand(ids.shape) < 0.5, ids, -1)
    everywhere = torch.where(here < 0, ids, ids + EXPERTS)
    assert torch.equal(layer.forward_modular(x, shares, everywhere), expected(x, here, shares))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"parallel": {"dp_size": 2}}, "data parallel attention"),
        ({"has_bias": False}, "activation and biases"),
        ({"swiglu_limit": 10.0}, "SwiGLU with a limit of 10.0"),
        ({"swiglu_beta": 0.5}, "SwiGLU with a beta of 0.5"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"hidden_dim": 250}, "multiples of 32"),
    ],
)
def test_experts_of_gpt_oss_that_fp8moe_does_not_run_are_vllms(four_bits, monkeypatch, log, options, why):
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

    layer = changed(of_gpt_oss(four_bits, load=False)[0], **options)
    experts_are_left(four_bits, GptOssMxfp4Config, layer, why, monkeypatch, log)


def test_experts_of_gpt_oss_with_weighted_inputs_are_refused(four_bits):
    layer, _ = of_gpt_oss(four_bits, load=False)
    layer.apply_router_weight_on_input = True
    load = layer.quant_method.process_weights_after_loading
    refused(ValueError, "fp8moe: experts in MXFP4: apply_router_weight_on_input", load, layer)


def test_kernels_for_four_bits_are_compiled(four_bits, monkeypatch):
    warmed = []
    monkeypatch.setattr("fp8moe_vllm.layers.current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(fp8moe, "warm", lambda *given, **how: warmed.append((*map(set, given), how)))
    of_gpt_oss(four_bits)
    ((shapes, counts, how),) = warmed
    assert (shapes, counts) == ({(EXPERTS, INTERMEDIATE, HIDDEN, TOP_K)}, {2048})
    assert how["weight_format"] == "mxfp4" and how["bias"] and how["activation"].key == "silu limit=7.0 alpha=1.702"
