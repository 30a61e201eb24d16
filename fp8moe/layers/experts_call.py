"""What a call of GroupedExperts is made of: its arguments, the weights on this rank, and who forwards on several."""

from typing import NamedTuple, Protocol

from torch import Tensor, nn

from fp8moe.quant.formats import FP8Tensor
from fp8moe.runtime.checks import check_like, check_tensor


class Parallel(Protocol):
    """Forwards a layer whose experts are spread over several ranks (`fp8moe.distributed`)."""

    def forward(
        self,
        experts: nn.Module,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        residual: Tensor | None = None,
    ) -> Tensor:
        """What `GroupedExperts.forward` of all experts returns."""


class Weights(NamedTuple):
    """FP8 weights, and the masters that they were quantized from."""

    up: FP8Tensor
    down: FP8Tensor
    up_master: Tensor | None = None
    down_master: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """Those that could get gradients: the masters, or else the FP8 weights."""
        if self.up_master is not None:
            return self.up_master, self.down_master
        return *self.up, *self.down


def flattened(
    hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The arguments of a forward with their leading sizes as one: (T, H), (T, K), (T, K), (T, H)."""
    inputs = {"hidden_states": hidden_states, "top_k_index": top_k_index, "top_k_weights": top_k_weights}
    for name, value in inputs.items():
        check_tensor(name, value)
    shape = hidden_states.shape
    if residual is not None:
        check_like("residual", residual, (hidden_states.dtype,), shape, hidden_states.device, "hidden_states")
    if len(shape) <= 2:
        return hidden_states, top_k_index, top_k_weights, residual
    for name in ("top_k_index", "top_k_weights"):
        if inputs[name].shape[:-1] != shape[:-1]:
            raise ValueError(
                f"{name}: expected shape ({', '.join(map(str, shape[:-1]))}, top_k) to match hidden_states, "
                f"got {tuple(inputs[name].shape)}"
            )
    flat = (value.flatten(0, -2) for value in inputs.values())
    return *flat, residual if residual is None else residual.flatten(0, -2)
