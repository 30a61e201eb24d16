"""Read a checkpoint directory: headers, the shard index, config.json, and tensors piece by piece.

A safetensors file (https://github.com/huggingface/safetensors) is eight bytes with the length of a JSON header, the
header with dtype, shape and byte range of each tensor, then the bytes. Headers are read here without the tensors.
"""

import json
import math
import os
import re
import reprlib
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fp8moe.runtime.settings import standard_device
from fp8moe.weights.hub import NoCheckpoint, checkpoint_directory

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The supported dtypes, by their names in safetensors files."""


DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


FP8 = "F8_E4M3"
E5M2 = "F8_E5M2"


FLOATS = ("BF16", "F16", "F32", "F64")


class TensorSpec(NamedTuple):
    """The dtype, by its safetensors name, and the shape of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


Layout = dict[str, TensorSpec]
"""The tensors of a file or of a whole checkpoint, by name."""


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
HF_QUANT_CONFIG = "hf_quant_config.json"

DECLARATIONS = ("quantization_config", "compression_config")
"""Keys, at any level of config.json, of the objects that say how weights are quantized."""
_SHOWN_PROBLEMS = 100
_COUNT = re.compile(r"(\w*_)?((num|n)_\w*(layers?|experts|labels)|(en|de)coder_layers|depths?)")
# The largest numbers of layers, and of experts or labels, that a config.json may ask for. Known models have fewer, and
# a model with these numbers can still be made in seconds.
_MOST_LAYERS, _MOST_OTHERS = 1024, 1 << 20
_MAX_RANK = 64  # most dimensions of a tensor that PyTorch can copy
_POINTER = b"version https://git-lfs.github.com/spec/"
_IS_POINTER = "is a pointer of Git LFS, not the file itself; fetch the file with git lfs pull"


class CheckpointError(ValueError):
    """A checkpoint cannot be used. ``problems`` lists everything that is wrong; the message shows the first hundred."""

    def __init__(self, what: str, problems: Iterable[str]):
        self.what = what
        self.problems = [printable(problem) for problem in problems]
        start = " " if len(self.problems) == 1 else "\n  "
        lines = [start + problem for problem in self.problems[:_SHOWN_PROBLEMS]]
        if len(self.problems) > _SHOWN_PROBLEMS:
            lines.append(f"\n  ... and {len(self.problems) - _SHOWN_PROBLEMS} more")
        super().__init__(f"{printable(what)}:{''.join(lines)}")


class TensorInfo(NamedTuple):
    """A tensor's entry in a header: its name, safetensors dtype and shape, its file, and its byte range in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    file: str

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass
class Checkpoint:
    """A checkpoint directory as its headers and JSON files describe it.

    files: names of the shards that could be read. tensors: header entries, by tensor name. declarations: the JSON
    objects that say how the weights are quantized, by file and key. problems: what is wrong with the files themselves.
    incomplete: whether a shard is missing or damaged; ``tensors`` then lacks that shard's tensors.
    """

    directory: Path
    files: list[str]
    tensors: dict[str, TensorInfo]
    config: dict
    declarations: dict[str, dict]
    problems: list[str]
    incomplete: bool

    @property
    def unknown_dtypes(self) -> list[str]:
        """Return a problem line for each tensor whose dtype is not in `DTYPES`."""
        return [
            f"{name}: unknown dtype {info.dtype}" for name, info in self.tensors.items() if info.dtype not in DTYPES
        ]

    def read_unmapped(self, infos: Iterable[TensorInfo]) -> Iterator[tuple[TensorInfo, Tensor]]:
        """Yield (info, flattened tensor) for small tensors, reading files that the safetensors library would map."""
        for file, wanted in groupby(sorted(infos, key=lambda info: (info.file, info.begin)), lambda info: info.file):
            with (self.directory / file).open("rb") as stream:
                for info in wanted:
                    stream.seek(info.begin)
                    content, dtype = bytearray(stream.read(info.nbytes)), DTYPES[info.dtype]
                    empty = torch.empty(0, dtype=dtype, device="cpu")
                    yield info, torch.frombuffer(content, dtype=dtype) if content else empty


class Reader:
    """Reads tensors with the safetensors library. A shard stays mapped from the first read of it until `close`."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._files: dict[str, safe_open] = {}
        self._stack = ExitStack()

    def read(self, info: TensorInfo, part: tuple[slice | int, ...] = ()) -> Tensor:
        """Return a tensor, or the part of it that ``part`` indexes."""
        if info.file not in self._files:
            self._files[info.file] = self._stack.enter_context(safe_open(self._directory / info.file, framework="pt"))
        shard = self._files[info.file]
        with standard_device():
            return shard.get_slice(info.name)[part] if part else shard.get_tensor(info.name)

    def close(self) -> None:
        self._files.clear()
        self._stack.close()


