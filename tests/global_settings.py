"""PyTorch's global settings, changed for a while."""

from contextlib import contextmanager

import torch


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def matmul_precision(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def default_device(device):
    """For this thread; tensors on meta have no values, and on cuda:0 none can be made where there is no GPU."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


SETTINGS = {
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "default float64": lambda: default_dtype(torch.float64),
    "default device meta": lambda: default_device("meta"),
    "default device cuda": lambda: default_device("cuda:0"),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
}
