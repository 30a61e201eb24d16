"""`Workspace`: launches an experts layer, or one rank's shard, as three to five kernels that share a scratch tensor."""

import functools

import torch
from torch import Tensor

from fp8moe.kernels.experts.combine import Dtypes, norm_launcher
from fp8moe.kernels.experts.combine import launcher as combine_launcher
from fp8moe.kernels.experts.operands import Biases, Norm, Shard, TokenOperands, grouping_of
from fp8moe.kernels.experts.permute import launcher as permute_launcher
from fp8moe.kernels.experts.routing import launcher as sort_launcher
from fp8moe.kernels.gemm.checks import activations, bias_vector, weights
from fp8moe.kernels.gemm.epilogue import PeerStore, PlainStore, SwigluQuantize
from fp8moe.kernels.gemm.launch import GemmOperands, gathers
from fp8moe.kernels.gemm.launch import build as build_gemm
from fp8moe.quant.formats import (
    BLOCK,
    FP8Tensor,
    align,
    ceil_div,
    empty_quantized,
    has_channel_scales,
    is_packed,
)
from fp8moe.runtime.checks import aligned, row_major
from fp8moe.runtime.launch import current_stream, device_guard, planned
from fp8moe.runtime.peer_table import Targets


class Workspace:
    """The launchers of a layer with a SwiGLU, and the layout of the scratch tensor that its kernels share.

    The kernels: sort the assignments by expert, if they are not sorted yet; quantize the tokens 1x128 into that order,
    unless GEMM 1 gathers few tokens that are quantized and sorted; GEMM 1 with activation and quantization; GEMM 2;
    each token's weighted sum over its rows. Each kernel is launched
    while the previous one runs (programmatic dependent launch). This is safe because the first kernel is launched the
    ordinary way, or begins by waiting for all earlier ones, and because every kernel lets its successor start only
    after it has itself waited for its predecessor. So a kernel that has not waited yet may already read the results of
    all earlier kernels except its predecessor: the GEMMs read groups and weights at once. A GEMM 1 that gathers waits
    before it reads the groups, as its predecessor may have written them.

    operands: in layouts that the kernels read, on the current device. The scratch has room for the rows of their shard.
    form: `Targets.form`, if the rows of GEMM 2 go to peers; None: the results are the weighted sums.
    """

    def __init__(self, operands: TokenOperands, form: tuple[int, int, bool] | None):
        x, index, layer = operands.hidden_states, operands.top_k_index, operands.layer
        shard, capacity = operands.shard, operands.capacity
        device = self.device_index = x.get_device()
        tokens, top_k = index.shape
        count, hidden, size = layer.sizes
        self.hidden, self.size = hidden, size
        self.aligned_scales = any(
            has_channel_scales(*weight) or is_packed(weight.data) for weight in (layer.up, layer.down)
        )
        num_rows = shard.rows(tokens * top_k) if capacity is None else count * capacity
        row_dtype, out_dtype = shard.dtypes(x.dtype)
        self.pitch = align(num_rows, 4)
        self.gathers = _gathers(operands)
        # Bytes of each intermediate result in the scratch tensor, each at a multiple of 256 bytes.
        parts = {
            "groups": (count + (capacity is None) + 1) * 4,  # the last int32 is the tile counter of GEMM 1
            "rows": tokens * top_k * 4,
            "a": 0 if self.gathers else num_rows * hidden,
            "a_scale": 0 if self.gathers else self.pitch * ceil_div(hidden, BLOCK) * 4,
            "h": num_rows * size,
            "h_scale": self.pitch * ceil_div(size, BLOCK) * 4,
            # The assignment of each row if the rows of GEMM 2 go to peers, otherwise the rows of GEMM 2.
            "last": num_rows * (4 if form else hidden * row_dtype.itemsize),
        }
        self.offsets, total = {}, 0
        for name, nbytes in parts.items():
            self.offsets[name] = total
            total += align(nbytes, 256)
        allocate = functools.partial(torch.empty_strided, device=x.device)
        self.new_scratch = functools.partial(allocate, (total,), (1,), dtype=torch.uint8)
        self.new_out = functools.partial(allocate, (tokens, hidden), (hidden, 1), dtype=out_dtype)
        self.new_known = functools.partial(allocate, (tokens,), (1,), dtype=torch.bool)

        scratch = self.new_scratch()

        def matrix(name: str, dtype: torch.dtype, columns: int) -> Tensor:
            return scratch[self.offsets[name] :][: parts[name]].view(dtype).view(-1, columns)

        def quantized(name: str, columns: int) -> FP8Tensor:
            scale = matrix(f"{name}_scale", torch.float32, self.pitch).t()[:num_rows]
            return FP8Tensor(matrix(name, torch.float8_e4m3fn, columns), scale)

        # A window that begins past row 0 is filled only if routing is uneven, so most tokens have no row in it.
        launch = {"sparse": shard.first_row > 0, "pdl": True}
        grouping = grouping_of(tokens * top_k, shard.total(count), capacity)
        a = FP8Tensor(x, operands.hidden_scale) if self.gathers else quantized("a", hidden)
        h, (up_bias, down_bias) = quantized("h", size), layer.biases
        first, second = GemmOperands(*a, *layer.up, up_bias), GemmOperands(*h, *layer.down, down_bias)
        gathered = {"top_k": top_k} if self.gathers else {}
        self.gemm1 = build_gemm(first, SwigluQuantize(layer.activation), grouping, h.data, pdl=True, **gathered)
        if not self.gathers:
            self.permute = permute_launcher(device, x, operands.hidden_scale, top_k, num_rows, **launch)
        # If GEMM 1 needs a tile counter (a 0 after the groups), sort again: groups given by the caller lack a counter.
        self.sort = None
        if operands.groups is None or self.gemm1.dynamic:
            window = (shard.first_expert, shard.first_row, num_rows)
            self.sort = sort_launcher(device, index, count, capacity, *window, pdl=form is not None)
        if form is not None:
            self.gemm2 = build_gemm(second, PeerStore(row_dtype, *form), grouping, pdl=True)
            return
        y = matrix("last", row_dtype, hidden)
        self.gemm2 = build_gemm(second, PlainStore(row_dtype), grouping, y, pdl=True)
        dtypes = Dtypes(row_dtype, operands.top_k_weights.dtype, out_dtype)
        sizes = device, tokens, hidden, top_k, num_rows, dtypes
        if operands.norm is None:
            self.combine = combine_launcher(*sizes, **launch)
        else:
            self.combine = norm_launcher(*sizes, operands.norm.norm_eps, pdl=True)

    def __call__(
        self, operands: TokenOperands, targets: Targets | None = None, out: Tensor | None = None
    ) -> list[Tensor]:
        """Launch the kernels and return the results of the operator `experts`; [] if `targets` (peers) get the rows.

        out: if given, the weighted sums are written to it.
        """
        (up, up_scale), (down, down_scale), _, (up_bias, down_bias) = operands.layer
        residual = 0 if operands.residual is None else operands.residual.data_ptr()
        x, up_address, down_address = operands.hidden_states.data_ptr(), up.data_ptr(), down.data_ptr()
        up_bias = 0 if up_bias is None else up_bias.data_ptr()
        down_bias = 0 if down_bias is None else down_bias.data_ptr()
        norm = operands.norm
        norm_address = 0 if norm is None else norm.norm_weight.data_ptr()
        addresses = x | up_address | down_address | residual | up_bias | down_bias | norm_address
        if self.gathers:
            addresses |= operands.hidden_scale.data_ptr()
        if self.aligned_scales:
            addresses |= up_scale.data_ptr() | down_scale.data_ptr()
        if addresses & 15:
            return self(_as_kernels_load(operands), targets, out)
        # The scratch tensor is freed on return while kernels still run: the allocator reuses it in stream order.
        scratch = self.new_scratch()
        if out is None and targets is None:
            out = self.new_out()
        base = scratch.data_ptr()
        groups, rows, a, a_scale, h, h_scale, last = [base + offset for offset in self.offsets.values()]
        tokens = (x,) if operands.hidden_scale is None else (x, operands.hidden_scale.data_ptr())
        with device_guard(self.device_index):
            stream = current_stream(self.device_index)
            if self.sort is not None:
                self.sort.launch(stream, operands.top_k_index.data_ptr(), groups, rows)
            else:
                groups, rows = operands.groups.data_ptr(), operands.rows.data_ptr()
            pointers = (up_scale.data_ptr(), up_bias, h, self.size, h_scale, self.pitch, 0, 0)
            if self.gathers:
                self.gemm1.launch(stream, (*tokens, up_address, h), pointers, groups, rows)
            else:
                self.permute.launch(stream, *tokens, rows, a, a_scale, 0 if targets is None else last)
                self.gemm1.launch(stream, (a, a_scale, up_address, h), pointers, groups)
            mapped, scale = (h, h_scale, down_address, last), down_scale.data_ptr()
            if targets is not None:
                self.gemm2.launch(stream, mapped, (scale, down_bias, *targets.pointers(last)), groups)
                return []
            self.gemm2.launch(stream, mapped, (scale, down_bias, last, self.hidden), groups)
            weights = operands.top_k_weights.data_ptr()
            results = [out]
            if norm is not None:
                results += empty_normed(out, norm)
                data, *scale = (value.data_ptr() for value in results[1:])
                wanted = (0, data, *scale) if norm.norm_quantized else (data, 0, 0)
                self.combine.launch(stream, last, rows, weights, residual, norm_address, out.data_ptr(), *wanted)
                return results
            known = 0 if operands.residual_known is None else operands.residual_known.data_ptr()
            now = 0
            if operands.wants_known:
                results.append(self.new_known())
                now = results[1].data_ptr()
            self.combine.launch(stream, last, rows, weights, residual, known, now, out.data_ptr())
        return results


