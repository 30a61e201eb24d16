"""Launches ``cuda/sample.cu``."""

import ctypes

import torch
from torch import Tensor

from fp8moe.kernels.decoder_ops import sampling_reference as reference
from fp8moe.kernels.decoder_ops.sampling_state import GENERATED, IN_PROMPT, SamplingState
from fp8moe.quant.quantize import input_defines
from fp8moe.runtime.jit import KernelSpec, load
from fp8moe.runtime.launch import Launcher, current_stream, device_guard
from fp8moe.runtime.plans import PlanCache
from fp8moe.runtime.sm90 import MAX_BLOCKS_PER_PORTABLE_CLUSTER, WARP

_CLUSTER = MAX_BLOCKS_PER_PORTABLE_CLUSTER  # thread blocks of a row
_WARPS = 16  # of a thread block
_POINTERS = 1 + len(SamplingState._fields) + 2


class _Operands(ctypes.Structure):
    """``struct Operands`` of the kernel."""

    _fields_ = (
        ("pointers", ctypes.c_int64 * _POINTERS),
        ("logits_stride", ctypes.c_int64),
        ("vocab", ctypes.c_uint32),
    )


class _Plan:
    def __init__(self, rows: int, vocab: int, logits_stride: int, dtype: torch.dtype, vector: bool):
        self._operands = _Operands(vocab=vocab, logits_stride=logits_stride)
        self._launcher = Launcher(
            load(kernel_spec(dtype, vector)),
            grid=rows * _CLUSTER,
            block=_WARPS * WARP,
            cluster=_CLUSTER,
            pdl=True,
            args=(self._operands,),
        )

    def launch(self, stream: int, *operands: Tensor) -> None:
        """Operands as the fields of the kernel's struct, in their order."""
        with self._launcher.lock:
            self._operands.pointers[:] = [operand.data_ptr() for operand in operands]
            self._launcher.launch(stream)


_plans: PlanCache[_Plan] = PlanCache()


def kernel_spec(dtype: torch.dtype, vector: bool) -> KernelSpec:
    """The kernel for logits of `dtype`. vector: every row of logits and of marks is made of whole vectors of tokens."""
    defines = {
        "WARPS": _WARPS,
        "CLUSTER": _CLUSTER,
        "DIGIT_BITS": 11,
        "CAPACITY": 2048,
        "MASS_BITS": reference.MASS_BITS,
        "IN_PROMPT": IN_PROMPT,
        "GENERATED": GENERATED,
        "EXP_TERMS": _array(reference.EXP_TERMS),
        "LOG_TERMS": _array(reference.LOG_TERMS),
        "LOG2_E": _number(reference.LOG2_E),
        "LN2_HIGH": _number(reference.LN2_HIGH),
        "LN2_LOW": _number(reference.LN2_LOW),
        "MIN_EXPONENT": _number(reference.MIN_EXPONENT),
        "SQRT_HALF_BITS": reference.SQRT_HALF_BITS,
        "PHILOX_ROUNDS": reference.PHILOX_ROUNDS,
        "PHILOX_FACTORS": _array(reference.PHILOX_FACTORS),
        "PHILOX_WEYL": _array(reference.PHILOX_WEYL),
        "OPERANDS_BYTES": ctypes.sizeof(_Operands),
    }
    return KernelSpec("sample.cu", "sample", (*input_defines(dtype, vector=vector), *defines.items()))


def _number(value: float) -> str:
    """As CUDA writes it."""
    return f"{value!r}f" if isinstance(value, float) else f"{value}u"


def _array(values: tuple[float, ...]) -> str:
    return f"{{{', '.join(map(_number, values))}}}"


def sample(logits: Tensor, state: SamplingState) -> tuple[Tensor, Tensor]:
    """Tokens and logprobs of logits (B, V) in any layout, as ``sampling.sample`` describes it.

    The kernel starts before the one ahead has ended; nothing is read or written before it has.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        stride, size = logits.stride(0), logits.itemsize
        vector = not (logits.data_ptr() | state.seen.data_ptr() | vocab * size | stride * size) % 16
        device_index = logits.get_device()
        with device_guard(device_index):
            plan = _plans.get(
                (rows, vocab, stride, logits.dtype, vector, device_index),
                lambda: _Plan(rows, vocab, stride, logits.dtype, vector),
            )
            plan.launch(current_stream(device_index), logits, *state, tokens, logprobs)
    return tokens, logprobs
