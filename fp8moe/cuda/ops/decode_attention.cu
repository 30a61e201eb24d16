// Attention of one new token per sequence over keys and values in a static cache, starting from the projections.
// Includes the RMSNorm of heads, rotary embedding, the store of the new key and value to the cache, and the
// quantization of the result, bit for bit that of quantize_1x128.cu. Softmax is computed tile by tile (FlashAttention,
// arXiv:2205.14135), by many thread blocks at once (Flash-Decoding).
//
// A cluster handles one sequence and one key head. The query heads that share the key head, up to 16, are the rows of
// mma. A tile has 16 keys, in FP8 32. Tile t belongs to block t % CLUSTER, and within it to warp t / CLUSTER % WARPS.
// Each warp loads its own tiles, STAGES ahead, so warps wait for each other only at the end. Then the sums of warps are
// merged in order, then the sums of blocks. A head's sink (arXiv:2508.10925) joins the total of the merged sums, so it
// counts once. With `early` the first tiles are loaded before the queries exist.
//
// E4M3 codes of a cache in FP8 are converted to float16 in registers, which is exact, and multiplied by queries and
// weights in float16, which sums in float32. A key's scale multiplies its score, a value's its weight.
//
// Compile-time constants: those of heads.cuh, with VECTORS = 1, and of quantize.cuh; KEY_HEADS; GROUP (query heads per
// key head); NORM (queries and keys have a norm); APPEND (the new token's query and key still need norm and rotation,
// and its key and value go to the cache; otherwise the cache already has them); WARPS, STAGES, CLUSTER; SHARED_BYTES,
// ARGUMENTS_BYTES.
#include "cluster.cuh"
#include "heads.cuh"
#include "quantize.cuh"

constexpr int TILE = FP8_CACHE ? 32 : 16;  // keys in a tile
constexpr int OCTETS = TILE / 8;
constexpr int ROWS = 16;  // query heads of a thread block
constexpr int MAX_ROWS = GROUP < ROWS ? GROUP : ROWS;
constexpr int HEAD_TILES = ceil_div(GROUP, ROWS);
constexpr int STEPS = ceil_div(SIZE, 16);        // steps of mma along a head
constexpr int CHUNKS = 2 * STEPS;                // 16-byte chunks of a query in shared memory
constexpr int PITCH = round_up(CHUNKS, 8) * 16;  // bytes between queries
constexpr int KEY_CHUNKS = FP8_CACHE ? STEPS : CHUNKS;
constexpr int KEY_PITCH = FP8_CACHE && KEY_CHUNKS <= 4 ? 64 : round_up(KEY_CHUNKS, 8) * 16;
constexpr int SCORE_STEPS = FP8_CACHE && STEPS > 8 ? 4 : STEPS;  // at once, for want of registers
constexpr int SUM_PITCH = SIZE + 8;  // floats per row of sums, padded against bank conflicts
constexpr int THREADS = WARPS * WARP;
constexpr int PARTS = ceil_div(MAX_ROWS * SIZE, BLOCK* CLUSTER);  // of 128 columns, that a block finishes
constexpr float LOG2_E = 1.4426950408889634f;
static_assert(VECTORS == 1 && HEAD_LANES >= CHUNKS && BLOCK == 4 * WARP);

struct alignas(16) Tile {
  u8 rows[2][TILE][KEY_PITCH];  // keys and values
#if FP8_CACHE
  float scales[2][TILE];
#endif
};

union alignas(16) WarpTiles {
  Tile stages[STAGES];
  float sums[ROWS][SUM_PITCH];  // the warp's sums; they replace the tiles at the end
};
static_assert(sizeof(WarpTiles) == STAGES * sizeof(Tile));

struct Shared {
  WarpTiles warps[WARPS];
  u8 query[ROWS][PITCH];
  u8 fresh[2][PITCH];  // the new token's key and value; behind codes the scale
  float sinks[ROWS];   // as `scaled_sink` returns them
#if FP8_CACHE
  float query_factors[ROWS];  // by what scores are to be multiplied
#endif
  float2 statistics[WARPS][ROWS];  // of each row: the largest score, and the sum of weights
  // Sums of all blocks of the cluster, for the columns that this block finishes.
  float2 block_statistics[CLUSTER][ROWS];
  alignas(16) float block_sums[PARTS][CLUSTER][BLOCK];
};
static_assert(sizeof(Shared) == SHARED_BYTES);

