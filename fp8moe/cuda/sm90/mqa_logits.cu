// Index scores of DeepSeek sparse attention (arXiv:2512.02556, section 2.1), in a prefill and a paged variant:
//   out[s, t] = kv_scale[t] * sum_h weights[s, h] * relu(q[s, h] . kv[t])     for start(s) <= t < end(s)
//               with from_starts, this value is out[s, t - start(s)]
//   q (S, H, D) e4m3; kv: tokens of D e4m3 values and a float32 scale; weights (S, H) float32; out (S, columns) float32
//
// The schedule (tile_schedule.cuh, mqa_schedule.cuh) gives each thread block segments: consecutive tiles of TILE kv
// tokens that a group of QUERIES queries scores. In the paged variant, a tile is a block of the cache. The warps of a
// thread block have four roles:
//   produce_tiles    one warp loads kv tiles into a ring
//   produce_queries  one warp loads q and the weights of each segment's group
//   fill             two warps write -inf where a query has no tile
//   consume          the math warpgroups multiply and reduce (mqa_fold.cuh). The rows of wgmma are kv tokens, its
//                    columns the heads of the warpgroup's queries; all of D is one product.
//
// kernels/indexer/sm90.py defines the constants: HEADS, HEAD_DIM, QUERIES, PAGED, THREADS, TILE, STAGES (of kv tiles),
// Q_SLOTS (of the query ring), COLUMNS (of wgmma), TILE_ROWS (rows of kv's tensor map in a tile), registers, sizes.
// There are COLUMN_GROUPS x ROW_GROUPS math warpgroups: column groups divide the queries, row groups take tiles in
// turns.
#include "mqa_cache.cuh"
#include "mqa_fold.cuh"
#include "pipeline.cuh"

constexpr int MATH_WARPS = 4 * COLUMN_GROUPS * ROW_GROUPS;
constexpr int FILL_WARPS = 2;
constexpr int FILL_COLUMNS = 4096;  // columns that a warp fills at a time
static_assert(THREADS == WARP * (MATH_WARPS + 2 + FILL_WARPS));
static_assert(STAGES % ROW_GROUPS == 0, "a warpgroup steps over the stages of the others");

// The kv tiles in shared memory. Paged: whole cache blocks. One tensor map covers keys and scales, so the scales are
// swizzled too.
template <bool Paged>
struct KvStages {
  struct alignas(SWIZZLE_ALIGNMENT) Stage : CacheBlock<TILE> {};
  static_assert(!Paged || TILE_ROWS * HEAD_DIM == sizeof(CacheBlock<TILE>));

  Stage stages[STAGES];

  __device__ __forceinline__ const unsigned char* keys(u32 stage) const { return stages[stage].keys; }
  __device__ __forceinline__ float scale(u32 stage, int token) const {
    const int offset = sizeof(Stage::keys) + token * sizeof(float);
    const int swizzled = offset ^ (offset / 128 % (HEAD_DIM / 16)) * 16;
    return *reinterpret_cast<const float*>(stages[stage].keys + swizzled);
  }
  __device__ __forceinline__ void load(u32 stage, const TensorMap& kv, const TensorMap&, u32 full, int row) const {
    tma_load_once(shared_address(keys(stage)), kv, full, 0, row);
  }
};

// Prefill: keys and scales are separate arrays.
template <>
struct KvStages<false> {
  unsigned char tiles[STAGES][TILE * HEAD_DIM];
  float scales[STAGES][TILE];
  static_assert(PAGED || (TILE_ROWS == TILE && sizeof(tiles[0]) % SWIZZLE_ALIGNMENT == 0));

  __device__ __forceinline__ const unsigned char* keys(u32 stage) const { return tiles[stage]; }
  __device__ __forceinline__ float scale(u32 stage, int token) const { return scales[stage][token]; }
  __device__ __forceinline__ void load(u32 stage, const TensorMap& kv, const TensorMap& kv_scale, u32 full,
                                       int row) const {
    tma_load(shared_address(keys(stage)), kv, full, 0, row);
    tma_load(shared_address(scales[stage]), kv_scale, full, row, 0);
  }
};

struct alignas(SWIZZLE_ALIGNMENT) Shared {
  unsigned char q[Q_SLOTS][QUERIES * HEADS * HEAD_DIM];
  KvStages<PAGED> kv;
  float weights[Q_SLOTS][QUERIES * HEADS];
  Item items[Q_SLOTS];
  Ring<STAGES> kv_ring;
  Ring<Q_SLOTS> query_ring;
  TileSums sums;
};
static_assert(sizeof(Shared::q) % SWIZZLE_ALIGNMENT == 0);
static_assert(sizeof(Shared) + SWIZZLE_ALIGNMENT == SHARED_BYTES, "kernels/indexer/sm90.py counts otherwise");

