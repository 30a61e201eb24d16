// MXFP4 weights for tiles of many tokens: the three warps beside the loader unpack the codes of a stage to E4M3, in
// place, before the math warps get it. Seven warps take as long (docs/findings/four-bit-weights.md).
//
// A feature takes 128 bytes of a stage, and its codes take 64 in the second half. So the first features are written
// below all codes, and later ones over codes of features that have been unpacked. Features are unpacked in rounds of
// 24:
//
//   rounds [0, OVER)     write below all codes
//   rounds [OVER, LAST)  write over codes of the rounds before OVER
//   rounds [LAST, end)   are read before the first of them is written
#pragma once

#include "gemm_codes.cuh"
#include "gemm_math.cuh"

struct Unpacker {
  static constexpr int THREADS_HERE = UNPACK_WARPS * WARP, FEATURES = THREADS_HERE / 4;  // four threads a feature
  static constexpr int ROUNDS = ceil_div(BLOCK_N, FEATURES);
  static constexpr int OVER = BLOCK_N / 2 / FEATURES, LAST = (BLOCK_N / 2 + FEATURES * OVER / 2) / FEATURES;
  static constexpr int BARRIER = 8;  // named barrier of these warps

  Shared& s;
  int thread;

  __device__ __forceinline__ explicit Unpacker(Shared& s)
      : s(s), thread(static_cast<int>(threadIdx.x) - (MATH_WARPS + 1) * WARP) {}

  // The codes of a group of 32, and where the table has the magnitudes of its values.
  struct Group {
    uint4 codes;
    u32 entry;
  };

  // Whether a round has a feature for this thread.
  __device__ __forceinline__ bool exists(int round) const {
    return FEATURES * (round + 1) <= BLOCK_N || thread / 4 + FEATURES * round < BLOCK_N;
  }

  // Reads rounds First to End - 1. Loads are issued before what depends on them, to hide their latency.
  template <int First, int End>
  __device__ __forceinline__ void read(u32 codes, u32 below, Group (&groups)[End - First]) const {
#pragma unroll
    for (int i = 0; i < End - First; ++i) {
      groups[i].entry = exists(First + i) ? load_shared_1(below + (First + i) * THREADS_HERE) : 0;
    }
#pragma unroll
    for (int i = 0; i < End - First; ++i) {
      if (exists(First + i)) groups[i].codes = load_shared_16(codes + (First + i) * THREADS_HERE * 16);
    }
  }

  // Writes them, each as two chunks of 16 values.
  template <int First, int End>
  __device__ __forceinline__ void write(const u32 (&chunks)[2], const Group* groups) const {
#pragma unroll
    for (int round = First; round < End; ++round) {
      const Group& group = groups[round - First];
      const Bytes bytes = magnitudes(s, group.entry);
      const u32 words[4] = {group.codes.x, group.codes.y, group.codes.z, group.codes.w};
      u32 values[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 low_bits = words[i] & 0x77777777, moved = words[i] << 4;
        values[2 * i] = unpack_four(bytes, low_bits, select_bytes(words[i], moved, 0x1504));
        values[2 * i + 1] = unpack_four(bytes, low_bits >> 16, select_bytes(words[i], moved, 0x3726));
      }
      if (exists(round)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          store_shared_16(chunks[i] + round * FEATURES * 128,
                          uint4{values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]});
        }
      }
    }
  }

  __device__ __forceinline__ void unpack(u32 stage) const {
    const u32 values = shared_address(s.b[stage]), row = thread / 4, group = thread % 4;
    const u32 codes = values + CODES_AT + thread * 16, below = shared_address(exponents_below(s, stage)) + thread;
    u32 chunks[2];  // of round 0, in the swizzled stage
#pragma unroll
    for (int i = 0; i < 2; ++i) chunks[i] = values + row * 128 + (2 * group + i ^ row % 8) * 16;
    Group first[OVER];
    read<0, OVER>(codes, below, first);
    write<0, OVER>(chunks, first);
    named_barrier(BARRIER, THREADS_HERE);
    Group rest[ROUNDS - OVER];
    read<OVER, ROUNDS>(codes, below, rest);
    write<OVER, LAST>(chunks, rest);
    named_barrier(BARRIER, THREADS_HERE);
    write<LAST, ROUNDS>(chunks, rest + (LAST - OVER));
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
