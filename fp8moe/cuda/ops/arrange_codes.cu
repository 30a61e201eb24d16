// Arranges the codes of MXFP4 weights for the GEMM kernels, 32 values in each thread (quant/arranged.py).
//
// Compile-time constants: THREADS.
#include "ptx.cuh"

// Four fourth bits of nibbles, a byte apart.
__device__ __forceinline__ u32 spread(u32 half) {
  return half & 0x8 | (half & 0x80) << 4 | (half & 0x800) << 8 | (half & 0x8000) << 12;
}

// codes, arranged: `count` groups.
extern "C" __global__ void __launch_bounds__(THREADS)
    arrange_codes(const uint4* codes, uint4* arranged, long long count) {
  const long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  if (i >= count) return;
  const uint4 group = codes[i];
  const u32 stored[4] = {group.x, group.y, group.z, group.w};
  u32 words[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const u32 low = stored[q / 2] >> 16 * (q % 2), high = stored[2 + q / 2] >> 16 * (q % 2);
    words[q] = low & 0x7777 | (high & 0x7777) << 16 | spread(low) << 4 | spread(high);
  }
  arranged[i] = uint4{words[0], words[1], words[2], words[3]};
}
