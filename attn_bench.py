"""Attention with a fixed order of sums: errors, equal bits, and its time beside the plain decode kernel and PyTorch's attention.

Run in a checkout of branch attn, with PYTHONPATH set to it. Sections go on after one that fails.
"""
import sys, time, traceback
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F

import fp8moe
from benchmarks.timing import measure_in_turn
from fp8moe.kernels.decoder_ops.decode_attention import AttentionHeads, FixedSplitHeads, StaticCache, decode_attention
from fp8moe.kernels.decoder_ops.decode_attention import kernel_spec as decode_spec
from fp8moe.kernels.decoder_ops.prompt_attention import FEW, kernel_spec, prompt_attention, tile_of
from fp8moe.kernels.decoder_ops.rotary import NewTokens
from fp8moe.runtime.jit import load_all
from tests import prompt_attention_cases as cases

BEGIN = time.time()
QWEN = (8, 4, 128)
KINDS = [(torch.bfloat16, QWEN), (torch.float16, (8, 4, 128)), (torch.bfloat16, (1, 2, 16)), (torch.bfloat16, (4, 1, 256)), (torch.bfloat16, (3, 1, 80))]
failed = []


def section(name):
    def run(work):
        begin = time.time()
        try:
            print(f"{name}: {work()}  [{time.time() - begin:.1f} s, {time.time() - BEGIN:.0f} s]", flush=True)
        except Exception as error:
            failed.append(name)
            lines = traceback.format_exc().strip().splitlines()
            print(f"{name}: FAILED {type(error).__name__} {str(error)[:300]}\n    " + "\n    ".join(lines[-7:]), flush=True)
    return run


@section("compile")
def _():
    specs = [decode_spec(torch.bfloat16, kind(8, 4, 128, 128, True), c) for kind in (AttentionHeads, FixedSplitHeads) for c in (1, 4, 8)]
    for dtype, (group, key_heads, size) in KINDS:
        specs += [decode_spec(dtype, FixedSplitHeads(group, key_heads, size, None, False), c) for c in (1, 2, 4, 8)]
        specs += [kernel_spec(dtype, size, group, tile) for tile in (tile_of(size, 10_000, 1000, 132), FEW)]
    load_all(dict.fromkeys(specs))
    return f"{len(set(specs))} kernels"


def made(lengths, heads=QWEN, dtype=torch.bfloat16, **how):
    return cases.moved(cases.make(lengths, heads, dtype, **how), "cuda")


for dtype, heads in KINDS:
    for window in (None, 50):
        @section(f"error {dtype} {heads} window {window}")
        def _():
            operands = cases.make([1, 70, 230], heads, dtype)
            exact, sums = cases.expected(*operands, window)
            out, logsumexp = cases.attend(*cases.moved(operands, "cuda"), window=window)
            error = (out.double().cpu() - exact).norm() / exact.norm()
            most = (out.double().cpu() - exact).abs().max()
            of_sums = (logsumexp.cpu() - sums).abs().max()
            assert error <= 1.5 * torch.finfo(dtype).eps and of_sums < 1e-4, (error, most, of_sums)
            return f"relative {error:.2e}, largest {most:.2e}, logsumexp {of_sums:.1e}"


def differences(one, other):
    bad = one.view(torch.int16 if one.itemsize == 2 else torch.int32) != other.view(torch.int16 if one.itemsize == 2 else torch.int32)
    return f"{int(bad.sum())} of {bad.numel()} differ, first at {bad.nonzero()[:1].tolist()}, by {(one.double() - other.double()).abs().max():.2e}"


POSITIONS = [0, 1, 14, 15, 16, 17, 31, 47, 63, 64, 65, 127, 128, 200, 255, 256, 300, 447, 511, 512, 513, 543, 600, 1000, 1023, 1024, 2047, 2048, 3000, 4094, 4095]
for dtype, heads in KINDS:
    @section(f"bits {dtype} {heads}: decoded against the prompt of 4096")
    def _():
        q, keys, values, sequences = made([4096], heads, dtype, spread=2)
        out, logsumexp = cases.attend(q, keys, values, sequences)
        for rows in (slice(None), slice(0, None, 2), slice(0, None, 8), slice(5, None, 31)):
            positions = POSITIONS[rows]
            found = cases.decoded(q, keys, values, positions)
            assert cases.same(found, out[positions]), (len(positions), differences(found, out[positions]))
        cases.assert_chunks_alike(q, keys, values, out, logsumexp, (1, 9, 64, 65, 513, 1024, 4096), 37)
        cases.assert_decoded_alike(q, keys, values, cases.attend(q, keys, values, sequences, window=70)[0], POSITIONS, 70)
        for _ in range(10):
            assert cases.same(cases.attend(q, keys, values, sequences)[0], out), "a repeat"
        return "equal"


