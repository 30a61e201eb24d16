"""`fp8moe warmup`: compile the kernels of a model before it runs, on any machine."""

import argparse
import importlib.util
import json
import re
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from fp8moe.kernels.gemm.warmup import Family, RequiredKernels
from fp8moe.runtime import config, jit
from fp8moe.runtime.jit import KernelSpec
from fp8moe.runtime.progress import progress, shown, still_running
from fp8moe.runtime.record import in_own_process
from fp8moe.runtime.sm90 import USUAL_SMS
from fp8moe.weights.source import CONFIG, HF_QUANT_CONFIG, config_problems, read_json

_FEW_ENOUGH = 8192  # tokens; prompts longer than this need more GEMM variants, but no more of any other kernels
_WAY_OUT = "expected a directory of your own, writable by nobody else, with 256 MB of room (docs/warmup.md)"


def run(options: argparse.Namespace) -> int:
    if options.json and not options.check:
        raise ValueError("--json: what it prints is what --check finds; give both")
    source = _read_source(options)
    directory = options.output.absolute() if options.output else config.settings.cache_dir
    start = monotonic()
    with shown(not options.quiet), _processes(options.jobs, directory) as pool:
        with still_running("finding the kernels"):
            kernels = _kernels(pool, source, options)
            missing = _missing(pool, kernels)
        if options.check:
            _print_missing(kernels, missing, directory, options)
            return 1 if missing else 0
        compiled = {pool.submit(jit.cubin, spec): spec for spec in missing}
        with progress(as_completed(compiled), total=len(compiled), label="compiling") as bar:
            for done in bar:
                _raise_error(compiled[done], done.exception())
        lost = _missing(pool, kernels)
    if lost:
        raise OSError(f"{directory}: keeps {len(kernels) - len(lost)} of {len(kernels)} kernels; {_WAY_OUT}")
    if not options.quiet:
        seconds = monotonic() - start
        print(f"{len(kernels)} kernels in {directory}, {len(missing)} of them compiled now, {seconds:.0f} s")
    return 0


