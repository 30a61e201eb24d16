// How a tile leaves the math warps: bias, conversion, SwiGLU and quantization, the sum over a split, stores.
#pragma once

#include "gemm_layout.cuh"
#include "gemm_schedule.cuh"
#include "swiglu.cuh"

// Where results go, and what is done to them on the way.
struct Output {
  void* data;        // bfloat16 or float32 (m, N), or with SWIGLU E4M3 (m, N / 2)
  long long pitch;   // elements between its rows
  const void* bias;  // (N), or none
  float* scale;      // with SWIGLU: MN-major, `scale_pitch` floats for each 128 columns
  long long scale_pitch;
  float limit, alpha;  // of a clamped SwiGLU
};

__device__ __forceinline__ float bias_at(const void* bias, int n) {
  if constexpr (BIAS == 1) return bfloat16_to_float(static_cast<const u16*>(bias)[n]);
  if constexpr (BIAS == 2) return static_cast<const float*>(bias)[n];
  return 0.f;
}

__device__ __forceinline__ void add_bias(float (&sum)[ACCUMULATORS], const void* bias, int n) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j, n += 8) {
    if (n >= N) return;
    const float left = bias_at(bias, n), right = bias_at(bias, n + 1);
    sum[4 * j] += left, sum[4 * j + 1] += right, sum[4 * j + 2] += left, sum[4 * j + 3] += right;
  }
}

// float32 leaves straight from the registers, in pairs: four lanes fill a 32-byte sector.
__device__ __forceinline__ void store_float32(const float (&sum)[ACCUMULATORS], float* out, long long pitch, int row,
                                              int n, int m) {
  const int lane = lane_id();
  row += lane / 4;
  n += 2 * (lane % 4);
  float* target = out + row * pitch + n;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    if (n + 8 * j >= N) return;
    if (row < m) *reinterpret_cast<float2*>(target + 8 * j) = make_float2(sum[4 * j], sum[4 * j + 1]);
    if (row + 8 < m)
      *reinterpret_cast<float2*>(target + 8 * pitch + 8 * j) = make_float2(sum[4 * j + 2], sum[4 * j + 3]);
  }
}

// bfloat16 goes through this warp's 16 x 64 staging tile to 16-byte stores of whole 128-byte rows; those past m are
// left out.
__device__ __forceinline__ void store_bfloat16(const float (&sum)[ACCUMULATORS], u32 staging, u16* out, long long pitch,
                                               int row, int n, int m) {
  const int lane = lane_id();
  constexpr int CHUNKS = STORE_COLUMNS / 8;  // of 16 bytes in a staging row, swizzled against bank conflicts
  const int chunk = lane % CHUNKS;
#pragma unroll
  for (int piece = 0; piece < ceil_div(COLUMNS, STORE_COLUMNS); ++piece) {
    const int width = min(STORE_COLUMNS, COLUMNS - STORE_COLUMNS * piece) / 8;
#pragma unroll
    for (int j = 0; j < width; j += 2) {
      const float* s = sum + 4 * (CHUNKS * piece + j);
      stmatrix_x4(staging + lane % 16 * 128 + ((j + lane / 16) ^ lane % 8) * 16, pack_bfloat16(s[0], s[1]),
                  pack_bfloat16(s[2], s[3]), pack_bfloat16(s[4], s[5]), pack_bfloat16(s[6], s[7]));
    }
    __syncwarp();
    const int first = n + STORE_COLUMNS * piece + 8 * chunk;
    u16* target = out + (row + lane / CHUNKS) * pitch + first;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * i + lane / CHUNKS;
      const uint4 v = load_shared_16(staging + r * 128 + (chunk ^ r % 8) * 16);
      if (row + r < m && first < N && chunk < width) *reinterpret_cast<uint4*>(target + 4 * i * pitch) = v;
    }
    __syncwarp();
  }
}

// Hands a slab of 64 rows to TMA, which writes it while this warpgroup goes on. `staging` is free.
__device__ __forceinline__ void store_slab(const float (&sum)[ACCUMULATORS], u32 staging, const TensorMap& out, int row,
                                           int n, int group) {
  const int lane = lane_id(), warp = threadIdx.x / WARP % 4;
  const u32 target = staging + (warp * 16 + lane % 16) * 128;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j += 2) {
    const float* s = sum + 4 * j;
    stmatrix_x4(target + j / 8 * 64 * 128 + ((j % 8 + lane / 16) ^ lane % 8) * 16, pack_bfloat16(s[0], s[1]),
                pack_bfloat16(s[2], s[3]), pack_bfloat16(s[4], s[5]), pack_bfloat16(s[6], s[7]));
  }
  fence_async_proxy();
  named_barrier(1 + group, WARPGROUP);
  if (threadIdx.x % WARPGROUP == 0) {
#pragma unroll
    for (int piece = 0; piece < COLUMNS / STORE_COLUMNS; ++piece)
      tma_store(out, staging + piece * 64 * 128, n + piece * STORE_COLUMNS, row);
    bulk_commit();
  }
}

__device__ __forceinline__ float swiglu(float gate, float up, const Output& out) {
  return Swiglu<SWIGLU>(gate, up, out.limit, out.alpha).value();
}

