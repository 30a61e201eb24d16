// decode_attention.cu with the order of sums of fixed_splits.cuh, in which a query has the bits of prompt_attention.cu.
//
// A cluster handles one sequence and one key head; the query heads that share it, up to 16, are the rows of mma. Split
// i belongs to block i % CLUSTER, and within it to warp i / CLUSTER % WARPS. Each warp loads the tiles of its own
// splits, keys and then values, STAGES tiles ahead. After each round, in which every warp of the cluster has a split,
// the sums go to the blocks that finish their columns, and are merged there in the order of splits.
//
// A tile of a cache in FP8 is converted to the type of the queries when it has arrived, in place: prompt_attention.cu
// reads a cache that was converted in the same way.
//
// Compile-time constants: those of decode_attention.cu.
#include "cluster.cuh"
#include "fixed_splits.cuh"
#include "heads.cuh"
#include "quantize.cuh"

constexpr int ROWS = 16;  // query heads of a thread block
constexpr int MAX_ROWS = GROUP < ROWS ? GROUP : ROWS;
constexpr int HEAD_TILES = ceil_div(GROUP, ROWS);
constexpr int THREADS = WARPS * WARP;
constexpr int PARTS = ceil_div(MAX_ROWS * SIZE, BLOCK* CLUSTER);  // of 128 columns, that a block finishes
constexpr int PART_PITCH = BLOCK + 8;                             // floats, padded against bank conflicts
constexpr int OWN_PARTS = ceil_div(PARTS, WARPS);                 // of a warp
constexpr int ROUND = WARPS * CLUSTER;                            // splits in a round
constexpr int SLOTS_AT_ONCE = OWN_PARTS > 4 ? 1 : 4;              // of a round that are merged, for want of registers
static_assert(VECTORS == 1 && HEAD_LANES >= CHUNKS && BLOCK == 4 * WARP);

struct Shared {
  Row tiles[WARPS][STAGES][TILE];  // of keys or values
#if FP8_CACHE
  float scales[WARPS][STAGES][TILE];
#endif
  Row query[ROWS];
  Row fresh[2];       // the new token's key and value
  float sinks[ROWS];  // as `scaled_sink` returns them
  // Of the splits of a round: statistics as `weigh` returns them, and sums of the columns that this block finishes.
  float2 statistics[ROUND][ROWS];
  alignas(16) float sums[ROUND][PARTS][PART_PITCH];
};
static_assert(sizeof(Shared) == SHARED_BYTES);

#define MULTIPLIES_CODES 0
#include "decode_attention_heads.cuh"

// The keys that the query sees, numbered from the first key of the split that has the first of them.
struct Seen {
  int first, end;   // the keys [first, end)
  int cached;       // those before this one are in the cache
  i64 first_place;  // of key 0, in rows of the cache

  __device__ __forceinline__ Seen(const Arguments& a, const Keys& keys, int sequence, int key_head) {
    first = keys.count ? static_cast<int>((keys.first - a.begin[sequence]) % SPLIT) : 0;
    end = first + keys.count;
    cached = end - keys.appends;
    first_place = (i64{sequence} * KEY_HEADS + key_head) * a.length + keys.first - first;
  }
};

// The tiles that a warp loads: of each of its splits those of the keys, then those of the values.
struct Loads {
  const Cached *keys, *values;
#if FP8_CACHE
  const float *key_scales, *value_scales;
  float* scales;  // of the tile of stage 0
#endif
  Seen seen;
  int split, part = 0;  // the next tile to load: split, and which of its 2 * SPLIT_TILES tiles

