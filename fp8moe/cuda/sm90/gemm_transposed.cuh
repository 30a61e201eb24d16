// Weights (K, N), as the forward has them, for the input gradient, which sums over their rows: a tile of them comes to
// shared memory as it lies in global memory, and math warps transpose it on the way to the registers from which wgmma
// takes the 64-row side.
//
// ldmatrix.trans moves 16-bit elements: a lane gets, in rows n and n + 1, the two features 2c and 2c + 1. Bytes are then
// sorted by feature: row c of a slab's 16 is feature 2c, row c + 8 is feature 2c + 1, for c = lane / 4.
#pragma once

#include "gemm_math.cuh"

constexpr int WEIGHT_BOX = 128 * BLOCK_K;  // bytes of 128 features in a stage

struct TransposedMathWarp : MathWarp {
  u32 values[BLOCK_K / 32][4];  // of the next product, as they were loaded
  u32 place;                    // of this lane's row in 32 rows of a box
  u32 even, odd;                // selectors of the bytes of features 2c and 2c + 1

  __device__ __forceinline__ TransposedMathWarp(Shared& s, const float* b_scale, KRange k, int warpgroup)
      : MathWarp(s, b_scale, k, warpgroup) {
    // Lane i passes the address of row i % 8 of matrix i / 8. The lanes q = lane % 4 multiply rows 4q to 4q + 3, and
    // the same 16 further on. Two matrices hold these; from q = 2 on they are exchanged, so that the eight rows of a
    // matrix differ in their place within the swizzle, and no two lie in the same banks.
    const int lane = lane_id(), pair = lane % 8 / 2, warp = threadIdx.x / WARP % 4;
    const int row = 4 * pair + lane % 2 + 2 * (lane / 8 % 2 ^ pair / 2) + 16 * (lane / 16);
    place = row * BLOCK_K + (warpgroup * 4 + warp ^ row % 8) * 16;
    const bool exchanged = lane % 4 >= 2;
    even = exchanged ? 0x2064 : 0x6420;
    odd = exchanged ? 0x3175 : 0x7531;
  }

  __device__ __forceinline__ void load(u32 stage, int slab) {
    const u32 box = shared_address(s.b[stage]) + slab * WEIGHT_BOX + place;
#pragma unroll
    for (int k = 0; k < BLOCK_K / 32; ++k) load_transposed(box + k * 32 * BLOCK_K, values[k]);
  }

  template <bool First, int Used, typename Meanwhile>
  __device__ __forceinline__ void multiply(float (&sum)[SLABS][ACCUMULATORS], const Tile& tile, int source, bool more,
                                           const Meanwhile& meanwhile) {
    const TileScales weight_scales(weights, source, tile);
    if (First) {
      pipeline.arrived();
      load(pipeline.stage, 0);
    }
    const TileStart columns(shared_address(s.a[pipeline.stage]));
    const u32 tokens = shared_address(s.a_scale[pipeline.stage] + 2 * (lane_id() % 4));
    const Released released(pipeline);
    float partial[ACCUMULATORS];
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
#pragma unroll
      for (auto& v : values) {
        const u32 first = select_bytes(v[0], v[1], even), second = select_bytes(v[0], v[1], odd);
        const u32 third = select_bytes(v[2], v[3], even), fourth = select_bytes(v[2], v[3], odd);
        v[0] = first, v[1] = second, v[2] = third, v[3] = fourth;
      }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < BLOCK_K / 32; ++k) wgmma(partial, values[k], columns + 2 * k, k > 0);
      wgmma_commit();
      if (slab == 0) meanwhile();
      if (slab == SLABS - 1) {
        pipeline.advance();
        if (more) pipeline.arrived();
      }
      wgmma_wait<0>(partial);
#pragma unroll
      for (auto& v : values) asm volatile("" ::"r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]));
      // Also behind the tile's last stage, where nothing uses them: a branch would cost more.
      load(pipeline.stage, (slab + 1) % SLABS);
      const float weight = weight_scales.rows[slab];
      float last = 0.f;
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {
        const uint2 pair = load_shared_8(tokens + 32 * j);
        last = __uint_as_float(pair.y);
        const float scales[2] = {__uint_as_float(pair.x) * weight, last * weight};
#pragma unroll
        for (int i = 0; i < 4; ++i) add_product<First>(sum[slab][4 * j + i], scales[i % 2], partial[4 * j + i]);
      }
      if (slab == SLABS - 1) {
        // Loads from shared memory end in order, so once the last has, TMA may overwrite the stage. Handing it back
        // does not wait for them by itself.
        u32 empty = released.empty;
        asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, %1, 0xFFFFFFFF;\n@p add.u32 %0, %0, 8;\n}" : "+r"(empty) : "r"(__float_as_uint(last)));
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(empty);
      }
    }
  }

  template <int Used>
  __device__ __forceinline__ void multiply_more(float (&sum)[SLABS][ACCUMULATORS], const Tile& tile, int source,
                                                int count, bool more) {
    asm volatile("" : "+r"(count));
    multiply_stages<UNROLLED_STAGES>(
        count, [&](int i) { multiply<false, Used>(sum, tile, source + i, i + 1 < count || more, [] {}); });
  }
};
