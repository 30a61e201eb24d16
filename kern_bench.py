"""Weight gradients with block scales and the transposing quantizers: right, and how fast: python kern_bench.py"""
import statistics, sys, time
import torch
from fp8moe import FP8Tensor, dequantize
from fp8moe.kernels.activation import Activation
from fp8moe.kernels.experts import swiglu
from fp8moe.kernels.experts.swiglu import Beside, swiglu_backward_quantize, swiglu_gradients
from fp8moe.kernels.gemm.launch import run_along_k
from fp8moe.kernels.gemm.sm90 import GroupedKTile, Pieces
from fp8moe.kernels.gemm.tiles import GROUPED_K_TILES, choose_grouped_k
from fp8moe.quant import quantize_128x1, reference, transpose
from fp8moe.quant.transpose import quantize_columns, quantize_with_transpose
from fp8moe.runtime import launch as plans

class TwoPieces(GroupedKTile):
    """The tile of three stages with two buffers for the result, as it was for 1x128."""
    pieces = property(lambda self: Pieces(2, 128))

D, NAN, INF = "cuda", float("nan"), float("inf")
BEGIN = time.time()
# experts, hidden, intermediate, tokens, top_k
MODELS = {"dsv3": (32, 7168, 2048, 8192, 8), "qwen8k": (128, 2048, 768, 8192, 8), "qwen32k": (128, 2048, 768, 32768, 8), "olmoe": (64, 2048, 1024, 16384, 8)}
BEFORE = {"dsv3": "both 563, columns 397, swiglu 646", "qwen8k": "both 156, columns 110, swiglu 221"}
def say(*parts): print(*parts, flush=True)
def bits(t): return t.contiguous().view(torch.uint8 if t.itemsize == 1 else torch.int32)
def rel(a, b):
    error = ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()
    return error if error == error else INF
def offsets_of(sizes, unit=1):
    o = torch.zeros(len(sizes) + 1, dtype=torch.int32); o[1:] = torch.tensor(sizes).cumsum(0) * unit
    return o.to(D)
def sizes_of(e, rows):
    torch.manual_seed(1); return torch.bincount(torch.randint(e, (rows,)), minlength=e).tolist()
def same(runs): first, *more = runs; return all(torch.equal(bits(a), bits(b)) for other in more for a, b in zip(first, other))

def check_gemm():
    worst, nan_ok, repeats = {}, True, True
    # Few sizes N: each is a kernel to compile.
    cases = [([3, 1, 0, 5, 2], 257, 72), ([0, 0, 40, 0], 1000, 264), ([1] * 7, 8, 72), ([9], 136, 264), ([i % 3 for i in range(200)], 300, 264), ([16, 15], 4096, 2048), ([4, 5, 3], 1536, 2048), ([17, 2], 7168, 2048)]
    for blocks, m, n in cases:
        off = offsets_of([2, *blocks], 128)[1:].contiguous(); k = 128 * (sum(blocks) + 3)
        g, x = torch.randn(k, m, device=D, dtype=torch.bfloat16), torch.randn(k, n, device=D, dtype=torch.bfloat16)
        x *= torch.rand(1, n, device=D).mul(4).exp()
        a, b = quantize_128x1(g), quantize_with_transpose(x, blocks=True).columns
        ends = off.tolist()
        exact = torch.stack([dequantize(a)[:, i:j].double() @ dequantize(b)[:, i:j].double().T for i, j in zip(ends, ends[1:])])
        for t in GROUPED_K_TILES:
            if not t.block_scales: continue
            for dtype, acc in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False))[: 3 if n == 264 else 1]:
                base = torch.randn(exact.shape, device=D, dtype=dtype)
                outs = []
                for _ in range(5 if not acc else 1):
                    out = base.clone() if acc else torch.full_like(base, NAN)
                    run_along_k(a, b, off, out, acc, t); outs.append((out.view(torch.int32) if dtype == torch.float32 else out.view(torch.int16).int(),))
                out = outs[0][0].view(torch.float32) if dtype == torch.float32 else None
                if dtype == torch.float32:
                    key = f"{t.block_m}x{t.block_n}/{t.stages} {'add' if acc else 'f32'}"
                    worst[key] = max(worst.get(key, 0), rel(out, exact + (base.double() if acc else 0)) if exact.abs().sum() > 0 else out.abs().max().item() * (not acc))
                    plain = out if not acc else None
                    f32 = plain if plain is not None else f32
                else:
                    got = outs[0][0].to(torch.int16).view(torch.bfloat16)
                    key = f"{t.block_m}x{t.block_n}/{t.stages} bf16 differs"
                    worst[key] = max(worst.get(key, 0), int((got != f32.bfloat16()).sum()))
                repeats &= all(torch.equal(outs[0][0], o[0]) for o in outs)
    g, x = torch.randn(512, 300, device=D), torch.randn(512, 264, device=D)
    g[3, 5], x[140, 130], x[400, 7] = NAN, INF, NAN
    a, b = quantize_128x1(g), quantize_with_transpose(x, blocks=True).columns
    want = torch.zeros(2, 300, 264, dtype=torch.bool, device=D); want[0, 5], want[0, :, 130], want[1, :, 7] = True, True, True
    for t in GROUPED_K_TILES:
        if t.block_scales:
            out = torch.zeros(want.shape, device=D); run_along_k(a, b, offsets_of([2, 2], 128), out, False, t)
            nan_ok &= torch.equal(~out.isfinite(), want)
    say("gemm_k blocks: worst", {k: f"{v:.2e}" for k, v in worst.items()}, "limit 3e-4; NaN where it belongs", nan_ok, "; 5 repeats equal", repeats)

