"""Choosing the backend: with CPU tensors, and with a GPU that is only pretended."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fp8moe.runtime import backend, config, driver
from tests.errors import refused


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(config, "settings", replace(config.settings, backend="auto"))
    monkeypatch.setattr(backend, "_decisions", {})


def choose(name):
    config.settings = replace(config.settings, backend=name)


def on_gpu(index):
    """What `use_cuda` looks at of a tensor."""
    return SimpleNamespace(is_cuda=True, get_device=lambda: index, device=f"cuda:{index}")


@pytest.fixture
def gpus(monkeypatch):
    """cuda:0 is a Hopper GPU, cuda:1 an older one."""
    asked = []

    def capability(index):
        asked.append(index)
        return ((9, 0), (8, 0))[index]

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(driver, "driver_version", lambda: (13, 0))
    return asked


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_cpu_tensors_run_on_the_reference(name):
    choose(name)
    assert backend.use_cuda(torch.zeros(1), torch.zeros(1)) is False


def test_auto_takes_the_kernels_on_hopper_only(gpus):
    assert backend.use_cuda(on_gpu(0)) is True
    assert backend.use_cuda(on_gpu(1)) is False
    assert backend.use_cuda(on_gpu(0), on_gpu(0)) is True
    assert backend.use_cuda(on_gpu(0), torch.zeros(1)) is False


def test_the_device_is_looked_at_once(gpus):
    for _ in range(3):
        backend.use_cuda(on_gpu(0), on_gpu(0))
    assert gpus == [0]


def test_reference_wins_on_hopper(gpus):
    choose("reference")
    assert backend.use_cuda(on_gpu(0)) is False
    assert gpus == []


def test_a_change_of_the_setting_takes_effect(gpus):
    assert backend.use_cuda(on_gpu(1)) is False
    choose("cuda")
    with pytest.raises(RuntimeError):
        backend.use_cuda(on_gpu(1))
    assert backend.use_cuda(on_gpu(0)) is True


@pytest.mark.parametrize(
    ("build", "is_there", "tensors", "message"),
    [
        (None, True, lambda: [torch.zeros(1)], "has no CUDA: install a CUDA build, or set FP8MOE_BACKEND="),
        ("13.0", False, lambda: [torch.zeros(1)], "no usable NVIDIA GPU or driver here: set FP8MOE_BACKEND="),
        ("13.0", True, lambda: [on_gpu(0), torch.zeros(1)], "a tensor is on cpu: move it to a Hopper GPU"),
        ("13.0", True, lambda: [on_gpu(1)], r"Hopper GPU \(sm_90\) and cuda:1 is GPU 1: set FP8MOE_BACKEND="),
    ],
)
def test_cuda_where_it_cannot_run(gpus, monkeypatch, build, is_there, tensors, message):
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    choose("cuda")
    refused(RuntimeError, message, backend.use_cuda, *tensors())


def test_rocm_is_not_hopper(gpus, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert backend.use_cuda(on_gpu(0)) is False


@pytest.mark.parametrize("name", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("place", "attribute", "value", "message"),
    [
        (backend.importlib.util, "find_spec", None, "pip install cuda-python nvidia-cuda-nvrtc"),
        (driver, "driver_version", (12, 4), r"supports CUDA 12\.4, .* CUDA 13: update the driver"),
    ],
)
def test_what_hopper_lacks_is_an_error(gpus, monkeypatch, name, place, attribute, value, message):
    choose(name)
    monkeypatch.setattr(place, attribute, lambda *_: value)
    for _ in range(2):  # a refusal is not remembered as a decision
        refused(RuntimeError, message, backend.use_cuda, on_gpu(0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_a_missing_driver_is_a_clear_error():
    refused(RuntimeError, "no NVIDIA driver found: install one, or set FP8MOE_BACKEND=reference", driver.driver_version)


def test_a_failed_driver_call_names_the_call_and_the_error():
    def cuSomething(value):
        return (SimpleNamespace(value=value, name="CUDA_ERROR_INVALID_VALUE"), 7)

    assert driver.check(cuSomething, 0) == 7
    refused(driver.DriverError, "cuSomething failed: CUDA_ERROR_INVALID_VALUE", driver.check, cuSomething, 1)