#include "decode_attention.cuh"

#define MULTIPLIES_CODES FP8_CACHE
#include "decode_attention_heads.cuh"

// A sum of values with weights e^(score - largest), four columns of it; `total` is the sum of the weights.
struct Sum {
  float largest = minus_infinity(), total = 0.0f, v[4] = {};

  __device__ __forceinline__ void set(float2 statistics, float4 values) {
    largest = statistics.x, total = statistics.y;
    v[0] = values.x, v[1] = values.y, v[2] = values.z, v[3] = values.w;
  }
};

// Merges `Count` partial sums, in order. of(i, sum) fills in the i-th.
template <int Count, class Of>
__device__ __forceinline__ Sum merged(const Of& of) {
  Sum sums[Count], result;
#pragma unroll
  for (int i = 0; i < Count; ++i) of(i, sums[i]);
#pragma unroll
  for (const Sum& sum : sums) result.largest = fmaxf(result.largest, sum.largest);
#pragma unroll
  for (const Sum& sum : sums) {
    if (sum.total == 0.0f) continue;
    const float weight = power(sum.largest, result.largest);
    result.total = __fmaf_rn(sum.total, weight, result.total);
#pragma unroll
    for (int c = 0; c < 4; ++c) result.v[c] = __fmaf_rn(sum.v[c], weight, result.v[c]);
  }
  return result;
}

__device__ __forceinline__ void multiply(BFloat16, float* sum, uint2 upper, uint2 lower, uint2 columns) {
  mma_bfloat16(sum, upper, lower, columns);
}
__device__ __forceinline__ void multiply(Float16, float* sum, uint2 upper, uint2 lower, uint2 columns) {
  mma_float16(sum, upper, lower, columns);
}

// The offset of a 16-byte chunk in a row of a tile, swizzled as by `swizzled`.
__device__ __forceinline__ int key_chunk(int row, int chunk) {
  return KEY_PITCH == 64 ? (chunk ^ row / 2 % 4) * 16 : swizzled(row, chunk);
}

// Keys and values of a sequence and key head in the cache, from the first key that the query sees on.
struct Source {
  const Cached *keys, *values;
#if FP8_CACHE
  const float *key_scales, *value_scales;
#endif
  int count;

  // row: of the first key in the cache. count: how many keys are to be read from there.
  __device__ __forceinline__ Source(const Arguments& a, i64 row, int count)
      : keys(a.keys + row * SIZE),
        values(a.values + row * SIZE),
#if FP8_CACHE
        key_scales(a.key_scales + row),
        value_scales(a.value_scales + row),
#endif
        count(count) {
  }

  // Starts to load a tile. Keys from `count` on become zeros: a NaN there would reach the result.
  __device__ __forceinline__ void load(Tile& target, int tile, int lane) const {
    constexpr int PER_CHUNK = 16 / sizeof(Cached);
#pragma unroll
    for (int i = lane; i < TILE * KEY_CHUNKS; i += WARP) {
      const int row = i / KEY_CHUNKS, chunk = i % KEY_CHUNKS;
      const bool there = tile * TILE + row < count && chunk * PER_CHUNK < SIZE;
      const i64 offset = there ? i64{tile * TILE + row} * SIZE + chunk * PER_CHUNK : 0;
      async_copy_16(shared_address(&target.rows[0][row][key_chunk(row, chunk)]), keys + offset, there);
      async_copy_16(shared_address(&target.rows[1][row][key_chunk(row, chunk)]), values + offset, there);
    }
#if FP8_CACHE
    static_assert(TILE == WARP);
    const bool there = tile * TILE + lane < count;
    const int key = there ? tile * TILE + lane : 0;
    async_copy_4(shared_address(&target.scales[0][lane]), key_scales + key, there);
    async_copy_4(shared_address(&target.scales[1][lane]), value_scales + key, there);
#endif
  }
};

// In each product of mma a lane holds rows lane / 4 and lane / 4 + 8: halves 0 and 1.
using Scores = float[OCTETS][4];   // of eight keys each
using Weights = u32[2][OCTETS];    // of each half
using Sums = float[2 * STEPS][4];  // of eight columns each

