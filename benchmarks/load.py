"""Memory of load_model, and decode steps, with a whole checkpoint: `python -m benchmarks load [--model M] [--out DIR]`.

Writes a checkpoint of a model's published sizes and layout, whose layers all have the same random weights, loads it by
`load_model`, and measures decode steps of `GraphDecoder`.

- `peak_over_stored`: ratio of the peak of allocated GPU memory during `load_model` to the size of the checkpoint's
  files. `reserved_over_stored`: the same for the memory that PyTorch's allocator took from the GPU.
- The other columns are those of `benchmarks.decode`.

`--directory D` writes the checkpoint to D/M-FORMAT, keeps it, and uses one that is there; D may be a file system in
memory, if the disk is too small or too slow. By default, the checkpoint is written to a temporary directory.
"""

import json
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.decode import measure_decode
from benchmarks.report import Bar, Benchmark, Option, write_json
from benchmarks.whole_models import CONFIGS, FORMATS, WHOLE, build

MODELS = tuple(name for name in CONFIGS if name not in WHOLE)
"""Models whose layers all have tensors of the same names and shapes."""

FIRST = "model.layers.0."  # what the names of the first layer's tensors begin with
INDEX = "model.safetensors.index.json"
WRITERS = 8  # files that are written at the same time
COLUMNS = {
    "load": ("model", "experts", "stored_gb", "seconds", "peak_over_stored", "reserved_over_stored"),
    "decode": ("batch", "prompt", "ms", "tokens_s", "floor_ms", "x_floor", "kernels"),
}


def write_checkpoint(name: str, experts: str, directory: Path, *, device: str = "cuda") -> None:
    """Write a checkpoint to an empty or new directory; its index is written last.

    name: one of MODELS. experts: the format of experts' weights.
    Raises SystemExit if there is too little space in the directory.
    """
    from transformers import AutoConfig

    from fp8moe.weights import save_fp8_checkpoint

    with tempfile.TemporaryDirectory() as one_layer:
        save_fp8_checkpoint(build(name, experts=experts, layers=1, device=device), one_layer, max_shard_size=1 << 60)
        tensors = load_file(f"{one_layer}/model.safetensors")
        config = json.loads(Path(one_layer, "config.json").read_text())
    model_type, options = CONFIGS[name]
    full = AutoConfig.for_model(model_type, **options)
    layers = full.num_hidden_layers
    layer = {key: value for key, value in tensors.items() if key.startswith(FIRST)}
    others = {key: value for key, value in tensors.items() if key not in layer}
    needed = sum(value.nbytes for part in (layers * [layer], [others]) for one in part for value in one.values())
    directory.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(directory).free) < needed:
        raise SystemExit(f"{directory}: {needed / 1e9:.1f} GB are needed for {name}, {free / 1e9:.1f} GB are free")
    save_file(others, directory / "model-others.safetensors")
    files = [directory / f"model-{i:05}.safetensors" for i in range(layers)]
    save_file(layer, files[0])
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(partial(write_layer, files[0]), files[1:], range(1, layers)))
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = full.layer_types
    quantization = config["quantization_config"]
    for key in {"modules_to_not_convert", "ignore"} & quantization.keys():
        quantization[key] = [each for module in quantization[key] for each in in_layers(module, layers)]
    write_json(directory / "config.json", config)
    places = {key: file.name for i, file in enumerate(files) for key in (_renamed(key, i) for key in layer)}
    places |= dict.fromkeys(others, "model-others.safetensors")
    write_json(directory / INDEX, {"metadata": {"total_size": needed}, "weight_map": places})


def _renamed(name: str, layer: int) -> str:
    return name.replace(FIRST, FIRST.replace("0", str(layer)), 1)


def in_layers(module: str, layers: int) -> list[str]:
    """Return the names in all layers of a module that is named in the first layer; other names stay alone."""
    return [_renamed(module, layer) for layer in range(layers)] if module.startswith(FIRST) else [module]


def write_layer(first: Path, file: Path, layer: int) -> None:
    """Copy the first layer's safetensors file; its tensors get the names of another layer."""
    with first.open("rb") as source, file.open("wb") as target:
        (length,) = struct.unpack("<Q", source.read(8))
        header = json.loads(source.read(length))
        text = json.dumps({_renamed(name, layer): value for name, value in header.items()}).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at multiples of eight bytes
        target.write(struct.pack("<Q", len(text)) + text)
        shutil.copyfileobj(source, target, 1 << 26)


def measure_load(directory: Path, device: str = "cuda") -> tuple[torch.nn.Module, dict]:
    """Load a checkpoint; return the model, and the row with time and peak memory. RuntimeError if logits are wrong."""
    from fp8moe.hf import load_model

    stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, begin = torch.cuda.memory_allocated(), time.perf_counter()
    model = load_model(directory, device=device)
    torch.cuda.synchronize()
    spent = time.perf_counter() - begin
    peak, reserved = torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved()
    with torch.no_grad():
        logits = model(torch.arange(32, device=device)[None] % model.config.vocab_size).logits.float()
    if not (logits.isfinite().all() and logits.std() > 0):
        raise RuntimeError(f"{directory}: the loaded model's logits are not finite, or are all the same")
    ratios = {"peak_over_stored": peak / stored, "reserved_over_stored": reserved / stored}
    return model, {"what": "load", "stored_gb": stored / 1e9, "seconds": spent, **ratios}


def measure(
    model: str = "gpt-oss-120b",
    experts: str = "mxfp4",
    directory: str = "",
    batch: Sequence[int] = (1, 64),
    prompt: int = 512,
) -> Iterator[dict]:
    """Yield the row of load_model, then one for each batch of decode steps."""
    with ExitStack() as stack:
        place = Path(directory or stack.enter_context(tempfile.TemporaryDirectory())) / f"{model}-{experts}"
        if not (place / INDEX).exists():
            write_checkpoint(model, experts, place)
        loaded, row = measure_load(place)
    yield row | {"model": model, "experts": experts}
    for size in batch:
        yield measure_decode(loaded, size, prompt)


LOAD = Benchmark(
    "load",
    measure,
    COLUMNS,
    [Bar("load_model, {model}, {experts}, peak memory over stored bytes", "peak_over_stored", 1.05)],
    {
        "model": Option("gpt-oss-120b", MODELS),
        "experts": Option("mxfp4", FORMATS),
        "directory": Option(""),
        "batch": Option((1, 64)),
        "prompt": Option(512),
    },
)

if __name__ == "__main__":
    sys.exit(LOAD.main())
