"""DeepSeek-V3, all of it, on the GPUs of one node: the part `node` of `benchmarks.distributed`."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import roofline, timing
from benchmarks.decode import MANY, PROFILED, ROOM, step_bytes, step_seconds
from benchmarks.whole_models import WHOLE, build
from fp8moe.decode import GraphDecoder
from fp8moe.decode.stats import cache_bytes
from fp8moe.layers.parameters import local

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # tests have none
NAME = "deepseek-v3"
BATCHES = (1, 8, 64, 256)
PROMPT = 512
AT_ONCE = 16384  # tokens of prompts: the buffers between the GPUs have room for as many
CHECKED = 8  # new tokens, after prompts of few tokens in all
TRAFFIC = re.compile(r"nccl|barrier|^dispatch", re.IGNORECASE)


def measure(batches: Sequence[int] = BATCHES, **changes: Any) -> Iterator[dict]:
    """Yield rows `node`, and `traffic` after each. changes: to the model's configuration."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    model = build(NAME, device=DEVICE, changes=WHOLE[NAME] | changes, mesh=mesh)
    weights = sum(local(value).nbytes for value in model.parameters())
    chunk = min(PROMPT, AT_ONCE // max(batches))
    decoder = GraphDecoder(model, batch_sizes=batches, max_length=PROMPT + ROOM, prefill_chunk=chunk)
    for batch in batches:
        prompts = same_prompts(model, batch)
        same = None
        if batch * PROMPT <= AT_ONCE:
            same = same_everywhere(decoder.generate(prompts, max_new_tokens=CHECKED, eos_token_id=()))
        step = largest(step_seconds(decoder, prompts))
        cached = cache_bytes([decoder.steps[batch].cache]) * (PROMPT + MANY / 2) / (PROMPT + ROOM)
        floor = largest(step_bytes(model, prompts, cached) / (1e12 * roofline.copy_tbps()))
        rates = {"ms": 1e3 * step, "tokens_s": batch / step, "floor_ms": 1e3 * floor, "x_floor": step / floor}
        memory = {"weights_gb": weights / 1e9, "free_gb": -largest(-torch.cuda.mem_get_info()[0]) / 1e9}
        yield {"what": "node", "batch": batch, "prompt": PROMPT, **rates, "same": same, **memory}
        yield {"what": "traffic", "batch": batch, **traffic(decoder.steps[batch].replay)}
    decoder.close()


def same_prompts(model: Any, batch: int) -> Tensor:
    """Draw prompts, the same on all ranks."""
    generator = torch.Generator(DEVICE).manual_seed(batch)
    return torch.randint(0, model.config.vocab_size, (batch, PROMPT), device=DEVICE, generator=generator)


def same_everywhere(tokens: Tensor) -> bool:
    """Find out whether all ranks have the same tokens."""
    parts = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tokens.contiguous())
    return all(part.equal(tokens) for part in parts)


def largest(value: float) -> float:
    """Return the largest of the ranks' values."""
    found = torch.tensor(value, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def traffic(replay: Callable[[], object]) -> dict:
    """Count the kernels of a step, and TRAFFIC's share of their time on the rank where it is least.

    A kernel that waits for another rank has that rank's delay in its time.
    """

    def steps() -> None:
        for _ in range(PROFILED):
            replay()

    events = timing.profile(steps)
    total = sum(event.duration_ns for event in events)
    spent = sum(event.duration_ns for event in events if TRAFFIC.search(event.name))
    return {"kernels": len(events) // PROFILED, "share": -largest(-spent / total)}