def _gathers(operands: TokenOperands) -> bool:
    """Return whether GEMM 1 can read the tokens by index: few tokens that are quantized, and sorted by the caller."""
    if operands.hidden_scale is None or operands.groups is None or operands.capacity is not None:
        return False
    here, whole = len(operands.layer.up.data), operands.shard._replace(row_dtype=None, out_dtype=None) == Shard()
    return whole and gathers(*operands.top_k_index.shape, here)


def empty_normed(out: Tensor, norm: Norm | None) -> list[Tensor]:
    """Return uninitialized tensors for the norm of `out`: [values] or [data, scale]; [] without a norm."""
    if norm is None:
        return []
    return list(empty_quantized(out, *out.shape)) if norm.norm_quantized else [out.new_empty(out.shape)]


@planned
def workspace(device_index: int, form: tuple[int, int, bool] | None, operands: TokenOperands) -> Workspace:
    return Workspace(operands, form)


def find(operands: TokenOperands, targets: Targets | None = None) -> Workspace | None:
    """Return the `Workspace` built and checked before for operands in equal layouts, or None if there is none."""
    return workspace.find(operands.hidden_states.get_device(), targets and targets.form, operands)


def run(operands: TokenOperands, targets: Targets | None = None, out: Tensor | None = None) -> list[Tensor]:
    """Run a `Workspace` on operands in any memory layout. H and I are multiples of 16, and no operand is empty."""
    loaded = _as_kernels_load(operands)
    return workspace(loaded.hidden_states.get_device(), targets and targets.form, loaded)(loaded, targets, out)


def _as_kernels_load(operands: TokenOperands) -> TokenOperands:
    """Return the operands, with copies of tensors whose memory layouts the kernels cannot read."""
    layer, x, scale = operands.layer, operands.hidden_states, operands.hidden_scale
    if scale is not None and _gathers(operands):
        x, scale = activations(x, scale)
    added = {"top_k_weights": operands.top_k_weights, "residual": operands.residual}
    norm = operands.norm
    scalars = {name: getattr(operands, name) for name in ("residual_known", "groups", "rows")}
    return operands._replace(
        hidden_states=row_major(x),
        hidden_scale=scale,
        top_k_index=operands.top_k_index.contiguous(),
        layer=layer._replace(
            up=weights(*layer.up, 2),
            down=weights(*layer.down),
            biases=Biases(*map(bias_vector, layer.biases)),
        ),
        norm=None if norm is None else norm._replace(norm_weight=aligned(norm.norm_weight)),
        **{name: value if value is None else aligned(value) for name, value in added.items()},
        **{name: value if value is None else value.contiguous() for name, value in scalars.items()},
    )
