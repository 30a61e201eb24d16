// Weights in four bits: MXFP4 (OCP Microscaling Formats v1.0: E2M1 codes, an E8M0 exponent for each 32 along K), or INT4
// (two's complement, a scale in bfloat16 or float32 for each GROUP along K).
//
// Math warps unpack the codes of a stage to E4M3 in registers, where wgmma takes its 64-row side from. All integers are
// exact in E4M3. Of MXFP4, the exponents of a K block are taken relative to the largest of a lane's two rows: this power
// of two is the weight scale of both rows, and the rest goes into the E4M3 values, which are exact if it is 14 or less,
// otherwise rounded.
#pragma once

#include "gemm_codes.cuh"
#include "gemm_math.cuh"

// Products of a K block: one for all values that share the row's scale. Units are what these products multiply.
constexpr int PIECES = PACKED == INT4 ? BLOCK_K / GROUP : 1;
constexpr int UNITS = DEPTH * PIECES;  // of a stage
constexpr int HELD = ceil_div(UNITS, 4);

// What scales one unit of two rows of a slab: those of this lane in an accumulator. relative: of MXFP4, see below().
struct RowScales {
  static constexpr int SCALES = PACKED == INT4 ? 2 : 1;  // INT4: one for each row

  u32 relative[2];
  float scale[SCALES];

  __device__ __forceinline__ float of(int row) const { return scale[row % SCALES]; }
};

// The scales of a warp's rows. Four lanes share two rows of each slab, and each holds every fourth unit of a turn; the
// units of the next turn are fetched one turn ahead.
struct PackedWeights {
  static constexpr int TURN = UNITS < 4 ? 4 / UNITS : 1;  // stages

  const u8* scales;
  int k_first;  // the first K block of this thread block
  u32 next[HELD][SLABS][2];
  RowScales held[HELD][SLABS];

  __device__ __forceinline__ PackedWeights(const float* b_scale, int k_first)
      : scales(reinterpret_cast<const u8*>(b_scale)), k_first(k_first) {}

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
      for (int slab = 0; slab < SLABS; ++slab) held[h][slab] = scales_of(next[h][slab]);
    }
  }

  // The scales of a unit of this turn.
  __device__ __forceinline__ RowScales at(int slab, int unit) const {
    const RowScales& kept = held[HELD > 1 ? unit / 4 : 0][slab];
    RowScales there;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (PACKED == MXFP4) there.relative[i] = __shfl_sync(FULL_WARP, kept.relative[i], unit, 4);
      if (i < RowScales::SCALES) there.scale[i] = __shfl_sync(FULL_WARP, kept.scale[i], unit, 4);
    }
    return there;
  }

 private:
  // What memory has of a unit: the four exponents of a K block, or a scale. first: the row's first scale.
  __device__ __forceinline__ u32 load(long long first, int unit) const {
    if constexpr (PACKED == INT4 && FLOAT32_SCALES) {
      return unit < ROW_SCALES ? reinterpret_cast<const u32*>(scales)[first + unit] : 0;
    } else if constexpr (PACKED == INT4) {
      return unit < ROW_SCALES ? u32{reinterpret_cast<const u16*>(scales)[first + unit]} << 16 : 0;
    } else {
      return load_exponents(scales + first, unit);
    }
  }

  static __device__ __forceinline__ RowScales scales_of(const u32 (&loaded)[2]) {
    RowScales rows;
    if constexpr (PACKED == INT4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) rows.scale[i] = __uint_as_float(loaded[i]);
    } else {
      const u32 largest = max(largest_exponent(loaded[0]), largest_exponent(loaded[1]));
#pragma unroll
      for (int i = 0; i < 2; ++i) rows.relative[i] = below(largest, loaded[i]);
      rows.scale[0] = scale_of(largest);
    }
    return rows;
  }
};

// Weights of a slab as wgmma takes them from registers: rows lane / 4 and lane / 4 + 8 of each warp, and of each 32 along
// K the values 4 * (lane % 4) to + 3, of both rows, and the same 16 further on. `Steps` steps of 32 along K.
template <int Steps>
struct Fragments {
  u32 values[Steps][4];

