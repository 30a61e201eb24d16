// Index scores of DeepSeek sparse attention (arXiv:2512.02556, section 2.1), a prefill and a paged variant:
//   out[s, t] = kv_scale[t] * sum_h weights[s, h] * relu(q[s, h] . kv[t])     for start(s) <= t < end(s)
//   q (S, H, D) e4m3, kv tokens of D e4m3 and a float32 scale, weights (S, H) float32, out (S, columns) float32
//
// QUERIES neighbouring queries are a group: they share the kv tokens that they score, in tiles of 64. All tiles of all
// groups, in order, are shared out evenly. A block finds its own part. One warp streams its kv tiles through a ring, one
// brings q and weights of their groups, two fill in -inf elsewhere. Rows of wgmma are kv tokens, its columns the heads of a warpgroup's queries; all of D is one
// product, and the accumulators are folded in registers. Paged: a group is a sequence with its next_n queries, a tile
// is a block of the cache.
//
// Compile-time constants come from kernels/mqa_source.py: HEADS, HEAD_DIM, QUERIES, PAGED, COLUMN_GROUPS x ROW_GROUPS
// math warpgroups (queries are split over the former, tiles taken in turns by the latter), STAGES, registers.
#include "ptx.cuh"
#include "ring.cuh"

constexpr int TILE = 64;  // kv tokens
constexpr int WARPGROUPS = COLUMN_GROUPS * ROW_GROUPS;
constexpr int MATH_WARPS = 4 * WARPGROUPS;
constexpr int THREADS = WARPGROUP * (WARPGROUPS + 1);
constexpr int GROUP_QUERIES = QUERIES / COLUMN_GROUPS;  // of a warpgroup
constexpr int COLUMNS = GROUP_QUERIES * HEADS;          // of wgmma
constexpr int FILL_WARPS = 2;
constexpr int FILL_COLUMNS = 4096;  // of a row, at a time

// Shared memory. Tiles come first: a swizzle wants them aligned.
constexpr int Q_SLOTS = 2;
constexpr int Q_BYTES = QUERIES * HEADS * HEAD_DIM;
constexpr int SCALE_BYTES = TILE * 4;
constexpr int KEY_BYTES = TILE * HEAD_DIM;
constexpr int KV_BYTES = KEY_BYTES + (PAGED ? SCALE_BYTES : 0);  // scales follow the keys in a block of the cache
constexpr int KV_PITCH = round_up(KV_BYTES, 1024);
constexpr int SCALE_PITCH = PAGED ? 0 : SCALE_BYTES;  // of a ring of their own
constexpr int WEIGHT_BYTES = QUERIES * HEADS * 4;
constexpr int KV_OFFSET = Q_SLOTS * Q_BYTES;
constexpr int SCALE_OFFSET = KV_OFFSET + STAGES * KV_PITCH;
constexpr int WEIGHT_OFFSET = SCALE_OFFSET + STAGES * SCALE_PITCH;
constexpr int ITEM_OFFSET = WEIGHT_OFFSET + Q_SLOTS * WEIGHT_BYTES;
constexpr int ITEM_BYTES = (4 + 2 * QUERIES) * 4;
constexpr int FULL_OFFSET = ITEM_OFFSET + Q_SLOTS * ITEM_BYTES;
constexpr int EMPTY_OFFSET = FULL_OFFSET + STAGES * 8;
constexpr int Q_FULL_OFFSET = EMPTY_OFFSET + STAGES * 8;
constexpr int Q_EMPTY_OFFSET = Q_FULL_OFFSET + Q_SLOTS * 8;
constexpr int SUMS_OFFSET = Q_EMPTY_OFFSET + Q_SLOTS * 8;
constexpr int SHARED_BYTES = SUMS_OFFSET + (THREADS + THREADS / WARP) * 4;

static_assert(SHARED_BYTES + 1024 <= SHARED_LIMIT, "mqa_source.py and this file disagree about shared memory");
static_assert(QUERIES % COLUMN_GROUPS == 0 && GROUP_QUERIES <= 4 && COLUMNS % 8 == 0 && COLUMNS <= 256);
static_assert(STAGES % ROW_GROUPS == 0, "a warpgroup steps over the stages of the others");

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xFF800000); }

