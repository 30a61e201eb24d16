"""Ways to damage the files of a checkpoint: headers, bytes, scales, the index, config.json, and the files themselves.

`MUTATIONS` maps names to functions (directory, rng). Each function changes the checkpoint in place, in a way that
depends only on ``rng``.
"""

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (64, 32, 16)},
    **{
        f"{sign.upper()}{bits}": getattr(torch, f"{sign.strip('i')}int{bits}")
        for sign in "iu"
        for bits in (64, 32, 16, 8)
    },
    **{"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"F8_E8M0": torch.float8_e8m0fnu, "BOOL": torch.bool},
}
DEEP = 100_000
NUMBERS = [
    *("-1", "0", "1", "1.5", "-0.0", "1e400", "NaN", "Infinity", "-Infinity", "true", "null", '"1"', "[1]"),
    *(str(number) for number in (10**5, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**40)),
    *("1" + "0" * zeros for zeros in (4000, 5000)),
]
VALUES = [
    *NUMBERS,
    *('""', '"x"', '"F8_E4M3"', r'"\ud800"', r'"a\u0000b"', r'"\u001b[31m\n"', '"' + "x" * DEEP + '"'),
    *("[]", "{}", "[null]", "[[]]", "[-1,0]", '["a"]', '{"a":{}}', '{"a":1,"a":2}', "[" + "1," * DEEP + "1]"),
    *("[" * depth + "]" * depth for depth in (70, 500, 990, DEEP)),
    *('{"a":' * depth + "1" + "}" * depth for depth in (70, 500, 990, DEEP)),
]
TEXTS = [
    *(b"", b"{", b"{}", b"{} ", b"{}\0\0", b" {}", b"{}{}", b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"\xff":1}', b"x" * 100),
    *('{"a":1}'.encode(coding) for coding in ("utf-16", "utf-32", "utf-16-le")),
    *(value.encode() for value in VALUES),
]
NAMES = [
    *("", "__metadata__", "weight", ".", "x" * DEEP, "a\nb", "a\0b", "\x1b[31mred", "\ud800", "naïve", "_scale_inv"),
    *("experts.300000000000000.gate_proj.weight", "layers.0.experts.300000000000000.gate_proj.weight"),
    *(f"layers.0.experts.{n}.up_proj.weight" for n in ("9" * 18, "9" * 19, "9" * 5000, "00", "-1", "٣", "²", "1.0")),
    *("layers.0.experts.gate_up_proj", "layers.0.experts.down_proj_scale_inv", "experts" + ".experts" * 10_000),
    *("layers.0.q_proj.weight_scale_inv", "layers.0.q_proj.scale", ".scale", "scale"),
]
FILES = [
    *("", ".", "..", "../x", "../model.safetensors", "/etc/passwd", "a/b", "a\\b", "a\0b", "x" * 300, "\ud800", "none"),
    *(INDEX, CONFIG, "shards/../model.safetensors", "~", "\n", "naïve"),
]
SCALES = (math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0)
Mutation = Callable[[Path, Random], None]
MUTATIONS: dict[str, Mutation] = {}


def mutation(name: str) -> Callable[[Mutation], Mutation]:
    """Return a decorator that adds a function to MUTATIONS under this name."""
    return lambda function: MUTATIONS.setdefault(name, function)


class Raw:
    """Verbatim JSON text that no Python value represents: values contain markers, which `dump` replaces by the text."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def marker(self, text: str) -> str:
        """Return a new marker, which stands for this text in a value."""
        self._texts.append(text)
        return f"@raw{len(self._texts) - 1}@"

    def dump(self, content: object) -> bytes:
        """Return the JSON of a value, with each marker replaced by its text."""
        text = json.dumps(content)
        for i, raw in enumerate(self._texts):
            text = text.replace(f'"@raw{i}@"', raw)
        return text.encode()


def shards(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint."""
    return sorted(path for path in directory.glob("*.safetensors") if path.is_file())


def read_parts(path: Path) -> tuple[dict, bytes]:
    """Return the parsed header and the data of a safetensors file."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def write_parts(path: Path, header: bytes, data: bytes) -> None:
    """Write a safetensors file from the bytes of its header and its data."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def tensor_names(header: dict) -> list[str]:
    """Return the names of the tensors in a header."""
    return [name for name in header if name != "__metadata__"]


def in_header(name: str) -> Callable:
    """Return a decorator for functions that change one tensor's entry in a parsed header; it adds them to MUTATIONS."""

    def enter(change: Callable[[dict, str, Raw, Random], None]) -> Callable:
        @mutation(f"header: {name}")
        def mutate(directory: Path, rng: Random) -> None:
            path = rng.choice(shards(directory))
            header, data = read_parts(path)
            raw = Raw()
            change(header, rng.choice(tensor_names(header)), raw, rng)
            write_parts(path, raw.dump(header), data)

        return mutate

    return enter


