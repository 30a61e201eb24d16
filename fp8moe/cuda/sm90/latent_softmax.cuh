// The softmax of latent_few.cuh and latent_codes.cuh: of scores (latents, rows) that a warpgroup has of a tile.
#pragma once

// Stores two 8 x 8 matrices of 16 bits, transposed: lanes 0 to 15 have the addresses of their columns, 16 bytes each.
__device__ __forceinline__ void stmatrix_across_x2(u32 address, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
               : "memory");
}

// A thread has latents 16 * warp + lane / 4 and the eighth after it, and of each COLUMNS pairs of the group's rows.
struct Softmax {
  static constexpr int COLUMNS = ROWS / 8, SCORES = ROWS / 2;
  using Of = float[COLUMNS][2];  // a value of each row

  float (&exchanged)[2][4][ROWS];  // between the warps of each warpgroup
  const int half, warp, lane;      // half: the warpgroup; warp: in it
  Of largest, total;

  __device__ __forceinline__ Softmax(float (&exchanged)[2][4][ROWS], int warp)
      : exchanged(exchanged), half(warp / 4), warp(warp % 4), lane(lane_id()) {}

  __device__ __forceinline__ int row(int j, int k) const { return 8 * j + 2 * (lane % 4) + k; }
  __device__ __forceinline__ void sync() const { named_barrier(1 + half, WARPGROUP); }

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        largest[j][k] = minus_infinity();
        total[j][k] = 0.f;
      }
    }
  }

  // Combines a value of each row over the latents of all warps, in their order.
  template <class Combine>
  __device__ __forceinline__ void over_latents(Of& values, const Combine& combine) {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        values[j][k] = warp_reduce<8, 4>(values[j][k], combine);
        if (lane < 4) exchanged[half][warp][row(j, k)] = values[j][k];
      }
    }
    sync();
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      float2 found[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) found[w] = *reinterpret_cast<const float2*>(&exchanged[half][w][row(j, 0)]);
      values[j][0] = combine(combine(found[0].x, found[1].x), combine(found[2].x, found[3].x));
      values[j][1] = combine(combine(found[0].y, found[1].y), combine(found[2].y, found[3].y));
    }
  }

  // Hides scores of the tile's latents from rows that do not see them: hidden(j, k, latent).
  template <class Hidden>
  __device__ __forceinline__ void hide(float (&scores)[SCORES], const Hidden& hidden) const {
#pragma unroll
    for (int i = 0; i < SCORES; ++i) {
      if (hidden(i / 4, i % 2, 16 * warp + lane / 4 + 8 * (i / 2 % 2))) scores[i] = minus_infinity();
    }
  }

  // Turns scores into weights. shrink: what earlier sums are to be multiplied by. hide(scores): hides some.
  template <class Hide>
  __device__ __forceinline__ void weigh(float (&scores)[SCORES], Of& shrink, float factor, const Hide& hide) {
#pragma unroll
    for (float& score : scores) score *= factor;
    hide(scores);
    Of most;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) most[j][k] = fmaxf(scores[4 * j + k], scores[4 * j + 2 + k]);
    }
    over_latents(most, [](float p, float q) { return fmaxf(p, q); });
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float now = fmaxf(largest[j][k], most[j][k]);
        const float origin = now == minus_infinity() ? 0.f : now;  // a row that has seen nothing yet
        shrink[j][k] = power_of_two(largest[j][k] - origin);
        largest[j][k] = now;
        float& upper = scores[4 * j + k];
        float& lower = scores[4 * j + 2 + k];
        upper = power_of_two(upper - origin), lower = power_of_two(lower - origin);
        total[j][k] = __fmaf_rn(total[j][k], shrink[j][k], upper + lower);
      }
    }
  }

  // Stores 16-bit weights of rows 8 * j on, of this thread's two latents, as columns of the second operand of a
  // product.
  __device__ __forceinline__ void store_weights(u32 weights, int j, u32 upper, u32 lower) const {
    // Of the matrices, this warp's latents 0 to 7 and 8 to 15, lane l % 16 has the address of row l % 8 of the eight.
    const int stored = 8 * j + lane % 8, chunk = 2 * warp + lane / 8 % 2;
    stmatrix_across_x2(weights + stored * 128 + (chunk ^ stored % 8) * 16, upper, lower);
  }
};