// The sum of x over the lanes of a warp up to this one.
__device__ __forceinline__ int sum_up_to_lane(int x) {
#pragma unroll
  for (int distance = 1; distance < WARP; distance *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFF, x, distance);
    if (lane_id() >= distance) x += other;
  }
  return x;
}

// What queries score. Prefill: kv tokens starts[s] to ends[s]. Paged: the first tokens of their sequence; lengths has a
// value per sequence, of the last query, or one per query. All of it is clamped to what there is.
struct Ranges {
  const int* starts;  // paged: not used
  const int* ends;    // paged: lengths
  int queries;
  int limit;  // kv tokens
  int per_query;
};

struct Range {
  int begin, end;

  __device__ __forceinline__ bool empty() const { return begin >= end; }
};

__device__ __forceinline__ Range query_range(const Ranges& ranges, int s) {
  if (s >= ranges.queries) return {0, 0};
  if constexpr (PAGED) {
    const int length = ranges.per_query ? max(ranges.ends[s], 0)
                                        : max(ranges.ends[s / QUERIES], 0) - (QUERIES - 1 - s % QUERIES);
    return {0, min(length, ranges.limit)};
  } else {
    return {max(ranges.starts[s], 0), min(ranges.ends[s], ranges.limit)};
  }
}

// The tiles that some query of a group needs.
__device__ __forceinline__ Range group_tiles(const Ranges& ranges, int group) {
  Range tokens = {0x7FFFFFFF, 0};
#pragma unroll 4
  for (int i = 0; i < QUERIES; ++i) {
    const Range range = query_range(ranges, group * QUERIES + i);
    if (!range.empty()) tokens = {min(tokens.begin, range.begin), max(tokens.end, range.end)};
  }
  if (tokens.empty()) return {0, 0};
  return {tokens.begin / TILE, (tokens.end - 1) / TILE + 1};
}

// Neighbouring tiles of one group.
struct Stretch {
  int group, first, count;
};

// A block's part of all tiles: it begins with `first`, and has `left` more behind it.
struct Share {
  Stretch first;
  int left;
};

// Sums that the shares are found by, of the tiles of a thread's groups: up to each thread of its warp, and of each warp.
// Called by all threads of the block, which meet before they call find_share.
__device__ __forceinline__ void sum_tiles(const Ranges& ranges, char* memory) {
  int* thread_sums = reinterpret_cast<int*>(memory + SUMS_OFFSET);
  const int groups = ceil_div(ranges.queries, QUERIES), each = ceil_div(groups, THREADS);
  const int first = min(static_cast<int>(threadIdx.x) * each, groups), last = min(first + each, groups);
  int sum = 0;
#pragma unroll 1
  for (int group = first; group < last; ++group) {
    const Range tiles = group_tiles(ranges, group);
    sum += tiles.end - tiles.begin;
  }
  sum = sum_up_to_lane(sum);
  thread_sums[threadIdx.x] = sum;
  if (lane_id() == WARP - 1) thread_sums[THREADS + threadIdx.x / WARP] = sum;
}

// The share of this block. Called by whole warps.
__device__ __forceinline__ Share find_share(const Ranges& ranges, const char* memory) {
  constexpr u32 ALL = 0xFFFFFFFF;
  const int* thread_sums = reinterpret_cast<const int*>(memory + SUMS_OFFSET);
  const int lane = lane_id();
  const int warp_sum = sum_up_to_lane(lane < THREADS / WARP ? thread_sums[THREADS + lane] : 0);
  const u32 total = __shfl_sync(ALL, warp_sum, WARP - 1);
  const u32 least = total / gridDim.x, rest = total % gridDim.x;
  const int begin = least * blockIdx.x + min(blockIdx.x, rest), count = least + (blockIdx.x < rest);
  if (count == 0) return {{0, 0, 0}, 0};
  // The warp and the thread whose groups have the first tile, and how many tiles of theirs are before it.
  const int warp = __popc(__ballot_sync(ALL, warp_sum <= begin));
  int skip = begin - (warp ? __shfl_sync(ALL, warp_sum, warp - 1) : 0);
  const int sum = thread_sums[warp * WARP + lane];
  const int thread = __popc(__ballot_sync(ALL, sum <= skip));
  skip -= thread ? __shfl_sync(ALL, sum, thread - 1) : 0;
  int group = (warp * WARP + thread) * ceil_div(ceil_div(ranges.queries, QUERIES), THREADS);
#pragma unroll 1
  while (true) {
    const Range tiles = group_tiles(ranges, group);
    const int size = tiles.end - tiles.begin;
    if (skip < size) {
      const int here = min(count, size - skip);
      return {{group, tiles.begin + skip, here}, count - here};
    }
    skip -= size;
    ++group;
  }
}

