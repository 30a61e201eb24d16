// out = sums, stored on other GPUs: the assignment of a row says which peer has its token and at which row to store.
// With TO_ALL, each row is stored on all peers.
//
// Compile-time constants: those of peers.cuh; TO_ALL.
#pragma once

#include "epilogue_rows.cuh"
#include "peers.cuh"

struct PeerStore {
  struct Output {
    void* peers[PEERS];      // the result on each peer, (assignments, N)
    const int* assignments;  // (m): the assignment of each row
    Meeting meeting;
    int each;  // assignments per peer; with TO_ALL: of all peers together
  };

  // Where a row is stored: the peer and the index of the row's first element there. With TO_ALL the index is that of
  // every peer.
  struct Place {
    int peer;  // -1: do not store
    long long first;
  };

  Shared& s;
  const Output& out;

  __device__ __forceinline__ PeerStore(Shared& s, const Output& out, const TensorMap&) : s(s), out(out) {}

  __device__ __forceinline__ void from_registers(float (&sum)[SLABS][ACCUMULATORS], const Tile& tile, int warpgroup) {
    static_assert(!STAGED);
    const int lane = lane_id(), warp = threadIdx.x / WARP % 4, used = slabs_in_use(tile, warpgroup);
    const u32 staging = shared_address(s.epilogue + warpgroup * STAGING_BYTES + warp * STORE_BYTES);
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
      const auto [first_row, column] = slab_of(tile, warpgroup, slab);
      const int row = tile.m + first_row + warp * 16, n = tile.n + column;
      if (slab >= used || row - warp * 16 >= tile.end) break;
      if constexpr (OUT_FLOAT32) {
        const Place upper = place(row + lane / 4, tile.end), lower = place(row + lane / 4 + 8, tile.end);
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
          const int feature = n + 8 * j + 2 * (lane % 4);
          const float* v = sum[slab] + 4 * j;
          if (feature >= N) break;
          if (upper.peer >= 0) store<float>(upper, feature, make_float2(v[0], v[1]));
          if (lower.peer >= 0) store<float>(lower, feature, make_float2(v[2], v[3]));
        }
      } else {
        store_rows(sum[slab], staging, row, n, tile.end);
      }
    }
  }

  __device__ __forceinline__ void from_sums(const Sums& sums) {
    constexpr int QUADS = BLOCK_N / 4;
    const int tokens = sums.tokens();
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens * QUADS; i += WARPGROUP * WARPGROUPS) {
      const int token = i / QUADS, n = sums.tile.n + i % QUADS * 4;
      if (n >= N) continue;
      const float4 v = sums.at(token, i % QUADS * 4);
      const Place target = place(sums.first_row() + token, sums.tile.end);
      if constexpr (OUT_FLOAT32) {
        store<float>(target, n, v);
      } else {
        store<u16>(target, n, make_uint2(pack_bfloat16(v.x, v.y), pack_bfloat16(v.z, v.w)));
      }
    }
  }

  __device__ __forceinline__ void finish() {}

  // Ends the kernel; called by all threads of the block.
  static __device__ __forceinline__ void leave(const Output& out) { meet(out.meeting); }

 private:
  // Stores rows in bfloat16 through the staging tile, like Store::store_rows.
  __device__ __forceinline__ void store_rows(const float (&sum)[ACCUMULATORS], u32 staging, int row, int n, int end) {
    const int lane = lane_id(), chunk = lane % STORE_CHUNKS;
    Place places[4];  // of the four rows that this lane writes
#pragma unroll
    for (int i = 0; i < 4; ++i) places[i] = place(row + 4 * i + lane / STORE_CHUNKS, end);
#pragma unroll
    for (int piece = 0; piece < STORE_PIECES; ++piece) {
      stage_piece(sum, piece, staging);
      __syncwarp();
      const int first = n + STORE_COLUMNS * piece + 8 * chunk;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 v = staged_chunk(staging, 4 * i + lane / STORE_CHUNKS, chunk);
        if (places[i].peer >= 0 && first < N && chunk < piece_width(piece)) store<u16>(places[i], first, v);
      }
      __syncwarp();
    }
  }

  // Finds where to store a row; peer -1 for rows from `end` on.
  __device__ __forceinline__ Place place(long long row, int end) const {
    if (row >= end) return {-1, 0};
    const int assignment = out.assignments[row], peer = TO_ALL ? 0 : assignment / out.each;
    return {peer, static_cast<long long>(assignment - peer * out.each) * N};
  }

  // Stores a value to a row, at column n.
  template <typename Element, typename Value>
  __device__ __forceinline__ void store(const Place& place, int n, const Value& value) const {
    if constexpr (TO_ALL) {
#pragma unroll
      for (void* peer : out.peers) *reinterpret_cast<Value*>(static_cast<Element*>(peer) + place.first + n) = value;
    } else {
      *reinterpret_cast<Value*>(static_cast<Element*>(out.peers[place.peer]) + place.first + n) = value;
    }
  }
};