def _read_source(options: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of SRC or of --model-type, with the values of --set. Raises ValueError if invalid."""
    if (options.source is None) == (options.model_type is None):
        raise ValueError("expected either SRC or --model-type")
    problems: list[str] = []
    if options.source is None:
        content = {"model_type": options.model_type}
    else:
        path = options.source / CONFIG if options.source.is_dir() else options.source
        if not path.is_file():
            raise ValueError(f"SRC is {str(options.source)!r}; it must be a directory with a {CONFIG}, or such a file")
        content = read_json(path, problems)
        beside = path.with_name(HF_QUANT_CONFIG)
        says = read_json(beside, problems).get("quantization") if beside.exists() else None
        if isinstance(says, dict):
            content.setdefault("quantization_config", {"quant_method": "modelopt", **says})
    content |= dict(options.set)
    for problem in problems + config_problems(content):
        raise ValueError(problem)
    return content


def _print_missing(
    kernels: list[KernelSpec], missing: list[KernelSpec], directory: Path, options: argparse.Namespace
) -> None:
    lines = sorted(map(_described, missing))
    if options.json:
        print(json.dumps({"directory": str(directory), "kernels": len(kernels), "missing": lines}, indent=2))
    elif not options.quiet:
        print(*lines, f"{len(missing)} of {len(kernels)} kernels are missing in {directory}", sep="\n")


def _kernels(pool: ProcessPoolExecutor, source: dict[str, Any], options: argparse.Namespace) -> list[KernelSpec]:
    """Return every kernel that the model may launch within the limits of the options."""
    if importlib.util.find_spec("transformers") is None:
        raise RuntimeError("transformers, which makes the models, is not installed: pip install transformers")
    from fp8moe.decode.prefill import MOST_WHOLE_TOKENS

    sms = _sms(options)
    decoder = min(max(options.batch_sizes) * options.max_length, MOST_WHOLE_TOKENS)
    tokens = max(options.tokens, decoder)
    few = min(tokens, _FEW_ENOUGH)
    fp8 = [None if asked is None else torch.float8_e4m3fn for asked in (options.cache_dtype, options.output_dtype)]
    how = options.experts, *fp8
    kernels, families = in_own_process(_record, source, options.batch_sizes, few, sms, how, dict(options.set))
    variants = [pool.submit(_variants, *item, tokens, decoder, sms) for item in families.items()]
    return list(kernels.union(*(future.result() for future in variants)))


def _record(
    source: dict, batch_sizes: list[int], tokens: int, sms: int, how: Iterable[Any] = (), given: Iterable[str] = ()
) -> RequiredKernels:
    """Return the kernels and GEMM families that a model needs.

    source: the model's configuration. how: the `Options` of `required_kernels`. given: names of the values that --set
    sets.
    """
    from transformers import CONFIG_MAPPING
    from transformers.utils import logging

    from fp8moe.decode.required_kernels import Options, required_kernels
    from fp8moe.hf.architecture import reason_of

    logging.set_verbosity_error()
    model_type = source.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ValueError(f"model_type is {model_type!r}; it must be one that transformers knows, such as 'qwen3_moe'")
    for name in given:
        if not hasattr(CONFIG_MAPPING[model_type](), name):
            raise ValueError(f"--set {name}: the configuration of {model_type} has no such value")
    try:
        made = CONFIG_MAPPING[model_type].from_dict(source)
    except Exception as error:  # transformers may raise anything for a broken config.json
        raise ValueError(f"config.json: transformers cannot read it ({reason_of(error)})") from None
    return required_kernels([made], batch_sizes, tokens, sms, Options(*how))


def _variants(family: Family, rows: int, tokens: int, decoder: int, sms: int) -> set[KernelSpec]:
    """Return the kernels of a GEMM family for prompts of 1 to `tokens` tokens.

    Also returns the kernels that GraphDecoder loads for prefill of up to `decoder` tokens at once. rows: rows of the
    GEMM per token.
    """
    return family.all_variants(rows, rows * tokens, sms) | family.variants(rows * decoder, sms)


def _sms(options: argparse.Namespace) -> int:
    sms = options.sms
    if sms is None and torch.cuda.is_available():
        sms = torch.cuda.get_device_properties(0).multi_processor_count
    sms = sms or USUAL_SMS
    return min(sms, config.settings.num_sms or sms)


def _missing(pool: ProcessPoolExecutor, kernels: list[KernelSpec]) -> list[KernelSpec]:
    there = pool.map(jit.is_cached, kernels, chunksize=16)
    return [spec for spec, known in zip(kernels, there, strict=True) if not known]


def _raise_error(spec: KernelSpec, error: BaseException | None) -> None:
    """Raise the error of a compilation, if there is one, with the kernel's name in the message."""
    if isinstance(error, BrokenProcessPool):
        raise error  # the processes have died: this concerns all kernels not yet compiled, so name none
    if error is not None:
        raise RuntimeError(f"{_described(spec)}: {error}") from error


def _described(spec: KernelSpec) -> str:
    values = dict(re.findall(r"constexpr int (\w+) = (-?\d+);", spec.prelude)) | dict(spec.defines)
    return " ".join([spec.name, *(f"{name}={value}" for name, value in values.items())])


@contextmanager
def _processes(count: int, directory: Path) -> Iterator[ProcessPoolExecutor]:
    """Start worker processes with `directory` as kernel cache. On an early exit they finish their current kernel."""
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_begin, initargs=(directory,))
    try:
        yield _started(pool)
    except BrokenProcessPool:
        raise RuntimeError("a process ended before its work did, perhaps for want of memory; try --jobs 1") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _started(pool: ProcessPoolExecutor) -> ProcessPoolExecutor:
    """Start the processes of a pool with SIGINT blocked, so that Ctrl-C in the terminal interrupts this process only.

    A process inherits the signals that are blocked here when it starts.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        pool.submit(int)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pool


def _begin(directory: Path) -> None:
    config.settings = replace(config.settings, cache_dir=directory)
    torch.set_num_threads(1)
