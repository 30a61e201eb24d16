// Sums the rows of each token's assignments with their weights: products and sums in float32, each rounded, in the
// order of the assignments. The sum, rounded to the output, may be added to a residual.
//
// A warp takes 32 vectors of 16 bytes of a token at a time, and loads those of 8 rows before it adds them up. It may go
// on to other tokens, whose assignments it has loaded by then.
//
// A residual may hold sums of some tokens only, and the result too: those of tokens without a row are then left alone,
// so that a pass over few rows costs little.
//
// Compile-time constants: those of input.cuh, where INPUT is the type of y and VECTOR = 1; WEIGHT and OUTPUT (BFloat16,
// Float16 or Float32); ROW (int or long long), and PLACED: whether the rows of y are those of the assignments in their
// own order, and `rows` has their experts; WARP_COLUMNS; HIDDEN, the columns, a multiple of 8; those of units.cuh;
// SIZES_BYTES.
#include "output.cuh"
#include "units.cuh"
#include "warp.cuh"

using Weight = WEIGHT;
using Output = OUTPUT;
using Row = ROW;

constexpr int AT_ONCE = 8;
constexpr u32 TOKEN_WARPS = ceil_div(HIDDEN, WARP_COLUMNS);
static_assert(VECTOR && WARP_COLUMNS == WARP * PER_VECTOR && HIDDEN % 8 == 0);

// Of 32 assignments of a token, one a lane.
struct Assignment {
  int row;  // -1: none
  float weight;
};

struct Sizes {
  u32 tokens, top_k;
  u32 bound;  // of the rows, or of the experts: what is outside [0, bound) is none
  u32 warps;  // that share a token: 1 to TOKEN_WARPS
};
static_assert(sizeof(Sizes) == SIZES_BYTES);

// For each token whether there is a sum of it; null: there is of all.
struct Known {
  const u8* residual;
  u8* sums;  // written
};

struct Result {
  Known known;
  Output::Element* out;  // (tokens, HIDDEN)
};

// The routing of all tokens.
struct Routing {
  const Row* rows;
  const Weight::Element* weights;
  const Sizes& sizes;

  // The assignment that a lane has of the 32 from the k-th of a token on.
  __device__ __forceinline__ Assignment from(u32 token, u32 k, u32 lane) const {
    if (token >= sizes.tokens || k + lane >= sizes.top_k) return {-1, 0.0f};
    const i64 at = i64{token} * sizes.top_k + k + lane;
    const Row row = rows[at];
    const bool some = static_cast<unsigned long long>(row) < sizes.bound;
    return {some ? static_cast<int>(PLACED ? at : row) : -1, Weight::value(weights[at])};
  }
};

// Adds the rows of 32 assignments to the sums of a lane. y: from the first column of the lane on, which has `columns`
// up to the end of the row.
__device__ __forceinline__ void add_rows(float (&sum)[PER_VECTOR], const Element* y, int columns,
                                         const Assignment& assignment) {
  u32 used = __ballot_sync(FULL_WARP, assignment.row >= 0);
  while (used) {
    Vector v[AT_ONCE];
    u32 left = used;
#pragma unroll
    for (Vector& vector : v) {
      const i64 row = __shfl_sync(FULL_WARP, assignment.row, __ffs(left) - 1);
      vector = Vector::load(y + row * HIDDEN, left ? columns : 0);
      left &= left - 1;
    }
#pragma unroll
    for (const Vector& vector : v) {
      if (!used) break;
      const float weight = __shfl_sync(FULL_WARP, assignment.weight, __ffs(used) - 1);
      used &= used - 1;
#pragma unroll
      for (int c = 0; c < PER_VECTOR; ++c) sum[c] = __fadd_rn(sum[c], __fmul_rn(weight, vector[c]));
    }
  }
}

// y (rows, HIDDEN); rows, weights (tokens, top_k); residual (tokens, HIDDEN) may be null. Any grid.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    combine(const Element* y, const Row* rows, const Weight::Element* weights, const Output::Element* residual,
            const __grid_constant__ Result result, const __grid_constant__ Sizes sizes) {
  const u32 lane = threadIdx.x % WARP;
  const Units units;
  const Routing routing{rows, weights, sizes};

  wait_for_previous_kernel();
  allow_next_kernel();
  Assignment next = routing.from(units.first / sizes.warps, 0, lane);
  for (u32 unit = units.first; unit < sizes.tokens * sizes.warps; unit += units.step) {
    const Assignment first = next;
    next = routing.from((unit + units.step) / sizes.warps, 0, lane);
    const u32 token = unit / sizes.warps, warp = unit % sizes.warps;
    bool has_row = __any_sync(FULL_WARP, first.row >= 0);
    for (u32 k = WARP; k < sizes.top_k; k += WARP) {
      has_row |= __any_sync(FULL_WARP, routing.from(token, k, lane).row >= 0);
    }
    const Known& known = result.known;
    const bool adds = residual && (!known.residual || known.residual[token]);
    if (known.sums && warp == 0 && lane == 0) known.sums[token] = has_row || adds;
    if (known.sums && !has_row && !adds) continue;
    for (u32 part = warp; part < TOKEN_WARPS; part += sizes.warps) {
      const int column = static_cast<int>(part) * WARP_COLUMNS + lane * PER_VECTOR;
      float sum[PER_VECTOR] = {};
      Assignment assignment = first;
      for (u32 k = WARP;; k += WARP) {
        add_rows(sum, y + column, HIDDEN - column, assignment);
        if (k >= sizes.top_k) break;
        assignment = routing.from(token, k, lane);
      }
      if (column >= HIDDEN) continue;
      const i64 own = i64{token} * HIDDEN + column;
#pragma unroll
      for (int c = 0; c < PER_VECTOR; c += 4) {
        if (adds) add4<Output>(sum + c, residual + own + c);
        store4<Output>(result.out + own + c, sum + c);
      }
    }
  }
}
