// PARTS of K: each is summed by itself, and their sums are added up in order. So a tile that one block computes has the
// bits of one that a cluster of PARTS blocks has split, and K is summed alike for any number of tokens.
#pragma once

#include "gemm_layout.cuh"

__device__ __forceinline__ int part_begin(int part) { return part * K_BLOCKS / PARTS; }

// The sums of the parts so far: in registers, where these have room, or in memory, where a thread reads only what it
// has written.
struct PartSums {
  static constexpr int VALUES = SLABS * ACCUMULATORS, EACH = WARPGROUP * WARPGROUPS;
  static constexpr bool IN_MEMORY = PARTS > 1 && !PARTS_IN_REGISTERS;

  float kept[PARTS > 1 && PARTS_IN_REGISTERS ? VALUES : 1];
  float4* mine;  // every EACH-th of them is this thread's

  __device__ __forceinline__ explicit PartSums(float4* memory)
      : mine(IN_MEMORY ? memory + static_cast<long long>(blockIdx.x) * (VALUES / 4) * EACH + threadIdx.x : nullptr) {}

  // Adds a part, so that after the last one `sum` has all of them.
  __device__ __forceinline__ void add(float (&sum)[SLABS][ACCUMULATORS], int part) {
    if constexpr (PARTS == 1) return;
    float* values = sum[0];
    if constexpr (IN_MEMORY) {
#pragma unroll
      for (int i = 0; i < VALUES; i += 4) {
        float4* place = mine + i / 4 * EACH;
        if (part > 0) {
          const float4 before = __ldcg(place);
          values[i] = before.x + values[i], values[i + 1] = before.y + values[i + 1];
          values[i + 2] = before.z + values[i + 2], values[i + 3] = before.w + values[i + 3];
        }
        if (part < PARTS - 1) __stcg(place, make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < VALUES; ++i) {
        kept[i] = part == 0 ? values[i] : kept[i] + values[i];
        if (part == PARTS - 1) values[i] = kept[i];
      }
    }
  }
};
