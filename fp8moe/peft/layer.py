"""peft LoRA layers on FP8 weights: merging with rounding, unmerging bit for bit, and checks of targets."""

import copy
import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import Linear, LoraLayer
from peft.tuners.tuners_utils import check_adapters_to_merge, check_target_module_exists
from torch import Tensor, nn

from fp8moe.hf import linears
from fp8moe.layers.linear import FP8Linear
from fp8moe.layers.parameters import is_sharded
from fp8moe.quant.formats import FP8Tensor, has_channel_scales
from fp8moe.quant.quantize import dequantize, quantize_128x128
from fp8moe.runtime.autograd import recorded

_log = logging.getLogger(__name__)

_INITIALIZATIONS = (True, False, "gaussian")
PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
_NOT_PLAIN = ("lora_bias", "fan_in_fan_out", "use_qalora", "layer_replication")


class MergeError(NamedTuple):
    """The rounding error of merged weights: the Frobenius norm of (stored weights - (W + BA)) over a whole module.

    weight: relative to the norm of W + BA.
    adapter: relative to the norm of BA; at 1, the rounding error is as large as what the adapter has added.
    """

    weight: float
    adapter: float


@dataclass(frozen=True)
class Stored:
    """Stored weights of a base layer, with the LoRA products BA to add. E is 1 for a linear.

    data: (E, matrices * N, K), with matrices 2 for gate and up, otherwise 1.
    scale: block scales of each matrix, stacked like data, or None for unquantized data.
    add: function that returns the sum of BA for expert e, (matrices * N, K) float32.
    """

    data: Tensor
    scale: Tensor | None
    matrices: int
    add: Callable[[int], Tensor]

    def sums(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return W + BA and BA of one expert, each (matrices, N, K) float32."""
        added = self.add(expert).unflatten(0, (self.matrices, -1))
        data = self.data[expert].unflatten(0, (self.matrices, -1))
        if self.scale is None:
            return data.float() + added, added
        scale = self.scale[expert].float().unflatten(0, (self.matrices, -1))
        return dequantize(FP8Tensor(data, scale)) + added, added

    def write(self, expert: int, sums: Tensor, scale_format: str) -> Tensor:
        """Round the sums (matrices, N, K) of one expert and store them; return the stored values in float32."""
        if self.scale is None:
            self.data[expert].copy_(sums.flatten(0, 1))
            return self.data[expert].float().view_as(sums)
        quantized = quantize_128x128(sums, scale_format=scale_format)
        self.data[expert].copy_(quantized.data.flatten(0, 1))
        self.scale[expert].copy_(quantized.scale.flatten(0, 1))
        return dequantize(quantized)

    @property
    def scale_format(self) -> str:
        """The format of the scales, which merging keeps: "ue8m0" if all are powers of two, else "float32"."""
        if self.scale is None:
            return "float32"
        mantissa, _ = torch.frexp(self.scale.float())
        return "ue8m0" if bool((mantissa == 0.5).all()) else "float32"

    def clone(self) -> tuple[Tensor, Tensor | None]:
        return self.data.clone(), None if self.scale is None else self.scale.clone()

    def restore(self, data: Tensor, scale: Tensor | None) -> None:
        self.data.copy_(data)
        if scale is not None:
            self.scale.copy_(scale)


class FP8LoraLayer(LoraLayer):
    """Base class of peft LoRA layers whose base layer stores FP8 block weights, or quantizes its weights when it runs.

    by_parameter: whether a LoraConfig lists the target in target_parameters, as for experts, or in target_modules.
    name: name of the target module or parameter.
    merge_error: the error of the last merge, None before the first.
    """

    by_parameter = False
    name: str
    merge_error: MergeError | None = None
    _before_merge: Sequence[tuple[Tensor, Tensor | None]] = ()
    _said_idle = False

    def stored(self, adapters: Iterable[str]) -> list[Stored]:
        """Return the weights of the base layer with the products BA of these adapters to add.

        Raises ValueError for weights that cannot be merged into.
        """
        raise NotImplementedError

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config, **kwargs) -> None:
        check_config(self.name, config)
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add BA of all given adapters (None: the active ones) to the base layer's weights W, with one rounding.

        The old weights are kept, so that `unmerge` can restore them bit for bit. With safe_merge, raises ValueError
        before anything is written if a sum is not finite.
        """
        adapters = self.unmerged(adapter_names)
        if adapters:
            before = self._before_merge or [stored.clone() for stored in self.stored(())]
            self._merge(safe_merge, adapters)
            self._before_merge = before

    def unmerge(self) -> None:
        """Restore the weights that the base layer had before the first `merge`, bit for bit."""
        if not self.merged:
            return
        for stored, before in zip(self.stored(()), self._before_merge, strict=True):
            stored.restore(*before)
        self._before_merge = ()
        self.merged_adapters.clear()

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """Return the base layer, for peft's `merge_and_unload`. Keeps no old weights.

        merge: whether to merge the adapters into the base layer first.
        """
        adapters = self.unmerged(adapter_names) if merge else []
        if adapters:
            self._merge(safe_merge, adapters)
        if isinstance(self.base_layer, FP8LoraLayer):
            return self.base_layer.unload_and_optionally_merge_module(merge, safe_merge, adapter_names)
        return self.base_layer

    def running(self) -> list[str]:
        """Return the adapters that a forward must add to the base layer; unmerge if adapters are disabled.

        Warns once if the layer has adapters and none of them is active.
        """
        if self.disable_adapters:
            self.unmerge()
            return []
        active = [name for name in self.active_adapters if name in self.r]
        if self.r and not active and not self.merged and not self._said_idle:
            self._said_idle = True
            found = ", ".join(self.active_adapters) or "none"
            # Python shows a warning once per source line, so the user sees one warning although many layers warn here.
            text = f"forward without adapters: {', '.join(self.r)} loaded, but set_adapter has made {found} active"
            warnings.warn(text, stacklevel=1)
        return [] if self.merged else active

    def unmerged(self, adapter_names: list[str] | None) -> list[str]:
        """Return those of the given adapters, by default the active ones, that this layer has but has not merged."""
        return [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]

    def check_mergeable(self, adapter_names: list[str] | None) -> None:
        """Raise ValueError if the given adapters, by default the active ones, cannot be merged into the base layer."""
        names = self.active_adapters if adapter_names is None else adapter_names
        if any(name in self.lora_A and name not in self.merged_adapters for name in names):
            # check again: the base layer may have been spread over ranks since it was adapted
            check_base(self.name, self.get_base_layer())
            self.stored(())

    @torch.no_grad()
    def check_finite(self, adapter_names: list[str] | None) -> None:
        """Raise ValueError if W + BA, for the given unmerged adapters, is not finite."""
        adapters = self.unmerged(adapter_names)
        for stored in self.stored(adapters) if adapters else ():
            for expert in range(len(stored.data)):
                if not bool(stored.sums(expert)[0].isfinite().all()):
                    raise ValueError(
                        f"{self.name}: safe_merge: expected finite W + BA, got NaN or infinity (matrix {expert})"
                    )

    @torch.no_grad()
    def _merge(self, safe_merge: bool, adapters: list[str]) -> None:
        """Overwrite W with W + BA, one expert at a time; every FP8 block gets a new scale."""
        self.check_mergeable(adapters)
        if safe_merge:
            self.check_finite(adapters)
        weights = self.stored(adapters)
        squares = torch.zeros(3, dtype=torch.float64, device=weights[0].data.device)
        for stored in weights:
            scale_format = stored.scale_format
            for expert in range(len(stored.data)):
                sums, added = stored.sums(expert)
                rounded = stored.write(expert, sums, scale_format)
                squares += torch.stack([value.double().square().sum() for value in (rounded - sums, sums, added)])
        error, whole, added = squares.sqrt().tolist()
        self.merge_error = MergeError(
            error / whole if whole else error, error / added if added else float(error > 0) * float("inf")
        )
        self.merged_adapters.extend(adapters)
        _log.info(
            "merged %s into %s: relative error %.1e of W + BA, %.1e of BA", adapters, self.name, *self.merge_error
        )

    def _start(self, base_layer: nn.Module, adapter_name: str, config, kwargs: dict) -> None:
        """Set `name`; raise ValueError for unsupported targets and options, before peft changes the layer."""
        self.name = kwargs.get("target_name") or type(base_layer).__name__
        check_target(self.name, type(self), kwargs.get("parameter_name"))
        check_config(self.name, config)
        check_base(self.name, base_layer.get_base_layer() if isinstance(base_layer, FP8LoraLayer) else base_layer)


def _checked(merge: Callable) -> Callable:
    """Wrap a merging method of peft's LoraModel: raise ValueError before any layer is changed if one cannot merge."""

    @functools.wraps(merge)
    def method(self: LoraModel, *args, **options):
        given = inspect.signature(merge).bind(self, *args, **options).arguments
        for layer in self.model.modules():
            if isinstance(layer, FP8LoraLayer):
                layer.check_mergeable(given.get("adapter_names"))
        return merge(self, *args, **options)

    return method


LoraModel.merge_adapter = _checked(LoraModel.merge_adapter)
LoraModel.merge_and_unload = _checked(LoraModel.merge_and_unload)


class LoraFP8Linear(FP8LoraLayer, Linear):
    """LoRA on a frozen FP8 linear: ``base(x) + scaling * B @ A @ dropout(x)``, with A and B as in peft's lora.Linear.

    New adapters have the dtype of the base layer's unquantized weight or, if the weight is FP8, of the bias; bfloat16
    if there is no bias. peft's autocast_adapter_dtype may cast new adapters to float32.
    """

    def __init__(self, base_layer: nn.Module, adapter_name: str, config, **kwargs) -> None:
        self._start(base_layer, adapter_name, config, kwargs)
        Linear.__init__(self, base_layer, adapter_name, config, **kwargs)

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        base = self.get_base_layer()
        ours = isinstance(base, FP8Linear)  # its masters and its bias get gradients, nothing of transformers' does
        if not (ours and base.trainable):
            check_frozen(self.name, base, base.weight_names if ours else base._parameters)
        self.running()
        return super().forward(x, *args, **kwargs)

    def stored(self, adapters: Iterable[str]) -> list[Stored]:
        linear, names = self.get_base_layer(), list(adapters)

        def add(_: int) -> Tensor:
            return sum(
                self.scaling[name] * (self.lora_B[name].weight.float() @ self.lora_A[name].weight.float())
                for name in names
            )

        scale = linear.weight_scale_inv
        return [Stored(linear.weight.detach()[None], scale if scale is None else scale.detach()[None], 1, add)]

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device, torch.dtype]:
        unquantized = base_layer.weight if base_layer.weight_scale_inv is None else base_layer.bias
        return base_layer.weight.device, torch.bfloat16 if unquantized is None else unquantized.dtype


