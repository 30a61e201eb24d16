"""How fast weights (n, k) can be read by TMA into shared memory, by the shape of the loads: python3 experiments/stream.py

Blocks of one loading thread; the grid is that of a GEMM: ceil(n / rows) x splits of K. What the weights' pattern costs
alone, without products, tokens and sums, and what can be won by another one.
"""

import ctypes
import itertools
import json
import os
import sys
from functools import partial

import torch
from cuda.bindings import driver

from benchmarks import timing
from fp8moe.runtime import compilers
from fp8moe.runtime.driver import check
from fp8moe.runtime.launch import tensor_map

SOURCE = r"""
#include "ptx.cuh"
constexpr int BYTES = ROWS * 128;
extern "C" __global__ void __launch_bounds__(128) stream(const __grid_constant__ TensorMap map,
                                                         const __grid_constant__ TensorMap tokens, int steps,
                                                         const unsigned char* weights) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ unsigned long long full[STAGES];
  if (threadIdx.x) return;
  const u32 base = (shared_address(shared) + 1023) / 1024 * 1024;
  for (int i = 0; i < STAGES; ++i) mbarrier_init(shared_address(full + i), 1);
  mbarrier_init_fence();
  const int split = blockIdx.x % SPLITS, tile = blockIdx.x / SPLITS;
  const int first = STRIDED ? split : (long long)steps * split / SPLITS;
  const int end = STRIDED ? steps : (long long)steps * (split + 1) / SPLITS, by = STRIDED ? SPLITS : 1;
  int slot = 0, phase = 0, issued = 0;
  for (int k = first; k < end; k += by) {
    const u32 barrier = shared_address(full + slot);
    if (issued >= STAGES) mbarrier_wait(barrier, phase ^ 1);
    mbarrier_arrive_expect_tx(barrier, BYTES + TOKENS * 128);
    const u32 target = base + slot * (BYTES + TOKENS * 128);
    if (BULK) {  // as many bytes, one after the other
      bulk_load(target, weights + ((long long)tile * steps + k) * BYTES, BYTES, barrier);
    } else for (int r = 0; r < ROWS; r += BOX) {
      if (ONCE) tma_load_once(target + r * 128, map, barrier, k * 128, tile * ROWS + r);
      else tma_load(target + r * 128, map, barrier, k * 128, tile * ROWS + r);
    }
    if (TOKENS) tma_load(target + BYTES, tokens, barrier, k * 128, 0);
    ++issued;
    if (++slot == STAGES) { slot = 0; phase ^= 1; }
  }
  for (int i = 0; i < STAGES && i < issued; ++i) {
    const int left = issued - 1 - i, s = left % STAGES;
    mbarrier_wait(shared_address(full + s), left / STAGES & 1);
  }
}
"""


def build(values):
    text = "".join(f"constexpr int {name} = {value};\n" for name, value in values.items())
    header = (compilers.__file__.rsplit("/", 2)[0]) + "/cuda/ptx.cuh"
    source = open(header).read().replace("#pragma once", "") + text + SOURCE.replace('#include "ptx.cuh"', "")
    cubin, _ = compilers.compile_source(source, "stream.cu", "nvrtc")
    return cubin


def main():
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    rows = []
    shapes = ((7168, 16384), (4096, 7168), (24576, 1536), (2112, 7168))
    variants = [
        # rows, box, splits, blocks an SM, KB of rings an SM, once, strided, promotion, tokens, bulk
        *((64, 64, s, p, 200, 0, 0, 256, 0, 0) for s, p in ((1, 1), (2, 2), (4, 4), (7, 4))),
        *((128, 128, s, p, 200, 0, 0, 256, 0, 0) for s, p in ((1, 1), (2, 2), (7, 4))),
        *((64, 64, 2, 3, kb, 0, 0, 256, 0, 0) for kb in (48, 96, 144, 200)),
        *((64, 64, 2, 3, 200, 0, 0, pr, 0, 0) for pr in (0, 128)),
        *((64, 64, s, p, 200, 0, 0, 256, 0, 1) for s, p in ((1, 1), (2, 3), (4, 4))),
        (64, 64, 2, 3, 200, 1, 0, 256, 0, 0),
        (64, 64, 2, 3, 200, 0, 1, 256, 0, 0),
        (64, 64, 4, 4, 200, 0, 1, 256, 0, 0),
        (128, 128, 7, 4, 200, 0, 1, 256, 0, 0),
        (64, 16, 2, 3, 200, 0, 0, 256, 0, 0),
        *((64, 64, 4, 4, 200, 0, 0, 256, t, 0) for t in (8, 16, 32, 64)),
        # The loads of tiles for 64 tokens: 64x64*1, 64x64/2*1, 64x32*1, 64x32*2, 64x128*1; of 128 tokens: 128x64*1.
        *((r, r, s, p, 200, 0, 0, 256, t, 0) for r, s, p, t in ((64, 1, 1, 64), (64, 2, 1, 64), (32, 1, 1, 64), (32, 1, 2, 64), (128, 1, 1, 64), (64, 1, 1, 128))),
    ]
    for n, k in shapes:
        weight = torch.randint(0, 120, (n, k), device="cuda", dtype=torch.uint8)
        token = torch.randint(0, 120, (128, k), device="cuda", dtype=torch.uint8)
        calls = []
        for r, box, splits, per_sm, kb, once, strided, promotion, tokens, bulk in variants:
            stage = (r + tokens) * 128
            stages = max(1, min(kb * 1024 // per_sm // stage, 40, -(-k // 128 // splits)))
            values = {
                "ROWS": r, "BOX": box, "SPLITS": splits, "STAGES": stages, "ONCE": once, "STRIDED": strided,
                "TOKENS": tokens, "BULK": bulk,
            }
            module = check(driver.cuModuleLoadData, build(values))
            function = check(driver.cuModuleGetFunction, module, b"stream")
            size = max(stages * stage + 2048, 227 * 1024 // (per_sm + 1) + 1 if per_sm > 1 else 0)
            check(driver.cuFuncSetAttribute, function,
                  driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, size)
            map_ = tensor_map(weight, shape=(n, k), strides=(k, 1), box=(box, 128), swizzle=128, l2_promotion=promotion)
            other = tensor_map(token, shape=(128, k), strides=(k, 1), box=(max(tokens, 8), 128), swizzle=128)
            steps, pointer = ctypes.c_int(k // 128), ctypes.c_void_p(weight.data_ptr())
            pointers = (ctypes.c_void_p * 4)(map_.address, other.address, ctypes.addressof(steps),
                                             ctypes.addressof(pointer))
            grid = -(-n // r) * splits

            def call(function=function, grid=grid, size=size, pointers=pointers, keep=(map_, other, steps, pointer, module)):
                stream = torch.cuda.current_stream().cuda_stream
                check(driver.cuLaunchKernel, function, grid, 1, 1, 128, 1, 1, size, stream,
                      ctypes.addressof(pointers), 0)

            calls.append(call)
        found = [one.median_us for one in timing.measure(calls)]
        for variant, us in zip(variants, found, strict=True):
            rows.append({"n": n, "k": k, "variant": variant, "us": us})
            print(n, k, variant, f"{us:.2f} us {n * k / us / 1e6:.2f} TB/s", flush=True)
    if out := os.environ.get("OUT"):
        json.dump(rows, open(f"{out}/stream.json", "w"))


if __name__ == "__main__":
    if "--compile" in sys.argv:
        build({"ROWS": 64, "BOX": 64, "SPLITS": 2, "STAGES": 8, "ONCE": 0, "STRIDED": 0, "TOKENS": 8, "BULK": 0})
    else:
        main()