// Calls use(stretch, next) for each stretch of a share; the last has an empty one behind it.
template <typename Use>
__device__ __forceinline__ void walk(const Ranges& ranges, Share share, const Use& use) {
  Stretch now = share.first;
  int left = share.left;
#pragma unroll 1
  while (now.count > 0) {
    Stretch next = {now.group, 0, 0};
#pragma unroll 1
    while (left > 0 && next.count == 0) {
      const Range tiles = group_tiles(ranges, ++next.group);
      next.first = tiles.begin;
      next.count = min(left, tiles.end - tiles.begin);
    }
    left -= next.count;
    use(now, next);
    now = next;
  }
}

// A stretch with what its queries score, as the math warps are told of it; an empty one ends their work.
struct Item {
  Stretch stretch;
  int unused;
  Range ranges[QUERIES];
};
static_assert(sizeof(Item) == ITEM_BYTES);

// Loads q and weights of each stretch.
__device__ __forceinline__ void load_queries(char* memory, u32 shared, const TensorMap& q, const float* weights,
                                             const Ranges& ranges, Share share) {
  const int lane = lane_id();
  u32 slot = 0, phase = 0;
  const auto hand_over = [&](const Stretch& stretch) {
    mbarrier_wait(shared + Q_EMPTY_OFFSET + slot * 8, phase ^ 1);
    Item& item = reinterpret_cast<Item*>(memory + ITEM_OFFSET)[slot];
    const int s = stretch.group * QUERIES;
    if (lane == 0) item.stretch = stretch;
    if (lane < QUERIES) item.ranges[lane] = query_range(ranges, s + lane);
    const u32 full = shared + Q_FULL_OFFSET + slot * 8;
    if (lane > 0) {
      mbarrier_arrive(full);
    } else {
      const int bytes = min(QUERIES, ranges.queries - s) * HEADS * 4;
      mbarrier_arrive_expect_tx(full, stretch.count ? Q_BYTES + bytes : 0);
      if (stretch.count) {
#pragma unroll
        for (int i = 0; i < COLUMN_GROUPS; ++i) {
          tma_load(shared + slot * Q_BYTES + i * COLUMNS * HEAD_DIM, q, full, 0, s * HEADS + i * COLUMNS);
        }
        bulk_load(shared + WEIGHT_OFFSET + slot * WEIGHT_BYTES, weights + static_cast<long long>(s) * HEADS, bytes, full);
      }
    }
    if (++slot == Q_SLOTS) slot = 0, phase ^= 1;
  };
  walk(ranges, share, [&](const Stretch& now, const Stretch&) { hand_over(now); });
  hand_over({0, 0, 0});
}

// The blocks of a sequence's tiles, looked up a warp at a time, ahead of their use.
struct BlockTable {
  const int* blocks;  // (sequences, pitch)
  int pitch, num_blocks;
  int ids;

  // Of the stretch's tiles from `i` on.
  __device__ __forceinline__ void fetch(const Stretch& stretch, int i) {
    if constexpr (PAGED) {
      i += lane_id();
      ids = i < stretch.count ? blocks[static_cast<long long>(stretch.group) * pitch + stretch.first + i] : 0;
    }
  }
  // Where a tile lies, in rows of the map of kv: tile `i` of the stretch. Called by the whole warp.
  __device__ __forceinline__ int row(const Stretch& stretch, int i) const {
    if constexpr (PAGED) {
      return min(max(__shfl_sync(0xFFFFFFFF, ids, i % WARP), 0), num_blocks - 1) * (KV_BYTES / HEAD_DIM);
    } else {
      return (stretch.first + i) * TILE;
    }
  }
};

