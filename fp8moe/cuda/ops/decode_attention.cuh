// What the kernels of decode_attention share: their arguments, and which keys a query sees.
//
// Compile-time constants: those of heads.cuh; APPEND, ARGUMENTS_BYTES (see decode_attention.cu).
#pragma once

// q: row b has the query heads of sequence b. k, v: row b has the key and value heads of its new token. Rows are
// *_stride elements apart. cos, sin (1 or batch, ROTATED); one_table: whether the first size is 1. q_weight, k_weight
// (SIZE). Without NORM the weights are not read; without APPEND nothing of these but q is read. sinks (heads): float
// if `float_sinks`, else Element; null: heads have no sinks. keys, values (batch, KEY_HEADS, length, SIZE).
// The query of sequence b sees columns begin[b] to columns[b] of the cache, at most the last `window` of them.
// columns[b] is the column of the new token; if it is outside [0, length), the token is not stored. out (batch, heads *
// SIZE); data, scale: out quantized as by quantize_1x128.cu. out may be null, and so may data with scale. With
// FP8_CACHE key_scales, value_scales (batch, KEY_HEADS, length).
struct Arguments {
  const Element *q, *k, *v;
  const Element *cos, *sin;
  const Element *q_weight, *k_weight;
  const void* sinks;
  Cached *keys, *values;
  const i64 *begin, *columns;
  Element* out;
  u8* data;
  float* scale;
  float *key_scales, *value_scales;
  i64 q_stride, k_stride, v_stride, length, window, scale_pitch;
  u32 one_table, early, float_sinks;
  float eps, score_scale;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES);

#include "attention_tiles.cuh"

// e^(x - largest), where x and `largest` are already multiplied by LOG2_E; 0 if x is minus infinity.
__device__ __forceinline__ float power(float x, float largest) {
  return x == minus_infinity() ? 0.0f : exp2f(x - largest);
}

// The sink of a query head times LOG2_E, comparable to scaled scores; minus infinity if heads have no sinks.
__device__ __forceinline__ float scaled_sink(const Arguments& a, int head) {
  if (!a.sinks) return minus_infinity();
  const float sink = a.float_sinks ? static_cast<const float*>(a.sinks)[head]
                                   : Input::value(static_cast<const Element*>(a.sinks)[head]);
  return sink * LOG2_E;
}

// The keys that a sequence's query sees: columns `first` to `first` + `count` - 1 of the cache.
struct Keys {
  i64 first;
  int count;
  bool appends;  // the last key is the new token's, which this kernel stores

  __device__ Keys(const Arguments& a, int sequence) {
    const i64 column = a.columns[sequence], begin = a.begin[sequence];
    first = max(begin, column - a.window + 1);
    const i64 end = min(column + 1, a.length);
    count = static_cast<int>(max(end - first, i64{0}));
    appends = APPEND && count > 0 && column < a.length;
  }
};
