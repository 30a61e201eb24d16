// The tiles of a thread block in a transposing quantizer: 128 rows of one group, and several times 128 columns. Group
// sizes are known only on the device.
//
// Compile-time constants: BLOCK, WARPS (of a thread block), RESULTS_BYTES.
#pragma once

#include "vector.cuh"
#include "warp.cuh"

constexpr int THREADS = WARPS * WARP;

// The outputs of a transposing quantizer, and the groups of rows.
struct Results {
  u8* rows;             // (num_rows, width), E4M3
  float* row_scale;     // (num_rows, ceil(width / 128)), columns `row_scale_pitch` apart
  u8* columns;          // (width, 128 * row_tiles), E4M3
  float* column_scale;  // (width, row_tiles), or of blocks (ceil(width / 128), row_tiles), `column_scale_pitch` apart
  int* offsets;         // (num_groups + 1), starts of the groups padded to whole tiles, or null
  const int* groups;    // (num_groups + 1), starts of the groups, or null: all rows are one group
  i64 width, row_scale_pitch, column_scale_pitch;
  u32 num_rows, num_groups;
  u32 row_tiles, column_tiles, strip;  // a thread block has `strip` column tiles
};
static_assert(sizeof(Results) == RESULTS_BYTES);

// The rows of a tile: `count` rows of one group, beginning at row `first`. `count` is 0 for a tile past the last group.
struct RowTile {
  u32 index;
  int first, count;
};

struct Group {
  int start, end;

  // Clamps the group to the rows of the matrix, whatever the offsets are.
  __device__ Group(const Results& results, u32 i) {
    const int rows = static_cast<int>(results.num_rows);
    start = min(max(results.groups[i], 0), rows);
    end = min(max(results.groups[i + 1], start), rows);
  }
  __device__ u32 tiles() const { return (static_cast<u32>(end - start) + BLOCK - 1) / BLOCK; }
};

// Finds the rows of row tile `index` and writes them to `tile`, in shared memory. Each thread handles a contiguous
// range of groups. Tile counts are clamped to row_tiles, because overlapping groups could exceed it. write_offsets, set
// in one thread block of the grid: also writes the offsets of the padded groups.
__device__ void find_rows(const Results& results, RowTile& tile, u32 index, bool write_offsets) {
  __shared__ u32 warp_tiles[WARPS];
  if (!results.groups) {
    if (threadIdx.x == 0) {
      if (write_offsets) results.offsets[0] = 0, results.offsets[1] = static_cast<int>(results.row_tiles * BLOCK);
      const int first = static_cast<int>(index * BLOCK);
      tile = {index, first, min(BLOCK, static_cast<int>(results.num_rows) - first)};
    }
    __syncthreads();
    return;
  }
  const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, limit = results.row_tiles;
  const u32 each = (results.num_groups + THREADS - 1) / THREADS;
  const u32 begin = min(threadIdx.x * each, results.num_groups), end = min(begin + each, results.num_groups);
  u32 sum = 0;
#pragma unroll 1
  for (u32 i = begin; i < end; ++i) sum = min(sum + Group(results, i).tiles(), limit);
  sum = warp_inclusive_scan(sum, [limit](u32 a, u32 b) { return min(a + b, limit); }, lane);
  u32 before = __shfl_up_sync(FULL_WARP, sum, 1);
  if (lane == 0) before = 0;
  if (lane == WARP - 1) warp_tiles[warp] = sum;
  if (threadIdx.x == 0) tile = {index, 0, 0};
  __syncthreads();
#pragma unroll
  for (u32 w = 0; w < WARPS; ++w) before = min(before + (w < warp ? warp_tiles[w] : 0), limit);
#pragma unroll 1
  for (u32 i = begin; i < end; ++i) {
    const Group group(results, i);
    if (index >= before && index - before < group.tiles()) {
      const int first = group.start + static_cast<int>((index - before) * BLOCK);
      tile = {index, first, min(BLOCK, group.end - first)};
    }
    before = min(before + group.tiles(), limit);
    if (write_offsets) results.offsets[i + 1] = static_cast<int>(before * BLOCK);
  }
  if (write_offsets && threadIdx.x == 0) results.offsets[0] = 0;
  __syncthreads();
}

// The column tiles of a thread block: from `begin` to before `end`.
struct Strip {
  u32 begin, end;
};

// Returns this thread block's column tiles, in shared memory as registers are scarce, and writes their rows to `tile`.
// Grid: (row_tiles, number of strips). Blocks take all rows of a strip before the next strip, so that rows that are
// read repeatedly stay in L2.
__device__ const Strip& find_strip(const Results& results, RowTile& tile) {
  __shared__ Strip strip;
  const u32 first = blockIdx.y * results.strip;
  if (threadIdx.x == 0) strip = {first, min(first + results.strip, results.column_tiles)};
  find_rows(results, tile, blockIdx.x, blockIdx.x == 0 && blockIdx.y == 0 && results.offsets);  // synchronizes
  return strip;
}