@in_header("field")
def _(header: dict, name: str, raw: Raw, rng: Random) -> None:
    field = rng.choice(("dtype", "shape", "data_offsets", "more"))
    if field == "more" or rng.random() < 0.9:
        header[name][field] = raw.marker(rng.choice(VALUES))
    else:
        del header[name][field]


@in_header("number")
def _(header: dict, name: str, raw: Raw, rng: Random) -> None:
    numbers = header[name][rng.choice(("shape", "data_offsets"))]
    if not numbers or rng.random() < 0.1:
        numbers.append(raw.marker(rng.choice(NUMBERS)))
        return
    i = rng.randrange(len(numbers))
    numbers[i] = numbers[i] + rng.choice((-1, 1)) if rng.random() < 0.2 else raw.marker(rng.choice(NUMBERS))


@in_header("entry")
def _(header: dict, name: str, raw: Raw, rng: Random) -> None:
    kind = rng.choice(("replace", "delete", "add"))
    if kind == "delete":
        del header[name]
    elif kind == "replace":
        header[name] = raw.marker(rng.choice(VALUES))
    else:
        header[rng.choice(NAMES)] = rng.choice((raw.marker(rng.choice(VALUES)), header[name]))


@in_header("name")
def _(header: dict, name: str, raw: Raw, rng: Random) -> None:
    header[rng.choice(NAMES)] = header.pop(name)


@in_header("empty tensor")
def _(header: dict, name: str, raw: Raw, rng: Random) -> None:
    shape = rng.choice(([0], [0, 144], [2**40, 0, 0], [0, 2**62, 2**62], [3, 0, 144], [2**31, 2**31, 0], [0] * 70))
    end = max(header[other]["data_offsets"][1] for other in tensor_names(header))
    entry = {"dtype": rng.choice(list(DTYPES)), "shape": shape, "data_offsets": [end, end]}
    header[rng.choice([*NAMES, *tensor_names(header)])] = entry


