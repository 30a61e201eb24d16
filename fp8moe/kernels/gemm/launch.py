"""Launchers of ``cuda/sm90/gemm.cu`` and ``gemm_k.cu``: built once per problem; later calls replace addresses only."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8moe.kernels.gemm.epilogue import AddAndStore, Columns, Epilogue, Packing, PeerStore, PlainStore
from fp8moe.kernels.gemm.sm90 import (
    GATHERED_ROWS,
    GATHERED_TOKENS,
    GroupedKTile,
    TileConfig,
    gathering,
    tokens_of_tile,
    with_columns,
)
from fp8moe.kernels.gemm.source import GroupedKArguments, arguments_type, grouped_k_spec, is_dynamic, kernel_spec
from fp8moe.kernels.gemm.tiles import (
    FEWEST_AS_ROWS,
    DenseProblem,
    Grouping,
    choose,
    choose_grouped_k,
    raster_group,
    row_tiles_bound,
)
from fp8moe.kernels.gemm.warmup import Family, note
from fp8moe.quant.arranged import ARRANGED
from fp8moe.quant.formats import (
    PACKED_FORMATS,
    FP8Tensor,
    ceil_div,
    has_block_scales,
    has_channel_scales,
    is_packed,
    packed_format,
    packed_group,
)
from fp8moe.runtime import config
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import Launcher, TensorMap, current_stream, device_guard, num_sms, planned, tensor_map


class GemmOperands(NamedTuple):
    """Operands of a GEMM: ``a @ b.T + bias + c``.

    a, a_scale: activations (M, K) float8_e4m3fn and (M, ceil(K / 128)) float32; (E, max_m, ...) for masked groups.
    b, b_scale: weights (N, K), or (E, N, K) for groups, float8_e4m3fn; a float32 scale for each 128x128 block, or for
        each output channel, (..., N, 1). Or data and scale of a PackedTensor; for `build`,
        MXFP4 arranged (quant/arranged.py).
    bias: (N,), or (E, N) for groups. c: (M, N) of the result's dtype.
    groups: int32: row offsets (E + 1,), row ranges (E, 2) of first row and end, or numbers of rows in use (E,).
    """

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor
    bias: Tensor | None = None
    c: Tensor | None = None
    groups: Tensor | None = None

    def layouts(self) -> tuple[tuple | None, ...]:
        """Return the operands' layouts, which are a part of the key of a cached launcher.

        To collect the layouts, `planned` would take a microsecond longer than this method.
        """
        return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in self])


class GemmLauncher:
    """A kernel with its tensor maps and arguments. The kernel's device must be current to build or launch it.

    maps: tensor maps of the operands and, if TMA stores the result, of the result, in the order of `mapped` in
    `launch`. scales: tensor map of the weight scales if they are arranged. arguments: the kernel's
    argument structure. pointers: number of leading fields of that structure that are addresses and pitches. out: a
    tensor with the layout of the results, or None; if given, `new_out` allocates results and `shape` is their shape.
    dynamic: blocks take tiles from a counter. The counter is an int32 directly behind the groups in memory, and must be
    0 before the launch.
    """

    def __init__(
        self,
        spec: KernelSpec,
        maps: Iterable[TensorMap],
        arguments: ctypes.Structure,
        pointers: int,
        out: Tensor | None,
        dynamic: bool = False,
        scales: TensorMap | None = None,
        **configuration: int | bool,
    ):
        self.dynamic = dynamic
        maps = tuple(maps)
        self._move = tuple(one.replace_address for one in maps)
        self._arguments = arguments
        # This array shares memory with the first fields: assigning to it sets all of them, faster than one by one.
        self._pointers = (ctypes.c_int64 * pointers).from_buffer(arguments)
        self._move_scales = None if scales is None else scales.replace_address
        # gemm.cu has parameters for the tensor maps of scales and of the result. Where it has no use for them, pass
        # any map.
        parameters = (*maps, arguments)
        if len(maps) <= 4:
            parameters = (*maps[:3], scales or maps[0], maps[-1], arguments)
        self._launcher = Launcher(load(spec), args=parameters, **configuration)
        if out is not None:
            self.shape = tuple(out.shape)
            # empty_strided with bound arguments takes half the time of torch.empty.
            self.new_out = functools.partial(
                torch.empty_strided, self.shape, out.stride(), dtype=out.dtype, device=out.device
            )

    def launch(
        self, stream: int, mapped: tuple[int, ...], pointers: tuple[int, ...], groups: int = 0, rows: int = 0
    ) -> None:
        """Enqueue the kernel.

        mapped: addresses for the tensor maps, multiples of 16: a, a_scale, b, result; for a GEMM grouped along K: a,
            a_scale, b, b_scale, result, result.
        pointers: b_scale, bias or 0, then addresses and pitches in the order of the epilogue's `fields`; for a GEMM
            grouped along K: the offsets.
        groups: address of `GemmOperands.groups`, 0 for a dense GEMM. rows: that of the tokens' rows, if these are
            gathered.
        """
        launcher = self._launcher
        with launcher.lock:
            for move, address in zip(self._move, mapped):  # noqa: B905 (the result may have no map)
                move(address)
            if self._move_scales is not None:
                self._move_scales(pointers[0])
            self._pointers[:] = pointers
            if groups:
                self._arguments.groups = groups
            if rows:
                self._arguments.rows = rows
            launcher.launch(stream)


# ---- dense GEMMs and groups of rows ----


def build(
    operands: GemmOperands,
    epilogue: Epilogue,
    grouping: Grouping | None = None,
    out: Tensor | None = None,
    *,
    tile: TileConfig | None = None,
    pdl: bool = False,
    top_k: int | None = None,
) -> GemmLauncher:
    """Build the launcher of a dense or row-grouped GEMM of operands with these layouts, whose device must be current.

    operands: the rows of ``a`` and of ``b`` (N, K) lie at multiples of 16 bytes, and so do the starts of a_scale,
        channel scales and bias; a_scale is MN-major; ``b`` (E, N, K) is contiguous.
    grouping: None for a dense GEMM. epilogue: gives the result's dtype; the result is (M, N), or (M, N / 2) if gated.
    out: a tensor with the layout of the results; None for contiguous results, or if the epilogue stores to peers.
    tile: overrides the cost model's choice. pdl: start before the previous kernel in the stream has ended.
    top_k: if given, ``a`` has tokens, of which each is in `top_k` rows of the result: see `gathers`.
    """
    a, b = operands.a, operands.b
    (m, k), n, groups = a.shape, b.shape[-2], b.shape[0] if grouping else 0
    m *= top_k or 1
    if out is None and not isinstance(epilogue, PeerStore):
        out = torch.empty((m, n // 2 if epilogue.gated else n), dtype=epilogue.out_dtype, device=a.device)
    grouping = grouping or Grouping()
    sms = num_sms(a.get_device())
    bias_dtype = None if operands.bias is None else operands.bias.dtype
    packing = packing_of(b, operands.b_scale) if is_packed(b) else None
    packed = None if packing is None else packing.format
    problem = DenseProblem(m, n, k, sms, packed)
    columns = Columns(has_channel_scales(b, operands.b_scale), bias_dtype, packing)
    if groups:
        problem = grouping.problem(m, groups, n, k, sms, swiglu=epilogue.gated, packed=packed)
    if tile is None:
        if grouping.max_m is None:
            # A part of a GEMM may have any number of rows, so record the number of rows of the whole GEMM.
            family = Family(n, k, groups, epilogue.kind, columns, gathers=top_k is not None)
            note(family, grouping.whole[0] if grouping.whole else m)
        tile = choose(problem, epilogue, grouping.whole)
    tile = with_columns(tile, columns.bytes, k)
    if top_k:
        tile = gathering(tile, k)
    if config.settings.print_configs:
        about = f"grouped_gemm m={m} groups={groups} expected_m={problem.expected_m}" if groups else f"gemm m={m}"
        config.log.info(f"{about} n={n} k={k} {epilogue} {columns}: {tile}")

    tile_m = tokens_of_tile(tile, m)
    tile_rows = row_tiles_bound(tile_m, m, max(groups, 1), grouping.max_m)
    tiles = tile_rows * ceil_div(n, tile.block_n)
    # Either each block computes one tile, or a grid of resident blocks loops over all tiles.
    concurrent = tiles if tile.single_tile else min(tiles, sms * tile.blocks_per_sm)
    arguments = arguments_type(epilogue)(
        m=m,
        max_m=grouping.max_m or 0,
        raster=raster_group(tile, m, k, concurrent),
        group_pitch=1 if operands.groups is None else operands.groups.dim(),
        tile_m=tile_m,
        tile_rows=tile_rows,
        counter=groups + (grouping.max_m is None),
        # Number of stages whose weights are loaded before any tokens. With pdl these are all stages, because the tokens
        # can be loaded only after the previous kernel; if these are gathered, weights are too.
        early_stages=tile.stages if pdl and not top_k else tile.first_stages,
        top_k=top_k or 1,
        **epilogue.values,
    )
    return GemmLauncher(
        kernel_spec(tile, n, k, epilogue, columns),
        _maps(operands, epilogue, tile, out),
        arguments,
        2 + sum(kind is ctypes.c_int64 for _, kind in epilogue.fields),
        out,
        is_dynamic(tile, k, epilogue),
        _map_of_scales(operands.b_scale, n, tile, epilogue) if tile.packed in ARRANGED else None,
        grid=concurrent * tile.split_k,
        block=tile.threads,
        cluster=tile.split_k,
        smem=tile.shared_bytes,
        pdl=pdl,
    )


def gathers(tokens: int, top_k: int, experts: int) -> bool:
    """Return whether a grouped GEMM can read its rows from `tokens` tokens by index, for `experts` experts in all.

    It can for few tokens and few rows an expert, for which weights are the 64-row operand.
    """
    few = tokens <= GATHERED_TOKENS and tokens * top_k <= GATHERED_ROWS
    return few and tokens * top_k < FEWEST_AS_ROWS * experts


def packing_of(b: Tensor, scale: Tensor) -> Packing:
    """Return how packed weights and their scales are stored."""
    form = packed_format(scale)
    return Packing(form, packed_group(b, scale) if form == "int4" else PACKED_FORMATS[form].groups[0], scale.dtype)


def _map_of_scales(scale: Tensor, n: int, tile: TileConfig, epilogue: Epilogue) -> TensorMap:
    """Make the tensor map of arranged scales, by projections of all experts: 4 bytes a feature, of NVFP4 8.

    It ends with the last feature: rows of a tile past that get zeros, which are offsets of the kernel's table.
    """
    projections = 2 if epilogue.gated else 1
    *lead, rows, _ = scale.shape
    dtype = torch.int64 if tile.packed == "nvfp4" else torch.int32
    words = scale.view(dtype).view(math.prod(lead) * projections, rows // projections, -1)
    shape, box = (*words.shape[:-1], n // projections), (1, tile.depth, tile.block_n // projections)
    return tensor_map(words, shape=shape, strides=words.stride(), box=box)


def _maps(operands: GemmOperands, epilogue: Epilogue, tile: TileConfig, out: Tensor | None) -> Iterable[TensorMap]:
    a, a_scale, b = operands.a, operands.a_scale, operands.b
    (m, k), n, groups = a.shape, b.shape[-2], tile.groups
    # A group may end within a tile, so if tokens are the 64-row operand, they are loaded 64 rows at a time.
    a_rows = 64 if groups and not tile.weights_as_rows else 1 if tile.gathers else tokens_of_tile(tile, m)
    # Gate and up, or the halves of a tile, are loaded one after the other.
    b_rows = tile.block_n // 2 if epilogue.gated or tile.half_tiles else tile.block_n
    blocks = a_scale.shape[1]
    yield tensor_map(a, shape=(m, k), strides=(a.stride(0), 1), box=(a_rows, 128), swizzle=128)
    scales = {"shape": (blocks, m), "strides": (a_scale.stride(1), 1)}
    yield tensor_map(a_scale, **scales, box=(1, tile.scale_box), l2_promotion=0)
    yield tensor_map(
        b,
        shape=(max(groups, 1) * n, b.shape[-1]),
        strides=(b.stride(-2), 1),
        box=(b_rows, 64 if tile.unpacks else 128),
        swizzle=0 if tile.unpacks else 128,
    )
    # TMA writes contiguous results only.
    if tile.tma_store and out is not None and out.dtype == torch.bfloat16 and out.stride(0) == n:
        yield tensor_map(out, shape=tuple(out.shape), strides=(n, 1), box=(64, 64), swizzle=128)


@planned
def dense(
    device_index: int, operands: GemmOperands, out_dtype: torch.dtype, pdl: bool = False, tile: TileConfig | None = None
) -> GemmLauncher:
    """Build the launcher of a dense GEMM. Arguments: see `build`."""
    kind = PlainStore if operands.c is None else AddAndStore
    return build(operands, kind(out_dtype), tile=tile, pdl=pdl)


@planned
def grouped(
    device_index: int,
    operands: GemmOperands,
    epilogue: Epilogue,
    grouping: Grouping | None,
    out: Tensor | None = None,
    *,
    tile: TileConfig | None = None,
) -> GemmLauncher:
    """Build the launcher of a grouped GEMM, or a dense one if grouping is None. Arguments: see `build`."""
    a, a_scale, *_ = operands
    if a.dim() == 3:
        operands = operands._replace(a=a.flatten(0, 1), a_scale=a_scale.flatten(0, 1))
    return build(operands, epilogue, grouping, out, tile=tile)


def find(launcher: planned[..., GemmLauncher], operands: GemmOperands, *options: object) -> GemmLauncher | None:
    """Return the cached launcher for operands in these layouts; None if there is none, or operands are not aligned.

    If a launcher is returned, the operands need no checks or copies: operands in equal layouts have passed the checks.

    launcher: `dense`, `grouped` or another planned function. options: its arguments after the operands.
    """
    a, a_scale, b, b_scale, bias, c, _ = operands
    found = launcher.look_up(a.get_device(), operands.layouts(), *options)
    if found is None:
        return None
    addresses = a.data_ptr() | a_scale.data_ptr() | b.data_ptr() | (0 if c is None else c.data_ptr())
    return None if (addresses | column_addresses(b_scale, bias)) & 15 else found


def column_addresses(b_scale: Tensor, bias: Tensor | None) -> int:
    """Return the bitwise OR of the addresses of bias and channel scales (0 if neither exists), to test alignment."""
    addresses = 0 if bias is None else bias.data_ptr()
    return addresses | b_scale.data_ptr() if b_scale.shape[-1] == 1 or b_scale.element_size() == 1 else addresses


def run(found: GemmLauncher, operands: GemmOperands, out: Tensor, *more: int) -> None:
    """Launch the GEMM on PyTorch's current stream.

    more: values of the epilogue's address and pitch fields, except the address and pitch of the result. If there is an
    operand c, this function passes the address and pitch of c instead of ``more``.
    """
    a, a_scale, b, b_scale, bias, c, groups = operands
    index, address = a.get_device(), out.data_ptr()
    if found.dynamic:
        groups = pad(groups, (0, 1))
    if c is not None:
        more = c.data_ptr(), c.stride(0)
    bias = 0 if bias is None else bias.data_ptr()
    with device_guard(index):
        found.launch(
            current_stream(index),
            (a.data_ptr(), a_scale.data_ptr(), b.data_ptr(), address),
            (b_scale.data_ptr(), bias, address, out.stride(0), *more),
            0 if groups is None else groups.data_ptr(),
        )


def run_new(found: GemmLauncher, operands: GemmOperands) -> Tensor:
    """Launch the GEMM into a new contiguous tensor, and return that tensor."""
    out = found.new_out()
    run(found, operands, out)
    return out


def multiply_with(tile: TileConfig, operands: GemmOperands, out: Tensor, grouping: Grouping | None = None) -> None:
    """Compute a GEMM with a given tile, for benchmarks and tests. operands: see `build`."""
    index = operands.a.get_device()
    if grouping is None:
        run(dense(index, operands, out.dtype, False, tile), operands, out)
        return
    like = None if out.is_contiguous() else out
    run(grouped(index, operands, PlainStore(out.dtype), grouping, like, tile=tile), operands, out)


# ---- groups along K ----


@planned
def along_k(
    device_index: int, a: FP8Tensor, b: FP8Tensor, out: Tensor, accumulate: bool, tile: GroupedKTile | None = None
) -> GemmLauncher:
    """Build the launcher of ``out[e] (+)= a[:, columns of e] @ b[:, columns of e].T`` for operands with these layouts.

    a, b: (M, K) and (N, K) float8_e4m3fn, rows at multiples of 16 bytes; scales (M, K / 128), and (N, K / 128) or
        (ceil(N / 128), K / 128), float32, MN-major.
    out: (E, M, N) float32, or bfloat16 unless accumulate, contiguous. Scales and out at multiples of 16 bytes.
    tile: overrides the choice of `choose_grouped_k`.
    """
    (groups, m, n), k = out.shape, a.data.shape[1]
    sms = num_sms(device_index)
    tile = tile or choose_grouped_k(groups, m, n, sms, has_block_scales(*b))
    if config.settings.print_configs:
        config.log.info(f"grouped_gemm_k groups={groups} m={m} n={n} k={k}: {tile}")
    maps = []
    for (data, scale), rows, scales in ((a, tile.block_m, tile.block_m), (b, tile.block_n, tile.b_scales)):
        blocks = scale.shape[1]
        maps += [
            tensor_map(data, shape=data.shape, strides=(data.stride(0), 1), box=(rows, 128), swizzle=128),
            tensor_map(
                scale, shape=(blocks, len(scale)), strides=(scale.stride(1), 1), box=(1, scales), l2_promotion=0
            ),
        ]
    columns = tile.pieces.pitch // out.element_size()  # number of columns that one TMA store writes
    rest = tile.block_n % columns or columns  # number of columns that the last TMA store of a tile writes
    for width in (columns, rest):
        swizzle = tile.pieces.pitch if width == columns else 0
        maps.append(tensor_map(out, shape=out.shape, strides=out.stride(), box=(1, 16, width), swizzle=swizzle))
    rows = ceil_div(m, tile.block_m)
    grid = min(groups * rows * ceil_div(n, tile.block_n), sms)
    # Tiles that are computed at the same time read the least of both operands if they form a square.
    raster = min(rows, max(1, round((grid * tile.block_n / tile.block_m) ** 0.5)))
    spec = grouped_k_spec(tile, n, out_float32=out.dtype == torch.float32, accumulate=accumulate)
    arguments = GroupedKArguments(groups=groups, m=m, k=k, raster=raster)
    return GemmLauncher(spec, maps, arguments, 1, None, grid=grid, block=tile.threads, smem=tile.shared_bytes)


def run_along_k(
    a: FP8Tensor, b: FP8Tensor, group_offsets: Tensor, out: Tensor, accumulate: bool, tile: GroupedKTile | None = None
) -> None:
    """Compute the GEMM of `along_k` on PyTorch's current stream. group_offsets: (E + 1,) int32, contiguous."""
    index, address = out.get_device(), out.data_ptr()
    found = along_k(index, a, b, out, accumulate, tile)
    mapped = (a.data.data_ptr(), a.scale.data_ptr(), b.data.data_ptr(), b.scale.data_ptr(), address, address)
    with device_guard(index):
        found.launch(current_stream(index), mapped, (group_offsets.data_ptr(),))
