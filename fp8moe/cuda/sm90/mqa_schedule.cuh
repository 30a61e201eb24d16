// The groups of the index scores: which tiles each needs.
//
// QUERIES consecutive queries form a group; in the paged variant, the queries of one sequence. A group needs all tiles
// of TILE kv tokens between the first and the last token that any of its queries scores.
#pragma once

#include "tile_schedule.cuh"

// The kv tokens that each query scores. Prefill: from starts[s] to ends[s], at most `longest` tokens. Paged: the first
// tokens of its sequence, as many as the query's context length. All values are clamped to existing tokens.
struct Ranges {
  const int* starts;  // (queries,); unused if paged
  const int* ends;    // (queries,); paged: context lengths at the last query, (sequences,), or per query, (queries,)
  int queries;
  int limit;      // number of kv tokens
  int longest;    // unused if paged
  int per_query;  // paged: whether `ends` has a length for each query

  // Returns the tokens that query s scores. The range is empty (end <= begin) past the last query.
  __device__ __forceinline__ Range query(int s) const {
    if (s >= queries) return {0, 0};
    if constexpr (PAGED) {
      const int length = per_query ? max(ends[s], 0) : max(ends[s / QUERIES], 0) - (QUERIES - 1 - s % QUERIES);
      return {0, min(length, limit)};
    } else {
      const int begin = min(max(starts[s], 0), limit);
      const int end = max(min(ends[s], limit), begin);
      return {begin, begin + min(end - begin, longest)};
    }
  }

  __device__ __forceinline__ int count() const { return ceil_div(queries, QUERIES); }

  // Returns the range of tiles that a group needs.
  __device__ __forceinline__ Range tiles(int group) const {
    Range tokens = {0x7FFFFFFF, 0};
#pragma unroll 4
    for (int i = 0; i < QUERIES; ++i) {
      const Range seen = query(group * QUERIES + i);
      if (seen.begin < seen.end) tokens = {min(tokens.begin, seen.begin), max(tokens.end, seen.end)};
    }
    if (tokens.begin >= tokens.end) return {0, 0};
    return {tokens.begin / TILE, (tokens.end - 1) / TILE + 1};
  }
};

// A segment and the tokens that each of its queries scores, for the math warps. An empty segment tells them to stop.
struct Item {
  Segment segment;
  Range tokens[QUERIES];
};