// Adds the scores of 16 queries and the keys of a tile.
__device__ __forceinline__ void add_scores(Scores& scores, const u8 (&query)[ROWS][PITCH], const Tile& tile, int lane) {
  const int row = lane % 16;
#pragma unroll SCORE_STEPS
  for (int step = 0; step < STEPS; ++step) {
    const int chunk = 2 * step + lane / 16;
    u32 q[4], k[4];
    load_matrices(shared_address(&query[row][swizzled(row, chunk)]), q);
    const uint2 upper = make_uint2(q[0], q[2]), lower = make_uint2(q[1], q[3]);
#if FP8_CACHE
    load_matrices(shared_address(&tile.rows[0][lane][key_chunk(lane, step)]), k);
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
      multiply(Float16(), scores[octet], upper, lower, unpack_e4m3(k[octet]));
    }
#else
    load_matrices(shared_address(&tile.rows[0][row][key_chunk(row, chunk)]), k);
    multiply(Input(), scores[0], upper, lower, make_uint2(k[0], k[2]));
    multiply(Input(), scores[1], upper, lower, make_uint2(k[1], k[3]));
#endif
  }
}

// Adds the weighted values of a tile.
__device__ __forceinline__ void add_values(Sums& sums, const Weights& weights, const Tile& tile, int lane) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    u32 v[4];
#if FP8_CACHE
    load_transposed(shared_address(&tile.rows[1][lane][key_chunk(lane, step)]), v);
    uint2 columns[OCTETS];  // of two keys, an even column and the odd one behind it
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) columns[octet] = unpack_e4m3(select_bytes(v[octet], 0, 0x3120));
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet += 2) {
      const uint2 upper = make_uint2(weights[0][octet], weights[0][octet + 1]);
      const uint2 lower = make_uint2(weights[1][octet], weights[1][octet + 1]);
      const uint2 &first = columns[octet], &second = columns[octet + 1];
      multiply(Float16(), sums[2 * step], upper, lower, make_uint2(first.x, second.x));
      multiply(Float16(), sums[2 * step + 1], upper, lower, make_uint2(first.y, second.y));
    }
#else
    const uint2 upper = make_uint2(weights[0][0], weights[0][1]), lower = make_uint2(weights[1][0], weights[1][1]);
    const int row = lane % 16, chunk = 2 * step + lane / 16;
    load_transposed(shared_address(&tile.rows[1][row][key_chunk(row, chunk)]), v);
    multiply(Input(), sums[2 * step], upper, lower, make_uint2(v[0], v[1]));
    multiply(Input(), sums[2 * step + 1], upper, lower, make_uint2(v[2], v[3]));
#endif
  }
}

#if FP8_CACHE
// What sums of weighted values are a multiple of, because weights are products with the scales of values and float16
// must hold them: a power of two, such that the largest scale so far is 2^14 to 2^15 times as much.
struct SumUnit {
  static constexpr u32 EXPONENT = 1u << 23;
  float value = 7.5231638452626401e-37f;  // 2^-120

  // Grows with the scales of a tile's values; NaN counts as large. Returns the unit before, as a fraction of this one.
  __device__ __forceinline__ float grow(const float (&scales)[TILE], int lane) {
    const u32 largest = __reduce_max_sync(FULL_WARP, __float_as_uint(scales[lane]) & 0x7F800000u);
    const float before = value;
    value = __uint_as_float(max(__float_as_uint(value), min(largest, 253 * EXPONENT) - min(largest, 14 * EXPONENT)));
    return before * inverse_of_power(value);
  }
};
#endif

// Grid: (CLUSTER, KEY_HEADS * HEAD_TILES, batch).
extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_attention(const __grid_constant__ Arguments a) {
  extern __shared__ uint4 dynamic_shared[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic_shared);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int block = CLUSTER == 1 ? 0 : static_cast<int>(blockIdx.x);
  const int key_head = blockIdx.y / HEAD_TILES, first_row = blockIdx.y % HEAD_TILES * ROWS;
  const int rows = HEAD_TILES == 1 ? GROUP : min(GROUP - first_row, ROWS);
  const int sequence = blockIdx.z;
  WarpTiles& own = s.warps[warp];

  if constexpr (CLUSTER > 1) cluster_arrive_relaxed();
  if (!a.early) wait_for_previous_kernel();
  const Keys seen(a, sequence);
  const int tiles = ceil_div(seen.count, TILE), cached = seen.count - seen.appends;
  const Source source(a, (i64{sequence} * KEY_HEADS + key_head) * a.length + seen.first, cached);
  const int first_tile = warp * CLUSTER + block;
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
    const int tile = first_tile + stage * (WARPS * CLUSTER);
    if (tile < tiles) source.load(own.stages[stage], tile, lane);
    async_commit();
  }
  for (int i = rows * CHUNKS + threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
    store_16(&s.query[i / CHUNKS][swizzled(i / CHUNKS, i % CHUNKS)], Bytes16{});
  }
