"""Helpers for modules with frozen FP8 parameters, and checks against misuse of those modules.

Parameters may be DTensors. A DTensor is recognized by its method `to_local`, without importing torch.distributed.
"""

from torch import Tensor, nn


def frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def local(value: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, differentiably; return any other tensor unchanged."""
    return value.to_local() if is_sharded(value) else value


def is_sharded(value: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(value, "to_local")


def check_not_parametrized(name: str, module: nn.Module) -> None:
    """Raise RuntimeError if the module has parametrizations, as peft adds.

    A parametrization that adds something to FP8 weights would give wrong results.
    """
    if "parametrizations" in module._modules:
        raise RuntimeError(
            f"{name}: a parametrization cannot change FP8 weights; for adapters of peft, call "
            "fp8moe.peft.register(config, model) before the model is adapted"
        )


def check_not_sharded(name: str, value: Tensor) -> None:
    """Raise ValueError for a DTensor: a rank's shard might end inside a 128x128 block."""
    if is_sharded(value):
        raise ValueError(f"{name}: expected a whole weight to quantize, got a DTensor with {value.placements}")