// The ids of each sequence's cache blocks, (sequences, pitch). Ids are clamped to existing blocks.
struct BlockTable {
  const int* ids;
  int pitch, num_blocks;
};

struct Arguments {
  Ranges ranges;
  const float* weights;
  BlockTable table;
  Output out;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "kernels/indexer/sm90.py lays it out otherwise");

// Returns to each lane the id of one cache block: that of tile `i` + lane of the segment.
__device__ __forceinline__ int fetch_id(const BlockTable& table, const Segment& segment, int i) {
  i += lane_id();
  const int* ids = table.ids + static_cast<long long>(segment.group) * table.pitch + segment.first;
  return PAGED && i < segment.count ? __ldg(ids + i) : 0;
}

// Returns the row of kv's tensor map at which tile `i` of a segment begins. id: this lane's result of fetch_id() for
// the 32 tiles that include `i`. Called by the whole warp.
__device__ __forceinline__ int tile_row(const BlockTable& table, const Segment& segment, int i, int id) {
  if constexpr (!PAGED) return (segment.first + i) * TILE_ROWS;
  return min(max(__shfl_sync(FULL_WARP, id, i % WARP), 0), table.num_blocks - 1) * TILE_ROWS;
}

__device__ __forceinline__ void produce_tiles(Shared& shared, const TensorMap& kv, const TensorMap& kv_scale,
                                              const Arguments& arguments, WorkRange work) {
  const BlockTable& table = arguments.table;
  Pipeline<STAGES> ring(shared.kv_ring);
  Segment now = work.next(arguments.ranges);
  int id = 0, next_id = fetch_id(table, now, 0);  // ids of the current 32 tiles, and of the next 32, still in flight
#pragma unroll 1
  while (now.count > 0) {
    const Segment next = work.next(arguments.ranges);
#pragma unroll 1
    for (int i = 0; i < now.count; ++i) {
      if (i % WARP == 0) {
        id = next_id;
        next_id = i + WARP < now.count ? fetch_id(table, now, i + WARP) : fetch_id(table, next, 0);
      }
      const int row = tile_row(table, now, i, id);
      if (lane_id() == 0) {
        ring.acquire();
        ring.full().expect(sizeof(CacheBlock<TILE>));
        shared.kv.load(ring.stage, kv, kv_scale, ring.full().address(), row);
      }
      __syncwarp();
      ring.advance();
    }
    now = next;
  }
}

__device__ __forceinline__ void produce_queries(Shared& shared, const TensorMap& q, const Arguments& arguments,
                                                WorkRange work) {
  const int lane = lane_id();
  Pipeline<Q_SLOTS> ring(shared.query_ring);
  Segment segment;
#pragma unroll 1
  do {
    segment = work.next(arguments.ranges);
    ring.acquire();
    const u32 slot = ring.stage;
    const int s = segment.group * QUERIES;
    if (lane == 0) shared.items[slot].segment = segment;
    if (lane < QUERIES) shared.items[slot].tokens[lane] = arguments.ranges.query(s + lane);
    // Every thread that writes or reads an item arrives itself: racecheck only tracks threads that arrive at a barrier.
    if (lane > 0 || segment.count == 0) {
      ring.full().arrive();
    } else {
      const u32 full = ring.full().address();
      const int bytes = min(QUERIES, arguments.ranges.queries - s) * HEADS * sizeof(float);
      ring.full().expect(sizeof(shared.q[slot]) + bytes);
#pragma unroll
      for (int i = 0; i < COLUMN_GROUPS; ++i) {
        tma_load(shared_address(shared.q[slot] + i * COLUMNS * HEAD_DIM), q, full, 0, s * HEADS + i * COLUMNS);
      }
      bulk_load(shared_address(shared.weights[slot]), arguments.weights + static_cast<long long>(s) * HEADS, bytes,
                full);
    }
    ring.advance();
  } while (segment.count > 0);
}

__device__ __forceinline__ int clamp(long long x, int low, int high) { return x < low ? low : x > high ? high : x; }

