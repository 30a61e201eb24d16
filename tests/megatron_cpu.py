"""What Megatron-Core calls in torch.cuda while it builds and trains a model, for runs on the CPU over gloo.

Megatron-Core has `use_cpu_initialization`, but asks torch.cuda for devices, streams and states of generators all the
same. Nothing of fp8moe or of Megatron-Core itself is replaced.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class _OnCPU(TorchFunctionMode):
    """Makes tensors for "cuda" on the CPU, and has tensors say the types that Megatron-Core's optimizers know."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


class _Stream(SimpleNamespace):
    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass

    def record_event(self):
        return self


def stand_in() -> None:
    """Replace functions of torch.cuda for the rest of this process, which must be one of a test's own."""
    stream = _Stream()
    replaced = {
        "current_device": lambda: torch.device("cpu"),
        "current_stream": lambda: stream,
        "Stream": lambda *_, **__: stream,
        "stream": lambda _: nullcontext(),
        "synchronize": lambda *_: None,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "FloatTensor": torch.FloatTensor,
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
    }
    for name, function in replaced.items():
        setattr(torch.cuda, name, function)
    torch.cuda.random.get_rng_state = replaced["get_rng_state"]  # recomputation calls it by this name
    _OnCPU().__enter__()
    all_to_all = dist.all_to_all_single

    def all_to_all_single(output, input, *sizes, **options):
        # Megatron-Core turns sizes on a GPU into numbers, and leaves those on the CPU as tensors.
        lists = (size.tolist() if isinstance(size, torch.Tensor) else size for size in sizes)
        given = {key: each.tolist() if isinstance(each, torch.Tensor) else each for key, each in options.items()}
        return all_to_all(output, input, *lists, **given)

    dist.all_to_all_single = all_to_all_single
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
