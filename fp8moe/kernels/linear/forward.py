"""FP8 linear layer as one operator, ``fp8moe::linear``: quantize the input 1x128, multiply by the FP8 weight.

`projection` computes the layer for an input that is quantized already.
"""

import functools
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe.kernels.gemm import launch
from fp8moe.kernels.gemm.api import empty_product, multiply, product
from fp8moe.kernels.gemm.checks import bias_vector, weights
from fp8moe.kernels.gemm.checks import out_dtype as check_out_dtype
from fp8moe.kernels.gemm.launch import GemmOperands
from fp8moe.kernels.linear.training import check, linear_training
from fp8moe.quant import reference
from fp8moe.quant.checks import fp8_operand
from fp8moe.quant.formats import FP8Tensor, align, ceil_div, has_channel_scales
from fp8moe.quant.quantize import has_vector_rows, unit_stride
from fp8moe.quant.quantize import launcher as quantizer
from fp8moe.runtime import autograd
from fp8moe.runtime.backend import use_cuda
from fp8moe.runtime.checks import check_tensor, row_major
from fp8moe.runtime.launch import current_stream, device_guard, planned
from fp8moe.runtime.operator import define


def linear(x: Tensor, weight: FP8Tensor | tuple[Tensor, Tensor], bias: Tensor | None = None) -> Tensor:
    """Return ``x @ dequantize(weight).T + bias`` with x quantized in blocks of 1x128: `FP8Linear` as a function.

    x: (..., K) bfloat16, float16 or float32; any K.
    weight: FP8Tensor or (data, scale). data (N, K) float8_e4m3fn; any N. scale float32, (ceil(N/128), ceil(K/128)) for
        blocks of 128x128, or (N, 1) for output channels.
    bias: (N,) bfloat16, float16 or float32, or None.
    Returns (..., N) in the dtype of x, rounded once from float32.

    The result is the `gemm` of ``quantize_1x128(x)`` and weight; the weight is fetched while the input is quantized. If
    K is not a multiple of 16 or N not a multiple of 8, copies of the operands are padded with zeros. x and bias get
    gradients, see `linear_training`. An FP8 weight gets none: if it requires one, the backward raises RuntimeError.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape or device, RuntimeError under forward-mode
    differentiation and under the derivative transforms of torch.func.
    """
    check_tensor("x", x)
    if bias is not None:
        check_tensor("bias", bias)
    return apply(x, *fp8_operand("weight", weight), bias)