for dtype, heads in KINDS[:3]:
    @section(f"bits {dtype} {heads}: unseen NaN, infinity and large values")
    def _():
        q, keys, values, sequences = made([330], heads, dtype)
        out, _ = cases.attend(q, keys, values, sequences)
        for bad in (torch.nan, torch.inf, torch.finfo(dtype).max):
            for place in (1, 16, 63, 130, 200, 329):
                for x in (keys, values):
                    changed = x.clone()
                    changed[place] = bad
                    found, _ = cases.attend(q, *(changed if x is y else y for y in (keys, values)), sequences)
                    assert cases.same(found[:place], out[:place]), (bad, place, x is keys, differences(found[:place], out[:place]))
        return "equal"


@section("bits: batches of up to 64, packed and alone")
def _():
    lengths = torch.randint(1, 600, (64,), generator=torch.Generator().manual_seed(5)).tolist()
    q, keys, values, sequences = made(lengths)
    out, _ = cases.attend(q, keys, values, sequences, most_queries=600)
    ends = sequences[0].tolist()
    for b in range(0, 64, 5):
        part = slice(ends[b], ends[b + 1])
        one, _ = cases.attend(q[part], keys[part], values[part], cases.sequences_of([lengths[b]]).cuda())
        assert cases.same(one, out[part]), (lengths[b], differences(one, out[part]))
    return "equal"


@section("backward")
def _():
    operands = cases.make([130, 1, 300], QWEN)
    grad = torch.randn(operands[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    def gradients(device):
        leaves = [x.detach().to(device).requires_grad_() for x in operands[:3]]
        cases.attend(*leaves, operands[3].to(device), most_queries=300)[0].backward(grad.to(device))
        return [leaf.grad.cpu() for leaf in leaves]
    found, again, exact = gradients("cuda"), gradients("cuda"), gradients("cpu")
    errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, exact)]
    assert max(errors) < 1e-2, errors
    return f"errors {['%.1e' % e for e in errors]}, equal again: {all(map(torch.equal, found, again))}"


def step_calls(batch, count, norm=True):
    group, key_heads, size = QWEN
    def normal(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    qkv = normal(batch, (group + 2) * key_heads * size)
    q, k, v = (x.view(batch, -1, size) for x in qkv.split([group * key_heads * size, key_heads * size, key_heads * size], 1))
    cache = [torch.empty(batch, key_heads, count + 32, size, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(2)]
    begin = torch.zeros(batch, device="cuda", dtype=torch.int64)
    cache = StaticCache(*cache, begin, begin + count - 1)
    table, weight = normal(1, size), normal(size)
    new = NewTokens(k, v, table, table, weight, weight, 1e-6)
    def plain():
        return decode_attention(q, cache, new=new)
    def fixed():
        with fp8moe.batch_invariant():
            return decode_attention(q, cache, new=new)
    return plain, fixed


for batch, count, repeats in ((1, 544, 40), (8, 544, 40), (64, 544, 40), (1, 8192, 30), (64, 8192, 15)):
    @section(f"step {batch} x {count} keys")
    def _():
        plain, fixed = step_calls(batch, count)
        error = (plain().float() - fixed().float()).norm() / plain().float().norm()
        times = [t.median_us for t in measure_in_turn([plain, fixed], repeats=repeats, rest=0.05)]
        bytes_read = batch * 4 * count * 512
        return f"plain {times[0]:.2f} us, fixed {times[1]:.2f} us, ratio {times[1] / times[0]:.3f}, {(times[1] - times[0]) * 48:+.0f} us a step of 48 layers; fixed {bytes_read / times[1] / 1e6:.2f} TB/s; they differ by {error:.1e}"


for batch, tokens, repeats in ((1, 1, 30), (1, 128, 30), (1, 512, 30), (16, 1024, 20), (4, 4096, 10)):
    @section(f"prompt {batch} x {tokens}")
    def _():
        q = torch.randn(batch * tokens, 32, 128, device="cuda", dtype=torch.bfloat16)
        keys, values = (torch.randn(batch * tokens, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        sequences = cases.sequences_of([tokens] * batch).cuda()
        batched = [x.view(batch, tokens, -1, 128).transpose(1, 2) for x in (q, keys, values)]
        def ours():
            return prompt_attention(q, keys, values, sequences, most_queries=tokens)
        def theirs():
            return F.scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=True)
        error = (ours()[0].view(batch, tokens, 32, 128).transpose(1, 2).float() - theirs().float()).norm() / theirs().float().norm()
        found = measure_in_turn([ours, theirs], repeats=repeats, rest=0.2)
        us = [t.median_us for t in found]
        flop = 4 * 128 * 32 * batch * tokens * (tokens + 1) / 2
        return f"ours {us[0]:.1f} us ({flop / us[0] / 1e6:.0f} TFLOPS), PyTorch {us[1]:.1f} us ({flop / us[1] / 1e6:.0f}), ratio {us[0] / us[1]:.2f}, {(us[0] - us[1]) / 1000:+.3f} ms a layer; differ by {error:.1e}; {found[1].kernels[0][:60]}"


print("failed:", failed or "nothing", f"{time.time() - BEGIN:.0f} s")
sys.exit(bool(failed))
