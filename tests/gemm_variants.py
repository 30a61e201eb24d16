"""The compiled variants of the GEMM kernels: one of each structure, and what is wrong with them."""

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch

from fp8moe.kernels.gemm import launch
from fp8moe.kernels.gemm.epilogue import Columns, Epilogue, Packing
from fp8moe.kernels.gemm.sm90 import TileConfig, with_columns
from fp8moe.kernels.gemm.source import kernel_spec
from fp8moe.runtime import compilers
from fp8moe.runtime.architectures import SM90
from fp8moe.runtime.jit import KernelSpec, full_source
from fp8moe.runtime.sm90 import REGISTERS_PER_SM
from tests.ptxas import compile_report


def structure(config: TileConfig) -> tuple:
    """What decides the registers of a variant: not how deep its ring is or how many blocks share K."""
    tile = (config.block_m, config.block_n, config.weights_as_rows, config.warpgroups, config.tma_store)
    return (*tile, config.math_registers, config.overlaps, config.split_k > 1, config.k_parts > 1)


def one_of_each(candidates: Iterable[tuple[TileConfig, int, int]]) -> list[tuple[TileConfig, int, int]]:
    """One (config, n, k) of every structure among the candidates: with the fewest registers, then the most splits."""
    found = {}
    for config, n, k in candidates:
        key, cost = structure(config), (config.blocks_per_sm, config.split_k)
        if key not in found or cost > found[key][0]:
            found[key] = cost, (config, n, k)
    return [variant for _, variant in found.values()]


def largest(variants: list[tuple[TileConfig, int, int]]) -> list[tuple[TileConfig, int, int]]:
    """Of variants that differ in nothing but the tile's sizes, those whose threads have the most sums."""

    def kind(config: TileConfig) -> tuple:
        return structure(config)[2:]

    most = {}
    for config, _, _ in variants:
        most[kind(config)] = max(most.get(kind(config), 0), config.slabs * config.accumulators)
    return [variant for variant in variants if variant[0].slabs * variant[0].accumulators == most[kind(variant[0])]]


def faults(
    variants: Iterable[tuple[TileConfig, int, int]],
    epilogue: Epilogue,
    bias_dtype: torch.dtype | None = None,
    packing: Packing | None = None,
) -> dict[TileConfig, tuple]:
    """Of the variants compiled with an epilogue and a bias: spills, complaints, too many registers."""
    found, columns = {}, Columns(bias_dtype=bias_dtype, packing=packing)
    for config, n, k in variants:
        report = compile_report(kernel_spec(with_columns(config, columns.bytes, k), n, k, epilogue, columns))
        memory = (report.spill_stores, report.spill_loads, report.stack)
        complaints = report.complaints
        # Threads start with even shares, so that all blocks fit; setmaxnreg gives the math threads more afterwards.
        share = REGISTERS_PER_SM // (config.threads * config.blocks_per_sm)
        if any(memory) or complaints or report.static_smem or report.registers > share:
            found[config] = (memory, complaints, report.static_smem, report.registers)
    return found


def counts_shared_memory_alike(spec: KernelSpec, nbytes: int) -> bool:
    """Whether a kernel lays out so many bytes, and says so of 8 less. Errors keep the compiler from making code."""
    text, size = full_source(spec), f"SHARED_BYTES = {nbytes};"
    assert size in text
    wrong = text.replace(size, f"SHARED_BYTES = {nbytes - 8};")
    errors = []
    for source in (text, wrong):
        with pytest.raises(compilers.CompileError) as error:
            compilers.compile_source(f'{source}\nstatic_assert(false, "the end");', "gemm.cu", "nvrtc", SM90.flag)
        errors.append(str(error.value))
    assert all("the end" in error for error in errors)
    return ["counts otherwise" in error for error in errors] == [False, True]


def without_gpu(monkeypatch, num_sms: int = 132) -> list:
    """The arguments of the kernels whose launchers are built from now on, without a GPU."""
    found = []
    monkeypatch.setattr(launch, "tensor_map", lambda *operands, **layout: SimpleNamespace(replace_address=None))
    monkeypatch.setattr(launch, "load", lambda spec: None)
    monkeypatch.setattr(launch, "num_sms", lambda index: num_sms)
    monkeypatch.setattr(launch, "Launcher", lambda kernel, *, args, **options: found.append(args[-1]))
    return found
