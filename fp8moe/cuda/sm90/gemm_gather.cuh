// Rows of tokens gathered by index: the three warps beside the loader copy the rows of a tile, and their scales, to its
// stage, 16 bytes at a time and swizzled as TMA would, while the loader brings weights.
//
// A stage is announced LAG stages after its copies have been issued, so that they need not be waited for one by one.
#pragma once

#include "gemm_math.cuh"

struct Gatherer {
  static constexpr int COPIERS = 3 * WARP, CHUNKS = BLOCK_K / 16, ROWS_AT_ONCE = COPIERS / CHUNKS;
  static constexpr int PASSES = ceil_div(BLOCK_M, ROWS_AT_ONCE);
  static constexpr int LAG = STAGES > 3 ? 2 : 1;

  Shared& s;
  const ScheduleArguments& args;
  int thread;

  static __device__ __forceinline__ void run(Shared& s, Schedule<GROUPS>& schedule, const ScheduleArguments& args,
                                             KRange k) {
    const Gatherer self{s, args, static_cast<int>(threadIdx.x) - (MATH_WARPS + 1) * WARP};
    Pipeline<STAGES> pipeline(s.ring), behind(s.ring);
    wait_for_previous_kernel();
    int issued = 0;
    Tile tile;
    while (schedule.next(tile)) {
#pragma unroll 1
      for (int i = 0; i < k.count; ++i) {
        pipeline.acquire();
        self.copy(tile, k.block(i), pipeline.stage);
        async_commit();
        pipeline.advance();
        if (issued == LAG) {
          async_wait<LAG>();
          announce(behind);
        } else {
          ++issued;
        }
      }
    }
    async_wait<0>();
    for (; issued > 0; --issued) announce(behind);
  }

  // Tells the math warps that this warp's copies to a stage have ended.
  static __device__ __forceinline__ void announce(Pipeline<STAGES>& behind) {
    fence_async_proxy();
    __syncwarp();
    if (lane_id() == 0) behind.full().arrive();
    behind.advance();
  }

  __device__ __forceinline__ int token(const Tile& tile, int row) const {
    const int at = tile.m + row;
    return at < tile.end ? __ldg(args.tokens + at) : -1;
  }

  __device__ __forceinline__ void copy(const Tile& tile, int k_block, u32 stage) const {
    const int chunk = thread % CHUNKS, column = k_block * BLOCK_K + chunk * 16;
    const u32 target = shared_address(s.a[stage]);
    const bool inside = K % BLOCK_K == 0 || column < K;
#pragma unroll 4
    for (int pass = 0; pass < PASSES; ++pass) {
      const int row = pass * ROWS_AT_ONCE + thread / CHUNKS;
      if (row < BLOCK_M && tile.m + row < tile.end) {
        const int from = token(tile, row);
        async_copy_16(target + row * BLOCK_K + (chunk ^ row % 8) * 16,
                      args.a + static_cast<long long>(max(from, 0)) * args.a_pitch + column, inside && from >= 0);
      }
    }
    const u32 scales = shared_address(s.a_scale[stage] + (tile.m & 3));
#pragma unroll
    for (int first = 0; first < BLOCK_M; first += COPIERS) {
      const int row = first + thread;
      if (row < BLOCK_M && tile.m + row < tile.end) {
        const int from = token(tile, row);
        async_copy_4(scales + row * 4, args.a_scale + k_block * args.a_scale_pitch + max(from, 0), from >= 0);
      }
    }
  }
};
