"""A digest of what the GPU runs: `python -m tools.digest` prints it, on any machine.

`--write FILE` stores the hashed content as JSON; `--against FILE` lists the differences from such a file. Each group of
kernels in `tools.variants` has its own digest; `--group NAME` chooses the group.

The digest covers the launches of all calls of the group, as `fp8moe.runtime.record` records them for an H200: kernels,
launch configurations, tensor maps, arguments, and the complete source of every kernel with the compiler's options.
Comments, names in Python and the Python code around launches do not affect it. So stored results of a GPU run stay
valid while only these change.
"""

import argparse
import functools
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8moe.runtime.jit import KernelSpec

NUM_SMS = 132  # streaming multiprocessors of an H100 or H200

# Comments and literals are matched first: neither may begin inside the other.
_CUDA_TOKEN = re.compile(
    r"""
      (?P<comment> //[^\n]* | /\*.*?\*/ )
    | (?P<space> [^\S\n]+ )
    | (?P<newline> \n )
    | (?P<text>
          \bR"(?P<delimiter>[^()\\\s]*)\(.*?\)(?P=delimiter)"
        | "(?:\\.|[^"\\\n])*"
        | '(?:\\.|[^'\\\n])*'
        | [0-9](?:'?[\w.])*
        | \w+
        | .
      )
    """,
    re.VERBOSE | re.DOTALL,
)
_LINE_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*line[ \t].*\n?", re.MULTILINE)


@functools.cache
def normalize_cuda(source: str) -> str:
    """Return the tokens of CUDA C++ source, one per line, with an empty line after each preprocessor directive."""
    source = source.replace("\\\n", "")
    tokens: list[str] = []
    directive, line_start = False, True
    for match in _CUDA_TOKEN.finditer(source):
        if match["newline"]:
            if directive:
                tokens.append("")
            directive, line_start = False, True
        elif match["text"]:
            directive = directive or (line_start and match["text"] == "#")
            line_start = False
            tokens.append(match["text"])
    return "\n".join(tokens)


def normalize_unit(source: str) -> str:
    """Return the tokens of a translation unit, without the #line directives between its files."""
    # Each file is normalized by itself, because units share most of their files and results are cached.
    return "\n".join(filter(None, map(normalize_cuda, _LINE_DIRECTIVE.split(source))))


def options() -> list[str]:
    """Return the compiler options that the digest covers: architectures, C++ standard, and options of ptxas."""
    from fp8moe.runtime import compilers
    from fp8moe.runtime.architectures import ARCHITECTURES

    return [*(known.flag for known in ARCHITECTURES), compilers.STD, *compilers.PTXAS_OPTIONS]


def source_hash(spec: "KernelSpec") -> str:
    """Return the SHA-256 of the tokens of a kernel's translation unit."""
    from fp8moe.runtime import jit

    return hashlib.sha256(normalize_unit(jit.full_source(spec)).encode()).hexdigest()


def fingerprint(calls: Iterable[list[dict]], kernels: "Iterable[KernelSpec]") -> str:
    """Return the SHA-256 of recorded launches and of their kernels; each launch names its kernel by an index."""
    units = [[spec.name, source_hash(spec)] for spec in kernels]
    content = {"options": options(), "kernels": units, "calls": list(calls)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def content(calls: Iterable[list[dict]], kernels: "Iterable[KernelSpec]") -> dict:
    """Return, in a compact form, what `fingerprint` hashes: each launch once, and calls as lists of launch indices."""
    launches: dict[str, int] = {}
    numbered = [[launches.setdefault(json.dumps(one), len(launches)) for one in call] for call in calls]
    described = [{"name": spec.name, "constants": constants(spec), "source": source_hash(spec)} for spec in kernels]
    return {"options": options(), "kernels": described, "launches": [*map(json.loads, launches)], "calls": numbered}


def constants(spec: "KernelSpec") -> dict[str, str]:
    """Return the constants that a kernel is compiled with."""
    return {name: str(value) for name, value in spec.defines} | dict(
        re.findall(r"constexpr int (\w+) = (-?\d+);", spec.prelude)
    )


def differences(old: dict, new: dict) -> Iterator[str]:
    """Yield one line for each kind of change from `old` to `new` (results of `content`), with the number of calls."""
    if old["options"] != new["options"]:
        yield f"options: {old['options']}, now {new['options']}"
    if len(old["calls"]) != len(new["calls"]):
        yield f"calls: {len(old['calls'])}, now {len(new['calls'])}"
    found = Counter(map(_changes, _described(old), _described(new)))
    yield from (f"{count} calls: {changes}" for changes, count in found.most_common() if changes)


def _described(content: dict) -> Iterator[list[dict]]:
    """Yield the launches of each call, with each kernel in place of its index."""
    launches = [one | {"kernel": content["kernels"][one["kernel"]]} for one in content["launches"]]
    yield from ([launches[place] for place in call] for call in content["calls"])


def _changes(before: list[dict], after: list[dict]) -> str:
    """Describe how the launches of a call changed: other kernels, or other constants, source and arguments."""
    first, then = (", ".join(one["kernel"]["name"] for one in call) for call in (before, after))
    if first != then:
        return f"launches {first}, now {then}"
    found = []
    for old, new in zip(before, after, strict=True):
        kernel, was, now = old["kernel"], old["kernel"]["constants"], new["kernel"]["constants"]
        moved = [
            f"{name} {was.get(name)} -> {now.get(name)}" for name in sorted(was | now) if was.get(name) != now.get(name)
        ]
        if kernel["source"] != new["kernel"]["source"] and not moved:
            moved = ["its source"]
        if moved := moved + sorted(key for key in old if key != "kernel" and old[key] != new[key]):
            found.append(f"{kernel['name']}: {', '.join(moved)}")
    return "; ".join(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the digest. With `--against`, print the differences and return 1 if there are any."""
    from fp8moe.runtime.record import Recorder
    from tools.variants import GROUPS, Untouched

    parser = argparse.ArgumentParser(prog="python -m tools.digest", description="what the GPU runs, as one hash")
    parser.add_argument("--group", choices=GROUPS, default="kernels", help="group of kernels (default: %(default)s)")
    parser.add_argument("--write", metavar="FILE", help="store what it is taken over")
    parser.add_argument("--against", metavar="FILE", help="list what differs from a stored file")
    args = parser.parse_args(argv)
    recorder = Recorder(NUM_SMS)
    calls = [recorder.record(call) for call in GROUPS[args.group](Untouched())]
    status = 0
    if args.write:
        with open(args.write, "w", encoding="utf-8") as file:
            json.dump(content(calls, recorder.kernels), file, separators=(",", ":"))
            file.write("\n")
    if args.against:
        with open(args.against, encoding="utf-8") as file:
            found = list(differences(json.load(file), content(calls, recorder.kernels)))
        print(*found, sep="\n", end="\n" if found else "")
        status = int(bool(found))
    print(fingerprint(calls, recorder.kernels))
    return status


if __name__ == "__main__":
    sys.exit(main())
