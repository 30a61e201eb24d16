"""The transposing quantizer writes the bits of the reference both ways, and nothing else."""

import math
from functools import partial

import pytest
import torch

from fp8moe.quant import reference, transpose
from fp8moe.quant.formats import padded_rows
from fp8moe.quant.quantize import quantize_1x128
from fp8moe.quant.reference import Results
from fp8moe.quant.transpose import empty_results, quantize_with_transpose
from fp8moe.runtime.checks import FLOATING
from tests import random_values

pytestmark = pytest.mark.gpu

MARK = 0xAB
GUARD = 256
FEATURES = (1, 8, 128, 136, 200, 257, 1040)
# Group offsets and rows: odd sizes, one row, empty groups, full tiles, rows before and after the groups.
GROUPS = (
    (None, 300),
    ((0, 1), 1),
    ((0, 0, 0, 37), 37),
    ((0, 128, 256, 384), 384),
    ((3, 8, 8, 150, 297), 300),
    ((0, 127, 256, 385), 400),
)
NONSENSE = (
    (-5, 30, 80),
    (0, 40, 9999),
    (50, 20, 40),
    (500, 600, 700),
    (-(2**31), 2**31 - 1, -(2**31)),
    (2**31 - 1, -(2**31), 2**31 - 1),
    (0, 300, 0, 300, 0, 300),  # more tiles than there are columns for
)
random = partial(random_values.random, dtype=torch.bfloat16, device="cuda")


def offsets_of(offsets: tuple[int, ...] | None) -> torch.Tensor | None:
    return None if offsets is None else torch.tensor(offsets, dtype=torch.int32, device="cuda")


def marked_results(rows: int, features: int, groups: int, blocks: bool = False) -> tuple[Results, list[torch.Tensor]]:
    """Results in memory full of marks, with a guard behind each; and the bytes of each with its guard."""
    buffers, results = [], []
    for part in empty_results(torch.empty(0, device="cuda"), rows, features, groups, blocks):
        size = part.untyped_storage().nbytes()
        buffers.append(torch.full((size + GUARD,), MARK, dtype=torch.uint8, device="cuda"))
        results.append(buffers[-1][:size].view(part.dtype).as_strided(part.shape, part.stride()))
    return Results(*results), buffers


def used_parts(results: tuple, group_offsets: torch.Tensor | None, rows: int) -> list[torch.Tensor]:
    """For each of the first four results, a mask of what belongs to a group."""
    starts, ends, offsets = reference.pad_groups(group_offsets, rows, torch.device("cuda"))
    row = torch.arange(rows, device="cuda")
    kept = starts + (offsets[1:] - offsets[:-1])  # where groups overlap, the last ones are cut off
    in_group = ((row[:, None] >= starts) & (row[:, None] < ends.minimum(kept))).any(1)
    column = torch.arange(results[2].shape[1], device="cuda") < offsets[-1]
    masks = in_group[:, None], in_group[:, None], column[None], column[None, ::128]
    return [mask.expand(part.shape) for mask, part in zip(masks, results, strict=False)]


