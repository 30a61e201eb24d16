"""`python -m tools.sglang_hooks`: the tests of SGLang in empty environments; the result is validation/sglang.json.

Each environment has one supported version of SGLang, pinned by its hash and without the CUDA packages that it requires,
and the packages that SGLang's modules for experts and linear layers import. fp8moe is installed as the README of
integrations/sglang says. No server is run, because SGLang's CPU kernels need AMX. Takes about ten minutes and 3 GB.
"""

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

from benchmarks.report import ROOT
from tools.environments import PYTHON, commands_of, make, parser_of, pip, store

FILE = ROOT / "validation" / "sglang.json"
README = ROOT / "integrations/sglang/README.md"
# Maps a version of SGLang to the hash of its wheel for Python 3.11, and to the version of transformers that it pins.
VERSIONS = {
    "0.5.13": ("9d26266ab7e99165098f9e173f4a5a0ef6a0b64a6f30ef0b5ee859eead37e75a", "5.8.1"),
    "0.5.23": ("00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937", "5.19.0"),
}
IMPORTED = (
    *("orjson", "gguf", "psutil", "pybase64", "triton", "pillow", "starlette", "msgspec", "pyzmq", "aiohttp", "dill"),
    *("apache-tvm-ffi", "sentencepiece", "compressed-tensors", "einops", "openai", "partial-json-parser", "requests"),
    *("pytest", "hypothesis"),
)


def main() -> None:
    """Run the tests with each version of SGLang, and write the file."""
    args = parser_of("sglang_hooks", FILE, reuses=False).parse_args()
    rows = {}
    for version, (digest, transformers) in VERSIONS.items():
        with tempfile.TemporaryDirectory() as directory:
            environment = Path(directory) / "environment"
            make(environment, args.torch)
            (Path(directory) / "sglang.txt").write_text(f"sglang=={version} --hash=sha256:{digest}")
            pip(environment, "install", f"transformers=={transformers}", *IMPORTED)
            pip(environment, "install", "--no-deps", "--require-hashes", "-r", f"{directory}/sglang.txt")
            pip(environment, *commands_of(README)[0][1:])
            rows[version] = run_tests(environment)
    store(args.out, {"python": PYTHON, "torch": args.torch, "tests": rows})


def run_tests(environment: Path) -> dict[str, int]:
    """Run the tests; return how many passed. Raises RuntimeError with their output if any failed or was skipped."""
    tests = "tests/guests/test_sglang.py"
    command = [environment / "bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    found = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    print(json.dumps(found), flush=True)
    if done.returncode or set(found) != {"passed"}:
        raise RuntimeError(f"{found}: {done.stdout[-4000:]}{done.stderr[-1000:]}")
    return found


if __name__ == "__main__":
    main()
