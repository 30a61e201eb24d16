// Causal attention of many tokens, with the bits that decode_attention_fixed.cu has for each of them
// (fixed_splits.cuh).
//
// A query head of a token is a row. The rows of a sequence that share a key head are numbered token by token; a thread
// block takes ROWS consecutive ones, so that all use each tile of keys. Each warp handles 16 * ROW_TILES rows and goes
// over the splits in order: products with the keys, softmax, then for 16 columns at a time products with the values,
// merged at once. Meanwhile the block loads the next split.
//
// Compile-time constants: those of fixed_splits.cuh; GROUP (query heads per key head); WARPS, ROW_TILES; BLOCKS_PER_SM;
// SHARED_BYTES, ARGUMENTS_BYTES.
#include "fixed_splits.cuh"

constexpr int WARP_ROWS = 16 * ROW_TILES;
constexpr int ROWS = WARPS * WARP_ROWS;
constexpr int THREADS = WARPS * WARP;
constexpr int ALL = 1 << 30;
constexpr int STEPS_AT_ONCE = 2;  // of values, between merges

struct Shared {
  Row queries[ROWS];
  Row splits[2][2][SPLIT];  // keys and values, in two stages
  float2 statistics[ROWS];
};
static_assert(sizeof(Shared) == SHARED_BYTES);

// q, out (queries, key heads * GROUP, SIZE): heads contiguous. keys, values (keys, key heads, SIZE): values of a head
// contiguous. *_stride: elements between rows and between heads. sequences (3, pitch): of each sequence the first
// query, the first key and the number of keys; the last query sees all keys, each one before it one less, and a query
// at most the last `window`. logsumexp (heads, queries): of the scores, infinity for a query that sees no keys.
struct Arguments {
  const Element *q, *keys, *values;
  const int* sequences;
  Element* out;
  float* logsumexp;
  i64 q_stride, key_stride, key_head_stride, value_stride, value_head_stride, queries;
  int pitch, window;
  float score_scale;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES);

// Positions of the first and the last query of some rows.
struct Span {
  int first, last;

  // Whether some of these queries do not see all keys of the split that begins at key `from`, and whether none sees
  // any.
  __device__ __forceinline__ bool masks(int from, int window) const {
    return from + SPLIT - 1 > first || from <= last - window;
  }
  __device__ __forceinline__ bool skips(int from, int window) const {
    return from > last || from + SPLIT - 1 <= first - window;
  }
};

// Starts to load the rows [first, end) of SPLIT rows that are `stride` elements apart; the others become zeros.
__device__ __forceinline__ void load_rows(Row* target, const Element* source, i64 stride, int first, int end) {
  constexpr int AT_ONCE = THREADS / CHUNKS;  // rows; threads that are left over have none
  const int chunk = threadIdx.x % CHUNKS;
  int row = threadIdx.x / CHUNKS;
  asm volatile("" : "+r"(row), "+l"(stride));  // computed anew each time: kept, addresses would take registers
  source += row * stride + chunk * 8;
#pragma unroll
  for (int i = 0; i < ceil_div(SPLIT, AT_ONCE); ++i, row += AT_ONCE, source += AT_ONCE * stride) {
    if (THREADS % CHUNKS && threadIdx.x >= AT_ONCE * CHUNKS) break;
    if (SPLIT % AT_ONCE && row >= SPLIT) break;
    const bool there = row >= first && row < end && (CHUNKS * 8 == SIZE || chunk * 8 < SIZE);
    async_copy_16(shared_address(&target[row][swizzled(row, chunk)]), source, there);
  }
}

// Whether some of this thread's share of a split's values is infinite or NaN.
__device__ __forceinline__ bool some_not_finite(const Row* values) {
  u32 amax = 0;
  for (int i = threadIdx.x; i < SPLIT * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS;
    for (const u32 word : load_16(&values[row][swizzled(row, i % CHUNKS)]).words) {
      amax = Input::larger(amax, Input::magnitude(word));
    }
  }
  return !(Input::value(Input::largest(amax)) < -minus_infinity());
}

// The rows of a warp.
struct WarpRows {
  float sums[ROW_TILES][2 * STEPS][4] = {};
  Weights weights[ROW_TILES];
  Factors factors[ROW_TILES][2];
  int first_row, base;  // row 0 is row first_row of the sequence; `base`: position of the sequence's first query
  Span span;

  // The position of the query of this lane's row `half` in a row tile.
  __device__ __forceinline__ int position(int row_tile, int half) const {
    u32 row = first_row + threadIdx.x % WARP / 4;
    asm volatile("" : "+r"(row));  // computed anew, as above
    return base + static_cast<int>((row + row_tile * 16 + half * 8) / GROUP);
  }

