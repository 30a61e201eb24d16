// Quantizes a token with one scale per 128 columns, in registers that are arranged for wide stores. Values and scales
// are bitwise those of quantize_1x128.cu.
//
// 8 lanes share a block of 128 columns. Loads and stores cover whole 32-byte sectors: a lane loads 16 bytes next to
// those of its 7 neighbours; after quantization, lanes swap values until each has 16 consecutive columns.
//
// Compile-time constants: those of quantize.cuh with VECTOR = 1, and of permute.cuh.
#pragma once

#include "permute.cuh"
#include "quantize.cuh"

constexpr int STEP = BLOCK_LANES * PER_VECTOR;
constexpr int VECTORS = BLOCK / STEP;
static_assert(VECTOR);

// Exchanges two words between lanes that are `distance` apart. The lower lane returns both lanes' first two words, the
// upper lane both lanes' last two words.
__device__ Bytes16 swap_halves(const Bytes16& v, u32 lane, int distance) {
  const bool upper = lane & distance;
  const auto& w = v.words;
  const u32 a = __shfl_xor_sync(FULL_WARP, upper ? w[0] : w[2], distance);
  const u32 b = __shfl_xor_sync(FULL_WARP, upper ? w[1] : w[3], distance);
  return upper ? Bytes16{a, b, w[2], w[3]} : Bytes16{w[0], w[1], a, b};
}

// Exchanges a lane's 16 values (PER_VECTOR from each of VECTORS vectors) for 16 consecutive columns of vector lane %
// VECTORS.
__device__ Bytes16 neighbours(const Bytes16& v, u32 lane) {
  if constexpr (VECTORS == 2) return swap_halves(v, lane, 1);
  const bool upper = lane & 1;
  const auto& w = v.words;
  const u32 a = __shfl_xor_sync(FULL_WARP, upper ? w[0] : w[1], 1);
  const u32 b = __shfl_xor_sync(FULL_WARP, upper ? w[2] : w[3], 1);
  return swap_halves(upper ? Bytes16{a, w[1], b, w[3]} : Bytes16{w[0], a, w[2], b}, lane, 2);
}

// A lane's 16 values of a quantized token.
struct QuantizedColumns {
  Bytes16 values;
  int column;  // column of the first value; may be past the end of the token
  float scale;

  // token: its first element. Called by all lanes of a warp together.
  __device__ __forceinline__ QuantizedColumns(const Element* token, const Place& place) {
    const int first = place.block_column + place.block_lane * PER_VECTOR;
    const Element* source = token + first;
    Vector v[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) v[i] = Vector::load(source + i * STEP, HIDDEN - first - i * STEP);
    u32 amax = 0;
#pragma unroll
    for (const Vector& vector : v) amax = vector.larger_magnitude(amax);
    const Scale block_scale(Input::largest(warp_reduce<BLOCK_LANES>(amax, Input::larger)));
    Bytes16 quantized;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Vector& vector = v[i * VECTORS / 4];
      const int at = i * 4 % PER_VECTOR;
      quantized.words[i] = to_e4m3(block_scale.quotient(vector[at]), block_scale.quotient(vector[at + 1]),
                                   block_scale.quotient(vector[at + 2]), block_scale.quotient(vector[at + 3]));
    }
    values = neighbours(quantized, place.lane);
    const u32 vector = place.lane % VECTORS;
    column = place.block_column + vector * STEP + (place.block_lane - vector) * PER_VECTOR;
    scale = block_scale.value;
  }
};
