// MXFP4 weights (OCP Microscaling Formats v1.0): four-bit E2M1 codes and, for each 32 along K, an E8M0 exponent.
//
// Math warps unpack the codes of a stage to E4M3 in registers, where wgmma takes its 64-row side from. Within a row and
// a K block the four exponents are taken relative to the largest: this power of two is the row's weight scale, and the
// rest goes into the E4M3 values. They are exact if it is 14 or less, otherwise rounded.
#pragma once

#include "gemm_math.cuh"

constexpr int K_GROUPS = K / 32;  // exponents of an output feature

// The exponents of one K block of two rows of a slab: those of this lane in an accumulator. relative: how far each of
// the four is below the largest, one byte each. scale: the power of two of the row.
struct Exponents {
  u32 relative[2];
  float scale[2];

  Exponents() = default;
  __device__ __forceinline__ explicit Exponents(const u32 (&biased)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 pair, most;
      asm("max.u16x2 %0, %1, %2;" : "=r"(pair) : "r"(biased[i] & 0x00FF00FF), "r"(biased[i] >> 8 & 0x00FF00FF));
      most = max(pair & 0xFFFF, pair >> 16);
      relative[i] = most * 0x01010101 - biased[i];
      // 2^(most - 127) / 2^6; E8M0 has no zero, and 255 is NaN.
      const u32 bits = most == 0 ? 0x00400000 : most == 255 ? 0x7FC00000 : most << 23;
      scale[i] = __uint_as_float(bits) * 0.015625f;
    }
  }
};

// The exponents of a warp's rows. Each lane holds those of its two rows of each slab for one of four K blocks; the next
// four are fetched one turn ahead.
struct PackedWeights {
  const u8* exponents;
  int k_first;  // the first K block of this thread block
  u32 next[SLABS][2];
  Exponents held[SLABS];

  __device__ __forceinline__ PackedWeights(const float* b_scale, int k_first)
      : exponents(reinterpret_cast<const u8*>(b_scale)), k_first(k_first) {}

  // Fetches the exponents of stages `first` and `first` + 1. Past the end of K exponents are 0, the least.
  __device__ __forceinline__ void fetch(const Tile& tile, int first, int) {
    const int group = 4 * (k_first + DEPTH * first + static_cast<int>(lane_id() % 4)), warp = threadIdx.x / WARP;
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = slab_row(warp / 4, slab) + warp % 4 * 16 + lane_id() / 4 + 8 * i;
        const int feature = GATED ? min(tile.n / 2 + row % 128, INTERMEDIATE - 1) + (row < 128 ? 0 : INTERMEDIATE)
                                  : min(tile.n + row, N - 1);
        const u8* there = exponents + (static_cast<long long>(tile.group) * N + feature) * K_GROUPS + group;
        next[slab][i] = 0;
        if constexpr (K_GROUPS % 4 == 0) {
          if (group < K_GROUPS) next[slab][i] = *reinterpret_cast<const u32*>(there);
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) next[slab][i] |= group + j < K_GROUPS ? u32{there[j]} << 8 * j : 0;
        }
      }
    }
  }

  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) held[slab] = Exponents(next[slab]);
  }

  // The exponents of K block `source` of this turn, of four.
  __device__ __forceinline__ Exponents at(int slab, int source) const {
    Exponents there;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      there.relative[i] = __shfl_sync(FULL_WARP, held[slab].relative[i], source, 4);
      there.scale[i] = __shfl_sync(FULL_WARP, held[slab].scale[i], source, 4);
    }
    return there;
  }
};

// A slab's weights of one K block as wgmma takes them from registers: rows lane / 4 and lane / 4 + 8 of each warp, and of
// each 32 along K the values 4 * (lane % 4) to + 3, of both rows, and the same 16 further on.
struct Fragments {
  u32 values[4][4];

