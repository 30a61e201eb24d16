// Attention that sums over keys in one order, whatever computes it: the softmax and the products of a split of keys,
// and how splits are merged. A fixed size of splits rather than a fixed number: Thinking Machines, "Defeating
// Nondeterminism in LLM Inference", 2025. The softmax of splits and its merging: arXiv:2205.14135.
//
// Split i of a sequence holds its keys i * SPLIT to (i + 1) * SPLIT - 1, counted from the sequence's first token. A
// score is a chain of mma over the steps of a head; a sum of values is a chain of mma over the tiles of a split, from
// zero. The sums of splits are merged one after the other. Rows of mma do not affect each other, so a query's bits
// depend neither on the row that it has nor on the other rows. Keys that a query does not see have weight 0, which
// changes no sum; a split or a tile of which it sees nothing may be left out.
//
// Compile-time constants: SIZE (values of a head), those of input.cuh.
#pragma once

#include "attention_tiles.cuh"
#include "output.cuh"
#include "warp.cuh"

constexpr int TILE = 16;  // keys in a tile, the depth of mma
constexpr int SPLIT_TILES = 4;
constexpr int SPLIT = SPLIT_TILES * TILE;
constexpr int STEPS = ceil_div(SIZE, 16);        // steps of mma along a head
constexpr int CHUNKS = 2 * STEPS;                // 16-byte chunks of a row in shared memory
constexpr int PITCH = round_up(CHUNKS, 8) * 16;  // bytes between rows
constexpr float LOG2_E = 1.4426950408889634f;

using Row = u8[PITCH];

// In each product of mma a lane holds rows lane / 4 and lane / 4 + 8: halves 0 and 1.
using Scores = float[SPLIT_TILES][2][4];  // keys 0 to 7, and 8 to 15, of each tile
using Weights = u32[SPLIT_TILES][2][2];   // of each tile the two halves: keys 0 to 7, and 8 to 15

// Where this lane's row of matrices is in a tile of 16 rows.
struct MatrixRows {
  u32 offset;  // for step 0

  __device__ __forceinline__ MatrixRows() {
    const int lane = threadIdx.x % WARP, row = lane % 16;
    offset = row * PITCH + swizzled(row, lane / 16);
  }
  // The address of the row for step `step`, in a tile that begins at address `tile`. Swizzling is exclusive or, too.
  __device__ __forceinline__ u32 at(u32 tile, int step) const {
    return tile + (offset ^ step % 4 * 32) + step / 4 * 128;
  };
};

__device__ __forceinline__ void add_product(BFloat16, float* sum, uint2 upper, uint2 lower, u32 first, u32 second) {
  mma_bfloat16(sum, upper, lower, make_uint2(first, second));
}
__device__ __forceinline__ void add_product(Float16, float* sum, uint2 upper, uint2 lower, u32 first, u32 second) {
  mma_float16(sum, upper, lower, make_uint2(first, second));
}

// Adds one step of the scores of 16 queries and the 16 keys of a tile.
__device__ __forceinline__ void add_scores(float (&scores)[2][4], const u32 (&q)[4], const u32 (&k)[4]) {
  const uint2 upper = make_uint2(q[0], q[2]), lower = make_uint2(q[1], q[3]);
  add_product(Input(), scores[0], upper, lower, k[0], k[2]);
  add_product(Input(), scores[1], upper, lower, k[1], k[3]);
}

// Adds the weighted values of a tile, 16 columns of them.
__device__ __forceinline__ void add_values(float (*sums)[4], const u32 (&weights)[2][2], const u32 (&v)[4]) {
  const uint2 upper = make_uint2(weights[0][0], weights[0][1]), lower = make_uint2(weights[1][0], weights[1][1]);
  add_product(Input(), sums[0], upper, lower, v[0], v[1]);
  add_product(Input(), sums[1], upper, lower, v[2], v[3]);
}

// 2^x; 0 for minus infinity.
__device__ __forceinline__ float power_of_two(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// What to subtract from scores: the largest of them, or 0 if there are none.
__device__ __forceinline__ float shift_of(float largest) { return largest == minus_infinity() ? 0.0f : largest; }

// Multiplies one half's scores of a split by `factor`. Masked: those of keys outside of [first, end) become minus
// infinity.
template <bool Masked>
__device__ __forceinline__ void scale(Scores& scores, int half, float factor, int first = 0, int end = 0) {
  const int lane_key = 2 * static_cast<int>(threadIdx.x % 4);  // constants are compared with what is left
  first -= lane_key, end -= lane_key;
#pragma unroll
  for (int i = 0; i < SPLIT / 4; ++i) {
    float& x = scores[i / 4][i / 2 % 2][2 * half + i % 2];
    const int key = i / 2 * 8 + i % 2;
    x = !Masked || (key >= first && key < end) ? __fmul_rn(x, factor) : minus_infinity();
  }
}

// Turns one half's scores of a split, as `scale` leaves them, into weights 2^(score - largest). Returns the largest
// score and the sum of the weights before they are rounded.
__device__ __forceinline__ float2 weigh(const Scores& scores, Weights& weights, int half) {
  float largest = minus_infinity();
#pragma unroll
  for (int i = 0; i < SPLIT / 4; ++i) largest = fmaxf(largest, scores[i / 4][i / 2 % 2][2 * half + i % 2]);
  largest = warp_reduce<4>(largest, [](float p, float q) { return fmaxf(p, q); });
  const float shift = shift_of(largest);
  float total = 0.0f;
#pragma unroll
  for (int tile = 0; tile < SPLIT_TILES; ++tile) {
    float w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = power_of_two(__fsub_rn(scores[tile][i / 2][2 * half + i % 2], shift));
    total = __fadd_rn(total, __fadd_rn(__fadd_rn(w[0], w[1]), __fadd_rn(w[2], w[3])));
    weights[tile][half][0] = pack(Input(), w[0], w[1]);
    weights[tile][half][1] = pack(Input(), w[2], w[3]);
  }
  return make_float2(largest, warp_reduce<4>(total, [](float p, float q) { return __fadd_rn(p, q); }));
}

// A query's sums so far, and those of the next split, are multiplied by these and added.
struct Factors {
  float before, split;

  __device__ __forceinline__ float merge(float sum, float of_split) const {
    return __fmaf_rn(sum, before, __fmul_rn(of_split, split));
  }
};

// Merges the statistics of a split, as `weigh` returns them, into those of the splits before.
__device__ __forceinline__ Factors merge(float2& statistics, float2 of_split) {
  const float largest = fmaxf(statistics.x, of_split.x), shift = shift_of(largest);
  const Factors factors = {power_of_two(__fsub_rn(statistics.x, shift)), power_of_two(__fsub_rn(of_split.x, shift))};
  statistics = make_float2(largest, factors.merge(statistics.y, of_split.y));
  return factors;
}

// What the sums of a query are multiplied by at the end. A query that sees no keys has total 0.
__device__ __forceinline__ float inverse_of(float total) { return total == 0.0f ? 0.0f : __frcp_rn(total); }
