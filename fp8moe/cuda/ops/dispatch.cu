// Quantizes the tokens of this GPU, one scale per 128 columns, and stores each token to the memory of every peer that
// has one of its experts. The routing of all tokens goes to all peers. Values and scales are bitwise those of
// quantize_1x128.cu.
//
// A warp handles WARP_COLUMNS columns of a token at a time. One instruction stores 512 bytes to a peer: whole lines of
// 128 bytes, which is best for NVLink. Meanwhile the warp finds the peers of its next token.
//
// Compile-time constants: those of quantize_token.cuh, peers.cuh and owners.cuh; SIZES_BYTES.
#include "owners.cuh"
#include "peers.cuh"
#include "quantize_token.cuh"

constexpr int K_BLOCKS = ceil_div(HIDDEN, BLOCK);
static_assert(PEERS <= BLOCK_LANES);

// The buffers of one peer that receive this GPU's tokens: data (slots, HIDDEN), scale (slots, K_BLOCKS), index (slots,
// top_k).
struct Slots {
  u8* data;
  float* scale;
  int* index;
};

struct Peers {
  Slots slots[PEERS];
  Meeting meeting;
};

struct Sizes {
  u32 tokens, slots, top_k, experts;  // experts: per peer
  i64 row_stride;
};
static_assert(sizeof(Sizes) == SIZES_BYTES);

// Converts an index to int; -1, which means no expert, if it does not fit.
__device__ int to_int(Index index) {
  const int result = static_cast<int>(index);
  return result == index ? result : -1;
}

// Quantizes a warp's columns of a token and sends them to peers. wanted: a bit for each peer that receives the token.
__device__ void send_columns(const Element* token, const Peers& peers, const Place& place, u32 wanted) {
  const QuantizedColumns part(token, place);
#pragma unroll
  for (int peer = 0; peer < PEERS; ++peer) {
    if (part.column < HIDDEN && (wanted >> peer & 1)) {
      store_16(peers.slots[peer].data + i64{place.token} * HIDDEN + part.column, part.values);
    }
  }
  // The lanes that share a scale each store it to a different peer.
  if (place.block_lane < PEERS && (wanted >> place.block_lane & 1) && place.block_column < HIDDEN) {
    peers.slots[place.block_lane].scale[i64{place.token} * K_BLOCKS + place.k_block] = part.scale;
  }
}

__device__ void send_routing(const Index* index, const Peers& peers, const Sizes& sizes, const Place& place) {
  for (u32 k = place.lane; k < sizes.top_k; k += WARP) {
    const i64 at = i64{place.token} * sizes.top_k + k;
    const int expert = place.token < sizes.tokens ? to_int(index[at]) : -1;
#pragma unroll
    for (const Slots& slots : peers.slots) slots.index[at] = expert;
  }
}

// x (tokens, HIDDEN), rows `row_stride` apart; index (tokens, top_k). In slots past `tokens` all experts become -1,
// and data and scale are not written. On each peer, data and scale of tokens without an expert there are not written
// either. Any grid.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    dispatch(const Element* x, const Index* index, const __grid_constant__ Peers peers,
             const __grid_constant__ Sizes sizes) {
  const Units units;
  const auto owners_of = [&](u32 unit) {
    const u32 token = unit / TOKEN_WARPS;
    return token < sizes.tokens ? owners(index + i64{token} * sizes.top_k, sizes.top_k, sizes.experts) : 0;
  };
  wait_for_previous_kernel();
  allow_next_kernel();
  u32 next = owners_of(units.first);
  for (u32 unit = units.first; unit < sizes.slots * TOKEN_WARPS; unit += units.step) {
    const Place place(unit / TOKEN_WARPS, unit % TOKEN_WARPS);
    const u32 wanted = next;
    next = owners_of(unit + units.step);
    if (wanted) send_columns(x + place.token * sizes.row_stride, peers, place, wanted);
    if (unit % TOKEN_WARPS == 0) send_routing(index, peers, sizes, place);
  }
  meet(peers.meeting);
}
