"""A model that is spread over several processes: the first serves it, the others run every forward pass with it."""

import os
import signal
from datetime import timedelta
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from fp8moe.decode import GraphDecoder
from fp8moe.decode.request import Request, parse_one
from fp8moe.decode.scheduler import Scheduler

_IDLE = timedelta(days=365)
"""How long a process waits for the next request."""


class Begun(NamedTuple):
    """A request that begins.

    number: tells it from other requests. arguments, config: those of `parse_one`, without a tokenizer, and with a seed
    if the request samples. stepwise: see `Request`.
    """

    number: int
    arguments: dict[str, Any]
    config: Any
    stepwise: bool


class Orders(NamedTuple):
    """What to do before a forward pass: requests that begin, and numbers of requests that were cancelled.

    stop: no pass follows, nor will any other.
    """

    begun: list[Begun]
    cancelled: list[int]
    stop: bool = False


class Ranks:
    """The processes of a torchrun, each with a device of its own.

    `GraphDecoder` takes the same steps in all of them if requests begin and end before the same forward passes. So the
    first process tells the others, before each pass, which have begun and been cancelled. Nothing else is sent.

    device: this process's device. size: the number of processes.
    """

    def __init__(self, device: str):
        self.device = device
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self._group = dist.new_group(backend="gloo", timeout=_IDLE)

    @classmethod
    def join(cls, device: str | None) -> Self | None:
        """Join the processes that torchrun has started; return None if this process is the only one.

        device: "cpu", "cuda", or None for GPUs if there are any. Raises ValueError for another, or for too few GPUs.
        """
        if not (dist.is_available() and dist.is_torchelastic_launched()) or os.environ["WORLD_SIZE"] == "1":
            return None
        gpus, local = torch.cuda.device_count() if torch.cuda.is_available() else 0, int(os.environ["LOCAL_RANK"])
        kind = device or ("cuda" if gpus else "cpu")
        if kind not in ("cpu", "cuda"):
            raise ValueError(
                f"--device {device}: each process of torchrun takes a GPU of its own: leave out the number"
            )
        if kind == "cuda" and gpus <= local:
            raise ValueError(f"torchrun has started process {local} on a machine of {gpus or 'no'} GPUs")
        if kind == "cuda":
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        return cls("cpu" if kind == "cpu" else f"cuda:{local}")

    @property
    def serves(self) -> bool:
        """Whether this process is the one that clients come to."""
        return self.rank == 0

    def tell(self, orders: Orders) -> None:
        """Send orders to all other processes. For the first process."""
        dist.broadcast_object_list([orders], src=0, group=self._group)

    def follow(self, decoder: GraphDecoder, tokenizer: Any) -> None:
        """Run the forward passes that the first process runs, until it stops; then leave. For the others.

        decoder, tokenizer: equal to those of the first process. Raises RuntimeError if that process ends otherwise.
        """
        for name in (signal.SIGINT, signal.SIGTERM):  # torchrun sends them to all, and the first process stops in order
            signal.signal(name, signal.SIG_IGN)
        self._follow(decoder, tokenizer)
        self.leave()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _follow(self, decoder: GraphDecoder, tokenizer: Any) -> None:
        while not (orders := self._told()).stop:
            with decoder.turn(), decoder.on_device():
                scheduler, requests = Scheduler(decoder), dict[int, Request]()
                try:
                    while True:
                        for number, arguments, config, stepwise in orders.begun:
                            arguments["tokenizer"] = tokenizer
                            request = parse_one(decoder, arguments, number, config, stops_in_answer=True)
                            request.stepwise = stepwise
                            requests[number] = request
                            scheduler.add(request)
                        for number in orders.cancelled:
                            if number in requests:  # otherwise it has ended
                                requests[number].cancelled = True
                        for news in scheduler.advance():
                            if news.last:
                                del requests[news.key]
                        if not scheduler.busy:
                            break
                        if (orders := self._told()).stop:
                            return
                finally:
                    scheduler.close()

    def _told(self) -> Orders:
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=0, group=self._group)
        return received[0]

    def leave(self) -> None:
        """Wait until the others end, too: a process that exits before may abort them (pytorch/pytorch#179291)."""
        dist.barrier(self._group)
        dist.destroy_process_group()
