"""register and unregister: everything that fp8moe replaces in or adds to transformers, in one table.

No other file of fp8moe changes transformers.
"""

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
    """A replacement of one attribute of a class or module of transformers, or of one entry of a registry.

    what: the path of the class, module or registry, ":", and the attribute's name or the key. ours: function that takes
    the original, None if there is none, and returns the replacement. why: what the patch is for. until: when it can be
    removed. applies: function that tells whether the installed transformers has this attribute or entry.
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

# `why` and `until` of patches, as pairs. `fp8moe.hf.versions` names the supported versions of transformers.
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
"""The patches that `register` installs, besides TRAINING."""

MASKS = (
    Patch(f"{_MASKS}:sdpa", masks.with_offsets_of_rows, *_ROWS),
    Patch(f"{_MASKS}:eager", partial(masks.with_offsets_of_rows, of_rows=versions.eager_mask), *_ROWS),
)
"""The patches that `take_offsets_of_rows` installs."""

TRAINING = tuple(
    Patch(
        f"{module}:validate_quantization_for_training", training.checked, *_TRAINS, partial(training.is_there, module)
    )
    for module in ("transformers.trainer_utils", "transformers.trainer")  # trainer imports the function by name
)
"""The patches that `check_training` installs."""

_NOTHING: Any = object()
_lock = threading.Lock()
_installed: dict[Patch, tuple[Any, Any]] = {}
"""Maps each installed patch to the original, which is _NOTHING if there was none, and to our replacement."""


def register() -> None:
    """Add ``experts_implementation="fp8moe"`` to transformers, and run its FP8 linears and indexers on fp8moe.

    Afterwards, use ``AutoModelForCausalLM.from_pretrained(directory, experts_implementation="fp8moe")`` or
    ``model.set_experts_implementation("fp8moe")``. A second call changes nothing; `unregister` undoes the first.
    `report` tells what runs on fp8moe in a model.

    - Experts in bfloat16, float16 or float32 are quantized the first time that they run. The FP8 copy is cached with
      the module, takes half the memory of bfloat16 weights, and is made again when the weights move or change, or the
      module switches between training and evaluation. Writes through ``weight.data`` are not noticed: call
      ``fp8moe.layers.master.invalidate()`` after them.
    - FP8 experts (block size 128x128, dynamic activation scales) run on the module's own weights, without a copy.
    - FP8 linears with the same block size and activation scales run on fp8moe's kernels, in every FP8 model of the
      process; other formats keep running on transformers' own kernels.
    - The indexers of every DeepSeek-V3.2 and GLM-MoE-DSA model in the process, with 32 or 64 heads of 32, 64 or 128
      values, score in FP8, and the model's cache holds their keys in FP8; indexers of other sizes run as before. A
      cache made before this call cannot be continued after it.
    - Experts that transformers' expert parallelism shards run on `fp8moe.distributed`. A model whose tensor-parallel
      plan cuts FP8 weights inside their blocks raises ValueError on all ranks before anything is read.

    An experts module that GroupedExperts cannot express raises TypeError or ValueError with its class and the reason
    when it first runs. Frozen experts pass gradients on; a backward through experts whose weights require gradients
    raises RuntimeError outside of `replay_routing`. Experts whose class does not use transformers' experts interface
    keep running on transformers: for each such class, a model warns when it is made or switched to fp8moe.

    - Trainer raises ValueError for a model with frozen FP8 weights that has neither adapters nor masters.
    - from_pretrained raises ValueError for a checkpoint in a format whose scales transformers would lose on the way to
      fp8moe: ModelOpt's, AutoFP8's with a scale for each tensor, and FP8 codes without a quantization_config. It also
      raises ValueError if it has loaded FP8 modules without scales, because config.json declares other FP8 modules than
      the checkpoint has.
    - from_pretrained with ``experts_implementation="fp8moe"`` raises CheckpointError, with the names, for tensors that
      the checkpoint lacks, that have no place in the model, or that have another shape. To accept what transformers
      initializes instead, such as a new head, call ``model.set_experts_implementation("fp8moe")`` after the load.

    Raises ImportError if transformers is missing.
    """
    _install(REGISTERED + TRAINING)


def check_training() -> None:
    """Make transformers' Trainer refuse models with frozen FP8 weights that have neither adapters nor masters."""
    _install(TRAINING)


def take_offsets_of_rows() -> None:
    """Make transformers' mask functions for "sdpa" and "eager" also accept a q_offset (B,), one for each batch row.

    The patched functions keep these names, by which models look up mask functions.
    """
    _install(MASKS)


def unregister() -> None:
    """Undo `register`: restore transformers' own functions and remove the implementation "fp8moe".

    - Existing models that use "fp8moe" experts keep them until they switch to another implementation. They cannot
      switch back to "fp8moe", and new models cannot choose it.
    - FP8 linears and indexers of all models in the process run on transformers' own code again. A cache that holds
      indexer keys in FP8 cannot be continued. Using such a cache, or a `GraphDecoder` that has one, raises an error.
    - Masks with an offset for each row of a batch, which a `GraphDecoder` adds, are installed again when it next runs.

    A second call changes nothing. Raises RuntimeError, with nothing changed, if other code has replaced one of
    fp8moe's functions, as that code may call the function that it replaced.
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
            if before is _NOTHING:  # a new entry, or an attribute inherited from a base class
                theirs = inspect.getattr_static(patch.owner, patch.name, None)
            bind = type(theirs) if isinstance(theirs, staticmethod | classmethod) else None
            ours = patch.ours(theirs) if bind is None else bind(patch.ours(theirs.__func__))
            _put(patch, ours)
            _installed[patch] = before, ours


def _places(owner: Any) -> Any:
    """Return the dict of a registry's entries, or of a class's or module's attributes."""
    return getattr(owner, "_global_mapping", vars(owner))


def _put(patch: Patch, value: Any) -> None:
    """Set the attribute or registry entry of a patch; the value _NOTHING removes it."""
    owner, name = patch.owner, patch.name
    if hasattr(owner, "_global_mapping"):
        owner.register(name, value)
        if value is _NOTHING:
            del owner._global_mapping[name]
    elif value is _NOTHING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
