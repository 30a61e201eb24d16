"""Operands of an experts layer: weights, tokens, rows, the part that one rank computes; padding to kernel sizes."""

from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.gemm.tiles import Grouping
from fp8moe.quant.formats import FP8Tensor, ceil_div, has_channel_scales
from fp8moe.runtime.autograd import recorded


class Biases(NamedTuple):
    """Biases, added to the sums of both GEMMs in float32; each bfloat16, float16 or float32, or None.

    up_bias: (E, 2I), gate then up, or (E, I), added before the activation. down_bias: (E, H), added before the results
    are rounded and weighted. Both need an I above 0.
    """

    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Layer(NamedTuple):
    """The FP8 weights of experts, the activation between them, and biases.

    up: data float8_e4m3fn (E, 2I, H), gate rows then up rows, or (E, I, H) where the activation has no gate; scale
        float32 (E, 2 * ceil(I/128), ceil(H/128)), the blocks of gate, then those of up, or without a gate
        (E, ceil(I/128), ceil(H/128)). Any H and I.
    down: data (E, H, I), scale (E, ceil(H/128), ceil(I/128)).
    activation: a SwiGLU runs inside GEMM 1 and its quantization; another as PyTorch operations between the two.
    """

    up: FP8Tensor
    down: FP8Tensor
    activation: Activation
    biases: Biases = Biases()

    def padded(self, multiple: int) -> "Layer":
        """Pad weights and biases with zeros to an I that is a multiple of `multiple` and an H of 16.

        Returns the layer itself where nothing is missing. Padding stays inside existing blocks, so block scales do not
        change.
        """
        up, down = self.up.data, self.down.data
        hidden, size = down.shape[1:]
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
    """Masters that get gradients: the sources of the quantized weights, each in the shape of its weight.

    gate_master, up_master: (E, I, H) each if gate and up are separate; otherwise up_master has the rows of both.
    """

    up_master: Tensor | None = None
    down_master: Tensor | None = None
    gate_master: Tensor | None = None

    def recorded(self) -> "Masters":
        """Keep the masters that autograd records, None for others."""
        return Masters(*(master if recorded(master) else None for master in self))

    @property
    def of_up(self) -> bool:
        """Whether a master of the first projection gets a gradient."""
        return self.up_master is not None or self.gate_master is not None


class LowRank(NamedTuple):
    """Factors of LoRA, scaled: ``up_b @ up_a`` and ``down_b @ down_a`` are added to frozen weights: arXiv:2106.09685.

    up_a (E, r, H), up_b (E, P, r), down_a (E, r, Q), down_b (E, H, r), bfloat16. I is padded with zeros to a multiple
    of 128, which is Q, and P without a gate; with a gate P is 2Q. H and r are padded to multiples of 16.
    dropped: (T, H), hidden_states after dropout, which up_a multiplies; None: hidden_states.
    dropout: the probability of dropout on what down_a multiplies, the result of the activation.
    """

    up_a: Tensor
    up_b: Tensor
    down_a: Tensor
    down_b: Tensor
    dropped: Tensor | None = None
    dropout: float = 0.0

    def multiplied(self, hidden_states: Tensor | None) -> Tensor:
        """Return the operand of up_a in bfloat16, H padded: `dropped`, or hidden_states if that is None."""
        return pad_columns((hidden_states if self.dropped is None else self.dropped).bfloat16(), self.up_a.shape[2])

    def drop(self, values: Tensor, kept: Tensor) -> Tensor:
        """Zero the values (R, Q) that dropout has not kept, and scale the others."""
        return torch.ops.aten.native_dropout_backward(values, kept, 1 / (1 - self.dropout))


