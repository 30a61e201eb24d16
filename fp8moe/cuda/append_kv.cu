// Quantizes indexer keys, one scale per key, and writes each into its slot of a paged cache. Values and scales are those
// of quantize_1x128.cu on rows of HEAD_DIM columns, bit for bit.
//
// A lane takes 16 bytes of a key, so that a warp has one key or several; slots and keys are loaded side by side.
//
// Compile-time constants: those of quantize.cuh with VECTOR = 1; HEAD_DIM, the columns, 32, 64 or 128.
#include "quantize.cuh"

constexpr int THREADS = 128;
constexpr int BLOCK_TOKENS = 64;
constexpr int LANES = HEAD_DIM / PER_VECTOR;
constexpr int TOKENS = THREADS / LANES;
constexpr int DATA_BYTES = BLOCK_TOKENS * HEAD_DIM;
constexpr int BLOCK_BYTES = DATA_BYTES + BLOCK_TOKENS * 4;
static_assert(VECTOR && HEAD_DIM <= BLOCK && LANES <= WARP && WARP % LANES == 0);

// k (tokens, HEAD_DIM), rows `row_stride` apart; slots (tokens,), a token whose slot is outside [0, num_slots) is left
// out; kv_cache: blocks of 64 * HEAD_DIM values and 64 scales. Grid: a group of LANES lanes for each token.
extern "C" __global__ void __launch_bounds__(THREADS)
    append_kv(const Element* k, const int* slots, u8* kv_cache, i64 tokens, i64 row_stride, i64 num_slots) {
  allow_next_kernel();
  const i64 token = i64{blockIdx.x} * TOKENS + threadIdx.x / LANES;
  const int column = threadIdx.x % LANES * PER_VECTOR;
  const bool some = token < tokens;

  wait_for_previous_kernel();
  const int slot = some ? slots[token] : -1;
  const Vector v = Vector::load(k + token * row_stride + column, some);
  u32 amax = v.larger_magnitude(0);
#pragma unroll
  for (int step = 1; step < LANES; step *= 2) {
    amax = Input::larger(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
  }
  const Scale scale(Input::largest(amax));
  if (slot < 0 || slot >= num_slots) return;
  u8* block = kv_cache + i64{slot / BLOCK_TOKENS} * BLOCK_BYTES;
  const int place = slot % BLOCK_TOKENS;
  store(block + place * HEAD_DIM + column, v, scale, PER_VECTOR);
  if (column == 0) reinterpret_cast<float*>(block + DATA_BYTES)[place] = scale.value;
}
