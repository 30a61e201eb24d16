"""FP8 linears: vLLM's linear method on fp8moe's quantization and GEMM."""

from collections.abc import Callable

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
    validate_fp8_block_shape,
)
from vllm.model_executor.parameter import BlockQuantScaleParameter

import fp8moe
from fp8moe_vllm.layers import Layers
from fp8moe_vllm.versions import not_here


def linear_refusal(n: int, k: int, out_dtype: torch.dtype | None) -> str | None:
    """Return why fp8moe does not run a linear of N output and K input features; None if it does."""
    if n % 8 or k % 16:
        return f"it takes multiples of 8 output and 16 input features, not {n} and {k}"
    return None if out_dtype == torch.bfloat16 else f"its results are bfloat16, not {out_dtype}"


class Fp8moeLinearKernel(Fp8BlockScaledMMLinearKernel):
    """Runs `fp8moe.linear`, which quantizes the input itself.

    With vLLM's own quantizer, which its compiler passes fuse into norms, a whole model took up to 3.5% longer on an
    H100.
    """

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        why = not_here()
        return why is None, why

    @classmethod
    def can_implement(cls, config: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        if why := linear_refusal(*config.weight_shape, config.out_dtype):
            return False, why
        return super().can_implement(config)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Do nothing: weights and float32 scales stay as the checkpoint has them."""

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:  # noqa: N803
        return fp8moe.linear(A, (B, Bs))


@register_weight_loader_v2_supported_method  # vLLM chooses the weight loader by the class name of the method
class Fp8moeLinearMethod(Fp8LinearMethod):
    """The quantization method for a linear: on fp8moe's kernels or, if fp8moe does not support the linear, vLLM's."""

    def __init__(self, quant_config: Layers, prefix: str):
        super().__init__(quant_config)
        self.kind = prefix.rpartition(".")[2]

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: Callable | None = None,
        **more,
    ) -> None:
        k, n = input_size_per_partition, sum(output_partition_sizes)
        config = FP8ScaledMMLinearLayerConfig(
            weight_quant_key=self.weight_quant_key,
            activation_quant_key=self.activation_quant_key,
            weight_shape=(n, k),
            input_dtype=self.input_dtype,
            out_dtype=self.out_dtype,
        )
        for able, why in (Fp8moeLinearKernel.is_supported(), Fp8moeLinearKernel.can_implement(config)):
            if not able:
                self.quant_config.leave_to_vllm(self.kind, why)
                sizes = k, output_partition_sizes, input_size, output_size
                super().create_weights(layer, *sizes, params_dtype, weight_loader=weight_loader, **more)
                return

        # The lines below do the same as Fp8LinearMethod.create_weights, except that the kernel is fp8moe's.
        block = self.weight_block_size
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition, layer.output_size_per_partition = k, n
        layer.orig_dtype, layer.weight_block_size = params_dtype, block
        validate_fp8_block_shape(layer, input_size, output_size, k, output_partition_sizes, block)
        layer.register_parameter("weight", create_fp8_weight_parameter(n, k, weight_loader))
        scale = create_fp8_scale_parameter(BlockQuantScaleParameter, output_partition_sizes, k, block, weight_loader)
        layer.register_parameter("weight_scale_inv", scale)
        self.use_deep_gemm = False  # so that vLLM does not rewrite the scales, which MLA may read
        self.fp8_linear = Fp8moeLinearKernel(config)
        max_tokens = get_current_vllm_config().scheduler_config.max_num_batched_tokens
        self.quant_config.taken(self.kind, (n, k), max_tokens)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_weights_after_loading(layer)
        self.quant_config.warm()
