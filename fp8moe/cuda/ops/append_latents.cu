// From the projections to attention over latents (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434, section
// 2.1): RMSNorm of the latents of new tokens, rotary embedding (RoFormer, arXiv:2104.09864) of their rotary parts and
// of those of the queries, and the store of latents to a cache. Every step rounds to bfloat16, as separate PyTorch
// operations do.
//
// A warp has a token's latent, or PARTS rotary parts of it, which its heads' queries have and the latent, too.
//
// Compile-time constants: those of quantize.cuh, for bfloat16; WARPS (of a thread block); CODES (the cache is in FP8);
// INTERLEAVED (rotary pairs are neighbours, and the result has the first values of all pairs, then the second ones);
// ARGUMENTS_BYTES.
#include "output.cuh"
#include "quantize.cuh"

constexpr int VALUE = 512, REST = 64;  // values of a latent that are the value, and of its rotary part
constexpr int GROUP = 128, SCALES = VALUE / GROUP;
constexpr int ROW_BYTES = CODES ? VALUE + 4 * SCALES + 2 * REST : 2 * (VALUE + REST);
constexpr int REST_BYTE = ROW_BYTES - 2 * REST;  // where the rotary part begins
constexpr int PART_LANES = 8, PARTS = WARP / PART_LANES;
static_assert(VECTOR && PER_VECTOR == 8);

// Row b * tokens + t of q, latents and out is token t of sequence b; rows and heads are *_row and *_head elements
// apart. q, out: rotary parts (batch * tokens, heads, REST). latents (batch * tokens, VALUE + REST). cos, sin (1 or
// batch, tokens, REST); one_table: whether the first size is 1. cache (batch, length, ROW_BYTES): token t of sequence b
// is stored at columns[b] + t, or at t if `columns` is null; outside [0, length) it is not stored.
struct Arguments {
  const Element *q, *latents, *weight, *cos, *sin;
  Element* out;
  u8* cache;
  const i64* columns;
  i64 q_row, q_head, latents_row, out_row, out_head, length;
  u32 rows, tokens, heads, one_table;
  float eps;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES);

__device__ __forceinline__ float rounded(float x) { return Input::value(pack(Input(), x, 0.f) & 0xFFFFu); }

__device__ __forceinline__ void store_latent(const Element* source, const Element* weights, float eps, u8* target) {
  const int lane = lane_id();
  Vector x[2], weight[2];
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    x[i] = Vector::load(source + 16 * lane + 8 * i, 8), weight[i] = Vector::load(weights + 16 * lane + 8 * i, 8);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = __fmaf_rn(x[i][j], x[i][j], sum);
  }
  sum = warp_reduce(sum, [](float a, float b) { return a + b; });
  const float scale = rsqrtf(sum * (1.f / VALUE) + eps);
  u32 amax = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float normed[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) normed[j] = __fmul_rn(weight[i][j], rounded(__fmul_rn(x[i][j], scale)));
    x[i] = to_vector(normed);
    amax = x[i].larger_magnitude(amax);
  }
#if CODES
  amax = warp_reduce<GROUP / 16>(amax, Input::larger);
  const Scale of_group(Input::largest(amax));
  const Codes low(x[0], of_group), high(x[1], of_group);
  if (!target) return;
  *reinterpret_cast<uint4*>(target + 16 * lane) = make_uint4(low.words[0], low.words[1], high.words[0], high.words[1]);
  if (lane % 8 == 0) reinterpret_cast<float*>(target + VALUE)[lane / 8] = of_group.value;
#else
  if (!target) return;
  store_16(target + 32 * lane, x[0]), store_16(target + 32 * lane + 16, x[1]);
#endif
}

// Rotates a rotary part, of which each of PART_LANES lanes has the first and the second values of four pairs. target:
// null for none. Called by whole warps.
__device__ __forceinline__ void rotate(const Element* source, const Element* cos, const Element* sin, Element* target,
                                       bool holds) {
  const int first = 4 * (lane_id() % PART_LANES), second = first + REST / 2;
  const auto four = [&](const Element* from) {
    const uint2 words = holds ? *reinterpret_cast<const uint2*>(from) : make_uint2(0, 0);
    return make_float4(Input::value(words.x & 0xFFFFu), Input::value(words.x >> 16), Input::value(words.y & 0xFFFFu),
                       Input::value(words.y >> 16));
  };
#if INTERLEAVED
  const float4 a = four(source + 2 * first), b = four(source + 2 * first + 4);
  const float4 low = make_float4(a.x, a.z, b.x, b.z), high = make_float4(a.y, a.w, b.y, b.w);
#else
  const float4 low = four(source + first), high = four(source + second);
#endif
  const auto turned = [](float x, float cos, float y, float sin) {
    return __fadd_rn(rounded(__fmul_rn(x, cos)), rounded(__fmul_rn(y, sin)));
  };
  const float4 c = four(cos + first), d = four(cos + second), s = four(sin + first), t = four(sin + second);
  const uint2 lower = make_uint2(pack(Input(), turned(low.x, c.x, -high.x, s.x), turned(low.y, c.y, -high.y, s.y)),
                                 pack(Input(), turned(low.z, c.z, -high.z, s.z), turned(low.w, c.w, -high.w, s.w)));
  const uint2 upper = make_uint2(pack(Input(), turned(high.x, d.x, low.x, t.x), turned(high.y, d.y, low.y, t.y)),
                                 pack(Input(), turned(high.z, d.z, low.z, t.z), turned(high.w, d.w, low.w, t.w)));
  __syncwarp();  // the target may be the source
  if (!holds || !target) return;
  *reinterpret_cast<uint2*>(target + first) = lower;
  *reinterpret_cast<uint2*>(target + second) = upper;
}

// Grid: a warp for each token's latent and for each PARTS rotary parts, of heads + 1.
extern "C" __global__ void __launch_bounds__(WARPS* WARP) append_latents(const __grid_constant__ Arguments a) {
  const u32 units = 1 + ceil_div(static_cast<int>(a.heads) + 1, PARTS);
  const i64 warp = i64{blockIdx.x} * WARPS + threadIdx.x / WARP;
  const i64 row = warp / units;
  const u32 unit = static_cast<u32>(warp % units);
  wait_for_previous_kernel();
  allow_next_kernel();
  if (row >= a.rows) return;
  const i64 sequence = row / a.tokens, token = row % a.tokens;
  const i64 column = (a.columns ? a.columns[sequence] : 0) + token;
  u8* const cached = column >= 0 && column < a.length ? a.cache + (sequence * a.length + column) * ROW_BYTES : nullptr;
  const Element* const latent = a.latents + row * a.latents_row;
  if (unit == 0) {
    store_latent(latent, a.weight, a.eps, cached);
    return;
  }
  const u32 head = (unit - 1) * PARTS + threadIdx.x % WARP / PART_LANES;
  const i64 table = (a.one_table ? token : row) * REST;
  const bool is_query = head < a.heads;
  const Element* source = is_query ? a.q + row * a.q_row + head * a.q_head : latent + VALUE;
  Element* target = is_query ? a.out + row * a.out_row + head * a.out_head
                    : cached ? reinterpret_cast<Element*>(cached + REST_BYTE)
                             : nullptr;
  rotate(source, a.cos + table, a.sin + table, target, head <= a.heads);
}
