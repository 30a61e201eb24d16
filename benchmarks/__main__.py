"""All benchmarks by name: `python -m benchmarks NAME [--out DIR] [options]`; `NAME --help` lists the options."""

import argparse
import sys
from collections.abc import Sequence

from benchmarks import decode, host, load, lora, training
from benchmarks.report import Benchmark
from benchmarks.routines import kernels, policy, refit, serving, tiles, warmup

BENCHMARKS: dict[str, Benchmark] = {
    one.name: one
    for one in (
        *(kernels.QUANTIZE, kernels.TRANSPOSE, kernels.MQA, kernels.ATTENTION, kernels.LATENT),
        kernels.TOP_K_CHOICE,
        kernels.SPARSE_LATENT,
        kernels.BATCH_INVARIANCE,
        tiles.CHOICE,
        *(host.HOST, training.TRAINING, lora.LORA, decode.DECODE, decode.LATENT_DECODE, load.LOAD),
        *(serving.REQUESTS, serving.SERVE, refit.REFIT, policy.POLICY, warmup.WARMUP),
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark named by the first argument, with the arguments that follow as its options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition(":")[0])
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("options", nargs=argparse.REMAINDER, help="NAME --help lists them")
    args = parser.parse_args(argv)
    return BENCHMARKS[args.name].main(args.options)


if __name__ == "__main__":
    sys.exit(main())
