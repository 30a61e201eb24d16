// Weights in four bits as the 64-row side: math warps unpack the codes of a stage in registers, where wgmma takes this
// side from.
#pragma once

#include "gemm_codes.cuh"
#include "gemm_math.cuh"

// Products of a K block: one for all values that share the row's scale. Units are what these products multiply.
constexpr int PIECES = PACKED == INT4 ? BLOCK_K / GROUP : 1;
constexpr int UNITS = DEPTH * PIECES;  // of a stage
constexpr int HELD = ceil_div(UNITS, 4);
constexpr int ROW_SCALES = K / GROUP;  // scales of an output feature in memory

// INT4: the scales of a warp's rows. Four lanes share two rows of each slab, and each holds every fourth unit of a
// turn; the units of the next turn are fetched one turn ahead.
struct RowScales {
  static constexpr int TURN = UNITS < 4 ? 4 / UNITS : 1;  // stages

  const u8* scales;
  int k_first;  // the first K block of this thread block
  u32 next[HELD][SLABS][2];
  float held[HELD][SLABS][2];

  __device__ __forceinline__ RowScales(const float* b_scale, KRange k)
      : scales(reinterpret_cast<const u8*>(b_scale)), k_first(k.first) {}

  // Fetches the scales of the turn that begins with stage `first`. Past the end of K they are 0.
  __device__ __forceinline__ void fetch(const Tile& tile, int first, int) {
    const int warp = threadIdx.x / WARP;
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
      const int unit = (k_first + DEPTH * first) * PIECES + static_cast<int>(lane_id() % 4) + 4 * h;
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = slab_row(warp / 4, slab) + warp % 4 * 16 + lane_id() / 4 + 8 * i;
          const int feature = GATED ? min(tile.n / 2 + row % 128, INTERMEDIATE - 1) + (row < 128 ? 0 : INTERMEDIATE)
                                    : min(tile.n + row, N - 1);
          next[h][slab][i] = load((static_cast<long long>(tile.group) * N + feature) * ROW_SCALES, unit);
        }
      }
    }
  }

  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) {
#pragma unroll
        for (int i = 0; i < 2; ++i) held[h][slab][i] = __uint_as_float(next[h][slab][i]);
      }
    }
  }

  // The scales of a lane's two rows in a unit of the turn's stage `source`.
  struct Pair {
    float rows[2];

    __device__ __forceinline__ float of(int row) const { return rows[row]; }
  };
  __device__ __forceinline__ Pair at(int slab, int source, int unit, const Tile&) const {
    const int lane = unit + (TURN > 1 ? UNITS * source : 0);
    Pair pair;
#pragma unroll
    for (int i = 0; i < 2; ++i) pair.rows[i] = __shfl_sync(FULL_WARP, held[HELD > 1 ? unit / 4 : 0][slab][i], lane, 4);
    return pair;
  }

 private:
  // first: the row's first scale.
  __device__ __forceinline__ u32 load(long long first, int unit) const {
    if (unit >= ROW_SCALES) return 0;
    if constexpr (FLOAT32_SCALES) return reinterpret_cast<const u32*>(scales)[first + unit];
    return u32{reinterpret_cast<const u16*>(scales)[first + unit]} << 16;
  }
};

// E2M1: WeightScales, whose lanes hold K blocks, for stages of DEPTH blocks.
struct BlockScales {
  static constexpr int TURN = WARP / DEPTH;

  WeightScales blocks;
  int count, warpgroup;

  __device__ __forceinline__ BlockScales(const float* b_scale, KRange k)
      : blocks(first_scale(b_scale, k.first)), count(k.blocks), warpgroup(threadIdx.x / WARPGROUP) {}

  __device__ __forceinline__ void fetch(const Tile& tile, int first, int) { blocks.fetch(tile, DEPTH * first, count); }
  __device__ __forceinline__ void turn() { blocks.turn(); }

  struct One {
    float scale;

    __device__ __forceinline__ float of(int) const { return scale; }
  };
  __device__ __forceinline__ One at(int slab, int source, int unit, const Tile& tile) const {
    return {TileScales(blocks, DEPTH * source + unit, tile).at(slab_row(warpgroup, slab))};
  }
};

