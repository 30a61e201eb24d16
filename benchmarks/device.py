"""The GPU that a benchmark runs on."""

import torch


def require_hopper() -> str:
    """The name of the current GPU; SystemExit with one sentence if there is none or it is not sm_90."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a Hopper GPU and PyTorch sees no GPU; run it on a machine that has one")
    name = torch.cuda.get_device_name()
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        raise SystemExit(f"this benchmark needs a Hopper (sm_90) GPU; {name} is sm_{capability[0]}{capability[1]}")
    return name
