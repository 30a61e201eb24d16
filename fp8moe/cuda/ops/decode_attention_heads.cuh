// The heads of a thread block of decode_attention, on their way to shared memory. Included behind the kernel's
// `Shared`, which has `query` and `fresh`. MULTIPLIES_CODES: the kernel multiplies codes of the cache by queries in
// float16, and `Shared` has `query_factors`.
#pragma once

#include "decode_attention.cuh"

#if MULTIPLIES_CODES
// 1 / x of a power of two x from 2^-126 to 2^126.
__device__ __forceinline__ float inverse_of_power(float x) {
  return __uint_as_float((254u << 23) - __float_as_uint(x));
}

// A power of two by which values of up to `largest` fit into float16 when multiplied.
__device__ __forceinline__ float power_for_float16(BFloat16, float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23);  // of 2^14 in a float: 141
  return __uint_as_float(min(max(127 + 141 - exponent, 2), 252) << 23);
}
__device__ __forceinline__ float power_for_float16(Float16, float) { return 1.0f; }

// Puts a lane's eight values of a query in shared memory, multiplied by `power`, in float16 and in the order in which
// mma meets codes: of each four values the first two are in an even chunk, the other two in the next.
__device__ __forceinline__ void store_query(u8* row, int index, u32 lane, const Vector& x, float power) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = pack(Float16(), __fmul_rn(x[2 * i], power), __fmul_rn(x[2 * i + 1], power));
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u8* const place = row + swizzled(index, lane / 2 * 2 + i) + lane % 2 * 8;
    *reinterpret_cast<uint2*>(place) = make_uint2(words[i], words[2 + i]);
  }
}
#endif

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
#if FP8_CACHE
      const float largest = largest_of_head(x);
#endif
      // Lanes past the end of the head hold zeros, which pad the last step of mma.
      if (row >= rows + 2 * APPEND || lane >= CHUNKS) continue;
      if (row < rows) {
#if MULTIPLIES_CODES
        const float power = power_for_float16(Input(), largest);
        store_query(s.query[row], row, lane, x.vectors[0], power);
        if (lane == 0) s.query_factors[row] = inverse_of_power(power);
#else
        store_16(&s.query[row][swizzled(row, lane)], x.vectors[0]);
#endif
        continue;
      }
      const i64 place = (i64{sequence} * KEY_HEADS + key_head) * a.length + seen.first + seen.count - 1;
      Cached* const cached = (is_value ? a.values : a.keys) + place * SIZE;
      u8* const fresh = s.fresh[is_value];
#if FP8_CACHE
      const HeadCodes codes(x, largest);
#if MULTIPLIES_CODES
      codes.store(fresh, reinterpret_cast<float*>(fresh + SIZE), lane);
#else
      store_16(fresh + lane * 16, dequantized(codes.codes, codes.scale));
#endif
      if (stores && seen.appends) codes.store(cached, (is_value ? a.value_scales : a.key_scales) + place, lane);
#else
      store_16(fresh + lane * 16, x.vectors[0]);
      if (stores && holds && seen.appends) x.store(cached + offset);
#endif
    }
  }
};
