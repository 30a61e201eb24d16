// Sums the rows of each token's assignments with their weights: products and sums in float32, each rounded, in the
// order of the assignments. The sum, rounded to the output, may be added to a residual.
//
// A warp takes 32 vectors of 16 bytes of a token, and loads those of 8 assignments before it adds them up.
//
// With PEERS > 1 the sums go to the memory of peers: each to the peer whose token it is, or to all.
//
// A residual may hold sums of some tokens only, and the result too: those of tokens without a row are then left alone,
// so that a pass over few rows costs little.
//
// Compile-time constants: those of input.cuh, where INPUT is the type of y and VECTOR = 1; WEIGHT and OUTPUT (BFloat16,
// Float16 or Float32); WARPS (of a thread block), WARP_COLUMNS; HIDDEN, the columns, a multiple of 8; those of
// peers.cuh; TO_ALL (every sum goes to all peers).
#include "output.cuh"
#include "peers.cuh"
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

// y (num_rows, HIDDEN); rows, weights (tokens, top_k), an assignment whose row is outside [0, num_rows) adds nothing;
// residual (tokens, HIDDEN) may be null. Grid: a warp for each WARP_COLUMNS columns of each token.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    combine(const Element* y, const int* rows, const Weight::Element* weights, const Output::Element* residual,
            const __grid_constant__ Targets<PEERS> targets, u32 tokens, u32 top_k, u32 num_rows) {
  const u32 unit = blockIdx.x * WARPS + threadIdx.x / WARP;
  const u32 lane = threadIdx.x % WARP;
  const u32 token = unit / TOKEN_WARPS;
  const int column = static_cast<int>(unit % TOKEN_WARPS) * WARP_COLUMNS + lane * PER_VECTOR;
  const int columns = HIDDEN - column;

  wait_for_previous_kernel();
  allow_next_kernel();
  const auto sum_up = [&] {
    if (token >= tokens) return;
    float sum[PER_VECTOR] = {};
    bool has_row = false;
    for (u32 first = 0; first < top_k; first += WARP) {
      // One assignment a lane.
      const bool some = first + lane < top_k;
      const i64 assignment = i64{token} * top_k + first + lane;
      int lane_row = some ? rows[assignment] : -1;
      const float lane_weight = some ? Weight::value(weights[assignment]) : 0.0f;
      if (static_cast<u32>(lane_row) >= num_rows) lane_row = -1;
      has_row |= __any_sync(FULL_WARP, lane_row >= 0);
      for (u32 k = 0; k < min(top_k - first, WARP); k += AT_ONCE) {
        Vector v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          const int row = __shfl_sync(FULL_WARP, lane_row, k + i);
          v[i] = Vector::load(y + i64{row} * HIDDEN + column, row >= 0 ? columns : 0);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          const float weight = __shfl_sync(FULL_WARP, lane_weight, k + i);
          if (__shfl_sync(FULL_WARP, lane_row, k + i) < 0) continue;
#pragma unroll
          for (int c = 0; c < PER_VECTOR; ++c) sum[c] = __fadd_rn(sum[c], __fmul_rn(weight, v[i][c]));
        }
      }
    }
    const Known& known = targets.known;
    const bool adds = residual && (!known.residual || known.residual[token]);
    if (known.sums) {
      if (column == 0) known.sums[token] = has_row || adds;
      if (!has_row && !adds) return;
    }
    targets.store(sum, adds ? residual : nullptr, {token, tokens, lane, column, columns});
  };
  sum_up();
  targets.finish();
}
