// Sums the rows of each token's assignments with their weights: products and sums in float32, each rounded, in the
// order of the assignments. The sum, rounded to the output, may be added to a residual.
//
// A warp takes 32 vectors of 16 bytes of a token at a time, and loads those of 8 rows before it adds them up. It may go
// on to other tokens, whose assignments it has loaded by then.
//
// With PEERS > 1 the sums go to the memory of peers: each to the peer whose token it is, or to all. Those of a token
// without a row are left alone: the peer knows from its routing which there are. Consecutive warps write to different
// peers, so that the sums of this GPU's tokens, which the link does not hold up, fill the time of the others.
//
// A residual may hold sums of some tokens only, and the result too: those of tokens without a row are then left alone,
// so that a pass over few rows costs little.
//
// Compile-time constants: those of input.cuh, where INPUT is the type of y and VECTOR = 1; WEIGHT and OUTPUT (BFloat16,
// Float16 or Float32); WARP_COLUMNS; HIDDEN, the columns, a multiple of 8; those of peers.cuh and units.cuh;
// TO_ALL (every sum goes to all peers).
#include "output.cuh"
#include "peers.cuh"
#include "units.cuh"
#include "warp.cuh"

using Weight = WEIGHT;
using Output = OUTPUT;

constexpr int AT_ONCE = 8;
constexpr u32 TOKEN_WARPS = ceil_div(HIDDEN, WARP_COLUMNS);
static_assert(VECTOR && WARP_COLUMNS == WARP * PER_VECTOR && HIDDEN % 8 == 0);

// What the sums of a lane are of: PER_VECTOR columns of one of `tokens` tokens.
struct Place {
  u32 token, tokens, lane;
  int column, columns;  // the first of them, and how many there are from it on
};

// Of 32 assignments of a token, one a lane.
struct Assignment {
  int row;  // -1: none
  float weight;
};

// For each token whether there is a sum of it; null: there is of all.
struct Known {
  const u8* residual;
  u8* sums;  // written
};

// Where the sums go.
template <int Peers>
struct Targets {
  Known known;
  Output::Element* out[Peers];  // of each peer (tokens, HIDDEN) if TO_ALL, else (tokens / Peers, HIDDEN)
  Meeting meeting;

  // Neighbouring lanes store neighbouring 16 bytes, whole lines of 128: what NVLink carries best.
  __device__ __forceinline__ void store(float (&sum)[PER_VECTOR], const Output::Element* residual,
                                        const Place& place) const {
    if (residual && place.columns > 0) {
      const i64 own = i64{place.token} * HIDDEN + place.column;
#pragma unroll
      for (int c = 0; c < PER_VECTOR; c += 4) add4<Output>(sum + c, residual + own + c);
    }
    constexpr u32 PIECES = PER_VECTOR / 4;  // of 4 columns that a lane has
    const int first_column = place.column - static_cast<int>(place.lane) * PER_VECTOR;
    const u32 each = TO_ALL ? place.tokens : place.tokens / Peers;
    const i64 row = i64{place.token % each} * HIDDEN;
#pragma unroll
    for (u32 i = 0; i < PIECES; ++i) {
      const u32 piece = i * WARP + place.lane;
      float v[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        v[c] = __shfl_sync(FULL_WARP, sum[c], piece / PIECES);
        const float upper = __shfl_sync(FULL_WARP, sum[PER_VECTOR - 4 + c], piece / PIECES);
        if (piece % PIECES) v[c] = upper;
      }
      const int column = first_column + static_cast<int>(piece) * 4;
      if (column >= HIDDEN) continue;
      if constexpr (TO_ALL) {
#pragma unroll
        for (Output::Element* peer : out) store4<Output>(peer + row + column, v);
      } else {
        store4<Output>(out[place.token / each] + row + column, v);
      }
    }
  }

  __device__ __forceinline__ void finish() const { meet(meeting); }
};

