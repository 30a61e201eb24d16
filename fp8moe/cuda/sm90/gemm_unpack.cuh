// MXFP4 weights for tiles of many tokens: the three warps beside the loader unpack the codes of a stage to E4M3, in place,
// before the math warps get it. They also write the scales of its blocks of 128 features: the power of two that belongs
// to the largest exponent of a block. The rest of each exponent goes into the E4M3 values, which are exact if it is 14 or
// less, otherwise rounded.
//
// A feature takes 128 bytes of a stage, and its codes take 64 in the second half. So the first features are written below
// all codes, and later ones over codes of features that have been unpacked. Features are unpacked in rounds of 24:
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
  static constexpr int HELD = ceil_div(BLOCK_N, THREADS_HERE);
  static constexpr int BARRIER = 8;  // named barrier of these warps

  Shared& s;
  const u8* scales;
  int thread;
  u32 held[HELD];  // exponents of features `thread`, + 96, + 192 in the K block after the next

  __device__ __forceinline__ Unpacker(Shared& s, const float* b_scale)
      : s(s),
        scales(reinterpret_cast<const u8*>(b_scale)),
        thread(static_cast<int>(threadIdx.x) - (MATH_WARPS + 1) * WARP) {}

  __device__ __forceinline__ void fetch(const Tile& tile, int block) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const int row = thread + THREADS_HERE * i;
      const int within = GATED ? tile.n / 2 + row % 128 : tile.n + row;
      const int feature = GATED && row >= 128 ? within + INTERMEDIATE : within;
      held[i] = 0;
      if (row < BLOCK_N && within < (GATED ? INTERMEDIATE : N)) {
        held[i] = load_exponents(scales + (static_cast<long long>(tile.group) * N + feature) * ROW_SCALES, block);
      }
    }
  }

  // Shares the fetched exponents with the other warps. NaN does not count for the largest: it stays in its row.
  __device__ __forceinline__ void share(u32 buffer) {
    u32 largest[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const int row = thread + THREADS_HERE * i;
      if (row < BLOCK_N) s.exponents[buffer][row] = held[i];
      const u32 most = largest_exponent(held[i]);
      if (row < 128) {
        largest[0] = max(largest[0], most);
      } else {
        largest[1] = max(largest[1], most);
      }
    }
#pragma unroll
    for (int half = 0; half < BLOCK_N / 128; ++half) {
      const u32 most = __reduce_max_sync(FULL_WARP, largest[half]);
      if (lane_id() == 0) s.largest[buffer][thread / WARP][half] = most;
    }
  }

  // The place of what this thread does in round 0: 16 bytes of codes, that is one group of 32, and the two chunks of 16
  // values in the swizzled stage.
  struct Place {
    u32 codes, chunks[2];
    const u8* exponents;
    u32 largest[2] = {0, 0};
  };

  __device__ __forceinline__ bool exists(int round) const {
    return FEATURES * (round + 1) <= BLOCK_N || thread / 4 + FEATURES * round < BLOCK_N;
  }

  __device__ __forceinline__ uint4 read(const Place& place, int round) const {
    return load_shared_16(place.codes + round * THREADS_HERE * 16);
  }

  __device__ __forceinline__ void write(const Place& place, int round, uint4 codes) const {
    const int row = thread / 4 + FEATURES * round;
    const u32 exponent = place.exponents[4 * FEATURES * round];
    const u32 largest = row < 128 ? place.largest[0] : place.largest[1];
    const Bytes bytes = magnitudes(s, exponent == 255 ? NAN_ENTRY : largest - exponent);
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
    u32 values[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 low_bits = words[i] & 0x77777777, moved = words[i] << 4;
      values[2 * i] = unpack_four(bytes, low_bits, select_bytes(words[i], moved, 0x1504));
      values[2 * i + 1] = unpack_four(bytes, low_bits >> 16, select_bytes(words[i], moved, 0x3726));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      store_shared_16(place.chunks[i] + round * FEATURES * 128,
                      uint4{values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]});
    }
  }

  // Unpacks one stage. between(): called when all warps have begun with this stage.
  template <typename Between>
  __device__ __forceinline__ void unpack(u32 stage, u32 buffer, const Between& between) {
    const u32 values = shared_address(s.b[stage]), row = thread / 4, group = thread % 4;
    Place place;
    place.codes = values + CODES_AT + thread * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) place.chunks[i] = values + row * 128 + (2 * group + i ^ row % 8) * 16;
    place.exponents = reinterpret_cast<const u8*>(s.exponents[buffer]) + thread;
#pragma unroll
    for (int half = 0; half < BLOCK_N / 128; ++half) {
      u32 most = 0;
#pragma unroll
      for (int w = 0; w < UNPACK_WARPS; ++w) most = max(most, s.largest[buffer][w][half]);
      place.largest[half] = most;
      if (thread == 0) s.weight_scale[stage][half] = scale_of(most);
    }
#pragma unroll
    for (int round = 0; round < OVER; ++round) write(place, round, read(place, round));
    named_barrier(BARRIER, THREADS_HERE);
    between();
#pragma unroll
    for (int round = OVER; round < LAST; ++round) write(place, round, read(place, round));
    uint4 rest[ROUNDS - LAST];
#pragma unroll
    for (int i = 0; i < ROUNDS - LAST; ++i) {
      if (exists(LAST + i)) rest[i] = read(place, LAST + i);
    }
    named_barrier(BARRIER, THREADS_HERE);
#pragma unroll
    for (int i = 0; i < ROUNDS - LAST; ++i) {
      if (exists(LAST + i)) write(place, LAST + i, rest[i]);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane_id() == 0) s.ring.full[stage].arrive();
  }

  // Unpacks the stages of all tiles of the block.
  static __device__ __forceinline__ void run(Shared& s, Schedule<GROUPS>& schedule, const float* b_scale) {
    Unpacker self(s, b_scale);
    Pipeline<STAGES> pipeline(s.ring);
    Tile tile;
    bool more = schedule.next(tile);
    tile = same_in_warp(tile);
    if (!more) return;
    self.fetch(tile, 0);
    self.share(0);
    self.fetch(tile, 1);
    named_barrier(BARRIER, THREADS_HERE);
    u32 buffer = 0;
    while (more) {
      Tile following = tile;
#pragma unroll 1
      for (int block = 0; block < K_BLOCKS; ++block) {
        s.codes[pipeline.stage].wait(pipeline.phase);
        if (block == (DYNAMIC ? ANNOUNCED : 0)) {
          if constexpr (DYNAMIC) {
            following = s.groups.next(pipeline.stage);
            more = following.group >= 0;
          } else {
            more = schedule.next(following);
          }
          following = same_in_warp(following);
        }
        self.unpack(pipeline.stage, buffer, [&] {
          self.share(buffer ^ 1);
          if (block + 2 < K_BLOCKS) {
            self.fetch(tile, block + 2);
          } else if (more) {
            self.fetch(following, block + 2 - K_BLOCKS);
          }
        });
        buffer ^= 1;
        pipeline.advance();
      }
      tile = following;
    }
  }
};