def apply(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `linear` for a weight given as data and scale. Use `linear_training` if x or bias needs a gradient."""
    autograd.check_derivatives("fp8moe.FP8Linear", x, weight, bias)
    if autograd.recorded(weight, weight_scale_inv):
        name = "fp8moe.FP8Linear with an FP8 weight that requires a gradient, not a master_dtype,"
        return autograd.run(_linear_op, name, x, weight, weight_scale_inv, bias)
    if autograd.recorded(x, bias):
        if has_channel_scales(weight, weight_scale_inv):
            name = "fp8moe.FP8Linear with a scale for each output channel, not for 128x128 blocks,"
            return autograd.run(_linear_op, name, x, weight, weight_scale_inv, bias)
        return linear_training(x, weight, weight_scale_inv, bias)
    return _linear_op(x, weight, weight_scale_inv, bias)


class _LinearLauncher:
    """Runs the layer on operands in the layouts of the constructor's arguments.

    x_aligned: x starts at a multiple of 16 bytes.

    The GEMM is launched while the quantizer runs (programmatic dependent launch) and fetches weights meanwhile. This is
    safe because the quantizer is launched the ordinary way: it starts after all earlier kernels have ended, such as one
    that writes the weights or reads the memory of the result.
    """

    def __init__(
        self,
        device_index: int,
        x: Tensor,
        weight: Tensor,
        weight_scale_inv: Tensor,
        bias: Tensor | None,
        x_aligned: bool,
    ):
        n, k = weight.shape
        rows = x.reshape(-1, k)  # a view of x, not a copy
        m = rows.shape[0]
        pitch, k_blocks = align(m, 4), ceil_div(k, 128)
        self._index = device_index
        self._n = n
        self._out_dtype = torch.float32 if x.dtype is torch.float16 else x.dtype
        # Scratch memory holds the FP8 values, then the scales. K is a multiple of 16, so the scales are aligned too.
        self._data_bytes = m * k
        scratch_bytes = self._data_bytes + 4 * pitch * k_blocks
        # empty_strided with bound arguments takes half the time of torch.empty.
        allocate = functools.partial(torch.empty_strided, device=x.device)
        self._new_scratch = functools.partial(allocate, (scratch_bytes,), (1,), dtype=torch.uint8)
        shape = (*x.shape[:-1], n)
        strides = torch.empty(shape, dtype=self._out_dtype, device="meta").stride()
        self._new_out = functools.partial(allocate, shape, strides, dtype=self._out_dtype)
        scratch = self._new_scratch()
        data = scratch[: self._data_bytes].view(weight.dtype).view(m, k)
        scale = scratch[self._data_bytes :].view(torch.float32).view(k_blocks, pitch).t()[:m]
        self._quantizer = quantizer(device_index, "quantize_1x128", rows, has_vector_rows(rows))
        operands = GemmOperands(data, scale, weight, weight_scale_inv, bias)
        self._gemm = launch.dense(device_index, operands, self._out_dtype, True)

    def __call__(self, x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None) -> Tensor:
        # The scratch memory is freed on return while kernels still run: the allocator reuses it in stream order.
        scratch, out = self._new_scratch(), self._new_out()
        data, address = scratch.data_ptr(), out.data_ptr()
        scale = data + self._data_bytes
        with device_guard(self._index):
            stream = current_stream(self._index)
            self._quantizer.launch(stream, x.data_ptr(), data, scale)
            self._gemm.launch(
                stream,
                (data, scale, weight.data_ptr(), address),
                (weight_scale_inv.data_ptr(), 0 if bias is None else bias.data_ptr(), address, self._n),
            )
        return out if self._out_dtype is x.dtype else out.to(x.dtype)


_launcher = planned(_LinearLauncher)


def _launch(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None) -> Tensor:
    """Run the kernels on checked and padded operands, after copying operands whose layout the kernels cannot read."""
    rows = unit_stride(x.reshape(-1, x.shape[-1]))
    if rows.data_ptr() != x.data_ptr():
        x = rows.view(x.shape)
    operands = x, *weights(weight, weight_scale_inv, layout=row_major), bias_vector(bias)
    return _launcher(x.get_device(), *operands, x.data_ptr() & 15 == 0)(*operands)


def _linear(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None) -> Tensor:
    # This call lists the operands' layouts itself because `_launcher` would take longer to collect them.
    found = _launcher.look_up(
        index := x.get_device(),
        (x.shape, x.stride(), x.dtype, index),
        (weight.shape, weight.stride(), weight.dtype, weight.get_device()),
        (weight_scale_inv.shape, weight_scale_inv.stride(), weight_scale_inv.dtype, weight_scale_inv.get_device()),
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.get_device()),
        x.data_ptr() & 15 == 0,
    )
    if found is not None and not (weight.data_ptr() | launch.column_addresses(weight_scale_inv, bias)) & 15:
        return found(x, weight, weight_scale_inv, bias)  # no checks: operands in equal layouts have passed them before
    check(x, weight, weight_scale_inv, bias)
    n, k = weight.shape
    pad_n, pad_k = -n % 8, -k % 16
    if pad_n or pad_k:
        # Padding adds no quantization blocks, so block scales do not change.
        x = F.pad(x, (0, pad_k))
        weight = F.pad(weight.view(torch.uint8), (0, pad_k, 0, pad_n)).view(weight.dtype)
        if has_channel_scales(weight[:n], weight_scale_inv):
            weight_scale_inv = F.pad(weight_scale_inv, (0, 0, 0, pad_n), value=1.0)
        bias = bias if bias is None else F.pad(bias, (0, pad_n))
    on_gpu = n and x.numel() and use_cuda(x)
    out = (_launch if on_gpu else _composed)(x, weight, weight_scale_inv, bias)
    return out[..., :n].clone(memory_format=torch.contiguous_format) if pad_n else out


def _composed(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the layer with the reference quantizer and `multiply`: for the reference backend and empty operands."""
    lead = x.shape[:-1]
    data, scale = reference.quantize_1x128(x.reshape(lead.numel(), x.shape[-1]), False)
    dtype = torch.float32 if x.dtype is torch.float16 else x.dtype
    # The result is not a view of another tensor, so that the caller can change it in place.
    out = torch.empty((*lead, weight.shape[0]), dtype=dtype, device=x.device)
    multiply(GemmOperands(data, scale, weight, weight_scale_inv, bias), out.view(lead.numel(), weight.shape[0]))
    return out.to(x.dtype)


def _linear_fake(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None) -> Tensor:
    check(x, weight, weight_scale_inv, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_linear_op = define("linear -> Tensor", _linear, _linear_fake, forward_only=True)  # the backward: `linear_training`


# ---- an input that is quantized already ----


def projection(
    x: FP8Tensor, weight: FP8Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Compute `fp8moe.gemm` of x, weight and bias, launched before the previous kernel in the stream has ended.

    x: data (M, K) float8_e4m3fn, scale (M, ceil(K/128)) float32, MN-major. K a multiple of 16.
    weight: data (N, K) float8_e4m3fn, scale (ceil(N/128), ceil(K/128)) float32. N a multiple of 8.
    bias: (N,) bfloat16, float16 or float32, or None. out_dtype: bfloat16 or float32.
    Returns (M, N).

    The kernel fetches weight and bias while the previous kernel still runs (programmatic dependent launch). If the
    previous kernel belongs to this package, it must not write weight or bias. If the previous kernel belongs to
    PyTorch, it may write them. There is no backward: calling it raises RuntimeError.

    Raises the errors of `fp8moe.gemm`.
    """
    operands = (*fp8_operand("a", x), *fp8_operand("b", weight), bias)
    check_out_dtype(out_dtype, None)
    return autograd.run(_projection_op, "fp8moe.kernels.linear.projection", *operands, out_dtype is torch.float32)


def _projection(operands: Annotated[GemmOperands, (*GemmOperands._fields[:4], "bias")], float32: bool) -> Tensor:
    return product(operands, float32, pdl=True)


_projection_op = define("projection -> Tensor", _projection, empty_product, forward_only=True)
