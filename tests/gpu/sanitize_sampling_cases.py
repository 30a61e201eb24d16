"""Cases of sampling for compute-sanitizer, in the manner of `sanitize_cases.py`, which runs them.

Every parameter in some row, lists that hold what is left and lists that do not, ties, rows without a distribution,
rows of whole vectors and others.
"""

import torch

from fp8moe.kernels.decoder_ops.sampling import SamplingState, reference, sample
from tests.sampling_cases import random_logits, random_state

# rows, tokens, logits type, their standard deviation
SAMPLES = (
    (1, 1, torch.float32, 1.0),
    (7, 77, torch.float16, 3.0),
    (20, 4096, torch.bfloat16, 3.0),
    (6, 40_001, torch.bfloat16, 0.5),
    (12, 33_000, torch.float32, 4.0),
    (6, 20_000, torch.bfloat16, 0.0),
)


def sampling_errors(rows: int, vocab: int, dtype: torch.dtype, std: float) -> int:
    logits, state = random_logits(rows, vocab, dtype, std=std), random_state(rows, vocab)
    logits[rows // 2 :: 7, vocab // 2] = float("nan")
    on_gpu = SamplingState(*(value.cuda() for value in state))
    tokens = sample(logits.cuda(), on_gpu).tokens
    wrong = tokens.cpu() != reference(logits, state)[0]
    changed = [got.cpu() != expected for got, expected in zip(on_gpu, state, strict=True)]
    return sum(int(differs.sum()) for differs in (wrong, *changed))


# function, its arguments, the largest result that is correct
CASES = [(sampling_errors, case, 0) for case in SAMPLES]
