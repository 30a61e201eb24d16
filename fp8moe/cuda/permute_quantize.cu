// Quantizes every token once, one scale per 128 columns, and writes it to each row that one of its assignments has in
// the sorted order. Values and scales are those of quantize_1x128.cu, bit for bit.
//
// A warp takes WARP_COLUMNS columns of a token, 8 lanes for each block of 128. Loads and stores cover whole 32-byte
// sectors: a lane loads 16 bytes at a time with its 7 neighbours, and lanes swap what they have quantized until each
// has 16 neighbouring columns.
//
// Compile-time constants: those of quantize.cuh with VECTOR = 1; WARPS (of a thread block), WARP_COLUMNS; HIDDEN, the
// columns, a multiple of 16; SIZES_BYTES.
#include "quantize.cuh"

constexpr int BLOCK_LANES = WARP * BLOCK / WARP_COLUMNS;
constexpr u32 TOKEN_WARPS = ceil_div(HIDDEN, WARP_COLUMNS);
constexpr int STEP = BLOCK_LANES * PER_VECTOR;
constexpr int VECTORS = BLOCK / STEP;
static_assert(VECTOR && BLOCK_LANES == 8 && HIDDEN % 16 == 0);

struct Sizes {
  u32 tokens, top_k, num_rows;
  u32 read_ahead;  // load a token before it is known to have a row: quicker where few warps run
  i64 row_stride, scale_pitch;
};
static_assert(sizeof(Sizes) == SIZES_BYTES);

// Two lanes, `distance` apart, exchange two words each: the lower lane returns the first two words of both, the upper
// one the last two.
__device__ Bytes16 swap_halves(const Bytes16& v, u32 lane, int distance) {
  const bool upper = lane & distance;
  const auto& w = v.words;
  const u32 a = __shfl_xor_sync(FULL_WARP, upper ? w[0] : w[2], distance);
  const u32 b = __shfl_xor_sync(FULL_WARP, upper ? w[1] : w[3], distance);
  return upper ? Bytes16{a, b, w[2], w[3]} : Bytes16{w[0], w[1], a, b};
}

// From the 16 values of a lane, VECTORS times PER_VECTOR, to those of 16 neighbouring columns, which lie in vector
// lane % VECTORS.
__device__ Bytes16 neighbours(const Bytes16& v, u32 lane) {
  if constexpr (VECTORS == 2) return swap_halves(v, lane, 1);
  const bool upper = lane & 1;
  const auto& w = v.words;
  const u32 a = __shfl_xor_sync(FULL_WARP, upper ? w[0] : w[1], 1);
  const u32 b = __shfl_xor_sync(FULL_WARP, upper ? w[2] : w[3], 1);
  return swap_halves(upper ? Bytes16{a, w[1], b, w[3]} : Bytes16{w[0], a, w[2], b}, lane, 2);
}

// x (tokens, HIDDEN), rows `row_stride` apart; rows (tokens, top_k), those outside [0, num_rows) are none;
// data (num_rows, HIDDEN); scale (num_rows, ceil(HIDDEN / 128)), columns `scale_pitch` apart.
// read_ahead must be set where top_k > 32: without it, a token whose first 32 assignments have no row is left out.
// Grid: a warp for each WARP_COLUMNS columns of each token.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    permute_quantize(const Element* x, const int* rows, u8* data, float* scale, const __grid_constant__ Sizes sizes) {
  const u32 unit = blockIdx.x * WARPS + threadIdx.x / WARP;
  const u32 lane = threadIdx.x % WARP;
  const u32 token = unit / TOKEN_WARPS;
  const u32 k_block = unit % TOKEN_WARPS * (WARP_COLUMNS / BLOCK) + lane / BLOCK_LANES;
  const int block_column = static_cast<int>(k_block) * BLOCK;
  const u32 block_lane = lane % BLOCK_LANES;

  wait_for_previous_kernel();
  allow_next_kernel();
  if (token >= sizes.tokens) return;

  // The rows of 32 assignments, one a lane; -1 for none.
  const auto rows_from = [&](u32 k) {
    const int row = k + lane < sizes.top_k ? rows[i64{token} * sizes.top_k + k + lane] : -1;
    return static_cast<u32>(row) < sizes.num_rows ? row : -1;
  };
  int lane_row = rows_from(0);
  if (!sizes.read_ahead && !__any_sync(FULL_WARP, lane_row >= 0)) return;

  const int column = block_column + block_lane * PER_VECTOR;
  const Element* source = x + token * sizes.row_stride + column;
  Vector v[VECTORS];
#pragma unroll
  for (int i = 0; i < VECTORS; ++i) v[i] = Vector::load(source + i * STEP, HIDDEN - column - i * STEP);
  u32 amax = 0;
#pragma unroll
  for (const Vector& vector : v) amax = vector.larger_magnitude(amax);
  const Scale block_scale(Input::largest(warp_reduce<BLOCK_LANES>(amax, Input::larger)));
  Bytes16 quantized;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Vector& vector = v[i * VECTORS / 4];
    const int at = i * 4 % PER_VECTOR;
    quantized.words[i] = to_e4m3(block_scale.quotient(vector[at]), block_scale.quotient(vector[at + 1]),
                                 block_scale.quotient(vector[at + 2]), block_scale.quotient(vector[at + 3]));
  }
  const Bytes16 values = neighbours(quantized, lane);
  const u32 vector = lane % VECTORS;
  const int target_column = block_column + vector * STEP + (block_lane - vector) * PER_VECTOR;

  for (u32 k = 0;;) {
    u32 used = __ballot_sync(FULL_WARP, lane_row >= 0);
    // Each of the 8 lanes that share a scale writes it to another row.
    for (u32 i = 0; i < min(sizes.top_k - k, WARP); i += BLOCK_LANES) {
      const int row = __shfl_sync(FULL_WARP, lane_row, i + block_lane);
      if (row >= 0 && block_column < HIDDEN) scale[k_block * sizes.scale_pitch + row] = block_scale.value;
    }
    while (used) {
      const int row = __shfl_sync(FULL_WARP, lane_row, __ffs(used) - 1);
      used &= used - 1;
      if (target_column < HIDDEN) store_16(data + i64{row} * HIDDEN + target_column, values);
    }
    k += WARP;
    if (k >= sizes.top_k) return;
    lane_row = rows_from(k);
  }
}