Modules = Mapping[str, tuple[nn.Module, type[FP8LoraLayer]]]
"""Qualified name -> (module, its LoRA layer class), for all modules that can be adapted, under all of their names."""


def with_projections(config: Any, modules: Modules) -> Any:
    """Return a LoraConfig in which projections in target_parameters replace experts modules in target_modules.

    A config is returned unchanged if its target_modules is a regular expression, or if it has layers_to_transform or
    exclude_modules, which peft does not apply to parameters.
    """
    targets = config.target_modules
    if targets is None or isinstance(targets, str) or config.layers_to_transform is not None or config.exclude_modules:
        return config
    found = {
        target: {
            f"{target}.{parameter}": None
            for name, (module, layer) in modules.items()
            if layer.by_parameter and _ends(name, [target])
            for parameter in PROJECTIONS
            if parameter in module._parameters
        }
        for target in sorted(targets)
    }
    if not any(found.values()):
        return config
    changed = copy.copy(config)
    changed.target_modules = {target for target in targets if not found[target]}
    parameters = [*(config.target_parameters or ()), *(name for names in found.values() for name in names)]
    changed.target_parameters = list(dict.fromkeys(parameters))
    return changed


def check_targets(config: Any, modules: Modules) -> None:
    """Raise ValueError for targets that peft would refuse only after changing the model, or would not adapt.

    config: a LoraConfig.
    """
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        raise ValueError(
            "target_modules: 'all-linear' leaves out FP8Linear and experts; expected the names of modules, such as "
            f"{next(iter(modules))}"
        )
    owners: dict[int, str] = {}
    for name, (module, layer) in modules.items():
        parameters = [value for value in module._parameters if _ends(f"{name}.{value}", config.target_parameters)]
        kinds = {weight.dtype for weight in module.parameters(recurse=False)} & {torch.float8_e4m3fn, torch.uint8}
        if kinds and _ends(name, config.modules_to_save):
            what = "FP8" if torch.float8_e4m3fn in kinds else "four bits"
            raise ValueError(f"modules_to_save: {name} is in {what}, which is not trained")
        # Without target_modules peft uses its own defaults for the model, which are checked when peft adapts the
        # layers.
        targeted = config.target_modules is not None and check_target_module_exists(config, name)
        if not targeted and not parameters:
            continue
        if targeted:
            check_target(name, layer, None)
        for parameter in parameters:
            check_target(f"{name}.{parameter}", layer, parameter)
        check_config(name, config)
        check_base(name, module)
        for weight in module.parameters(recurse=False):
            if (owner := owners.setdefault(id(weight), name)) != name:
                raise ValueError(f"{name}: expected weights of its own to adapt, got those of {owner}")