template <>
struct Targets<1> {
  Known known;
  Output::Element* out;  // (tokens, HIDDEN)

  __device__ __forceinline__ void store(float (&sum)[PER_VECTOR], const Output::Element* residual,
                                        const Place& place) const {
    if (place.columns <= 0) return;
    const i64 own = i64{place.token} * HIDDEN + place.column;
#pragma unroll
    for (int c = 0; c < PER_VECTOR; c += 4) {
      if (residual) add4<Output>(sum + c, residual + own + c);
      store4<Output>(out + own + c, sum + c);
    }
  }

  __device__ __forceinline__ void finish() const {}
};

// The routing of all tokens.
struct Routing {
  const int* rows;
  const Weight::Element* weights;
  u32 top_k, num_rows;

  // The assignment that a lane has of the 32 from the k-th of a token on.
  __device__ __forceinline__ Assignment from(u32 token, u32 k, u32 lane) const {
    if (k + lane >= top_k) return {-1, 0.0f};
    const i64 at = i64{token} * top_k + k + lane;
    const int row = rows[at];
    return {static_cast<u32>(row) < num_rows ? row : -1, Weight::value(weights[at])};
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

// The i-th token.
__device__ __forceinline__ u32 token_at(u32 i, u32 tokens) {
  if constexpr (PEERS == 1 || TO_ALL) return i;
  return i % PEERS * (tokens / PEERS) + i / PEERS;
}

struct Sizes {
  u32 tokens, top_k, num_rows;
  u32 warps;  // that share a token: 1 to TOKEN_WARPS
};
static_assert(sizeof(Sizes) == SIZES_BYTES);

// y (num_rows, HIDDEN); rows, weights (tokens, top_k), an assignment whose row is outside [0, num_rows) adds nothing;
// residual (tokens, HIDDEN) may be null. Any grid.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    combine(const Element* y, const int* rows, const Weight::Element* weights, const Output::Element* residual,
            const __grid_constant__ Targets<PEERS> targets, const __grid_constant__ Sizes sizes) {
  const u32 lane = threadIdx.x % WARP, tokens = sizes.tokens;
  const Units units;
  const Routing routing{rows, weights, sizes.top_k, sizes.num_rows};
  const auto first_of = [&](u32 unit) {
    if (unit >= tokens * sizes.warps) return Assignment{-1, 0.0f};
    return routing.from(token_at(unit / sizes.warps, tokens), 0, lane);
  };

  wait_for_previous_kernel();
  allow_next_kernel();
  Assignment next = first_of(units.first);
  for (u32 unit = units.first; unit < tokens * sizes.warps; unit += units.step) {
    const Assignment first = next;
    next = first_of(unit + units.step);
    const u32 token = token_at(unit / sizes.warps, tokens), warp = unit % sizes.warps;
    bool has_row = __any_sync(FULL_WARP, first.row >= 0);
    for (u32 k = WARP; k < sizes.top_k; k += WARP) {
      has_row |= __any_sync(FULL_WARP, routing.from(token, k, lane).row >= 0);
    }
    const Known& known = targets.known;
    const bool adds = residual && (!known.residual || known.residual[token]);
    if (known.sums && warp == 0 && lane == 0) known.sums[token] = has_row || adds;
    if ((known.sums || PEERS > 1) && !has_row && !adds) continue;
    for (u32 part = warp; part < TOKEN_WARPS; part += sizes.warps) {
      const int column = static_cast<int>(part) * WARP_COLUMNS + lane * PER_VECTOR;
      const int columns = HIDDEN - column;
      float sum[PER_VECTOR] = {};
      Assignment assignment = first;
      for (u32 k = WARP;; k += WARP) {
        add_rows(sum, y + column, columns, assignment);
        if (k >= sizes.top_k) break;
        assignment = routing.from(token, k, lane);
      }
      targets.store(sum, adds ? residual : nullptr, {token, tokens, lane, column, columns});
    }
  }
  targets.finish();
}
