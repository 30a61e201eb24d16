// Walking over the tiles of a GEMM.
#pragma once

#include "ptx.cuh"

constexpr int TILE_COLUMNS = ceil_div(N, BLOCK_N);

// Place of tile `index` of a matrix `rows` tiles high. Blocks walk groups of `raster` tile rows, column by column: what
// runs at one time touches few rows of a and b, so that L2 serves most loads.
struct Place {
  int row, column;

  __device__ __forceinline__ Place(int index, int rows, int raster) {
    const int first = raster >= rows ? 0 : index / (raster * TILE_COLUMNS) * raster;
    const int height = min(raster, rows - first);
    const int within = index - first * TILE_COLUMNS;
    column = height == 1 ? within : within / height;
    row = first + within - column * height;
  }
};
