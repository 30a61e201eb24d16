"""Shared by all tests: reproducible hypothesis runs, seeds, GPU tests left out where they cannot run, and fixtures."""

import gc
import logging
import os
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings

from tests.compilers import without_graph_caches

settings.register_profile("fp8moe", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("fp8moe")

# Of several processes each has its share of the CPUs, and so have those that it starts.
torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))))
os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
# pytest catches what loggers write that do not propagate, and of each graph PyTorch would then write traces in JSON.
logging.getLogger("torch.__trace").propagate = True

SLOW = (
    *("test_transformers_parallel", "test_demo", "test_digest", "test_gemm_tiles", "test_grouped_tiles", "test_warmup"),
    *("test_docs_examples", "test_export", "test_models", "test_validate", "test_compare", "test_release"),
    *("test_routing", "test_on_policy", "test_decode_invariance"),
)
"""Modules whose tests or fixtures take ten seconds. They come first, so that no process ends with one of them alone."""

DESELECTED = "deselected GPU tests"
WHY = pytest.StashKey[str]()


def own_gpu_first(devices: str, worker: str) -> str:
    """Rotate the devices of CUDA_VISIBLE_DEVICES, so that workers "gw0", "gw1", ... of pytest-xdist use them in turn.

    All devices stay visible, for the tests of several GPUs.
    """
    listed = devices.split(",")
    first = int(worker.removeprefix("gw")) % len(listed)
    return ",".join(listed[first:] + listed[:first])


def pytest_configure(config: pytest.Config) -> None:
    if (devices := os.environ.get("CUDA_VISIBLE_DEVICES")) and hasattr(config, "workerinput"):
        os.environ["CUDA_VISIBLE_DEVICES"] = own_gpu_first(devices, config.workerinput["workerid"])


def why_no_hopper() -> str | None:
    """The reason why GPU tests cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no GPU that PyTorch can use"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs an sm_90 (Hopper) GPU, this one is sm_{capability[0]}{capability[1]}"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name == "gpu" or item.path.stem not in SLOW)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_hopper() if gpu_items else None
    if reason:
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        _deselect(config, gpu_items, reason)
        if hasattr(config, "workeroutput"):  # a process of pytest-xdist tells the one that counts
            config.workeroutput[DESELECTED] = len(gpu_items), reason


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # modules and tests stay: no collection need look at them again


def _deselect(config: pytest.Config, items: Sequence, reason: str) -> None:
    config.hook.pytest_deselected(items=items)
    config.stash[WHY] = f"{len(items)} GPU tests deselected: {reason}"


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """Count what the processes of pytest-xdist, which all collect the same, have deselected."""
    if WHY not in node.config.stash and DESELECTED in getattr(node, "workeroutput", {}):
        count, reason = node.workeroutput[DESELECTED]
        _deselect(node.config, [SimpleNamespace()] * count, reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if WHY in config.stash:
        terminalreporter.write_line(config.stash[WHY])


@pytest.fixture(autouse=True)
def seed():
    """Equal operands in every run, so that what passes once passes again."""
    torch.manual_seed(0)


@pytest.fixture
def device():
    """Where tests run that tests/gpu imports too."""
    return "cpu"


@pytest.fixture(scope="module")
def one_thread():
    """Sharing out small matrices costs more than multiplying them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_compiler():
    """Nothing that was compiled before is used."""
    torch._dynamo.reset()
    with without_graph_caches():
        yield


@pytest.fixture
def registered():
    """transformers knows fp8moe."""
    pytest.importorskip("transformers")
    from fp8moe.hf import register

    register()


@pytest.fixture
def fp8_without_gpu(monkeypatch):
    """transformers keeps the weights of FP8 checkpoints as they are: where there is no GPU it would not."""
    quantizers = pytest.importorskip("transformers.quantizers.quantizer_finegrained_fp8")
    monkeypatch.setattr(quantizers.FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)


@pytest.fixture(autouse=True)
def freed():
    """What a test has used of the GPU's memory is for the tests of other processes afterwards."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
