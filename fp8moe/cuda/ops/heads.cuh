// Heads of queries and keys in registers: their RMSNorm (as in arXiv:2302.05442, section 2) and rotary embedding
// (arXiv:2104.09864; pairs the first half of a head with the second). Every step rounds to the type of the tensors, as
// separate PyTorch operations do.
//
// HEAD_LANES neighbouring lanes hold a head, VECTORS vectors of 16 bytes in each lane.
//
// Compile-time constants: those of input.cuh with VECTOR = 1 and of block_scale.cuh; FP8_CACHE (keys and values are
// cached in E4M3, with one scale for each head); HEAD_LANES (a power of two); SIZE (of a head); ROTATED (the first
// ROTATED values are rotated, the others stay unchanged); VECTORS.
#pragma once

#include "block_scale.cuh"
#include "output.cuh"
#include "warp.cuh"

constexpr u32 SIGNS = sizeof(Element) == 2 ? 0x80008000 : 0x80000000;  // sign bits of the elements in a word
constexpr int PER_LANE = VECTORS * PER_VECTOR;
constexpr int HALF_LANES = ROTATED / 2 / PER_LANE;
static_assert(VECTOR && SIZE % PER_LANE == 0 && SIZE <= HEAD_LANES * PER_LANE && ROTATED % (2 * PER_LANE) == 0);

#if FP8_CACHE
using Cached = u8;
#else
using Cached = Element;
#endif

// The values of a head that one lane holds.
struct Values {
  Vector vectors[VECTORS];

  static __device__ Values load(const Element* source, bool holds) {
    Values x;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) x.vectors[i] = Vector::load(source + i * PER_VECTOR, holds ? PER_VECTOR : 0);
    return x;
  }
  __device__ void store(Element* target) const {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) store_16(target + i * PER_VECTOR, vectors[i]);
  }
};

// Applies f elementwise to the values of x and other; rounds the results.
template <class Function>
__device__ __forceinline__ Values combine(const Values& x, const Values& other, const Function& f) {
  Values result;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    float v[PER_VECTOR];
#pragma unroll
    for (int j = 0; j < PER_VECTOR; ++j) v[j] = f(x.vectors[i][j], other.vectors[i][j]);
    result.vectors[i] = to_vector(v);
  }
  return result;
}

__device__ Values operator*(const Values& x, const Values& y) {
  return combine(x, y, [](float a, float b) { return __fmul_rn(a, b); });
}

__device__ Values operator+(const Values& x, const Values& y) {
  return combine(x, y, [](float a, float b) { return __fadd_rn(a, b); });
}

// weight * (x / rms(x)), where rms runs over the lanes that hold a head.
__device__ Values normalized(const Values& x, const Values& weight, float eps) {
  float sum = 0.0f;
#pragma unroll
  for (const Vector& vector : x.vectors) {
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) sum = __fmaf_rn(vector[i], vector[i], sum);
  }
  sum = warp_reduce<HEAD_LANES>(sum, [](float a, float b) { return a + b; });
  const float scale = rsqrtf(sum * (1.0f / SIZE) + eps);
  return weight * combine(x, x, [=](float a, float) { return __fmul_rn(a, scale); });
}

// x * cos + rotate_half(x) * sin in the lanes that hold rotated values. lane: index among the lanes of the head.
__device__ Values rotated(const Values& x, const Values& cos, const Values& sin, u32 lane) {
  const bool lower = lane < HALF_LANES;
  Values half;
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const u32 partner = lower ? lane + HALF_LANES : lane - HALF_LANES;
      const u32 word = __shfl_sync(FULL_WARP, x.vectors[i].words[w], partner, HEAD_LANES);
      half.vectors[i].words[w] = lower ? word ^ SIGNS : word;
    }
  }
  const Values result = x * cos + half * sin;
  return lane < 2 * HALF_LANES ? result : x;
}

#if FP8_CACHE
static_assert(VECTORS == 1 && PER_LANE == 8 && SIZE % 16 == 0);

// The largest magnitude of a head's values, for all lanes that hold it; NaN if one is NaN.
__device__ float largest_of_head(const Values& x) {
  const u32 amax = warp_reduce<HEAD_LANES>(x.vectors[0].larger_magnitude(0), Input::larger);
  return Input::value(Input::largest(amax));
}

// A lane's eight values of a head in E4M3, and the head's scale: as quantize_rows of quant/reference.py.
struct HeadCodes {
  uint2 codes;
  float scale;

  // largest: as `largest_of_head` returns it.
  __device__ HeadCodes(const Values& x, float largest) {
    const BlockScale<> of_head(largest);
    const Vector& v = x.vectors[0];
    const auto quotient = [&](int i) { return of_head.quotient(v[i]); };
    codes = make_uint2(to_e4m3(quotient(0), quotient(1), quotient(2), quotient(3)),
                       to_e4m3(quotient(4), quotient(5), quotient(6), quotient(7)));
    scale = of_head.value;
  }

  // Stores the lane's values to a cache's row, which begins at `row`; the head's first lane stores the scale.
  __device__ void store(u8* row, float* of_row, u32 lane) const {
    *reinterpret_cast<uint2*>(row + lane * 8) = codes;
    if (lane == 0) *of_row = scale;
  }
};

// The values of eight codes.
__device__ Vector dequantized(uint2 codes, float scale) {
  Vector result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint2 both = unpack_e4m3(i < 2 ? codes.x : codes.y);
    const u32 pair = i % 2 ? both.y : both.x;
    const float low = Float16::value(Float16::bits(pair, 0)), high = Float16::value(Float16::bits(pair, 1));
    result.words[i] = pack(Input(), __fmul_rn(low, scale), __fmul_rn(high, scale));
  }
  return result;
}
#endif