// Streams the tiles.
__device__ __forceinline__ void load_tiles(u32 shared, const TensorMap& kv, const TensorMap& kv_scale,
                                           const Ranges& ranges, BlockTable next_blocks, Share share) {
  const int lane = lane_id();
  Ring ring;
  next_blocks.fetch(share.first, 0);
  walk(ranges, share, [&](const Stretch& now, const Stretch& next) {
    BlockTable table = next_blocks;
#pragma unroll 1
    for (int i = 0; i < now.count; ++i) {
      if (i % WARP == 0) {
        table = next_blocks;
        if (i + WARP < now.count) {
          next_blocks.fetch(now, i + WARP);
        } else {
          next_blocks.fetch(next, 0);
        }
      }
      const int row = table.row(now, i);
      if (lane == 0) {
        const u32 full = shared + FULL_OFFSET + ring.stage * 8;
        mbarrier_wait(shared + EMPTY_OFFSET + ring.stage * 8, ring.phase ^ 1);
        mbarrier_arrive_expect_tx(full, KEY_BYTES + SCALE_BYTES);
        if constexpr (PAGED) {
          tma_load_once(shared + KV_OFFSET + ring.stage * KV_PITCH, kv, full, 0, row);
        } else {
          tma_load(shared + KV_OFFSET + ring.stage * KV_PITCH, kv, full, 0, row);
          tma_load(shared + SCALE_OFFSET + ring.stage * SCALE_PITCH, kv_scale, full, row, 0);
        }
      }
      __syncwarp();
      ring.advance();
    }
  });
}

__device__ __forceinline__ int clamp(long long x, int low, int high) { return x < low ? low : x > high ? high : x; }

// -inf into what lies outside the tiles of a group: pieces of rows, in turns.
__device__ __forceinline__ void fill(float* out, int columns, const Ranges& ranges, int warp) {
  const int pieces = (columns - 1) / FILL_COLUMNS + 1;
  const long long all = static_cast<long long>(ranges.queries) * pieces;
#pragma unroll 1
  for (long long piece = blockIdx.x + static_cast<long long>(gridDim.x) * warp; piece < all;
       piece += static_cast<long long>(gridDim.x) * FILL_WARPS) {
    const long long s = piece / pieces;
    const int begin = static_cast<int>(piece % pieces) * FILL_COLUMNS, end = begin + min(FILL_COLUMNS, columns - begin);
    const Range tiles = group_tiles(ranges, static_cast<int>(s) / QUERIES);
    // What the tiles cover of it; their ends may lie past 2^31.
    const int low = clamp(static_cast<long long>(tiles.begin) * TILE, begin, end);
    const int high = clamp(static_cast<long long>(tiles.end) * TILE, low, end);
    float* row = out + s * columns;
#pragma unroll 8
    for (int t = begin + lane_id(); t < low; t += WARP) row[t] = negative_infinity();
#pragma unroll 8
    for (int t = high + lane_id(); t < end; t += WARP) row[t] = negative_infinity();
  }
}

// Sums of 2 * GROUP_QUERIES values over four neighbouring lanes, each lane's part of them: a query in two rows, 8 apart,
// or a row of a query.
constexpr int SUMS = GROUP_QUERIES == 3 ? 8 : 2 * GROUP_QUERIES;
constexpr int OWN = SUMS > 4 ? SUMS / 4 : 1;  // of a lane

// Halves the values: lanes whose bit `Bit` is set keep the upper half. With masks, as a choice would become a branch.
template <int Count, int Bit>
__device__ __forceinline__ void exchange(float (&sum)[SUMS], int lane) {
  const u32 upper = -(lane / Bit & 1);
#pragma unroll
  for (int i = 0; i < Count / 2; ++i) {
    const u32 a = __float_as_uint(sum[i]), b = __float_as_uint(sum[i + Count / 2]), give = (a & upper) | (b & ~upper);
    sum[i] = __uint_as_float(a ^ b ^ give) + __uint_as_float(__shfl_xor_sync(0xFFFFFFFF, give, Bit));
  }
}

