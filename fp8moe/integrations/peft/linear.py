"""peft's LoRA layer for FP8 linears, ours and transformers'."""

from collections.abc import Iterable

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from fp8moe.integrations.peft.layer import FP8LoraLayer
from fp8moe.integrations.peft.merging import Stored


class LoraFP8Linear(FP8LoraLayer, Linear):
    """``base(x) + scaling * B @ A @ dropout(x)``, the base in FP8 and frozen, A and B as in peft's lora.Linear.

    Adapters are made in the dtype of the bias, without one in bfloat16; peft's autocast_adapter_dtype may turn them to
    float32.
    """

    def __init__(self, base_layer: nn.Module, adapter_name: str, config, **kwargs) -> None:
        self._start(base_layer, adapter_name, config, kwargs)
        Linear.__init__(self, base_layer, adapter_name, config, **kwargs)

    def stored(self, adapters: Iterable[str]) -> list[Stored]:
        linear, names = self.get_base_layer(), list(adapters)

        def add(_: int) -> Tensor:
            return sum(
                self.scaling[name] * (self.lora_B[name].weight.float() @ self.lora_A[name].weight.float())
                for name in names
            )

        scale = linear.weight_scale_inv
        return [Stored(linear.weight.detach()[None], scale if scale is None else scale.detach()[None], 1, add)]

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device, torch.dtype]:
        unquantized = base_layer.weight if base_layer.weight_scale_inv is None else base_layer.bias
        return base_layer.weight.device, torch.bfloat16 if unquantized is None else unquantized.dtype
