"""Commands of the pages' shell blocks. Stand-ins for what needs a network or would run the tests again check arguments.

Each takes the arguments and returns the exit status. fp8moe and torchrun's scripts run in processes of their own, where
there is no GPU forked from one that has imported PyTorch and transformers already.
"""

import os
import pickle
import re
import runpy
import sys
import tomllib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.multiprocessing as mp

from tests.processes import HOST, WITHOUT_MULTICAST, meeting_place, start_processes

ROOT = Path(__file__).parent.parent
OUTPUT = ".output"  # in the working directory: what processes have written
FOUND = ".found"  # and the kernels that warmup finds
FEW = 4


def fp8moe(arguments: list[str]) -> int:
    return _run(_fp8moe, arguments)


def _fp8moe(arguments: list[str]) -> int:
    from fp8moe.cli import _parser, main
    from fp8moe.commands import warmup

    if arguments[0] == "serve":  # it would run for ever; tests/serving/test_ranks.py runs it by torchrun, too
        _parser().parse_args(arguments)
        return 0
    if not torch.cuda.is_available():  # to import PyTorch in each process and to compile all kernels takes minutes
        kernels = warmup._kernels
        warmup._kernels = lambda *given: _once(lambda: sorted(kernels(*given), key=str)[:FEW])
        warmup.get_context = lambda _: mp.get_context("fork")
        warmup.in_own_process = _forked
    return main(arguments)


def _once(find: Callable) -> list:
    """What is found, by the first command of a page: the others ask for the same."""
    found = Path(FOUND)
    if not found.exists():
        found.write_bytes(pickle.dumps(find()))
    return pickle.loads(found.read_bytes())


def _forked(work, *arguments):
    with ProcessPoolExecutor(1, mp_context=mp.get_context("fork")) as pool:
        return pool.submit(work, *arguments).result()


def torchrun(arguments: list[str]) -> int:
    """What the agent of torchrun tells its processes, without the agent."""
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(arguments)
    if options.module and options.training_script == "fp8moe":
        return fp8moe(options.training_script_args)
    assert options.standalone and not options.training_script_args, arguments
    store = meeting_place()
    return _run(_script, options.training_script, store.port, count=int(options.nproc_per_node))


def _script(script: str, port: int) -> int:
    os.environ |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    runpy.run_path(script, run_name="__main__")
    return 0


def _run(work, *arguments, count: int = 1) -> int:
    visible = None if torch.cuda.device_count() > 1 else ""  # two processes cannot share a GPU
    try:
        given = (Path.cwd(), visible, count, work, arguments)
        start_processes(_begin, given, count, fork=not torch.cuda.is_available())
    except mp.ProcessExitedException as error:
        return error.exit_code
    return 0


def _begin(rank: int, directory: Path, visible: str | None, count: int, work, arguments: tuple) -> None:
    os.chdir(directory)
    os.environ |= WITHOUT_MULTICAST | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    torch.set_num_threads(1)
    output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    status = work(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter does not end: a thread of gloo that frees a tensor meanwhile may abort the process
    # (pytorch/pytorch#179291).
    os._exit(status)


def make(arguments: list[str]) -> int:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1].split()
    return 0 if arguments and set(arguments) <= set(targets) else 2


def pip(arguments: list[str]) -> int:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    command, *requirements = (argument for argument in arguments if not argument.startswith("--"))
    for requirement in requirements:
        ours = re.fullmatch(r"(?:\.|fp8moe)(?:\[(\w+)\])?", requirement)
        if not (ours and (ours[1] is None or ours[1] in extras) or re.fullmatch(r"[\w-]+==[\d.]+", requirement)):
            return 2
    return 0 if command == "install" and requirements else 2


COMMANDS = {command.__name__: command for command in (fp8moe, make, pip, torchrun)}
