// Quantizes every token once, one scale per 128 columns, and writes it to each row that one of its assignments has in
// the sorted order. Values and scales are those of quantize_1x128.cu, bit for bit.
//
// A warp takes WARP_COLUMNS columns of a token.
//
// Compile-time constants: those of quantize_token.cuh; SIZES_BYTES.
#include "quantize_token.cuh"

static_assert(sizeof(PermuteSizes) == SIZES_BYTES);

// x (tokens, HIDDEN), rows `row_stride` apart; the others as for Rows of permute.cuh.
// read_ahead must be set where top_k > 32: without it, a token whose first 32 assignments have no row is left out.
// Grid: a warp for each WARP_COLUMNS columns of each token.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    permute_quantize(const Element* x, const int* rows, u8* data, float* scale,
                     const __grid_constant__ PermuteSizes sizes) {
  const Place place;

  wait_for_previous_kernel();
  allow_next_kernel();
  if (place.token >= sizes.tokens) return;

  const Rows targets{rows, data, scale, sizes};
  const int lane_row = targets.from(0, place);
  if (!sizes.read_ahead && !__any_sync(FULL_WARP, lane_row >= 0)) return;

  const QuantizedColumns part(x + place.token * sizes.row_stride, place);
  targets.write(part.values, part.column, part.scale, place, lane_row);
}
