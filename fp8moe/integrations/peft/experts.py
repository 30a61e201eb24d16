"""peft's LoRA layer for experts: GroupedExperts, and those of transformers that run on fp8moe."""

import math
from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from fp8moe.integrations.peft.adapted import Factors, adapted_experts
from fp8moe.integrations.peft.checks import check_base, check_config
from fp8moe.integrations.peft.layer import FP8LoraLayer
from fp8moe.integrations.peft.merging import Stored
from fp8moe.integrations.transformers.experts import kept_layer
from fp8moe.kernels.experts.operands import Layer
from fp8moe.layers.experts import GroupedExperts
from fp8moe.layers.experts_call import flattened
from fp8moe.quant.formats import BLOCK
from fp8moe.runtime.checks import FLOATING


class ExpertFactors(nn.Module):
    """A, or B, of both projections of all experts, under their names: (E, r, in), or (E, out, r)."""

    def __init__(self, shapes: dict[str, tuple[int, int, int]], device: torch.device, dtype: torch.dtype):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))

    def __getattr__(self, name: str):
        if name == "weight":
            raise AttributeError(
                "add_weighted_adapter: expected adapters of single matrices, got those of experts; make several "
                "adapters active instead, with set_scale for their weights, and delete the new one"
            )
        return super().__getattr__(name)


