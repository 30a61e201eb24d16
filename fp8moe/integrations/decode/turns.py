"""Whose turn it is: threads that share a decoder wait for each other."""

import threading


class Turns:
    """A lock. Its holder may be a suspended generator, so asking for it twice in a thread is an error and no wait."""

    def __init__(self):
        self._lock = threading.Lock()
        self._holder: int | None = None

    def __enter__(self) -> None:
        if self._holder == threading.get_ident():
            raise RuntimeError(
                "the decoder is at work: this thread has a stream or run of it that has not ended; finish it or close "
                "it first"
            )
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *exception: object) -> None:
        self._holder = None
        self._lock.release()
