"""What GraphDecoder launches, by `fp8moe.runtime.record`, and what warmup finds, each in a process of its own."""

import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress

import torch

from tests.processes import forkserver

SMS = 132


def in_processes(*calls):
    """What each call (function, *arguments) returns, each in a process of its own that ends then."""
    pools = [ProcessPoolExecutor(1, mp_context=forkserver) for _ in calls]
    futures = [pool.submit(*call) for pool, call in zip(pools, calls, strict=True)]
    try:
        return [future.result() for future in futures]
    finally:
        for pool in pools:
            pool.shutdown()


def needed(source, batch_sizes, tokens, *dtypes):
    """The kernels and families that `fp8moe warmup` finds for a configuration. dtypes: of the cache and the output."""
    from fp8moe.commands.warmup import _record

    return _record(source, batch_sizes, tokens, SMS, ("stored", *dtypes))


def needed_for(source, lengths):
    """The kernels, but for GEMMs, that prompts of these lengths launch."""
    from fp8moe.decode import required_kernels as module

    module.lengths = lambda tokens: lengths
    kernels, _ = needed(source, [1], max(lengths))
    return {spec for spec in kernels if spec.source != "gemm.cu"}


def launched_by_modules(shapes, counts, options, batch_invariant):
    """The kernels that modules of these shapes launch for these numbers of tokens."""
    import fp8moe
    from fp8moe.layers import warmup as module

    module.lengths = lambda tokens: counts
    with fp8moe.batch_invariant(batch_invariant):
        return module._record(shapes, max(counts), options, SMS)[0]


def end(spec):
    """In place of `jit.cubin`: the process is killed."""
    os._exit(1)


def launched(directory, batch_sizes, lengths, cache_dtype=None, output_dtype=None):
    """The kernels that a decoder of an FP8 checkpoint launches: its constructor, and prompts of these lengths.

    PyTorch's kernels of a GPU do nothing.
    """
    torch.set_num_threads(1)
    from fp8moe.decode import GraphDecoder, attention, decoder
    from fp8moe.decode.probe import check_step
    from fp8moe.decode.step import Capabilities
    from fp8moe.hf import load_model
    from fp8moe.hf.fused import find_fused
    from fp8moe.kernels.decoder_ops import router
    from fp8moe.runtime.record import Recorder

    model = load_model(directory)
    recorder = Recorder(SMS)
    attention._flash_attention = lambda query, *_, **sizes: (query, query.new_zeros(query.shape[1::-1]).float())
    router._gemm = lambda x, weight: x.float() @ weight.float().t()

    def capabilities(self, fuse, cache_dtype):
        fused = find_fused(model)
        own = hasattr(model.config, "kv_lora_rank")
        self.attention = model.config._attn_implementation if own else "flash"
        flash = decoder.FLASH if self.attention == "flash" else None
        found = Capabilities(flash, ragged=True, chunked_prefill=True, fused=fused, cache_dtype=cache_dtype)
        with suppress(ValueError):  # the kernels do nothing, so the logits are wrong
            check_step(model, self.device, False, found)
        return found

    GraphDecoder._find_capabilities = capabilities
    dtypes = {"cache_dtype": cache_dtype, "output_dtype": output_dtype}
    graph = GraphDecoder(model, batch_sizes=batch_sizes, max_length=max(lengths) + 2, **dtypes)
    for length in lengths:
        for rows in (1, max(batch_sizes)) if length <= 64 else (1,):
            tokens = torch.ones(rows, length, dtype=torch.int64)
            graph.generate(tokens, max_new_tokens=2, pad_token_id=0, eos_token_id=())
    return set(recorder.kernels)
