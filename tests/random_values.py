"""Operands whose blocks have scales that differ."""

import torch


def random(
    *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", spread: float = 3.0, seed: int = 0
) -> torch.Tensor:
    """Values over several orders of magnitude, of both signs; spread: standard deviation of their exponents."""
    generator = torch.Generator(device).manual_seed(seed)
    exponent = torch.randn(shape, generator=generator, device=device) * spread
    return (torch.randn(shape, generator=generator, device=device) * exponent.exp2()).to(dtype)


def some_slots(tokens: int, num_slots: int, seed: int = 0, *, device: str = "cpu") -> torch.Tensor:
    """Different int32 slots, of which some are outside of [0, num_slots)."""
    generator = torch.Generator(device).manual_seed(seed)
    order = torch.randperm(max(tokens, num_slots + 9), generator=generator, device=device)
    return (order[:tokens] - 5).int()
