"""Times of every candidate tile, FP8 and MXFP4, as JSON lines: to fit the cost model."""
import sys, time, os, json
import torch
exec(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "build_bench.py")).read().split("MODELS =")[0])
from fp8moe.kernels.gemm.tiles import grouped_candidates
from fp8moe.kernels.gemm.epilogue import Columns, Packing
from fp8moe.quant.exponents import arrange as arranged
from fp8moe.runtime import jit
MX = Columns(False, None, Packing("mxfp4", 32, torch.uint8))
MODELS = {"qwen": (128, 2048, 768, 8), "oss20": (32, 2880, 2880, 4), "oss120": (128, 2880, 2880, 4), "dsv3": (256, 7168, 2048, 8)}
out_file = open(sys.argv[3], "w")
from collections import OrderedDict
for name in sys.argv[1].split(","):
    E, H, I, K = MODELS[name]
    for gated, n, k in ((True, 2 * I, H), (False, H, I)):
        codes = torch.randint(0, 256, (E, n, k // 2), dtype=torch.uint8, device=dev)
        exps = torch.randint(120, 123, (E, n, k // 32), dtype=torch.uint8, device=dev)
        ordered = arranged(exps, 2 if gated else 1)
        ep = SwigluQuantize(Activation()) if gated else PlainStore(torch.bfloat16)
        probs = {}
        for tokens in map(int, sys.argv[2].split(",")):
            prob = Grouping().problem(tokens * K, E, n, k, 132, swiglu=gated, packed="mxfp4")
            em = prob.expected_m
            cand = [t for t in grouped_candidates(prob) if t.unpacks or (t.block_m <= 8 if em < 1 else t.block_m <= 16 if em < 4 else em / 4 <= t.block_m)]
            if em >= 1: cand = [t for t in cand if t.split_k == 1]
            probs[tokens] = prob, cand
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda t: jit.cubin(kernel_spec(t, n, k, ep, MX)), {t for _, c in probs.values() for t in c}))
        for tokens, (prob, cand) in probs.items():
            rows = tokens * K
            g = torch.Generator("cpu").manual_seed(tokens)
            top = torch.rand(tokens, E, generator=g).topk(K).indices.flatten()
            offs = torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(top, minlength=E).cumsum(0), torch.zeros(1, dtype=torch.long)]).int().to(dev)[: E + 1]
            x = quantize_1x128(torch.randn(rows, k, device=dev, dtype=torch.bfloat16))
            if gated:
                out = torch.zeros(rows, n // 2, dtype=torch.float8_e4m3fn, device=dev)
                sc = torch.zeros(-(-n // 256), (rows + 3) // 4 * 4, device=dev).t()[:rows]
            else:
                out, sc = torch.zeros(rows, n, dtype=torch.bfloat16, device=dev), None
            more = () if not gated else (sc.data_ptr(), sc.stride(1))
            po = GemmOperands(x.data, x.scale, codes, ordered, None, None, offs)
            res = []
            for t in cand:
                found = launch.build(po, ep, Grouping(), tile=t)
                us = timed(lambda: launch.run(found, po, out, *more), 5)
                res.append((us, t.block_m, t.block_n, t.split_k, t.blocks_per_sm, t.weights_as_rows, t.warpgroups))
            res.sort()
            out_file.write(json.dumps({"name": name, "gated": gated, "tokens": tokens, "E": E, "n": n, "k": k, "expected_m": prob.expected_m, "times": res}) + "\n")
            chosen = choose_grouped(prob)
            c = next((r[0] for r in res if r[1:] == (chosen.block_m, chosen.block_n, chosen.split_k, chosen.blocks_per_sm, chosen.weights_as_rows, chosen.warpgroups)), None)
            print(name, gated, tokens, "best", [(round(r[0], 1), f"{r[1]}x{r[2]}/{r[3]}*{r[4]}w{r[6]}") for r in res[:4]], "chosen", chosen.name, c and round(c, 1), f"{time.time()-T0:.0f}s", flush=True)
        del codes, exps, ordered; torch.cuda.empty_cache()