// Scale of a block of 128 from the largest magnitude in it, as the quantizers have it, and its inverse.
__device__ __forceinline__ float block_scale(float largest) { return fmaxf(largest, 1e-12f) * (1.f / 448.f); }

// One row of a tile in 32 columns of this lane: SwiGLU in place of gate, then the largest magnitude over the four lanes
// that share the row. A NaN does not count: it stays visible in its own element.
__device__ __forceinline__ float activate_row(float (&gate)[ACCUMULATORS], const float (&up)[ACCUMULATORS], int half,
                                              int column, const Output& out) {
  float largest = 0.f;
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& h = gate[4 * j + 2 * half + i];
      h = swiglu(h, up[4 * j + 2 * half + i], out);
      if (INTERMEDIATE % 128 != 0 && column + 8 * j >= INTERMEDIATE) h = 0.f;
      largest = fmaxf(largest, fabsf(h));
    }
  }
  largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
}

// A tile of 128 columns of gate and the same of up becomes E4M3 and one scale for each row. A warp has 16 rows, which
// leave through its staging tile in 16-byte stores.
__device__ __forceinline__ void store_swiglu(float (&gate)[ACCUMULATORS], const float (&up)[ACCUMULATORS],
                                             char* staging, const Output& out, int row, int column, int end) {
  const int lane = lane_id();
  float scales[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = lane / 4 + 8 * half;
    scales[half] = block_scale(activate_row(gate, up, half, column, out));
    const float inverse = reciprocal(scales[half]);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      const int byte = 8 * j + lane % 4 * 2;
      const float* h = gate + 4 * j + 2 * half;
      *reinterpret_cast<u16*>(staging + r * 128 + (byte / 16 ^ r % 8) * 16 + byte % 16) =
          pack_e4m3(h[0] * inverse, h[1] * inverse);
    }
  }
  __syncwarp();
  // No branch before the last shuffle: the compiler would no longer take the warp to be in step.
  float* target = out.scale + column / 128 * out.scale_pitch + row + lane / 4;
  if (lane % 4 == 0 && row + lane / 4 < end) target[0] = scales[0];
  if (lane % 4 == 0 && row + lane / 4 + 8 < end) target[8] = scales[1];
  const int chunk = lane % 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = 4 * i + lane / 8;
    const uint4 v = *reinterpret_cast<const uint4*>(staging + r * 128 + (chunk ^ r % 8) * 16);
    if (row + r < end && column + 16 * chunk < INTERMEDIATE) {
      *reinterpret_cast<uint4*>(static_cast<char*>(out.data) + (row + r) * out.pitch + column + 16 * chunk) = v;
    }
  }
  __syncwarp();
}

// Stores a tile from the registers of its math warps.
__device__ __forceinline__ void store_tile(float (&sum)[WAVES][ACCUMULATORS], char* memory, u32 shared,
                                           const TensorMap& out_map, const Output& out, Tile tile, int group) {
  const int warp = threadIdx.x / WARP % 4;
  const int offset = EPILOGUE_OFFSET + group * STAGING_BYTES;
  if constexpr (SWIGLU) {
    store_swiglu(sum[0], sum[WAVES - 1], memory + offset + warp * STORE_BYTES, out,
                 tile.m + slab_row(group, 0) + warp * 16, tile.n / 2, tile.end);
  } else {
    if constexpr (TMA_STORE) {
      if (threadIdx.x % WARPGROUP == 0) bulk_wait_read();  // of the tile before
      named_barrier(1 + group, WARPGROUP);
    }
#pragma unroll
    for (int wave = 0; wave < WAVES; ++wave) {
      const int row = tile.m + slab_row(group, wave), n = tile.n + slab_column(wave);
      if (row >= tile.end) break;
      if constexpr (BIAS) add_bias(sum[wave], out.bias, n + 2 * (lane_id() % 4));
      const u32 staging = shared + offset + (STAGED ? wave * SLAB_STORE_BYTES : 0);
      if constexpr (OUT_FLOAT32) {
        store_float32(sum[wave], static_cast<float*>(out.data), out.pitch, row + warp * 16, n, tile.end);
      } else if (TMA_STORE && out.pitch == N && row + 64 <= tile.end) {
        store_slab(sum[wave], staging, out_map, row, n, group);
      } else {
        store_bfloat16(sum[wave], staging + warp * STORE_BYTES, static_cast<u16*>(out.data), out.pitch, row + warp * 16,
                       n, tile.end);
      }
    }
  }
}

// Tokens of the tile that block `split` sums and stores.
__device__ __forceinline__ int slice_tokens(Tile tile, int split) {
  return max(0, min(SLICE_M, min(BLOCK_M, tile.end - tile.m) - split * SLICE_M));
}

