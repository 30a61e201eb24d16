// Copies every token, already quantized with one scale per 128 columns, to the rows of its assignments in the sorted
// order. Each token is read once.
//
// A warp handles WARP_COLUMNS columns of a token: 16 consecutive columns per lane, 8 lanes per block of 128. Meanwhile
// it loads the rows of its next token.
//
// Compile-time constants: those of permute.cuh; SIZES_BYTES.
#include "permute.cuh"

static_assert(WARP_COLUMNS == WARP * 16);

struct Sizes {
  PermuteSizes permute;
  i64 scale_row_stride, scale_block_stride;  // strides of x_scale
};
static_assert(sizeof(Sizes) == SIZES_BYTES);

// x (tokens, HIDDEN), rows `row_stride` apart; x_scale (tokens, ceil(HIDDEN / 128)); for the others see Rows in
// permute.cuh. read_ahead must be set if top_k > 32: without it, a token is skipped if its first 32 assignments have no
// row. Any grid.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    permute_fp8(const u8* x, const float* x_scale, const int* rows, u8* data, float* scale, int* assignments,
                const __grid_constant__ Sizes sizes) {
  const Rows targets{rows, data, scale, assignments, sizes.permute};
  const Units units;

  wait_for_previous_kernel();
  allow_next_kernel();
  const u32 warps = sizes.permute.warps;
  int next_row = targets.from(0, units.first / warps);
  for (u32 unit = units.first; unit < sizes.permute.tokens * warps; unit += units.step) {
    const u32 token = unit / warps;
    const int lane_row = next_row;
    next_row = targets.from(0, (unit + units.step) / warps);
    if (!targets.wanted(lane_row)) continue;
    for (u32 part = unit % warps; part < TOKEN_WARPS; part += warps) {
      const Place place(token, part);
      const int column = place.block_column + place.block_lane * 16;
      const Bytes16 values = load_elements<true>(x + token * sizes.permute.row_stride + column, HIDDEN - column);
      float block_scale = 0.0f;
      if (place.block_column < HIDDEN) {
        block_scale = x_scale[token * sizes.scale_row_stride + place.k_block * sizes.scale_block_stride];
      }
      targets.write(values, column, block_scale, place, lane_row);
    }
  }
}
