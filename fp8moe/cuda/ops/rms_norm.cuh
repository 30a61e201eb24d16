// RMSNorm of rows (arXiv:1910.07467) that threads hold in registers. Rounds to the input type wherever PyTorch's
// modules do; sums are in a fixed order.
//
// Compile-time constants: those of quantize.cuh and of row_vectors.cuh; ROW_THREADS must be a multiple of 32 or a power
// of two.
#pragma once

#include "output.cuh"
#include "parameter.cuh"
#include "quantize.cuh"
#include "row_vectors.cuh"

// Neighbouring lanes that share a quantization block, or a row if that is shorter.
constexpr int BLOCK_LANES = BLOCK / PER_VECTOR < ROW_THREADS ? BLOCK / PER_VECTOR : ROW_THREADS;
constexpr bool EARLY = VECTORS <= 4;  // registers can hold the weight, too, during the sum of squares
static_assert(ROW_WARPS == 1 ? (ROW_THREADS & (ROW_THREADS - 1)) == 0 : ROW_THREADS % WARP == 0);

__device__ Vector operator+(const Vector& a, const Vector& b) {
  float sum[PER_VECTOR];
#pragma unroll
  for (int i = 0; i < PER_VECTOR; ++i) sum[i] = __fadd_rn(a[i], b[i]);
  return to_vector(sum);
}

// Replaces each x[r] by its sum over the threads that share a row; all of them get the result. Teams: the number of
// rows that a thread block handles at a time, if ROW_THREADS is more than a warp. The block synchronizes.
template <int Teams = 1, int Rows>
__device__ __forceinline__ void sum_rows(float (&x)[Rows]) {
  const auto add = [](float a, float b) { return __fadd_rn(a, b); };
#pragma unroll
  for (float& sum : x) sum = warp_reduce<ROW_WARPS == 1 ? ROW_THREADS : WARP>(sum, add);
  if constexpr (ROW_WARPS > 1) {
    __shared__ float sums[Teams][Rows][ROW_WARPS];
    const u32 warp = threadIdx.x / WARP, team = Teams == 1 ? 0 : warp / ROW_WARPS;
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      if (threadIdx.x % WARP == 0) sums[team][r][Teams == 1 ? warp : warp % ROW_WARPS] = x[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      x[r] = sums[team][r][0];
#pragma unroll
      for (int w = 1; w < ROW_WARPS; ++w) x[r] = __fadd_rn(x[r], sums[team][r][w]);
    }
  }
}

// Returns this thread's part of the sum of squares of a row.
__device__ float sum_of_squares(const Vector (&row)[VECTORS]) {
  float squares = 0.0f;
#pragma unroll
  for (const Vector& v : row) {
#pragma unroll
    for (int c = 0; c < PER_VECTOR; ++c) squares = __fmaf_rn(v[c], v[c], squares);
  }
  return squares;
}

// Returns 1 / rms of a row, given the sum of its squares.
__device__ float norm_factor(float squares, float eps) { return rsqrtf(__fmaf_rn(squares, 1.0f / HIDDEN, eps)); }

// Returns the first `count` elements of a vector, followed by zeros. `count` may be negative or exceed the vector.
__device__ Vector first_elements(const Vector& v, int count) {
  Vector first = {};
  if constexpr (VECTOR) {
    if (count > 0) first = v;
  } else {
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) {
      const u32 bits = Input::bits(v.words[i / PER_WORD], i % PER_WORD);
      if (i < count) first.words[i / PER_WORD] |= bits << (i % PER_WORD * 8 * sizeof(Element));
    }
  }
  return first;
}

// weight * (x * factor), each product rounded, for the first `count` elements. The other elements are zero, even if
// `factor` is not finite.
__device__ Vector normalized(const Vector& x, float factor, const Vector& weight, int count) {
  float v[PER_VECTOR];
#pragma unroll
  for (int i = 0; i < PER_VECTOR; ++i) v[i] = __fmul_rn(x[i], factor);
  const Vector n = to_vector(v);
#pragma unroll
  for (int i = 0; i < PER_VECTOR; ++i) v[i] = __fmul_rn(weight[i], n[i]);
  return first_elements(to_vector(v), count);
}

// Stores the first `count` elements of a vector. `count` may be negative or exceed the vector.
__device__ void store(Element* target, const Vector& v, int count) {
  if constexpr (VECTOR) {
    if (count > 0) store_16(target, v);
  } else {
#pragma unroll
    for (int i = 0; i < PER_VECTOR; ++i) {
      if (i < count) target[i] = static_cast<Element>(Input::bits(v.words[i / PER_WORD], i % PER_WORD));
    }
  }
}

// Quantizes a row in blocks of 1x128 and stores it. data: the thread's first column in the row; scale: the row's scale
// in block 0; count(i): the number of existing columns in vector i. Called by whole warps.
template <class Count>
__device__ __forceinline__ void store_quantized(u8* data, float* scale, i64 scale_pitch, const Vector (&row)[VECTORS],
                                                u32 thread, const Count& count) {
  u32 amax[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    amax[i] = Input::largest(warp_reduce<BLOCK_LANES>(row[i].larger_magnitude(0), Input::larger));
  }
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) {
    const Scale block_scale(amax[i]);
    store(data + i * STEP, Codes(row[i], block_scale), count(i));
    const int block = (static_cast<int>(thread) * PER_VECTOR + i * STEP) / BLOCK;
    if (thread % BLOCK_LANES == 0 && count(i) > 0) scale[block * scale_pitch] = block_scale.value;
  }
}
