"""`fp8moe warmup`: compile the kernels of a model before it runs, on any machine."""

import argparse
import importlib.util
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from fp8moe.commands.model_sizes import add_source, read_source
from fp8moe.kernels.gemm.warmup import Family
from fp8moe.runtime import config, jit
from fp8moe.runtime.jit import KernelSpec
from fp8moe.runtime.progress import progress, still_running

HELP = "compile the kernels of a model before it runs; needs no GPU"
DESCRIPTION = (
    "Compile the kernels that GraphDecoder and prompts of a model may need. Reads config.json only; needs neither a "
    "GPU nor a driver."
)
SMS = 132  # of H100 and H200 SXM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    add = parser.add_argument
    add("--batch-sizes", type=_count, nargs="+", default=[1], metavar="B", help="those of GraphDecoder; default: 1")
    add("--max-length", type=_count, default=4096, metavar="L", help="that of GraphDecoder; default: %(default)s")
    add("--tokens", type=_count, default=8192, metavar="T", help="most tokens of a prefill; default: %(default)s")
    add("--sms", type=_count, metavar="N", help=f"SMs of the target GPU; default: those of the GPU here, or {SMS}")
    add("--output", type=Path, metavar="DIR", help="where to keep the kernels; default: FP8MOE_CACHE_DIR")
    jobs = len(os.sched_getaffinity(0))
    add("--jobs", type=_count, default=jobs, metavar="N", help="processes that compile; default: one for each CPU")
    add("--check", action="store_true", help="compile nothing; list what is missing, and exit with status 1 if any is")


def run(options: argparse.Namespace) -> int:
    source = read_source(options)
    directory = options.output.absolute() if options.output else config.settings.cache_dir
    start = monotonic()
    with _processes(options.jobs, directory) as pool:
        with still_running("finding the kernels"):
            kernels = _kernels(pool, source, options)
            missing = _missing(pool, kernels)
        if options.check:
            print("\n".join(sorted(map(_described, missing))), end="\n" if missing else "")
            print(f"{len(missing)} of {len(kernels)} kernels are missing in {directory}")
            return 1 if missing else 0
        compiled = {pool.submit(jit.cubin, spec): spec for spec in missing}
        with progress(as_completed(compiled), total=len(compiled), label="compiling") as bar:
            for done in bar:
                _raise_error(compiled[done], done.exception())
        lost = _missing(pool, kernels)
    if lost:
        raise OSError(f"{directory}: keeps {len(kernels) - len(lost)} of {len(kernels)} kernels; {_WAY_OUT}")
    print(f"{len(kernels)} kernels in {directory}, {len(missing)} of them compiled now, {monotonic() - start:.0f} s")
    return 0


_FEW_ENOUGH = 8192  # tokens: prompts of more need no further kernels, but those of GEMMs
_WAY_OUT = "expected a directory of your own, writable by nobody else, with 256 MB of room (docs/warmup.md)"


def _kernels(pool: ProcessPoolExecutor, source: dict[str, Any], options: argparse.Namespace) -> list[KernelSpec]:
    """All that may be launched."""
    if importlib.util.find_spec("transformers") is None:
        raise RuntimeError("transformers, which makes the models, is not installed: pip install transformers")
    from fp8moe.integrations.decode.prefill import MOST_WHOLE_TOKENS

    sms = _sms(options.sms)
    decoder = min(max(options.batch_sizes) * options.max_length, MOST_WHOLE_TOKENS)
    tokens = max(options.tokens, decoder)
    recorder = ProcessPoolExecutor(1, mp_context=get_context("spawn"))  # unfit for other use
    with recorder:
        kernels, families = recorder.submit(
            _record, source, options.batch_sizes, min(tokens, _FEW_ENOUGH), sms
        ).result()
    found = [pool.submit(_variants, *item, tokens, decoder, sms) for item in families.items()]
    return list(kernels.union(*(one.result() for one in found)))


def _record(source: dict[str, Any], batch_sizes: list[int], tokens: int, sms: int) -> tuple:
    """The kernels and families of `integrations.decode.required_kernels`."""
    from transformers import CONFIG_MAPPING
    from transformers.utils import logging

    from fp8moe.integrations.architecture import reason_of
    from fp8moe.integrations.decode.required_kernels import required_kernels

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    model_type = source.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"model_type is {model_type!r}; it must be one that transformers knows, such as 'qwen3_moe'")
    try:
        made = CONFIG_MAPPING[model_type].from_dict(source)
    except Exception as error:  # a broken config.json makes transformers raise anything
        raise ValueError(f"config.json: transformers cannot read it ({reason_of(error)})") from None
    return tuple(required_kernels([made], batch_sizes, tokens, sms))


def _variants(family: Family, rows: int, tokens: int, decoder: int, sms: int) -> set[KernelSpec]:
    """Of a family of GEMMs, for prompts of 1 to `tokens`, and those that GraphDecoder loads for up to `decoder`.

    rows: of the family, for one token.
    """
    return family.all_variants(rows, rows * tokens, sms) | family.variants(rows * decoder, sms)


def _sms(given: int | None) -> int:
    if given is None:
        given = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else SMS
    return min(given, config.settings.num_sms or given)


def _missing(pool: ProcessPoolExecutor, kernels: list[KernelSpec]) -> list[KernelSpec]:
    there = pool.map(jit.is_cached, kernels, chunksize=16)
    return [spec for spec, known in zip(kernels, there, strict=True) if not known]


def _raise_error(spec: KernelSpec, error: BaseException | None) -> None:
    """That of compiling the kernel, if there is one."""
    if isinstance(error, BrokenProcessPool):
        raise error  # of all kernels that were still to come
    if error is not None:
        raise RuntimeError(f"{_described(spec)}: {error}") from error


def _described(spec: KernelSpec) -> str:
    values = dict(re.findall(r"constexpr int (\w+) = (-?\d+);", spec.prelude)) | dict(spec.defines)
    return " ".join([spec.name, *(f"{name}={value}" for name, value in values.items())])


@contextmanager
def _processes(count: int, directory: Path) -> Iterator[ProcessPoolExecutor]:
    """With `directory` as their cache. Where this process stops early they stop after what they are at."""
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_begin, initargs=(directory,))
    try:
        yield pool
    except BrokenProcessPool:
        raise RuntimeError("a process ended before its work did, perhaps for want of memory; try --jobs 1") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(directory: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the first process ends the others
    config.settings = replace(config.settings, cache_dir=directory)
    torch.set_num_threads(1)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)
