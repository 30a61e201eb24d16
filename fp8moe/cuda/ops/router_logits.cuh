// Router logits, with a bias or without. The weight is divided among thread blocks: each has EXPERTS rows of it, and
// each thread the same columns of all these rows, for TOKENS tokens at a time. Products are exact for 16-bit types.
// Sums are float32 in a fixed order: within a thread; then over the warp, after which each lane has one sum; then over
// the warps.
//
// Compile-time constants: those of router.cuh, with INPUT for x and weight; those of row_vectors.cuh, with ROW_THREADS
// = the threads of a block; NUM_EXPERTS; EXPERTS and TOKENS (powers of two whose product is at most 32).
#pragma once

#include "parameter.cuh"
#include "router.cuh"
#include "row_vectors.cuh"

constexpr int WARPS = ROW_THREADS / WARP;
constexpr int SUMS = EXPERTS * TOKENS;
static_assert(SUMS <= WARP && (SUMS & (SUMS - 1)) == 0 && ROW_THREADS % WARP == 0);

// The rows of the weight that this thread block handles.
struct WeightRows {
  const Element* first;  // this thread's first element in the first row
  int columns;           // columns from there to the end of the row
  int count;             // rows that exist; may exceed EXPERTS

  // weight (NUM_EXPERTS, HIDDEN).
  explicit __device__ __forceinline__ WeightRows(const Element* weight) {
    const int column = threadIdx.x * PER_VECTOR;
    first = weight + i64{blockIdx.x} * EXPERTS * HIDDEN + column;
    columns = HIDDEN - column;
    count = NUM_EXPERTS - static_cast<int>(blockIdx.x) * EXPERTS;
  }

  // Loads vector i of row e.
  __device__ __forceinline__ Vector load(int e, int i) const {
    return load_parameter(first + e * HIDDEN + i * STEP, e < count ? columns - i * STEP : 0);
  }

  __device__ __forceinline__ void prefetch() const {
#pragma unroll
    for (int e = 0; e < EXPERTS; ++e) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        prefetch_parameter(first + e * HIDDEN + i * STEP, e < count ? columns - i * STEP : 0);
      }
    }
  }
};

// Adds the products of one vector of each token with one vector of each expert's row.
__device__ __forceinline__ void add_products(float (&sum)[SUMS], const Vector (&x)[TOKENS],
                                             const Vector (&weight)[EXPERTS]) {
#pragma unroll
  for (int c = 0; c < PER_VECTOR; ++c) {
#pragma unroll
    for (int s = 0; s < SUMS; ++s) sum[s] = __fmaf_rn(x[s / EXPERTS][c], weight[s % EXPERTS][c], sum[s]);
  }
}

// Sums each of v[0], ..., v[Count - 1] over a warp. Each lane returns the sum of v[lane % Count]. Overwrites v.
template <int Count, int Size>
__device__ __forceinline__ float sum_in_lanes(float (&v)[Size], u32 lane) {
  constexpr int HALF = Count / 2;
  if constexpr (HALF > 0) {
    const bool upper = lane & HALF;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      const float other = __shfl_xor_sync(FULL_WARP, upper ? v[i] : v[i + HALF], HALF);
      v[i] = (upper ? v[i + HALF] : v[i]) + other;
    }
    return sum_in_lanes<HALF>(v, lane);
  } else {
    return warp_reduce<WARP / Size, Size>(v[0], [](float a, float b) { return a + b; });
  }
}

// The sums of all warps, each for TOKENS tokens and EXPERTS experts, for `Groups` groups of tokens.
template <int Groups>
using WarpSums = float[WARPS][Groups][SUMS];

// Adds up the sums of the warps and the bias, and stores the logits of `tokens` tokens. Called by the whole thread
// block once all warps have written their sums. bias (NUM_EXPERTS): may be null.
template <int Groups>
__device__ __forceinline__ void store_logits(Output::Element* logits, const WarpSums<Groups>& sums, const Element* bias,
                                             int tokens) {
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * EXPERTS; i += ROW_THREADS) {
    const int token = i / EXPERTS, expert = static_cast<int>(blockIdx.x) * EXPERTS + i % EXPERTS;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += sums[warp][token / TOKENS][i % SUMS];
    if (expert >= NUM_EXPERTS) continue;
    if (bias) total += Input::value(bias[expert]);
    logits[i64{token} * NUM_EXPERTS + expert] = to_output(total);
  }
}
