"""Packed grouped products beside FP8, each tile; checks bits against FP8 on exact values. Prints a table."""

import sys, time, itertools, math
import torch
from fp8moe import FP8Tensor, quantize_1x128
from fp8moe.kernels.gemm import launch
from fp8moe.kernels.gemm.launch import GemmOperands
from fp8moe.kernels.gemm.sm90 import TileConfig, with_stages, fits
from fp8moe.kernels.gemm.tiles import Grouping, GroupedProblem, choose_grouped
from fp8moe.kernels.gemm.epilogue import PlainStore, SwigluQuantize
from fp8moe.kernels.activation import Activation
from fp8moe.runtime.jit import load_all
from fp8moe.kernels.gemm.source import kernel_spec
from concurrent.futures import ThreadPoolExecutor

dev = "cuda"
T0 = time.time()
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0], device=dev)


def weights(E, n, k, spread=3):
    g = torch.Generator(dev).manual_seed(1)
    codes = torch.randint(0, 256, (E, n, k // 2), dtype=torch.uint8, device=dev, generator=g)
    exps = torch.randint(120, 120 + spread, (E, n, k // 32), dtype=torch.uint8, device=dev, generator=g)
    return codes, exps


def values(codes, exps):
    c = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    v = E2M1[c & 7] * (1 - 2 * (c >> 3).float())
    return v * torch.exp2(exps.float() - 127).repeat_interleave(32, -1)


def as_fp8(codes, exps):
    """Exact blocks: 128 x 128, scale 2^(largest - 6)."""
    E, n, k = codes.shape[0], codes.shape[1], codes.shape[2] * 2
    nb, kb = -(-n // 128), -(-k // 128)
    e = torch.zeros(E, nb * 128, kb * 4, dtype=torch.uint8, device=dev)
    e[:, :n, : k // 32] = exps
    top = e.view(E, nb, 128, kb, 4).amax((2, 4)).float() - 127
    scale = torch.exp2(top - 6)
    out = torch.empty(E, n, k, dtype=torch.float8_e4m3fn, device=dev)
    for i in range(E):
        s = scale[i].repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        out[i] = (values(codes[i : i + 1], exps[i : i + 1])[0] / s).to(torch.float8_e4m3fn)
    return FP8Tensor(out, scale.contiguous())


def arrange(codes):
    c = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    lead = c.shape[:-1]
    c = c.view(*lead, -1, 2, 4, 4)  # chunk, half, q, i
    mag, sign = (c & 7).int(), (c >> 3).int()
    word = torch.zeros(*lead, c.shape[-4], 4, dtype=torch.int64, device=dev)
    for i in range(4):
        word |= mag[..., 0, :, i].long() << (4 * i)
        word |= mag[..., 1, :, i].long() << (16 + 4 * i)
        word |= sign[..., 0, :, i].long() << (8 * i + 7)
        word |= sign[..., 1, :, i].long() << (8 * i + 3)
    b = torch.stack([(word >> (8 * j)) & 255 for j in range(4)], -1).to(torch.uint8)
    return b.flatten(-3).contiguous()


flush = torch.empty(256 << 20, dtype=torch.uint8, device=dev)


def timed(call, n=12):
    for _ in range(2):
        call()
    ts = []
    for _ in range(n):
        flush.zero_()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        call()
        b.record()
        torch.cuda.synchronize()
        ts.append(a.elapsed_time(b) * 1e3)
    return sorted(ts)[n // 2]


def tiles(E, n, k, gated, packed, ms):
    for m in ms:
        shapes = ((256, 2),) if gated else ((64, 1), (128, 2), (256, 2))
        for (bn, wg), bps, split in itertools.product(shapes, (1, 2, 3), (1,)):
            t = TileConfig(
                m, bn, weights_as_rows=True, warpgroups=wg, blocks_per_sm=bps, split_k=split, groups=E, packed=packed
            )
            t = with_stages(t, k)
            if fits(t, k) and (bps, bn) not in ((3, 256),):
                yield t
                yield __import__("dataclasses").replace(t, arranged=True)


MODELS = {"qwen": (128, 2048, 768, 8), "oss20": (32, 2880, 2944, 4), "dsv3": (64, 7168, 2048, 8)}
which = sys.argv[1].split(",")
for name in which:
    E, H, I, K = MODELS[name]
    for gated, n, k in ((True, 2 * I, H), (False, H, I)):
        codes, exps = weights(E, n, k)
        fp8 = as_fp8(codes, exps)
        arranged = arrange(codes)
        for tokens in map(int, sys.argv[2].split(",")):
            rows = tokens * K
            g = torch.Generator("cpu").manual_seed(tokens)
            top = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(tokens)]).flatten()
            counts = torch.bincount(top, minlength=E)
            offs = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]).int().to(dev)
            x = quantize_1x128(torch.randn(rows, k, device=dev, dtype=torch.bfloat16))
            ep = SwigluQuantize(Activation()) if gated else PlainStore(torch.bfloat16)
            if gated:
                out = torch.zeros(rows, n // 2, dtype=torch.float8_e4m3fn, device=dev)
                sc = torch.zeros(-(-n // 256), (rows + 3) // 4 * 4, device=dev).t()[:rows]
            else:
                out, sc = torch.zeros(rows, n, dtype=torch.bfloat16, device=dev), None
            more = () if not gated else (sc.data_ptr(), sc.stride(1))
            fo = GemmOperands(x.data, x.scale, fp8.data, fp8.scale, None, None, offs)
            po = GemmOperands(x.data, x.scale, codes, exps, None, None, offs)
            pa = po._replace(b=arranged)

            def run(ops, tile):
                found = launch.build(ops, ep, Grouping(), tile=tile)
                return lambda: launch.run(found, ops, out, *more)

            prob = Grouping().problem(rows, E, n, k, 132, swiglu=gated)
            base = choose_grouped(prob)
            unsplit = choose_grouped(prob, unsplit=True)
            run(fo, base)()
            ours = timed(run(fo, base))
            ms = (8, 16, 32, 64) if tokens * K / E < 24 else (32, 64)
            if tokens * K / E < 4:
                ms = (8, 16)
            cand = [t for t in tiles(E, n, k, gated, True, ms) if t.split_k == 1 or tokens <= 8]
            if len(sys.argv) > 3:
                cand = [t for t in cand if t.name + ("a" if t.arranged else "") == sys.argv[3]]
            with ThreadPoolExecutor(14) as pool:
                list(
                    pool.map(
                        lambda t: (
                            launch.kernel_spec(t, n, k, ep)
                            and __import__("fp8moe.runtime.jit", fromlist=["x"]).cubin(kernel_spec(t, n, k, ep))
                        ),
                        cand,
                    )
                )
            want = {}
            wrong = 0
            res = []
            for t in cand:
                sw = with_stages(
                    TileConfig(
                        t.block_m, t.block_n, weights_as_rows=True, warpgroups=t.warpgroups, groups=E, split_k=t.split_k
                    ),
                    k,
                )
                if t.split_k not in want:
                    out.fill_(0)
                    run(fo, sw)()
                    want[t.split_k] = (out.clone(), None if sc is None else sc.clone())
                out.view(torch.uint8).fill_(0x7F)
                out.fill_(0)
                call = run(pa if t.arranged else po, t)
                call()
                torch.cuda.synchronize()
                same = torch.equal(out.view(torch.uint8), want[t.split_k][0].view(torch.uint8)) and (
                    sc is None or torch.equal(sc, want[t.split_k][1])
                )
                for rep in range(10 if t.block_m > 8 else 40):
                    out.fill_(0)
                    call()
                    torch.cuda.synchronize()
                    diff = out.view(torch.uint8) != want[t.split_k][0].view(torch.uint8)
                    if diff.any():
                        same = False
                        r, c = diff.nonzero().T
                        b = torch.bucketize(r, offs[1:].long(), right=True)
                        if wrong < 6:
                            print(
                                "   WRONG",
                                t.name,
                                t.arranged,
                                "rep",
                                rep,
                                "elements",
                                len(r),
                                "rows",
                                r.unique().tolist()[:12],
                                "groups",
                                b.unique().tolist()[:6],
                                "row in group",
                                (r - offs.long()[b]).unique().tolist()[:10],
                                "col/128",
                                (c // (128 if gated else 64)).unique().tolist()[:8],
                                "cols",
                                c.unique().tolist()[:6],
                                len(c.unique()),
                                "group sizes",
                                counts[b.unique().cpu()].tolist()[:6],
                                "zeros",
                                int((out.view(torch.uint8)[diff] == 0).sum()),
                                flush=True,
                            )
                        wrong += 1
                res.append((timed(call, 8), t.name + ("a" if t.arranged else ""), t.stages, same))
            if len(sys.argv) > 3:
                continue
            res.sort()
            used = int((counts > 0).sum())
            by = used * n * k * 17 / 32 + rows * (k + 2 * n)
            bad = [r for r in res if not r[3]]
            print(
                f"{name} {'gemm1' if gated else 'gemm2'} tokens {tokens}: fp8 {ours:.1f} us ({base.name}); packed {res[0][0]:.1f} us ({res[0][1]}, {res[0][2]} stages) x{ours / res[0][0]:.2f}, {by / res[0][0] * 1e-6:.2f} TB/s; bad {len(bad)}/{len(res)} {[b[1] for b in bad[:3]]}; others {[(round(r[0], 1), r[1]) for r in res[1:7]]} at {time.time() - T0:.0f}s",
                flush=True,
            )