  // codes: the address of the slab in a stage. first: the first step of the stage.
  __device__ __forceinline__ void unpack(const Shared& s, u32 codes, int first, const RowScales& scales) {
    const int lane = lane_id(), row = threadIdx.x / WARP % 4 * 16;
    if constexpr (ARRANGED) {
      static_assert(Steps % 2 == 0);
      const u32 mine = codes + (row + lane % 16) * WEIGHT_BYTES + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
      for (int pair = 0; pair < Steps / 2; ++pair) {
        u32 words[4];
        load_matrices(mine ^ (first + 2 * pair) * 16, words);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = j % 2, k = 2 * pair + j / 2;
          const Bytes magnitudes = scaled(s, scales.relative[i], k);
          const u32 low_bits = words[j] & 0x77777777;
          values[k][i] = unpack_four(magnitudes, low_bits, words[j]);
          values[k][i + 2] = unpack_four(magnitudes, low_bits >> 16, words[j] << 4);
        }
      }
      return;
    }
    const u32 mine = codes + (row + lane / 4) * WEIGHT_BYTES + lane / 4 * 16 + lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < Steps; ++k) {
      const u32 at = mine ^ (first + k) * 16;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Bytes magnitudes = scaled(s, scales.relative[i], k);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 four = load_shared_2(at + 8 * i * WEIGHT_BYTES + 8 * half);
          values[k][i + 2 * half] =
              unpack_four(magnitudes, four & 0x7777, select_bytes(four, four << 4, 0x1504));
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

 private:
  // The magnitudes of E2M1, scaled for step k of a K block.
  static __device__ __forceinline__ Bytes scaled(const Shared& s, u32 relative, int k) {
    if constexpr (PACKED == INT4) return {};
    return magnitudes(s, relative >> 8 * k & 0xFF);
  }
};

// promote_swapped(), with the weight scales of a lane's rows.
template <bool First>
__device__ __forceinline__ void promote_packed(float (&sum)[ACCUMULATORS], const float (&partial)[ACCUMULATORS],
                                               const float (&tokens)[ACCUMULATORS / 2], const RowScales& scales) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      add_product<First>(sum[4 * j + i], tokens[2 * j + i % 2] * scales.of(i / 2), partial[4 * j + i]);
    }
  }
}

struct PackedMathWarp : MathWarp {
  static constexpr int TURN = PackedWeights::TURN;

  PackedWeights weights;
  bool odd;  // the last stage of this thread block has one K block that the block multiplies, and one that it does not

  __device__ __forceinline__ PackedMathWarp(Shared& s, const float* b_scale, KRange k, int warpgroup)
      : MathWarp(s, b_scale, k, warpgroup), weights(b_scale, k.first), odd(SPLIT_K > 1 && k.blocks % DEPTH) {}

  // With one block per SM, a warp unpacks while its last product runs. With several, it has no registers for that, and
  // products of other warps run.
  static constexpr int FLIGHT = BLOCKS_PER_SM == 1 ? 2 : 1;  // products that a warp starts before it waits for the first

  static constexpr int STEPS = BLOCK_K / 32 / PIECES;  // of 32 along K, in a product

  // The product of a slab and a unit. tokens: scales, which are loaded before the wait for the product, since handing
  // a stage back does not wait for loads in flight.
  struct Product {
    Fragments<STEPS> rows;
    float partial[ACCUMULATORS], tokens[ACCUMULATORS / 2];
    RowScales scales;
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
    const float* a_scale = s.a_scale[pipeline.stage] + (GROUPS ? tile.m & 3 : 0) + 2 * (lane_id() % 4);
    const Released stage(pipeline);
    Product products[FLIGHT];
#pragma unroll
    for (int i = 0; i < COUNT + FLIGHT - 1; ++i) {
      if (i < COUNT) {
        const int slab = i % Used, unit = i / Used, block = unit / PIECES, step = unit % PIECES * STEPS;
        Product& next = products[i % FLIGHT];
        next.scales = weights.at(slab, unit + (TURN > 1 ? UNITS * source : 0));
        next.rows.unpack(s, codes + slab_row(warpgroup, slab) * WEIGHT_BYTES, STEPS * unit, next.scales);
        load_tokens(next, a_scale + block * A_SCALE_PITCH);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
          wgmma(next.partial, next.rows.values[k], columns + (block * BLOCK_M * ROW_STEP + 2 * (step + k)), k > 0);
        }
        wgmma_commit();
        if (i == 0) meanwhile();
      }
      if (i >= FLIGHT - 1) {
        const int ended = i - (FLIGHT - 1);
        Product& last = products[ended % FLIGHT];
        if (ended == COUNT - 1) {
          wgmma_wait<0>(last.partial);
          last.rows.keep();
          stage.arrive();
        } else if (i < COUNT) {
          wgmma_wait<FLIGHT - 1>(last.partial);
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

  static __device__ __forceinline__ void load_tokens(Product& product, const float* scales) {
#pragma unroll
    for (int j = 0; j < ACCUMULATORS / 2; ++j) product.tokens[j] = load_shared_float(scales + 8 * (j / 2) + j % 2);
  }
};