__device__ __forceinline__ void reduce(float (&sum)[SUMS], int lane) {
  exchange<SUMS, 2>(sum, lane);
  if constexpr (SUMS == 2) {
    sum[0] += __shfl_xor_sync(0xFFFFFFFF, sum[0], 1);
  } else {
    exchange<SUMS / 2, 1>(sum, lane);
  }
}

// Bytes from the start of a tile, or of its stage of scales, to the scale of token `i`. A block's scales come with the
// swizzle of its keys, which are rows of HEAD_DIM bytes.
__device__ __forceinline__ int scale_offset(int i) {
  if constexpr (!PAGED) return i * 4;
  const int offset = KEY_BYTES + i * 4;
  return offset ^ (offset / 128 % (HEAD_DIM / 16)) * 16;
}

__device__ __forceinline__ void multiply(char* memory, u32 shared, float* out, int columns, int queries,
                                         bool fill_masked, int warp) {
  const int lane = lane_id();
  const int row_group = warp / 4 / COLUMN_GROUPS, column_group = warp / 4 % COLUMN_GROUPS;
  // Of this lane's sums: the query, within the warpgroup's, and the row of the tile.
  const int own_query = GROUP_QUERIES == 1 ? 0 : GROUP_QUERIES == 2 ? lane / 2 % 2 : lane % 4 / 2 * 2 + lane % 2;
  const int own_row = warp % 4 * 16 + lane / 4 + (GROUP_QUERIES == 1 ? lane / 2 % 2 * 8 : GROUP_QUERIES == 2 ? lane % 2 * 8 : 0);
  const bool owner = GROUP_QUERIES == 1 ? lane % 2 == 0 : own_query < GROUP_QUERIES;
  int own_scale[OWN];
#pragma unroll
  for (int k = 0; k < OWN; ++k) own_scale[k] = scale_offset(own_row + 8 * k);
  u32 stage = row_group, phase = 0, slot = 0, slot_phase = 0;
  int turn = 0;  // the row group whose turn the item's first tile is
#pragma unroll 1
  while (true) {
    mbarrier_wait(shared + Q_FULL_OFFSET + slot * 8, slot_phase);
    const Item& item = reinterpret_cast<const Item*>(memory + ITEM_OFFSET)[slot];
    const int count = item.stretch.count;
    if (count == 0) return;
    const int query = column_group * GROUP_QUERIES + own_query;  // of the group
    const Range range = owner ? item.ranges[query] : Range{0, 0};
    const long long s = static_cast<long long>(item.stretch.group) * QUERIES + query;
    const u32 fill_end = fill_masked && owner && s < queries ? columns : 0;  // of what it also writes
    int t = item.stretch.first * TILE + own_row;
    float* target = out + s * columns + t;
    float w[COLUMNS / 4];  // half the weights of columns 8j + 2 * (lane % 4) and the next: see below
    const float2* weights = reinterpret_cast<const float2*>(memory + WEIGHT_OFFSET + slot * WEIGHT_BYTES);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      const float2 pair = weights[column_group * COLUMNS / 2 + 4 * j + lane % 4];
      w[2 * j] = 0.5f * pair.x;
      w[2 * j + 1] = 0.5f * pair.y;
    }
    const u64 heads = wgmma_descriptor<HEAD_DIM>(shared + slot * Q_BYTES + column_group * COLUMNS * HEAD_DIM);
    const int first = (row_group + ROW_GROUPS - turn) % ROW_GROUPS;
    t += first * TILE;
    target += first * TILE;
#pragma unroll 1
    for (int i = first; i < count; i += ROW_GROUPS) {
      mbarrier_wait(shared + FULL_OFFSET + stage * 8, phase);
      const u64 tokens = wgmma_descriptor<HEAD_DIM>(shared + KV_OFFSET + stage * KV_PITCH);
      float dot[COLUMNS / 2];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 32; ++k) wgmma(dot, tokens + 2 * k, heads + 2 * k, k > 0);
      wgmma_commit();
      const char* scales = memory + (PAGED ? KV_OFFSET + stage * KV_PITCH : SCALE_OFFSET + stage * SCALE_PITCH);
      float scale[OWN];
#pragma unroll
      for (int k = 0; k < OWN; ++k) scale[k] = *reinterpret_cast<const float*>(scales + own_scale[k]);
      wgmma_wait();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared + EMPTY_OFFSET + stage * 8);
      stage += ROW_GROUPS;
      if (stage >= STAGES) stage -= STAGES, phase ^= 1;
      float sum[SUMS] = {};
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {  // one flat loop: nested ones put the accumulators into local memory
        float* s = sum + 8 * j / HEADS * 2;
        // x + |x| is twice relu(x), keeps NaN, and leaves the slower pipe of max alone
        s[0] = fmaf(dot[4 * j] + fabsf(dot[4 * j]), w[2 * j], s[0]);
        s[0] = fmaf(dot[4 * j + 1] + fabsf(dot[4 * j + 1]), w[2 * j + 1], s[0]);
        s[1] = fmaf(dot[4 * j + 2] + fabsf(dot[4 * j + 2]), w[2 * j], s[1]);
        s[1] = fmaf(dot[4 * j + 3] + fabsf(dot[4 * j + 3]), w[2 * j + 1], s[1]);
      }
      reduce(sum, lane);
