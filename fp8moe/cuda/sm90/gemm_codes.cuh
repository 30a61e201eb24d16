// Codes of four bits and their scales: MXFP4 (OCP Microscaling Formats v1.0: E2M1 codes, an E8M0 exponent for each 32
// along K), or INT4 (two's complement, a scale in bfloat16 or float32 for each GROUP along K).
#pragma once

#include "gemm_layout.cuh"

enum Packing : int { NOT_PACKED, MXFP4, INT4 };

constexpr int ROW_SCALES = K / GROUP;  // scales of an output feature in memory

// The E4M3 bytes of eight values.
struct Bytes {
  u32 low, high;

  // values: their numbers, 0 to 7, in the four lowest nibbles.
  __device__ __forceinline__ u32 pick(u32 values) const { return select_bytes(low, high, values); }
};
constexpr Bytes COUNTING_UP{0x44403800, 0x4E4C4A48};             // 0 to 7
constexpr Bytes COUNTING_DOWN_BELOW_ZERO{0xCACCCED0, 0xB8C0C4C8};  // -8 to -1

// The E4M3 bytes of four codes, given the three low bits of each in a nibble, and a word whose bytes have their fourth
// bits on top.
__device__ __forceinline__ u32 unpack_four(const Bytes& magnitudes, u32 low_bits, u32 signs) {
  if constexpr (PACKED == MXFP4) return magnitudes.pick(low_bits) | (signs & 0x80808080);
  const u32 negative = select_bytes(signs, 0, 0xBA98);  // each byte's sign in all of its bits
  return COUNTING_UP.pick(low_bits) & ~negative | COUNTING_DOWN_BELOW_ZERO.pick(low_bits) & negative;
}

// The magnitudes of E2M1 times 2^(6 - relative).
template <typename S>
__device__ __forceinline__ Bytes magnitudes(const S& s, u32 relative) {
  const u64 table = s.scaled[relative];
  return {static_cast<u32>(table), static_cast<u32>(table >> 32)};
}

// What exponents ask of the table of magnitudes, one byte each: how far they are below `largest`, or NAN_ENTRY.
constexpr u32 NAN_ENTRY = 255;
__device__ __forceinline__ u32 below(u32 largest, u32 exponents) {
  return largest * 0x01010101 - exponents | __vcmpeq4(exponents, 0xFFFFFFFF);
}

// The largest of four exponents, one byte each, that are not NaN.
__device__ __forceinline__ u32 largest_exponent(u32 exponents) {
  const u32 numbers = exponents & ~__vcmpeq4(exponents, 0xFFFFFFFF);
  const u32 pairs = max_of_pairs(numbers & 0x00FF00FF, numbers >> 8 & 0x00FF00FF);
  return max(pairs & 0xFFFF, pairs >> 16);
}

// Fills the table of magnitudes; called by all threads of the block, before they synchronize.
template <typename S>
__device__ __forceinline__ void fill_magnitudes(S& s) {
  if constexpr (PACKED == MXFP4) {
    for (int i = threadIdx.x; i < 256; i += THREADS) {
      const float one = __uint_as_float(max(0, 127 + 6 - i) << 23);
      const u32 low = u32{pack_e4m3(0.f, 0.5f * one)} | u32{pack_e4m3(one, 1.5f * one)} << 16;
      const u32 high = u32{pack_e4m3(2 * one, 3 * one)} | u32{pack_e4m3(4 * one, 6 * one)} << 16;
      s.scaled[i] = i == NAN_ENTRY ? 0x7F7F7F7F7F7F7F7F : u64{high} << 32 | low;
    }
  }
}

template <typename S>
__device__ __forceinline__ void init_codes(S& s) {
  if constexpr (UNPACKS) {
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) s.codes[i].init(1);
  }
}

// The four exponents of a K block, one byte each, of the row whose exponents begin at `row`. Past the end of K they are
// 0.
__device__ __forceinline__ u32 load_exponents(const u8* row, int block) {
  if constexpr (ROW_SCALES % 4 == 0) {
    return 4 * block < ROW_SCALES ? reinterpret_cast<const u32*>(row)[block] : 0;
  } else {
    u32 word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) word |= 4 * block + j < ROW_SCALES ? u32{row[4 * block + j]} << 8 * j : 0;
    return word;
  }
}

// 2^(exponent - 127) / 2^6. E8M0 has no zero.
__device__ __forceinline__ float scale_of(u32 exponent) {
  return __uint_as_float(exponent == 0 ? 0x00400000 : exponent << 23) * 0.015625f;
}