def _ends(name: str, targets: Iterable[str] | None) -> bool:
    return any(f".{name}".endswith(f".{target}") for target in targets or ())


def check_target(name: str, layer: type[FP8LoraLayer], parameter_name: str | None) -> None:
    """Raise ValueError for experts in target_modules, and for target_parameters other than projections of experts."""
    if layer.by_parameter and parameter_name is None:
        module = name.rpartition(".")[2]
        raise ValueError(
            f"target_modules: expected the projections of the experts {name} in target_parameters, as in "
            f"['{module}.gate_up_proj', '{module}.down_proj']"
        )
    if parameter_name is not None and not (layer.by_parameter and parameter_name in PROJECTIONS):
        raise ValueError(
            f"target_parameters: expected projections of experts, got {name}; linears are named in target_modules"
        )


def check_config(name: str, config: Any) -> None:
    """Raise ValueError for a LoraConfig with more than plain LoRA, or whose initialization changes the base weights."""
    variants = [field.name for field in fields(config) if field.metadata.get("is_lora_variant")]
    for field in (*variants, *_NOT_PLAIN):
        value = getattr(config, field, None)  # older versions of peft lack some of these fields
        if value:
            raise ValueError(f"{field}: expected none for the FP8 weights of {name}, got {value!r}")
    if not 0 <= config.lora_dropout < 1:
        raise ValueError(f"lora_dropout: expected at least 0 and below 1 for {name}, got {config.lora_dropout}")
    if config.init_lora_weights not in _INITIALIZATIONS:
        raise ValueError(
            f"init_lora_weights: expected True, False or 'gaussian' for {name}, got {config.init_lora_weights!r}: "
            "others change the weights, which FP8 would round"
        )


