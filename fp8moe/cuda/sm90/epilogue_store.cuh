// out = sums, in bfloat16 or float32. Derived epilogues add something to the sums first.
#pragma once

#include "epilogue_rows.cuh"

// The destination of the sums. Derived classes override add(), which runs before the sums are stored.
struct Result {
  static constexpr bool TO_ALL_SLABS_FIRST = false;  // true: add to all slabs, then store; false: slab by slab

  void* data;       // (m, N)
  long long pitch;  // elements from one row to the next

  // Adds to this warp's 16 rows of a slab, which begin at `row` and at column `n`. Values of rows past the tile's end
  // are ignored.
  __device__ __forceinline__ void add(float (&sum)[ACCUMULATORS], int row, int n, const Tile& tile) const {}

  // Adds to four output features of a token, from feature n on.
  __device__ __forceinline__ float4 add(float4 sum, long long row, int n, const Tile& tile) const { return sum; }
};

// Writes this warp's 16 rows from registers, two columns at a time, so that four lanes fill a 32-byte sector. `row`:
// the first of the 16 rows. Rows from `end` on and columns from N on are not written.
__device__ __forceinline__ void store_pairs(const float (&sum)[ACCUMULATORS], float* out, long long pitch, int row,
                                            int n, int end) {
  const int lane = lane_id();
  row += lane / 4;
  n += 2 * (lane % 4);
  float* target = out + row * pitch + n;
#pragma unroll
  for (int j = 0; j < ACCUMULATORS / 4; ++j) {
    if (n + 8 * j >= N) return;
    if (row < end) *reinterpret_cast<float2*>(target + 8 * j) = make_float2(sum[4 * j], sum[4 * j + 1]);
    float* below = target + 8 * pitch + 8 * j;
    if (row + 8 < end) *reinterpret_cast<float2*>(below) = make_float2(sum[4 * j + 2], sum[4 * j + 3]);
  }
}

template <typename Kind>
struct Store {
  using Output = Kind;
  static constexpr bool BY_TMA = STAGED && !OUT_FLOAT32;

  Shared& s;
  const Output& out;
  const TensorMap& map;  // tensor map of the result, which assumes a pitch of N

  __device__ __forceinline__ void from_registers(float (&sum)[SLABS][ACCUMULATORS], const Tile& tile, int warpgroup) {
    const int warp = threadIdx.x / WARP % 4, used = slabs_in_use(tile, warpgroup);
    u8* staging = s.epilogue + warpgroup * STAGING_BYTES;
    const auto add = [&](int slab) {
      const auto [row, column] = slab_of(tile, warpgroup, slab);
      out.add(sum[slab], tile.m + row + warp * 16, tile.n + column, tile);
    };
    if constexpr (Output::TO_ALL_SLABS_FIRST) {
#pragma unroll
      for (int slab = 0; slab < SLABS; ++slab) {
        if (slab < used) add(slab);
      }
    }
    if constexpr (BY_TMA) {
      if (threadIdx.x % WARPGROUP == 0) bulk_wait_read();  // until TMA has read the previous tile from shared memory
      sync_warpgroup(warpgroup);
    }
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
      const auto [first_row, column] = slab_of(tile, warpgroup, slab);
      const int row = tile.m + first_row, n = tile.n + column;
      if (slab >= used || row >= tile.end) break;
      if constexpr (!Output::TO_ALL_SLABS_FIRST) add(slab);
      const u32 target = shared_address(staging) + (STAGED ? slab * SLAB_STORE_BYTES : 0);
      if constexpr (OUT_FLOAT32) {
        store_pairs(sum[slab], static_cast<float*>(out.data), out.pitch, row + warp * 16, n, tile.end);
      } else if (BY_TMA && out.pitch == N && row + 64 <= tile.end) {
        store_slab(sum[slab], target, row, n, warpgroup);
      } else {
        store_rows(sum[slab], target + warp * STORE_BYTES, row + warp * 16, n, tile.end);
      }
    }
  }

  __device__ __forceinline__ void from_sums(const Sums& sums) {
    constexpr int QUADS = BLOCK_N / 4;
    const int tokens = sums.tokens();
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens * QUADS; i += WARPGROUP * WARPGROUPS) {
      const int token = i / QUADS, n = sums.tile.n + i % QUADS * 4;
      const long long row = sums.first_row() + token;
      if (n >= N) continue;
      const float4 total = out.add(sums.at(token, i % QUADS * 4), row, n, sums.tile);
      if constexpr (OUT_FLOAT32) {
        *reinterpret_cast<float4*>(static_cast<float*>(out.data) + row * out.pitch + n) = total;
      } else {
        *reinterpret_cast<uint2*>(static_cast<u16*>(out.data) + row * out.pitch + n) =
            make_uint2(pack_bfloat16(total.x, total.y), pack_bfloat16(total.z, total.w));
      }
    }
  }

  // Waits for all TMA stores; called by all math warps after the last tile.
  __device__ __forceinline__ void finish() {
    if constexpr (BY_TMA) {
      if (threadIdx.x % WARPGROUP == 0) bulk_wait();
    }
  }

  static __device__ __forceinline__ void leave(const Output&) {}

 private:
  // Stores bfloat16 rows through the warp's staging tile, as 16-byte stores of whole 128-byte rows. Rows from `end` on
  // are not written.
  __device__ __forceinline__ void store_rows(const float (&sum)[ACCUMULATORS], u32 staging, int row, int n, int end) {
    const int lane = lane_id(), chunk = lane % STORE_CHUNKS;
#pragma unroll
    for (int piece = 0; piece < STORE_PIECES; ++piece) {
      stage_piece(sum, piece, staging);
      __syncwarp();
      const int first = n + STORE_COLUMNS * piece + 8 * chunk;
      u16* target = static_cast<u16*>(out.data) + (row + lane / STORE_CHUNKS) * out.pitch + first;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 4 * i + lane / STORE_CHUNKS;
        const uint4 v = staged_chunk(staging, r, chunk);
        if (row + r < end && first < N && chunk < piece_width(piece)) {
          *reinterpret_cast<uint4*>(target + 4 * i * out.pitch) = v;
        }
      }
      __syncwarp();
    }
  }

  // Hands a slab of 64 rows to TMA, which writes it while this warpgroup continues. The caller has made sure that
  // `staging` is free.
  __device__ __forceinline__ void store_slab(const float (&sum)[ACCUMULATORS], u32 staging, int row, int n,
                                             int warpgroup) {
    const int lane = lane_id(), warp = threadIdx.x / WARP % 4;
    const u32 target = staging + (warp * 16 + lane % 16) * 128;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j += 2) {
      const float* v = sum + 4 * j;
      stmatrix_x4(target + j / 8 * 64 * 128 + ((j % 8 + lane / 16) ^ lane % 8) * 16, pack_bfloat16(v[0], v[1]),
                  pack_bfloat16(v[2], v[3]), pack_bfloat16(v[4], v[5]), pack_bfloat16(v[6], v[7]));
    }
    fence_async_proxy();
    sync_warpgroup(warpgroup);
    if (threadIdx.x % WARPGROUP == 0) {
#pragma unroll
      for (int piece = 0; piece < COLUMNS / STORE_COLUMNS; ++piece)
        tma_store(map, staging + piece * 64 * 128, n + piece * STORE_COLUMNS, row);
      bulk_commit();
    }
  }
};

using PlainStore = Store<Result>;