def used(parts, groups, rows, e):
    """Masks of rows and columns in use."""
    end = int(parts[-1][-1]); first, last = (0, rows) if groups is None else (int(groups[0]), int(groups[-1]))
    return [parts[0][first:last], parts[1][first:last], parts[2][:, :end], parts[3][:, : end // 128]]

def check_quantizers():
    bad, repeats, count = [], True, 0
    for rows, f, groups, tokens in [(300, 200, [3, 5, 0, 142, 150], None), (1, 8, None, None), (400, 1040, [0, 127, 256, 17], 50), (384, 257, [128, 128, 128], None), (130, 136, None, 7), (5000, 2048, sizes_of(16, 5000), 700), (9000, 7168, sizes_of(32, 9000), 1125), (1025, 1, None, None)]:
        for dtype in (torch.bfloat16, torch.float32):
            x = (torch.randn(tokens or rows, f, device=D) * torch.randn(tokens or rows, f, device=D).mul(3).exp2()).to(dtype)
            x[0, 0], x[-1, f // 2] = NAN, -INF
            g = None if groups is None else offsets_of(groups); idx = None if tokens is None else torch.randint(-2, tokens + 2, (rows,), dtype=torch.int32, device=D)
            for blocks in (False, True):
                want = reference.quantize_with_transpose(x, g, idx, blocks)
                runs = []
                for strip in (None, 1, 3, 100, None):
                    old = transpose.strip_width
                    if strip: transpose.strip_width = lambda *sizes: strip
                    got = torch.ops.fp8moe.quantize_with_transpose(x, g, idx, blocks); transpose.strip_width = old
                    runs.append(used(got, g, rows, 0))
                    for name, one, other in zip(("rows", "row scale", "columns", "column scale"), runs[-1], used(want, g, rows, 0)):
                        count += 1
                        if not torch.equal(bits(one), bits(other)): bad.append((rows, f, str(dtype), blocks, strip, name, int((bits(one) != bits(other)).sum())))
                repeats &= same(runs)
                if blocks:
                    alone = torch.ops.fp8moe.quantize_columns(x, g, idx)
                    end = int(alone[2][-1])
                    if not (torch.equal(bits(alone[0][:, :end]), bits(want[2][:, :end])) and torch.equal(alone[1][:, : end // 128], want[3][:, : end // 128])): bad.append((rows, f, str(dtype), "alone"))
    say(f"quantize_transpose: {count} compared, wrong {bad[:6]} ({len(bad)}); repeats and strips equal", repeats)
    worst, repeats, nan_ok = {}, True, True
    for rows, size, groups in [(300, 128, [3, 5, 0, 142, 150]), (1, 256, [1]), (5000, 768, sizes_of(16, 5000)), (9000, 2048, sizes_of(32, 9000))]:
        for act in (Activation(), Activation(limit=1.0, alpha=1.702)):
            gu, gr, w = torch.randn(rows, 2 * size, device=D).bfloat16(), torch.randn(rows, size, device=D).bfloat16(), torch.rand(rows, device=D) + .1
            g = offsets_of(groups)
            runs = []
            for _ in range(5):
                t = swiglu_backward_quantize(gu, gr, w, g, activation=act, beside=Beside.COLUMNS); end = int(t.offsets[-1])
                runs.append([*t.rows, t.columns.data[:, :end], t.columns.scale[:, : end // 128], t.h_columns.data[:, :end], t.h_columns.scale[:, : end // 128], t.dots])
            repeats &= same(runs)
            d, _, dots = swiglu_gradients(gu, gr, w, act); h = (w[:, None] * act(gu.float())).bfloat16()
            both, hc = reference.both_ways(d, g), reference.by_columns(h, g, True)
            pairs = {"rows": (runs[0][0], runs[0][1], both[0], both[1]), "columns": (runs[0][2], runs[0][3], both[2][:, :end], both[3][:, : end // 128]), "h": (runs[0][4], runs[0][5], hc[0][:, :end], hc[1][:, : end // 128])}
            for name, (a, s, b, u) in pairs.items(): worst[name] = max(worst.get(name, 0), rel(dequantize(FP8Tensor(a, s)), dequantize(FP8Tensor(b, u))))
            worst["dots"] = max(worst.get("dots", 0), rel(t.dots, dots))
            for value in (NAN, INF):
                bad_gu = gu.clone(); bad_gu[rows - 1, 5] = value
                t = swiglu_backward_quantize(bad_gu, gr, w, g, activation=Activation(), beside=Beside.COLUMNS)
                hit = dequantize(FP8Tensor(t.h_columns.data[:, :end], t.h_columns.scale[:, : end // 128])).isfinite().logical_not()
                nan_ok &= int(hit.sum()) == 1 and bool(hit[5].any())
    say("swiglu_backward_quantize: worst relative error", {k: f"{v:.2e}" for k, v in worst.items()}, "limit 1e-2; one NaN stays one", nan_ok, "; 5 repeats equal", repeats)

FLUSH = torch.empty(1 << 28, dtype=torch.uint8, device=D)
def timed(runs, n=7):
    times = {x: [] for x in runs}
    for f in runs.values(): f()
    for _ in range(n):
        for x, f in runs.items():
            FLUSH.zero_(); s, t = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            s.record(); f(); t.record(); torch.cuda.synchronize(); times[x].append(s.elapsed_time(t) * 1e3)
    return {x: statistics.median(v) for x, v in times.items()}

def time_gemm():
    for model, (e, h, i, tokens, k) in MODELS.items():
        rows = tokens * k // e // 128 * 128 * e
        off = offsets_of([rows // e] * e)
        for which, m, n in (("up", 2 * i, h), ("down", h, i)):
            q = lambda r: torch.randn(r, rows, device=D, dtype=torch.bfloat16).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
            sc = lambda r: torch.rand(rows // 128, r, device=D).add_(0.5).t()
            a, b = FP8Tensor(q(m), sc(m)), q(n)
            small = torch.rand(rows // 128, -(-n // 128 // 4) * 4, device=D).add_(0.5)[:, : -(-n // 128)].t()
            narrow, block = FP8Tensor(b, small.t().repeat_interleave(128, 1)[:, :n].contiguous().t()), FP8Tensor(b, small)
            out = torch.empty(e, m, n, dtype=torch.bfloat16, device=D); ref = torch.empty_like(out)
            old = choose_grouped_k(e, m, n, 132)
            run_along_k(a, narrow, off, ref, False, old)
            runs = {f"1x128 {old.block_m}x{old.block_n}": lambda: run_along_k(a, narrow, off, out, False, old)}
            for t in (*GROUPED_K_TILES, TwoPieces(256, 128, 3, True)):
                if t.block_scales and (t.block_m == 256 or model in ("qwen8k", "olmoe")):
                    out.fill_(NAN); run_along_k(a, block, off, out, False, t); err = rel(out[0], ref[0])
                    runs[f"128x128 {t.block_m}x{t.block_n}/{t.stages}/{t.pieces.count}x{t.pieces.pitch} (differs {err:.1e})"] = lambda t=t: run_along_k(a, block, off, out, False, t)
            flops = 2 * m * n * rows
            say(f"{model} {which} {e}x{m}x{n} rows {rows}:", "; ".join(f"{x} {v:.0f} us {flops / v / 1e6:.0f} TF" for x, v in timed(runs).items()))
            del a, b, narrow, block, out, ref, runs
        torch.cuda.empty_cache()

def time_quantizers():
    for model, (e, h, i, tokens, k) in MODELS.items():
        rows = tokens * k; sizes = sizes_of(e, rows); g = offsets_of(sizes)
        idx = torch.cat([torch.randperm(tokens)[: min(s, tokens)].sort().values for s in sizes]); idx = torch.cat([idx, idx[: rows - len(idx)]]).int().to(D)
        x = torch.randn(tokens, h, device=D, dtype=torch.bfloat16)
        gu, gr, w = torch.randn(rows, 2 * i, device=D, dtype=torch.bfloat16), torch.randn(rows, i, device=D, dtype=torch.bfloat16), torch.rand(rows, device=D)
        padded = sum(-(-s // 128) * 128 for s in sizes)
        floor = {"columns": tokens * h * 2 + padded * h, "both": tokens * h * 2 + (rows + padded) * h, "swiglu": rows * i * 6 + (rows + padded) * 2 * i + padded * i}
        calls = {"columns": lambda: quantize_columns(x, g, tokens=idx), "both": lambda: quantize_with_transpose(x, g, tokens=idx),
                 "swiglu": lambda: swiglu_backward_quantize(gu, gr, w, g, activation=Activation(), beside=Beside.COLUMNS)}
        chosen = transpose.strip_width(0, rows, e, -(-h // 128), tokens), transpose.strip_width(0, rows, e, i // 128)
        say(f"{model}: chosen strips {chosen}; before: {BEFORE.get(model, '')}; floor", {c: f"{b / 4.07e6:.0f}" for c, b in floor.items()})
        old, old_swiglu = transpose.strip_width, swiglu.strip_width
        for name, call in calls.items():
            found = {}
            for strip in (None, 1, 2, 4, 8, 16):
                plans._plans.clear()
                transpose.strip_width, swiglu.strip_width = (old, old_swiglu) if strip is None else (lambda *s: strip, lambda *s: strip)
                found[strip or "chosen"] = timed({"x": call}, 5)["x"]
            transpose.strip_width, swiglu.strip_width = old, old_swiglu
            plans._plans.clear()
            say(f"  {name}:", "; ".join(f"strip {s} {v:.0f}" for s, v in found.items()), f"us; {found['chosen'] / (floor[name] / 4.07e6):.2f} of the floor")
        del x, gu, gr; torch.cuda.empty_cache()
    x = torch.randn(65536, 7168, device=D, dtype=torch.bfloat16)
    ungathered = timed({"one group": lambda: quantize_with_transpose(x), "one group, blocks": lambda: quantize_with_transpose(x, blocks=True), "columns": lambda: quantize_columns(x)}, 5)
    say("65536x7168 not gathered:", {k: f"{v:.0f} us" for k, v in ungathered.items()}, "before: 531")
    x = torch.randn(4096, 7168, device=D, dtype=torch.bfloat16)
    say("4096x7168 not gathered:", {k: f"{v:.0f} us" for k, v in timed({"one group": lambda: quantize_with_transpose(x), "one group, blocks": lambda: quantize_with_transpose(x, blocks=True)}).items()})

say(torch.cuda.get_device_name())
for part in (check_gemm, check_quantizers, time_gemm, time_quantizers):
    try: part()
    except Exception as error:
        import traceback; traceback.print_exc(); say("FAILED", part.__name__, error)
    say(f"-- {part.__name__} after {time.time() - BEGIN:.0f} s")
