"""`fp8moe info`: print versions, settings, devices, and whether kernels can be compiled here."""

import argparse
import json
import platform
from dataclasses import asdict
from importlib import metadata

import torch

from fp8moe import __version__
from fp8moe.runtime import config
from fp8moe.runtime.architectures import ARCHITECTURES
from fp8moe.runtime.backend import use_cuda

PACKAGES = ("torch", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "transformers", "gguf", "fa3-fwd")


def run(options: argparse.Namespace) -> int:
    versions = {"fp8moe": __version__, "python": platform.python_version()}
    versions |= {package: _version(package) for package in PACKAGES}
    settings = {f"FP8MOE_{name.upper()}": value for name, value in asdict(config.settings).items()}
    devices = {device: _backend(device) for device in _devices()}
    compiling = {known.flag: _compiles(known.flag) for known in ARCHITECTURES}
    if options.json:
        report = {"versions": versions, "settings": settings, "devices": devices, "compiling": compiling}
        print(json.dumps(report, default=str, indent=2))
        return 0
    rows = versions | settings | devices | {f"compiling for {arch}": answer for arch, answer in compiling.items()}
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
    return 0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def _backend(device: str) -> str:
    name = torch.cuda.get_device_name(device) + ", " if device != "cpu" else ""
    try:
        return name + ("cuda kernels" if use_cuda(torch.empty(0, dtype=torch.float32, device=device)) else "reference")
    except RuntimeError as error:
        return f"{name}cannot run: {error}"


def _compiles(arch: str) -> str:
    """Compile an empty kernel with NVRTC. Returns "yes", or "no" with the error, whatever its type."""
    try:
        from cuda.core import Program, ProgramOptions

        Program('extern "C" __global__ void nothing() {}', "c++", ProgramOptions(arch=arch)).compile("cubin")
    except Exception as error:
        return f"no: {error}"
    return "yes"
