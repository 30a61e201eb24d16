// SwiGLU of gate and up, quantized in blocks of 1x128, bit for bit like quantize_1x128.cu.
//
// A tile has 128 columns of gate and the matching 128 columns of up, as two slabs, so a thread holds both values of
// each pair. Each row of the result is one quantization block.
//
// KEEPS, for training: gate and up are stored too, in bfloat16, SwiGLU reads what is stored, and is rounded to bfloat16
// before it is quantized, as ops/swiglu_quantize.cu does.
#pragma once

#include "block_scale.cuh"
#include "epilogue_rows.cuh"
#include "swiglu.cuh"

struct SwigluQuantize {
  struct Output {
    void* data;       // E4M3 (m, N / 2)
    long long pitch;  // elements from one row to the next
    float* scale;     // MN-major: the scales of column block i, 128 columns, begin at i * scale_pitch
    long long scale_pitch;
    u16* projected;  // KEEPS: gate, then up, bfloat16 (m, N)
    long long projected_pitch;
    float limit, alpha;  // parameters of a clamped SwiGLU
  };

  Shared& s;
  const Output& out;

  __device__ __forceinline__ SwigluQuantize(Shared& s, const Output& out, const TensorMap&) : s(s), out(out) {}

  __device__ __forceinline__ void from_registers(float (&sum)[SLABS][ACCUMULATORS], const Tile& tile, int warpgroup) {
    static_assert(SLABS == 2 && COLUMNS == 128 && !STAGED || !GATED || SWAP);
    float (&gate)[ACCUMULATORS] = sum[0];
    const float (&up)[ACCUMULATORS] = sum[SLABS - 1];
    const int lane = lane_id(), warp = threadIdx.x / WARP % 4;
    u8* staging = s.epilogue + warpgroup * STAGING_BYTES + warp * STORE_BYTES;
    const int row = tile.m + slab_row(warpgroup, 0) + warp * 16, column = tile.n / 2;
    if constexpr (KEEPS) {
      keep(gate, shared_address(staging), row, column, column, tile.end);
      keep(sum[SLABS - 1], shared_address(staging), row, column, INTERMEDIATE + column, tile.end);
    }
    float scales[2];
    const float amax[2] = {activate_row(gate, up, 0, column), activate_row(gate, up, 1, column)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = lane / 4 + 8 * half;
      const BlockScale<> scale(amax[half]);
      scales[half] = scale.value;
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {
        const int byte = 8 * j + lane % 4 * 2;
        const float* h = gate + 4 * j + 2 * half;
        *reinterpret_cast<u16*>(staging + r * 128 + (byte / 16 ^ r % 8) * 16 + byte % 16) =
            pack_e4m3(scale.quotient(h[0]), scale.quotient(h[1]));
      }
    }
    __syncwarp();
    // Scales are stored only after the last shuffle: with a branch before it, the compiler would no longer assume that
    // the warp's lanes run together.
    float* target = out.scale + column / 128 * out.scale_pitch + row + lane / 4;
    if (lane % 4 == 0 && row + lane / 4 < tile.end) target[0] = scales[0];
    if (lane % 4 == 0 && row + lane / 4 + 8 < tile.end) target[8] = scales[1];
    const int chunk = lane % 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * i + lane / 8;
      const uint4 v = *reinterpret_cast<const uint4*>(staging + r * 128 + (chunk ^ r % 8) * 16);
      if (row + r < tile.end && column + 16 * chunk < INTERMEDIATE) {
        *reinterpret_cast<uint4*>(static_cast<u8*>(out.data) + (row + r) * out.pitch + column + 16 * chunk) = v;
      }
    }
    __syncwarp();
  }

  // Each warp handles one token at a time, each lane four of its 128 columns.
  __device__ __forceinline__ void from_sums(const Sums& sums) {
    const int lane = lane_id(), tokens = sums.tokens();
    if (COLUMN_VALUES) __builtin_assume(0 <= lane && lane < WARP);  // lets the compiler tell gate from up
    const int column = sums.tile.n / 2 + 4 * lane;
#pragma unroll 1
    for (int token = threadIdx.x / WARP; token < tokens; token += MATH_WARPS) {
      const long long row = sums.first_row() + token;
      u16* kept = out.projected + row * out.projected_pitch + column;
      float4 gate = sums.at(token, 4 * lane);
      if constexpr (KEEPS) keep(gate, kept, column < INTERMEDIATE);
      if (CHANNEL && BIAS) __syncwarp();  // lanes may have diverged in Columns::apply()
      float4 up = sums.at(token, 128 + 4 * lane);
      if constexpr (KEEPS) keep(up, kept + INTERMEDIATE, column < INTERMEDIATE);
      float4 h = make_float4(swiglu(gate.x, up.x), swiglu(gate.y, up.y), swiglu(gate.z, up.z), swiglu(gate.w, up.w));
      if constexpr (KEEPS) round_four(h);
      if (INTERMEDIATE % 128 != 0 && column >= INTERMEDIATE) h = make_float4(0.f, 0.f, 0.f, 0.f);
      const float amax = larger_magnitude(larger_magnitude(0.f, h.x), h.y);
      const BlockScale<> scale(warp_reduce(larger_magnitude(larger_magnitude(amax, h.z), h.w), larger_magnitude));
      if (lane == 0) out.scale[sums.tile.n / 256 * out.scale_pitch + row] = scale.value;
      if (column < INTERMEDIATE) {
        *reinterpret_cast<u32*>(static_cast<u8*>(out.data) + row * out.pitch + column) =
            to_e4m3(scale.quotient(h.x), scale.quotient(h.y), scale.quotient(h.z), scale.quotient(h.w));
      }
    }
  }

  __device__ __forceinline__ void finish() {}

  static __device__ __forceinline__ void leave(const Output&) {}

 private:
  // Rounds two values to bfloat16, and returns their bits.
  static __device__ __forceinline__ u32 round_two(float& left, float& right) {
    const u32 bits = pack_bfloat16(left, right);
    left = __uint_as_float(bits << 16), right = __uint_as_float(bits & 0xFFFF0000);
    return bits;
  }
  static __device__ __forceinline__ uint2 round_four(float4& v) {
    const u32 first = round_two(v.x, v.y);
    return make_uint2(first, round_two(v.z, v.w));
  }

  // Rounds four values to bfloat16 and, if they are `inside`, stores them at `target`.
  static __device__ __forceinline__ void keep(float4& v, u16* target, bool inside) {
    const uint2 bits = round_four(v);
    if (inside) *reinterpret_cast<uint2*>(target) = bits;
  }

  // Rounds a slab to bfloat16 and stores this warp's 16 rows of it through the staging tile, from column `target` of
  // `projected` on. column: the slab's first column within its projection.
  __device__ __forceinline__ void keep(float (&slab)[ACCUMULATORS], u32 staging, int row, int column, int target,
                                       int end) const {
    const int lane = lane_id(), chunk = lane % STORE_CHUNKS;
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; i += 2) round_two(slab[i], slab[i + 1]);
#pragma unroll
    for (int piece = 0; piece < STORE_PIECES; ++piece) {
      stage_piece(slab, piece, staging);
      __syncwarp();
      const int first = STORE_COLUMNS * piece + 8 * chunk;
      u16* data = out.projected + (row + lane / STORE_CHUNKS) * out.projected_pitch + target + first;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 4 * i + lane / STORE_CHUNKS;
        const uint4 v = staged_chunk(staging, r, chunk);
        if (row + r < end && column + first < INTERMEDIATE) {
          *reinterpret_cast<uint4*>(data + 4 * i * out.projected_pitch) = v;
        }
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ float swiglu(float gate, float up) const {
    return Swiglu<SWIGLU_FORM>(gate, up, out.limit, out.alpha).value();
  }

  // Replaces gate by SwiGLU in this lane's 32 columns of one row, and returns the row's largest magnitude, over the
  // four lanes that share it.
  __device__ __forceinline__ float activate_row(float (&gate)[ACCUMULATORS], const float (&up)[ACCUMULATORS], int half,
                                                int column) const {
    float amax = 0.f;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& h = gate[4 * j + 2 * half + i];
        h = swiglu(h, up[4 * j + 2 * half + i]);
        if constexpr (KEEPS) h = bfloat16_to_float(pack_bfloat16(h, 0.f) & 0xFFFF);
        if (INTERMEDIATE % 128 != 0 && column + 2 * (lane_id() % 4) + 8 * j >= INTERMEDIATE) h = 0.f;
        amax = larger_magnitude(amax, h);
      }
    }
    return warp_reduce<4>(amax, larger_magnitude);
  }
};
