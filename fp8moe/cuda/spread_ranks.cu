// The reverse of pick_ranks.cu: the ranks of every expert for each token, sums over the rows that the token has there.
//
// A thread makes 8 of them. Compile-time constants: those of pick_ranks.cu.
#include "vector.cuh"

constexpr int CHUNKS = RANK / 8;
static_assert(RANK % 8 == 0);

// picked (rows, RANK) bfloat16; weights (tokens, TOP_K) of the rows, or none; index, rows: as for pick_ranks.cu;
// ranks (tokens, EXPERTS * RANK), written. Grid: all tokens' chunks.
extern "C" __global__ void __launch_bounds__(THREADS)
    spread_ranks(const u16* picked, const float* weights, const int* index, const int* rows, u16* ranks, u32 tokens) {
  const i64 i = i64{blockIdx.x} * THREADS + threadIdx.x, token = i / (EXPERTS * CHUNKS);
  if (token >= tokens) return;
  const int expert = static_cast<int>(i / CHUNKS % EXPERTS), chunk = static_cast<int>(i % CHUNKS) * 8;
  float sums[8] = {};
#pragma unroll 4
  for (i64 assignment = token * TOP_K; assignment < (token + 1) * TOP_K; ++assignment) {
    if (index[assignment] != expert) continue;
    const i64 row = rows[assignment];
    if (row < 0) continue;
    const float weight = weights ? weights[assignment] : 1.f;
    const Bytes16 values = load_16(picked + row * RANK + chunk);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      sums[c] += weight * bfloat16_to_float(values.words[c / 2] >> (c % 2 * 16) & 0xFFFF);
    }
  }
  store_16(ranks + i * 8, {pack_bfloat16(sums[0], sums[1]), pack_bfloat16(sums[2], sums[3]),
                           pack_bfloat16(sums[4], sums[5]), pack_bfloat16(sums[6], sums[7])});
}
