"""Cosines and sines of rotary embeddings: float64, PyTorch's own, and nothing else written."""

import pytest
import torch

from fp8moe.kernels.decoder_ops.rotary_tables import launcher, rotary_tables
from fp8moe.runtime.checks import FLOATING
from fp8moe.runtime.launch import device_guard
from tests.backends import on_reference
from tests.gpu.checks import captured, marked, same_every_time
from tests.kernels.test_rotary_tables import (  # noqa: F401
    FREQUENCIES,
    test_cosines_and_sines,
    test_strided_operands,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("tokens,half", [(1, 64), (64, 32), (33, 5), (3000, 64)])
def test_is_what_pytorch_computes(tokens, half, dtype):
    """But for the last bit of float32."""
    positions = torch.randint(0, 1 << 20, (tokens,), device="cuda")
    frequencies = 1.0 / 10000.0 ** (torch.arange(half, device="cuda") / half)
    with device_guard(0), marked(*[2 * tokens * half * dtype.itemsize] * 2) as parts:
        launcher(0, tokens, half, 1.5, dtype)(positions, frequencies, *parts)
    for part, expected in zip(
        parts, on_reference(rotary_tables, positions, frequencies, 1.5, dtype=dtype), strict=True
    ):
        got = part.view(dtype).view(expected.shape)
        torch.testing.assert_close(got, expected, rtol=torch.finfo(dtype).eps, atol=2e-7)
    assert same_every_time(lambda: rotary_tables(positions, frequencies, 1.5, dtype=dtype))


def test_cuda_graph_with_changed_positions():
    positions, frequencies = torch.zeros(2, 1, dtype=torch.int64, device="cuda"), FREQUENCIES.cuda()
    graph, results = captured(lambda: rotary_tables(positions + 1, frequencies, 1.0, dtype=torch.bfloat16))
    for first in (5, 4000):
        positions.copy_(torch.tensor([[first], [first + 7]]))
        graph.replay()
        expected = rotary_tables(positions + 1, frequencies, 1.0, dtype=torch.bfloat16)
        assert all(map(torch.equal, results, expected))
