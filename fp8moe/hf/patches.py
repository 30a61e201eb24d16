"""All that fp8moe replaces in transformers or adds to it, in one table; no other file of fp8moe writes there."""

import inspect
import pkgutil
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from fp8moe.hf import formats, indexers, linears, masks, parallel, reporting, versions
from fp8moe.hf.experts import NAME, experts_forward, keep_forwards


class Patch(NamedTuple):
    """One attribute of a class or module of transformers, or one entry of a registry.

    owner: path of the class, module or registry. name: of the attribute, or key of the entry. ours: makes what takes
    the place of what is there, or of None. why: what it does. until: when it can go. applies: whether the installed
    transformers has a place for it.
    """

    owner: str
    name: str
    ours: Callable[[Any], Any]
    why: str
    until: str
    applies: Callable[[], bool] = lambda: True


def by_style() -> bool:
    """Whether transformers shards experts by the styles of a plan."""
    return dist.is_available() and not versions.has_ep_size()


def by_implementation() -> bool:
    """Whether transformers shards experts by an interface with implementations."""
    return dist.is_available() and versions.has_ep_size()


def _of_indexer(name: str, model: str) -> tuple[Patch, Patch]:
    owner = f"transformers.models.{model}.modeling_{model}:{name}"
    until = "transformers has an interface for indexers"
    why = "indexers score in FP8", "and those whose old forward accelerate has bound"

    def applies() -> bool:
        return indexers.takes_known_arguments(pkgutil.resolve_name(owner))

    return (
        Patch(owner, "forward", indexers.routed, why[0], until, applies),
        Patch(owner, "__call__", lambda _: indexers.call, why[1], until, applies),
    )


_EXPERTS = "transformers.integrations.moe:ExpertsInterface"
_FP8 = "transformers.integrations.finegrained_fp8"
_MODEL = "transformers:PreTrainedModel"
_QUANTIZER = "transformers.quantizers:HfQuantizer"
_FP8_QUANTIZER = "transformers.quantizers.quantizer_finegrained_fp8:FineGrainedFP8HfQuantizer"
_STYLES = "transformers.distributed.tensor_parallel:ParallelInterface"
_IMPLEMENTATIONS = "transformers.distributed.expert_parallel:EPImplementationInterface"
_MASKS = "transformers.masking_utils:AttentionMaskInterface"

_ENTRY = "stays: transformers' own way to add one"
_WARNS = "names experts that take no experts_implementation", "transformers names them"
_REFUSES = "refuses checkpoints whose scales would be lost", "transformers reads the scales or refuses them"
_SCALES = "scales become float32, in the shapes of their modules", "5.23 is the oldest supported"
_ROWS = "rows of a batch have lengths of their own", "masks take an offset for each row"

