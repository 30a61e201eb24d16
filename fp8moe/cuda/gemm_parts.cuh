// PARTS of K: each is summed by itself, and their sums are added up in order. So a tile that one block computes has the
// bits of one that a cluster of PARTS blocks has split, and K is summed alike for any number of tokens.
#pragma once

#include "gemm_layout.cuh"

__device__ __forceinline__ int part_begin(int part) { return part * K_BLOCKS / PARTS; }

// The sums of the parts so far: in registers, where these have room, or in shared memory, where a thread reads only
// what it has written.
struct PartSums {
  static constexpr int VALUES = SLABS * ACCUMULATORS, EACH = WARPGROUP * WARPGROUPS;

  float kept[PARTS_IN_REGISTERS ? VALUES : 1];
  float4* mine;  // every EACH-th of them is this thread's

  __device__ __forceinline__ explicit PartSums(Shared& s)
      : mine(reinterpret_cast<float4*>(s.epilogue + EPILOGUE_BYTES - PART_SUM_BYTES) + threadIdx.x) {}

  // Adds a part, so that after the last one `sum` has all of them.
  __device__ __forceinline__ void add(float (&sum)[SLABS][ACCUMULATORS], int part) {
    if constexpr (PARTS == 1) return;
    float* values = sum[0];
    if constexpr (PARTS_IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < VALUES; ++i) {
        kept[i] = part == 0 ? values[i] : kept[i] + values[i];
        if (part == PARTS - 1) values[i] = kept[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < VALUES; i += 4) {
        float4& place = mine[i / 4 * EACH];
        if (part > 0) {
          const float4 before = place;
          values[i] = before.x + values[i], values[i + 1] = before.y + values[i + 1];
          values[i + 2] = before.z + values[i + 2], values[i + 3] = before.w + values[i + 3];
        }
        if (part < PARTS - 1) place = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
      }
    }
  }
};