  // Starts to load the next tile. Keys that are not seen become zeros: a NaN there would reach the result.
  __device__ __forceinline__ void start(Row* target, int stage) {
    const int first = split * SPLIT + part % SPLIT_TILES * TILE;
    const Cached* const source = part < SPLIT_TILES ? keys : values;
    if (first < seen.end) {
#if FP8_CACHE
#pragma unroll
      for (int i = threadIdx.x % WARP; i < TILE * STEPS; i += WARP) {
        const int key = first + i / STEPS;
        const bool there = key >= seen.first && key < seen.cached;
        async_copy_16(shared_address(target) + i * 16, source + (there ? i64{key} * SIZE + i % STEPS * 16 : 0), there);
      }
      const int lane = threadIdx.x % WARP, key = first + lane;
      const float* const of_codes = part < SPLIT_TILES ? key_scales : value_scales;
      const bool there = key >= seen.first && key < seen.cached;
      if (lane < TILE) async_copy_4(shared_address(scales + stage * TILE + lane), of_codes + (there ? key : 0), there);
#else
#pragma unroll
      for (int i = threadIdx.x % WARP; i < TILE * CHUNKS; i += WARP) {
        const int row = i / CHUNKS, chunk = i % CHUNKS, key = first + row;
        const bool there = key >= seen.first && key < seen.cached && chunk * 8 < SIZE;
        async_copy_16(shared_address(&target[row][swizzled(row, chunk)]),
                      source + (there ? i64{key} * SIZE + chunk * 8 : 0), there);
      }
#endif
    }
    async_commit();
    if (++part == 2 * SPLIT_TILES) part = 0, split += ROUND;
  }
};

#if FP8_CACHE
// Converts a tile of codes, row after row, to rows of values in its place.
__device__ __forceinline__ void convert(Row* tile, const float* scales) {
  constexpr int EACH = ceil_div(TILE * STEPS, WARP);
  const int lane = threadIdx.x % WARP;
  Bytes16 codes[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int chunk = min(lane + i * WARP, TILE * STEPS - 1);
    codes[i] = load_16(&tile[0][0] + chunk * 16);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int chunk = lane + i * WARP, row = chunk / STEPS, column = chunk % STEPS * 2;
    if (chunk >= TILE * STEPS) break;
    const u32(&words)[4] = codes[i].words;
    store_16(&tile[row][swizzled(row, column)], dequantized(make_uint2(words[0], words[1]), scales[row]));
    store_16(&tile[row][swizzled(row, column + 1)], dequantized(make_uint2(words[2], words[3]), scales[row]));
  }
  __syncwarp();
}
#endif