def check_base(name: str, module: nn.Module) -> None:
    """Raise ValueError for a base layer that LoRA cannot run on.

    Such layers are spread over ranks, have an FP8 format other than 128x128 blocks, or are experts with biases or
    transposed weights.
    """
    parallel = [getattr(module, attribute, None) for attribute in ("parallel", "_fp8moe_parallel")]
    if any(style is not None for style in parallel) or any(map(is_sharded, module.parameters(recurse=False))):
        raise ValueError(
            f"{name}: expected a layer that is whole on this rank to adapt, got {type(module).__name__} spread over "
            "several ranks"
        )
    if getattr(module, "is_transposed", False):
        raise ValueError(f"{name}: expected experts with weights (E, rows, columns) to adapt, got transposed ones")
    for parameter, value in module.named_parameters(recurse=False):
        if parameter.endswith("_bias"):
            raise ValueError(f"{name}: expected experts without biases to adapt, got {parameter}")
        scale = getattr(module, f"{parameter}_scale_inv", None)
        if scale is not None and has_channel_scales(value, scale):
            raise ValueError(f"{name}: expected scales of 128x128 blocks to adapt, got one for each output channel")
    weight, scale = getattr(module, "weight", None), getattr(module, "weight_scale_inv", None)
    if weight is not None and scale is not None and hasattr(module, "block_size"):  # an FP8Linear of transformers
        reason = linears.refusal(weight, module.block_size, getattr(module, "activation_scale", None))
        if reason is not None:
            raise ValueError(f"{name}: expected FP8 weights that fp8moe runs, got {reason}")


