// Router logits, with a bias or without. Threads share EXPERTS rows of the weight at a time: each has the same columns
// of all these rows, for TOKENS tokens at a time. Products are exact for 16-bit types. Sums are float32 in an order
// that EXPERTS and TOKENS do not change: within a thread; then over the warp, after which each lane has one sum; then
// over the warps.
//
// Compile-time constants: those of router.cuh, with INPUT for x and weight; those of row_vectors.cuh, with ROW_THREADS
// a multiple of 32; NUM_EXPERTS; EXPERTS and TOKENS (powers of two whose product is at most 32).
#pragma once

#include "parameter.cuh"
#include "router.cuh"
#include "row_vectors.cuh"

constexpr int SUMS = EXPERTS * TOKENS;
static_assert(SUMS <= WARP && (SUMS & (SUMS - 1)) == 0 && ROW_THREADS % WARP == 0);

// EXPERTS consecutive rows of the weight, which ROW_THREADS threads share.
struct WeightRows {
  const Element* first;  // this thread's first element in the first row
  int columns;           // columns from there to the end of the row
  int count;             // rows that exist; may exceed EXPERTS

  // weight (NUM_EXPERTS, HIDDEN); part: which EXPERTS rows of it; thread: the index among those that share them.
  __device__ __forceinline__ WeightRows(const Element* weight, u32 part, u32 thread) {
    const int column = thread * PER_VECTOR;
    first = weight + i64{part} * EXPERTS * HIDDEN + column;
    columns = HIDDEN - column;
    count = NUM_EXPERTS - static_cast<int>(part) * EXPERTS;
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

// Sums each of v[0], ..., v[Size - 1] over a warp. Each lane returns the sum of v[lane % Size]. Lanes 1 apart are added
// first, then lanes 2, 4, 8 and 16 apart, whatever Size is. Overwrites v.
template <int Stride = 1, int Size>
__device__ __forceinline__ float sum_in_lanes(float (&v)[Size], u32 lane) {
  if constexpr (Stride == WARP) {
    return v[0];
  } else {
    if constexpr (Stride < Size) {  // half of what is left goes to the other lane
      const bool odd = lane & Stride;
#pragma unroll
      for (int i = 0; i < Size / Stride / 2; ++i) {
        const float other = __shfl_xor_sync(FULL_WARP, odd ? v[2 * i] : v[2 * i + 1], Stride);
        v[i] = (odd ? v[2 * i + 1] : v[2 * i]) + other;
      }
    } else {
      v[0] += __shfl_xor_sync(FULL_WARP, v[0], Stride);
    }
    return sum_in_lanes<2 * Stride>(v, lane);
  }
}

// The sums of all warps, each for TOKENS tokens and EXPERTS experts, for `Groups` groups of tokens.
template <int Groups>
using WarpSums = float[ROW_WARPS][Groups][SUMS];

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
    for (int warp = 0; warp < ROW_WARPS; ++warp) total += sums[warp][token / TOKENS][i % SUMS];
    if (expert >= NUM_EXPERTS) continue;
    if (bias) total += Input::value(bias[expert]);
    logits[i64{token} * NUM_EXPERTS + expert] = to_output(total);
  }
}
