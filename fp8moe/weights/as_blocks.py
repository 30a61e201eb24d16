"""A checkpoint of any format that loads, seen as one of FP8 weights with float32 scales of blocks or of channels.

What is stored otherwise is made when it is read, one matrix at a time: no file is written, and no second copy is held.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8moe.quant.formats import BLOCK, FP8_MAX, FP8Tensor
from fp8moe.quant.quantize import dequantize
from fp8moe.weights.find_format import MX_BLOCK, Found, QuantizedWeight, examine
from fp8moe.weights.formats import FP8, SCALE_DTYPES, as_float, scale_name, scale_of, scale_shape, weight_of
from fp8moe.weights.gpt_oss import bias_in_rows
from fp8moe.weights.read import Checkpoint, CheckpointError, Derived, Source, TensorInfo

_FP4 = (*(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0))
"""The values of E2M1 codes: OCP's microscaling formats 1.0, section 5.3.3."""
_FP4_SHIFT = 6  # 6 * 2^6 is the largest E4M3 code that an FP4 value becomes
_FP4_SPREAD = 14  # and 0.5 * 2^(6 - 14) the smallest, a subnormal
_FP4_LOWEST = 17  # 4 * 2^(6 - 17) is it too


def as_blocks(checkpoint: Checkpoint) -> tuple[Checkpoint, Found]:
    """See a checkpoint as one of 128x128 blocks; also return what it holds in truth.

    Raises CheckpointError, with one sentence about the format before what is wrong with the files, if it does not load.
    """
    found = examine(checkpoint)
    if not found.format.loads:
        raise CheckpointError(f"cannot load {checkpoint.directory}", [found.format.reason, *checkpoint.problems])
    tensors = dict(checkpoint.tensors)
    for weight in found.weights:
        made = _made_of(weight, checkpoint, found)
        for stored in (weight.codes, weight.scale) if made else ():
            tensors.pop(stored, None)
        tensors |= made
    return replace(checkpoint, tensors=tensors), found


def as_values(found: Found) -> tuple[Checkpoint, set[str]]:
    """See what blocks do not hold exactly as float32 values, and all else as blocks; also return the names of these."""
    checkpoint = found.checkpoint
    spread = {problem.partition(":")[0] for problem in inexact_weights(found)}
    tensors, values = dict(checkpoint.tensors), set()
    for weight in found.weights:
        if weight.kind == "fp8-channel" or weight.codes in spread:
            codes, scale = tensors.pop(weight.codes), tensors.pop(weight.scale)
            sources = _stored(weight, codes, scale)
            if weight.kind == "fp8-channel":
                make = partial(_channels, transposed=weight.transposed)
            else:
                make = partial(_of_each, weight, lambda *matrix: _mxfp4_values(*matrix).float())
            tensors[weight.weight] = Derived(
                "F32", weight.shape, codes.begin, codes.end, codes.file, sources, make, None
            )
            tensors |= _bias_of(weight, checkpoint)
            values.add(weight.weight)
        else:
            made = _made_of(weight, checkpoint, found)
            for stored in (weight.codes, weight.scale) if made else ():
                tensors.pop(stored, None)
            tensors |= made
    return replace(checkpoint, tensors=tensors), values


def inexact_weights(found: Found) -> Iterator[str]:
    """Say which weights in MXFP4 blocks cannot hold, reading exponents, and where these do not tell, codes."""
    checkpoint = found.checkpoint
    weights = {weight.scale: weight for weight in found.weights if weight.kind == "mxfp4"}
    exponents = {scale: checkpoint.tensors[scale] for scale in weights}
    spread = []
    for scale, values in checkpoint.read_unmapped(exponents):
        if not values.numel():
            continue
        groups = values.view(torch.uint8).view(-1, *exponents[scale].shape[-2:]).int()
        matrices = (matrix for of_expert in groups for (matrix,) in _apart(weights[scale], of_expert))
        if any(int(_spread(matrix)) > _FP4_SPREAD for matrix in matrices):
            spread.append(weights[scale])
    with checkpoint.reader() as reader:
        for weight in spread:
            pairs = zip(reader.pieces(weight.codes), reader.pieces(weight.scale), strict=True)
            if not all(_is_exact(weight, codes.value, powers.value) for codes, powers in pairs):
                yield (
                    f"{weight.codes}: MXFP4 exponents that differ by more than {_FP4_SPREAD} within {BLOCK}x{BLOCK} "
                    "values, which E4M3 cannot hold"
                )