class LoraExperts(nn.Module, FP8LoraLayer):
    """Experts whose weights, frozen and in FP8, have ``scaling * B @ A`` beside them, of rank r for each expert.

    LoRA: arXiv:2106.09685.

    lora_A[adapter], lora_B[adapter]: `ExpertFactors` with gate_up_proj, of which A serves gate and up, or up_proj, and
    with down_proj; in bfloat16, or the dtype of unquantized weights. They are multiplied in bfloat16 with sums in
    float32 whatever their dtype, those of all active adapters at once. Dropout acts on each token for the first
    projection, on each row of an expert for the second.
    """

    def __init__(self, base_layer: nn.Module, adapter_name: str, config, r: int = 0, lora_alpha: int = 1, **kwargs):
        nn.Module.__init__(self)
        self._start(base_layer, adapter_name, config, kwargs)
        LoraLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config, **kwargs) -> None:
        check_config(self.name, config)
        if r <= 0:
            raise ValueError(f"r: expected a rank of at least 1 for {self.name}, got {r}")
        down = self.get_base_layer().down_proj
        dtype = down.dtype if down.dtype in FLOATING else torch.bfloat16
        shapes = {name: weight.shape for name, weight in self._weights().items()}
        inner = {name: (count, r, columns) for name, (count, _, columns) in shapes.items()}
        outer = {name: (count, rows, r) for name, (count, rows, _) in shapes.items()}
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.use_rslora[adapter_name] = config.use_rslora
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self.lora_dropout[adapter_name] = nn.Dropout(config.lora_dropout)
        self.lora_A[adapter_name] = ExpertFactors(inner, down.device, dtype)
        self.lora_B[adapter_name] = ExpertFactors(outer, down.device, dtype)
        self._reset(adapter_name, config.init_lora_weights)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    @torch.no_grad()
    def _reset(self, adapter_name: str, how: bool | str) -> None:
        """As peft does for linears: True or "gaussian" of A, with zeros for B; False for values of both."""
        for weight in self.lora_A[adapter_name].parameters():
            if how == "gaussian":
                weight.normal_(std=1 / self.r[adapter_name])
            else:
                weight.uniform_(-1, 1).mul_(weight.shape[-1] ** -0.5)
        for weight in self.lora_B[adapter_name].parameters():
            if how is False:
                weight.uniform_(-1, 1).mul_(weight.shape[-1] ** -0.5)
            else:
                weight.zero_()

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *,
        residual: Tensor | None = None,
        adapter_names: list[str] | None = None,
    ) -> Tensor:
        """What the base layer computes, with the active adapters; its arguments. torch.autocast changes nothing.

        Raises ValueError for adapter_names, one of each sequence: tokens of experts have no sequences.
        """
        if adapter_names is not None:
            raise ValueError(
                f"adapter_names: expected none for the experts {self.name}, got {len(adapter_names)} names"
            )
        if self.disable_adapters and self.merged:
            self.unmerge()
        active = [name for name in self.active_adapters if name in self.r]
        if self.disable_adapters or self.merged or not active:
            added = {} if residual is None else {"residual": residual}
            return self.base_layer(hidden_states, top_k_index, top_k_weights, **added)
        x, index, weights, _ = flattened(hidden_states, top_k_index, top_k_weights, None)
        dropout = self._dropout(active)
        with torch.autocast(x.device.type, enabled=False):
            out = adapted_experts(
                *(x, index, weights, self._layer(), self._factors(active)),
                dropped=F.dropout(x, dropout) if dropout else None,
                dropout=dropout,
            )
        out = out.view(hidden_states.shape)
        return out if residual is None else residual + out

    def stored(self, adapters: Iterable[str]) -> list[Stored]:
        base, names = self.get_base_layer(), list(adapters)

        def added(weight_name: str, expert: int) -> Tensor:
            factors = ((name, self.lora_B[name], self.lora_A[name]) for name in names)
            return sum(
                self.scaling[name] * (getattr(b, weight_name)[expert].float() @ getattr(a, weight_name)[expert].float())
                for name, b, a in factors
            )

        found = []
        for name, weight in self._weights().items():
            scale = getattr(base, f"{name}_scale_inv", None)
            matrices = 2 if name == "gate_up_proj" else 1
            found.append(
                Stored(weight.detach(), scale if scale is None else scale.detach(), matrices, partial(added, name))
            )
        return found

    def _weights(self) -> dict[str, Tensor]:
        """Of the base layer, by name: the first projection and the second."""
        base = self.get_base_layer()
        gated = getattr(base, "has_gate", hasattr(base, "gate_up_proj"))
        return {name: getattr(base, name) for name in ("gate_up_proj" if gated else "up_proj", "down_proj")}

    def _layer(self) -> Layer:
        """The FP8 weights of the base layer, or of the copy that transformers' unquantized experts run on."""
        base = self.get_base_layer()
        check_base(self.name, base)  # it may have been spread since
        layer = base if isinstance(base, GroupedExperts) else kept_layer(base)
        weights = layer.whole_weights()
        return Layer(weights.up, weights.down, layer.activation)

    def _factors(self, adapters: list[str]) -> Factors:
        """Those of the adapters side by side, with zeros to sizes that kernels want."""
        (up, _), (down, down_weight) = self._weights().items()
        hidden, size = down_weight.shape[1:]
        rank = sum(self.r[name] for name in adapters)
        more_ranks, more_hidden, more_columns = -rank % 16, -hidden % 16, -size % BLOCK

        def inner(weight_name: str) -> Tensor:
            parts = [getattr(self.lora_A[name], weight_name).bfloat16() for name in adapters]
            return _pad(_join(parts, 1), (0, 0, 0, more_ranks))

        def outer(weight_name: str) -> Tensor:
            parts = [(getattr(self.lora_B[name], weight_name) * self.scaling[name]).bfloat16() for name in adapters]
            return _pad(_join(parts, 2), (0, more_ranks))

        up_b = _pad(outer(up).unflatten(1, (-1, size)), (0, 0, 0, more_columns)).flatten(1, 2)
        up_a, down_b = _pad(inner(up), (0, more_hidden)), _pad(outer(down), (0, 0, 0, more_hidden))
        return Factors(up_a, up_b, _pad(inner(down), (0, more_columns)), down_b)

    def _dropout(self, adapters: list[str]) -> float:
        """The probability in training, otherwise 0; ValueError where it differs between the active adapters."""
        found = {self.lora_dropout[name].p for name in adapters if self.training}
        if len(found) > 1:
            raise ValueError(
                f"lora_dropout: expected the same of all active adapters of {self.name}, got {sorted(found)}"
            )
        return found.pop() if found else 0.0

    def _get_in_out_features(self, module: nn.Module) -> tuple[None, None]:
        return None, None  # there are two projections

    def __repr__(self) -> str:
        return "lora." + super().__repr__()


def _join(parts: list[Tensor], dim: int) -> Tensor:
    """Side by side; one is not copied."""
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _pad(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """`F.pad`, which copies also where there is nothing to add."""
    return F.pad(x, sizes) if any(sizes) else x