def open_checkpoint(directory: str | os.PathLike) -> Checkpoint:
    """Read config.json, the index and the header of each shard.

    directory: the checkpoint's directory, or its name on the Hugging Face Hub.
    Raises CheckpointError if there is no checkpoint at all; a missing or damaged file becomes an entry of ``problems``.
    """
    try:
        directory = checkpoint_directory(directory)
    except NoCheckpoint as error:
        raise CheckpointError(f"{directory} is not a checkpoint", [str(error)]) from error
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a checkpoint", ["it is not a directory"])
    present = set(os.listdir(directory))
    problems: list[str] = []
    config = read_json(directory / CONFIG, problems) if CONFIG in present else {}
    declarations = _declarations(config, problems)
    if HF_QUANT_CONFIG in present:
        declarations[HF_QUANT_CONFIG] = read_json(directory / HF_QUANT_CONFIG, problems)
    weight_map: dict[str, str] | None = None  # from the index: files by tensor name
    if INDEX in present:
        weight_map = read_json(directory / INDEX, problems).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(
                f"{directory} is not a checkpoint", problems or [f"{INDEX}: has no weight_map from names to files"]
            )
        if SINGLE in present and {*weight_map.values()} != {SINGLE}:
            problems.append(
                f"{SINGLE}: lies beside {INDEX} of other files, and some libraries read the one, some the other; "
                "remove what is not wanted"
            )
            weight_map = None  # ignore the index and read the single file, as transformers does
    elif SINGLE not in present:
        raise CheckpointError(f"{directory} is not a checkpoint", [f"there is neither {SINGLE} nor {INDEX}"])

    listed: dict[str, list[str]] = defaultdict(list)
    for name, file in (weight_map or {}).items():
        listed[file].append(name)
    tensors: dict[str, TensorInfo] = {}
    files, unread = [], set()
    for file in [SINGLE] if weight_map is None else sorted(listed):
        try:
            if Path(file).name != file:
                raise CheckpointError(f"{directory} is not complete", [f"{file}: is not in the directory itself"])
            header = read_header(directory / file)
        except CheckpointError as error:
            names = sorted(listed[file])
            lost = f"; {INDEX} puts {len(names)} tensors there, from {names[0]} to {names[-1]}" if names else ""
            problems += [problem + lost for problem in error.problems]
            unread.add(file)
            continue
        files.append(file)
        for name, info in header.items():
            if weight_map is not None and weight_map.get(name) != file:
                problems.append(f"{name}: is in {file}, but {INDEX} does not say so")
            else:
                tensors[name] = info
    for name, file in (weight_map or {}).items():
        if name not in tensors and file not in unread:
            problems.append(f"{name}: {INDEX} says it is in {file}, but it is not")
    return Checkpoint(
        directory=directory,
        files=files,
        tensors=tensors,
        config=config,
        declarations=declarations,
        problems=problems,
        incomplete=bool(unread),
    )


def sections(config: dict) -> list[tuple[str, dict]]:
    """List a configuration and all objects nested in it, each with its path, such as "text_config.rope"."""
    found = [("", config)]
    for place, content in found:
        found += [(f"{place}.{name}".strip("."), value) for name, value in content.items() if isinstance(value, dict)]
    return found


