"""torch.compile in tests: backends that need something beside PyTorch, and what is not kept from one to the next."""

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

INDUCTOR = pytest.param(
    "inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
)
_CAN_TRITON = shutil.which("gcc") and importlib.util.find_spec("triton")
CUDA_INDUCTOR = pytest.param(
    "inductor", marks=pytest.mark.skipif(not _CAN_TRITON, reason="inductor needs Triton and a C compiler")
)


@contextmanager
def without_graph_caches() -> Iterator[None]:
    """Graphs are traced anew: PyTorch keeps them on disk under keys that know nothing of how operators are made.

    Objects that the C++ compiler has made are kept: they are found by their sources.
    """
    import torch._dynamo.config  # takes seconds
    import torch._functorch.config
    import torch._inductor.config

    with (
        torch._dynamo.config.patch(automatic_dynamic_local_pgo=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        yield
