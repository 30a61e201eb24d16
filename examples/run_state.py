"""Checkpoints of a run by torch.distributed.checkpoint: saved by any number of processes, loaded by any other."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

# A warning of torch.distributed.checkpoint in a single process.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


def save(directory: Path, step: int, progress: dict[str, Any], model: nn.Module, optimizer: Any) -> None:
    """Save to directory/step-N; earlier checkpoints are deleted when it is complete."""
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    path = directory / f"step-{step:08}"
    dcp.save({**progress, **states}, checkpoint_id=path)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for other in directory.iterdir():
            if other != path:
                shutil.rmtree(other)


def latest(directory: Path) -> Path | None:
    """Return the newest complete checkpoint: its .metadata is written last."""
    return max((path.parent for path in directory.glob("step-*/.metadata")), default=None)


def read(path: Path, names: dict[str, Any]) -> dict[str, Any]:
    """Load the progress that `save` stored under these names; tensors are read into the given ones."""
    dcp.load(names, checkpoint_id=path)
    return names


def load(path: Path, model: nn.Module, optimizer: Any) -> None:
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    read(path, states)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
