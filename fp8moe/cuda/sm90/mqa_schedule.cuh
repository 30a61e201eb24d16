// The schedule of the index scores: which tiles each thread block computes.
//
// QUERIES consecutive queries form a group; in the paged variant, the queries of one sequence. A group needs all tiles
// of TILE kv tokens between the first and the last token that any of its queries scores. The tiles of all groups, in
// order, form one list. Each thread block takes an equal part of the list, its work range, and processes it segment by
// segment.
#pragma once

#include "ptx.cuh"
#include "warp.cuh"

// The kv tokens that each query scores. Prefill: from starts[s] to ends[s], at most `longest` tokens. Paged: the first
// tokens of its sequence, as many as the query's context length. All values are clamped to existing tokens.
struct Ranges {
  const int* starts;  // (queries,); unused if paged
  const int* ends;    // (queries,); paged: context lengths at the last query, (sequences,), or per query, (queries,)
  int queries;
  int limit;      // number of kv tokens
  int longest;    // unused if paged
  int per_query;  // paged: whether `ends` has a length for each query
};

struct Range {
  int begin, end;

  __device__ __forceinline__ int size() const { return end - begin; }
};

// Returns the tokens that query s scores. The range is empty (end <= begin) past the last query.
__device__ __forceinline__ Range query_tokens(const Ranges& ranges, int s) {
  if (s >= ranges.queries) return {0, 0};
  if constexpr (PAGED) {
    const int length =
        ranges.per_query ? max(ranges.ends[s], 0) : max(ranges.ends[s / QUERIES], 0) - (QUERIES - 1 - s % QUERIES);
    return {0, min(length, ranges.limit)};
  } else {
    const int begin = min(max(ranges.starts[s], 0), ranges.limit);
    const int end = max(min(ranges.ends[s], ranges.limit), begin);
    return {begin, begin + min(end - begin, ranges.longest)};
  }
}

// Returns the range of tiles that a group needs.
__device__ __forceinline__ Range group_tiles(const Ranges& ranges, int group) {
  Range tokens = {0x7FFFFFFF, 0};
#pragma unroll 4
  for (int i = 0; i < QUERIES; ++i) {
    const Range query = query_tokens(ranges, group * QUERIES + i);
    if (query.begin < query.end) tokens = {min(tokens.begin, query.begin), max(tokens.end, query.end)};
  }
  if (tokens.begin >= tokens.end) return {0, 0};
  return {tokens.begin / TILE, (tokens.end - 1) / TILE + 1};
}

// Consecutive tiles of one group: `count` tiles from tile `first` on.
struct Segment {
  int group, first, count;
};

// The rest of a thread block's work: `left` tiles of the list, from tile `skip` of `group` on.
struct WorkRange {
  int group, skip, left;

  // Removes the next segment from the range and returns it. The segment is empty if no tile is left.
  __device__ __forceinline__ Segment next(const Ranges& ranges) {
    Segment segment = {group, 0, 0};
#pragma unroll 1
    while (left > 0 && segment.count == 0) {
      const Range tiles = group_tiles(ranges, group);
      segment = {group, tiles.begin + skip, min(left, max(tiles.size() - skip, 0))};
      skip = max(skip - tiles.size(), 0);
      ++group;
    }
    left -= segment.count;
    return segment;
  }
};

// Numbers of tiles. Each thread counts the tiles of consecutive groups. threads[t]: the inclusive sum over the threads
// of t's warp up to t. warps[w]: the total of warp w.
struct TileSums {
  int threads[THREADS], warps[THREADS / WARP];
};

__device__ __forceinline__ int groups_per_thread(const Ranges& ranges) {
  return ceil_div(ceil_div(ranges.queries, QUERIES), THREADS);
}

// Fills `sums`. Called by all threads of the block, which must synchronize before they call find_work_range.
__device__ __forceinline__ void sum_tiles(const Ranges& ranges, TileSums& sums) {
  const int groups = ceil_div(ranges.queries, QUERIES), each = groups_per_thread(ranges);
  const int first = min(static_cast<int>(threadIdx.x) * each, groups), last = min(first + each, groups);
  int sum = 0;
#pragma unroll 1
  for (int group = first; group < last; ++group) sum += group_tiles(ranges, group).size();
  sum = warp_inclusive_sum(sum);
  sums.threads[threadIdx.x] = sum;
  if (lane_id() == WARP - 1) sums.warps[threadIdx.x / WARP] = sum;
}

// Returns the work range of this thread block. Called by whole warps.
__device__ __forceinline__ WorkRange find_work_range(const Ranges& ranges, const TileSums& sums) {
  const int lane = lane_id();
  const int warp_sum = warp_inclusive_sum(lane < THREADS / WARP ? sums.warps[lane] : 0);
  const u32 total = __shfl_sync(FULL_WARP, warp_sum, WARP - 1);
  const u32 least = total / gridDim.x, rest = total % gridDim.x;
  const int begin = least * blockIdx.x + min(blockIdx.x, rest), count = least + (blockIdx.x < rest);
  if (count == 0) return {0, 0, 0};
  // Find the warp, then the thread, that counted this block's first tile. `skip` becomes the number of tiles that the
  // thread counted before it.
  const int warp = __popc(__ballot_sync(FULL_WARP, warp_sum <= begin));
  int skip = begin - (warp ? __shfl_sync(FULL_WARP, warp_sum, warp - 1) : 0);
  const int sum = sums.threads[warp * WARP + lane];
  const int thread = __popc(__ballot_sync(FULL_WARP, sum <= skip));
  skip -= thread ? __shfl_sync(FULL_WARP, sum, thread - 1) : 0;
  return {(warp * WARP + thread) * groups_per_thread(ranges), skip, count};
}

// A segment and the tokens that each of its queries scores, for the math warps. An empty segment tells them to stop.
struct Item {
  Segment segment;
  Range tokens[QUERIES];
};
