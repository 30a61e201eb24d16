// Codes of four bits become E4M3: those of MXFP4 (OCP Microscaling Formats v1.0: E2M1 codes, an E8M0 exponent for each
// 32 along K), of NVFP4 (E2M1, an E4M3 scale for each 16), or of INT4 (two's complement, a scale in bfloat16 or float32
// for each GROUP along K).
//
// All integers are exact in E4M3. In MXFP4 the weight scale of a block of 128 features and 128 along K is the power of
// two that belongs to its largest exponent (cuda/ops/arrange_exponents.cu). What other exponents lack goes into the
// E4M3 values, which are exact if it is 14 or less, otherwise rounded. In NVFP4 a code times the mantissa of its scale
// is rounded.
#pragma once

#include "gemm_layout.cuh"

// The E4M3 bytes of eight values.
struct Bytes {
  u32 low, high;

  // values: their numbers, 0 to 7, in the four lowest nibbles.
  __device__ __forceinline__ u32 pick(u32 values) const { return select_bytes(low, high, values); }
};
constexpr Bytes COUNTING_UP{0x44403800, 0x4E4C4A48};               // 0 to 7
constexpr Bytes COUNTING_DOWN_BELOW_ZERO{0xCACCCED0, 0xB8C0C4C8};  // -8 to -1

// The E4M3 bytes of four codes of INT4, given the three low bits of each in a nibble, and a word whose bytes have their
// fourth bits on top.
__device__ __forceinline__ u32 unpack_integers(u32 low_bits, u32 signs) {
  const u32 negative = select_bytes(signs, 0, 0xBA98);  // each byte's sign in all of its bits
  return COUNTING_UP.pick(low_bits) & ~negative | COUNTING_DOWN_BELOW_ZERO.pick(low_bits) & negative;
}

// The magnitudes of the values of 16 along K, and of the next 16.
struct Magnitudes {
  Bytes first, second;
};

// The E4M3 bytes of eight codes of E2M1 (quant/arranged.py): of four values, and of the four that are 16 further on.
struct Eight {
  u32 first, second;

  __device__ __forceinline__ Eight(const Magnitudes& magnitudes, u32 word) {
    const u32 low_bits = word & 0x77777777;
    first = magnitudes.first.pick(low_bits) | word & 0x80808080;
    second = magnitudes.second.pick(low_bits >> 16) | word << 4 & 0x80808080;
  }
};

// Where the table has the magnitudes for a byte of arranged scales, from the table's first byte on.
__device__ __forceinline__ constexpr u32 entry_offset(u32 scale) { return PACKED == NVFP4 ? 8 * scale : scale; }

template <typename S>
__device__ __forceinline__ Bytes magnitudes(const S& s, u32 scale) {
  const u64 table = *reinterpret_cast<const u64*>(reinterpret_cast<const u8*>(s.scaled) + entry_offset(scale));
  return {static_cast<u32>(table), static_cast<u32>(table >> 32)};
}

// Fills the table of magnitudes; called by all threads of the block, before they synchronize.
template <typename S>
__device__ __forceinline__ void fill_magnitudes(S& s) {
  if constexpr (E2M1) {
    const int i = threadIdx.x;
    if (i >= ENTRIES) return;
    const bool zero = PACKED == NVFP4 && i == ENTRIES - 2;
    const u32 bits = PACKED == NVFP4 ? (127 + 5 - i / 8 << 23) + (i % 8 << 20) : 127 + 6 - i << 23;
    const float one = zero ? 0.f : __uint_as_float(bits);
    const u32 low = u32{pack_e4m3(0.f, 0.5f * one)} | u32{pack_e4m3(one, 1.5f * one)} << 16;
    const u32 high = u32{pack_e4m3(2 * one, 3 * one)} | u32{pack_e4m3(4 * one, 6 * one)} << 16;
    s.scaled[i] = i == ENTRIES - 1 ? 0x7F7F7F7F7F7F7F7F : u64{high} << 32 | low;
  }
}

template <typename S>
__device__ __forceinline__ void init_codes(S& s) {
  if constexpr (UNPACKS) {
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) s.codes[i].init(1);
  }
}
