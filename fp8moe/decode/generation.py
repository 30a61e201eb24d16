"""One call of GraphDecoder under way: its prompts in the rows of a step."""

from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor

from fp8moe.decode.arguments import Call, Tail
from fp8moe.decode.stats import Record, Records
from fp8moe.decode.step import Step
from fp8moe.decode.transfers import Readback

STEPS_PER_END_CHECK = 8
"""Steps between two checks of whether every sequence has ended. A check does not stall the GPU: see `Readback`."""


class NaNLogits(ValueError):
    """The logits of some sequences, `rows`, became NaN: these end before that token, the others were finished.

    tokens, logprobs: what the call would have returned; logprobs is None where they were not asked for.
    """

    def __init__(self, rows: list[int], tokens: Tensor, logprobs: Tensor | None):
        super().__init__(
            f"model: its logits became NaN in sequences {rows}, which end there; this error has the tokens of all "
            "sequences as its attribute tokens"
        )
        self.rows = rows
        self.tokens = tokens
        self.logprobs = logprobs


class Generation:
    """A context in which a step runs until every sequence of a call has ended.

    lengths: new tokens of each sequence, as far as they are known on the host.
    """

    def __init__(self, step: Step, call: Call, records: Records):
        self.step = step
        self.call = call
        self.batch = len(call.tokens)
        self.pad = 0 if call.pad is None else call.pad
        self.lengths = [0] * self.batch
        self._stopped: set[int] = set()  # rows with a stop string
        self._records = records
        self._record = Record(step.tokens.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if any(self.lengths):
            self._record.end(self.lengths)
            self._records.add(self._record)
        if self.call.streamer is not None:
            self.call.streamer.end()  # after an error too: another thread may wait for it

    def run(self) -> None:
        """Decode, checking on a GPU now and then, on a CPU after each step, whether every sequence has ended."""
        self._begin()
        all_ended = Readback(self.step.tokens.device)
        steps_per_check = STEPS_PER_END_CHECK if all_ended.lag else 1
        for number in range(1, self.call.new_tokens):
            self._advance()
            if number % steps_per_check == 0:
                all_ended.push(self.step.finished.all())
                if len(all_ended) > all_ended.lag and all_ended.pop()[1]:
                    break
        self.lengths = self.step.count[: self.batch].tolist()
        self.step.check_weights()

    def follow(self) -> Iterator[Tensor]:
        """Decode and yield the tokens (B,) of each step, on the prompts' device, padded after the end of a sequence.

        While a step is read here, the GPU is at work on the next one.
        """
        if self.call.streamer is not None and not self.call.streamer_has_prompts:
            self.call.streamer.put(self.call.given.cpu())
        readback = Readback(self.step.tokens.device)
        alive = dict(enumerate(self.call.tails()))  # rows whose sequences go on
        self._begin()
        for number in range(self.call.new_tokens):
            if number:
                self._advance()
            readback.push(torch.stack([self.step.tokens[:, 0], self.step.finished, self.step.failed])[:, : self.batch])
            if len(readback) > readback.lag:
                yield from self._read(readback, alive)
            if not alive:
                return
        while alive and len(readback):
            yield from self._read(readback, alive)

    def result(self) -> tuple[Tensor, Tensor]:
        """The new tokens (B, n) and their logprobs, up to the end of the sequence that ended last.

        Raises NaNLogits, with the prompts before the tokens.
        """
        device, given, longest = self.step.tokens.device, self.call.given, max(self.lengths)
        ended = torch.arange(longest, device=device) >= torch.tensor(self.lengths, device=device)[:, None]
        new = self.step.generated[: self.batch, :longest].masked_fill(ended, self.pad).to(given.device)
        logprobs = self.step.logprobs[: self.batch, :longest].masked_fill(ended, 0).to(given.device)
        tokens = torch.cat([given.long(), new], dim=1)
        failed = self.step.failed[: self.batch].nonzero()[:, 0].tolist()
        failed = [row for row in failed if row not in self._stopped]  # NaN in the step after its end is no matter
        if failed:
            raise NaNLogits(failed, tokens, logprobs if self.call.return_logprobs else None)
        return tokens, logprobs

    def _begin(self) -> None:
        """Read the prompts and choose the first token of each sequence."""
        call = self.call
        tokens, mask = call.tokens, call.mask
        if call.prefix is None:
            tokens, mask = self.step.fit(tokens, mask, self.step.mask.shape[1] - call.new_tokens)
        self.step.start(self.batch, tokens.shape[1], mask, call.ends, self.pad, call.samplings)
        self.step.accept(self.step.prefill(tokens, mask, call.prefix))
        self._record.first_token()

    def _advance(self) -> None:
        self.step.replay()
        self._record.steps += 1

    def _read(self, readback: Readback, alive: dict[int, Tail | None]) -> Iterator[Tensor]:
        """Yield the next step's tokens, if any sequence got one; those that end with it are taken from `alive`."""
        device, host = readback.pop()
        self.step.check_weights()
        tokens, finished, failed = host.tolist()
        for row in range(self.batch):
            if row not in alive or failed[row]:
                if tokens[row] != self.pad:  # when a stop string was found the GPU had begun this step
                    host[0, row] = device[0, row] = self.pad
                continue
            self.lengths[row] += 1
            tail = alive[row]
            if tail is not None and tail.ends_with(tokens[row]):
                self.step.finished[row].fill_(True)
                finished[row] = True
                self._stopped.add(row)
        some_got_one = not all(failed[row] for row in alive)
        for row in [row for row in alive if finished[row]]:
            del alive[row]
        if some_got_one:
            if self.call.streamer is not None:
                self.call.streamer.put(host[0])
            yield host[0] if self.call.given.device.type == "cpu" else device[0].to(self.call.given.device)