// Lays this warpgroup's sums out as [token][output feature].
__device__ __forceinline__ void write_partial(const float (&sum)[WAVES][ACCUMULATORS], float* target, int group) {
  const int lane = lane_id(), warp = threadIdx.x / WARP % 4;
#pragma unroll
  for (int wave = 0; wave < WAVES; ++wave) {
    const int row = slab_row(group, wave) + warp * 16 + lane / 4, column = 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      const float* s = sum[wave] + 4 * j;
      if constexpr (SWAP) {
        float* t = target + (8 * j + column) * SUM_PITCH + row;
        t[0] = s[0], t[SUM_PITCH] = s[1], t[8] = s[2], t[SUM_PITCH + 8] = s[3];
      } else {
        float* t = target + row * SUM_PITCH + 8 * j + column;
        *reinterpret_cast<float2*>(t) = make_float2(s[0], s[1]);
        *reinterpret_cast<float2*>(t + 8 * SUM_PITCH) = make_float2(s[2], s[3]);
      }
    }
  }
}

// Hands the partial tile, laid out where the ring was, to the blocks of the split that sum it, a slice of tokens each.
__device__ __forceinline__ void send_partial(u32 shared, Tile tile, int split) {
  fence_async_proxy();
  named_barrier(1, WARPGROUP * WARPGROUPS);
  const int owner = threadIdx.x;
  if (owner < SPLIT_K && owner != split) {
    const u32 bytes = slice_tokens(tile, owner) * SUM_PITCH * 4;
    const u32 target = shared + EPILOGUE_OFFSET + split * SLICE_M * SUM_PITCH * 4;
    if (bytes > 0) {
      bulk_copy_to_block(cluster_address(target, owner), shared + owner * SLICE_M * SUM_PITCH * 4, bytes,
                         cluster_address(shared + SUMS_OFFSET, owner));
    }
  }
}

// Four output features of a token: the partial tiles summed in rank order.
__device__ __forceinline__ float4 sum_ranks(const char* memory, int token, int feature, int split) {
  const float* own = reinterpret_cast<const float*>(memory);
  const float* received = reinterpret_cast<const float*>(memory + EPILOGUE_OFFSET);
  float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int rank = 0; rank < SPLIT_K; ++rank) {
    const float* slice = (SPLIT_K > 1 && rank == split ? own : received) + rank * SLICE_M * SUM_PITCH;
    const float4 v = *reinterpret_cast<const float4*>(slice + token * SUM_PITCH + feature);
    total = make_float4(total.x + v.x, total.y + v.y, total.z + v.z, total.w + v.w);
  }
  return total;
}

// Stores this block's tokens from the reduction buffer.
__device__ __forceinline__ void store_sum(const char* memory, const Output& out, Tile tile, int split) {
  constexpr int QUADS = BLOCK_N / 4;
  const int tokens = slice_tokens(tile, split);
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * QUADS; i += WARPGROUP * WARPGROUPS) {
    const int token = i / QUADS, n = tile.n + i % QUADS * 4;
    const long long row = tile.m + split * SLICE_M + token;
    if (n >= N) continue;
    float4 total = sum_ranks(memory, token, i % QUADS * 4, split);
    if constexpr (BIAS) {
      total = make_float4(total.x + bias_at(out.bias, n), total.y + bias_at(out.bias, n + 1),
                          total.z + bias_at(out.bias, n + 2), total.w + bias_at(out.bias, n + 3));
    }
    if constexpr (OUT_FLOAT32) {
      *reinterpret_cast<float4*>(static_cast<float*>(out.data) + row * out.pitch + n) = total;
    } else {
      *reinterpret_cast<uint2*>(static_cast<u16*>(out.data) + row * out.pitch + n) =
          make_uint2(pack_bfloat16(total.x, total.y), pack_bfloat16(total.z, total.w));
    }
  }
}

// The same with SwiGLU and quantization: a warp takes a token, a lane four of its 128 columns.
__device__ __forceinline__ void store_sum_swiglu(const char* memory, const Output& out, Tile tile, int split) {
  const int lane = lane_id(), tokens = slice_tokens(tile, split);
  const int column = tile.n / 2 + 4 * lane;
#pragma unroll 1
  for (int token = threadIdx.x / WARP; token < tokens; token += MATH_WARPS) {
    const long long row = tile.m + split * SLICE_M + token;
    const float4 gate = sum_ranks(memory, token, 4 * lane, split), up = sum_ranks(memory, token, 128 + 4 * lane, split);
    float4 h = make_float4(swiglu(gate.x, up.x, out), swiglu(gate.y, up.y, out), swiglu(gate.z, up.z, out),
                           swiglu(gate.w, up.w, out));
    if (INTERMEDIATE % 128 != 0 && column >= INTERMEDIATE) h = make_float4(0.f, 0.f, 0.f, 0.f);
    float largest = fmaxf(fmaxf(fabsf(h.x), fabsf(h.y)), fmaxf(fabsf(h.z), fabsf(h.w)));
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
    const float scale = block_scale(largest), inverse = reciprocal(scale);
    if (lane == 0) out.scale[tile.n / 256 * out.scale_pitch + row] = scale;
    if (column < INTERMEDIATE) {
      *reinterpret_cast<u32*>(static_cast<char*>(out.data) + row * out.pitch + column) =
          pack_e4m3(h.x * inverse, h.y * inverse) | u32{pack_e4m3(h.z * inverse, h.w * inverse)} << 16;
    }
  }
}
