// The weighted sum of the rows of a token's assignments. Products and sums are float32, rounded one by one, in the
// order of the assignments.
//
// Compile-time constants: those of input.cuh, where INPUT is the type of y and VECTOR = 1; WEIGHT (BFloat16, Float16 or
// Float32); ROW (int or long long); HIDDEN (columns, a multiple of 8); PLACED. PLACED = 0: `rows` has the row of y of
// each assignment. PLACED = 1: assignment i has row i of y, and `rows` has its expert.
#pragma once

#include "output.cuh"
#include "warp.cuh"

using Weight = WEIGHT;
using Row = ROW;

static_assert(VECTOR && HIDDEN % 8 == 0);

// One assignment of a token; the 32 lanes of a warp hold 32 of them.
struct Assignment {
  int row;  // -1: none
  float weight;
};

struct RoutingSizes {
  u32 tokens, top_k;
  u32 bound;  // rows (or experts, with PLACED) outside [0, bound) do not exist
};

// The assignments of all tokens.
struct Routing {
  const Row* rows;
  const Weight::Element* weights;
  const RoutingSizes& sizes;

  // Loads assignment k + lane of a token.
  __device__ __forceinline__ Assignment from(u32 token, u32 k, u32 lane) const {
    if (token >= sizes.tokens || k + lane >= sizes.top_k) return {-1, 0.0f};
    const i64 at = i64{token} * sizes.top_k + k + lane;
    const Row row = rows[at];
    const bool some = static_cast<unsigned long long>(row) < sizes.bound;
    return {some ? static_cast<int>(PLACED ? at : row) : -1, Weight::value(weights[at])};
  }
};

// Adds the rows of 32 assignments, with their weights, to a lane's sums. The lane has `Vectors` vectors that are `step`
// columns apart. The vectors of AtOnce rows are loaded before they are added. y: the lane's first column in row 0;
// columns: the number of columns from there to the end of a row.
template <int AtOnce, int Vectors>
__device__ __forceinline__ void add_rows(float (&sum)[Vectors][PER_VECTOR], const Element* y, int columns, int step,
                                         const Assignment& assignment) {
  u32 used = __ballot_sync(FULL_WARP, assignment.row >= 0);
  while (used) {
    Vector v[AtOnce][Vectors];
    u32 left = used;
#pragma unroll
    for (auto& vectors : v) {
      const i64 row = __shfl_sync(FULL_WARP, assignment.row, __ffs(left) - 1);
#pragma unroll
      for (int i = 0; i < Vectors; ++i) {
        vectors[i] = Vector::load(y + row * HIDDEN + i * step, left ? columns - i * step : 0);
      }
      left &= left - 1;
    }
#pragma unroll
    for (const auto& vectors : v) {
      if (!used) break;
      const float weight = __shfl_sync(FULL_WARP, assignment.weight, __ffs(used) - 1);
      used &= used - 1;
#pragma unroll
      for (int i = 0; i < Vectors; ++i) {
#pragma unroll
        for (int c = 0; c < PER_VECTOR; ++c) sum[i][c] = __fadd_rn(sum[i][c], __fmul_rn(weight, vectors[i][c]));
      }
    }
  }
}

// Adds all rows of a token. assignment: this lane's assignment among the first 32.
template <int AtOnce, int Vectors>
__device__ __forceinline__ void add_token(float (&sum)[Vectors][PER_VECTOR], const Element* y, int columns, int step,
                                          const Routing& routing, u32 token, Assignment assignment) {
  for (u32 k = WARP;; k += WARP) {
    add_rows<AtOnce>(sum, y, columns, step, assignment);
    if (k >= routing.sizes.top_k) return;
    assignment = routing.from(token, k, lane_id());
  }
}