#pragma unroll
      for (int k = 0; k < OWN; ++k) {
        const int token = t + 8 * k;
        const bool inside = token >= range.begin && token < range.end;
        const float value = inside ? sum[k] * scale[k] : negative_infinity();
        if (inside || static_cast<u32>(token) < fill_end) target[8 * k] = value;
      }
      t += ROW_GROUPS * TILE;
      target += ROW_GROUPS * TILE;
    }
    turn = (turn + count) % ROW_GROUPS;
    mbarrier_arrive(shared + Q_EMPTY_OFFSET + slot * 8);
    if (++slot == Q_SLOTS) slot = 0, slot_phase ^= 1;
  }
}

// blocks: the block table of paged kv, (sequences, table_pitch). columns: of out.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mqa_logits(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap kv,
               const __grid_constant__ TensorMap kv_scale, const float* __restrict__ weights, Ranges ranges,
               const int* __restrict__ blocks, int table_pitch, int num_blocks, float* __restrict__ out,
               int columns, int fill_masked) {
  extern __shared__ char unaligned[];
  char* memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  const u32 shared = shared_address(memory);
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP, 0);
  if (threadIdx.x == THREADS - 1) {
    prefetch_map(q);
    prefetch_map(kv);
    if constexpr (!PAGED) prefetch_map(kv_scale);
#pragma unroll 1
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(shared + FULL_OFFSET + s * 8, 1);
      mbarrier_init(shared + EMPTY_OFFSET + s * 8, 4 * COLUMN_GROUPS);
    }
    for (int s = 0; s < Q_SLOTS; ++s) {
      mbarrier_init(shared + Q_FULL_OFFSET + s * 8, WARP);  // whoever writes or reads an item arrives by itself
      mbarrier_init(shared + Q_EMPTY_OFFSET + s * 8, WARP * MATH_WARPS);
    }
    mbarrier_init_fence();
  }
  sum_tiles(ranges, memory);
  __syncthreads();
  if (warp >= MATH_WARPS) {
    registers_decrease<PRODUCER_REGISTERS>();
    if (warp == MATH_WARPS) {
      load_tiles(shared, kv, kv_scale, ranges, {blocks, table_pitch, num_blocks, 0}, find_share(ranges, memory));
    } else if (warp == MATH_WARPS + 1) {
      load_queries(memory, shared, q, weights, ranges, find_share(ranges, memory));
    } else if (fill_masked) {
      fill(out, columns, ranges, warp - MATH_WARPS - 2);
    }
  } else {
    registers_increase<MATH_REGISTERS>();
    multiply(memory, shared, out, columns, ranges.queries, fill_masked, warp);
  }
}
