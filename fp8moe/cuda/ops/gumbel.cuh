// Gumbel noise for each token of the vocabulary, determined by seed, step and token: -log(-log(u)), with u uniform in
// (0, 1) from Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11).
//
// Compile-time constants: those of exact_math.cuh; PHILOX_ROUNDS; PHILOX_FACTORS and PHILOX_WEYL, as {a, b}.
#pragma once

#include "exact_math.cuh"

using i64 = long long;

// Maps a word to (0, 1): to the middle of the word-th of 2^32 equal intervals.
__device__ __forceinline__ float unit_interval(u32 word) {
  return __fadd_rn(__fmul_rn(__uint2float_rn(word), 0x1p-32f), 0x1p-33f);
}

// The noise of one sequence. One Philox block serves four consecutive tokens and is kept for the next call.
class GumbelNoise {
 public:
  __device__ GumbelNoise(i64 seed, i64 step)
      : seed(static_cast<u64>(seed)), step(static_cast<u64>(step)), block(0xFFFFFFFFu) {}

  __device__ __forceinline__ float operator()(u32 token) {
    if (token / 4 != block) compute(token / 4);
    const u32 first = token & 1 ? words[1] : words[0];
    const u32 second = token & 1 ? words[3] : words[2];
    return of_word(token & 2 ? second : first);
  }

 private:
  __device__ __forceinline__ void compute(u32 number) {
    constexpr u32 factors[] = PHILOX_FACTORS;
    constexpr u32 weyl[] = PHILOX_WEYL;
    u32 key[] = {static_cast<u32>(seed), static_cast<u32>(seed >> 32)};
    u32 counter[] = {number, 0, static_cast<u32>(step), static_cast<u32>(step >> 32)};
#pragma unroll
    for (int round = 0; round < PHILOX_ROUNDS; ++round) {
      const u64 first = u64{counter[0]} * factors[0];
      const u64 second = u64{counter[2]} * factors[1];
      counter[0] = static_cast<u32>(second >> 32) ^ counter[1] ^ key[0];
      counter[1] = static_cast<u32>(second);
      counter[2] = static_cast<u32>(first >> 32) ^ counter[3] ^ key[1];
      counter[3] = static_cast<u32>(first);
      key[0] += weyl[0];
      key[1] += weyl[1];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = counter[i];
    block = number;
  }

  static __device__ __forceinline__ float of_word(u32 word) {
    // For u near 1 the noise is large. 1 - u is small there and keeps all digits of a float.
    const float log_u =
        word < 1u << 30 ? rounded_log_near_1(-unit_interval(word), 0.0f) : rounded_log(unit_interval(~word));
    return -rounded_log(-log_u);
  }

  u64 seed, step;
  u32 block;
  u32 words[4];
};
