// The heads of a thread block of decode_attention, on their way to shared memory. Included behind the kernel's
// `Shared`, which has `query` and `fresh`.
#pragma once

#include "decode_attention.cuh"

// Norm and rotation of a thread block's heads. HEAD_LANES threads handle one head at a time.
struct Heads {
  static constexpr int AT_ONCE = THREADS / HEAD_LANES;
  static constexpr int TURNS = ceil_div(MAX_ROWS + 2 * APPEND, AT_ONCE);

  Values cos, sin, q_weight, k_weight;
  u32 lane = threadIdx.x % HEAD_LANES;
  int offset = static_cast<int>(lane) * PER_LANE;
  bool holds = offset < SIZE;

  __device__ __forceinline__ Heads(const Arguments& a, int sequence) {
    const i64 table = (a.one_table ? 0 : i64{sequence} * ROTATED) + offset;
    cos = Values::load(a.cos + table, APPEND && lane < 2 * HALF_LANES);
    sin = Values::load(a.sin + table, APPEND && lane < 2 * HALF_LANES);
    q_weight = Values::load(a.q_weight + offset, NORM && holds);
    k_weight = Values::load(a.k_weight + offset, NORM && holds);
  }

  // Normalizes and rotates the queries and the new key, and puts them and the new value in shared memory. stores: also
  // stores the new key and value to the cache; set in one block.
  __device__ __forceinline__ void prepare(Shared& s, const Arguments& a, int sequence, int key_head, int first_row,
                                          int rows, const Keys& seen, bool stores) const {
    // Row i < rows is query head i; the two rows after are the key and the value.
    Values loaded[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int row = turn * AT_ONCE + static_cast<int>(threadIdx.x) / HEAD_LANES;
      const Element* source = a.q + sequence * a.q_stride + (key_head * GROUP + first_row + row) * SIZE;
      if (row == rows) source = a.k + sequence * a.k_stride + key_head * SIZE;
      if (row == rows + 1) source = a.v + sequence * a.v_stride + key_head * SIZE;
      loaded[turn] = Values::load(source + offset, row < rows + 2 * APPEND && holds);
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int row = turn * AT_ONCE + static_cast<int>(threadIdx.x) / HEAD_LANES;
      const bool is_key = row == rows, is_value = row == rows + 1;
      Values x = loaded[turn];
      if constexpr (APPEND) {
        Values turned = x;
        if constexpr (NORM) turned = normalized(turned, is_key ? Values(k_weight) : Values(q_weight), a.eps);
        turned = rotated(turned, cos, sin, lane);
        if (!is_value) x = turned;
      }
      // Lanes past the end of the head hold zeros, which pad the last step of mma.
      if (row >= rows + 2 * APPEND || lane >= CHUNKS) continue;
      if (row < rows) {
        store_16(&s.query[row][swizzled(row, lane)], x.vectors[0]);
        continue;
      }
      store_16(&s.fresh[is_value][lane * 16], x.vectors[0]);
      if (!stores || !holds || !seen.appends) continue;
      const i64 place = (i64{sequence} * KEY_HEADS + key_head) * a.length + seen.first + seen.count - 1;
      x.store((is_value ? a.values : a.keys) + place * SIZE + offset);
    }
  }
};
