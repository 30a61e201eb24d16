"""ExpertParallel: a style for PyTorch's `parallelize_module` that spreads experts over the GPUs of a mesh."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from fp8moe.distributed.agreement import Agreement, check_same
from fp8moe.distributed.dispatcher import Dispatcher, Options
from fp8moe.layers import parameters
from fp8moe.layers.experts import GroupedExperts

__all__ = ["ExpertParallel"]

_METHODS = ("auto", "gather", "all_to_all", "replicated")
_PAYLOADS = ("fp8", "bf16")


class ExpertParallel(ParallelStyle):
    """Spreads the experts of a layer over the W ranks of a mesh; each rank calls the layer with its own tokens.

        parallelize_module(model, mesh, {"model.layers.*.mlp.experts": ExpertParallel()})

    It applies to `GroupedExperts`, frozen or trained, and to transformers' experts modules that run on fp8moe. Rank r
    then has experts [r * E/W, (r + 1) * E/W). Parameters become DTensors on the 1-D mesh, with placement Shard(0);
    parameters that already have this placement are left alone. As with PyTorch's own styles, the values come from rank
    0 or, with ``src_data_rank=None``, from each rank itself. `num_experts` stays E, and top_k_index has indices of all
    experts.

    The layer's forward takes (T_r, H) tokens on rank r, where T_r may be any number, including 0. All ranks must call
    forward and backward together, with the same dtype and the same top_k. Either all ranks pass a residual or none
    does. With `exact`, the result has the same bits as on one GPU. Without `exact`, the bits are the same only where no
    gradients are recorded and the GPUs of a node can write to each other's memory; otherwise float32 partial sums are
    added in the order of ranks and rounded once. Equal inputs give equal bits, in results and gradients. Before each
    call the ranks exchange T_r and the properties that must agree, over gloo on the CPU. So wrong arguments on one rank
    raise the same ValueError on all ranks. In a CUDA graph nothing is exchanged: all ranks must have the same number of
    tokens, and must capture and replay together. Under torch.compile the layer is a graph break.

    Args:
        method: "gather": every rank gets all tokens. "all_to_all": a token goes to the ranks that have its experts;
            eager calls make the CPU wait for the GPU, and CUDA graphs use "gather". "replicated": tokens, routing and
            results are the same on all ranks. "auto": gather on one node; over NCCL gather or all_to_all, depending on
            the number of tokens and ranks.
        payload: format of tokens sent without gradients: "fp8", quantized 1x128 once, as the experts would do, or
            "bf16", unchanged. Training sends tokens unchanged.
        exact: return one row per token and expert to the token's rank, which adds up these rows, so that the result has
            the same bits as on one GPU. For methods all_to_all and auto. In a CUDA graph, every rank allocates room for
            all rows.
        uniform: each call has the same number of tokens on all ranks. No rank waits for the others' numbers; training
            compares them while it computes, inference does not.

    Raises ValueError for an unknown method or payload, or for `exact` with another method. `parallelize_module` raises
    the same ValueError on all ranks for a mesh that is not 1-D or does not divide the experts, for other modules, and
    for experts or options that differ between ranks.
    """

    def __init__(self, *, method: str = "auto", payload: str = "fp8", exact: bool = False, uniform: bool = False):
        super().__init__()
        for name, value, known in (("method", method, _METHODS), ("payload", payload, _PAYLOADS)):
            if value not in known:
                raise ValueError(f"{name}: expected one of {', '.join(map(repr, known))}, got {value!r}")
        if exact and method not in ("auto", "all_to_all"):
            raise ValueError(f"exact: expected False with method {method!r}; method 'all_to_all' has exact=True")
        self.options = Options(method, payload, exact, uniform)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise ValueError(f"device_mesh: expected one dimension, got {device_mesh.ndim}: take a slice of it")
        group = device_mesh.get_group()
        agreement = Agreement.of(group)
        try:
            description, error = _describe(module, device_mesh), None
        except (TypeError, ValueError) as caught:
            description, error = None, caught
        agreement.raise_together(error)
        check_same("module: expected the same experts on all ranks", agreement.gather(description))
        check_same("ExpertParallel: expected the same options on all ranks", agreement.gather(str(self.options)))
        for name, value in module._parameters.items():
            if value is not None and not isinstance(value, DTensor):
                setattr(module, name, _shard(value, device_mesh, self.src_data_rank))
        self.connect(module, group, module.num_experts)
        return module

    def connect(self, module: nn.Module, group: ProcessGroup, num_experts: int) -> None:
        """Have a layer that holds this rank's experts alone take tokens for the experts of all ranks of a group.

        For modules of trainers that shard experts themselves. All ranks must connect their layers together, in the same
        order, and rank r of the group must have the r-th part of the experts.

        num_experts: the number of experts on all ranks. Raises ValueError if those here are not that part of them.
        """
        here, world = len(parameters.local(next(module.parameters()))), dist.get_world_size(group)
        if here * world != num_experts:
            raise ValueError(f"num_experts: expected {world} ranks with {here} experts each, got {num_experts}")
        dispatcher = Dispatcher(group, num_experts, self.options)
        setattr(module, "parallel" if isinstance(module, GroupedExperts) else "_fp8moe_parallel", dispatcher)


def _describe(module: nn.Module, mesh: DeviceMesh) -> str:
    """Describe an experts module in one line, to compare modules across ranks.

    Raises TypeError for a module that is not fused experts, ValueError for one that cannot be spread over this mesh.
    """
    count = getattr(module, "num_experts", None)
    parameters = {name: value for name, value in module._parameters.items() if value is not None}
    fused = all(value.dim() and len(value) == count for value in parameters.values())
    if not parameters or not fused or len(parameters) < len(list(module.parameters())):
        raise TypeError(
            f"module: expected experts with num_experts, and parameters of that many experts each, got "
            f"{type(module).__name__}"
        )
    if mesh.get_local_rank() != dist.get_rank(mesh.get_group()):
        raise ValueError(f"device_mesh: expected its ranks in ascending order, got {mesh.mesh.tolist()}")
    if count % mesh.size():
        raise ValueError(f"num_experts: expected a multiple of the {mesh.size()} ranks of the mesh, got {count}")
    for name, value in parameters.items():
        if isinstance(value, DTensor) and (value.device_mesh != mesh or value.placements != (Shard(0),)):
            raise ValueError(
                f"{name}: expected a DTensor with Shard(0) on {mesh}, got {value.placements} on {value.device_mesh}"
            )
    kinds = (f"{name} {str(value.dtype)[6:]} {tuple(value.shape)}" for name, value in parameters.items())
    return f"{type(module).__name__} with {', '.join(kinds)}"


def _shard(value: nn.Parameter, mesh: DeviceMesh, source: int | None) -> nn.Parameter:
    """Return a parameter as a Shard(0) DTensor that holds a copy of this rank's experts. source: `src_data_rank`."""
    values = value.detach()
    if values.is_meta:
        part = values[: len(values) // mesh.size()]
    else:
        # Scatter bytes, as gloo and NCCL do not scatter float8.
        part = distribute_tensor(values.view(torch.uint8), mesh, [Shard(0)], src_data_rank=source).to_local()
        part = (part.clone() if source is None else part).view(value.dtype)
    sharded = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
    return nn.Parameter(sharded, requires_grad=value.requires_grad)