__device__ __forceinline__ void wait_for_blocks() {
  if constexpr (CLUSTER > 1) {
    cluster_arrive_release();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

// Grid: (CLUSTER, KEY_HEADS * HEAD_TILES, batch).
extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_attention_fixed(const __grid_constant__ Arguments a) {
  extern __shared__ uint4 dynamic_shared[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic_shared);
  const int lane = threadIdx.x % WARP, warp = same_in_warp(threadIdx.x / WARP);
  const int block = CLUSTER == 1 ? 0 : static_cast<int>(blockIdx.x);
  const int key_head = blockIdx.y / HEAD_TILES, first_row = blockIdx.y % HEAD_TILES * ROWS;
  const int rows = HEAD_TILES == 1 ? GROUP : min(GROUP - first_row, ROWS);
  const int sequence = blockIdx.z;
  Row(&own_tiles)[STAGES][TILE] = s.tiles[warp];

  if constexpr (CLUSTER > 1) cluster_arrive_relaxed();
  if (!a.early) wait_for_previous_kernel();
  const Keys keys(a, sequence);
  const Seen seen(a, keys, sequence, key_head);
  const int splits = ceil_div(seen.end, SPLIT);
  const i64 place = seen.first_place * SIZE;
  Loads loads = {a.keys + place,
                 a.values + place,
#if FP8_CACHE
                 a.key_scales + seen.first_place,
                 a.value_scales + seen.first_place,
                 s.scales[warp][0],
#endif
                 seen,
                 warp * CLUSTER + block};
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) loads.start(own_tiles[stage], stage);
  for (int i = rows * CHUNKS + threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
    store_16(&s.query[i / CHUNKS][swizzled(i / CHUNKS, i % CHUNKS)], Bytes16{});
  }
  if (threadIdx.x < rows) s.sinks[threadIdx.x] = scaled_sink(a, key_head * GROUP + first_row + threadIdx.x);
  const Heads heads(a, sequence);
  wait_for_previous_kernel();
  allow_next_kernel();
  heads.prepare(s, a, sequence, key_head, first_row, rows, keys, block == 0 && first_row == 0);
  __syncthreads();
  if constexpr (CLUSTER > 1) cluster_wait();  // all blocks of the cluster are running

  const MatrixRows matrix_rows;
  const float factor = __fmul_rn(a.score_scale, LOG2_E);
  float2 statistics[OWN_PARTS];
  float merged[OWN_PARTS][4] = {};
#pragma unroll
  for (float2& of_part : statistics) of_part = make_float2(minus_infinity(), 0.0f);
  int stage = 0;
  // The address of the tile `ahead` of the next one, which has arrived. If it has the new token's key or value, that is
  // added. first: its first key. which: keys or values.
  const auto tile_at = [&](int ahead, int first, int which) {
    const int place = stage + ahead < STAGES ? stage + ahead : stage + ahead - STAGES;
    Row* const tile = own_tiles[place];
#if FP8_CACHE
    convert(tile, s.scales[warp][place]);
#endif
    if (keys.appends && seen.end - 1 >= first && seen.end - 1 < first + TILE) {
      const int row = seen.end - 1 - first;
      if (lane < CHUNKS) store_16(&tile[row][swizzled(row, lane)], load_16(&s.fresh[which][lane * 16]));
      __syncwarp();
    }
    return shared_address(tile);
  };
  const auto release = [&] {
    __syncwarp();
    loads.start(own_tiles[stage], stage);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  };

#pragma unroll 1
  for (int first_split = 0; first_split < splits; first_split += ROUND) {
    const int split = first_split + warp * CLUSTER + block, first = split * SPLIT;
    float sums[2 * STEPS][4];
    float2 of_split[2];
    if (split < splits) {
      Scores scores = {};
      Weights weights;
#pragma unroll
      for (int pair = 0; pair < SPLIT_TILES; pair += 2) {
        async_wait<STAGES - 2>();
        __syncwarp();
        const int from = first + pair * TILE;
        const u32 tile_keys[2] = {tile_at(0, from, 0), tile_at(1, from + TILE, 0)};
        if (from < seen.end) {
#pragma unroll
          for (int step = 0; step < STEPS; ++step) {
            u32 q[4], k[2][4];
            load_matrices(matrix_rows.at(shared_address(s.query), step), q);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              load_matrices(matrix_rows.at(tile_keys[i], step), k[i]);
              add_scores(scores[pair + i], q, k[i]);
            }
          }
        }
        release();
        release();
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scale<true>(scores, half, factor, seen.first - first, seen.end - first);
        of_split[half] = weigh(scores, weights, half);
      }
#pragma unroll
      for (auto& columns : sums) columns[0] = columns[1] = columns[2] = columns[3] = 0.0f;
#pragma unroll
      for (int tile = 0; tile < SPLIT_TILES; ++tile) {
        async_wait<STAGES - 1>();
        __syncwarp();
        const u32 tile_values = tile_at(0, first + tile * TILE, 1);
        if (first + tile * TILE < seen.end) {
#pragma unroll
          for (int step = 0; step < STEPS; ++step) {
            u32 v[4];
            load_transposed(matrix_rows.at(tile_values, step), v);
            add_values(sums + 2 * step, weights[tile], v);
          }
        }
        release();
      }
    }

    if (first_split > 0) wait_for_blocks();  // they have merged the round before
    if (split < splits) {
      const int slot = split - first_split;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + half * 8;
        if (row >= rows) continue;
#pragma unroll
        for (int i = 0; i < 2 * STEPS; ++i) {
          const int in_row = i * 8 + lane % 4 * 2, column = row * SIZE + in_row, part = column / BLOCK;
          if (in_row >= SIZE) continue;
          float* const target = &s.sums[slot][part / CLUSTER][column % BLOCK];
          const float2 pair = make_float2(sums[i][2 * half], sums[i][2 * half + 1]);
          if constexpr (CLUSTER > 1) {
            store_to_block(cluster_address(shared_address(target), part % CLUSTER), pair);
          } else {
            *reinterpret_cast<float2*>(target) = pair;
          }
        }
        for (int b = lane % 4; b < CLUSTER; b += 4) {
          float2* const target = &s.statistics[slot][row];
          if constexpr (CLUSTER > 1) {
            store_to_block(cluster_address(shared_address(target), b), of_split[half]);
          } else {
            *target = of_split[half];
          }
        }
      }
    }
    wait_for_blocks();

    const int slots = min(splits - first_split, ROUND);
#pragma unroll
    for (int i = 0; i < OWN_PARTS; ++i) {
      const int own = warp + i * WARPS, part = own * CLUSTER + block;
      if (own >= PARTS || part * BLOCK >= rows * SIZE) continue;
      const int row = min((part * BLOCK + lane * 4) / SIZE, ROWS - 1);
#pragma unroll SLOTS_AT_ONCE
      for (int slot = 0; slot < slots; ++slot) {
        const Factors factors = merge(statistics[i], s.statistics[slot][row]);
        const float4 v = *reinterpret_cast<const float4*>(&s.sums[slot][own][lane * 4]);
        merged[i][0] = factors.merge(merged[i][0], v.x), merged[i][1] = factors.merge(merged[i][1], v.y);
        merged[i][2] = factors.merge(merged[i][2], v.z), merged[i][3] = factors.merge(merged[i][3], v.w);
      }
    }
  }
  async_wait<0>();

  // Finishes the columns: one warp of one block for each 128.
  const int first_column = (key_head * GROUP + first_row) * SIZE, columns = rows * SIZE;
