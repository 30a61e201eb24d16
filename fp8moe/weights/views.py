"""Views of stored weights, computed when read: FP8 in blocks, rows reordered, float32 or bfloat16 values, quantized.

A view computes one matrix at a time from the stored tensors: no file is written, and no second copy is held.
"""

from collections.abc import Callable, Collection, Iterator
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8moe.layers.experts import PACKED_WEIGHTS
from fp8moe.quant.arranged import arrange, arranged_shape
from fp8moe.quant.formats import BLOCK, E2M1, FP8_MAX, MX_BLOCK, FP8Tensor, PackedTensor, as_float
from fp8moe.quant.packed import blocks_of_nvfp4, e2m1_values, quantize_int4, quantize_mxfp4, unpacked
from fp8moe.quant.quantize import dequantize, quantize_128x128
from fp8moe.weights.formats import SCALE_DTYPES, scale_dtype, scale_grid
from fp8moe.weights.names import BIAS, GATE_UP, GROUPS
from fp8moe.weights.source import FP8, Reader, TensorSpec
from fp8moe.weights.stored import PACKED, StoredWeight, Weights, int4_layout

_BY_COLUMN = ("gptq", "awq")  # methods that store INT4 as (K, N), packed along either
_FP4_SHIFT = 6  # exponent of the largest factor from FP4 to E4M3: the largest value, 6, becomes 6 * 2^6 < 448
_FP4_SPREAD = 14  # largest exponent difference at which 0.5 is exact in E4M3: it becomes 0.5 * 2^(6 - 14) = 2^-9
_NAN = 255  # an exponent of E8M0
_FP4_LOWEST = 17  # largest exponent difference at which any FP4 value but 0 is exact: 4 becomes 4 * 2^(6 - 17) = 2^-9


def in_blocks(weights: Weights, *, packed: Collection[str] = ()) -> list[StoredWeight]:
    """Return a view of each weight as FP8 with float32 scales per 128x128 block or per channel.

    weights: weights in any format that fp8moe loads. packed: the names of weights in four bits to present as a
    `GroupedExperts` with a weight_format of four bits holds them. Weights in INT4 have no other view.

    Weights without a scale of their own, or with a scale of an unsupported dtype, stay as they are stored; `match`
    reports what is wrong with them.
    """
    exponents = weights.declared is not None and weights.declared.power_of_two
    in_turns = {weight.name.bias for weight in weights.stored if weight.interleaved}
    views = []
    for weight in weights.stored:
        if weight.name.text in packed:
            views.append(_in_four_bits(weight))
        else:
            views.append(bias_in_rows(weight) if weight.name.text in in_turns else _in_blocks(weight, exponents))
    return views


