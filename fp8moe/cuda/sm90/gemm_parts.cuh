// PARTS of K: each part is summed separately, and the sums of parts are added up in order. So a tile computed by one
// block has the bits of a tile split over a cluster of PARTS blocks, and K is summed alike for any number of tokens.
#pragma once

#include "gemm_layout.cuh"

__device__ __forceinline__ int part_begin(int part) { return part * K_BLOCKS / PARTS; }

// Whether each part is an even number of blocks along K.
constexpr bool EVEN_PARTS = K_BLOCKS % (2 * PARTS) == 0;

// The sums of earlier parts: PART_REGISTERS values of each thread in registers, the others in shared memory, where a
// thread reads only its own values.
struct PartSums {
  static constexpr int VALUES = SLABS * ACCUMULATORS, EACH = WARPGROUP * WARPGROUPS;

  float kept[PART_REGISTERS > 0 ? PART_REGISTERS : 1];
  float4* mine;  // every EACH-th element is this thread's

  __device__ __forceinline__ explicit PartSums(Shared& s)
      : mine(reinterpret_cast<float4*>(s.epilogue + COLUMNS_AT - PART_SUM_BYTES) + threadIdx.x) {}

  // Before a tile's first part.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < PART_REGISTERS; ++i) kept[i] = 0;
  }

  // Keeps a part, and clears it for the next one.
  __device__ __forceinline__ void keep(float (&sum)[SLABS][ACCUMULATORS], int part) {
    add(sum, part);
    float* values = sum[0];
#pragma unroll
    for (int i = 0; i < PART_REGISTERS; ++i) kept[i] = values[i];
#pragma unroll
    for (int i = PART_REGISTERS; i < VALUES; i += 4)
      place(i) = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
#pragma unroll
    for (int i = 0; i < VALUES; ++i) values[i] = 0;
  }

  // Adds the kept sums to a part.
  __device__ __forceinline__ void add(float (&sum)[SLABS][ACCUMULATORS], int part) const {
    float* values = sum[0];
#pragma unroll
    for (int i = 0; i < PART_REGISTERS; ++i) values[i] = kept[i] + values[i];
    if (part == 0) return;
#pragma unroll
    for (int i = PART_REGISTERS; i < VALUES; i += 4) {
      const float4 before = place(i);
      values[i] = before.x + values[i], values[i + 1] = before.y + values[i + 1];
      values[i + 2] = before.z + values[i + 2], values[i + 3] = before.w + values[i + 3];
    }
  }

 private:
  __device__ __forceinline__ float4& place(int value) const { return mine[(value - PART_REGISTERS) / 4 * EACH]; }
};