#pragma unroll
  for (int i = 0; i < OWN_PARTS; ++i) {
    const int part = (warp + i * WARPS) * CLUSTER + block;
    if (part * BLOCK >= columns) continue;
    const int column = part * BLOCK + lane * 4, row = min(column / SIZE, ROWS - 1);
    // The total of a row that sees any key is at least about 1. A far larger sink makes it infinite, and the result 0.
    const float of_sink = power_of_two(__fsub_rn(s.sinks[row], statistics[i].x));
    const float inverse = statistics[i].y == 0.0f ? 0.0f : inverse_of(__fadd_rn(statistics[i].y, of_sink));
    const u32 low = pack(Input(), __fmul_rn(merged[i][0], inverse), __fmul_rn(merged[i][1], inverse));
    const u32 high = pack(Input(), __fmul_rn(merged[i][2], inverse), __fmul_rn(merged[i][3], inverse));
    const i64 target = i64{sequence} * (KEY_HEADS * GROUP * SIZE) + first_column + column;
    if (a.out && column < columns) *reinterpret_cast<uint2*>(a.out + target) = make_uint2(low, high);
    if (!a.data) continue;
    const u32 amax = warp_reduce(Input::larger(Input::magnitude(low), Input::magnitude(high)), Input::larger);
    const Scale of_block(Input::largest(amax));
    const auto quotient = [&](u32 word, int j) { return of_block.quotient(Input::value(Input::bits(word, j))); };
    *reinterpret_cast<u32*>(a.data + target) =
        to_e4m3(quotient(low, 0), quotient(low, 1), quotient(high, 0), quotient(high, 1));
    if (lane == 0) a.scale[(first_column / BLOCK + part) * a.scale_pitch + sequence] = of_block.value;
  }
}
