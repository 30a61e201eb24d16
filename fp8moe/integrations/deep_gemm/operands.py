"""What the drop-in's functions make of their arguments before fp8moe's own functions take them."""

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from fp8moe.integrations.deep_gemm.utils.layout import float32_scale
from fp8moe.quant.checks import fp8_operand
from fp8moe.quant.formats import BLOCK, FP8Tensor
from fp8moe.runtime.autograd import recorded
from fp8moe.runtime.checks import check_like, check_tensor

P = ParamSpec("P")
R = TypeVar("R")
Pair = tuple[Tensor, Tensor]
Recipe = Sequence[int]

_FP4 = (torch.int8, torch.uint8)


def fp8(name: str, pair: Pair) -> FP8Tensor:
    """The operand ``(data, scale)`` with float32 scales. Nothing that is done with it is recorded for gradients.

    NotImplementedError for what DeepGEMM's Hopper kernels do not take either: FP4 values, and data that is not K-major.
    """
    data, scale = fp8_operand(name, pair)
    if data.dtype in _FP4:
        raise NotImplementedError(f"{name}: expected float8_e4m3fn, as Hopper has no kernel for FP4, got {data.dtype}")
    k = data.shape[-1] if data.dim() else 0
    if k > 1 and data.stride(-1) != 1:
        expected = "K-major data, the only layout that Hopper multiplies in FP8"
        raise NotImplementedError(f"{name}: expected {expected}, got strides {data.stride()}")
    if recorded(data, scale):
        data, scale = data.detach(), scale.detach()
    return FP8Tensor(data, float32_scale(name, scale, k))


def transposed(name: str, pair: Pair) -> Pair:
    """Views of the operand with rows and columns exchanged, scales too."""
    data, scale = fp8_operand(name, pair)
    return data.mT, scale.mT


def by_rows(recipe: Recipe | None, recipe_a: Recipe | None = None, recipe_b: Recipe | None = None) -> bool:
    """Whether both operands have a scale for each row, (1, 1, 128); otherwise the weights have one per 128x128.

    recipe_a, recipe_b: the blocks of one operand each, (1, 128) or (128, 128), in place of a recipe.
    """
    if recipe_a is not None or recipe_b is not None:
        (rows_a, *k_a), (rows_b, *k_b) = recipe_a or (1, BLOCK), recipe_b or (BLOCK, BLOCK)
        if k_a != k_b:
            raise NotImplementedError(f"recipe_a, recipe_b: expected blocks of {BLOCK} along K, got {k_a} and {k_b}")
        recipe = (rows_a, rows_b, *k_b)
    if recipe is None or tuple(recipe) == (1, 128, 128):
        return False
    if tuple(recipe) == (1, 1, 128):
        return True
    raise NotImplementedError(f"recipe: expected (1, 128, 128) or (1, 1, 128), those of Hopper, got {tuple(recipe)}")


def weights_by_blocks(*recipes: Recipe | None) -> None:
    """NotImplementedError for any other recipe."""
    if by_rows(*recipes):
        raise NotImplementedError("recipe: expected (1, 128, 128) of grouped weights, got (1, 1, 128)")


def check_addend(c: Tensor | None, d: Tensor) -> None:
    check_tensor("d", d)
    if c is not None:
        check_like("c", c, (d.dtype,), d.shape, d.device, "d")


def write_sum(product: Callable[[Tensor, bool], object], c: Tensor | None, d: Tensor) -> None:
    """``d = c + product``. product(out, accumulate) writes itself to ``out``, or adds to what it holds."""
    check_addend(c, d)
    if c is None or c is d or (c.data_ptr() == d.data_ptr() and c.stride() == d.stride()):
        product(d, c is not None)
    else:
        sums = torch.empty(d.shape, dtype=torch.float32, device=d.device)
        product(sums, False)
        torch.add(sums, c, out=d)


def named(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Errors of the decorated function that begin with one of these names begin with DeepGEMM's name instead."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            try:
                return function(*args, **options)
            except (TypeError, ValueError) as error:
                name, colon, rest = str(error).partition(":")
                if not colon or name not in names:
                    raise
                raise type(error)(f"{names[name]}:{rest}") from error

        return call

    return decorate
