// Prepares queries, keys and values of new tokens for attention, from the projections on: RMSNorm of queries and keys
// per head, if the model has it; rotary embedding; the store of keys and values to a cache.
//
// HEAD_LANES neighbouring lanes handle AT_ONCE heads of one token, one after another.
//
// Compile-time constants: those of heads.cuh; WARPS (of a thread block), AT_ONCE; HEADS, KEY_HEADS; NORM (queries and
// keys have a norm); ARGUMENTS_BYTES.
#include "heads.cuh"

constexpr int ALL_HEADS = HEADS + 2 * KEY_HEADS;
constexpr int WARP_HEADS = WARP / HEAD_LANES;
constexpr int GROUPS = ceil_div(ALL_HEADS, WARP_HEADS* AT_ONCE);
static_assert(HEADS % KEY_HEADS == 0);

// Row b * tokens + t of q, k, v holds the heads of token t of sequence b. Rows are *_stride elements apart. cos, sin (1
// or batch, tokens, ROTATED); one_table: whether the first size is 1. q_weight, k_weight (SIZE); unused without NORM.
// Result: query (batch, tokens, HEADS, SIZE). keys, values (batch, KEY_HEADS, length, SIZE): token t of sequence b is
// stored at columns[b] + t, or at t if `columns` is null; outside [0, length) it is not stored. With FP8_CACHE
// key_scales, value_scales (batch, KEY_HEADS, length).
struct Arguments {
  const Element *q, *k, *v;
  const Element *cos, *sin;
  const Element *q_weight, *k_weight;
  Element* query;
  Cached *keys, *values;
  const i64* columns;
  float *key_scales, *value_scales;
  i64 q_stride, k_stride, v_stride, length;
  u32 batch, tokens, one_table;
  float eps;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES);

// Returns a head of a row. Heads are numbered through q, k and v, in this order.
__device__ const Element* head_of(const Arguments& a, i64 row, u32 head) {
  if (head < HEADS) return a.q + row * a.q_stride + head * SIZE;
  if (head < HEADS + KEY_HEADS) return a.k + row * a.k_stride + (head - HEADS) * SIZE;
  return a.v + row * a.v_stride + (head - HEADS - KEY_HEADS) * SIZE;
}

// Grid: a warp for each AT_ONCE * WARP_HEADS heads of each token.
extern "C" __global__ void __launch_bounds__(WARPS* WARP) rotary(const Arguments a) {
  const i64 unit = i64{blockIdx.x} * WARPS + threadIdx.x / WARP;
  const u32 lane = threadIdx.x % HEAD_LANES;
  const i64 row = unit / GROUPS;
  const u32 first = static_cast<u32>(unit % GROUPS) * (WARP_HEADS * AT_ONCE) + threadIdx.x % WARP / HEAD_LANES;
  const u32 sequence = static_cast<u32>(row / a.tokens), token = static_cast<u32>(row % a.tokens);
  const bool holds = lane * PER_LANE < SIZE;
  const int offset = lane * PER_LANE;

  wait_for_previous_kernel();
  allow_next_kernel();
  if (sequence >= a.batch) return;

  Values x[AT_ONCE];
#pragma unroll
  for (int i = 0; i < AT_ONCE; ++i) {
    const u32 head = first + i * WARP_HEADS;
    x[i] = Values::load(head_of(a, row, head) + offset, holds && head < ALL_HEADS);
  }
  const i64 place = (a.one_table ? i64{token} : row) * ROTATED + offset;
  const Values cos = Values::load(a.cos + place, lane < 2 * HALF_LANES);
  const Values sin = Values::load(a.sin + place, lane < 2 * HALF_LANES);
  const Values q_weight = Values::load(a.q_weight + offset, NORM && holds);
  const Values k_weight = Values::load(a.k_weight + offset, NORM && holds);
  const i64 column = (a.columns ? a.columns[sequence] : 0) + token;
  const bool inside = column >= 0 && column < a.length;

#pragma unroll
  for (int i = 0; i < AT_ONCE; ++i) {
    const u32 head = first + i * WARP_HEADS;
    Values out = x[i];
    if (NORM) out = normalized(out, head < HEADS ? Values(q_weight) : Values(k_weight), a.eps);
    out = rotated(out, cos, sin, lane);
    const bool is_key = head < HEADS + KEY_HEADS;
    if (head >= HEADS && !is_key) out = x[i];
#if FP8_CACHE
    const HeadCodes codes(out, largest_of_head(out));
#endif
    if (!holds) continue;
    if (head < HEADS) {
      out.store(a.query + (row * HEADS + head) * SIZE + offset);
    } else if (inside && head < ALL_HEADS) {
      const i64 place = (i64{sequence} * KEY_HEADS + (head - HEADS) % KEY_HEADS) * a.length + column;
      Cached* const row = (is_key ? a.keys : a.values) + place * SIZE;
#if FP8_CACHE
      codes.store(row, (is_key ? a.key_scales : a.value_scales) + place, lane);
#else
      out.store(row + offset);
#endif
    }
  }
}