def _declarations(config: dict, problems: list[str]) -> dict[str, dict]:
    """Return the objects under `DECLARATIONS` keys of config.json, by key path; add a problem for any other value."""
    found: dict[str, dict] = {}
    for place, content in sections(config):
        if any(name in place.split(".") for name in DECLARATIONS):
            continue  # nested in a declaration that is already listed
        for name in DECLARATIONS:
            value, where = content.get(name), f"{CONFIG}: {place}{'.' * bool(place)}{name}"
            if value and isinstance(value, dict):
                found[where] = value
            elif value is not None and not isinstance(value, dict):
                problems.append(f"{where} is {shown(value)}, expected an object")
    mlx = config.get("quantization")
    if isinstance(mlx, dict) and "bits" in mlx:
        found[f"{CONFIG}: quantization"] = mlx
    return found


def count_problems(checkpoint: Checkpoint) -> list[str]:
    """Return a problem line for each number of layers, experts or labels in config.json that is too large.

    A number is too large if the checkpoint has fewer tensors and no tensor has a dimension of this size or larger. If
    there is no such number, return the lines of `config_problems`.
    """
    limit = max(len(checkpoint.tensors), *(size for info in checkpoint.tensors.values() for size in info.shape), 0)
    problems = [
        f"{CONFIG}: {name} is {shown(value)}, expected at most {limit} for these tensors"
        for name, value, count in _counts(checkpoint.config)
        if count > limit
    ]
    return problems or config_problems(checkpoint.config)


def config_problems(config: dict) -> list[str]:
    """Return a problem line for each number of layers, experts or labels that is larger than in any known model.

    Making a model with such a number would take all memory.
    """
    return [
        f"{CONFIG}: {name} is {shown(value)}, expected at most {most}"
        for name, value, count in _counts(config)
        if count > (most := _MOST_OTHERS if name.endswith(("experts", "labels")) else _MOST_LAYERS)
    ]


def _counts(config: dict) -> Iterator[tuple[str, object, float]]:
    """Yield the entries that count layers, experts or labels: name, value, and the largest number in the value."""
    for _, content in sections(config):
        for name, value in content.items():
            if _COUNT.fullmatch(name):
                values = value if isinstance(value, list) else [value]
                yield name, value, max((each for each in values if isinstance(each, int | float)), default=0)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the entries of a safetensors file's header by tensor name, in the order of the tensors' bytes.

    Raises CheckpointError for a file that cannot be read, is cut short, is too long, or is not safetensors. The
    safetensors library can open every file that passes, unless it is too large to map.
    """

    def broken(why: str) -> CheckpointError:
        return CheckpointError(f"{path} cannot be read", [f"{path.name}: {why}"])

    obstacle = _obstacle(path)
    if obstacle is not None:
        raise broken(obstacle)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix == _POINTER[:8]:
                raise broken(_IS_POINTER)
            if size < 8 or 8 + length > size or length > MAX_BYTES:
                raise broken("is cut short, or no safetensors file")
            content = prefix + file.read(length)
        entries = parse_object(content[8:])
        entries.pop("__metadata__", None)
        infos = {name: _tensor_info(name, entry, len(content), path.name) for name, entry in entries.items()}
        tensors = dict(sorted(infos.items(), key=lambda item: (item[1].begin, item[1].end)))
        position = len(content)
        for name, info in tensors.items():
            if info.begin != position:
                raise broken(f"the bytes of {name} do not follow on those before")
            if info.dtype in DTYPES and info.nbytes != TensorSpec(info.dtype, info.shape).nbytes:
                raise broken(f"{name} has {info.nbytes} bytes, which does not fit {info.dtype} {shown(info.shape)}")
            position = info.end
        if size != position:
            state = "is cut short" if size < position else "is too long"
            raise broken(f"{state}: {size} bytes, the header says {position}")
        # safe_open raises RuntimeError for a file too large to mmap; `unmappable` lists such files.
        with suppress(RuntimeError), safe_open(path, framework="pt"):
            pass
    except CheckpointError:
        raise
    except ValueError as error:
        raise broken(f"has no valid safetensors header ({error})") from error
    except (OSError, SafetensorError) as error:
        raise broken(f"cannot be read ({error})") from error
    return tensors


def unmappable(checkpoint: Checkpoint) -> list[str]:
    """List the shards that PyTorch cannot map because they are larger than memory: only their headers can be read."""
    problems = []
    for file in checkpoint.files:
        try:
            with safe_open(checkpoint.directory / file, framework="pt"):
                pass
        except RuntimeError as error:
            problems.append(f"{file}: {error}")
    return problems


def _tensor_info(name: str, entry: object, start: int, file: str) -> TensorInfo:
    """Check an entry of a header and return it as a TensorInfo. start: the offset in the file of the first tensor."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]} if (
            all(type(size) is int and size >= 0 for size in (*shape, begin, end))
            and begin <= end
            and len(shape) <= _MAX_RANK
            and math.prod(max(size, 1) for size in shape) < 2**63
        ):
            return TensorInfo(name, dtype, tuple(shape), start + begin, start + end, file)
    raise ValueError(f"{name} has {shown(entry)}, expected dtype, shape and data_offsets of a tensor")


