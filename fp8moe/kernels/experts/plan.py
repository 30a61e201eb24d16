"""Launches an experts layer or a share of one: five kernels over one scratch tensor.

Each is launched while the one before it runs.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts.combine import Dtypes
from fp8moe.kernels.experts.combine import launcher as combine_launcher
from fp8moe.kernels.experts.operands import Operands, Share, tiles_of
from fp8moe.kernels.experts.permute import launcher as permute_launcher
from fp8moe.kernels.experts.routing import launcher as sort_launcher
from fp8moe.kernels.gemm.epilogue import PeerStore, PlainStore, SwigluQuantize
from fp8moe.kernels.gemm.plan import Plan as GemmPlan
from fp8moe.quant.formats import align, ceil_div
from fp8moe.runtime import config
from fp8moe.runtime.checks import aligned, row_major
from fp8moe.runtime.launch import current_stream, device_guard
from fp8moe.runtime.peer_table import Targets
from fp8moe.runtime.plans import PlanCache


class Plan:
    """How to run the layer on operands of given shapes, strides, dtypes and device, which is to be current.

    share: see `Share`; the window of rows that it names is what the scratch has room for.
    targets: peers that the results of GEMM 2 go to, row by row, and how; which addresses they have matters to `run`
    only. None: their weighted sums are the result.

    Programmatic dependent launch lets a kernel prepare, and fetch weights, while the one before it runs. That is safe
    because the sort is launched the ordinary way, or behind a kernel that has waited for all before it, and because
    every kernel lets the next one start only after it has itself waited for the one before: what runs early may rely on
    all but its immediate predecessor. So the GEMMs read the groups at once, which the sort has written two kernels
    before or more.
    """

    def __init__(
        self,
        operands: Operands,
        activation: Activation,
        capacity: int | None,
        share: Share,
        targets: Targets | None = None,
    ):
        x, index, weights, up, _, down, _, _, x_scale, *_ = operands
        device = self.index = x.get_device()
        tokens, top_k = index.shape
        count, hidden, size = down.shape
        self.hidden, self.size = hidden, size
        num_rows = share.rows(tokens * top_k) if capacity is None else count * capacity
        groups = count + 1 if capacity is None else count
        row_dtype, out_dtype = share.dtypes(x.dtype)
        self.pitch = pitch = align(num_rows, 4)
        # What the kernels hand on, each part at a multiple of 256 bytes.
        parts = {
            "groups": groups * 4,
            "rows": tokens * top_k * 4,
            "a": num_rows * hidden,
            "a_scale": pitch * ceil_div(hidden, 128) * 4,
            "h": num_rows * size,
            "h_scale": pitch * ceil_div(size, 128) * 4,
        }
        if targets is None:
            parts["y"] = num_rows * hidden * row_dtype.itemsize
        else:
            parts["assignments"] = num_rows * 4
        self.offsets, total = {}, 0
        for name, nbytes in parts.items():
            self.offsets[name] = total
            total += align(nbytes, 256)
        allocate = functools.partial(torch.empty_strided, device=x.device)
        self.new_scratch = functools.partial(allocate, (total,), (1,), dtype=torch.uint8)
        self.new_out = functools.partial(allocate, (tokens, hidden), (hidden, 1), dtype=out_dtype)

        scratch = self.new_scratch()

        def part(name: str, dtype: torch.dtype, columns: int) -> Tensor:
            data = scratch[self.offsets[name] :][: parts[name]].view(dtype)
            if dtype is torch.float32 and name != "y":
                return data.view(columns, pitch).t()[:num_rows]
            return data.view(num_rows, columns)

        a, h = part("a", torch.float8_e4m3fn, hidden), part("h", torch.float8_e4m3fn, size)
        a_scale = part("a_scale", torch.float32, ceil_div(hidden, 128))
        h_scale = part("h_scale", torch.float32, ceil_div(size, 128))
        grouped = {**tiles_of(tokens * top_k, share.num_experts or count, capacity), "pdl": True}
        window = (share.first_expert, share.first_row, num_rows)
        self.sort = sort_launcher(device, index, count, capacity, *window, pdl=targets is not None)
        launch = {"sparse": share.first_row > 0, "pdl": True}  # those rows are there only if routing is uneven
        self.permute = permute_launcher(device, x, x_scale, top_k, num_rows, **launch)
        self.gemm1 = GemmPlan(a, a_scale, up, h, SwigluQuantize(activation), **grouped)
        if targets is not None:
            self.gemm2 = GemmPlan(h, h_scale, down, None, PeerStore(row_dtype, *targets.form), **grouped)
            return
        y = part("y", row_dtype, hidden)
        self.gemm2 = GemmPlan(h, h_scale, down, y, PlainStore(row_dtype), **grouped)
        dtypes = Dtypes(row_dtype, weights.dtype, out_dtype)
        self.combine = combine_launcher(device, tokens, hidden, top_k, num_rows, dtypes, **launch)

    def run(self, operands: Operands, targets: Targets | None = None) -> Tensor | None:
        """Returns (T, H) in the dtype of the input, or of the share; None if rows go to the targets."""
        x, index, weights, up, up_scale, down, down_scale, residual, x_scale, *known = operands
        # Freed on return, while the kernels still run; the allocator hands it on in the order of the stream.
        scratch = self.new_scratch()
        out = self.new_out() if targets is None else None
        base = scratch.data_ptr()
        groups, rows, a, a_scale, h, h_scale, last = (base + offset for offset in self.offsets.values())
        with device_guard(self.index):
            stream = current_stream(self.index)
            self.sort.launch(stream, index.data_ptr(), groups, rows)
            tokens = (x.data_ptr(),) if x_scale is None else (x.data_ptr(), x_scale.data_ptr())
            self.permute.launch(stream, *tokens, rows, a, a_scale, 0 if targets is None else last)
            self.gemm1.launch(
                stream, a, a_scale, up.data_ptr(), up_scale.data_ptr(), groups, (h, self.size, h_scale, self.pitch)
            )
            operands = (h, h_scale, down.data_ptr(), down_scale.data_ptr(), groups)
            if targets is not None:
                addresses = targets.addresses
                self.gemm2.launch(stream, *operands, (*addresses[: targets.peers], last, *addresses[targets.peers :]))
                return None
            self.gemm2.launch(stream, *operands, (last, self.hidden, 0))
            added = (0 if value is None else value.data_ptr() for value in (residual, *known))
            self.combine.launch(stream, last, rows, weights.data_ptr(), *added, out.data_ptr())
        return out


_plans: PlanCache[Plan] = PlanCache()


def _key(
    operands: Operands, activation: Activation, capacity: int | None, share: Share, targets: Targets | None
) -> tuple:
    """All that the checks of the operands and the plan depend on, save addresses."""
    layouts = (x if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in operands)
    return (*layouts, activation, capacity, share, targets and targets.form)


def find(
    operands: Operands, activation: Activation, capacity: int | None, share: Share, targets: Targets | None = None
) -> Plan | None:
    """The plan to run on these operands if one like them has run: then there is nothing to check or to copy."""
    plan = _plans.find(_key(operands, activation, capacity, share, targets))
    if plan is None or config.settings.backend == "reference":
        return None
    addresses = operands.hidden_states.data_ptr() | operands.up.data_ptr() | operands.down.data_ptr()
    added = operands.residual
    return None if (addresses | (0 if added is None else added.data_ptr())) & 15 else plan


def experts(
    operands: Operands, activation: Activation, capacity: int | None, share: Share, targets: Targets | None = None
) -> Tensor | None:
    """The layer, or a share of it, with a SwiGLU on operands that ``layer.run`` has padded; none is empty.

    H and I are multiples of 16. Those in layouts that the kernels do not take are copied. Returns what `Plan.run` does.
    """
    x, *rest, x_scale, residual_known, known = operands
    rest = (value if value is None else aligned(value) for value in rest)
    operands = Operands(row_major(x), *rest, x_scale, residual_known, known)

    def build() -> Plan:
        with device_guard(x.get_device()):
            return Plan(operands, activation, capacity, share, targets)

    return _plans.get(_key(operands, activation, capacity, share, targets), build).run(operands, targets)
