// PARTS of K: each part of K is summed separately, and the sums of the parts are added in order. So a tile computed by
// one block is bitwise equal to one split over a cluster of PARTS blocks, and the order of summation along K does not
// depend on the number of tokens.
#pragma once

#include "gemm_layout.cuh"

__device__ __forceinline__ int part_begin(int part) { return part * K_BLOCKS / PARTS; }

// Whether each part is an even number of K blocks.
constexpr bool EVEN_PARTS = K_BLOCKS % (2 * PARTS) == 0;

// The sum of the earlier parts. PART_REGISTERS values of each thread are in registers, the others in shared memory,
// where each thread reads and writes only its own values.
struct PartSums {
  static constexpr int VALUES = SLABS * ACCUMULATORS, EACH = WARPGROUP * WARPGROUPS;

  float kept[PART_REGISTERS > 0 ? PART_REGISTERS : 1];
  float4* mine;  // this thread's values are every EACH-th element

  __device__ __forceinline__ explicit PartSums(Shared& s)
      : mine(reinterpret_cast<float4*>(s.epilogue + COLUMNS_AT - PART_SUM_BYTES) + threadIdx.x) {}

  // Clears the sums; called before a tile's first part.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < PART_REGISTERS; ++i) kept[i] = 0;
  }

  // Adds part `part` to the kept sums, and clears `sum` for the next part.
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

  // Adds the kept sums to part `part`, in `sum`.
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
