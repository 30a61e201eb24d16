"""What the benchmarks have in common before and after they measure: GPU, result, command line."""

import argparse
import platform
import subprocess
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

import torch

import fp8moe
from benchmarks.report import Threshold, digest, format_thresholds, write_json
from fp8moe.runtime.architectures import SM90

ROOT = Path(__file__).parent.parent


def start() -> str:
    """Seeds PyTorch. The name of the current GPU; SystemExit with one sentence if there is none or it is not sm_90."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a Hopper GPU and PyTorch sees no GPU; run it on a machine that has one")
    name = torch.cuda.get_device_name()
    capability = torch.cuda.get_device_capability()
    if capability != SM90.capability:
        raise SystemExit(f"this benchmark needs a Hopper (sm_90) GPU; {name} is sm_{capability[0]}{capability[1]}")
    torch.manual_seed(0)
    return name


def versions() -> dict[str, str]:
    """What the results were measured with."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    packages = ("torch", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "python": platform.python_version(),
        "fp8moe": fp8moe.__version__,
        **{package: metadata.version(package) for package in packages},
    }


def result(gpu: str, rows: Sequence[dict], thresholds: Iterable[Threshold], **more: object) -> dict:
    """What a benchmark's `run` returns: {"gpu", "rows", what there is more, "thresholds"}."""
    return {"gpu": gpu, "rows": rows, **more, "thresholds": [threshold.as_dict() for threshold in thresholds]}


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """Of `python -m benchmarks.NAME`, with the directory that results go to."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    made.add_argument("--out", type=Path, default=Path("benchmarks/results"), metavar="DIR")
    return made


def finish(path: Path, result: dict, *tables: str) -> None:
    """Writes a result with the digest of what the GPU has run, and prints the tables and its thresholds."""
    write_json(path, {"digest": digest(ROOT)} | result)
    print(*tables, format_thresholds(result["thresholds"]), sep="\n\n")