  template <bool Masked>
  __device__ __forceinline__ void scale_all(Scores (&scores)[ROW_TILES], float factor, int from, int window) const {
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int end = Masked ? position(t, half) + 1 - from : 0;
        scale<Masked>(scores[t], half, factor, end - window, end);
      }
    }
  }

  // statistics: of this lane's first row. One of its four lanes writes them, after all have read.
  __device__ __forceinline__ void weigh_all(const Scores (&scores)[ROW_TILES], float2* statistics) {
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 of_row = statistics[t * 16 + half * 8];
        factors[t][half] = merge(of_row, weigh(scores[t], weights[t], half));  // synchronizes the warp
        if (threadIdx.x % 4 == 0) statistics[t * 16 + half * 8] = of_row;
      }
    }
  }

  using Columns = float[STEPS_AT_ONCE][ROW_TILES][2][4];

  // Merges columns of a split's weighted values, from step `first` on. All: for all queries; otherwise for those at
  // position `only`.
  template <bool All>
  __device__ __forceinline__ void merge_columns(const Columns& of_split, int first, int only) {
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!All && only != position(t, half)) continue;
#pragma unroll
        for (int i = 0; i < 4 * STEPS_AT_ONCE; ++i) {
          const int block = i / 2, column = 2 * half + i % 2;
          if (2 * first + block >= 2 * STEPS) break;
          float& sum = sums[t][2 * first + block][column];
          sum = factors[t][half].merge(sum, of_split[block / 2][t][block % 2][column]);
        }
      }
    }
  }

  // Merges a split's weighted values into the sums of the queries at position `only`; ALL: of all queries.
  __device__ __forceinline__ void add(u32 values, const MatrixRows& matrix_rows, int only) {
#pragma unroll
    for (int first = 0; first < STEPS; first += STEPS_AT_ONCE) {
      Columns of_split = {};
#pragma unroll
      for (int step = first; step < first + STEPS_AT_ONCE; ++step) {
        if (step >= STEPS) break;
#pragma unroll
        for (int tile = 0; tile < SPLIT_TILES; ++tile) {
          u32 v[4];
          load_transposed(matrix_rows.at(values + tile * (TILE * PITCH), step), v);
#pragma unroll
          for (int t = 0; t < ROW_TILES; ++t) add_values(of_split[step - first][t], weights[t][tile], v);
        }
      }
      // A branch every few steps bounds how far loads run ahead, for want of registers.
      if (only == ALL) {
        merge_columns<true>(of_split, first, only);
      } else {
        merge_columns<false>(of_split, first, only);
      }
    }
  }
};

// Grid: (tiles of rows, key heads, sequences).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    prompt_attention(const __grid_constant__ Arguments a) {
  extern __shared__ uint4 dynamic_shared[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic_shared);
  const int lane = threadIdx.x % WARP, warp = same_in_warp(threadIdx.x / WARP);
  const int key_head = blockIdx.y, sequence = blockIdx.z, heads = gridDim.y * GROUP;

  wait_for_previous_kernel();
  allow_next_kernel();
  const int* const of_sequence = a.sequences + sequence;
  const int first_query = same_in_warp(of_sequence[0]), queries = same_in_warp(of_sequence[1]) - first_query;
  const int first_key = same_in_warp(of_sequence[a.pitch]), count = same_in_warp(of_sequence[2 * a.pitch]);
  // The last rows see the most keys, so they go first.
  const int rows = queries * GROUP, first_row = static_cast<int>(gridDim.x - 1 - blockIdx.x) * ROWS;
  if (first_row >= rows) return;

  const int base = count - queries;
  const Span span = {base + first_row / GROUP, base + (min(first_row + ROWS, rows) - 1) / GROUP};
  WarpRows own;
  own.base = base, own.first_row = first_row + warp * WARP_ROWS;
  own.span = {base + own.first_row / GROUP, base + (min(own.first_row + WARP_ROWS, rows) - 1) / GROUP};
  float2* const statistics = s.statistics + warp * WARP_ROWS + lane / 4;