#if FP8_CACHE
  if (threadIdx.x >= rows && threadIdx.x < ROWS) s.query_factors[threadIdx.x] = 0.0f;
#endif
  if (threadIdx.x < rows) s.sinks[threadIdx.x] = scaled_sink(a, key_head * GROUP + first_row + threadIdx.x);
  const Heads heads(a, sequence);
  wait_for_previous_kernel();
  allow_next_kernel();
  heads.prepare(s, a, sequence, key_head, first_row, rows, seen, block == 0 && first_row == 0);
  __syncthreads();

  Sums out = {};
  float largest[2] = {minus_infinity(), minus_infinity()}, total[2] = {};
  const float factor = a.score_scale * LOG2_E;
#if FP8_CACHE
  const float factors[2] = {factor * s.query_factors[lane / 4], factor * s.query_factors[lane / 4 + 8]};
  SumUnit unit;
#endif
#pragma unroll 1
  for (int tile = first_tile, stage = 0; tile < tiles; tile += WARPS * CLUSTER) {
    async_wait<STAGES - 1>();
    __syncwarp();
    Tile& tile_of = own.stages[stage];
    if (seen.appends && tile == tiles - 1) {
      const int row = (seen.count - 1) % TILE;
      for (int i = lane; i < 2 * KEY_CHUNKS; i += WARP) {
        const int chunk = i % KEY_CHUNKS, which = i / KEY_CHUNKS;
        store_16(&tile_of.rows[which][row][key_chunk(row, chunk)], load_16(&s.fresh[which][chunk * 16]));
      }
#if FP8_CACHE
      if (lane < 2) tile_of.scales[lane][row] = *reinterpret_cast<const float*>(&s.fresh[lane][SIZE]);
#endif
      __syncwarp();
    }

    Scores scores = {};
    add_scores(scores, s.query, tile_of, lane);
#if FP8_CACHE
    const float shrink = unit.grow(tile_of.scales[1], lane), inverse = inverse_of_power(unit.value);
#else
    constexpr float shrink = 1.0f;
#endif

    Weights weights;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[2 * OCTETS];
#pragma unroll
      for (int i = 0; i < 2 * OCTETS; ++i) {
        const int in_tile = i / 2 * 8 + 2 * (lane % 4) + i % 2;
#if FP8_CACHE
        const float score = scores[i / 2][2 * half + i % 2] * tile_of.scales[0][in_tile] * factors[half];
#else
        const float score = scores[i / 2][2 * half + i % 2] * factor;
#endif
        x[i] = tile * TILE + in_tile < seen.count ? score : minus_infinity();
      }
      float now = x[0];
#pragma unroll
      for (const float value : x) now = fmaxf(now, value);
      now = fmaxf(largest[half], warp_reduce<4>(now, [](float p, float q) { return fmaxf(p, q); }));
      const float before = power(largest[half], now);
      largest[half] = now;
      float sum = 0.0f;
#pragma unroll
      for (float& value : x) {
        value = power(value, now);
        sum += value;
      }
      total[half] = __fmaf_rn(total[half], before, sum);
#pragma unroll
      for (int octet = 0; octet < OCTETS; ++octet) {
#if FP8_CACHE
        const float2 scale = *reinterpret_cast<const float2*>(&tile_of.scales[1][octet * 8 + 2 * (lane % 4)]);
        weights[half][octet] =
            pack(Float16(), x[2 * octet] * (scale.x * inverse), x[2 * octet + 1] * (scale.y * inverse));
#else
        weights[half][octet] = pack(Input(), x[2 * octet], x[2 * octet + 1]);
#endif
      }
#pragma unroll
      for (auto& columns : out) {
        columns[2 * half] *= before * shrink;
        columns[2 * half + 1] *= before * shrink;
      }
    }
    add_values(out, weights, tile_of, lane);

    __syncwarp();
    const int later = tile + STAGES * WARPS * CLUSTER;
    if (later < tiles) source.load(tile_of, later, lane);
    async_commit();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }

  async_wait<0>();
  __syncwarp();  // the sums overwrite the tiles
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + half * 8;
    total[half] = warp_reduce<4>(total[half], [](float p, float q) { return p + q; });
    if (lane % 4 == 0) s.statistics[warp][row] = make_float2(largest[half], total[half]);
