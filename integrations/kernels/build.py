"""`python integrations/kernels/build.py OUT` builds the universal kernel in OUT/build/torch-universal."""

import base64
import hashlib
import json
import sys
from pathlib import Path

SOURCE = Path(__file__).parent / "universal"


def build(out: Path) -> None:
    """Copy the Python files of the kernel, and write the metadata that `kernels` reads beside them."""
    variant = out / "build/torch-universal"
    variant.mkdir(parents=True, exist_ok=True)
    files = {path.name: path.read_bytes() for path in sorted(SOURCE.glob("*.py"))}
    for name, content in files.items():
        (variant / name).write_bytes(content)
    metadata = {
        "name": "fp8moe",
        # the name of the module: kernels of different content may be loaded in one process
        "id": f"_fp8moe_{hashlib.sha256(b''.join(files.values())).hexdigest()[:7]}",
        "version": 0,
        "license": "Apache-2.0",
        "python-depends": [],  # names of a list that `kernels` has, which fp8moe is not in
        "backend": {"type": "cuda", "archs": ["9.0"]},  # no type stands for all; local directories load on a CPU, too
        "digest": {
            "algorithm": "sha256",
            "files": {
                name: base64.b64encode(hashlib.sha256(content).digest()).decode() for name, content in files.items()
            },
        },
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} OUT")
    build(Path(sys.argv[1]))
