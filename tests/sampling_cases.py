"""Logits and sampling states for tests."""

import torch

from fp8moe.kernels.decoder_ops.sampling import SamplingState

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}


def make_state(rows: int, vocab: int, *, seen: torch.Tensor | None = None, device="cpu", **values) -> SamplingState:
    """By default temperature 1 and nothing else, row i with seed i. values: of all rows, or one for each."""
    values = OFF | {"seed": range(rows), "step": 0} | values

    def tensor(name: str, value) -> torch.Tensor:
        dtype = torch.float32 if name in FLOATS else torch.int32 if name == "top_k" else torch.int64
        value = value if isinstance(value, int | float) else torch.tensor(list(value), dtype=dtype)
        return torch.zeros(rows, dtype=dtype).copy_(torch.as_tensor(value)).to(device)

    seen = torch.zeros(rows, vocab, dtype=torch.uint8) if seen is None else seen
    return SamplingState(**{name: tensor(name, value) for name, value in values.items()}, seen=seen.to(device))


def random_state(rows: int, vocab: int, *, seed: int = 0, device="cpu") -> SamplingState:
    """Every mix of parameters, each of them off in about half of the rows, and some tokens seen."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, off: float) -> list[float]:
        drawn = low + (high - low) * torch.rand(rows, generator=generator)
        return torch.where(torch.rand(rows, generator=generator) < 0.5, drawn, off).tolist()

    limit = min(vocab, 10 ** int(torch.randint(1, 6, (1,), generator=generator)))
    temperature = uniform(0.3, 2.0, 1.0)
    temperature[::5] = [0.0] * len(temperature[::5])
    seen = torch.randint(0, 40, (rows, vocab), generator=generator).to(torch.uint8)
    return make_state(
        rows,
        vocab,
        temperature=temperature,
        top_k=[int(value) for value in uniform(1, limit + 1, 0)],
        top_p=uniform(0.05, 0.999, 1.0),
        min_p=uniform(0.0, 0.2, 0.0),
        repetition_penalty=uniform(0.7, 1.5, 1.0),
        presence_penalty=uniform(-1.0, 1.0, 0.0),
        seed=torch.randint(-(2**62), 2**62, (rows,), generator=generator).tolist(),
        step=torch.randint(0, 2**40, (rows,), generator=generator).tolist(),
        seen=torch.where(seen < 4, seen, 0),
        device=device,
    )


def random_logits(rows: int, vocab: int, dtype: torch.dtype, *, std: float = 4.0, seed: int = 0) -> torch.Tensor:
    return (std * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))).to(dtype)


def copied(state: SamplingState) -> SamplingState:
    return SamplingState(*(value.clone() for value in state))
