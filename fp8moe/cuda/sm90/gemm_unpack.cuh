// Weights of E2M1 for tiles of many tokens: the three warps beside the loader unpack the codes of a stage to E4M3, in
// place, before the math warps get it.
//
// A feature takes 128 bytes of a stage, and its codes take 64 in the second half. Features are unpacked in rounds
// of 24. Rounds before OVER are written below all codes; the others, over codes that all threads have read.
#pragma once

#include "gemm_codes.cuh"
#include "gemm_math.cuh"

struct Unpacker {
  static constexpr int THREADS_HERE = UNPACK_WARPS * WARP, FEATURES = THREADS_HERE / 4;  // four threads a feature
  static constexpr int ROUNDS = ceil_div(BLOCK_N, FEATURES);
  static constexpr int OVER = BLOCK_N / 2 / FEATURES;
  static constexpr int AHEAD_ROUNDS = 2;  // rounds whose magnitudes are loaded ahead
  static constexpr int BARRIER = 8;       // named barrier of these warps

  Shared& s;
  int thread;

  __device__ __forceinline__ explicit Unpacker(Shared& s)
      : s(s), thread(static_cast<int>(threadIdx.x) - (MATH_WARPS + 1) * WARP) {}

  // Whether a round has a feature for this thread.
  __device__ __forceinline__ bool exists(int round) const {
    return FEATURES * (round + 1) <= BLOCK_N || thread / 4 + FEATURES * round < BLOCK_N;
  }

  // magnitudes(), loaded here and not later. scales: those of 32 along K, one byte or two.
  __device__ __forceinline__ Magnitudes load_magnitudes(u32 scales) const {
    const auto load = [&](u32 scale) {
      const uint2 table = load_shared_8(shared_address(s.scaled) + entry_offset(scale));
      return Bytes{table.x, table.y};
    };
    if constexpr (FEATURE_WORDS > 1) return {load(scales & 0xFF), load(scales >> 8)};
    const Bytes both = load(scales);
    return {both, both};
  }

  // Writes a group of 32 values as two chunks of 16.
  static __device__ __forceinline__ void write(const u32 (&chunks)[2], int offset, const Magnitudes& magnitudes,
                                               uint4 codes) {
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
    u32 values[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Eight eight(magnitudes, words[i]);
      values[i] = eight.first, values[4 + i] = eight.second;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      store_shared_16(chunks[i] + offset,
                      uint4{values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]});
    }
  }

  // Loads are issued before what depends on them, to hide their latency.
  __device__ __forceinline__ void unpack(u32 stage) const {
    const u32 values = shared_address(s.b[stage]), row = thread / 4, group = thread % 4;
    const u32 mine = values + CODES_AT + thread * 16,
              below = shared_address(scales_below(s, stage)) + thread * FEATURE_WORDS;
    u32 chunks[2];  // of round 0, in the swizzled stage
#pragma unroll
    for (int i = 0; i < 2; ++i) chunks[i] = values + row * 128 + (2 * group + i ^ row % 8) * 16;
    u32 scales[ROUNDS];
    uint4 codes[ROUNDS];
    Magnitudes found[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const u32 at = below + i * THREADS_HERE * FEATURE_WORDS;
      scales[i] = !exists(i) ? 0 : FEATURE_WORDS > 1 ? load_shared_2(at) : load_shared_1(at);
    }
    const auto load = [&](int i) {
      if (exists(i)) codes[i] = load_shared_16(mine + i * THREADS_HERE * 16);
    };
#pragma unroll
    for (int i = 0; i < ROUNDS - OVER; ++i) load(i);
#pragma unroll
    for (int i = 0; i < AHEAD_ROUNDS; ++i) found[i] = load_magnitudes(scales[i]);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      if (i < OVER) load(i + ROUNDS - OVER);
      if (i + AHEAD_ROUNDS < ROUNDS) found[i + AHEAD_ROUNDS] = load_magnitudes(scales[i + AHEAD_ROUNDS]);
      if (i == OVER) named_barrier(BARRIER, THREADS_HERE);
      if (exists(i)) write(chunks, i * FEATURES * 128, found[i], codes[i]);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane_id() == 0) s.ring.full[stage].arrive();
  }

  // Unpacks the stages of all tiles of the block.
  static __device__ __forceinline__ void run(Shared& s, Schedule<GROUPS>& schedule) {
    const Unpacker self(s);
    Pipeline<STAGES> pipeline(s.ring);
    Tile tile;
    bool more = schedule.next(tile);
    while (more) {
#pragma unroll 1
      for (int block = 0; block < K_BLOCKS; ++block) {
        s.codes[pipeline.stage].wait(pipeline.phase);
        if constexpr (DYNAMIC) {
          if (block == ANNOUNCED) more = same_in_warp(s.groups.next(pipeline.stage).group) >= 0;
        }
        self.unpack(pipeline.stage);
        pipeline.advance();
      }
      if constexpr (!DYNAMIC) more = schedule.next(tile);
    }
  }
};
