// The schedule of kernels whose work is a list of tiles: which tiles each thread block computes.
//
// The list has groups in order, each with consecutive tiles. Each thread block takes an equal part of the list, its
// work range of at least FEWEST_TILES, and processes it segment by segment. Where that would take hardly less time than
// whole groups, which leave nothing to merge, each takes a group. `Groups` has count(), the number of groups;
// tiles(group), a Range; and turn(group), with which of a whole group's tiles its block begins. THREADS: of a thread
// block.
#pragma once

#include "ptx.cuh"
#include "warp.cuh"

struct Range {
  int begin, end;

  __device__ __forceinline__ int size() const { return end - begin; }
};

// Consecutive tiles of one group: `count` tiles from tile `first` on, of which the first to compute is the turn-th.
struct Segment {
  int group, first, count, turn;

  // The tile to compute after `tile`; the first is first + turn.
  __device__ __forceinline__ int after(int tile) const { return tile + 1 < first + count ? tile + 1 : first; }
};

// The rest of a thread block's work: `left` tiles of the list, from tile `skip` of `group` on.
struct WorkRange {
  int group, skip, left, turn;

  // Removes the next segment from the range and returns it. The segment is empty if no tile is left.
  template <class Groups>
  __device__ __forceinline__ Segment next(const Groups& groups) {
    Segment segment = {group, 0, 0, turn};
#pragma unroll 1
    while (left > 0 && segment.count == 0) {
      const Range tiles = groups.tiles(group);
      segment = {group, tiles.begin + skip, min(left, max(tiles.size() - skip, 0)), turn};
      skip = max(skip - tiles.size(), 0);
      ++group;
    }
    left -= segment.count;
    return segment;
  }
};

// Numbers of tiles. Each thread counts the tiles of consecutive groups. threads[t]: the inclusive sum over the threads
// of t's warp up to t. warps[w]: the total of warp w. most[w]: of its groups, the most tiles of one.
struct TileSums {
  int threads[THREADS], warps[THREADS / WARP], most[THREADS / WARP];
};

// Fills `sums`. Called by all threads of the block, which must synchronize before they call find_work_range.
template <class Groups>
__device__ __forceinline__ void sum_tiles(const Groups& groups, TileSums& sums) {
  const int count = groups.count(), each = ceil_div(count, THREADS);
  const int first = min(static_cast<int>(threadIdx.x) * each, count), last = min(first + each, count);
  int sum = 0, most = 0;
#pragma unroll 1
  for (int group = first; group < last; ++group) {
    const int size = groups.tiles(group).size();
    sum += size, most = max(most, size);
  }
  sum = warp_inclusive_sum(sum);
  most = warp_reduce(most, [](int a, int b) { return max(a, b); });
  sums.threads[threadIdx.x] = sum;
  if (lane_id() == WARP - 1) sums.warps[threadIdx.x / WARP] = sum, sums.most[threadIdx.x / WARP] = most;
}

// Returns the number of all tiles. Called by whole warps.
__device__ __forceinline__ int all_tiles(const TileSums& sums) {
  return warp_reduce(lane_id() < THREADS / WARP ? sums.warps[lane_id()] : 0, [](int a, int b) { return a + b; });
}

// Returns the work range of this thread block. WHOLE: whether it may be a whole group. Called by whole warps.
template <bool WHOLE, class Groups>
__device__ __forceinline__ WorkRange find_work_range(const Groups& groups, const TileSums& sums) {
  const int lane = lane_id();
  const int warp_sum = warp_inclusive_sum(lane < THREADS / WARP ? sums.warps[lane] : 0);
  const u32 total = __shfl_sync(FULL_WARP, warp_sum, WARP - 1);
  if constexpr (WHOLE) {
    const int most = warp_reduce(lane < THREADS / WARP ? sums.most[lane] : 0, [](int a, int b) { return max(a, b); });
    if (groups.count() <= gridDim.x && static_cast<u64>(most) * gridDim.x * 16 <= total * u64{17}) {
      const int group = blockIdx.x;
      if (group >= groups.count()) return {0, 0, 0, 0};
      return {group, 0, groups.tiles(group).size(), groups.turn(group)};
    }
  }
  const u32 blocks = min(gridDim.x, ceil_div(total, FEWEST_TILES));
  if (blockIdx.x >= blocks) return {0, 0, 0, 0};
  const u32 least = total / blocks, rest = total % blocks;
  const int begin = least * blockIdx.x + min(blockIdx.x, rest), count = least + (blockIdx.x < rest);
  if (count == 0) return {0, 0, 0, 0};
  // Find the warp, then the thread, that counted this block's first tile. `skip` becomes the number of tiles that the
  // thread counted before it.
  const int warp = __popc(__ballot_sync(FULL_WARP, warp_sum <= begin));
  int skip = begin - (warp ? __shfl_sync(FULL_WARP, warp_sum, warp - 1) : 0);
  const int sum = sums.threads[warp * WARP + lane];
  const int thread = __popc(__ballot_sync(FULL_WARP, sum <= skip));
  skip -= thread ? __shfl_sync(FULL_WARP, sum, thread - 1) : 0;
  return {(warp * WARP + thread) * ceil_div(groups.count(), THREADS), skip, count, 0};
}
