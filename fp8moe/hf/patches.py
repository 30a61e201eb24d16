"""All that fp8moe replaces in transformers or adds to it, in one table; no other file of fp8moe writes there."""

import inspect
import pkgutil
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from fp8moe.hf import formats, indexers, linears, masks, parallel, reporting, training, versions
from fp8moe.hf.experts import NAME, experts_forward, keep_forwards


class Patch(NamedTuple):
    """One attribute of a class or module of transformers, or one entry of a registry.

    what: the path of the class, module or registry, ":", and the name or key. ours: makes the replacement of what is
    there, or of None. why: what it is for. until: when it can go. applies: whether this transformers has such a place.
    """

    what: str
    ours: Callable[[Any], Any]
    why: str
    until: str
    applies: Callable[[], bool] = lambda: True

    @property
    def owner(self) -> Any:
        return pkgutil.resolve_name(self.what.rpartition(":")[0])

    @property
    def name(self) -> str:
        return self.what.rpartition(":")[2]


_EXPERTS = "transformers.integrations.moe:ExpertsInterface"
_FP8 = "transformers.integrations.finegrained_fp8"
_INDEXERS = [f"transformers.models.{model}.modeling_{model}:{name}" for name, model in indexers.CLASSES.items()]
_MODEL = "transformers:PreTrainedModel"
_QUANTIZER = "transformers.quantizers:HfQuantizer"
_FP8_QUANTIZER = "transformers.quantizers.quantizer_finegrained_fp8:FineGrainedFP8HfQuantizer"
_STYLES = "transformers.distributed.tensor_parallel:ParallelInterface"
_EP = "transformers.distributed.expert_parallel:EPImplementationInterface"
_MASKS = "transformers.masking_utils:AttentionMaskInterface"

# Why each is there, and until when. The supported versions are those of `versions`.
_ADDED = "the name that users choose", "stays: transformers' own way to add an implementation"
_LINEARS = "FP8 linears run on fp8moe", "transformers has an interface for implementations of FP8 linears"
_SCORES = "indexers score in FP8, with hooks of accelerate too", "transformers has an interface for indexers"
_WARNS = "a model says which of its experts take no experts_implementation", "transformers says so"
_REFUSES = "checkpoints are refused whose scales would be lost", "transformers reads these scales or refuses them"
_PREPARES = "both: refused checkpoints, experts of quantizers", "neither is needed"
_SCALES = "scales become float32 and get the shapes of their modules", "5.17 is no longer supported"
_BLOCKS = "shards that end inside a block are refused", "transformers shards whole blocks"
_NO_RULES = "an empty tp_plan shards the experts alone", "transformers takes what it documents"
_DEFAULT = "experts that run on fp8moe are sharded by it", "experts say what shards them by default"
_STYLE = "experts are sharded by expert", "5.17 is no longer supported"
_PLAN = "a plan keeps the rules of modules and of scales of experts", "5.17 is no longer supported"
_TRAINS = "Trainer refuses frozen FP8 weights without adapters or masters", "it has a check for models to extend"
_ROWS = "rows of a batch have lengths of their own", "masks of transformers take an offset for each row"

REGISTERED = (
    Patch(f"{_EXPERTS}:{NAME}", lambda _: experts_forward, *_ADDED),
    Patch(f"{_FP8}:FP8ExpertsInterface:{NAME}", lambda _: experts_forward, *_ADDED),
    Patch(f"{_FP8}:fp8_linear", linears.routed, *_LINEARS),
    *(Patch(f"{path}:forward", indexers.routed, *_SCORES, partial(indexers.is_known, path)) for path in _INDEXERS),
    *(Patch(f"{path}:__call__", indexers.called, *_SCORES, partial(indexers.is_known, path)) for path in _INDEXERS),
    Patch(f"{_MODEL}:post_init", reporting.warning_of_model, *_WARNS),
    Patch(f"{_MODEL}:set_experts_implementation", reporting.warning_of_parts, *_WARNS),
    Patch(f"{_MODEL}:_load_pretrained_model", formats.check_unquantized, *_REFUSES),
    Patch(f"{_MODEL}:_finalize_model_loading", formats.check_loaded, *_REFUSES),
    Patch(
        f"{_QUANTIZER}:preprocess_model",
        lambda theirs: reporting.warning_of_model(formats.check_quantized(theirs)),
        *_PREPARES,
    ),
    Patch(f"{_FP8_QUANTIZER}:_process_model_before_weight_loading", versions.note_shapes, *_SCALES),
    Patch(f"{_FP8_QUANTIZER}:_process_model_after_weight_loading", versions.complete_scales, *_SCALES),
    Patch(f"{_MODEL}:maybe_distribute_model", parallel.checked, *_BLOCKS, dist.is_available),
    Patch(f"{_MODEL}:_resolve_parallel_plans", parallel.without_rules, *_NO_RULES, versions.has_ep_size),
    Patch(f"{_EP}:{NAME}", lambda _: parallel.implementation(), *_ADDED, versions.has_ep_size),
    Patch(f"{_EP}:auto", parallel.automatic, *_DEFAULT, versions.has_ep_size),
    Patch(f"{_STYLES}:{versions.STYLE}", lambda _: parallel.style(), *_STYLE, versions.has_styles),
    Patch(f"{_FP8_QUANTIZER}:update_tp_plan", versions.complete_plan, *_PLAN, versions.has_styles),
)
"""The patches of `register`."""

MASKS = (
    Patch(f"{_MASKS}:sdpa", masks.with_offsets_of_rows, *_ROWS),
    Patch(f"{_MASKS}:eager", partial(masks.with_offsets_of_rows, of_rows=versions.eager_mask), *_ROWS),
)
"""The patches of `take_offsets_of_rows`."""

