"""`fp8moe inspect`: describe an FP8 checkpoint and list its problems."""

import argparse
import json
from dataclasses import asdict

from fp8moe.checkpoints import inspect_checkpoint


def run(options: argparse.Namespace) -> int:
    report = inspect_checkpoint(options.directory)
    print(
        json.dumps(asdict(report) | {"format": report.format._asdict()}, default=str, indent=2)
        if options.json
        else report
    )
    return 1 if report.problems else 0
