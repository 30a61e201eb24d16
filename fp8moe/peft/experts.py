"""peft LoRA layers for experts: converts adapters from peft's storage format to the `LowRank` that the kernels take."""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import Tensor, nn

from fp8moe.hf.experts import cached_layer
from fp8moe.kernels.experts.backward import experts_training
from fp8moe.kernels.experts.operands import Layer, LowRank
from fp8moe.layers.experts import GroupedExperts, flattened, unflattened
from fp8moe.peft.layer import FP8LoraLayer, Stored, check_base, check_config, check_frozen
from fp8moe.quant.formats import BLOCK, is_packed, weight_k
from fp8moe.runtime.checks import FLOATING


class ExpertsB(nn.Module):
    """The LoRA factor B of all experts: a parameter (E, out, r).

    State dicts hold B as (out, r * E) with experts innermost, the format of peft's ParamWrapper. peft's hotswap_adapter
    replaces the parameter itself with a tensor (out, r * E).
    """

    def __init__(self, count: int, rows: int, rank: int, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(torch.empty(count, rows, rank, device=device, dtype=dtype))

    @property
    def by_expert(self) -> Tensor:
        """Return B as (E, out, r). If hotswap_adapter has put in a tensor (out, r * E), convert it."""
        return self._by_expert(self.weight) if self.weight.dim() == 2 else self.weight

    @property
    def stored_shape(self) -> tuple[int, int]:
        count, rows, rank = self.by_expert.shape
        return rows, rank * count

    def _by_expert(self, stored: Tensor) -> Tensor:
        return stored.unflatten(1, (-1, self.count)).permute(2, 0, 1).contiguous()

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        weight = self.by_expert if keep_vars else self.by_expert.detach()
        destination[f"{prefix}weight"] = weight.permute(1, 2, 0).flatten(1)

    def _load_from_state_dict(self, state_dict, prefix, *others):
        key = f"{prefix}weight"
        if self.weight.dim() == 2:
            self.weight = nn.Parameter(self.by_expert, requires_grad=self.weight.requires_grad)
        if key in state_dict and state_dict[key].shape == self.stored_shape:
            state_dict[key] = self._by_expert(state_dict[key])
        super()._load_from_state_dict(state_dict, prefix, *others)


class LoraExperts(FP8LoraLayer, ParamWrapper):
    """A peft layer that adds ``scaling * B @ A`` to one projection of experts with frozen weights in FP8 or four bits.

    LoRA: arXiv:2106.09685. If both projections have adapters, one LoraExperts is the base_layer of the other, as with
    peft's own layers for parameters. The outer LoraExperts then runs the experts with the adapters of both layers.

    lora_A[adapter].weight: (E * r, in), r rows per expert; gate and up share the A of gate_up_proj.
    lora_B[adapter] is an `ExpertsB`. Both are in bfloat16, or the dtype of unquantized weights. The factors of all
    active adapters are multiplied at once, in bfloat16 with sums in float32. Dropout acts on each token for the first
    projection, and on each (token, expert) row for the second.
    """

    by_parameter = True

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config,
        r: int = 0,
        lora_alpha: int = 1,
        parameter_name: str | None = None,
        **kwargs,
    ):
        nn.Module.__init__(self)
        self._start(base_layer, adapter_name, config, {**kwargs, "parameter_name": parameter_name})
        self.parameter_name = parameter_name
        LoraLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config, **kwargs) -> None:
        check_config(self.name, config)
        if r <= 0:
            raise ValueError(f"r: expected a rank of at least 1 for {self.name}, got {r}")
        weight = self.get_param()
        count, rows, columns = _shape(weight)
        dtype = weight.dtype if weight.dtype in FLOATING else torch.bfloat16
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.use_rslora[adapter_name] = config.use_rslora
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self.lora_dropout[adapter_name] = nn.Dropout(config.lora_dropout)
        self.lora_A[adapter_name] = nn.Linear(columns, count * r, bias=False, device=weight.device, dtype=dtype)
        self.lora_B[adapter_name] = ExpertsB(count, rows, r, weight.device, dtype)
        self._reset(adapter_name, config.init_lora_weights)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    @torch.no_grad()
    def _reset(self, adapter_name: str, how: bool | str) -> None:
        """Initialize A and B as peft does for linears.

        how: True for A uniform and B zero, "gaussian" for A normally distributed and B zero, False for both uniform.
        """
        a, b = self.lora_A[adapter_name].weight, self.lora_B[adapter_name].weight
        if how == "gaussian":
            a.normal_(std=1 / self.r[adapter_name])
        else:
            a.uniform_(-1, 1).mul_(a.shape[-1] ** -0.5)
        if how is False:
            b.uniform_(-1, 1).mul_(b.shape[-1] ** -0.5)
        else:
            b.zero_()

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move loaded factors to the device only: peft's own layer would also cast them to the weights' dtype, FP8."""
        for part in (self.lora_A, self.lora_B):
            part[adapter_name].to(self.get_param().device if device is None else device)

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *,
        residual: Tensor | None = None,
        adapter_names: list[str] | None = None,
    ) -> Tensor:
        """Compute the base layer with the active adapters; torch.autocast has no effect.

        Arguments are those of the base layer. Raises ValueError for adapter_names, with which peft selects an adapter
        for each sequence: an experts layer does not know the sequences of its tokens; and for weights of the base layer
        that require gradients, as beside adapters they get none.
        """
        if adapter_names is not None:
            raise ValueError(
                f"adapter_names: expected none for the experts {self.name}, got {len(adapter_names)} names"
            )
        layers = [layer for layer in (self, self.base_layer) if isinstance(layer, LoraExperts)]
        running = [(layer, layer.running()) for layer in layers]
        added = {layer.parameter_name: (layer, adapters) for layer, adapters in running if adapters}
        if not added:
            more = {} if residual is None else {"residual": residual}
            return self.get_base_layer()(hidden_states, top_k_index, top_k_weights, **more)
        base = self.get_base_layer()
        check_frozen(self.name.removesuffix(f".{self.parameter_name}"), base, base._parameters)
        x, index, weights, _ = flattened(hidden_states, top_k_index, top_k_weights, None)
        dropout = self._dropout(added.values())
        with torch.autocast(x.device.type, enabled=False):
            dropped = F.dropout(x, dropout) if dropout else None
            low_rank = self._low_rank(added)._replace(dropped=dropped, dropout=dropout)
            out = experts_training(x, index, weights, self._layer(), low_rank=low_rank)
        out = unflattened(out, hidden_states)
        return out if residual is None else residual + out

    def stored(self, adapters: Iterable[str]) -> list[Stored]:
        names = list(adapters)

        def added(expert: int) -> Tensor:
            factors = ((self.scaling[name], *self.factors_of(name)) for name in names)
            return sum(scaling * (b[expert].float() @ a[expert].float()) for scaling, a, b in factors)

        weight, scale = self.get_param(), getattr(self.get_base_layer(), f"{self.parameter_name}_scale_inv", None)
        if is_packed(weight):
            raise ValueError(f"{self.name}: expected experts in FP8 or unquantized to merge into, got four bits")
        matrices = 2 if self.parameter_name == "gate_up_proj" else 1
        return [Stored(weight.detach(), scale if scale is None else scale.detach(), matrices, added)]

    def factors_of(self, adapter_name: str) -> tuple[Tensor, Tensor]:
        """Return the factors A (E, r, in) and B (E, out, r) of an adapter.

        Raises ValueError if hotswap_adapter has put in factors of another rank, or without gradients in training.
        """
        a, b = self.lora_A[adapter_name].weight, self.lora_B[adapter_name].by_expert
        a = a.unflatten(0, (len(b), -1))
        if a.shape[1] != b.shape[2]:
            raise ValueError(
                f"{self.name}: hotswap_adapter has put factors of rank {b.shape[2]} into {adapter_name!r} of rank "
                f"{a.shape[1]}, and mixed those of several experts; load that adapter beside it with load_adapter"
            )
        if self.training and b.requires_grad != a.requires_grad:
            raise ValueError(
                f"{self.name}: hotswap_adapter has put factors without gradients into {adapter_name!r}, and half of it "
                "would be trained; load that adapter beside it with load_adapter, and train it"
            )
        return a, b

    def _layer(self) -> Layer:
        """Return the quantized weights of the base layer or, if the base layer is unquantized, of its FP8 copy."""
        base = self.get_base_layer()
        check_base(self.name, base)  # check again: the base layer may have been spread over ranks since it was adapted
        return (base if isinstance(base, GroupedExperts) else cached_layer(base)).whole_weights().layer

    def _low_rank(self, added: dict[str, tuple["LoraExperts", list[str]]]) -> LowRank:
        """Concatenate the factors of all adapters along the rank, zero-padded to the sizes that the kernels need.

        added: maps a projection's name to its LoRA layer and the names of its active adapters.
        """
        base = self.get_base_layer()
        _, hidden, size = _shape(base.down_proj)
        (up_a, up_b), (down_a, down_b) = (
            added[name][0].joined(added[name][1]) if name in added else _no_factors(getattr(base, name))
            for name in projections(base)
        )
        more_hidden, more_columns = -hidden % 16, -size % BLOCK
        up_b = _pad(up_b.unflatten(1, (-1, size)), (0, 0, 0, more_columns)).flatten(1, 2)
        up_a, down_b = _pad(up_a, (0, more_hidden)), _pad(down_b, (0, 0, 0, more_hidden))
        return LowRank(up_a, up_b, _pad(down_a, (0, more_columns)), down_b)

    def joined(self, adapters: list[str]) -> tuple[Tensor, Tensor]:
        """Return A and scaling * B of the adapters in bfloat16, joined along the rank, padded to a multiple of 16."""
        parts = [(*self.factors_of(name), self.scaling[name]) for name in adapters]
        more = -sum(a.shape[1] for a, _, _ in parts) % 16
        a = _join([a.bfloat16() for a, _, _ in parts], 1)
        b = _join([(b * scaling).bfloat16() for _, b, scaling in parts], 2)
        return _pad(a, (0, 0, 0, more)), _pad(b, (0, more))

    def _dropout(self, added: Iterable[tuple["LoraExperts", list[str]]]) -> float:
        """Return the dropout probability of the active adapters, 0 in eval mode.

        Raises ValueError unless all active adapters have the same dropout probability.
        """
        values = {layer.lora_dropout[name].p for layer, names in added for name in names if layer.training}
        if len(values) > 1:
            raise ValueError(
                f"lora_dropout: expected the same of all active adapters of {self.name}, got {sorted(values)}"
            )
        return values.pop() if values else 0.0

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        _, rows, columns = _shape(self.get_param())
        return columns, rows


# peft adds another adapter of a parameter to an existing layer only if the layer's class has this name.
LoraExperts.__name__ = ParamWrapper.__name__


def projections(base: nn.Module) -> tuple[str, str]:
    """Return the parameter names of both projections of an experts module."""
    gated = getattr(base, "has_gate", hasattr(base, "gate_up_proj"))
    return "gate_up_proj" if gated else "up_proj", "down_proj"


def _shape(weight: Tensor) -> tuple[int, int, int]:
    """Return E, N and K of a weight (E, N, K), which may be in four bits."""
    return *weight.shape[:2], weight_k(weight)


def _no_factors(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return all-zero factors A and B, for a projection without adapters."""
    count, rows, columns = _shape(weight)
    options = {"dtype": torch.bfloat16, "device": weight.device}
    return torch.zeros(count, 16, columns, **options), torch.zeros(count, rows, 16, **options)


def _join(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenate the parts along `dim`, without a copy if there is one part only."""
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _pad(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Call F.pad, unless all sizes are 0: F.pad would copy x even then."""
    return F.pad(x, sizes) if any(sizes) else x