// Weights of a slab as wgmma takes them from registers: rows lane / 4 and lane / 4 + 8 of each warp, and of each 32
// along K the values 4 * (lane % 4) to + 3, of both rows, and the same 16 further on. `Steps` steps of 32 along K.
template <int Steps>
struct Fragments {
  u32 values[Steps][4];

  // codes: the address of the slab in a stage. below: of E2M1, the words of the slab's scales. first: the first step of
  // the stage.
  __device__ __forceinline__ void unpack(const Shared& s, u32 codes, const u32* below, int first) {
    const int lane = lane_id(), rows = threadIdx.x / WARP % 4 * 16;
    if constexpr (E2M1) {
      static_assert(Steps == 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 words[4];
        load_matrices(codes + (rows + 8 * i + lane % 8) * WEIGHT_BYTES + (first + lane / 8 ^ lane % 8) * 16, words);
        const u32* relative = below + FEATURE_WORDS * (rows + lane / 4 + 8 * i);
        u32 scales[FEATURE_WORDS];
#pragma unroll
        for (int w = 0; w < FEATURE_WORDS; ++w) scales[w] = load_shared_4(relative + w);
        const auto of_group = [&](int g) { return magnitudes(s, select_bytes(scales[g / 4], 0, 0x4440 + g % 4)); };
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const Bytes first = of_group(k * FEATURE_WORDS);
          const Eight eight({first, FEATURE_WORDS > 1 ? of_group(k * FEATURE_WORDS + 1) : first}, words[k]);
          values[k][i] = eight.first, values[k][i + 2] = eight.second;
        }
      }
    } else {
      const u32 mine = codes + (rows + lane / 4) * WEIGHT_BYTES + lane / 4 * 16 + lane % 4 * 2;
#pragma unroll
      for (int k = 0; k < Steps; ++k) {
        const u32 at = mine ^ (first + k) * 16;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const u32 four = load_shared_2(at + 8 * i * WEIGHT_BYTES + 8 * half);
            values[k][i + 2 * half] = unpack_integers(four & 0x7777, select_bytes(four, four << 4, 0x1504));
          }
        }
      }
    }
  }

  // Keeps the values in their registers until here, as wgmma reads them while it runs.
  __device__ __forceinline__ void keep() const {
#pragma unroll
    for (int k = 0; k < Steps; ++k) {
      asm volatile("" ::"r"(values[k][0]), "r"(values[k][1]), "r"(values[k][2]), "r"(values[k][3]));
    }
  }
};

// promote_swapped(), with the weight scales of a lane's rows.
template <bool First, typename Scales>
__device__ __forceinline__ void promote_packed(float (&sum)[ACCUMULATORS], const float (&partial)[ACCUMULATORS],
                                               const float (&tokens)[ACCUMULATORS / 2], const Scales& scales) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      add_product<First>(sum[4 * j + i], tokens[2 * j + i % 2] * scales.of(i / 2), partial[4 * j + i]);
    }
  }
}

// The place of a row's scales in BELOW_WORDS.
__device__ __forceinline__ constexpr int scale_word(int block, int row) {
  return GATED ? row / 128 * (BELOW_WORDS / 2) + FEATURE_WORDS * (block * 128 + row % 128)
               : FEATURE_WORDS * (block * BLOCK_N + row);
}

template <bool Condition, typename A, typename B>
struct Conditional {
  using Type = A;
};
template <typename A, typename B>
struct Conditional<false, A, B> {
  using Type = B;
};

struct PackedMathWarp : MathWarp {
  using Weights = Conditional<E2M1, BlockScales, RowScales>::Type;
  using Scales = decltype(Weights(nullptr, KRange(0)).at(0, 0, 0, Tile{}));
  static constexpr int TURN = Weights::TURN;

  Weights weights;
  bool odd;  // the last stage of this thread block has one K block that the block multiplies, and one that it does not

