// Quantizes every token once, with one scale per 128 columns, and writes it to the rows of its assignments in the
// sorted order. Values and scales are bitwise those of quantize_1x128.cu.
//
// A warp handles WARP_COLUMNS columns of a token at a time. Meanwhile it loads the rows of its next token.
//
// Compile-time constants: those of quantize_token.cuh; SIZES_BYTES.
#include "quantize_token.cuh"

static_assert(sizeof(PermuteSizes) == SIZES_BYTES);

// x (tokens, HIDDEN), rows `row_stride` apart; for the others see Rows in permute.cuh. read_ahead must be set if top_k
// > 32: without it, a token is skipped if its first 32 assignments have no row. Any grid.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    permute_quantize(const Element* x, const int* rows, u8* data, float* scale, int* assignments,
                     const __grid_constant__ PermuteSizes sizes) {
  const Rows targets{rows, data, scale, assignments, sizes};
  const Units units;

  wait_for_previous_kernel();
  allow_next_kernel();
  const u32 warps = sizes.warps;
  int next_row = targets.from(0, units.first / warps);
  for (u32 unit = units.first; unit < sizes.tokens * warps; unit += units.step) {
    const u32 token = unit / warps;
    const int lane_row = next_row;
    next_row = targets.from(0, (unit + units.step) / warps);
    if (!targets.wanted(lane_row)) continue;
    for (u32 part = unit % warps; part < TOKEN_WARPS; part += warps) {
      const Place place(token, part);
      const QuantizedColumns columns(x + token * sizes.row_stride, place);
      targets.write(columns.values, columns.column, columns.scale, place, lane_row);
    }
  }
}
