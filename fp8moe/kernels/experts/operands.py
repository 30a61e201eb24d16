"""Operands of an experts layer (weights, tokens, rows, a rank's shard), and their padding to sizes for the kernels."""

from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts.unpacked import in_blocks
from fp8moe.kernels.gemm.tiles import Grouping
from fp8moe.quant.formats import FP8Tensor, ceil_div, has_channel_scales, is_packed, weight_k
from fp8moe.runtime.autograd import recorded


class Biases(NamedTuple):
    """Biases of both projections, added to the float32 sums; each is bfloat16, float16 or float32, or None.

    up_bias: (E, 2I), gate then up, or (E, I) without a gate; added before the activation. down_bias: (E, H), added
    before the results are rounded and weighted. Biases require I > 0.
    """

    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Layer(NamedTuple):
    """The weights of experts in FP8 or four bits, the activation between them, and biases.

    up: data float8_e4m3fn (E, 2I, H), gate rows then up rows, or (E, I, H) where the activation has no gate; scale
        float32 (E, 2 * ceil(I/128), ceil(H/128)), gate blocks then up blocks, or without a gate
        (E, ceil(I/128), ceil(H/128)). Any H and I.
    down: data (E, H, I), scale (E, ceil(H/128), ceil(I/128)).
    Either can have data and scale of a PackedTensor instead: uint8 (E, 2I, H/2), (E, H, I/2), H and I multiples of 32;
        MXFP4 may be arranged (`quant.arranged`), NVFP4 is.
    activation: a SwiGLU and its quantization are fused into the GEMM of up; others run as PyTorch operations.
    """

    up: FP8Tensor
    down: FP8Tensor
    activation: Activation
    biases: Biases = Biases()

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, H and I."""
        count, hidden, _ = self.down.data.shape
        return count, hidden, weight_k(self.down.data)

    def in_blocks(self) -> "Layer":
        """Convert weights in four bits to FP8 in blocks; see `unpacked.in_blocks`. Others stay as they are."""
        if not is_packed(self.up.data):
            return self
        up = in_blocks(*self.up, 2 if self.activation.gated else 1)
        return self._replace(up=FP8Tensor(*up), down=FP8Tensor(*in_blocks(*self.down, 1)))

    def padded(self, multiple: int) -> "Layer":
        """Pad weights and biases with zeros, I to a multiple of `multiple` and H to a multiple of 16.

        Returns the layer itself if no padding is needed, as for weights in four bits with a multiple of 16 or 32.
        Padding stays inside existing blocks, so block scales do not change.
        """
        up, down = self.up.data, self.down.data
        _, hidden, size = self.sizes
        pad_hidden, pad_size = -hidden % 16, -size % multiple
        if not (pad_hidden or pad_size):
            return self
        projections = up.view(torch.uint8).unflatten(1, (-1, size))
        padded_up = F.pad(projections, (0, pad_hidden, 0, pad_size)).flatten(1, 2).view(up.dtype)
        padded_down = F.pad(down.view(torch.uint8), (0, pad_size, 0, pad_hidden)).view(down.dtype)
        up_scale, down_scale = self.up.scale, self.down.scale
        if has_channel_scales(*self.up):
            up_scale = F.pad(up_scale.unflatten(1, (-1, size)), (0, 0, 0, pad_size), value=1.0).flatten(1, 2)
        if has_channel_scales(*self.down):
            down_scale = F.pad(down_scale, (0, 0, 0, pad_hidden), value=1.0)
        up_bias, down_bias = self.biases
        if up_bias is not None:
            up_bias = F.pad(up_bias.unflatten(1, (-1, size)), (0, pad_size)).flatten(1, 2)
        if down_bias is not None:
            down_bias = F.pad(down_bias, (0, pad_hidden))
        return self._replace(
            up=FP8Tensor(padded_up, up_scale),
            down=FP8Tensor(padded_down, down_scale),
            biases=Biases(up_bias, down_bias),
        )


class Masters(NamedTuple):
    """Master weights that get gradients: the sources of the quantized weights, or None for weights without a gradient.

    Each has the shape of its FP8 weight. If gate and up are separate parameters, gate_master and up_master are
    (E, I, H) each; otherwise up_master has the rows of both and gate_master is None. For an attribute ``grad_sum`` of
    a master see `kernels.gemm.api.weight_gradient`.
    """

    up_master: Tensor | None = None
    down_master: Tensor | None = None
    gate_master: Tensor | None = None

    def recorded(self) -> "Masters":
        """Return the masters for which autograd records gradients, with None in place of the others."""
        return Masters(*(master if recorded(master) else None for master in self))

    @property
    def of_up(self) -> bool:
        """Whether a master of the first projection (gate or up) gets a gradient."""
        return self.up_master is not None or self.gate_master is not None


class LowRank(NamedTuple):
    """LoRA factors: ``up_b @ up_a`` and ``down_b @ down_a`` are added to frozen weights. Source: arXiv:2106.09685.

    up_a (E, r, H), up_b (E, P, r), down_a (E, r, Q), down_b (E, H, r), bfloat16, LoRA's scaling included. Q is I padded
    with zeros to a multiple of 128; P is Q without a gate and 2Q with one. H and r are padded to multiples of 16.
    dropped: (T, H), hidden_states after dropout, the input of up_a; None: the input of up_a is hidden_states.
    dropout: the probability of dropout on the input of down_a, which is the result of the activation.
    """

    up_a: Tensor
    up_b: Tensor
    down_a: Tensor
    down_b: Tensor
    dropped: Tensor | None = None
    dropout: float = 0.0

    def multiplied(self, hidden_states: Tensor | None) -> Tensor:
        """Return the input of up_a in bfloat16 with H padded: `dropped`, or hidden_states if `dropped` is None."""
        return pad_columns((hidden_states if self.dropped is None else self.dropped).bfloat16(), self.up_a.shape[2])

    def drop(self, values: Tensor, kept: Tensor) -> Tensor:
        """Apply the mask `kept` of dropout to values (R, Q); values that are kept are divided by 1 - dropout."""
        return torch.ops.aten.native_dropout_backward(values, kept, 1 / (1 - self.dropout))


class Shard(NamedTuple):
    """The part of a layer that a call computes, by default all of it, and the dtypes of its results.

    first_expert: the index of this rank's first expert. num_experts: the number of experts on all ranks; GEMM tiles are
        chosen as if assignments were spread evenly over them. None: the number on this rank.
    first_row, num_rows: a window of the rows of this rank's assignments, sorted by expert: only num_rows rows from
        first_row on are computed and get memory. num_rows None: T * K.
    row_dtype: dtype of the down projection's rows, bfloat16 or float32; None: bfloat16 if hidden_states is bfloat16,
        otherwise float32.
    out_dtype: dtype of the weighted sums, bfloat16, float16 or float32; None: the dtype of hidden_states.
    """

    first_expert: int = 0
    num_experts: int | None = None
    first_row: int = 0
    num_rows: int | None = None
    row_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None

    def total(self, here: int) -> int:
        """Return the number of experts on all ranks. here: the number of experts on this rank."""
        return here if self.num_experts is None else self.num_experts

    def rows(self, assignments: int) -> int:
        """Return the number of rows to allocate for `assignments` assignments: one each, but at most num_rows."""
        return assignments if self.num_rows is None else min(self.num_rows, assignments)

    def dtypes(self, hidden_dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of the down projection's rows and of the weighted sums."""
        return self.row_dtype or row_dtype(hidden_dtype), self.out_dtype or hidden_dtype