def _made_of(weight: QuantizedWeight, checkpoint: Checkpoint, found: Found) -> dict[str, TensorInfo]:
    """The weight and its scale as blocks; empty for what is stored so, and for what is named when it is matched."""
    if weight.kind is None or not weight.has_own_scale:
        return {}
    name, codes, scale = weight.weight, checkpoint.tensors[weight.codes], checkpoint.tensors[weight.scale]
    shape, grid = weight.shape, scale_shape(name, weight.shape)
    stored = _stored(weight, codes, scale)

    def derived(dtype: str, shape: tuple[int, ...], sources: list[Source], make: Callable[..., Tensor]) -> Derived:
        return Derived(dtype, shape, codes.begin, codes.end, codes.file, sources, make, stored[1])

    if weight.kind in _MICROSCALED:
        codes_of_blocks, scales_of_blocks = _MICROSCALED[weight.kind]
        return {
            name: derived(FP8, shape, stored, partial(_of_each, weight, codes_of_blocks)),
            scale_name(name): derived("F32", grid, stored, partial(_of_each, weight, scales_of_blocks)),
            **_bias_of(weight, checkpoint),
        }
    bytes_are_exponents = found.declared is not None and found.declared.power_of_two
    if scale.dtype not in SCALE_DTYPES and not (scale.dtype == "U8" and bytes_are_exponents):
        return {}
    if weight.kind == "fp8-channel":
        if weight_of(weight.scale) == name and scale.dtype in SCALE_DTYPES and scale.shape == (*shape[:-1], 1):
            return {}
        grid, make = (*shape[:-1], 1), partial(_reshaped_scale, grid=(shape[-2], 1))
    elif weight.kind == "fp8-tensor":
        make = partial(_fill, matrices=weight.matrices, grid=grid[-2:])
    elif weight.transposed:
        make = partial(_transposed_scale, grid=grid[-2:])
    elif scale.dtype in SCALE_DTYPES and weight_of(weight.scale) == name:
        return {}
    else:
        make = partial(_reshaped_scale, grid=grid[-2:])
    data = derived(FP8, shape, stored[:1], _transposed) if weight.transposed else codes
    return {name: data, scale_name(name): derived("F32", grid, stored[1:], make)}


