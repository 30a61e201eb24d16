"""Layers in FP8 and in MXFP4 in turn: CUDA graphs, L2 emptied, medians."""
import sys, time, torch
from fp8moe import GroupedExperts
from fp8moe.quant.exponents import arrange
print(torch.cuda.get_device_name())
dev = "cuda"
MODELS = {"qwen": (128, 2048, 768, 8), "oss20": (32, 2880, 2880, 4), "oss120": (128, 2880, 2880, 4), "dsv3": (256, 7168, 2048, 8)}
flush = torch.empty(256 << 20, dtype=torch.uint8, device=dev)
T0 = time.time()
def layer(E, H, I, form):
    with torch.device("meta"):
        m = GroupedExperts(num_experts=E, hidden_size=H, intermediate_size=I, **({"weight_format": form} if form else {}))
    m = m.to_empty(device=dev)
    for name, scale in zip(m.weight_names[::2], m.weight_names[1::2]):
        w, s = getattr(m, name), getattr(m, scale)
        if form:
            w.data.random_(0, 256)
            n, k = w.shape[1], 2 * w.shape[2]
            s.data.copy_(arrange(torch.randint(118, 121, (E, n, k // 32), dtype=torch.uint8, device=dev), 2 if name == "gate_up_proj" else 1))
        else:
            w.data.copy_((torch.randn(w.shape[1:], device=dev) * 20).to(torch.float8_e4m3fn)); s.data.fill_(2.0**-9)
    return m.eval()
def graph(call):
    for _ in range(2): call()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): out = call()
    return g
def once(g):
    flush.zero_()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record(); g.replay(); b.record(); torch.cuda.synchronize()
    return a.elapsed_time(b) * 1e3
with torch.inference_mode():
    for name in sys.argv[1].split(","):
        E, H, I, K = MODELS[name]
        layers = {"fp8": layer(E, H, I, None), "mxfp4": layer(E, H, I, "mxfp4")}
        row = []
        for tokens in map(int, sys.argv[2].split(",")):
            x = torch.randn(tokens, H, device=dev, dtype=torch.bfloat16)
            g = torch.Generator("cpu").manual_seed(tokens)
            idx = torch.rand(tokens, E, generator=g).topk(K).indices.to(dev); w = torch.rand(tokens, K, device=dev)
            graphs = {k: graph(lambda m=m: m(x, idx, w)) for k, m in layers.items()}
            times = {k: [] for k in graphs}
            for _ in range(9):
                for k, gr in graphs.items(): times[k].append(once(gr))
            t = {k: sorted(v)[4] for k, v in times.items()}
            row.append(f"{tokens}: {t['fp8']:.1f}/{t['mxfp4']:.1f} = {t['fp8']/t['mxfp4']:.2f}")
            del graphs
        print(name, "  ".join(row), f"{time.time()-T0:.0f}s", flush=True)
        del layers; torch.cuda.empty_cache()