class Norm(NamedTuple):
    """RMSNorm of a layer's result, returned with the result if one kernel can compute both: see `rms_norm`.

    norm_weight: (H,) in the dtype of the result. norm_quantized: return the norm in FP8, in blocks of 1x128, instead of
    in the dtype of the result.
    """

    norm_weight: Tensor
    norm_eps: float = 0.0
    norm_quantized: bool = False


class TokenOperands(NamedTuple):
    """Operands of a call on tokens: the tokens, their routing, and the layer or shard whose experts run on them.

    hidden_states: (T, H) bfloat16, float16 or float32, any H; or float8_e4m3fn with hidden_scale (T, ceil(H/128)),
        quantized 1x128.
    top_k_index: (T, K) int32 or int64. Experts that are not on this rank add nothing.
    top_k_weights: (T, K) float32, bfloat16 or float16; None where rows go to peers, who apply the weights.
    capacity: rows reserved for each expert (the masked layout); None: rows are packed by expert. Assignments beyond
        the capacity add nothing; if no token names an expert twice, a capacity of T loses none.
    residual: (T, H) in the dtype of the result, added to the rounded result, or None.
    groups, rows: int32 (E + 1,) and (T, K), the result of `sort_by_expert` for top_k_index and the E experts, without a
        capacity. Both are None if the result has not been computed yet.
    residual_known: bool (T,), the tokens that have a residual; for others, residual is not read. None: all tokens.
    wants_known: return a second result, bool (T,): the tokens that have a sum. All tokens with a row or a residual have
        a sum. Sums of other tokens are then undefined, and not computed.
    """

    hidden_states: Tensor
    top_k_index: Tensor
    top_k_weights: Annotated[Tensor | None, "Tensor"]
    layer: Layer
    capacity: int | None = None
    residual: Tensor | None = None
    groups: Tensor | None = None
    rows: Tensor | None = None
    hidden_scale: Tensor | None = None
    shard: Shard = Shard()
    residual_known: Tensor | None = None
    wants_known: bool = False
    norm: Norm | None = None

    @property
    def names(self) -> tuple[str, str]:
        """Names for hidden_states and residual in error messages: the argument names of the called function."""
        return ("hidden_states", "residual") if self.shard.out_dtype is None else ("x", "partial")

    def quantized(self, values: FP8Tensor) -> "TokenOperands":
        """Replace hidden_states by the same values quantized 1x128. The results keep their dtype and bits."""
        dtype = self.hidden_states.dtype
        shard = self.shard._replace(row_dtype=row_dtype(dtype), out_dtype=dtype)
        return self._replace(hidden_states=values.data, hidden_scale=values.scale, shard=shard)

    def layouts(self) -> tuple:
        """Return the key under which launchers are cached: the layout of each tensor, and all other fields."""
        layer, norm = self.layer, self.norm
        routed = self.hidden_states, self.hidden_scale, self.top_k_index, self.top_k_weights
        beside = self.residual, self.residual_known, self.groups, self.rows
        tensors = *routed, *layer.up, *layer.down, *layer.biases, *beside, norm and norm.norm_weight
        # Every call of the layer runs this line, so it must be fast.
        layouts = [None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors]
        return *layouts, layer.activation.key, self.capacity, self.shard, self.wants_known, norm and norm[1:]


