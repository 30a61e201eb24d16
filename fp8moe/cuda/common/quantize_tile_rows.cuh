// Quantizes a tile along its rows only, bit for bit like quantize_tile.cuh. Half a warp shares a row, so no shared
// memory is needed.
#pragma once

#include "quantize_tile.cuh"

static_assert(VECTOR && VECTORS == 1);

// Quantizes the rows of a tile and stores them. `first_column`: the tile's first column in the matrix. Calls
// meanwhile() when the largest magnitudes have been found.
template <typename Meanwhile>
__device__ void quantize_rows(const Results& results, const RowTile& tile, const ThreadPosition& p, i64 first_column,
                              const Values& values, const Meanwhile& meanwhile) {
  u32 amax[SIDE];
#pragma unroll
  for (int r = 0; r < SIDE; ++r) {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < SIDE / PER_WORD; ++i) word = Input::larger(word, Input::magnitude(values[r][0].words[i]));
    amax[r] = Input::largest(word);
  }
  const BlockScale<> scale(Input::value(largest_of_rows(amax, p.lane)));
  meanwhile();
  const int scaled_row = p.row + p.column_group / 2;
  if (p.lane % 2 == 0 && scaled_row < tile.count) {
    results.row_scale[first_column / BLOCK * results.row_scale_pitch + tile.first + scaled_row] = scale.value;
  }
  u8* target = results.rows + i64{tile.first + p.row} * results.width + first_column + p.column(0);
#pragma unroll
  for (int r = 0; r < SIDE; ++r, target += results.width) {
    const Divisor<> divisor = {__shfl_sync(FULL_WARP, scale.divisor.value, 2 * r, ROW_LANES),
                               __shfl_sync(FULL_WARP, scale.divisor.reciprocal, 2 * r, ROW_LANES)};
    const Vector& v = values[r][0];
    u32 words[2] = {};
#pragma unroll
    for (int c = 0; c < SIDE; c += 2) words[c / 4] |= divisor.quantize(v[c], v[c + 1]) << (c % 4 * 8);
    if (p.row + r < tile.count) store_row(target, words, SIDE);
  }
}
