"""Which activation experts have: told from their attributes, then compared with what their own functions compute."""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fp8moe.kernels.activation import FUNCTIONS, Activation
from fp8moe.runtime.checks import describe

_PROBES = 4096  # values compared of each expert
_LARGEST = 42  # of whose sinh, 9e17, products are in the range of bfloat16


def activation_of(module: nn.Module, gated: bool) -> Activation:
    """The activation that the module's attributes describe. Without an act_fn it is silu, for the caller to verify."""
    if is_ours(module):
        return module.activation
    act_fn = getattr(module, "act_fn", None)
    name = "silu" if act_fn is None else _function_name(act_fn)
    if not gated:
        return Activation(name=name, gated=False)
    limit, alpha = (
        next((getattr(module, name) for name in names if getattr(module, name, None) is not None), None)
        for names in (("swiglu_limit", "limit"), ("swiglu_alpha", "alpha"))
    )
    return Activation(None if limit is None or math.isinf(limit) else limit, alpha, name)


def is_ours(module: nn.Module) -> bool:
    """Whether it is a GroupedExperts, which states its activation."""
    return isinstance(getattr(module, "activation", None), Activation)


def verify_fused(module: nn.Module, activation: Activation, size: int) -> None:
    """ValueError if the function that transformers' fused experts apply to gate and up is another; size: of each."""
    if is_ours(module):
        return
    apply = getattr(module, "_apply_gate", None) if activation.gated else None
    if apply is None:
        if not hasattr(module, "act_fn"):
            functions = "neither act_fn nor _apply_gate" if activation.gated else "no act_fn"
            raise ValueError(f"module: cannot tell its activation, it has {functions}")
        return
    probe = _probe(_rows(size), 2 * size, "cpu", seed=0)
    if not _close(_run("module", apply, probe), activation(probe), probe[:, size:]):
        raise ValueError(f"module: its activation is none of those that GroupedExperts has; closest is {activation}")


@torch.no_grad()
def verify_mlp(name: str, expert: nn.Module, names: tuple[str, ...], activation: Activation) -> None:
    """ValueError if one expert computes something else than ``down(activation(gate(x), up(x)))``.

    names: of its linears. A copy of it runs with others in their places, which return values of all magnitudes: so it
    takes no time, reaches every limit whatever the weights are, and does without a GPU for FP8 weights.
    """
    size, hidden = getattr(expert, names[0]).weight.shape
    device = getattr(expert, names[0]).weight.device
    device = torch.device("cpu") if device.type == "meta" else device
    rows = _rows(size)
    x = _probe(rows, hidden, device, seed=0)
    *projections, down = (
        _StandIn(_probe(rows, width, device, seed), features)
        for seed, (width, features) in enumerate([(size, hidden)] * (len(names) - 1) + [(hidden, size)], start=1)
    )
    twin = copy.copy(expert)
    twin._modules = expert._modules | dict(zip(names, (*projections, down), strict=True))
    out = _run(name, type(expert).forward, twin, x)
    if not (down.ran_once and all(linear.ran_once and _close(linear.input, x) for linear in projections)):
        raise ValueError(f"{name}: expected {names} to run once each, all but the last on the input as it is")
    projected = torch.cat([linear.output for linear in projections], dim=-1)
    if not _close(down.input, activation(projected), projections[-1].output):
        raise ValueError(f"{name}: its activation is none of those that GroupedExperts has; closest is {activation}")
    if not _close(out, down.output):
        raise ValueError(f"{name}: expected the result of {names[-1]} to be returned as it is")


class _StandIn(nn.Linear):
    """In the place of a linear layer: returns what it was made with and keeps its input."""

    def __init__(self, output: Tensor, in_features: int):
        super().__init__(in_features, output.shape[-1], bias=False, device="meta", dtype=output.dtype)
        self.output = output
        self.inputs = []

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        return self.output

    @property
    def ran_once(self) -> bool:
        return len(self.inputs) == 1

    @property
    def input(self) -> Tensor:
        return self.inputs[0]


def _function_name(act_fn: Callable[[Tensor], Tensor]) -> str:
    if not (isinstance(act_fn, nn.Module) and any(True for _ in act_fn.parameters())):
        x = torch.linspace(-_LARGEST, _LARGEST, 2 * _PROBES, dtype=torch.float32, device="cpu").sinh()
        result = _run("module", act_fn, x)
        for name, function in FUNCTIONS.items():
            if isinstance(result, Tensor) and torch.allclose(result, function(x), rtol=1e-4, atol=1e-5):
                return name
    raise ValueError(f"module: expected an activation among {', '.join(FUNCTIONS)}, got {describe(act_fn)}")


def _run(name: str, function: Callable, *arguments) -> object:
    try:
        return function(*arguments)
    except Exception as error:  # of any kind: it is foreign code
        raise ValueError(f"{name}: cannot tell its activation, its function fails: {error!r}") from error


def _rows(size: int) -> int:
    """How many rows of `size` values to compare."""
    return min(64, math.ceil(_PROBES / size))


def _probe(rows: int, columns: int, device: torch.device | str, seed: int) -> Tensor:
    """Values of both signs from near 0 to 9e17, as many of each magnitude."""
    generator = torch.Generator("cpu").manual_seed(seed)
    uniform = torch.rand((rows, columns), generator=generator, dtype=torch.float32, device="cpu")
    return (uniform.mul(2 * _LARGEST) - _LARGEST).sinh().to(device)


def _close(result: Tensor, expected: Tensor, factor: Tensor | None = None) -> bool:
    """Whether two tensors are equal but for rounding, also that before a product with `factor`."""
    if not isinstance(result, Tensor) or result.shape != expected.shape:
        return False
    tolerance = 1e-2 * expected.abs() + 1e-5 * (1 if factor is None else 1 + factor.abs())
    return bool(((result == expected) | ((result - expected).abs() <= tolerance)).all())
