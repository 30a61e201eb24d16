// The epilogue of the index scores: reduces a tile's dot products over heads to scores, and stores them.
//
// In the accumulators of wgmma, lane l of warp w holds the tile's rows r = 16w + l/4 and r + 8; of each row, it holds
// the columns 8j + 2(l%4) and the next. Each lane sums over its columns, separately for each row and each query of the
// warpgroup. The four neighbouring lanes that hold the other columns of the same rows then exchange their sums, and
// each lane keeps some of the totals.
#pragma once

#include "mqa_schedule.cuh"

constexpr int GROUP_QUERIES = QUERIES / COLUMN_GROUPS;            // queries per warpgroup
constexpr int SUMS = GROUP_QUERIES == 3 ? 8 : 2 * GROUP_QUERIES;  // sum 2i + k belongs to query i, row r + 8k
constexpr int KEPT = SUMS > 4 ? SUMS / 4 : 1;
static_assert(QUERIES % COLUMN_GROUPS == 0 && GROUP_QUERIES <= 4 && COLUMNS == GROUP_QUERIES * HEADS);

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xFF800000); }

// Where and how scores are written.
struct Output {
  float* scores;  // (queries, columns)
  int columns;
  int from_starts;  // whether column 0 of a row is the first token that its query scores, rather than token 0
  int fill_masked;  // whether entries outside the ranges are set to -inf
};

// Which scores a lane keeps: those of one query, in KEPT rows of the tile that are 8 apart.
struct Kept {
  int query;  // index within the warpgroup
  int row;
  bool any;

  __device__ __forceinline__ Kept(int warp, int lane) {
    query = GROUP_QUERIES == 1 ? 0 : GROUP_QUERIES == 2 ? lane / 2 % 2 : lane % 4;
    row = warp * 16 + lane / 4;
    if constexpr (GROUP_QUERIES == 1) row += lane / 2 % 2 * 8;
    if constexpr (GROUP_QUERIES == 2) row += lane % 2 * 8;
    any = GROUP_QUERIES == 1 ? lane % 2 == 0 : query < GROUP_QUERIES;
  }
};

// Halves the number of sums per lane: two lanes that differ in bit `Bit` add their sums; the lane with the bit set
// keeps the upper half, the other lane the lower half. Uses masks, because a conditional would become a branch.
template <int Count, int Bit>
__device__ __forceinline__ void exchange(float (&sum)[SUMS]) {
  static_assert(Bit == 1 || Bit == 2);
  const u32 upper = static_cast<int>(lane_id() << (Bit == 1 ? 31 : 30)) >> 31;  // all ones if the bit is set
#pragma unroll
  for (int i = 0; i < Count / 2; ++i) {
    const u32 a = __float_as_uint(sum[i]), b = __float_as_uint(sum[i + Count / 2]), give = (a & upper) | (b & ~upper);
    sum[i] = __uint_as_float(a ^ b ^ give) + __uint_as_float(__shfl_xor_sync(FULL_WARP, give, Bit));
  }
}

// sum_h weight[h] * relu(dot[h]) over the heads h of each query.
struct Fold {
  float half_weights[COLUMNS / 4];  // half of each weight, for this lane's columns

  // weights: of the warpgroup's columns, in shared memory.
  __device__ __forceinline__ explicit Fold(const float* weights) {
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      const float2 pair = reinterpret_cast<const float2*>(weights)[4 * j + lane_id() % 4];
      half_weights[2 * j] = 0.5f * pair.x;
      half_weights[2 * j + 1] = 0.5f * pair.y;
    }
  }

  // Computes the sums that this lane keeps, into sum[0] to sum[KEPT - 1].
  __device__ __forceinline__ void apply(const float (&dot)[COLUMNS / 2], float (&sum)[SUMS]) const {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sum[i] = 0.f;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {  // one flat loop: nested loops would move the accumulators to local memory
      float* of_query = sum + 8 * j / HEADS * 2;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        // x + |x| is 2 * relu(x). It keeps NaN and avoids the slower pipe that executes max.
        const float x = dot[4 * j + k];
        of_query[k / 2] = fmaf(x + fabsf(x), half_weights[2 * j + k % 2], of_query[k / 2]);
      }
    }
    exchange<SUMS, 2>(sum);
    if constexpr (SUMS == 2) {
      sum[0] += __shfl_xor_sync(FULL_WARP, sum[0], 1);
    } else {
      exchange<SUMS / 2, 1>(sum);
    }
  }
};

// The token that column 0 of a query's row stands for, if the query scores `tokens`.
__device__ __forceinline__ int first_token(const Output& out, Range tokens) {
  return !PAGED && out.from_starts ? tokens.begin : 0;
}

// Where a lane stores its kept scores of a segment; advances from tile to tile.
struct Target {
  Range scored;  // the columns that the query scores
  u32 fill_end;  // other columns below this become -inf; 0: none
  int column;    // the column of the first kept row
  float* score;  // the address of that column

  // queries: the total number. first_query: the warpgroup's first query within the group.
  __device__ __forceinline__ Target(const Output& out, int queries, const Item& item, const Kept& kept,
                                    int first_query) {
    const int query = first_query + kept.query;
    const long long s = static_cast<long long>(item.segment.group) * QUERIES + query;
    const Range tokens = kept.any ? item.tokens[query] : Range{0, 0};
    const int first = first_token(out, tokens);
    scored = {tokens.begin - first, tokens.end - first};
    fill_end = out.fill_masked && kept.any && s < queries ? out.columns : 0;
    column = item.segment.first * TILE + kept.row - first;
    score = out.scores + s * out.columns + column;
  }

  __device__ __forceinline__ void advance(int tiles) {
    column += tiles * TILE;
    score += tiles * TILE;
  }

  __device__ __forceinline__ void store(const float (&sum)[SUMS], const float (&scale)[KEPT]) const {
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
      const int c = column + 8 * k;
      const bool inside = c >= scored.begin && c < scored.end;
      const float value = inside ? sum[k] * scale[k] : negative_infinity();
      if (inside || static_cast<u32>(c) < fill_end) score[8 * k] = value;
    }
  }
};
