// The schedule of kernels whose work is a list of tiles: which tiles each thread block computes.
//
// The list has groups in order, each with consecutive tiles. Each thread block takes an equal part of the list, its
// work range, and processes it segment by segment. `Groups` has count(), the number of groups, and tiles(group), a
// Range. THREADS: of a thread block.
#pragma once

#include "ptx.cuh"
#include "warp.cuh"

struct Range {
  int begin, end;

  __device__ __forceinline__ int size() const { return end - begin; }
};

// Consecutive tiles of one group: `count` tiles from tile `first` on.
struct Segment {
  int group, first, count;
};

// The rest of a thread block's work: `left` tiles of the list, from tile `skip` of `group` on.
struct WorkRange {
  int group, skip, left;

  // Removes the next segment from the range and returns it. The segment is empty if no tile is left.
  template <class Groups>
  __device__ __forceinline__ Segment next(const Groups& groups) {
    Segment segment = {group, 0, 0};
#pragma unroll 1
    while (left > 0 && segment.count == 0) {
      const Range tiles = groups.tiles(group);
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

// Fills `sums`. Called by all threads of the block, which must synchronize before they call find_work_range.
template <class Groups>
__device__ __forceinline__ void sum_tiles(const Groups& groups, TileSums& sums) {
  const int count = groups.count(), each = ceil_div(count, THREADS);
  const int first = min(static_cast<int>(threadIdx.x) * each, count), last = min(first + each, count);
  int sum = 0;
#pragma unroll 1
  for (int group = first; group < last; ++group) sum += groups.tiles(group).size();
  sum = warp_inclusive_sum(sum);
  sums.threads[threadIdx.x] = sum;
  if (lane_id() == WARP - 1) sums.warps[threadIdx.x / WARP] = sum;
}

// Returns the number of all tiles. Called by whole warps.
__device__ __forceinline__ int all_tiles(const TileSums& sums) {
  return warp_reduce(lane_id() < THREADS / WARP ? sums.warps[lane_id()] : 0, [](int a, int b) { return a + b; });
}

// Returns the work range of this thread block. Called by whole warps.
template <class Groups>
__device__ __forceinline__ WorkRange find_work_range(const Groups& groups, const TileSums& sums) {
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
  return {(warp * WARP + thread) * ceil_div(groups.count(), THREADS), skip, count};
}
