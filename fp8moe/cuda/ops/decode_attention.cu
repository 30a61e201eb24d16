// Attention of one new token per sequence over keys and values in a static cache, starting from the projections.
// Includes the RMSNorm of heads, rotary embedding, the store of the new key and value to the cache, and the
// quantization of the result, bit for bit that of quantize_1x128.cu. Softmax is computed tile by tile (FlashAttention,
// arXiv:2205.14135), by many thread blocks at once (Flash-Decoding).
//
// A cluster handles one sequence and one key head. The query heads that share the key head, up to 16, are the rows of
// mma. A tile has 16 keys. Tile t belongs to block t % CLUSTER, and within it to warp t / CLUSTER % WARPS. Each warp
// loads its own tiles, STAGES ahead, so warps wait for each other only at the end. Then the sums of warps are merged in
// order, then the sums of blocks. A head's sink (arXiv:2508.10925) joins the total of the merged sums, so it counts
// once. With `early` the first tiles are loaded before the queries exist.
//
// Compile-time constants: those of heads.cuh, with VECTORS = 1, and of quantize.cuh; KEY_HEADS; GROUP (query heads per
// key head); NORM (queries and keys have a norm); APPEND (the new token's query and key still need norm and rotation,
// and its key and value go to the cache; otherwise the cache already has them); WARPS, STAGES, CLUSTER; SHARED_BYTES,
// ARGUMENTS_BYTES.
#include "cluster.cuh"
#include "heads.cuh"
#include "quantize.cuh"

constexpr int TILE = 16;  // keys in a tile
constexpr int ROWS = 16;  // query heads of a thread block
constexpr int MAX_ROWS = GROUP < ROWS ? GROUP : ROWS;
constexpr int HEAD_TILES = ceil_div(GROUP, ROWS);
constexpr int STEPS = ceil_div(SIZE, 16);        // steps of mma along a head
constexpr int CHUNKS = 2 * STEPS;                // 16-byte chunks of a row in shared memory
constexpr int PITCH = round_up(CHUNKS, 8) * 16;  // bytes between rows
constexpr int SUM_PITCH = SIZE + 8;              // floats per row of sums, padded against bank conflicts
constexpr int THREADS = WARPS * WARP;
constexpr int PARTS = ceil_div(MAX_ROWS * SIZE, BLOCK* CLUSTER);  // of 128 columns, that a block finishes
constexpr float LOG2_E = 1.4426950408889634f;
static_assert(VECTORS == 1 && HEAD_LANES >= CHUNKS && BLOCK == 4 * WARP && STAGES * 2 * PITCH >= 4 * SUM_PITCH);

union alignas(16) WarpTiles {
  u8 stages[STAGES][2][TILE][PITCH];  // keys and values
  float sums[ROWS][SUM_PITCH];        // the warp's sums; they replace the tiles at the end
};

struct Shared {
  WarpTiles warps[WARPS];
  u8 query[ROWS][PITCH];
  u8 fresh[2][PITCH];              // the new token's key and value
  float sinks[ROWS];               // as `scaled_sink` returns them
  float2 statistics[WARPS][ROWS];  // of each row: the largest score, and the sum of weights
  // Sums of all blocks of the cluster, for the columns that this block finishes.
  float2 block_statistics[CLUSTER][ROWS];
  alignas(16) float block_sums[PARTS][CLUSTER][BLOCK];
};
static_assert(sizeof(Shared) == SHARED_BYTES);

#include "decode_attention.cuh"

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

// Starts to load a tile of keys and values. Keys from `count` on become zeros: a NaN there would reach the result.
__device__ __forceinline__ void load_tile(u8 (&stage)[2][TILE][PITCH], const Element* keys, const Element* values,
                                          int tile, int count, int lane) {
#pragma unroll
  for (int i = lane; i < TILE * CHUNKS; i += WARP) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const bool there = tile * TILE + row < count && chunk * 8 < SIZE;
    const i64 offset = there ? i64{tile * TILE + row} * SIZE + chunk * 8 : 0;
    async_copy_16(shared_address(&stage[0][row][swizzled(row, chunk)]), keys + offset, there);
    async_copy_16(shared_address(&stage[1][row][swizzled(row, chunk)]), values + offset, there);
  }
}