class RowOperands(NamedTuple):
    """Operands of a call on rows that are already sorted by expert: the rows, and the layer whose experts run on them.

    rows: (R, H) bfloat16, float16 or float32, or float8_e4m3fn with rows_scale (R, ceil(H/128)), quantized 1x128.
    groups: (E + 1,) int32, the offsets at which the experts' groups of rows begin and end: see `grouped_gemm`.
    row_dtype: dtype of the result, bfloat16 or float32.
    whole: numbers of rows and experts of the whole layer, over all ranks, if this call computes a part of it: each row
        gets the bits that it would have in the whole layer. None: this is the whole layer.
    expected_m: None for rows sorted by expert. In the masked layout, about how many rows of an expert are in use. In
        this layout `rows` is float8_e4m3fn (E, max_m, H), `rows_scale` is (E, max_m, ceil(H/128)), and `groups` (E,)
        has the number of rows in use of each expert.
    """

    rows: Tensor
    rows_scale: Tensor | None
    groups: Tensor
    layer: Layer
    row_dtype: torch.dtype
    whole: tuple[int, int] | None = None
    expected_m: int | None = None

    @property
    def names(self) -> tuple[str, str, str]:
        """Names for rows, rows_scale and groups in error messages: the argument names of the called function."""
        contiguous = self.expected_m is None
        return ("rows", "rows.scale", "group_offsets") if contiguous else ("x.data", "x.scale", "masked_m")


def grouping_of(assignments: int, num_experts: int, capacity: int | None = None) -> Grouping:
    """Return the `Grouping` by which GEMMs choose tiles for `assignments` assignments to `num_experts` experts."""
    if capacity is None:
        return Grouping(whole=(assignments, num_experts))
    return Grouping(ceil_div(assignments, num_experts), capacity)


def row_dtype(hidden_dtype: torch.dtype) -> torch.dtype:
    """Return the default dtype of the down projection's rows: bfloat16 if hidden_dtype is, otherwise float32."""
    return torch.bfloat16 if hidden_dtype is torch.bfloat16 else torch.float32


def pad_columns(x: Tensor, columns: int) -> Tensor:
    """Pad x (M, H) with zeros to `columns` columns; return x itself if it has as many already."""
    if x.shape[1] == columns:
        return x
    # PyTorch cannot pad float8, so pad its bytes: byte 0 is the value 0.
    values = x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x
    return F.pad(values, (0, columns - x.shape[1])).view(x.dtype)


def without_padding(out: Tensor, columns: int) -> Tensor:
    """Return the first `columns` columns of `out` (M, H): `out` itself if it has no more, else a contiguous copy."""
    return out if out.shape[1] == columns else out[:, :columns].clone(memory_format=torch.contiguous_format)
