// For each row of the sorted order, finds the token of its assignment and the routing weight, in float32.
//
// Compile-time constants: those of input.cuh, for the weights; THREADS (of a thread block).
#include "input.cuh"

// rows, weights (count,): of each assignment; rows outside [0, num_rows) mean none. end: the number of rows that have
// an assignment; those behind it get token -1 and weight 0. tokens, row_weights (num_rows,). Grid: a thread for each
// assignment and each row.
extern "C" __global__ void __launch_bounds__(THREADS)
    assigned_rows(const int* rows, const int* end, const Element* weights, int* tokens, float* row_weights, u32 count,
                  u32 top_k, u32 num_rows) {
  const u32 i = blockIdx.x * THREADS + threadIdx.x;
  wait_for_previous_kernel();
  allow_next_kernel();
  if (i < num_rows && static_cast<int>(i) >= *end) {
    tokens[i] = -1;
    row_weights[i] = 0.0f;
  }
  if (i >= count) return;
  const u32 row = rows[i];
  if (row >= num_rows) return;
  tokens[row] = i / top_k;
  row_weights[row] = Input::value(weights[i]);
}
