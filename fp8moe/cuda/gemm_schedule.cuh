// Which tile a block computes next.
#pragma once

#include "gemm_layout.cuh"

struct Tile {
  int m, n;   // first token and first output feature
  int end;    // tokens from here on are not the group's
  int group;  // whose weights
};

// The same value, known to the compiler to be so in all lanes: what depends on it may stay in uniform registers.
__device__ __forceinline__ int same_in_warp(int x) { return __shfl_sync(0xFFFFFFFF, x, 0); }
__device__ __forceinline__ Tile same_in_warp(Tile tile) {
  if (GROUPS == 0) return tile;
  return {same_in_warp(tile.m), same_in_warp(tile.n), same_in_warp(tile.end), same_in_warp(tile.group)};
}

// One matrix, and all m rows belong to it.
struct DenseSchedule {
  int m, raster, tiles;

  __device__ DenseSchedule(int m, int, int raster) : m(m), raster(raster), tiles(ceil_div(m, BLOCK_M) * TILE_COLUMNS) {}

  __device__ void prepare(char*, const int*) {}
  __device__ void ready(const char*) {}

  __device__ Tile tile(const char*, int index) const {
    const Place place(index, ceil_div(m, BLOCK_M), raster);
    return {place.row * BLOCK_M, place.column * BLOCK_N, m, 0};
  }
};

// One matrix for each group of rows. The sizes are known on the device only: one warp turns them into a table in shared
// memory: tile rows before each group, and where its rows begin and end. Whatever `groups` holds, rows stay within m.
struct GroupedSchedule {
  static constexpr int EACH = ceil_div(GROUPS ? GROUPS : 1, WARP);

  int m, max_m, raster, tiles;

  __device__ GroupedSchedule(int m, int max_m, int raster) : m(m), max_m(max_m), raster(raster), tiles(0) {}

  // Fills the table; by one warp. groups: offsets (GROUPS + 1) of the groups' rows, or with max_m, where group e has
  // the rows from e * max_m on, how many (GROUPS) of them are in use.
  __device__ void prepare(char* memory, const int* groups) {
    int* before = table(memory);
    int first[EACH], last[EACH], rows = 0;
    const int lane = lane_id();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int group = min(lane * EACH + i, GROUPS - 1);
      if (max_m > 0) {
        first[i] = group * max_m;
        last[i] = first[i] + min(max(groups[group], 0), max_m);
      } else {
        first[i] = min(max(groups[group], 0), m);
        last[i] = min(max(groups[group + 1], first[i]), m);
      }
      if (lane * EACH + i < GROUPS) rows += ceil_div(last[i] - first[i], BLOCK_M);
    }
    int sum = rows;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFF, sum, step);
      if (lane >= step) sum += other;
    }
    int total = sum - rows;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int group = lane * EACH + i;
      if (group < GROUPS) {
        before[group] = total;
        before[GROUPS + 1 + group] = first[i];
        before[2 * GROUPS + 1 + group] = last[i];
        total += ceil_div(last[i] - first[i], BLOCK_M);
      }
    }
    if (lane == WARP - 1) before[GROUPS] = sum;
    __syncwarp();
  }

  // To call once the table is filled. Groups that overlap may make more tiles than there are blocks for, where each has
  // only one.
  __device__ void ready(const char* memory) {
    tiles = table(memory)[GROUPS] * TILE_COLUMNS;
    if (SPLIT_K > 1) tiles = min(tiles, static_cast<int>(gridDim.x) / SPLIT_K);
  }

  __device__ Tile tile(const char* memory, int index) const {
    const int* before = table(memory);
    int group = 0, beyond = GROUPS;
#pragma unroll 1
    while (beyond - group > 1) {
      const int middle = (group + beyond) / 2;
      if (before[middle] * TILE_COLUMNS <= index) {
        group = middle;
      } else {
        beyond = middle;
      }
    }
    const int rows = before[group + 1] - before[group];
    const Place place(index - before[group] * TILE_COLUMNS, rows, raster);
    return {before[GROUPS + 1 + group] + place.row * BLOCK_M, place.column * BLOCK_N, before[2 * GROUPS + 1 + group],
            group};
  }

  static __device__ int* table(char* memory) { return reinterpret_cast<int*>(memory + TABLE_OFFSET); }
  static __device__ const int* table(const char* memory) { return reinterpret_cast<const int*>(memory + TABLE_OFFSET); }
};

template <bool Grouped>
struct ChooseSchedule {
  using Type = DenseSchedule;
};
template <>
struct ChooseSchedule<true> {
  using Type = GroupedSchedule;
};
using Schedule = ChooseSchedule<(GROUPS > 0)>::Type;
