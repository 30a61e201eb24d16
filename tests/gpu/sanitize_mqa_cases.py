"""Cases of the index scores for compute-sanitizer, in the manner of `sanitize_cases.py`, which runs them.

Prefill and paged kernels with every number of math warpgroups and every swizzle, ranges and lengths that mean nothing,
block ids out of range, more sequences than threads, more tiles than stages; and the kernel that fills the cache.
"""

import torch

from fp8moe.kernels.indexer import reference
from fp8moe.kernels.indexer.mqa_cache import append_kv, new_kv_cache
from fp8moe.kernels.indexer.mqa_logits import mqa_logits, paged_mqa_logits
from fp8moe.quant.formats import FP8Tensor
from tests import mqa_cases

# queries, keys, heads, head width, ranges
PREFILLS = (
    (1, 1, 64, 128, "full"),
    (37, 130, 64, 64, "ragged"),
    (130, 1500, 64, 128, "causal"),
    (25, 300, 32, 32, "extremes"),
    (70, 2100, 32, 128, "packed"),
)
# context lengths, next_n, heads, head width, max_context_len
BATCHES = (
    ([1], 1, 64, 128, 1),
    ([0, 1, 130, 9999, -5, 700], 1, 64, 128, 600),
    ([3, 64, 2000], 2, 64, 128, 2048),
    ([65, 1000, 2], 3, 64, 64, 1100),
    ([[5, 900, 3, 0], [200, 201, 202, 203]], 4, 64, 128, 1024),
    ([130, 7, 400], 4, 32, 32, 500),
    ([10] * 600, 1, 32, 32, 70),
)
APPENDS = ((1, 1, 128, torch.bfloat16), (67, 2, 64, torch.float16), (515, 9, 32, torch.float32))  # tokens, blocks, D


def mqa_error(tokens: int, keys: int, heads: int, head_dim: int, kind: str) -> float:
    case = mqa_cases.prefill(tokens, keys, heads=heads, head_dim=head_dim, kind=kind)
    q, (data, scale), *rest = (_on_gpu(operand) for operand in case)
    logits = mqa_logits(q, FP8Tensor(data, scale), *rest).cpu()
    return _error(logits, mqa_cases.exact_prefill(case))


def paged_mqa_error(lens: list, next_n: int, heads: int, head_dim: int, max_context_len: int) -> float:
    blocks = -(-max_context_len // 64)
    case = mqa_cases.paged(lens, next_n=next_n, heads=heads, head_dim=head_dim, max_blocks=blocks)
    logits = paged_mqa_logits(*(operand.cuda() for operand in case), max_context_len=max_context_len).cpu()
    return _error(logits, mqa_cases.exact_paged(case, max_context_len))


def _on_gpu(operand):
    return tuple(part.cuda() for part in operand) if isinstance(operand, tuple) else operand.cuda()


def _error(logits: torch.Tensor, exact: mqa_cases.Exact) -> float:
    """The largest error of a logit, over the same sum of absolute products; infinite if -inf is elsewhere."""
    seen = exact.logits != -torch.inf
    if not torch.equal(logits != -torch.inf, seen):
        return torch.inf
    errors = (logits.double() - exact.logits).abs() / exact.magnitude.clamp(min=1e-30)
    return torch.where(seen, errors, 0).max().item()


def append_errors(tokens: int, num_blocks: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of the cache that are not those of the reference."""
    keys = torch.randn(tokens, head_dim).to(dtype)
    slots = (torch.randperm(64 * num_blocks + 40)[:tokens] - 20).int()  # some are not there
    expected = new_kv_cache(num_blocks, head_dim, device="cpu")
    cache = expected.cuda()
    append_kv(cache, keys.cuda(), slots.cuda())
    reference.append_kv(expected, keys, slots, ue8m0=False)
    return int((cache.cpu() != expected).sum())


# function, its arguments, the largest result that is correct
CASES = [
    *((mqa_error, case, mqa_cases.TOLERANCE) for case in PREFILLS),
    *((paged_mqa_error, case, mqa_cases.TOLERANCE) for case in BATCHES),
    *((append_errors, case, 0) for case in APPENDS),
]