REGISTERED = (
    Patch(_EXPERTS, NAME, lambda _: experts_forward, "the implementation of experts", _ENTRY),
    Patch(f"{_FP8}:FP8ExpertsInterface", NAME, lambda _: experts_forward, "the implementation of FP8 experts", _ENTRY),
    Patch(_FP8, "fp8_linear", linears.routed, "runs FP8 linears", "transformers has an interface for FP8 linears"),
    *(patch for name, model in indexers.CLASSES.items() for patch in _of_indexer(name, model)),
    Patch(_MODEL, "post_init", reporting.warning(reporting.made_for_fp8moe), *_WARNS),
    Patch(_MODEL, "set_experts_implementation", reporting.warning(reporting.asked_to_change), *_WARNS),
    Patch(_MODEL, "_load_pretrained_model", formats.check_unquantized, *_REFUSES),
    Patch(
        _QUANTIZER,
        "preprocess_model",
        lambda theirs: reporting.warning(reporting.made_for_fp8moe)(formats.check_quantized(theirs)),
        "both: refuses checkpoints, and names experts that quantizers have put into the model",
        "neither is needed",
    ),
    Patch(_MODEL, "_finalize_model_loading", formats.check_loaded, *_REFUSES),
    Patch(_FP8_QUANTIZER, "_process_model_before_weight_loading", versions.note_shapes, *_SCALES),
    Patch(_FP8_QUANTIZER, "_process_model_after_weight_loading", versions.complete_scales, *_SCALES),
    Patch(
        _MODEL,
        "maybe_distribute_model",
        parallel.checked,
        "refuses shards that end inside a block, and until 5.20 adapts plans for experts",
        "transformers shards FP8 weights by whole blocks",
        dist.is_available,
    ),
    Patch(
        _MODEL,
        "_resolve_parallel_plans",
        parallel.without_rules,
        "an empty tp_plan shards experts alone",
        "transformers takes an empty tp_plan",
        by_implementation,
    ),
    Patch(
        _IMPLEMENTATIONS, NAME, lambda _: parallel.implementation(), "runs experts by expert", _ENTRY, by_implementation
    ),
    Patch(
        _IMPLEMENTATIONS,
        "auto",
        parallel.automatic,
        "is the one above for experts that fp8moe runs",
        "experts choose their default themselves",
        by_implementation,
    ),
    Patch(
        _STYLES,
        versions.STYLE,
        lambda _: versions.style(parallel.check_chosen, partial(parallel.spread, same_tokens=True)),
        "shards experts by expert",
        "5.21 is the oldest supported",
        by_style,
    ),
    Patch(
        _FP8_QUANTIZER,
        "update_tp_plan",
        versions.complete_plan,
        "keeps rules of modules and scales",
        "5.21 is the oldest supported",
        by_style,
    ),
)
"""What `register` does."""

MASKS = (
    Patch(_MASKS, "sdpa", masks.with_offsets_of_rows, *_ROWS),
    Patch(_MASKS, "eager", lambda theirs: masks.with_offsets_of_rows(theirs, versions.eager_mask), *_ROWS),
)
"""What `take_offsets_of_rows` does."""

_NOTHING: Any = object()
_lock = threading.Lock()
_installed: dict[Patch, tuple[Any, Any]] = {}
"""What was there before, and ours."""


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

    - from_pretrained raises ValueError for a checkpoint in a format whose scales transformers would lose on the way to
      fp8moe: ModelOpt's, AutoFP8's with a scale for each tensor, and FP8 codes without a quantization_config; and where
      it has loaded FP8 modules without scales, as the configuration names others than those in the checkpoint.

    Raises ImportError if transformers is missing.
    """
    _install(REGISTERED)


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
            if _places(patch).get(patch.name) is not ours:
                path = f"{patch.owner.replace(':', '.')}, {patch.name}"
                raise RuntimeError(f"unregister: {path} is no longer fp8moe's; take back first what has replaced it")
        keep_forwards()
        for patch, (before, _) in reversed(_installed.items()):
            _put(patch, before)
        _installed.clear()


def _install(patches: Iterable[Patch]) -> None:
    with _lock:
        for patch in patches:
            if patch in _installed or not patch.applies():
                continue
            before = _places(patch).get(patch.name, _NOTHING)
            theirs = before
            if before is _NOTHING:  # a new entry, or an attribute of a base class
                theirs = inspect.getattr_static(pkgutil.resolve_name(patch.owner), patch.name, None)
            bind = type(theirs) if isinstance(theirs, staticmethod | classmethod) else None
            ours = patch.ours(theirs) if bind is None else bind(patch.ours(theirs.__func__))
            _put(patch, ours)
            _installed[patch] = before, ours


def _places(patch: Patch) -> Any:
    """The entries of the owner, if it is a registry, otherwise its attributes."""
    owner = pkgutil.resolve_name(patch.owner)
    return getattr(owner, "_global_mapping", vars(owner))


def _put(patch: Patch, value: Any) -> None:
    """Put a value in the place of a patch; _NOTHING takes away what is there."""
    owner = pkgutil.resolve_name(patch.owner)
    if value is not _NOTHING:
        owner.register(patch.name, value) if hasattr(owner, "_global_mapping") else setattr(owner, patch.name, value)
    elif hasattr(owner, "_global_mapping"):
        del owner._global_mapping[patch.name]
    else:
        delattr(owner, patch.name)
