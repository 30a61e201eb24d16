"""The quantization method "fp8moe": experts, by a runner core of SGLang's registry, and linears in FP8 blocks."""

import functools
import logging
import os
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.moe.utils import RegisteredMoeRunnerBackend, get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, LinearMethodBase, QuantizeMethodBase
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule
from torch import Tensor

import fp8moe

NAME = "fp8moe"  # of the quantization method, and of the runner of experts
log = logging.getLogger("sglang.fp8moe")
_batch_invariant = ExitStack()  # never closed: the mode lasts as long as the process


def refuse(what: str) -> NoReturn:
    """Raise ValueError: the user asked for fp8moe, which does not run `what`."""
    raise ValueError(
        f"--quantization fp8moe does not run {what}; without this option the model runs on SGLang's kernels"
    )


class Fp8moeConfig(Fp8Config):
    """Runs linears and experts with FP8 weights in 128x128 blocks, and activations quantized 1x128, on fp8moe.

    Layers that the checkpoint stores in bfloat16 run on SGLang. ValueError says what fp8moe does not run, before
    weights are loaded. The inherited name, "fp8", is the checkpoint's format, which SGLang's models ask for.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if not self.is_checkpoint_fp8_serialized or self.weight_block_size != [128, 128]:
            refuse(
                f"checkpoints with weight_block_size {self.weight_block_size}, only FP8 weights in blocks of "
                "[128, 128], as `fp8moe quantize SOURCE TARGET` makes them"
            )
        hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
        if not hopper and os.environ.get("FP8MOE_BACKEND") != "reference":
            refuse("without a Hopper GPU (sm_90), except slowly, with FP8MOE_BACKEND=reference")
        if get_exec().kernel.fp8_gemm_runner_backend != "auto":
            refuse(f"linears with --fp8-gemm-backend {get_exec().kernel.fp8_gemm_runner_backend}")
        if get_exec().deterministic.enable_deterministic_inference:
            _batch_invariant.enter_context(fp8moe.batch_invariant())
        self._uncompiled: set[tuple[int, ...]] = set()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Fp8moeConfig":
        if "moe_quant_algo" in config:
            refuse(f"experts in {config['moe_quant_algo']}")
        return super().from_config(config)

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], user_quant: str | None) -> str | None:
        """Return "fp8moe" for FP8 checkpoints if the user asks for fp8moe by name, otherwise None."""
        return NAME if user_quant == NAME and hf_quant_cfg.get("quant_method") == "fp8" else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if self.is_fp4_experts:
            refuse("experts in MXFP4")
        method = super().get_quant_method(layer, prefix)
        ours = {Fp8LinearMethod: Fp8moeLinearMethod, Fp8MoEMethod: Fp8moeMoEMethod}.get(type(method))
        if ours:
            return ours(self)
        unquantized = UnquantizedLinearMethod, UnquantizedFusedMoEMethod
        if isinstance(method, LinearMethodBase | FusedMoEMethodBase) and not isinstance(method, unquantized):
            refuse(f"layers for which this SGLang takes {type(method).__name__}")
        return method

    def taken(self, layer: str, shape: tuple[int, ...]) -> None:
        """Log once that fp8moe runs a layer, and record its shape for `warm`."""
        _say(f"fp8moe: {layer} {shape}: on fp8moe")
        self._uncompiled.add(shape)

    def warm(self, weight: Tensor) -> None:
        """Compile the kernels of all recorded layers, so that none is compiled while a request waits."""
        if self._uncompiled and weight.is_cuda:
            fp8moe.warm(sorted(self._uncompiled), [_max_tokens()])
        self._uncompiled.clear()


@functools.cache
def _say(line: str) -> None:
    log.info(line)


def _max_tokens() -> int:
    """Return the most tokens that a layer gets in a forward pass: a prefill chunk of each data-parallel rank.

    Without chunking, the most tokens of a prefill count instead.
    """
    chunk = get_schedule().chunked_prefill_size
    return (chunk if chunk and chunk > 0 else get_schedule().max_prefill_tokens) * get_parallel().attn_dp_size


# ---- linears ----


class Fp8moeLinearMethod(Fp8LinearMethod):
    """The quantization method for a linear on fp8moe. Weight and float32 scales stay as the checkpoint has them."""

    def __init__(self, quant_config: Fp8moeConfig):
        super().__init__(quant_config)
        self.use_marlin, self.w8a8_block_fp8_linear = False, None  # SGLang's kernels, which `apply` does not call

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *sizes: Any,
        **more: Any,
    ) -> None:
        # SGLang chooses the weight loader by the class name of the method, and this one has another name
        more["weight_loader"] = getattr(layer, "weight_loader_v2", more.get("weight_loader"))
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *sizes, **more)
        self.quant_config.taken("linear", (sum(output_partition_sizes), input_size_per_partition))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.quant_config.warm(layer.weight)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return fp8moe.linear(x, (layer.weight, layer.weight_scale_inv), bias)


# ---- experts ----


class Fp8moeMoEMethod(Fp8MoEMethod):
    """The quantization method for experts on fp8moe. Weights and float32 scales stay as the checkpoint has them."""

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: MoeRunnerConfig) -> None:
        """Raises ValueError for experts that fp8moe does not run."""
        if what := unsupported(moe_runner_config, layer.with_bias):
            refuse(what)
        self.moe_runner_config = moe_runner_config
        self.runner = MoeRunner(ExpertsCore.runner_backend, moe_runner_config)
        count, hidden, intermediate = layer.w2_weight.shape
        self.quant_config.taken("experts", (count, intermediate, hidden, moe_runner_config.top_k))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.quant_config.warm(layer.w2_weight)

    def apply(self, layer: torch.nn.Module, dispatch_output: StandardDispatchOutput) -> StandardCombineInput:
        return self.runner.run(dispatch_output, self.get_triton_quant_info(layer))

    def get_moe_quant_info(self, layer: torch.nn.Module, runner_backend: Any) -> None:
        """Refuse LoRA on experts, which is all that SGLang asks this for."""
        refuse("LoRA on experts")


def unsupported(config: MoeRunnerConfig, with_bias: bool) -> str | None:
    """Return what fp8moe does not run of these experts; None if it runs them."""
    if not get_moe_runner_backend().is_auto():
        return f"experts with --moe-runner-backend {get_moe_runner_backend().value}"
    if not get_moe_a2a_backend().is_none():
        return f"experts with --moe-a2a-backend {get_moe_a2a_backend().value}"
    if get_exec().moe.enable_paged_experts:
        return "experts with --enable-paged-experts"
    if with_bias:
        return "experts with biases"
    if config.activation != "silu" or not config.is_gated:
        return f"experts with activation {config.activation}{'' if config.is_gated else ' without a gate'}"
    swiglu = config.gemm1_alpha, config.gemm1_beta, config.gemm1_clamp_limit, config.swiglu_limit
    if any(value is not None for value in swiglu):
        return "experts with a limit, an alpha or a beta in SwiGLU"
    for option in ("apply_router_weight_on_input", "no_combine"):
        if getattr(config, option):
            return f"experts with {option}"
    return None


class ExpertsCore(DispatchMoeRunnerCore):
    """Runs `fp8moe.experts` for SGLang's registry of runners."""

    runner_backend = RegisteredMoeRunnerBackend(NAME)

    def run_from_dispatch(
        self,
        dispatch_output: StandardDispatchOutput,
        quant_info: TritonMoeQuantInfo,
        runner_config: MoeRunnerConfig,
        hooks: Any = None,
    ) -> StandardCombineInput:
        """Run the experts of a layer. Expert ids index this rank's experts, and are -1 for those of other ranks."""
        x, routing = dispatch_output.hidden_states, dispatch_output.topk_output
        weights, scaling = routing.topk_weights, runner_config.routed_scaling_factor
        if scaling not in (None, 1.0):
            weights = weights * scaling
        up, down = (quant_info.w13_weight, quant_info.w13_scale), (quant_info.w2_weight, quant_info.w2_scale)
        everywhere = runner_config.num_experts  # number of experts on all ranks; it affects the choice of tile sizes
        return StandardCombineInput(fp8moe.experts(x, routing.topk_ids, weights, up, down, num_experts=everywhere))
