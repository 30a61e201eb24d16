// Adds up the partial sums that ranks have for this GPU's tokens, in the order of ranks, and rounds them once. Only
// those of ranks that have an expert of a token are there, and read. The sum may be added to a residual.
//
// A warp takes WARP_COLUMNS columns of a token, 4 neighbouring ones a lane at a time. It goes on to another token when
// it is done, whose ranks it knows by then.
//
// Compile-time constants: those of input.cuh, with INPUT = Float32 and VECTOR = 1; OUTPUT (BFloat16, Float16 or
// Float32); WARP_COLUMNS; HIDDEN, the columns, a multiple of 8; those of owners.cuh and units.cuh; SIZES_BYTES.
#include "output.cuh"
#include "owners.cuh"
#include "units.cuh"

using Output = OUTPUT;

constexpr u32 TOKEN_WARPS = ceil_div(HIDDEN, WARP_COLUMNS);
constexpr int STEP = WARP * PER_VECTOR;  // columns that a warp loads at once
constexpr int VECTORS = WARP_COLUMNS / STEP;
static_assert(VECTOR && PER_VECTOR == 4 && WARP_COLUMNS % STEP == 0 && HIDDEN % 8 == 0);

struct Sizes {
  u32 tokens, slots, top_k, experts;  // slots: rows of each rank; experts: of each rank
};
static_assert(sizeof(Sizes) == SIZES_BYTES);

// partials (PEERS * slots, HIDDEN), those of rank r from r * slots on; index (tokens, top_k); residual, out (tokens,
// HIDDEN), residual may be null. Any grid.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    sum_partials(const Element* partials, const Index* index, const Output::Element* residual, Output::Element* out,
                 const __grid_constant__ Sizes sizes) {
  const Units units;
  const auto owners_of = [&](u32 unit) {
    const u32 token = unit / TOKEN_WARPS;
    return token < sizes.tokens ? owners(index + i64{token} * sizes.top_k, sizes.top_k, sizes.experts) : 0;
  };
  wait_for_previous_kernel();
  allow_next_kernel();
  u32 next = owners_of(units.first);
  for (u32 unit = units.first; unit < sizes.tokens * TOKEN_WARPS; unit += units.step) {
    const u32 ranks = next;
    next = owners_of(unit + units.step);
    const u32 token = unit / TOKEN_WARPS;
    const int column = static_cast<int>(unit % TOKEN_WARPS) * WARP_COLUMNS + lane_id() * PER_VECTOR;
    Vector v[PEERS][VECTORS];
#pragma unroll
    for (u32 rank = 0; rank < PEERS; ++rank) {
      const Element* source = partials + (i64{rank} * sizes.slots + token) * HIDDEN;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        const int first = column + i * STEP;
        v[rank][i] = Vector::load(source + first, ranks >> rank & 1 ? HIDDEN - first : 0);
      }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int first = column + i * STEP;
      if (first >= HIDDEN) continue;
      float sum[PER_VECTOR] = {};
#pragma unroll
      for (u32 rank = 0; rank < PEERS; ++rank) {
        if (!(ranks >> rank & 1)) continue;
#pragma unroll
        for (int c = 0; c < PER_VECTOR; ++c) sum[c] = __fadd_rn(sum[c], v[rank][i][c]);
      }
      const i64 at = i64{token} * HIDDEN + first;
      if (residual) add4<Output>(sum, residual + at);
      store4<Output>(out + at, sum);
    }
  }
}
