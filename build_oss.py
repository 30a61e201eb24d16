"""GPT-OSS-20b's and Qwen3-30B-A3B's sizes, random weights, experts in FP8 and in MXFP4: GraphDecoder's steps."""
import sys, time, torch, gc
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from fp8moe import GroupedExperts, replace_linears
from fp8moe.quant.exponents import arrange
from fp8moe.decode import GraphDecoder
from fp8moe.weights import DEFAULT_SKIP
from benchmarks.decode import step_seconds, random_prompts
from benchmarks import whole_models as wm
T0 = time.time()
print(torch.cuda.get_device_name())
def build(name, form):
    if name == "oss20":
        config = AutoConfig.for_model("gpt_oss", num_hidden_layers=24, num_local_experts=32, hidden_size=2880, intermediate_size=2880)
    elif name == "oss120":
        config = AutoConfig.for_model("gpt_oss", num_hidden_layers=36, num_local_experts=128, hidden_size=2880, intermediate_size=2880)
    else:
        config = AutoConfig.for_model(wm.CONFIGS[name][0], **wm.CONFIGS[name][1])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for path, module in list(model.named_modules()):
        if isinstance(getattr(module, "down_proj", None), nn.Parameter):
            new = GroupedExperts.from_experts(module)
            model.set_submodule(path, new if form == "fp8" else new.in_format(form))
    if not name.startswith("oss"): replace_linears(model, skip=DEFAULT_SKIP)
    model.to_empty(device="cuda"); model.tie_weights()
    for path, module in list(model.named_modules()):
        if hasattr(module, "inv_freq"): model.set_submodule(path, type(module)(config).to("cuda"))
    g = torch.Generator("cuda")
    for n, p in model.named_parameters():
        if p.dtype == torch.uint8 and not n.endswith("_scale"): p.data.random_(0, 256)
        elif n.endswith("_scale"):
            layer = model.get_submodule(n.rpartition(".")[0]); w = getattr(layer, n.rpartition(".")[2][:-6])
            e, r, k = w.shape
            p.data.copy_(arrange(torch.full((e, r, 2 * k // 32), 119, dtype=torch.uint8, device="cuda"), 2 if "gate_up" in n else 1))
        else: wm._fill(n, p.data, g)
    return model.eval()
for name in sys.argv[1].split(","):
    res = {}
    for form in sys.argv[3].split(","):
        torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
        model = build(name, form)
        gb = torch.cuda.memory_allocated() / 1e9
        for batch in map(int, sys.argv[2].split(",")):
            try:
                d = GraphDecoder(model, batch_sizes=(batch,), max_length=768)
                s = step_seconds(d, random_prompts(model, batch, 256))
                res[form, batch] = s * 1e3; d.close()
            except Exception as e: print(name, form, batch, "FAILED", repr(e)[:300], flush=True)
        print(name, form, f"{gb:.1f} GB", {k[1]: round(v, 3) for k, v in res.items() if k[0] == form}, f"{time.time()-T0:.0f}s", flush=True)
        del model; gc.collect()
    print(name, "fp8/mxfp4", {b: round(res["fp8", b] / res["mxfp4", b], 3) for f, b in res if f == "mxfp4" and ("fp8", b) in res})
