"""Training of experts whose gate and up are two parameters, for modules of other libraries."""

from torch import Tensor

from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts.backward import experts_training
from fp8moe.kernels.experts.operands import Layer, Masters, row_dtype
from fp8moe.kernels.experts.operator import experts_of_rows
from fp8moe.layers.experts import Weights
from fp8moe.layers.master import MASTER_DTYPES, check_master, part_of, quantized, quantized_gate_up
from fp8moe.layers.parameters import local
from fp8moe.runtime.autograd import check_derivatives, recorded
from fp8moe.runtime.checks import check_tensor


def experts_rows_training(
    rows: Tensor,
    group_offsets: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: Activation = Activation(),  # noqa: B008 (immutable)
) -> Tensor:
    """Compute ``down_e(activation(gate_e(rows[r]), up_e(rows[r])))`` for every expert e and its rows r, differentiably.

    This is `GroupedExperts.forward_rows` for modules of other libraries that keep gate and up in two parameters.

    rows: (R, H) bfloat16, float16 or float32, sorted by expert.
    group_offsets: (E+1,) int32 on the device of rows: expert e has rows ``group_offsets[e]`` up to
        ``group_offsets[e+1]``. Group sizes are arbitrary; the CPU does not wait for the offsets.
    gate, up, down: masters (E, I, H), (E, I, H) and (E, H, I), bfloat16 or float32. If they are DTensors, the function
        uses this rank's shards. All three must be parameters of a `fp8moe.layers.master.MasterModule`, which drops FP8
        copies when FSDP2 frees the gathered weights from which the copies were made. Gate and up share one FP8 copy
        (E, 2I, H).
    activation: a gated one, applied between the projections; see `GroupedExperts`.
    Returns (R, H) in the dtype of rows; zeros in rows of no expert. The bits do not depend on whether gradients are
    recorded. Equal inputs give equal bits, in the result and in the gradients of rows, gate, up and down.

    Method, tensors kept for the backward and lifetime of FP8 copies: as for `GroupedExperts`.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or device or an activation without a gate;
    the backward raises RuntimeError if a master has changed in place since the forward.
    """
    name = "fp8moe.experts_rows_training"
    weights = _weights_of(name, gate, up, down, activation)
    check_tensor("rows", rows)
    check_derivatives(name, rows, *weights.tensors())
    options = {"row_dtype": row_dtype(rows.dtype), "masters": weights.masters, "training": True}
    out = experts_of_rows(rows, group_offsets, weights.layer, **options)
    return out.to(rows.dtype)


def experts_tokens_training(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: Activation = Activation(),  # noqa: B008 (immutable)
) -> Tensor:
    """Compute the sum of each token's expert outputs times their routing weights, differentiably.

    This is `GroupedExperts.forward` for modules of other libraries that keep gate and up in two parameters: tokens are
    sorted, gathered and summed by the kernels that quantize and multiply them.

    hidden_states: (T, H) bfloat16, float16 or float32. top_k_index: (T, K) int32 or int64; an index outside [0, E) adds
        nothing. top_k_weights: (T, K) float32, bfloat16 or float16.
    gate, up, down, activation, errors: as for `experts_rows_training`, but ValueError for a DTensor of which this rank
        has a part: `top_k_index` names experts among all of them.
    Returns (T, H) in the dtype of hidden_states. The bits do not depend on whether gradients are recorded. Equal inputs
    give equal bits, in the result and in the gradients of hidden_states, top_k_weights, gate, up and down.
    """
    name = "fp8moe.experts_tokens_training"
    for argument, master in {"gate": gate, "up": up, "down": down}.items():
        if isinstance(master, Tensor) and (here := local(master).shape) != master.shape:
            raise ValueError(
                f"{argument}: expected all of it on this rank, got {tuple(here)} of a DTensor {tuple(master.shape)}; "
                "experts that are spread over ranks take sorted rows: fp8moe.layers.experts_rows_training"
            )
    weights = _weights_of(name, gate, up, down, activation)
    for argument, value in {
        "hidden_states": hidden_states,
        "top_k_index": top_k_index,
        "top_k_weights": top_k_weights,
    }.items():
        check_tensor(argument, value)
    check_derivatives(name, hidden_states, top_k_weights, *weights.tensors())
    return experts_training(hidden_states, top_k_index, top_k_weights, *weights)


def _weights_of(name: str, gate: Tensor, up: Tensor, down: Tensor, activation: Activation) -> Weights:
    """Check and quantize the three masters of `experts_rows_training`. name: the caller's name, for errors."""
    parameters = {"gate": gate, "up": up, "down": down}
    for argument, master in parameters.items():
        check_tensor(argument, master)
        check_master(argument, master, MASTER_DTYPES)
        if master.dim() != 3:
            raise ValueError(f"{argument}: expected three dimensions, got shape {tuple(master.shape)}")
    if not activation.gated:
        raise ValueError("activation: expected one with a gate")
    gate_part, up_part, down_part = masters = [
        part_of(f"{name}: {argument}", master) for argument, master in parameters.items()
    ]
    if gate_part.shape != up_part.shape:
        raise ValueError(f"up: expected shape {tuple(gate_part.shape)} like gate, got {tuple(up_part.shape)}")
    backward = recorded(*masters)
    gate_up = quantized_gate_up(gate_part.detach(), up_part.detach(), parameters=(gate, up), backward=backward)
    layer = Layer(gate_up, quantized(down_part.detach(), parameter=down, backward=backward), activation)
    return Weights(layer, Masters(up_part, down_part, gate_part))
