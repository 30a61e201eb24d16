"""What an experts layer computes with, which part of it, and the sizes that its kernels want."""

from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.gemm.tiles import Grouping
from fp8moe.quant.formats import FP8Tensor, ceil_div, has_channel_scales
from fp8moe.runtime.autograd import recorded


class Biases(NamedTuple):
    """What is added to the sums of both projections: up_bias (E, 2I or I), before the activation; down_bias (E, H)."""

    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class Layer(NamedTuple):
    """The FP8 weights of experts, up (E, 2I or I, H) and down (E, H, I), the activation between them, and biases."""

    up: FP8Tensor
    down: FP8Tensor
    activation: Activation
    biases: Biases = Biases()

    def padded(self, multiple: int) -> "Layer":
        """With I a multiple of `multiple` and H of 16: itself, or with copies of weights and biases padded with zeros.

        Padded weights fall into blocks that are there already: the scales of blocks stay as they are.
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
    """What the FP8 weights were quantized from, where that gets gradients.

    gate_master, up_master: (E, I, H) where the two are apart; otherwise up_master has the rows of both.
    """

    up_master: Tensor | None = None
    down_master: Tensor | None = None
    gate_master: Tensor | None = None

    @classmethod
    def recorded(
        cls, up_master: Tensor | None, down_master: Tensor | None, gate_master: Tensor | None = None
    ) -> "Masters":
        """Those that get a gradient now."""
        return cls(*(master if recorded(master) else None for master in (up_master, down_master, gate_master)))

    @property
    def of_up(self) -> bool:
        """Whether one of the first projection gets a gradient."""
        return self.up_master is not None or self.gate_master is not None


class Shard(NamedTuple):
    """Which part of a layer is computed, and in which dtypes; by default all of it.

    num_experts: how many there are on all ranks; None: those here. first_expert: the index of the first one here.
    first_row, num_rows: of the assignments that are sorted by expert, only so many from this one on; None: T * K.
    row_dtype: of the results of GEMM 2; None: bfloat16 where hidden_states is bfloat16, otherwise float32.
    out_dtype: of the weighted sums; None: that of hidden_states.
    """

    first_expert: int = 0
    num_experts: int | None = None
    first_row: int = 0
    num_rows: int | None = None
    row_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None

    def total(self, here: int) -> int:
        """Experts on all ranks, of which so many are here."""
        return here if self.num_experts is None else self.num_experts

    def rows(self, assignments: int) -> int:
        """Rows to make room for, of so many assignments."""
        return assignments if self.num_rows is None else min(self.num_rows, assignments)

    def dtypes(self, hidden_dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of the results of GEMM 2 and of the weighted sums."""
        return self.row_dtype or row_dtype(hidden_dtype), self.out_dtype or hidden_dtype


class Norm(NamedTuple):
    """RMSNorm of a layer's result, wanted beside it where one kernel gives both: see `rms_norm`.

    norm_weight: (H,) of the dtype of the result; None: it is not wanted. norm_quantized: in FP8 alone, in blocks of
    1x128, rather than as values alone.
    """

    norm_weight: Annotated[Tensor | None, "Tensor"] = None
    norm_eps: float = 0.0
    norm_quantized: bool = False


class Operands(NamedTuple):
    """Tokens, the experts that they go to, and these; `experts` and `experts_partial` describe them.

    top_k_weights: None where rows go to peers, who weight them. hidden_scale: of hidden_states quantized 1x128.
    residual_known: bool (T,), of which tokens there is a residual; None: of all.
    known: bool (T,), written: for which tokens there is a result, those with a row or a residual; None: for all.
    groups, rows: what `sort_by_expert` returns of top_k_index; None: it is still to be sorted.
    """

    hidden_states: Tensor
    top_k_index: Tensor
    top_k_weights: Annotated[Tensor | None, "Tensor"]
    layer: Layer
    capacity: int | None = None
    residual: Tensor | None = None
    hidden_scale: Tensor | None = None
    shard: Shard = Shard()
    residual_known: Tensor | None = None
    known: Annotated[Tensor | None, "Tensor(a!)?"] = None
    groups: Tensor | None = None
    rows: Tensor | None = None
    norm: Norm = Norm()

    def layouts(self) -> tuple:
        """What launches depend on: of each tensor its layout, and all that is no tensor."""
        layer, (norm_weight, *norm) = self.layer, self.norm
        routed = self.hidden_states, self.hidden_scale, self.top_k_index, self.top_k_weights
        beside = self.residual, self.residual_known, self.known, self.groups, self.rows
        tensors = *routed, *layer.up, *layer.down, *layer.biases, *beside, norm_weight
        return *map(_layout, tensors), layer.activation.key, self.capacity, self.shard, *norm


def _layout(x: Tensor | None) -> tuple | None:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.get_device())


class RowOperands(NamedTuple):
    """Rows in the order of experts, as `experts_rows` describes them. rows_scale: of rows quantized 1x128."""

    rows: Tensor
    rows_scale: Tensor | None
    group_offsets: Tensor
    layer: Layer
    row_dtype: torch.dtype
    whole: tuple[int, int] | None = None


def grouping_of(assignments: int, num_experts: int, capacity: int | None = None) -> Grouping:
    """What GEMMs choose their tiles by, for assignments to some of `num_experts` experts, all of these counted."""
    if capacity is None:
        return Grouping(whole=(assignments, num_experts))
    return Grouping(ceil_div(assignments, num_experts), capacity)


def row_dtype(hidden_dtype: torch.dtype) -> torch.dtype:
    """The dtype of rows that are summed to results like hidden_states."""
    return torch.bfloat16 if hidden_dtype is torch.bfloat16 else torch.float32


def pad_columns(x: Tensor, columns: int) -> Tensor:
    """x (M, H) itself or a copy with `columns` columns, the last ones zeros."""
    if x.shape[1] == columns:
        return x
    # PyTorch pads no float8: its bytes, of which 0 is 0.
    values = x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x
    return F.pad(values, (0, columns - x.shape[1])).view(x.dtype)


def without_padding(out: Tensor, columns: int) -> Tensor:
    """The first `columns` columns of `out` (M, H): itself or a contiguous copy."""
    return out if out.shape[1] == columns else out[:, :columns].clone(memory_format=torch.contiguous_format)
