"""torchtitan's debug MoE in bfloat16 against FP8, on CPUs: `python -m tools.titan_training [OUT.json] [NAME ...]`.

It runs `examples.titan.debug_moe` with torchtitan 0.3.0, 20 steps each, in one process and in two, sharded by FSDP2,
with expert and with tensor parallelism, compiled, and resumed from a checkpoint. The losses are in
validation/torchtitan.json. One in FP8 that is further from that in bfloat16 than BAR fails it, as do one that falls by
less than FALL, and linears under tensor parallelism that are not refused. Ten minutes on two cores.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BAR, FALL, STEPS = 0.005, 0.1, 20
EXPERTS, LINEARS = "fp8moe_torchtitan.experts", "fp8moe_torchtitan.linears"
TENSOR_PARALLEL = ("--parallelism.tensor_parallel_degree", "2", "--parallelism.data_parallel_shard_degree", "1")
# Processes, options, and what is in FP8.
RUNS = {
    "one process": (1, (), (EXPERTS, LINEARS)),
    "FSDP2": (2, ("--parallelism.data_parallel_shard_degree", "2"), (EXPERTS, LINEARS)),
    "expert parallel": (2, ("--parallelism.expert_parallel_degree", "2"), (EXPERTS, LINEARS)),
    "tensor parallel, experts": (2, TENSOR_PARALLEL, (EXPERTS,)),
    "compiled": (1, ("--compile.enable",), (EXPERTS, LINEARS)),
}
LOSS = re.compile(r"step:\s*(\d+).*?loss:\s*([\d.]+)")


def run(processes: int, options: Sequence[str], in_fp8: Sequence[str] = ()) -> tuple[list[float], str]:
    """The losses of a run, and all that it printed."""
    program = ["-m", "examples.titan.debug_moe", "--training.steps", str(STEPS), *options]
    if in_fp8:
        program += ["--override.imports", *in_fp8]
    launch = [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    paths = [str(ROOT), str(ROOT / "integrations/torchtitan"), os.environ.get("PYTHONPATH", "")]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *launch, *program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    printed = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
    return list(dict(LOSS.findall(printed)).values()), printed


def losses(*arguments) -> list[float]:
    found, printed = run(*arguments)
    if not found:
        raise RuntimeError(f"no losses of {arguments}:\n{printed[-4000:]}")
    return [float(value) for value in found]


def compare(name: str, plain: Sequence[float], fp8: Sequence[float], **more: object) -> dict:
    apart = max(abs(one - other) / other for one, other in zip(fp8, plain, strict=True))
    falls = [1 - values[-1] / values[0] for values in (plain, fp8)]
    passed = apart <= BAR and (len(plain) < STEPS or min(falls) >= FALL)
    row = {"name": name, **more, "bfloat16": list(plain), "fp8": list(fp8), "apart": apart, "passed": passed}
    print(f"{name}: {fp8[0]} to {fp8[-1]} ({plain[-1]} in bfloat16), apart {apart:.2%}, passed {passed}", flush=True)
    return row


def resumed() -> list[dict]:
    """FP8 from step 10 of a run in FP8, which must have the same losses, and in bfloat16."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = ("--dump_folder", directory, "--checkpoint.enable", "--checkpoint.interval", "10")
        whole = losses(1, checkpoint, (EXPERTS, LINEARS))
        again = (*checkpoint, "--checkpoint.load_step", "10")
        rest = [losses(1, again, in_fp8) for in_fp8 in ((EXPERTS, LINEARS), ())]
    rows = [compare("FP8 resumed in FP8", whole[10:], rest[0]), compare("FP8 resumed in bfloat16", rest[1], whole[10:])]
    rows[0]["passed"] = rest[0] == whole[10:]
    return rows


def refused() -> dict:
    _, printed = run(2, TENSOR_PARALLEL, (EXPERTS, LINEARS))
    message = re.search(r"NotImplementedError: (fp8moe_torchtitan\.linears: .*)", printed)
    return {"name": "linears under tensor parallelism", "refused": message and message[1], "passed": bool(message)}


def main() -> int:
    out, *names = sys.argv[1:] or [ROOT / "validation/torchtitan.json"]
    rows = []
    for name, (processes, options, in_fp8) in RUNS.items():
        if not names or name in names:
            plain, fp8 = (losses(processes, options, chosen) for chosen in ((), in_fp8))
            rows.append(compare(name, plain, fp8, processes=processes, in_fp8=list(in_fp8)))
    if not names or "resume" in names:
        rows += [*resumed(), refused()]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "torchtitan")}
    result = {"versions": versions, "bars": {"apart": BAR, "fall": FALL}, "rows": rows}
    Path(out).write_text(json.dumps(result, indent=1) + "\n")
    return int(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
