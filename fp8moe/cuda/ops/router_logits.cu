// The logits of a router for few tokens: x times the transposed weight. Products are exact for 16-bit types, sums are
// float32 in a fixed order.
//
// What takes the time is the weight, so it is spread over all SMs: a thread block has EXPERTS rows of it, of which each
// thread has the same columns, for all tokens, TOKENS of them at a time. Sums of a thread are added up over the warp so
// that each lane ends with one of them, then over the warps.
//
// Compile-time constants: those of router.cuh, INPUT for x and weight; HIDDEN; NUM_EXPERTS; EXPERTS and TOKENS, powers
// of two, their product at most 32; MAX_TOKENS, a multiple of TOKENS; THREADS (of a thread block).
#include "parameter.cuh"
#include "router.cuh"

constexpr int STEP = THREADS * PER_VECTOR;
constexpr int VECTORS = ceil_div(HIDDEN, STEP);
// Vectors of a row that a thread loads before it uses them: as many as registers hold.
constexpr int REGISTER_VECTORS = 24 / (EXPERTS + TOKENS) > 1 ? 24 / (EXPERTS + TOKENS) : 1;
constexpr int AT_ONCE = VECTORS < REGISTER_VECTORS ? VECTORS : REGISTER_VECTORS;
constexpr int SUMS = EXPERTS * TOKENS;
constexpr int WARPS = THREADS / WARP;
static_assert(SUMS <= WARP && (SUMS & (SUMS - 1)) == 0 && MAX_TOKENS % TOKENS == 0 && THREADS % WARP == 0);

// The sums of v[0], ..., v[Count - 1] over a warp: that of v[lane % Count] in each lane. v is used up.
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

// x (tokens, HIDDEN); weight (NUM_EXPERTS, HIDDEN); logits (tokens, NUM_EXPERTS).
// Grid: a thread block for each EXPERTS experts and MAX_TOKENS tokens.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    router_logits(const Element* x, const Element* weight, Output::Element* logits, int tokens) {
  __shared__ float sums[WARPS][MAX_TOKENS / TOKENS][SUMS];
  const u32 lane = threadIdx.x % WARP;
  const int first_token = static_cast<int>(blockIdx.y) * MAX_TOKENS;
  x += i64{first_token} * HIDDEN;
  logits += i64{first_token} * NUM_EXPERTS;
  tokens = min(tokens - first_token, MAX_TOKENS);
  const int first_expert = static_cast<int>(blockIdx.x) * EXPERTS;
  const int first = threadIdx.x * PER_VECTOR;
  // Where vector i of this thread is in row e of the thread block, and how many columns there are from it on.
  const auto weight_at = [&](int e, int i) { return weight + i64{first_expert + e} * HIDDEN + first + i * STEP; };
  const auto columns = [&](int i) { return HIDDEN - first - i * STEP; };
  const auto weight_columns = [&](int e, int i) { return first_expert + e < NUM_EXPERTS ? columns(i) : 0; };

#pragma unroll
  for (int e = 0; e < EXPERTS; ++e) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) prefetch_parameter(weight_at(e, i), weight_columns(e, i));
  }
  wait_for_previous_kernel();
  allow_next_kernel();

#pragma unroll 1
  for (int token = 0; token < tokens; token += TOKENS) {
    float sum[SUMS] = {};
#pragma unroll 2
    for (int at = 0; at < VECTORS; at += AT_ONCE) {
      Vector w[AT_ONCE][EXPERTS], v[AT_ONCE][TOKENS];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
        for (int e = 0; e < EXPERTS; ++e) w[i][e] = load_parameter(weight_at(e, at + i), weight_columns(e, at + i));
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
          const Element* source = x + i64{token + t} * HIDDEN + first + (at + i) * STEP;
          v[i][t] = Vector::load(source, token + t < tokens ? columns(at + i) : 0);
        }
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
        for (int c = 0; c < PER_VECTOR; ++c) {
#pragma unroll
          for (int s = 0; s < SUMS; ++s) sum[s] = __fmaf_rn(v[i][s / EXPERTS][c], w[i][s % EXPERTS][c], sum[s]);
        }
      }
    }
    const float total = sum_in_lanes<SUMS>(sum, lane);
    if (lane < SUMS) sums[threadIdx.x / WARP][token / TOKENS][lane] = total;
  }
  __syncthreads();

#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * EXPERTS; i += THREADS) {
    const int token = i / EXPERTS, expert = first_expert + i % EXPERTS;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += sums[warp][token / TOKENS][i % SUMS];
    if (expert < NUM_EXPERTS) logits[i64{token} * NUM_EXPERTS + expert] = to_output(total);
  }
}
