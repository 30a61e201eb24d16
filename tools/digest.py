"""A digest of what the GPU runs: `python -m tools.digest` prints it, on any machine.

`--write FILE` stores what it is taken over as JSON, `--against FILE` lists what differs from such a file.

It is taken over the launches of the calls in `tools.variants`, as `fp8moe.runtime.record` notes them for an H200:
kernels, launch configurations, tensor maps, arguments, and the complete source of every kernel with the compiler's
options. So the stored results of a GPU run stay valid while names, comments or the Python around the launches change.
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

NUM_SMS = 132  # of an H100 or H200

# Comments and literals first: neither begins inside the other.
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
    """The tokens of CUDA C++ text, one a line; a preprocessor directive ends with an empty line."""
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
    """The same of a whole translation unit, in which files begin and end with #line directives: these do not count."""
    # Piece by piece, as units share most of their files.
    return "\n".join(filter(None, map(normalize_cuda, _LINE_DIRECTIVE.split(source))))


def options() -> list[str]:
    """The compiler's options."""
    from fp8moe.runtime import compilers
    from fp8moe.runtime.architectures import ARCHITECTURES

    return [*(known.flag for known in ARCHITECTURES), compilers.STD, *compilers.PTXAS_OPTIONS]


def source_hash(spec: "KernelSpec") -> str:
    """SHA-256 over the tokens of a kernel's translation unit."""
    from fp8moe.runtime import jit

    return hashlib.sha256(normalize_unit(jit.full_source(spec)).encode()).hexdigest()


def fingerprint(calls: Iterable[list[dict]], kernels: "Iterable[KernelSpec]") -> str:
    """SHA-256 over launches and the kernels that they name by index, as `fp8moe.runtime.record.Recorder` has them."""
    units = [[spec.name, source_hash(spec)] for spec in kernels]
    content = {"options": options(), "kernels": units, "calls": list(calls)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def content(calls: Iterable[list[dict]], kernels: "Iterable[KernelSpec]") -> dict:
    """What `fingerprint` is taken over, each launch once: calls are lists of places among the launches."""
    launches: dict[str, int] = {}
    numbered = [[launches.setdefault(json.dumps(one), len(launches)) for one in call] for call in calls]
    described = [{"name": spec.name, "constants": constants(spec), "source": source_hash(spec)} for spec in kernels]
    return {"options": options(), "kernels": described, "launches": [*map(json.loads, launches)], "calls": numbered}


def constants(spec: "KernelSpec") -> dict[str, str]:
    """The constants that a kernel is compiled with."""
    return {name: str(value) for name, value in spec.defines} | dict(
        re.findall(r"constexpr int (\w+) = (-?\d+);", spec.prelude)
    )


def differences(old: dict, new: dict) -> Iterator[str]:
    """What differs between two results of `content`: a line for each kind of change, and how many calls have it."""
    if old["options"] != new["options"]:
        yield f"options: {old['options']}, now {new['options']}"
    if len(old["calls"]) != len(new["calls"]):
        yield f"calls: {len(old['calls'])}, now {len(new['calls'])}"
    found: Counter[str] = Counter()
    for before, after in zip(old["calls"], new["calls"], strict=False):
        changes = _changed(_described(old, before), _described(new, after))
        if changes:
            found[changes] += 1
    for changes, count in found.most_common():
        yield f"{count} calls: {changes}"


def _described(content: dict, call: list[int]) -> list[dict]:
    """The launches of a call, each with what its kernel is in place of the number."""
    launches = [content["launches"][place] for place in call]
    return [one | {"kernel": content["kernels"][one["kernel"]]} for one in launches]


def _changed(before: list[dict], after: list[dict]) -> str:
    names = [[one["kernel"]["name"] for one in call] for call in (before, after)]
    if names[0] != names[1]:
        return f"launches {', '.join(names[0])}, now {', '.join(names[1])}"
    found = []
    for old, new in zip(before, after, strict=True):
        kernel, now = old["kernel"], new["kernel"]
        parts = {key for key in old if key != "kernel" and old[key] != new[key]}
        values = kernel["constants"], now["constants"]
        moved = [
            f"{name} {values[0].get(name)} -> {values[1].get(name)}"
            for name in sorted(values[0].keys() | values[1].keys())
            if values[0].get(name) != values[1].get(name)
        ]
        if kernel["source"] != now["source"] and not moved:
            moved = ["its source"]
        if parts or moved:
            found.append(f"{kernel['name']}: {', '.join([*moved, *sorted(parts)])}")
    return "; ".join(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the digest; with `--against` what differs, and returns 1 if anything does."""
    parser = argparse.ArgumentParser(prog="python -m tools.digest", description="what the GPU runs, as one hash")
    parser.add_argument("--write", metavar="FILE", help="store what it is taken over")
    parser.add_argument("--against", metavar="FILE", help="list what differs from a stored file")
    args = parser.parse_args(argv)

    from fp8moe.runtime.record import Recorder
    from tools.variants import Untouched, all_calls

    recorder = Recorder(NUM_SMS)
    calls = [recorder.record(call) for call in all_calls(Untouched())]
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
