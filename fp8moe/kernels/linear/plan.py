"""Launches an FP8 linear layer: the quantizer writes into a scratch tensor, from which the GEMM reads."""

import functools

import torch
from torch import Tensor

from fp8moe.kernels.gemm import dense_plan
from fp8moe.kernels.gemm.checks import bias_vector
from fp8moe.quant.formats import align, ceil_div
from fp8moe.quant.quantize import has_vector_rows, unit_stride
from fp8moe.quant.quantize import launcher as quantizer
from fp8moe.runtime import config
from fp8moe.runtime.checks import row_major
from fp8moe.runtime.launch import current_stream, device_guard
from fp8moe.runtime.plans import PlanCache


class Plan:
    """How to run the layer on operands of given shapes, strides, dtypes and device, which is to be current.

    The GEMM is launched while the quantizer runs (programmatic dependent launch) and fetches weights meanwhile. That is
    safe because the quantizer is launched the ordinary way: when it starts, all that came before it, such as a kernel
    that writes the weights or one that still reads the memory of the result, has ended.
    """

    def __init__(self, x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None):
        n, k = weight.shape
        rows = x.reshape(-1, k)  # a view
        m = rows.shape[0]
        pitch, k_blocks = align(m, 4), ceil_div(k, 128)
        self.index = x.get_device()
        self.n = n
        self.out_dtype = torch.float32 if x.dtype is torch.float16 else x.dtype
        # The values, then the scales: K is a multiple of 16, so these are aligned too.
        self.data_bytes = m * k
        scratch_bytes = self.data_bytes + 4 * pitch * k_blocks
        # With strides, and bound beforehand, an allocation takes half the time of torch.empty.
        allocate = functools.partial(torch.empty_strided, device=x.device)
        self.new_scratch = functools.partial(allocate, (scratch_bytes,), (1,), dtype=torch.uint8)
        shape = (*x.shape[:-1], n)
        strides = torch.empty(shape, device="meta").stride()
        self.new_out = functools.partial(allocate, shape, strides, dtype=self.out_dtype)
        scratch = self.new_scratch()
        data = scratch[: self.data_bytes].view(weight.dtype).view(m, k)
        scale = scratch[self.data_bytes :].view(torch.float32).view(k_blocks, pitch).t()[:m]
        self.quantizer = quantizer(self.index, "quantize_1x128", rows, has_vector_rows(rows))
        operands = dense_plan.Operands(data, scale, weight, weight_scale_inv, bias)
        self.gemm = dense_plan.make(operands, self.out_dtype, pdl=True)

    def run(self, x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None) -> Tensor:
        """Returns (..., N) in the dtype of x."""
        # Freed on return, while the kernels still run; the allocator hands it on in the order of the stream.
        scratch = self.new_scratch()
        out = self.new_out()
        data = scratch.data_ptr()
        scale = data + self.data_bytes
        with device_guard(self.index):
            stream = current_stream(self.index)
            self.quantizer.launch(stream, x.data_ptr(), data, scale)
            self.gemm.launch(
                stream,
                *(data, scale, weight.data_ptr(), weight_scale_inv.data_ptr(), 0),
                (out.data_ptr(), self.n, 0 if bias is None else bias.data_ptr()),
            )
        return out if self.out_dtype is x.dtype else out.to(x.dtype)


_plans: PlanCache[Plan] = PlanCache()


def _key(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None) -> tuple:
    """All that the checks of the operands and the plan depend on, save the address of the weight."""
    return (
        *(x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15 == 0),
        *(weight.shape, weight.stride(), weight.dtype, weight.get_device()),
        *(weight_scale_inv.shape, weight_scale_inv.stride(), weight_scale_inv.dtype, weight_scale_inv.get_device()),
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.get_device()),
    )


def find(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None) -> Plan | None:
    """The plan to run on these operands if one like them has run: then there is nothing to check or to copy."""
    plan = _plans.find(_key(x, weight, weight_scale_inv, bias))
    return None if plan is None or config.settings.backend == "reference" or weight.data_ptr() & 15 else plan


def linear(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ dequantize(weight).T + bias`` of operands that ``forward.linear`` has checked and padded; none is empty.

    x (..., K), weight (N, K), weight_scale_inv (ceil(N/128), ceil(K/128)) and bias (N,), K a multiple of 16 and N of 8,
    in any layout: those that the kernels do not take are copied. Returns (..., N) in the dtype of x.
    """
    rows = unit_stride(x.reshape(-1, x.shape[-1]))
    if rows.data_ptr() != x.data_ptr():
        x = rows.view(x.shape)
    operands = x, row_major(weight), weight_scale_inv.contiguous(), bias_vector(bias)

    def build() -> Plan:
        with device_guard(x.get_device()):
            return Plan(*operands)

    return _plans.get(_key(*operands), build).run(*operands)