// Writes -inf to the columns outside the tiles of a query's group; consume() writes -inf within the tiles. The fill
// warps of the grid take pieces of rows in turns.
__device__ __forceinline__ void fill(const Arguments& arguments, int warp) {
  const Output& out = arguments.out;
  const int pieces = (out.columns - 1) / FILL_COLUMNS + 1;
  const long long all = static_cast<long long>(arguments.ranges.queries) * pieces;
#pragma unroll 1
  for (long long piece = blockIdx.x + static_cast<long long>(gridDim.x) * warp; piece < all;
       piece += static_cast<long long>(gridDim.x) * FILL_WARPS) {
    const long long s = piece / pieces;
    const int begin = static_cast<int>(piece % pieces) * FILL_COLUMNS;
    const int end = begin + min(FILL_COLUMNS, out.columns - begin);
    const Range tiles = arguments.ranges.tiles(static_cast<int>(s) / QUERIES);
    const int first = first_token(out, arguments.ranges.query(static_cast<int>(s)));
    // [low, high): the columns that the tiles cover. Before clamping they may exceed 2^31.
    const int low = clamp(static_cast<long long>(tiles.begin) * TILE - first, begin, end);
    const int high = clamp(static_cast<long long>(tiles.end) * TILE - first, low, end);
    float* row = out.scores + s * out.columns;
#pragma unroll 8
    for (int t = begin + lane_id(); t < low; t += WARP) row[t] = negative_infinity();
#pragma unroll 8
    for (int t = high + lane_id(); t < end; t += WARP) row[t] = negative_infinity();
  }
}

__device__ __forceinline__ void consume(Shared& shared, const Arguments& arguments, int warp) {
  const int row_group = warp / 4 / COLUMN_GROUPS, column_group = warp / 4 % COLUMN_GROUPS;
  const Kept kept(warp % 4, lane_id());
  Pipeline<STAGES> tiles(shared.kv_ring, row_group);
  Pipeline<Q_SLOTS> queries(shared.query_ring);
  int turn = 0;  // the row group that takes the first tile of this segment
#pragma unroll 1
  while (true) {
    queries.arrived();
    const Item& item = shared.items[queries.stage];
    const int count = item.segment.count;
    if (count == 0) return;
    Target target(arguments.out, arguments.ranges.queries, item, kept, column_group * GROUP_QUERIES);
    const Fold fold(shared.weights[queries.stage] + column_group * COLUMNS);
    const u64 heads =
        wgmma_descriptor<HEAD_DIM>(shared_address(shared.q[queries.stage] + column_group * COLUMNS * HEAD_DIM));
    const int first = (row_group + ROW_GROUPS - turn) % ROW_GROUPS;
    target.advance(first);
#pragma unroll 1
    for (int i = first; i < count; i += ROW_GROUPS) {
      tiles.arrived();
      const u64 tokens = wgmma_descriptor<HEAD_DIM>(shared_address(shared.kv.keys(tiles.stage)));
      float dot[COLUMNS / 2];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 32; ++k) wgmma(dot, tokens + 2 * k, heads + 2 * k, k > 0);
      wgmma_commit();
      float scale[KEPT];
#pragma unroll
      for (int k = 0; k < KEPT; ++k) scale[k] = shared.kv.scale(tiles.stage, kept.row + 8 * k);
      wgmma_wait();
      tiles.release();
      tiles.advance(ROW_GROUPS);
      float sum[SUMS];
      fold.apply(dot, sum);
      target.store(sum, scale);
      target.advance(ROW_GROUPS);
    }
    turn = (turn + count) % ROW_GROUPS;
    queries.empty().arrive();
    queries.advance();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mqa_logits(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap kv,
               const __grid_constant__ TensorMap kv_scale, const __grid_constant__ Arguments arguments) {
  Shared& shared = aligned_shared<Shared>();
  const int warp = same_in_warp(threadIdx.x / WARP);
  if (threadIdx.x == THREADS - 1) {
    prefetch_map(q);
    prefetch_map(kv);
    if constexpr (!PAGED) prefetch_map(kv_scale);
    shared.kv_ring.init(1, 4 * COLUMN_GROUPS);
    shared.query_ring.init(WARP, WARP * MATH_WARPS);
    mbarrier_init_fence();
  }
  sum_tiles(arguments.ranges, shared.sums);
  __syncthreads();
  if (warp >= MATH_WARPS) {
    registers_decrease<PRODUCER_REGISTERS>();
    if (warp == MATH_WARPS) {
      produce_tiles(shared, kv, kv_scale, arguments, find_work_range(arguments.ranges, shared.sums));
    } else if (warp == MATH_WARPS + 1) {
      produce_queries(shared, q, arguments, find_work_range(arguments.ranges, shared.sums));
    } else if (arguments.out.fill_masked) {
      fill(arguments, warp - MATH_WARPS - 2);
    }
  } else {
    registers_increase<MATH_REGISTERS>();
    consume(shared, arguments, warp);
  }
}