def bits(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().view(torch.uint8 if part.dtype == torch.float8_e4m3fn else torch.int32)


def assert_matches(x, group_offsets=None, tokens=None) -> None:
    rows = x.shape[0] if tokens is None else tokens.shape[0]
    groups = 1 if group_offsets is None else group_offsets.shape[0] - 1
    for blocks in (False, True):
        results, buffers = marked_results(rows, x.shape[1], groups, blocks)
        transpose.launch(x, group_offsets, tokens, blocks, results)
        expected = reference.quantize_with_transpose(x, group_offsets, tokens, blocks)
        assert torch.equal(results[4], expected[4])
        used = used_parts(results, group_offsets, rows)
        for got, want, mask in zip(results, expected, used, strict=False):
            assert got.shape == want.shape and (want.numel() == want.shape[-1] or got.stride() == want.stride())
            assert torch.equal(bits(got)[mask], bits(want)[mask])
        assert_only_written(results, buffers, used)
    alone, buffers = marked_results(rows, x.shape[1], groups, True)
    transpose.launch_columns(x, group_offsets, tokens, alone[2:])
    used = [torch.zeros_like(mask) for mask in used[:2]] + used[2:]
    for got, want, mask in zip(alone[2:], results[2:], [*used[2:], ...], strict=True):
        assert torch.equal(bits(got)[mask], bits(want)[mask])
    assert_only_written(alone, buffers, used)


def assert_only_written(results: tuple, buffers: list[torch.Tensor], used: list[torch.Tensor]) -> None:
    """What no group has, the gaps between columns of scales, and the guards keep their marks."""
    for part, buffer, mask in zip(results, buffers, used, strict=False):
        written = torch.zeros(buffer.numel() - GUARD, dtype=torch.uint8, device="cuda")
        written = written.view(torch.uint8 if part.itemsize == 1 else torch.int32)
        written.as_strided(part.shape, part.stride()).copy_(mask)
        size = part.itemsize
        bytes_written = written.bool().repeat_interleave(size)
        assert (buffer[:-GUARD][~bytes_written] == MARK).all()
        assert (buffer[-GUARD:] == MARK).all()
    assert (buffers[4][-GUARD:] == MARK).all()


@pytest.mark.parametrize("offsets,rows", GROUPS)
@pytest.mark.parametrize("dtype", FLOATING)
def test_groups_and_sizes(offsets, rows, dtype):
    groups = offsets_of(offsets)
    for features in FEATURES:
        assert_matches(random(rows, features, dtype=dtype), groups)


@pytest.mark.parametrize("offsets,rows", GROUPS)
@pytest.mark.parametrize("dtype", FLOATING)
def test_tokens(offsets, rows, dtype):
    tokens = torch.randint(-3, 53, (rows,), dtype=torch.int32, device="cuda")
    tokens[: rows // 20] = torch.iinfo(torch.int32).min
    tokens[rows // 20 : rows // 10] = torch.iinfo(torch.int32).max
    for features in (8, 200, 1040):
        assert_matches(random(50, features, dtype=dtype), offsets_of(offsets), tokens)
    assert_matches(random(0, 136, dtype=dtype), offsets_of(offsets), tokens)


def test_equals_the_reference_on_the_cpu():
    x, groups = random(300, 200), offsets_of((0, 5, 5, 140, 290))
    x[3, 5], x[4, 130], x[5], x[150] = math.nan, -math.inf, 0.0, torch.finfo(torch.bfloat16).max
    tokens = torch.randint(0, 300, (300,), dtype=torch.int32, device="cuda")
    t = quantize_with_transpose(x, groups, tokens=tokens)
    expected = quantize_with_transpose(x.cpu(), groups.cpu(), tokens=tokens.cpu())
    end = int(expected.offsets[-1])
    assert torch.equal(t.offsets.cpu(), expected.offsets)
    for got, want in zip(t.rows, expected.rows, strict=True):
        assert torch.equal(bits(got[:290]).cpu(), bits(want[:290]))
    assert torch.equal(bits(t.columns.data[:, :end]).cpu(), bits(expected.columns.data[:, :end]))
    assert torch.equal(bits(t.columns.scale[:, : end // 128]).cpu(), bits(expected.columns.scale[:, : end // 128]))


@pytest.mark.parametrize("dtype", FLOATING)
def test_rows_have_the_bits_of_quantize_1x128(dtype):
    x = random(513, 1000, dtype=dtype)
    t, expected = quantize_with_transpose(x), quantize_1x128(x)
    transposed = quantize_1x128(x[:512].t())
    assert torch.equal(bits(t.rows.data), bits(expected.data)) and torch.equal(t.rows.scale, expected.scale)
    assert torch.equal(bits(t.columns.data[:, :512]), bits(transposed.data))
    assert torch.equal(t.columns.scale[:, :4], transposed.scale)


@pytest.mark.parametrize("dtype", FLOATING)
def test_values(dtype):
    largest = torch.finfo(dtype).max
    x = random(300, 264, dtype=dtype)
    x[3, 5], x[4, 200], x[6, 263], x[299, 0] = math.nan, -math.inf, math.inf, math.nan
    x[5], x[7], x[:, 9] = 0.0, largest, 0.0
    x[8] *= 1e-6
    groups = offsets_of((0, 7, 290))
    assert_matches(x, groups)
    for fill in (0.0, -0.0, largest, math.nan, math.inf, -math.inf):
        assert_matches(torch.full((130, 136), fill, dtype=dtype, device="cuda"))


def test_every_bit_pattern_of_16_bits():
    patterns = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = patterns.view(dtype).view(-1, 128)
        assert_matches(x)
        assert_matches(x.t().contiguous())


@pytest.mark.parametrize("offsets", NONSENSE)
def test_offsets_that_mean_nothing(offsets):
    assert_matches(random(300, 200), offsets_of(offsets))
    tokens = torch.randint(-1, 20, (300,), dtype=torch.int32, device="cuda")
    assert_matches(random(20, 200), offsets_of(offsets), tokens)


@pytest.mark.parametrize("groups", [31, 32, 33, 255, 256, 257, 1000, 1024])
def test_many_groups(groups):
    generator = torch.Generator().manual_seed(groups)
    sizes = torch.randint(0, 9, (groups,), generator=generator)
    sizes[torch.randint(groups, (3,), generator=generator)] = torch.tensor([200, 129, 128])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).int().cuda()
    assert_matches(random(int(offsets[-1]) + 5, 136), offsets)


@pytest.mark.parametrize("rows,features,tokens", [(0, 128, None), (5, 0, None), (5, 0, 9), (0, 128, 0), (5, 128, 0)])
def test_empty(rows, features, tokens):
    tokens = None if tokens is None else torch.zeros(tokens, dtype=torch.int32, device="cuda")
    count = rows if tokens is None else len(tokens)
    groups = offsets_of((0, 2, 2, 4))
    t = quantize_with_transpose(random(rows, features), groups, tokens=tokens)
    expected = reference.pad_groups(groups, count, torch.device("cuda"))[2]
    assert torch.equal(t.offsets, expected.int())
    assert t.rows.data.shape == (count, features) and t.columns.data.shape == (features, padded_rows(count, 3))


@pytest.mark.parametrize("strip", [1, 3, 100])
def test_order_of_tiles_does_not_matter(strip, monkeypatch):
    monkeypatch.setattr(transpose, "strip_width", lambda *sizes: strip)
    groups = offsets_of((0, 130, 500))
    assert_matches(random(500, 1040), groups)
    assert_matches(random(50, 1040), groups, torch.randint(0, 50, (500,), dtype=torch.int32, device="cuda"))


@pytest.mark.parametrize("rows,features", [((1 << 19) + 13, 4096), (130, (1 << 24) + 256)])
def test_past_two_to_the_31_elements(rows, features):
    x = torch.empty(rows, features, dtype=torch.bfloat16, device="cuda")
    # Random bits, of which one cleared and two set leave numbers from 2^-31 to 2.
    x.view(torch.int16).random_(-(1 << 15), 1 << 15).bitwise_and_(~0x4000).bitwise_or_(0x3000)
    assert x.numel() > 1 << 31
    groups = offsets_of((0, 50, rows))
    t = quantize_with_transpose(x, groups)
    assert t.offsets.tolist() == [0, 128, 128 + -(-(rows - 50) // 128) * 128]
    for columns in (slice(0, 256), slice(features - 256, features)):
        blocks = slice(columns.start // 128, columns.stop // 128)
        for first in (0, rows // 2 // 128 * 128, rows - 100):
            part = slice(first, first + 100)
            data, scale = quantize_1x128(x[part, columns])
            assert torch.equal(bits(t.rows.data[part, columns]), bits(data))
            assert torch.equal(t.rows.scale[part, blocks], scale)
        tiles = (rows - 50) // 128
        for tile in {0, tiles // 2, tiles - 1} if tiles else ():
            values = x[50 + tile * 128 : 50 + tile * 128 + 128, columns]
            data, scale = quantize_1x128(values.t())
            at = 128 + tile * 128
            assert torch.equal(bits(t.columns.data[columns, at : at + 128]), bits(data))
            assert torch.equal(t.columns.scale[columns, at // 128 : at // 128 + 1], scale)