#include "decode_attention_heads.cuh"

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
  const i64 base = ((i64{sequence} * KEY_HEADS + key_head) * a.length + seen.first) * SIZE;
  const Element* const keys = a.keys + base;
  const Element* const values = a.values + base;
  const int first_tile = warp * CLUSTER + block;
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
    const int tile = first_tile + stage * (WARPS * CLUSTER);
    if (tile < tiles) load_tile(own.stages[stage], keys, values, tile, cached, lane);
    async_commit();
  }
  for (int i = rows * CHUNKS + threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
    store_16(&s.query[i / CHUNKS][swizzled(i / CHUNKS, i % CHUNKS)], Bytes16{});
  }
  if (threadIdx.x < rows) s.sinks[threadIdx.x] = scaled_sink(a, key_head * GROUP + first_row + threadIdx.x);
  const Heads heads(a, sequence);
  wait_for_previous_kernel();
  allow_next_kernel();
  heads.prepare(s, a, sequence, key_head, first_row, rows, seen, block == 0 && first_row == 0);
  __syncthreads();

  // In each product of mma, a lane holds rows lane / 4 and lane / 4 + 8.
  float out[2 * STEPS][4] = {};
  float largest[2] = {minus_infinity(), minus_infinity()}, total[2] = {};
  const float factor = a.score_scale * LOG2_E;
  const int matrix_row = lane % 8 + lane / 8 % 2 * 8, matrix_chunk = lane / 16;
#pragma unroll 1
  for (int tile = first_tile, stage = 0; tile < tiles; tile += WARPS * CLUSTER) {
    async_wait<STAGES - 1>();
    __syncwarp();
    u8(&tile_of)[2][TILE][PITCH] = own.stages[stage];
    if (seen.appends && tile == tiles - 1) {
      const int row = (seen.count - 1) % TILE;
      for (int i = lane; i < 2 * CHUNKS; i += WARP) {
        const int chunk = i % CHUNKS, which = i / CHUNKS;
        store_16(&tile_of[which][row][swizzled(row, chunk)], load_16(&s.fresh[which][chunk * 16]));
      }
      __syncwarp();
    }

    float scores[2][4] = {};  // keys 0 to 7, and 8 to 15
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int chunk = 2 * step + matrix_chunk;
      u32 q[4], k[4];
      load_matrices(shared_address(&s.query[matrix_row][swizzled(matrix_row, chunk)]), q);
      load_matrices(shared_address(&tile_of[0][matrix_row][swizzled(matrix_row, chunk)]), k);
      const uint2 upper = make_uint2(q[0], q[2]), lower = make_uint2(q[1], q[3]);
      multiply(Input(), scores[0], upper, lower, make_uint2(k[0], k[2]));
      multiply(Input(), scores[1], upper, lower, make_uint2(k[1], k[3]));
    }

    u32 weights[2][2];  // of the lane's two rows, for keys 0 to 7 and 8 to 15
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = tile * TILE + i / 2 * 8 + 2 * (lane % 4) + i % 2;
        x[i] = key < seen.count ? scores[i / 2][2 * half + i % 2] * factor : minus_infinity();
      }
      float now = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
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
      weights[half][0] = pack(Input(), x[0], x[1]);
      weights[half][1] = pack(Input(), x[2], x[3]);
#pragma unroll
      for (auto& columns : out) {
        columns[2 * half] *= before;
        columns[2 * half + 1] *= before;
      }
    }

    const uint2 upper = make_uint2(weights[0][0], weights[0][1]), lower = make_uint2(weights[1][0], weights[1][1]);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      u32 v[4];
      const int chunk = 2 * step + matrix_chunk;
      load_transposed(shared_address(&tile_of[1][matrix_row][swizzled(matrix_row, chunk)]), v);
      multiply(Input(), out[2 * step], upper, lower, make_uint2(v[0], v[1]));
      multiply(Input(), out[2 * step + 1], upper, lower, make_uint2(v[2], v[3]));
    }

    __syncwarp();
    const int later = tile + STAGES * WARPS * CLUSTER;
    if (later < tiles) load_tile(tile_of, keys, values, later, cached, lane);
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
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i) {
      const int column = i * 8 + 2 * (lane % 4);
      if (column >= SIZE) continue;
      *reinterpret_cast<float2*>(&own.sums[row][column]) = make_float2(out[i][2 * half], out[i][2 * half + 1]);
    }
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
