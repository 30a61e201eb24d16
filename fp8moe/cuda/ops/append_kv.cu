// Quantizes indexer keys, one scale per key, and writes each key to its slot in a paged cache. Values and scales equal,
// bit for bit, those of quantize_1x128.cu on rows of HEAD_DIM columns.
//
// Each lane handles 16 bytes of a key, so a warp handles one key or several. Slots and keys are loaded concurrently.
//
// Compile-time constants: those of quantize.cuh with VECTOR = 1; HEAD_DIM (columns); BLOCK_TOKENS (tokens of a cache
// block); WARPS and TOKENS (of a thread block).
#include "mqa_cache.cuh"
#include "quantize.cuh"

constexpr int LANES = HEAD_DIM / PER_VECTOR;
static_assert(VECTOR && HEAD_DIM <= BLOCK && WARP % LANES == 0 && TOKENS * LANES == WARPS * WARP);

// k (tokens, HEAD_DIM), rows `row_stride` apart; slots (tokens,). A token whose slot is outside [0, num_slots) is
// skipped. Grid: LANES lanes for each token.
extern "C" __global__ void __launch_bounds__(WARPS* WARP)
    append_kv(const Element* k, const int* slots, CacheBlock<BLOCK_TOKENS>* cache, i64 tokens, i64 row_stride,
              i64 num_slots) {
  const i64 token = i64{blockIdx.x} * TOKENS + threadIdx.x / LANES;
  const int column = threadIdx.x % LANES * PER_VECTOR;
  const bool exists = token < tokens;

  wait_for_previous_kernel();
  allow_next_kernel();
  const int slot = exists ? slots[token] : -1;
  const Vector v = Vector::load(k + token * row_stride + column, exists ? PER_VECTOR : 0);
  const Scale scale(Input::largest(warp_reduce<LANES>(v.larger_magnitude(0), Input::larger)));
  if (slot < 0 || slot >= num_slots) return;
  CacheBlock<BLOCK_TOKENS>& block = cache[slot / BLOCK_TOKENS];
  const int place = slot % BLOCK_TOKENS;
  store(block.keys + place * HEAD_DIM + column, Codes(v, scale), PER_VECTOR);
  if (column == 0) block.scales[place] = scale.value;
}