def read_json(path: Path, problems: list[str]) -> dict:
    """Return the JSON object in a file; if it has none, add to ``problems`` and return an empty dict."""
    why = _obstacle(path)
    try:
        if why is None and path.stat().st_size > MAX_BYTES:
            why = f"is larger than {MAX_BYTES:,} bytes"
        if why is None:
            content = path.read_bytes()
            if not content.startswith(_POINTER):
                return parse_object(content)
            why = _IS_POINTER
    except ValueError as error:
        why = f"is not valid JSON ({error})"
    except OSError as error:
        why = f"cannot be read ({error})"
    problems.append(f"{path.name}: {why}")
    return {}


def _obstacle(path: Path) -> str | None:
    """Return why a path is not a regular file, or None if it is. Opening a named pipe, say, would block."""
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return "there is no such file"
    except (OSError, ValueError) as error:
        return f"cannot be read ({error})"
    return None if regular else "is not a regular file"


MAX_BYTES = 100_000_000
"""The largest JSON file or header that is read, in bytes; the safetensors library has the same limit for headers."""

_MAX_DEPTH = 64  # levels of nested JSON: transformers' configurations have 4, safetensors allows 128
_TOO_DEEP = f"nested more than {_MAX_DEPTH} deep"
_MAX_DIGITS = 100
_MAX_MESSAGE = 2000  # characters of a line in an error message


def parse_object(content: bytes) -> dict:
    """Parse a JSON object in UTF-8.

    Raises ValueError for anything else, for deep nesting, for duplicate keys and for integers of too many digits.
    """
    try:
        value = json.loads(content.decode(), object_pairs_hook=_without_duplicates, parse_int=_integer)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {shown(value)}")
    if _is_deeper(value, _MAX_DEPTH):
        raise ValueError(_TOO_DEEP)
    return value


def shown(value: object) -> str:
    """Format a parsed JSON value for a message, shortened if it is long or nested."""
    short = reprlib.Repr()
    short.maxstring = short.maxlong = short.maxother = 60
    return short.repr(value)


def printable(text: str) -> str:
    """Make text safe for one line of any terminal: escape control characters and lone surrogates, shorten long text."""
    if len(text) > _MAX_MESSAGE:
        text = f"{text[: _MAX_MESSAGE // 2]} ... {text[-_MAX_MESSAGE // 2 :]}"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict:
    content = dict(pairs)
    if len(content) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {shown(name)} is there more than once")
    return content


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits")
    return int(text)


def _is_deeper(value: object, depth: int) -> bool:
    """Return whether lists and objects are nested more than ``depth`` deep."""
    level = [value]
    for _ in range(depth + 1):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
    return bool(level)
