"""The package cuda.core, imported by one thread at a time."""

import threading
from types import ModuleType

_lock = threading.Lock()


def cuda_core() -> ModuleType:
    """cuda.core with all that is in it: while a thread imports it first, others find it without its classes (1.2)."""
    with _lock:
        import cuda.core

        return cuda.core
