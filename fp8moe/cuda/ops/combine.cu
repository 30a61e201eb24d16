// Sums the rows of each token's assignments, with their weights: see combine.cuh. Optionally adds a residual to the
// sum, after rounding the sum to the output type.
//
// A warp handles 32 vectors of 16 bytes of a token at a time. It loads the vectors of 8 rows before it adds them up,
// and loads the assignments of its next token meanwhile.
//
// Some tokens may have no row. Residual and result can each mark which tokens have a sum: a token that has neither rows
// nor a residual is skipped, so a pass over few rows is cheap.
//
// Compile-time constants: those of combine.cuh; OUTPUT (BFloat16, Float16 or Float32); WARP_COLUMNS; those of
// units.cuh; SIZES_BYTES.
#include "combine.cuh"
#include "units.cuh"

using Output = OUTPUT;

constexpr int AT_ONCE = 8;
constexpr u32 TOKEN_WARPS = ceil_div(HIDDEN, WARP_COLUMNS);
static_assert(WARP_COLUMNS == WARP * PER_VECTOR);

struct Sizes {
  RoutingSizes routing;
  u32 warps;  // warps that share a token: 1 to TOKEN_WARPS
};
static_assert(sizeof(Sizes) == SIZES_BYTES);

// For each token, whether it has a sum. Null: all tokens have one.
struct Known {
  const u8* residual;  // whether `residual` has a sum; read
  u8* sums;            // whether the result has a sum; written
};

struct Result {
  Known known;
  Output::Element* out;  // (tokens, HIDDEN)
};

// y (rows, HIDDEN); rows, weights (tokens, top_k); residual (tokens, HIDDEN) may be null. Any grid.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    combine(const Element* y, const Row* rows, const Weight::Element* weights, const Output::Element* residual,
            const __grid_constant__ Result result, const __grid_constant__ Sizes sizes) {
  const u32 lane = threadIdx.x % WARP;
  const Units units;
  const Routing routing{rows, weights, sizes.routing};

  wait_for_previous_kernel();
  allow_next_kernel();
  Assignment next = routing.from(units.first / sizes.warps, 0, lane);
  for (u32 unit = units.first; unit < sizes.routing.tokens * sizes.warps; unit += units.step) {
    const Assignment first = next;
    next = routing.from((unit + units.step) / sizes.warps, 0, lane);
    const u32 token = unit / sizes.warps, warp = unit % sizes.warps;
    bool has_row = __any_sync(FULL_WARP, first.row >= 0);
    for (u32 k = WARP; k < sizes.routing.top_k; k += WARP) {
      has_row |= __any_sync(FULL_WARP, routing.from(token, k, lane).row >= 0);
    }
    const Known& known = result.known;
    const bool adds = residual && (!known.residual || known.residual[token]);
    if (known.sums && warp == 0 && lane == 0) known.sums[token] = has_row || adds;
    if (known.sums && !has_row && !adds) continue;
    for (u32 part = warp; part < TOKEN_WARPS; part += sizes.warps) {
      const int column = static_cast<int>(part) * WARP_COLUMNS + lane * PER_VECTOR;
      float sum[1][PER_VECTOR] = {};
      add_token<AT_ONCE>(sum, y + column, HIDDEN - column, 0, routing, token, first);
      if (column >= HIDDEN) continue;
      const i64 own = i64{token} * HIDDEN + column;
#pragma unroll
      for (int c = 0; c < PER_VECTOR; c += 4) {
        if (adds) add4<Output>(sum[0] + c, residual + own + c);
        store4<Output>(result.out + own + c, sum[0] + c);
      }
    }
  }
}
