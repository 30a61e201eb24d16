// The epilogue of the index scores: folds the dot products of a tile into scores and stores them.
//
// The accumulators of wgmma give lane l of warp w the tile's rows r = 16w + l/4 and r + 8, and of each the columns
// 8j + 2(l%4) and the next. The lane folds its columns into one sum for each row of each query of the warpgroup. Four
// neighbouring lanes, which hold the other columns of the same rows, then exchange their sums; each keeps a part.
#pragma once

#include "mqa_schedule.cuh"

constexpr int GROUP_QUERIES = QUERIES / COLUMN_GROUPS;            // of a warpgroup
constexpr int SUMS = GROUP_QUERIES == 3 ? 8 : 2 * GROUP_QUERIES;  // sum 2i + k: query i, row r + 8k
constexpr int KEPT = SUMS > 4 ? SUMS / 4 : 1;
static_assert(QUERIES % COLUMN_GROUPS == 0 && GROUP_QUERIES <= 4 && COLUMNS == GROUP_QUERIES * HEADS);

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xFF800000); }

// The destination of the scores.
struct Output {
  float* scores;  // (queries, columns)
  int columns;
  int from_starts;  // whether a row begins with the first token that its query scores, rather than with token 0
  int fill_masked;  // whether entries outside of the ranges become -inf
};

// The scores that a lane keeps: of one query in KEPT rows of the tile, 8 apart.
struct Kept {
  int query;  // of the warpgroup's
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

// Halves the sums: adds up the sums of lanes that differ in bit `Bit`; lanes with the bit set keep the upper half. It
// uses masks, because a conditional would become a branch.
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

// sum_h weight[h] * relu(dot[h]) over the heads of each query.
struct Fold {
  float half_weights[COLUMNS / 4];  // of the lane's columns

  // weights: of the warpgroup's columns, in shared memory.
  __device__ __forceinline__ explicit Fold(const float* weights) {
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      const float2 pair = reinterpret_cast<const float2*>(weights)[4 * j + lane_id() % 4];
      half_weights[2 * j] = 0.5f * pair.x;
      half_weights[2 * j + 1] = 0.5f * pair.y;
    }
  }

  // Leaves the sums that the lane keeps in sum[0] to sum[KEPT - 1].
  __device__ __forceinline__ void apply(const float (&dot)[COLUMNS / 2], float (&sum)[SUMS]) const {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sum[i] = 0.f;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {  // one flat loop: nested ones put the accumulators into local memory
      float* of_query = sum + 8 * j / HEADS * 2;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        // x + |x| is twice relu(x), keeps NaN, and does not use the slower pipe of max.
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

// The token in the first column of the row of a query that scores `tokens`.
__device__ __forceinline__ int first_token(const Output& out, Range tokens) {
  return !PAGED && out.from_starts ? tokens.begin : 0;
}

// The destinations of the kept scores of a segment, tile after tile.
struct Target {
  Range scored;  // columns
  u32 fill_end;  // other columns before it become -inf
  int column;    // of the first kept row
  float* score;  // in that column

  // queries: how many there are. first_query: the warpgroup's, within the group.
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
