"""The kernel that merges the parts of an attention, against the whole attention in float64."""

import pytest
import torch

from fp8moe import quantize_1x128
from fp8moe.kernels.decoder_ops.merge_splits import merge_splits
from fp8moe.runtime.checks import FLOATING
from tests.test_merge_splits import SHAPES, attention_in_parts

pytestmark = pytest.mark.gpu

LIMITS = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 2e-6}


def on_gpu(batch, heads, dtype, seed=0):
    parts, lse, counts, whole = attention_in_parts(batch, *heads, length=700, dtype=dtype, seed=seed)
    lse = lse.permute(3, 0, 1, 2).contiguous().cuda().permute(1, 2, 3, 0)  # as flash attention lays it out
    return parts.cuda(), lse, counts.cuda(), whole.cuda()


@pytest.mark.parametrize("batch,heads", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_against_float64(batch, heads, dtype):
    parts, lse, counts, whole = on_gpu(batch, heads, dtype)
    parts[counts == 0], lse[counts == 0] = torch.nan, torch.nan
    torch.full((batch * whole.shape[1],), torch.nan, device="cuda")
    values = merge_splits(parts, lse, counts, quantized=False)
    assert (values.double() - whole).norm() <= LIMITS[dtype] * whole.norm()
    got, expected = merge_splits(parts, lse, counts, quantized=True), quantize_1x128(values)
    assert torch.equal(got.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(got.scale, expected.scale)


def test_nan_stays_in_its_head_and_no_keys_give_zero():
    parts, lse, counts, _ = on_gpu(3, (4, 33, 8, 128), torch.bfloat16)
    counts[0] = 0
    counts[1:] = counts[1:].clamp(min=1)
    parts.nan_to_num_()
    lse.fill_(1.0)
    parts[1, 2, 32, 5, 0] = torch.nan
    lse[2, 0, 0, 7] = torch.inf
    out = merge_splits(parts, lse, counts, quantized=False).view(3, 32, 128)
    assert (out[0] == 0).all() and out[1].isnan().sum() == 1 and out[1, 21, 0].isnan()
    assert out[2, 7].isnan().all() and out[2].isnan().sum() == 128