def _apart(weight: QuantizedWeight, *stored: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """What is stored of the matrices of one expert, gate and up apart, or of a weight that is one matrix."""
    count = weight.matrices
    return zip(
        *([value[i::count] for i in range(count)] if weight.interleaved else value.chunk(count) for value in stored),
        strict=True,
    )


def _of_each(weight: QuantizedWeight, make: Callable[..., Tensor], *stored: Tensor) -> Tensor:
    """What is made of each of the matrices, one below the other."""
    return torch.cat([make(*matrix) for matrix in _apart(weight, *stored)])


def _bias_of(weight: QuantizedWeight, checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """The bias of gate and up, one after the other, of experts that have them in turns; else empty."""
    name = f"{weight.weight}_bias"
    info = checkpoint.tensors.get(name)
    return {name: bias_in_rows(name, info)} if info is not None and weight.interleaved else {}


def dequantized(checkpoint: Checkpoint, names: Iterable[str]) -> Checkpoint:
    """A checkpoint in blocks with these weights in bfloat16, in the place of codes and scales."""
    tensors = dict(checkpoint.tensors)
    for name in names:
        scale = scale_of(name, tensors)
        if scale is None:
            continue  # named when tensors are matched
        parts = [_sources(other, tensors.pop(other)) for other in (name, scale)]
        codes = checkpoint.tensors[name]
        sources = [source for sources, _ in parts for source in sources]
        make = partial(_dequantized, len(parts[0][0]), *(make for _, make in parts))
        tensors[name] = Derived("BF16", codes.shape, codes.begin, codes.end, codes.file, sources, make, None)
    return replace(checkpoint, tensors=tensors)


def _sources(name: str, info: TensorInfo) -> tuple[list[Source], Callable[..., Tensor]]:
    """What a matrix is made of, and how."""
    if isinstance(info, Derived):
        return info.sources, info.make
    return [Source(name, info, by_expert=False)], Tensor.clone


def _dequantized(count: int, codes: Callable[..., Tensor], scale: Callable[..., Tensor], *values: Tensor) -> Tensor:
    data, blocks = codes(*values[:count]), as_float(scale(*values[count:]))
    return dequantize(FP8Tensor(data, blocks), dtype=torch.bfloat16)


def _stored(weight: QuantizedWeight, codes: TensorInfo, scale: TensorInfo) -> list[Source]:
    """Codes and scale."""
    experts = len(weight.shape) == 3
    by_expert = experts and scale.shape[:1] == weight.shape[:1]
    return [Source(weight.codes, codes, experts), Source(weight.scale, scale, by_expert)]


def _channels(codes: Tensor, scale: Tensor, *, transposed: bool) -> Tensor:
    codes = codes.t() if transposed else codes
    return codes.float() * as_float(scale).reshape(-1, 1)


def _transposed(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)


def _reshaped_scale(scale: Tensor, grid: tuple[int, int]) -> Tensor:
    return as_float(scale).reshape(grid)


def _transposed_scale(scale: Tensor, grid: tuple[int, int]) -> Tensor:
    return as_float(scale).t().reshape(grid)


def _fill(scale: Tensor, matrices: int, grid: tuple[int, int]) -> Tensor:
    """One scale in all blocks of a tensor, or one in those of gate and one in those of up."""
    rows, columns = grid
    each = as_float(scale).reshape(-1, 1, 1).expand(matrices, rows // matrices, columns)
    return each.flatten(0, 1).contiguous()


def _mxfp8(codes: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Values (N, K), and for each block the least power of two in which its largest value is no larger than 448.

    The codes of blocks have rounded then what is below the smallest subnormal, by 2^-10 where the largest is above 224.
    """
    values = codes.double() * as_float(exponents).repeat_interleave(MX_BLOCK, 1)[:, : codes.shape[1]]
    rows, columns = values.shape
    padded = pad(values.abs(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    largest = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).amax((1, 3))
    mantissa, exponent = torch.frexp(largest / FP8_MAX)
    block = torch.ldexp(torch.ones_like(largest), exponent - (mantissa == 0.5).int())
    return values, torch.where((largest > 0) & largest.isfinite(), block, 1.0)


def _mxfp8_codes(codes: Tensor, exponents: Tensor) -> Tensor:
    values, block = _mxfp8(codes, exponents)
    return (values / _of_values(block, values.shape)).float().to(torch.float8_e4m3fn)


def _mxfp8_scales(codes: Tensor, exponents: Tensor) -> Tensor:
    return _mxfp8(codes, exponents)[1].float()


def _mxfp4_values(codes: Tensor, exponents: Tensor) -> Tensor:
    """Values (N, K) in float64, the even columns in the low halves of the bytes."""
    halves = codes.view(torch.uint8).flatten(1)
    halves = torch.stack((halves & 15, halves >> 4), -1).flatten(-2)
    values = torch.tensor(_FP4, dtype=torch.float64)[halves.int()]
    return values * as_float(exponents).double().repeat_interleave(MX_BLOCK, 1)


def _mxfp4_codes(codes: Tensor, exponents: Tensor) -> Tensor:
    """E4M3 codes (N, K) for the scales of `_mxfp4_scales`, two looked up for each byte."""
    groups = codes.view(torch.uint8).reshape(*exponents.shape, MX_BLOCK // 2)
    power = exponents.view(torch.uint8).int()
    below = _of_values(_mxfp4_largest(codes, exponents), power.shape, BLOCK // MX_BLOCK) - power
    index = below.clamp(0, _FP4_LOWEST)[..., None] << 8 | groups.int()
    pairs = _fp4_pairs().index_select(0, index.flatten())
    return pairs.view(index.shape).flatten(1).view(torch.float8_e4m3fn)


def _mxfp4_scales(codes: Tensor, exponents: Tensor) -> Tensor:
    """Scales of blocks: 2^(largest exponent - 6)."""
    largest = _mxfp4_largest(codes, exponents)
    return torch.ldexp(torch.ones(largest.shape, dtype=torch.float64), largest - 127 - _FP4_SHIFT).float()


def _mxfp4_largest(codes: Tensor, exponents: Tensor) -> Tensor:
    """The largest exponent in each block, groups of zeros not counted."""
    groups = codes.view(torch.uint8).reshape(*exponents.shape, MX_BLOCK // 2)
    used = (groups & 0x77 != 0).any(-1)  # without the signs
    return _of_groups(torch.where(used, exponents.view(torch.uint8).int(), 0), torch.amax, 0)


@cache
def _fp4_pairs() -> Tensor:
    """Two E4M3 codes as one int16 for each byte with two FP4 codes, at `256 * below`: so far is its exponent below."""
    powers = torch.arange(_FP4_SHIFT, _FP4_SHIFT - _FP4_LOWEST - 1, -1)[:, None]
    codes = (torch.tensor(_FP4) * powers.float().exp2()).to(torch.float8_e4m3fn).view(torch.uint8)
    halves = torch.arange(256)
    return torch.stack((codes[:, halves & 15], codes[:, halves >> 4]), -1).view(torch.int16).flatten()


_MICROSCALED: Mapping[str, tuple[Callable[[Tensor, Tensor], Tensor], ...]] = {
    "mxfp8": (_mxfp8_codes, _mxfp8_scales),
    "mxfp4": (_mxfp4_codes, _mxfp4_scales),
}
"""For each kind what makes the codes, and what the scales, of blocks."""


def _is_exact(weight: QuantizedWeight, codes: Tensor, exponents: Tensor) -> bool:
    for matrix in _apart(weight, codes, exponents):
        values, block = _mxfp4_values(*matrix), _mxfp4_scales(*matrix).double()
        if not torch.equal(_mxfp4_codes(*matrix).double() * _of_values(block, values.shape), values):
            return False
    return True


def _of_values(block: Tensor, shape: torch.Size, columns: int = BLOCK) -> Tensor:
    """What each block has, repeated for its values, or for groups of which it has so many columns."""
    return block.repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def _spread(power: Tensor) -> Tensor:
    """By how much exponents (N, K/32) differ within a block, at most."""
    return (_of_groups(power, torch.amax, 0) - _of_groups(power, torch.amin, 255)).max()


def _of_groups(power: Tensor, reduce: Callable[..., Tensor], filler: int) -> Tensor:
    """Reduce the exponents (N, K/32) of each block."""
    rows, groups = power.shape
    padded = pad(power, (0, -groups % (BLOCK // MX_BLOCK), 0, -rows % BLOCK), value=filler)
    return reduce(padded.unflatten(1, (-1, BLOCK // MX_BLOCK)).unflatten(0, (-1, BLOCK)), dim=(1, 3))
