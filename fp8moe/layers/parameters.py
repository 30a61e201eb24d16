"""What modules with FP8 parameters share: keeping them FP8 and frozen, and refusing what would not respect that.

Parameters may be DTensors: their shards are told by `to_local`, which needs no part of torch.distributed.
"""

from torch import Tensor, nn


def frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def local(value: Tensor) -> Tensor:
    """The part of a DTensor that is on this rank, to which gradients of the DTensor come back; other tensors as is."""
    return value.to_local() if is_sharded(value) else value


def is_sharded(value: Tensor) -> bool:
    """Whether this is a DTensor."""
    return hasattr(value, "to_local")


def check_not_parametrized(name: str, module: nn.Module) -> None:
    """RuntimeError where something is added to FP8 weights in each call, as peft does to parameters: wrong results."""
    if "parametrizations" in module._modules:
        raise RuntimeError(
            f"{name}: a parametrization cannot change FP8 weights; for adapters of peft, call "
            "fp8moe.peft.register(config, model) before the model is adapted"
        )


def check_not_sharded(name: str, value: Tensor) -> None:
    """ValueError for a DTensor: what a rank holds of it need not be whole blocks."""
    if is_sharded(value):
        raise ValueError(f"{name}: expected a whole weight to quantize, got a DTensor with {value.placements}")