  __device__ __forceinline__ PackedMathWarp(Shared& s, const float* b_scale, KRange k, int warpgroup)
      : MathWarp(s, b_scale, k, warpgroup), weights(b_scale, k), odd(SPLIT_K > 1 && k.blocks % DEPTH) {}

  static constexpr int STEPS = BLOCK_K / 32 / PIECES;  // of 32 along K, in a product

  // The product of a slab and a unit. tokens: scales, which are loaded before the wait for the product, since handing
  // a stage back does not wait for loads in flight.
  struct Product {
    Fragments<STEPS> rows;
    float partial[ACCUMULATORS], tokens[ACCUMULATORS / 2];
    Scales scales;
  };

  template <bool First, int Used, typename Meanwhile>
  __device__ __forceinline__ void multiply(float (&sum)[SLABS][ACCUMULATORS], const Tile& tile, int source, bool more,
                                           const Meanwhile& meanwhile) {
    if (odd && !more) {
      multiply_blocks<First, Used, 1>(sum, tile, source, meanwhile);
    } else {
      multiply_blocks<First, Used, DEPTH>(sum, tile, source, meanwhile);
    }
  }

  template <int Used>
  __device__ __forceinline__ void multiply_more(float (&sum)[SLABS][ACCUMULATORS], const Tile& tile, int source,
                                                int count, bool more) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) multiply<false, Used>(sum, tile, source + i, i + 1 < count || more, [] {});
  }

 private:
  // Multiplies the first `Blocks` K blocks of a stage.
  template <bool First, int Used, int Blocks, typename Meanwhile>
  __device__ __forceinline__ void multiply_blocks(float (&sum)[SLABS][ACCUMULATORS], const Tile& tile, int source,
                                                  const Meanwhile& meanwhile) {
    constexpr int COUNT = Blocks * PIECES * Used;
    pipeline.arrived();
    const TileStart columns(shared_address(s.a[pipeline.stage]));
    const u32 codes = shared_address(s.b[pipeline.stage]);
    const float* a_scale = s.a_scale[pipeline.stage] + first_token_scale(tile) + ColumnScales::first_of_lane();
    const u32* below = scales_below(s, pipeline.stage);
    const Released stage(pipeline);
    Product products[PRODUCTS];
#pragma unroll
    for (int i = 0; i < COUNT + PRODUCTS - 1; ++i) {
      if (i < COUNT) {
        const int slab = i % Used, unit = i / Used, block = unit / PIECES, step = unit % PIECES * STEPS;
        Product& next = products[i % PRODUCTS];
        const int row = slab_row(warpgroup, slab);
        next.scales = weights.at(slab, source, unit, tile);
        next.rows.unpack(s, codes + row * WEIGHT_BYTES, below + scale_word(block, row), STEPS * unit);
        load_tokens(next, a_scale + block * A_SCALE_PITCH);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
          wgmma(next.partial, next.rows.values[k], columns + (block * BLOCK_M * ROW_STEP + 2 * (step + k)), k > 0);
        }
        wgmma_commit();
        if (i == 0) meanwhile();
      }
      if (i >= PRODUCTS - 1) {
        const int ended = i - (PRODUCTS - 1);
        Product& last = products[ended % PRODUCTS];
        if (ended == COUNT - 1) {
          wgmma_wait<0>(last.partial);
          last.rows.keep();
          stage.arrive();
        } else if (i < COUNT) {
          wgmma_wait<PRODUCTS - 1>(last.partial);
          last.rows.keep();
        } else {
          wgmma_wait<0>(last.partial);
          last.rows.keep();
        }
        if (First && ended < Used) {
          promote_packed<true>(sum[ended % Used], last.partial, last.tokens, last.scales);
        } else {
          promote_packed<false>(sum[ended % Used], last.partial, last.tokens, last.scales);
        }
      }
    }
    pipeline.advance();
  }

  __device__ __forceinline__ void load_tokens(Product& product, const float* scales) const {
#pragma unroll
    for (int j = 0; j < ACCUMULATORS / 2; ++j) product.tokens[j] = load_shared_float(scales + column_scales[j]);
  }
};
