// Quantizes the tokens of this GPU, one scale per 128 columns, and stores each to the memory of the peers that have one
// of its experts; its routing goes to all peers. Values and scales have the bits of quantize_1x128.cu.
//
// A warp takes WARP_COLUMNS columns of a token and stores 512 bytes to each peer in one instruction: whole lines of 128
// bytes, which is best for NVLink. It then takes further tokens, whose peers it has found meanwhile.
//
// Compile-time constants: those of quantize_token.cuh, peers.cuh and owners.cuh; SIZES_BYTES.
#include "owners.cuh"
#include "peers.cuh"
#include "quantize_token.cuh"

constexpr int K_BLOCKS = ceil_div(HIDDEN, BLOCK);
static_assert(PEERS <= BLOCK_LANES);

// A peer's buffers for the tokens of this GPU: data (slots, HIDDEN), scale (slots, K_BLOCKS), index (slots, top_k).
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
  u32 tokens, slots, top_k, experts;  // of each peer
  i64 row_stride;
};
static_assert(sizeof(Sizes) == SIZES_BYTES);

// An index that does not fit int32 is no expert.
__device__ int to_int(Index index) {
  const int result = static_cast<int>(index);
  return result == index ? result : -1;
}

// wanted: a bit for each peer that the token goes to.
__device__ void send_columns(const Element* token, const Peers& peers, const Place& place, u32 wanted) {
  const QuantizedColumns part(token, place);
#pragma unroll
  for (int peer = 0; peer < PEERS; ++peer) {
    if (part.column < HIDDEN && (wanted >> peer & 1)) {
      store_16(peers.slots[peer].data + i64{place.token} * HIDDEN + part.column, part.values);
    }
  }
  // Each of the lanes that share a scale stores it to another peer.
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

// x (tokens, HIDDEN), rows `row_stride` apart; index (tokens, top_k). Slots past `tokens` get -1 for experts. These
// slots, and on each peer the slots of tokens without an expert there, keep their data and scale. Any grid.
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