@in_header("shape")
def _(header: dict, name: str, raw: Raw, rng: Random) -> None:
    shape = header[name]["shape"]
    ones = [1] * rng.choice((1, 2, 8, 62, 63, 64, 70, 1000))
    halved = [shape[0] // 2, 2, *shape[1:]] if shape and shape[0] % 2 == 0 else [1, *shape]
    header[name]["shape"] = rng.choice((shape[::-1], ones + shape, shape + ones, [math.prod(shape)], halved))


@in_header("dtype")
def _(header: dict, name: str, raw: Raw, rng: Random) -> None:
    others = ["F4", "F6_E2M3", "C64", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "f32", "F128", ""]
    width = DTYPES[header[name]["dtype"]].itemsize
    same_width = [other for other, dtype in DTYPES.items() if dtype.itemsize == width]
    header[name]["dtype"] = rng.choice(rng.choice((others, same_width)))


@in_header("metadata")
def _(header: dict, name: str, raw: Raw, rng: Random) -> None:
    value = raw.marker(rng.choice(VALUES))
    header["__metadata__"] = value if rng.random() < 0.5 else {"format": value}


@mutation("header: text")
def header_text(directory: Path, rng: Random) -> None:
    """Replace a shard's header by another text."""
    path = rng.choice(shards(directory))
    write_parts(path, rng.choice(TEXTS), read_parts(path)[1])


@mutation("header: duplicate")
def _(directory: Path, rng: Random) -> None:
    path = rng.choice(shards(directory))
    header, data = read_parts(path)
    name, other = (rng.choice(tensor_names(header)) for _ in range(2))
    again = json.dumps({name: header[other]})
    write_parts(path, (json.dumps(header)[:-1] + "," + again[1:]).encode(), data)


@mutation("header: length")
def _(directory: Path, rng: Random) -> None:
    path = rng.choice(shards(directory))
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    near = (length - 1, length + 1, len(content), len(content) - 8)
    path.write_bytes(
        rng.choice((0, 1, 2, *near, 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little") + content[8:]
    )


@mutation("header: bytes")
def _(directory: Path, rng: Random) -> None:
    path = rng.choice(shards(directory))
    content = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(rng.randint(1, 4)):
        content[rng.randrange(end)] = rng.choice((rng.randrange(256), *b'{}[],:"0129 \\'))
    path.write_bytes(content)


@mutation("data: bytes")
def data_bytes(directory: Path, rng: Random) -> None:
    """Change some bytes of the tensor data."""
    path = rng.choice(shards(directory))
    header, data = read_parts(path)
    data = bytearray(data)
    for _ in range(rng.randint(1, 20)):
        data[rng.randrange(len(data))] = rng.choice((0, 0x7F, 0xFF, rng.randrange(256)))
    write_parts(path, json.dumps(header).encode(), bytes(data))


@mutation("data: scales")
def _(directory: Path, rng: Random) -> None:
    path = rng.choice(shards(directory))
    header, data = read_parts(path)
    names = [name for name in tensor_names(header) if name.endswith(("_scale_inv", "_scale", ".scale"))]
    if not names:
        return data_bytes(directory, rng)
    entry = header[rng.choice(names)]
    begin, end = entry["data_offsets"]
    values = torch.frombuffer(bytearray(data[begin:end]), dtype=DTYPES[entry["dtype"]])
    # E8M0 scales, whether as F8_E8M0 or as bytes, have only one bad value, NaN
    bad = {"F8_E8M0": (math.nan,), "U8": (255,)}.get(entry["dtype"], SCALES)
    for _ in range(rng.randint(1, 3)):
        values[rng.randrange(len(values))] = rng.choice(bad)
    changed = values.view(torch.uint8).numpy().tobytes()
    write_parts(path, json.dumps(header).encode(), data[:begin] + changed + data[end:])


@mutation("file: size")
def _(directory: Path, rng: Random) -> None:
    path = rng.choice(list(directory.iterdir()))
    size = path.stat().st_size
    size = rng.choice((0, 1, 7, 8, 9, size // 2, size - 1, size + 1, 2 * size, rng.randrange(size), 2**40))
    with path.open("r+b") as file:
        file.truncate(size)  # if `size` is past the end, this makes a hole, which takes no disk space


@mutation("file: contents")
def _(directory: Path, rng: Random) -> None:
    first, second = (rng.choice(list(directory.iterdir())) for _ in range(2))
    first.write_bytes(second.read_bytes())


@mutation("file: kind")
def _(directory: Path, rng: Random) -> None:
    path = rng.choice(list(directory.iterdir()))
    content = path.read_bytes()
    path.unlink()
    links = {"nowhere": "nowhere", "loop": path.name, "zero": "/dev/zero", "null": "/dev/null", "parent": "."}
    kind = rng.choice(("none", "directory", "pipe", "socket", "unreadable", *links))
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "unreadable":
        path.write_bytes(content)
        path.chmod(0)  # root can still read the file
    elif kind in links:
        path.symlink_to(links[kind])


def change_json(*files: str) -> Mutation:
    """Make a mutation that replaces, deletes or renames a random value in one of the given JSON files."""

    def mutate(directory: Path, rng: Random) -> None:
        paths = [directory / file for file in files if (directory / file).is_file()]
        if not paths:
            return header_text(directory, rng)
        path, raw = rng.choice(paths), Raw()
        content = json.loads(path.read_bytes())
        owner, key = rng.choice(_places(content))
        kind = rng.choice(("value", "value", "value", "delete", "rename"))
        if kind == "value":
            owner[key] = raw.marker(rng.choice(VALUES))
        elif kind == "delete" or isinstance(owner, list):
            del owner[key]
        else:
            owner[rng.choice(NAMES)] = owner.pop(key)
        path.write_bytes(raw.dump(content))

    return mutate


def _places(content: dict | list) -> list[tuple[dict | list, str | int]]:
    """Return (container, key) for every value in parsed JSON, including nested values."""
    keys = list(content) if isinstance(content, dict) else range(len(content))
    inner = [content[key] for key in keys if isinstance(content[key], dict | list)]
    return [(content, key) for key in keys] + [place for part in inner for place in _places(part)]


@mutation("config: quantization")
def _(directory: Path, rng: Random) -> None:
    raw = Raw()
    content = json.loads((directory / CONFIG).read_bytes())
    names = ("quant_method", "weight_block_size", "activation_scheme", "modules_to_not_convert", "scale_fmt", "fmt")
    value = raw.marker(rng.choice([*VALUES, "128", "[128]", "[128,64]", "[128,128,128]", '"128"']))
    if rng.random() < 0.3:
        content["quantization_config"] = value
    else:
        content.setdefault("quantization_config", {"quant_method": "fp8"})[rng.choice(names)] = value
    (directory / CONFIG).write_bytes(raw.dump(content))


@mutation("index: file")
def _(directory: Path, rng: Random) -> None:
    path = directory / INDEX
    index = json.loads(path.read_bytes()) if path.is_file() else {"weight_map": {"x": SINGLE}}
    places = index["weight_map"]
    for name in rng.sample(sorted(places), k=min(len(places), rng.choice((1, 1, 3, 1000)))):
        places[name] = rng.choice([*FILES, *(shard.name for shard in shards(directory))])
    path.write_text(json.dumps(index))


for _kind, _files in (("index", (INDEX,)), ("config", (CONFIG, GENERATION_CONFIG))):
    mutation(f"{_kind}: value")(change_json(*_files))
    mutation(f"{_kind}: text")(
        lambda directory, rng, files=_files: (directory / rng.choice(files)).write_bytes(rng.choice(TEXTS))
    )