#if FP8_CACHE
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const float *const even = &out[2 * step][2 * half], *const odd = &out[2 * step + 1][2 * half];
      *reinterpret_cast<float4*>(&own.sums[row][step * 16 + 4 * (lane % 4)]) =
          make_float4(even[0] * unit.value, odd[0] * unit.value, even[1] * unit.value, odd[1] * unit.value);
    }
#else
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i) {
      const int column = i * 8 + 2 * (lane % 4);
      if (column >= SIZE) continue;
      *reinterpret_cast<float2*>(&own.sums[row][column]) = make_float2(out[i][2 * half], out[i][2 * half + 1]);
    }
#endif
  }
  __syncthreads();

  // Merges the warps' sums of four columns of a row.
  const auto of_block = [&](int row, int column) {
    return merged<WARPS>([&](int w, Sum& sum) {
      sum.set(s.statistics[w][row], *reinterpret_cast<const float4*>(&s.warps[w].sums[row][column]));
    });
  };
  const int columns = rows * SIZE;
  if constexpr (CLUSTER > 1) {
    cluster_wait();  // all blocks of the cluster are running
    for (int i = threadIdx.x; i < columns / 4; i += THREADS) {
      const int column = i * 4, row = column / SIZE, part = column / BLOCK;
      const Sum sum = of_block(row, column % SIZE);
      const u32 target = shared_address(&s.block_sums[part / CLUSTER][block][column % BLOCK]);
      store_to_block(cluster_address(target, part % CLUSTER), make_float4(sum.v[0], sum.v[1], sum.v[2], sum.v[3]));
      if (column % SIZE) continue;
      for (int b = 0; b < CLUSTER; ++b) {
        const u32 statistics = shared_address(&s.block_statistics[block][row]);
        store_to_block(cluster_address(statistics, b), make_float2(sum.largest, sum.total));
      }
    }
    cluster_arrive_release();
    cluster_wait();
  }

  // Finishes the columns: one warp of one block for each 128.
  const int first_column = (key_head * GROUP + first_row) * SIZE;
#pragma unroll 1
  for (int part = warp * CLUSTER + block; part * BLOCK < columns; part += WARPS * CLUSTER) {
    const int column = part * BLOCK + lane * 4, row = min(column / SIZE, ROWS - 1);
    Sum sum;
    if constexpr (CLUSTER > 1) {
      sum = merged<CLUSTER>([&](int b, Sum& of) {
        of.set(s.block_statistics[b][row],
               *reinterpret_cast<const float4*>(&s.block_sums[part / CLUSTER][b][lane * 4]));
      });
    } else {
      sum = of_block(row, column % SIZE);
    }
    // The total of a row that sees any key is at least about 1. A far larger sink makes it infinite, and the result 0.
    const float total = sum.total + exp2f(s.sinks[row] - sum.largest);
    const float inverse = sum.total == 0.0f ? 0.0f : 1.0f / total;
    const u32 low = pack(Input(), sum.v[0] * inverse, sum.v[1] * inverse);
    const u32 high = pack(Input(), sum.v[2] * inverse, sum.v[3] * inverse);
    const i64 place = i64{sequence} * (KEY_HEADS * GROUP * SIZE) + first_column + column;
    if (a.out && column < columns) *reinterpret_cast<uint2*>(a.out + place) = make_uint2(low, high);
    if (!a.data) continue;
    const u32 amax = warp_reduce(Input::larger(Input::magnitude(low), Input::magnitude(high)), Input::larger);
    const Scale scale(Input::largest(amax));
    const auto quotient = [&](u32 word, int i) { return scale.quotient(Input::value(Input::bits(word, i))); };
    *reinterpret_cast<u32*>(a.data + place) =
        to_e4m3(quotient(low, 0), quotient(low, 1), quotient(high, 0), quotient(high, 1));
    if (lane == 0) a.scale[(first_column / BLOCK + part) * a.scale_pitch + sequence] = scale.value;
  }
}