def check_frozen(name: str, module: nn.Module, parameters: Iterable[str]) -> None:
    """Raise ValueError for a parameter of a base layer that requires a gradient: beside adapters it would get none.

    parameters: the names of those to check. Nothing is checked while no gradients are recorded.
    """
    for parameter in parameters:
        if recorded(getattr(module, parameter)):
            raise ValueError(
                f"{name}.{parameter}: expected a frozen parameter beside adapters, which alone get gradients; call "
                "requires_grad_(False)"
            )


def check_loaded(model: nn.Module, state_dict: Mapping[str, Tensor], prefix: str, *_) -> None:
    """Check the LoRA factors in a state dict before `load_state_dict` of the model writes anything.

    Raises ValueError, which names the layer, for factors that are missing, have another shape, or belong to no layer of
    the model. peft itself would ignore missing factors and those that belong to no layer.
    """
    given = {key.removeprefix(prefix): tuple(value.shape) for key, value in state_dict.items() if ".lora_" in key}
    if not given:
        return
    factors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    expected = {key: value for key, value in factors if ".lora_" in key}
    unknown = [key for key in given if key not in expected]
    if unknown:
        raise ValueError(f"{unknown[0]}: the adapter has this, but the model has nothing for it{_more(unknown)}")
    adapters = {_adapter(key) for key in given}
    missing = [key for key in expected if key not in given and _adapter(key) in adapters]
    if missing:
        raise ValueError(f"{_named(model, missing[0])}: expected it in the adapter, found none{_more(missing)}")
    for key, shape in given.items():
        wanted = getattr(model.get_submodule(key.rpartition(".")[0]), "stored_shape", tuple(expected[key].shape))
        if shape != wanted:
            raise ValueError(f"{_named(model, key)}: expected {wanted} in the adapter, got {shape}")


def _adapter(key: str) -> str:
    """Return the adapter's name from the key of a LoRA factor: "name" in ``layer.lora_A.name.weight``."""
    return key.rpartition(".lora_")[2].split(".")[1]


def _named(model: nn.Module, key: str) -> str:
    """Describe a LoRA factor for an error message: its layer, and whether it is A or B.

    For a layer of experts, the description includes the number of experts and the LoRA rank.
    """
    path, _, factor = key.rpartition(".lora_")
    layer = model.get_submodule(path)
    if not isinstance(layer, FP8LoraLayer):
        return key
    size = f" of {len(layer.get_param())} experts, rank {layer.r[_adapter(key)]}" if layer.by_parameter else ""
    return f"{layer.name}: lora_{factor[0]}{size}"


def _more(keys: Sequence[str]) -> str:
    return f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
