"""The quantization config for `--quantization fp8moe`: picks fp8moe or vLLM's kernels for each layer in FP8 blocks."""

from contextlib import ExitStack
from typing import Any

import torch
import vllm.envs as envs
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

import fp8moe
from fp8moe_vllm.experts import Fp8moeMoEMethod, refusal
from fp8moe_vllm.layers import Layers
from fp8moe_vllm.linear import Fp8moeLinearMethod
from fp8moe_vllm.versions import skipped

METHODS = ("fp8", "compressed-tensors", "modelopt", "modelopt_fp4", "mxfp4", "gpt_oss_mxfp4")
"""What checkpoints, or vLLM for them, call the formats that the plug-in takes."""

_batch_invariant = ExitStack()  # never closed: the mode lasts as long as the process


def _follow_batch_invariance() -> None:
    if envs.VLLM_BATCH_INVARIANT:
        _batch_invariant.enter_context(fp8moe.batch_invariant())


class Fp8moeConfig(Layers, Fp8Config):
    """Runs linears and experts with FP8 weights in 128x128 blocks, and activations quantized 1x128, on fp8moe.

    Layers that fp8moe does not support run on vLLM's own kernels, which is logged once for each kind of layer; with
    FP8MOE_STRICT=1 they raise ValueError. Layers that the checkpoint stores in bfloat16 run on vLLM.

    Raises ValueError for any other checkpoint.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if self.weight_block_size != [128, 128] or self.activation_scheme != "dynamic":
            raise ValueError(
                "fp8moe: expected a checkpoint with FP8 weights in blocks of [128, 128] and dynamic activations, as "
                f"`fp8moe quantize SOURCE TARGET` makes them, got weight_block_size {self.weight_block_size}, "
                f"activation_scheme {self.activation_scheme!r}"
            )
        _follow_batch_invariance()

    @classmethod
    def get_name(cls) -> str:
        return "fp8moe"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict, user_quant: str | None, hf_config: Any = None):
        """Return "fp8moe" for checkpoints of METHODS if the user asks for fp8moe by name, otherwise None."""
        return "fp8moe" if user_quant == "fp8moe" and hf_quant_cfg.get("quant_method") in METHODS else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Return the config of a checkpoint: this one for FP8 in blocks, one of another module for another format."""
        method = config.get("quant_method")
        if method not in METHODS[1:]:
            return super().from_config(config)
        try:
            if method == "compressed-tensors":
                from fp8moe_vllm.compressed import Fp8moeCompressedConfig as Config
            elif method.startswith("modelopt"):
                from fp8moe_vllm.modelopt import Fp8moeModelOptConfig as Config
            else:
                from fp8moe_vllm.mxfp4 import Fp8moeMxfp4Config as Config
        except ImportError as error:
            raise ValueError(
                f"fp8moe: {method} is tried with vLLM 0.26.0 to 0.33.0, not with this one: {error}"
            ) from None
        _follow_batch_invariance()
        return Config.from_config(config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, LinearBase | RoutedExperts) or skipped(self, prefix):
            return super().get_quant_method(layer, prefix)
        if isinstance(layer, LinearBase):
            return Fp8moeLinearMethod(self, prefix)
        why = "the checkpoint has them in MXFP4" if self.store_dtype == "mxfp4" else refusal(layer.moe_config, "block")
        if why:
            self.leave_to_vllm("experts", why)
            return super().get_quant_method(layer, prefix)
        return Fp8moeMoEMethod(self, layer)
