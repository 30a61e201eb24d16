// For each row of an expert the ranks that its token has of this expert.
//
// A thread copies 8 of them. Compile-time constants: EXPERTS, TOP_K, RANK (a multiple of 8), THREADS.
#include "vector.cuh"

constexpr int CHUNKS = RANK / 8;
static_assert(RANK % 8 == 0);

// ranks (tokens, EXPERTS * RANK) bfloat16; index, rows: expert and row of each assignment (tokens, TOP_K), where the
// row is negative of any expert and none; picked (rows, RANK), written. Grid: all assignments' chunks.
extern "C" __global__ void __launch_bounds__(THREADS)
    pick_ranks(const u16* ranks, const int* index, const int* rows, u16* picked, u32 tokens) {
  const i64 i = i64{blockIdx.x} * THREADS + threadIdx.x, assignment = i / CHUNKS, token = assignment / TOP_K;
  if (token >= tokens) return;
  const i64 row = rows[assignment];
  if (row < 0) return;
  const int chunk = static_cast<int>(i % CHUNKS) * 8;
  store_16(picked + row * RANK + chunk, load_16(ranks + (token * EXPERTS + index[assignment]) * RANK + chunk));
}