class Shard(NamedTuple):
    """The part of a layer that is computed, by default all of it, and dtypes.

    first_expert: the index of the first expert that is here. num_experts: how many there are on all ranks, for whose
        share of the assignments tiles are chosen; None: those here.
    first_row, num_rows: of the assignments that are sorted by expert among those here, only so many from this one on
        are computed, and only for so many is there memory; None: T * K.
    row_dtype: of the results of GEMM 2, bfloat16 or float32; None: bfloat16 where hidden_states is bfloat16, otherwise
        float32.
    out_dtype: of the weighted sums, bfloat16, float16 or float32; None: that of hidden_states.
    """

    first_expert: int = 0
    num_experts: int | None = None
    first_row: int = 0
    num_rows: int | None = None
    row_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None

    def total(self, here: int) -> int:
        """The number of experts on all ranks. here: of experts on this rank."""
        return here if self.num_experts is None else self.num_experts

    def rows(self, assignments: int) -> int:
        """The number of rows to allocate for this many assignments."""
        return assignments if self.num_rows is None else min(self.num_rows, assignments)

    def dtypes(self, hidden_dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of the results of GEMM 2 and of the weighted sums."""
        return self.row_dtype or row_dtype(hidden_dtype), self.out_dtype or hidden_dtype


class Norm(NamedTuple):
    """RMSNorm of a layer's result, returned beside it if one kernel computes both: see `rms_norm`.

    norm_weight: (H,) of the dtype of the result. norm_quantized: return the norm in FP8, in blocks of 1x128, not as
    values.
    """

    norm_weight: Tensor
    norm_eps: float = 0.0
    norm_quantized: bool = False


class TokenOperands(NamedTuple):
    """Tokens, the experts that they go to, and the layer or the shard of one that computes them.

    hidden_states: (T, H) bfloat16, float16 or float32, any H; or float8_e4m3fn with hidden_scale (T, ceil(H/128)),
        quantized 1x128.
    top_k_index: (T, K) int32 or int64. An index of no expert here adds nothing.
    top_k_weights: (T, K) float32, bfloat16 or float16; None where rows go to peers, who weight them.
    capacity: rows kept free for each expert (the masked layout), instead of rows one group after the other. An
        assignment beyond them adds nothing, so with distinct experts a token it is to be at least T.
    residual: (T, H) of the dtype of the result, to which the rounded result is added, or None.
    groups, rows: what `sort_by_expert` returns of top_k_index and E without a capacity, int32 (E + 1,) and (T, K),
        where it has been sorted; both None where it has not.
    residual_known: bool (T,), of which tokens there is a residual; its other values are not read. None: of all.
    wants_known: whether a second result is wanted, bool (T,): for which tokens there is a sum, those with a row or a
        residual and perhaps others; the rest of the sums is then undefined, and costs nothing.
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
        """Names of hidden_states and residual in messages: those of a layer's arguments, or of a partial sum's."""
        return ("hidden_states", "residual") if self.shard.out_dtype is None else ("x", "partial")

    def layouts(self) -> tuple:
        """Return all that launches depend on: the layout of each tensor, and the other fields."""
        layer, norm = self.layer, self.norm
        routed = self.hidden_states, self.hidden_scale, self.top_k_index, self.top_k_weights
        beside = self.residual, self.residual_known, self.groups, self.rows
        tensors = *routed, *layer.up, *layer.down, *layer.biases, *beside, norm and norm.norm_weight
        # Each call of the layer passes here.
        layouts = [None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors]
        return *layouts, layer.activation.key, self.capacity, self.shard, self.wants_known, norm and norm[1:]


class RowOperands(NamedTuple):
    """Rows in the order of experts, and the layer that computes them.

    rows: (R, H) bfloat16, float16 or float32, or float8_e4m3fn with rows_scale (R, ceil(H/128)), quantized 1x128.
    groups: (E + 1,) int32, where the groups of the experts begin and end: see `grouped_gemm`.
    row_dtype: bfloat16 or float32, of the result.
    whole: rows and experts of a layer of which these are a part, on other ranks as well: each row has the bits that it
        would have there. None: this is all of it.
    expected_m: None, but in the masked layout about how many rows an expert has in use. There rows is float8_e4m3fn
        (E, max_m, H), rows_scale (E, max_m, ceil(H/128)), and groups (E,): the rows in use of each expert.
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
        """Names of rows, rows_scale and groups in messages: those of the caller's arguments."""
        contiguous = self.expected_m is None
        return ("rows", "rows.scale", "group_offsets") if contiguous else ("x.data", "x.scale", "masked_m")


def grouping_of(assignments: int, num_experts: int, capacity: int | None = None) -> Grouping:
    """Return the grouping by which GEMMs choose tiles. assignments: to all `num_experts` experts."""
    if capacity is None:
        return Grouping(whole=(assignments, num_experts))
    return Grouping(ceil_div(assignments, num_experts), capacity)


def row_dtype(hidden_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the rows whose sums have the dtype of hidden_states."""
    return torch.bfloat16 if hidden_dtype is torch.bfloat16 else torch.float32


def pad_columns(x: Tensor, columns: int) -> Tensor:
    """Pad x (M, H) with zeros to `columns` columns; x itself if it has them."""
    if x.shape[1] == columns:
        return x
    # PyTorch pads no float8: its bytes, of which 0 is 0.
    values = x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x
    return F.pad(values, (0, columns - x.shape[1])).view(x.dtype)


def without_padding(out: Tensor, columns: int) -> Tensor:
    """Return the first `columns` columns of `out` (M, H): `out` itself or a contiguous copy."""
    return out if out.shape[1] == columns else out[:, :columns].clone(memory_format=torch.contiguous_format)