def _in_four_bits(weight: StoredWeight) -> StoredWeight:
    *lead, rows, columns = weight.shape
    view = weight._replace(dtype=PACKED, shape=(*lead, rows, columns // 2))
    if weight.kind == "int4":
        method, _ = int4_layout(weight.codes, weight.scale)
        dtype = "BF16" if weight.scale.dtype == "BF16" else "F32"
        grid = weight.scale.shape[::-1] if method in _BY_COLUMN else weight.scale.shape
        return view._replace(grid=grid, make=partial(_int4, method), scale_dtype=dtype)
    make, dtype = (_nvfp4_arranged, FP8) if weight.kind == "nvfp4" else (_mxfp4_arranged, "U8")
    grid = (*lead, *arranged_shape(rows, columns, weight.name.matrices, weight.kind))
    return view._replace(grid=grid, make=partial(_of_each, weight, make), scale_dtype=dtype)


def _int4(method: str, codes: Tensor, scale: Tensor) -> FP8Tensor:
    """Return codes and scale of a matrix as a PackedTensor has them. method: as `int4_layout` returns it."""
    if method in _BY_COLUMN:
        scale = scale.t().contiguous()
        codes = codes.t().contiguous() if method == "gptq" else _awq(codes)
    data = codes.view(torch.uint8) if method == "w4afp8" else codes.view(torch.uint8) ^ 0x88
    return FP8Tensor(data, scale if scale.dtype is torch.bfloat16 else scale.float())


def _awq(codes: Tensor) -> Tensor:
    """Return codes (K, N/8) as (N, K/2). An integer has eight of N, the even ones first."""
    first, second = codes.unflatten(0, (-1, 2)).unbind(1)
    low = 0x0F0F0F0F
    pairs = torch.stack((first & low | (second & low) << 4, first >> 4 & low | second & ~low))  # a byte has two of K
    return pairs.mT.contiguous().view(torch.uint8).unflatten(2, (-1, 2, 2)).permute(1, 4, 0, 3, 2).flatten(0, 3)


def _mxfp4_arranged(codes: Tensor, exponents: Tensor) -> FP8Tensor:
    """Return a matrix, codes (N, K/2), arranged; exponents of groups of zeros do not count."""
    data, power = codes.view(torch.uint8).flatten(1), exponents.view(torch.uint8)
    used = (data.unflatten(1, (-1, MX_BLOCK // 2)) & 0x77 != 0).any(-1) | (power == _NAN)
    return FP8Tensor(*arrange(PackedTensor(data, torch.where(used, power, 0), "mxfp4"))[:2])


def _nvfp4(codes: Tensor, scale: Tensor, tensor_scale: Tensor) -> PackedTensor:
    return PackedTensor(codes.view(torch.uint8), scale, "nvfp4", tensor_scale.view(()))


def _nvfp4_arranged(*matrix: Tensor) -> FP8Tensor:
    return FP8Tensor(*arrange(_nvfp4(*matrix))[:2])


def _in_blocks(weight: StoredWeight, bytes_are_exponents: bool) -> StoredWeight:
    if weight.kind is None or weight.shared:
        return weight
    if weight.kind == "int4":  # has no view in FP8; `match` reports the dtype of its codes
        return weight._replace(shape=weight.codes.shape)
    scale, grid = weight.scale, scale_grid(weight.name.matrices, weight.shape)
    grid = (*weight.shape[:-1], 1) if weight.kind == "fp8-channel" else grid
    make, known = None, scale.dtype in SCALE_DTYPES or (scale.dtype == "U8" and bytes_are_exponents)
    if weight.kind in _MICROSCALED:
        make, known = partial(_of_each, weight, _MICROSCALED[weight.kind]), True
    elif weight.kind == "fp8-tensor" and known:
        filled = partial(_filled, matrices=weight.name.matrices, grid=grid[-2:])
        make = partial(filled, transposed=weight.transposed)
    elif weight.transposed and known:
        make = partial(_transposed, grid=grid[-2:])
    as_stored = make is None and (scale.dtype in SCALE_DTYPES or not known)
    return weight._replace(dtype=FP8, grid=grid, make=make, scale_dtype=scale.dtype if as_stored else "F32")


def in_rows(weight: StoredWeight) -> StoredWeight:
    """View fused experts (E, columns, rows), gate and up interleaved, as (E, rows, columns) with all of gate first."""
    experts, columns, rows = weight.shape
    order = _gate_then_up if weight.name.projection == GATE_UP else Tensor.clone
    return weight.seen(lambda values: order(values.t().contiguous()), weight.dtype, shape=(experts, rows, columns))


def bias_in_rows(weight: StoredWeight) -> StoredWeight:
    """View a bias (E, 2I), gate and up interleaved, with all of gate first."""
    return weight.seen(lambda values: tensor_in_rows(BIAS, GATE_UP, values), weight.dtype)


def tensor_in_rows(role: str, projection: str | None, stored: Tensor) -> Tensor:
    """Reorder an interleaved weight or bias of experts as `in_rows` does; return any other tensor as it is."""
    if projection is None:
        return stored
    values = stored if role == BIAS else stored.transpose(1, 2)
    return torch.cat([values[:, ::2], values[:, 1::2]], 1) if projection == GATE_UP else values


def _gate_then_up(in_turns: Tensor) -> Tensor:
    return torch.cat([in_turns[::2], in_turns[1::2]])


def as_values(weight: StoredWeight) -> StoredWeight:
    """View a weight as float32 values. weight: FP8 with per-channel scales, or in four bits."""
    if weight.kind == "fp8-channel":
        make = partial(_channels, transposed=weight.transposed)
    elif weight.kind == "int4":
        method, _ = int4_layout(weight.codes, weight.scale)
        make = lambda *matrix: dequantize(PackedTensor(*_int4(method, *matrix), "int4"), dtype=torch.float32)  # noqa: E731
    elif weight.kind == "nvfp4":
        make = lambda *matrix: dequantize(_nvfp4(*matrix), dtype=torch.float32)  # noqa: E731
    else:
        make = partial(_of_each, weight, lambda *matrix: _mxfp4_values(*matrix).float())
    return weight._replace(dtype="F32", grid=None, make=make)


def dequantized(weight: StoredWeight) -> StoredWeight:
    """View an FP8 weight with block or channel scales as bfloat16 values."""
    return weight.seen(partial(dequantize, dtype=torch.bfloat16), "BF16", grid=None)


def quantized(
    weight: StoredWeight, *, scale_format: str, device: torch.device, take: Callable[[Tensor, FP8Tensor], None]
) -> StoredWeight:
    """View an unquantized weight as FP8 in 128x128 blocks. take: called with each matrix and its quantized form."""

    def quantize(values: Tensor) -> FP8Tensor:
        matrices = values.to(device).unflatten(0, (weight.name.matrices, -1))
        made = quantize_128x128(matrices, scale_format=scale_format)
        take(matrices, made)
        return FP8Tensor(made.data.flatten(0, 1), made.scale.flatten(0, 1).cpu())

    grid, stored = scale_grid(weight.name.matrices, weight.shape), scale_dtype(scale_format)
    return weight.seen(quantize, FP8, grid=grid, scale_dtype=stored)


def in_four_bits(
    weight: StoredWeight, weight_format: str, *, device: torch.device, take: Callable[[Tensor, PackedTensor], None]
) -> StoredWeight:
    """View an unquantized weight of experts in four bits, to be written as compressed-tensors stores them.

    weight: of one expert; or, in MXFP4, fused as GPT-OSS has them, (E, K, N), which are written as GPT-OSS stores them.
    weight_format: a key of `PACKED_WEIGHTS`. take: called with each matrix and its quantized form.
    """
    fused, text = len(weight.shape) == 3, weight.name.text
    *lead, n, k = (weight.shape[0], *weight.shape[:0:-1]) if fused else weight.shape
    form, group = PACKED_WEIGHTS[weight_format]

    def quantize(values: Tensor) -> tuple[Tensor, ...]:
        matrix = values.to(device).mT if fused else values.to(device)
        made = quantize_mxfp4(matrix) if form == "mxfp4" else quantize_int4(matrix, group=group)
        take(matrix, made)
        data, scale = made.data.cpu(), made.scale.cpu()
        return (
            (data, scale)
            if form == "mxfp4"
            else ((data ^ 0x88).view(torch.int32), scale, torch.tensor([n, k], dtype=torch.int64, device="cpu"))
        )

    groups = k // group
    if fused:
        layout = {
            f"{text}{GROUPS}": ("U8", (*lead, n, groups, group // 2)),
            f"{text}_scales": ("U8", (*lead, n, groups)),
        }
    elif form == "mxfp4":
        layout = {f"{text}_packed": ("U8", (n, k // 2)), f"{text}_scale": ("U8", (n, groups))}
    else:
        layout = {f"{text}_packed": ("I32", (n, k // 8)), f"{text}_scale": ("BF16", (n, groups))}
        layout[f"{text}_shape"] = ("I64", (2,))
    return weight.seen(quantize, "U8", layout={name: TensorSpec(*spec) for name, spec in layout.items()})


def inexact(weights: Weights) -> Iterator[StoredWeight]:
    """Yield the MXFP4 weights that 128x128 blocks cannot hold exactly. Reads codes only if exponents differ widely."""
    checkpoint = weights.checkpoint
    of_scale = {weight.scale: weight for weight in weights.stored if weight.kind == "mxfp4"}
    spread = []
    for scale, values in checkpoint.read_unmapped(of_scale):
        if values.numel():
            groups = values.view(torch.uint8).view(-1, *scale.shape[-2:]).int()
            matrices = (matrix for of_expert in groups for (matrix,) in _apart(of_scale[scale], of_expert))
            if any(int(_spread(matrix)) > _FP4_SPREAD for matrix in matrices):
                spread.append(of_scale[scale])
    reader = Reader(checkpoint.directory)
    for weight in spread:
        judged = weight._replace(make=partial(_is_exact, weight))
        if not all(exact for _, exact in judged.pieces(reader)):
            yield weight
    reader.close()


def inexact_problems(weights: Weights) -> list[str]:
    """Return a problem line for each MXFP4 weight that 128x128 blocks cannot hold exactly."""
    return [
        f"{weight.codes.name}: MXFP4 exponents that differ by more than {_FP4_SPREAD} within {BLOCK}x{BLOCK} values, "
        "which E4M3 cannot hold"
        for weight in inexact(weights)
    ]


def _apart(weight: StoredWeight, *stored: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split stored tensors of a weight or expert: yield a tuple for gate and a tuple for up, or one tuple in all."""
    count = weight.name.matrices
    return zip(
        *([value[i::count] for i in range(count)] if weight.interleaved else value.chunk(count) for value in stored),
        strict=True,
    )


def _of_each(weight: StoredWeight, make: Callable[..., Tensor | FP8Tensor], *stored: Tensor) -> Tensor | FP8Tensor:
    """Apply ``make`` to the gate and up matrices separately, or to the only matrix, and concatenate the results."""
    made = [make(*matrix) for matrix in _apart(weight, *stored)]
    if len(made) == 1:
        return made[0]
    if isinstance(made[0], FP8Tensor):
        return FP8Tensor(*map(torch.cat, zip(*made, strict=True)))
    return torch.cat(made)


def _channels(codes: Tensor, scale: Tensor, *, transposed: bool) -> Tensor:
    return (codes.t() if transposed else codes).float() * as_float(scale).reshape(-1, 1)


def _transposed(codes: Tensor, scale: Tensor, grid: tuple[int, int]) -> FP8Tensor:
    return FP8Tensor(_rows(codes), as_float(scale).t().reshape(grid))


def _rows(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)


def _filled(codes: Tensor, scale: Tensor, matrices: int, grid: tuple[int, int], transposed: bool) -> FP8Tensor:
    """Repeat a per-tensor scale for all blocks.

    If ``scale`` holds two values, the first is for the blocks of gate, the second for the blocks of up.
    """
    rows, columns = grid
    each = as_float(scale).reshape(-1, 1, 1).expand(matrices, rows // matrices, columns)
    return FP8Tensor(_rows(codes) if transposed else codes, each.flatten(0, 1).contiguous())


def _mxfp8(codes: Tensor, exponents: Tensor) -> FP8Tensor:
    """Convert MXFP8 codes (N, K) to E4M3 codes in 128x128 blocks with power-of-two scales.

    A block's scale is the least power of two that keeps the values of all new codes within 448. The largest of these
    values is then above 224, and values below E4M3's smallest subnormal are rounded by up to 2^-10.
    """
    groups = pad(codes.view(torch.uint8) & 127, (0, -codes.shape[1] % MX_BLOCK)).unflatten(1, (-1, MX_BLOCK))
    largest = groups.amax(-1).view(torch.float8_e4m3fn).double()  # codes without sign bits sort like their values
    power = as_float(exponents).double()
    of_blocks = _of_groups(largest * power, torch.amax, 0.0)
    mantissa, exponent = torch.frexp(of_blocks / FP8_MAX)
    block = torch.ldexp(torch.ones_like(of_blocks), exponent - (mantissa == 0.5).int())
    block = torch.where((of_blocks > 0) & of_blocks.isfinite(), block, 1.0)
    ratio = (power / _of_values(block, power.shape, BLOCK // MX_BLOCK)).float()
    values = codes.float() * ratio.repeat_interleave(MX_BLOCK, 1)[:, : codes.shape[1]]
    return FP8Tensor(values.to(torch.float8_e4m3fn), block.float())


def _mxfp4_values(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return the values (N, K) of MXFP4 codes in float64. The low half of each byte holds the even column."""
    values = e2m1_values(unpacked(codes.view(torch.uint8).flatten(1))).double()
    return values * as_float(exponents).double().repeat_interleave(MX_BLOCK, 1)


def _mxfp4(codes: Tensor, exponents: Tensor) -> FP8Tensor:
    """Convert MXFP4 codes to blocks with scales 2^(largest exponent - 6), looking up both codes of a byte at once.

    Groups in which all codes are zero are ignored in finding the largest exponent of a block.
    """
    groups = codes.view(torch.uint8).reshape(*exponents.shape, MX_BLOCK // 2)
    power = exponents.view(torch.uint8).int()
    used = (groups & 0x77 != 0).any(-1)  # 0x77 drops the signs
    largest = _of_groups(torch.where(used, power, 0), torch.amax, 0)
    below = _of_values(largest, power.shape, BLOCK // MX_BLOCK) - power
    index = below.clamp(0, _FP4_LOWEST)[..., None] << 8 | groups.int()
    pairs = _fp4_pairs().index_select(0, index.flatten())
    scale = torch.ldexp(torch.ones_like(largest, dtype=torch.float64), largest - 127 - _FP4_SHIFT).float()
    return FP8Tensor(pairs.view(index.shape).flatten(1).view(torch.float8_e4m3fn), scale)


@cache
def _fp4_pairs() -> Tensor:
    """Return a table of E4M3 code pairs, each as one int16. Entry ``256 * below + byte`` is the pair for two FP4 codes.

    byte: the two FP4 codes. below: how far the exponent of their group is below the block's largest exponent.
    """
    powers = torch.arange(_FP4_SHIFT, _FP4_SHIFT - _FP4_LOWEST - 1, -1, device="cpu")[:, None]
    values = torch.tensor(E2M1, dtype=torch.float32, device="cpu")
    codes = (values * powers.float().exp2()).to(torch.float8_e4m3fn).view(torch.uint8)
    halves = torch.arange(256, device="cpu")
    return torch.stack((codes[:, halves & 15], codes[:, halves >> 4]), -1).view(torch.int16).flatten()


_MICROSCALED = {
    "mxfp8": _mxfp8,
    "mxfp4": _mxfp4,
    "nvfp4": lambda *matrix: blocks_of_nvfp4(*_nvfp4_arranged(*matrix)),
}
"""Functions that convert a matrix's codes and scales to 128x128 blocks, by kind."""


def _is_exact(weight: StoredWeight, codes: Tensor, exponents: Tensor) -> bool:
    """Return whether 128x128 blocks hold the values of every matrix of the weight exactly."""
    matrices = ((_mxfp4_values(*matrix), _mxfp4(*matrix)) for matrix in _apart(weight, codes, exponents))
    return all(
        torch.equal(made.data.double() * _of_values(made.scale.double(), values.shape), values)
        for values, made in matrices
    )


def _of_values(block: Tensor, shape: torch.Size, columns: int = BLOCK) -> Tensor:
    """Repeat each block's value for the block's elements (columns=128) or MX groups (columns=4); crop to ``shape``."""
    return block.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def _spread(power: Tensor) -> Tensor:
    """Return the largest difference between exponents within a 128x128 block. power: the exponents, (N, K/32)."""
    return (_of_groups(power, torch.amax, 0) - _of_groups(power, torch.amin, 255)).max()


def _of_groups(power: Tensor, reduce: Callable[..., Tensor], filler: float) -> Tensor:
    """Reduce one value per MX group (N, K/32) to one value per 128x128 block. filler: pads incomplete blocks."""
    rows, groups = power.shape
    padded = pad(power, (0, -groups % (BLOCK // MX_BLOCK), 0, -rows % BLOCK), value=filler)
    return reduce(padded.unflatten(1, (-1, BLOCK // MX_BLOCK)).unflatten(0, (-1, BLOCK)), dim=(1, 3))