TRAINING = tuple(
    Patch(
        f"{module}:validate_quantization_for_training", training.checked, *_TRAINS, partial(training.is_there, module)
    )
    for module in ("transformers.trainer_utils", "transformers.trainer")  # the second has it by name
)
"""The patches of `check_training`."""

_NOTHING: Any = object()
_lock = threading.Lock()
_installed: dict[Patch, tuple[Any, Any]] = {}
"""Patches in force: what was there before (_NOTHING if nothing), and ours."""


def register() -> None:
    """Make ``experts_implementation="fp8moe"`` known to transformers, and run its FP8 linears and indexers on fp8moe's.

    After it, ``AutoModelForCausalLM.from_pretrained(directory, experts_implementation="fp8moe")`` or
    ``model.set_experts_implementation("fp8moe")`` is all it takes. Calling it again changes nothing, and `unregister`
    takes it back. `report` tells what runs on fp8moe in a model.

    - Experts in bfloat16, float16 or float32 are quantized the first time that they run. The copy is kept beside the
      module, half the size of bfloat16 weights, until the weights move or change, or the module switches between
      training and evaluation; then it is made anew. Writes through ``weight.data`` are not noticed: call
      ``fp8moe.layers.master.invalidate()`` after them.
    - FP8 experts (block size 128x128, dynamic activation scales) run on the module's own weights, with no copy.
    - FP8 linears of every FP8 model in the process, with the same block size and activation scales, run on fp8moe's
      kernels; other formats go on running on transformers' own.
    - The indexers of every DeepSeek-V3.2 and GLM-MoE-DSA model in the process, with 32 or 64 heads of 32, 64 or 128
      values, score in FP8, and the model's cache holds their keys in FP8; those of other sizes run as before. A cache
      made before this call cannot be continued after it.
    - Experts that transformers' expert parallelism shards run on `fp8moe.distributed`. A model whose tensor-parallel
      plan cuts FP8 weights inside their blocks raises ValueError on all ranks before anything is read.

    An experts module that GroupedExperts cannot express raises TypeError or ValueError with its class and the reason
    when it runs first. Frozen experts pass gradients on; a backward through experts whose weights require gradients
    raises RuntimeError. Experts of classes that do not go through transformers' experts interface stay with
    transformers: a model that has them warns of each class when it is made or asked to change to fp8moe.

    - Trainer raises ValueError for a model with frozen FP8 weights that has neither adapters nor masters.
    - from_pretrained raises ValueError for a checkpoint in a format whose scales transformers would lose on the way to
      fp8moe: ModelOpt's, AutoFP8's with a scale for each tensor, and FP8 codes without a quantization_config; and where
      it has loaded FP8 modules without scales, as the configuration names others than those in the checkpoint.

    Raises ImportError if transformers is missing.
    """
    _install(REGISTERED + TRAINING)


def check_training() -> None:
    """Let transformers' Trainer refuse models with frozen FP8 weights that have neither adapters nor masters."""
    _install(TRAINING)


def take_offsets_of_rows() -> None:
    """Let transformers' masks for "sdpa" and "eager" take a q_offset (B,) too: one for each row of the batch.

    Models ask for the names "sdpa" and "eager", so those must stay.
    """
    _install(MASKS)


def unregister() -> None:
    """Take back all that `register` has changed: transformers has its own functions again, and no "fp8moe".

    - Experts of models that exist stay on fp8moe where the model has chosen it, and follow the model when it changes to
      another implementation. It cannot change back to "fp8moe", nor can new models choose it.
    - FP8 linears and indexers of all models in the process are transformers' again. A cache that holds keys of indexers
      in FP8 raises an error and cannot be continued, neither can a `GraphDecoder` that has one.
    - Masks with an offset for each row of a batch, which a `GraphDecoder` adds, come back when it runs again.

    A second call changes nothing. Raises RuntimeError, with nothing changed, if other code has replaced one of
    fp8moe's functions, as it may call them.
    """
    with _lock:
        for patch, (_, ours) in _installed.items():
            if _places(patch.owner).get(patch.name) is not ours:
                path = patch.what.replace(":", ".")
                raise RuntimeError(f"unregister: {path} is no longer fp8moe's; first take back what has replaced it")
        keep_forwards()
        for patch, (before, _) in reversed(_installed.items()):
            _put(patch, before)
        _installed.clear()


def _install(patches: Iterable[Patch]) -> None:
    with _lock:
        for patch in patches:
            if patch in _installed or not patch.applies():
                continue
            before = theirs = _places(patch.owner).get(patch.name, _NOTHING)
            if before is _NOTHING:  # a new entry, or an attribute of a base class
                theirs = inspect.getattr_static(patch.owner, patch.name, None)
            bind = type(theirs) if isinstance(theirs, staticmethod | classmethod) else None
            ours = patch.ours(theirs) if bind is None else bind(patch.ours(theirs.__func__))
            _put(patch, ours)
            _installed[patch] = before, ours


def _places(owner: Any) -> Any:
    """Return the entries of a registry, the attributes of a class or module."""
    return getattr(owner, "_global_mapping", vars(owner))


def _put(patch: Patch, value: Any) -> None:
    """Put a value in the place of a patch; _NOTHING takes away what is there."""
    owner, name = patch.owner, patch.name
    if hasattr(owner, "_global_mapping"):
        owner.register(name, value)
        if value is _NOTHING:
            del owner._global_mapping[name]
    elif value is _NOTHING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
