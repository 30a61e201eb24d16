// Queries, keys and values of new tokens on their way from the projections to the attention: RMSNorm of each head's
// queries and keys where the model has it, rotary embedding, and the keys' and values' places in a cache.
//
// HEAD_LANES neighbouring lanes take a head, each 16 or 32 bytes of it, and AT_ONCE heads of one token one
// after the other. Every step rounds to the type of the tensors, as PyTorch does that runs it as an operation of its
// own.
//
// Compile-time constants: those of input.cuh with VECTOR = 1; WARPS (of a thread block), HEAD_LANES (a power of two),
// AT_ONCE; HEADS, KEY_HEADS; SIZE (of a head), ROTATED (its first values are rotated, the rest stays); VECTORS (of 16
// bytes, of a lane); NORM (queries and keys have a norm); ARGUMENTS_BYTES.
#include "output.cuh"
#include "warp.cuh"

constexpr int ALL_HEADS = HEADS + 2 * KEY_HEADS;
constexpr int GROUP_HEADS = HEADS / KEY_HEADS;  // that share a key head
constexpr int WARP_HEADS = WARP / HEAD_LANES;
constexpr int GROUPS = ceil_div(ALL_HEADS, WARP_HEADS* AT_ONCE);
constexpr u32 SIGNS = sizeof(Element) == 2 ? 0x80008000 : 0x80000000;  // of the elements in a word
constexpr int PER_LANE = VECTORS * PER_VECTOR;
constexpr int HALF_LANES = ROTATED / 2 / PER_LANE;
static_assert(HEADS % KEY_HEADS == 0 && VECTOR && SIZE % PER_LANE == 0 && SIZE <= HEAD_LANES * PER_LANE &&
              ROTATED % (2 * PER_LANE) == 0);

// The values of a lane.
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

// f(x's value, another's) for each value, rounded.
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

// weight * (x / rms(x)) over the lanes that hold a head.
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

// x * cos + rotate_half(x) * sin in the lanes that hold rotated values; lane: of the head.
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

// Row b * tokens + t of q, k, v holds the heads of token t of sequence b, rows *_stride elements apart.
// cos, sin: (1 or batch, tokens, ROTATED), one_table: 1. q_weight, k_weight: (SIZE), not read without NORM.
// query: (batch, tokens, KEY_HEADS, copies, HEADS / KEY_HEADS, SIZE). keys, values: (batch, KEY_HEADS, length, SIZE),
// where token t of sequence b goes to columns[b] + t, or t if columns is 0; outside of [0, length) it is not written.
struct Arguments {
  const Element *q, *k, *v;
  const Element *cos, *sin;
  const Element *q_weight, *k_weight;
  Element *query, *keys, *values;
  const i64* columns;
  i64 q_stride, k_stride, v_stride, length;
  u32 batch, tokens, one_table, copies;
  float eps;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES);

// One of all heads of a row: those of q, of k, of v.
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
    if (!holds) continue;
    if (head < HEADS) {
      const i64 place = row * KEY_HEADS + head / GROUP_HEADS;
      Element* target = a.query + (place * a.copies * GROUP_HEADS + head % GROUP_HEADS) * SIZE + offset;
      for (u32 copy = 0; copy < a.copies; ++copy) out.store(target + copy * GROUP_HEADS * SIZE);
    } else if (inside && head < ALL_HEADS) {
      const bool is_key = head < HEADS + KEY_HEADS;
      const i64 place = (i64{sequence} * KEY_HEADS + (head - HEADS) % KEY_HEADS) * a.length + column;
      (is_key ? out : x[i]).store((is_key ? a.keys : a.values) + place * SIZE + offset);
    }
  }
}