  // codes: the address of the slab in a stage. block: 0 or 1, the K block within the stage.
  __device__ __forceinline__ void unpack(const u64* scaled, u32 codes, int block, const Exponents& exponents) {
    const int lane = lane_id(), first = threadIdx.x / WARP % 4 * 16;
    if constexpr (ARRANGED) {
      const int row = lane % 16;
      const u32 mine = codes + (first + row) * WEIGHT_BYTES + (lane / 16 ^ row % 8) * 16;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        u32 words[4];
        load_matrices(mine ^ (4 * block + 2 * pair) * 16, words);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = j % 2, k = 2 * pair + j / 2;
          const u64 table = scaled[exponents.relative[i] >> 8 * k & 0xFF];
          const u32 low = static_cast<u32>(table), high = static_cast<u32>(table >> 32);
          const u32 magnitudes = words[j] & 0x77777777;
          values[k][i] = __byte_perm(low, high, magnitudes) | (words[j] & 0x80808080);
          values[k][i + 2] = __byte_perm(low, high, magnitudes >> 16) | (words[j] << 4 & 0x80808080);
        }
      }
      return;
    }
    const u32 mine = codes + (first + lane / 4) * WEIGHT_BYTES + lane / 4 * 16 + lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const u32 at = mine ^ (4 * block + k) * 16;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u64 table = scaled[exponents.relative[i] >> 8 * k & 0xFF];
        const u32 low = static_cast<u32>(table), high = static_cast<u32>(table >> 32);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 four = load_shared_2(at + 8 * i * WEIGHT_BYTES + 8 * half);
          const u32 magnitudes = __byte_perm(low, high, four & 0x7777);
          const u32 signs = __byte_perm(four, four << 4, 0x1504);
          values[k][i + 2 * half] = magnitudes | (signs & 0x80808080);
        }
      }
    }
  }

  // Keeps the values in their registers until here, as wgmma reads them while it runs.
  __device__ __forceinline__ void keep() const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      asm volatile("" ::"r"(values[k][0]), "r"(values[k][1]), "r"(values[k][2]), "r"(values[k][3]));
    }
  }
};

// promote_swapped(), with a weight scale for each row.
template <bool First>
__device__ __forceinline__ void promote_packed(float (&sum)[ACCUMULATORS], const float (&partial)[ACCUMULATORS],
                                               const float (&tokens)[ACCUMULATORS / 2], const Exponents& exponents) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      add_product<First>(sum[4 * j + i], tokens[2 * j + i % 2] * exponents.scale[i / 2], partial[4 * j + i]);
    }
  }
}

struct PackedMathWarp : MathWarp {
  static constexpr int TURN = 2;

  PackedWeights weights;
  bool odd;  // the last stage of this thread block has one K block that the block multiplies, and one that it does not

  __device__ __forceinline__ PackedMathWarp(Shared& s, const float* b_scale, KRange k, int warpgroup)
      : MathWarp(s, b_scale, k, warpgroup), weights(b_scale, k.first), odd(SPLIT_K > 1 && k.blocks % DEPTH) {}

  static __device__ __forceinline__ void prepare(Shared& s) {
    for (int i = threadIdx.x; i < 256; i += THREADS) {
      const float one = __uint_as_float(max(0, 127 + 6 - i) << 23);
      const u32 low = u32{pack_e4m3(0.f, 0.5f * one)} | u32{pack_e4m3(one, 1.5f * one)} << 16;
      const u32 high = u32{pack_e4m3(2 * one, 3 * one)} | u32{pack_e4m3(4 * one, 6 * one)} << 16;
      s.scaled[i] = u64{high} << 32 | low;
    }
  }

  // With one block per SM, a warp unpacks while its last product runs. With several, it has no registers for that, and
  // products of other warps run.
  static constexpr int FLIGHT = BLOCKS_PER_SM == 1 ? 2 : 1;  // products that a warp starts before it waits for the first

  // The product of a slab and a K block. tokens: scales, which are loaded before the wait for the product, since handing
  // a stage back does not wait for loads in flight.
  struct Product {
    Fragments rows;
    float partial[ACCUMULATORS], tokens[ACCUMULATORS / 2];
    Exponents exponents;
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
    constexpr int COUNT = Blocks * Used;
    pipeline.arrived();
    const TileStart columns(shared_address(s.a[pipeline.stage]));
    const u32 codes = shared_address(s.b[pipeline.stage]);
    const float* a_scale = s.a_scale[pipeline.stage] + (GROUPS ? tile.m & 3 : 0) + 2 * (lane_id() % 4);
    const Released stage(pipeline);
    Product products[FLIGHT];
#pragma unroll
    for (int i = 0; i < COUNT + FLIGHT - 1; ++i) {
      if (i < COUNT) {
        const int slab = i % Used, block = i / Used;
        Product& next = products[i % FLIGHT];
        next.exponents = weights.at(slab, DEPTH * source + block);
        next.rows.unpack(s.scaled, codes + slab_row(warpgroup, slab) * WEIGHT_BYTES, block, next.exponents);
        load_tokens(next, a_scale + block * A_SCALE_PITCH);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BLOCK_K / 32; ++k) {
          wgmma(next.partial, next.rows.values[k], columns + (block * BLOCK_M * ROW_STEP + 2 * k), k > 0);
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
          promote_packed<true>(sum[ended % Used], last.partial, last.tokens, last.exponents);
        } else {
          promote_packed<false>(sum[ended % Used], last.partial, last.tokens, last.exponents);
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
