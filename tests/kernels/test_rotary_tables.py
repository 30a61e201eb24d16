"""Cosines and sines of rotary embeddings: float64, the module of transformers, errors, the compiled kernel."""

import pytest
import torch

from fp8moe.kernels.decoder_ops.rotary_tables import kernel_spec, rotary_tables
from fp8moe.runtime.checks import FLOATING
from tests.errors import error_in_its_dtype
from tests.ptxas import compile_report

FREQUENCIES = 1.0 / 10000.0 ** (torch.arange(0, 64, 2) / 64)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7,), (0, 4)])
def test_cosines_and_sines(shape, dtype, device):
    positions = torch.randint(0, 200_000, shape, generator=torch.Generator().manual_seed(0)).to(device)
    frequencies = FREQUENCIES.to(device)
    for scale in (1.0, 0.8):
        got = rotary_tables(positions, frequencies, scale, dtype=dtype)
        # Of the angle's rounding to float32, the same everywhere, it is not the error.
        angles = (positions[..., None].float() * frequencies).double()
        for value, exact in zip(got, (angles.cos(), angles.sin()), strict=True):
            assert value.dtype is dtype and value.shape == (*shape, 64) and value.is_contiguous()
            assert torch.equal(value[..., :32], value[..., 32:])
            if value.numel():
                limit = 2e-7 if dtype is torch.float32 else 1e-3
                assert error_in_its_dtype(value[..., :32], scale * exact) < limit


def test_strided_operands(device):
    positions, frequencies = torch.arange(40, device=device).view(5, 8), FREQUENCIES.to(device)
    apart = torch.stack([frequencies, -frequencies], -1)[:, 0]
    for some in (positions[:, ::3], positions.t()):
        expected = rotary_tables(some.contiguous(), frequencies, 1.0, dtype=torch.bfloat16)
        got = rotary_tables(some, apart, 1.0, dtype=torch.bfloat16)
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_is_the_module_of_transformers(dtype):
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

    config = qwen3_moe.Qwen3MoeConfig(head_dim=64, hidden_size=128, num_attention_heads=2)
    module, positions = qwen3_moe.Qwen3MoeRotaryEmbedding(config), torch.arange(90).view(2, 45)
    expected = module(torch.zeros(1, dtype=dtype), positions)
    got = rotary_tables(positions, module.inv_freq, module.attention_scaling, dtype=dtype)
    assert all(map(torch.equal, got, expected))


def test_errors():
    positions = torch.arange(3)

    def fails(error, match, **changed):
        given = {"positions": positions, "frequencies": FREQUENCIES, "scale": 1.0, "dtype": torch.float32}
        with pytest.raises(error, match=match):
            rotary_tables(**given | changed)

    fails(TypeError, "^positions: expected a torch.Tensor, got list", positions=[1])
    fails(TypeError, "^positions: expected int64, got torch.int32", positions=positions.int())
    fails(ValueError, "^positions: expected one dimension or more, got a scalar", positions=positions[0])
    fails(TypeError, "^frequencies: expected float32, got torch.float64", frequencies=FREQUENCIES.double())
    fails(ValueError, r"^frequencies: expected shape \(R/2,\), got \(1, 32\)", frequencies=FREQUENCIES[None])
    fails(TypeError, "^scale: expected a number, got str", scale="1")
    fails(TypeError, "^dtype: expected bfloat16, float16 or float32, got torch.int64", dtype=torch.int64)


@pytest.mark.parametrize("dtype", FLOATING)
def test_compiles_without_spills(dtype):
    report = compile_report(kernel_spec(dtype))
    # Large angles are reduced with a table on the stack, as in PyTorch's own kernels.
    assert (report.spill_stores, report.spill_loads) == (0, 0) and report.stack <= 32 and report.registers <= 48
