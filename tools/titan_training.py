"""`python -m tools.titan_training`: integrations/torchtitan in whole runs; the result is validation/torchtitan.json.

Creates an environment and installs into it PyTorch, torchtitan 0.3.0, and fp8moe as described in the README of
integrations/torchtitan. In this environment `examples.titan.debug_moe` is trained for 20 steps on the CPU, in bfloat16
and in FP8: in one process; in two processes, sharded by FSDP2, with expert and with tensor parallelism; compiled; and
resumed from a checkpoint.
Fails if an FP8 loss differs from the bfloat16 loss by more than BAR, if a loss falls by less than FALL, or if linear
layers under tensor parallelism are not refused. Takes a quarter of an hour on two cores, and 3 GB.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import ROOT
from tools.environments import commands_of, make, parser_of, pip, store, versions

FILE = ROOT / "validation/torchtitan.json"
README = ROOT / "integrations/torchtitan/README.md"
TORCHTITAN = ("torchtitan==0.3.0", "triton")  # torchtitan imports triton, which is not part of PyTorch's CPU build
PACKAGES = ("fp8moe", "fp8moe-torchtitan", "torchtitan", "torch")
BAR, FALL, STEPS = 0.005, 0.1, 20
EXPERTS, LINEARS = "fp8moe_torchtitan.experts", "fp8moe_torchtitan.linears"
TENSOR_PARALLEL = ("--parallelism.tensor_parallel_degree", "2", "--parallelism.data_parallel_shard_degree", "1")
# Maps the name of a run to its number of processes, its options, and the modules that it runs in FP8.
RUNS = {
    "one process": (1, (), (EXPERTS, LINEARS)),
    "FSDP2": (2, ("--parallelism.data_parallel_shard_degree", "2"), (EXPERTS, LINEARS)),
    "expert parallel": (2, ("--parallelism.expert_parallel_degree", "2"), (EXPERTS, LINEARS)),
    "tensor parallel, experts": (2, TENSOR_PARALLEL, (EXPERTS,)),
    "compiled": (1, ("--compile.enable",), (EXPERTS, LINEARS)),
}
LOSS = re.compile(r"step:\s*(\d+).*?loss:\s*([\d.]+)")


def install(environment: Path, torch_requirement: str) -> None:
    """Create an environment; install into it torchtitan, and fp8moe as the README of integrations/torchtitan says."""
    make(environment, torch_requirement)
    pip(environment, "install", *TORCHTITAN)
    pip(environment, *commands_of(README)[0][1:])


class Runs:
    """Runs of `examples.titan.debug_moe` in one environment."""

    def __init__(self, python: Path):
        self.python = python

    def run(self, processes: int, options: Sequence[str], in_fp8: Sequence[str] = ()) -> tuple[list[float], str]:
        """Run the example; return its losses and all its output."""
        program = ["-m", "examples.titan.debug_moe", "--training.steps", str(STEPS), *options]
        if in_fp8:
            program += ["--override.imports", *in_fp8]
        several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [self.python, *(several if processes > 1 else ()), *program]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        printed = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
        return [float(loss) for loss in dict(LOSS.findall(printed)).values()], printed

    def losses(self, *arguments) -> list[float]:
        found, printed = self.run(*arguments)
        if not found:
            raise RuntimeError(f"no losses of {arguments}:\n{printed[-4000:]}")
        return found

    def resumed(self) -> list[dict]:
        """Resume an FP8 run at step 10, in FP8 and in bfloat16; return a comparison of losses for each.

        In FP8 the losses must be the same as without resuming.
        """
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = ("--dump_folder", directory, "--checkpoint.enable", "--checkpoint.interval", "10")
            whole = self.losses(1, checkpoint, (EXPERTS, LINEARS))[10:]
            again = (*checkpoint, "--checkpoint.load_step", "10")
            in_fp8, in_bfloat16 = (self.losses(1, again, chosen) for chosen in ((EXPERTS, LINEARS), ()))
        same = compare("FP8 resumed in FP8", whole, in_fp8)
        return [same | {"passed": in_fp8 == whole}, compare("FP8 resumed in bfloat16", in_bfloat16, whole)]

    def refused(self) -> dict:
        _, printed = self.run(2, TENSOR_PARALLEL, (EXPERTS, LINEARS))
        message = re.search(r"NotImplementedError: (fp8moe_torchtitan\.linears: .*)", printed)
        return {"name": "linears under tensor parallelism", "refused": message and message[1], "passed": bool(message)}


def compare(name: str, plain: Sequence[float], fp8: Sequence[float], **more: object) -> dict:
    apart = max(abs(one - other) / other for one, other in zip(fp8, plain, strict=True))
    falls = [1 - values[-1] / values[0] for values in (plain, fp8)]
    passed = apart <= BAR and (len(plain) < STEPS or min(falls) >= FALL)
    row = {"name": name, **more, "bfloat16": list(plain), "fp8": list(fp8), "apart": apart, "passed": passed}
    print(f"{name}: {fp8[0]} to {fp8[-1]} ({plain[-1]} in bfloat16), apart {apart:.2%}, passed {passed}", flush=True)
    return row


def main() -> int:
    args = parser_of("titan_training", FILE).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        environment = args.environment or Path(directory) / "environment"
        if not environment.exists():
            install(environment, args.torch)
        python = environment.absolute() / "bin/python"
        runs, rows = Runs(python), []
        for name, (processes, options, in_fp8) in RUNS.items():
            plain, fp8 = (runs.losses(processes, options, chosen) for chosen in ((), in_fp8))
            rows.append(compare(name, plain, fp8, processes=processes, in_fp8=list(in_fp8)))
        rows += [*runs.resumed(), runs.refused()]
        installed = versions(environment, PACKAGES)
    store(args.out, {"versions": installed, "bars": {"apart": BAR, "fall": FALL}, "rows": rows})
    return int(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
