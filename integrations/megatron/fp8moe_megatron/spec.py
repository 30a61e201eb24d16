"""`in_fp8`: a layer spec of Megatron-Core with experts and linears of fp8moe."""

import dataclasses
from functools import partial
from typing import Any

from fp8moe_megatron.experts import FP8Experts
from fp8moe_megatron.layer import FP8MoELayer
from fp8moe_megatron.linears import FP8ColumnParallelLinear, FP8RowParallelLinear

_EXPERTS = dict.fromkeys(("SequentialMLP", "GroupedMLP", "TEGroupedMLP"), FP8Experts)
_LAYERS = {"MoELayer": FP8MoELayer}
_LINEARS = {
    "ColumnParallelLinear": FP8ColumnParallelLinear,
    "RowParallelLinear": FP8RowParallelLinear,
    "TEColumnParallelLinear": FP8ColumnParallelLinear,
    "TERowParallelLinear": FP8RowParallelLinear,
}
_FUSED = "TELayerNormColumnParallelLinear"


def in_fp8(spec: Any, *, experts: bool = True, linears: bool = True) -> Any:
    """Return a copy of a spec in which experts, linears or both are those of fp8moe.

    spec: of a layer or of anything in it, such as the results of get_gpt_layer_local_spec, get_gpt_decoder_block_spec
        and get_moe_module_spec.
    experts: whether to replace SequentialMLP, TEGroupedMLP and GroupedMLP, and the MoELayer around them.
    linears: whether to replace ColumnParallelLinear and RowParallelLinear, also TransformerEngine's, in attention,
        dense MLPs and shared experts. Routers, embeddings and output layers are not in a spec and stay as they are.

    Raises ValueError if there is nothing to replace, NotImplementedError with ``linears`` for a linear that
    TransformerEngine has fused with its norm.
    """
    chosen = (_EXPERTS | _LAYERS if experts else {}) | (_LINEARS if linears else {})
    replaced: list[type] = []
    result = _replace(spec, chosen, replaced, ())
    for asked, kinds, name in ((experts, _EXPERTS, "experts"), (linears, _LINEARS, "linears")):
        if asked and not any(kind in kinds.values() for kind in replaced):
            raise ValueError(f"spec: expected {name} of Megatron-Core, got none; pass {name}=False")
    return result


def _replace(value: Any, chosen: dict[str, type], replaced: list[type], path: tuple[str, ...]) -> Any:
    if isinstance(value, type):
        name = value.__name__ if value.__module__.startswith("megatron.core") else ""
        if name == _FUSED and "ColumnParallelLinear" in chosen:
            raise NotImplementedError(
                f"{'.'.join(path)}: {_FUSED} has a norm in it, which has no FP8 form here; take the spec of "
                "get_gpt_layer_local_spec, or pass linears=False"
            )
        if name not in chosen:
            return value
        replaced.append(chosen[name])
        return chosen[name]
    if isinstance(value, partial):
        function = _replace(value.func, chosen, replaced, path)
        if function is FP8Experts:
            return function
        args = (_replace(each, chosen, replaced, path) for each in value.args)
        return partial(function, *args, **_replace(value.keywords, chosen, replaced, path))
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        if _is_experts(fields.get("module"), chosen):
            fields["submodules"] = None
        return dataclasses.replace(value, **_replace(fields, chosen, replaced, path))
    if isinstance(value, dict):
        return {key: _replace(each, chosen, replaced, (*path, str(key))) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replace(each, chosen, replaced, path) for each in value)
    return value


def _is_experts(module: Any, chosen: dict[str, type]) -> bool:
    return isinstance(module, type) and chosen.get(module.__name__) is FP8Experts