#pragma unroll
  for (int i = 0; i < 2 * ROW_TILES; ++i) statistics[i * 8] = make_float2(minus_infinity(), 0.0f);
  const bool idle = own.first_row >= rows;
  Row* const own_queries = s.queries + warp * WARP_ROWS;

  const Element* const keys = a.keys + first_key * a.key_stride + key_head * a.key_head_stride;
  const Element* const values = a.values + first_key * a.value_stride + key_head * a.value_head_stride;
  const int first_seen = max(span.first - a.window + 1, 0);
  const auto load = [&](int from) {
    const u32 stage = static_cast<u32>(from) / SPLIT % 2;
    const int first = first_seen - from, end = span.last + 1 - from;
    load_rows(s.splits[stage][0], keys + from * a.key_stride, a.key_stride, first, end);
    load_rows(s.splits[stage][1], values + from * a.value_stride, a.value_stride, first, end);
  };
  int from = first_seen / SPLIT * SPLIT;
  for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const bool there = first_row + row < rows && chunk * 8 < SIZE;
    const i64 query = first_query + (first_row + row) / GROUP;
    const i64 place = query * a.q_stride + (key_head * GROUP + (first_row + row) % GROUP) * SIZE + chunk * 8;
    async_copy_16(shared_address(&s.queries[row][swizzled(row, chunk)]), a.q + (there ? place : 0), there);
  }
  if (from <= span.last) load(from);

  const MatrixRows matrix_rows;
  const u32 query_tiles = shared_address(own_queries);
  const float factor = __fmul_rn(a.score_scale, LOG2_E);
#pragma unroll 1
  for (; from <= span.last; from += SPLIT) {
    const u32 stage = static_cast<u32>(from) / SPLIT % 2;
    async_commit();
    async_wait<0>();
    __syncthreads();
    if (from + SPLIT <= span.last) load(from + SPLIT);
    const u32 key_tiles = shared_address(s.splits[stage][0]), value_tiles = shared_address(s.splits[stage][1]);
    const bool guarded = span.masks(from, a.window) && __syncthreads_or(some_not_finite(s.splits[stage][1]));
    const bool skips = idle || own.span.skips(from, a.window);
    if (!guarded && skips) continue;

    Scores scores[ROW_TILES] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      u32 q[ROW_TILES][4];
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t) load_matrices(matrix_rows.at(query_tiles + t * (16 * PITCH), step), q[t]);
#pragma unroll
      for (int tile = 0; tile < SPLIT_TILES; ++tile) {
        u32 k[4];
        load_matrices(matrix_rows.at(key_tiles + tile * (TILE * PITCH), step), k);
#pragma unroll
        for (int t = 0; t < ROW_TILES; ++t) add_scores(scores[t][tile], q[t], k);
      }
    }
    if (own.span.masks(from, a.window)) {
      own.scale_all<true>(scores, factor, from, a.window);
    } else {
      own.scale_all<false>(scores, factor, from, a.window);
    }
    own.weigh_all(scores, statistics);
    // 0 times a value that is not finite is NaN: then each token has a turn, with zeros for what it does not see.
    int turn = guarded ? span.first : ALL;
#pragma unroll 1
    do {
      if (guarded) {
        __syncthreads();
        const int end = turn + 1 - from;
        load_rows(s.splits[stage][1], values + from * a.value_stride, a.value_stride, end - a.window, end);
        async_commit();
        async_wait<0>();
        __syncthreads();
      }
      if (!skips) own.add(value_tiles, matrix_rows, turn);
    } while (guarded && ++turn <= span.last);
  }

  async_commit();  // of queries that see no keys
  async_wait<0>();
  __syncthreads();  // each warp's results replace its queries
  if (idle) return;
#pragma unroll
  for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = t * 16 + lane / 4 + half * 8;
      const float2 of_row = statistics[t * 16 + half * 8];
      const float inverse = inverse_of(of_row.y);
#pragma unroll
      for (int i = 0; i < 2 * STEPS; ++i) {
        const float* const sums = &own.sums[t][i][2 * half];
        const u32 word = pack(Input(), __fmul_rn(sums[0], inverse), __fmul_rn(sums[1], inverse));
        *reinterpret_cast<u32*>(&own_queries[row][swizzled(row, i) + lane % 4 * 4]) = word;
      }
      const int place = own.first_row + row;
      if (lane % 4 || place >= rows) continue;
      const float logsumexp = (of_row.x + log2f(of_row.y)) / LOG2_E;
      const i64 head = key_head * GROUP + place % GROUP;
      a.logsumexp[head * a.queries + first_query + place / GROUP] = of_row.y == 0.0f ? -minus_infinity() : logsumexp;
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = lane; i < WARP_ROWS * CHUNKS; i += WARP) {
    const int row = i / CHUNKS, chunk = i % CHUNKS, place = own.first_row + row;
    if (place >= rows || chunk * 8 >= SIZE) continue;
    const i64 query = first_query + place / GROUP;
    Element* const target = a.out + (query * heads + key_head * GROUP + place % GROUP) * SIZE + chunk * 8;
    store_16(target, load_16(&own_queries[row][swizzled(row, chunk)]));
  }
}
