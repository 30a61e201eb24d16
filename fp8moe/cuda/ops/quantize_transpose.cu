// Quantizes a matrix along its rows and along its columns in one pass over it, or along its columns alone; see
// quantize_tile.cuh.
//
// Compile-time constants: those of quantize_tile.cuh; BY_ROWS (0: along columns alone), SOURCE_BYTES, SHARED_BYTES.
#include "quantize_tile.cuh"

struct Source {
  const Element* x;      // (num_tokens, width), rows `row_stride` apart
  const int* tokens;     // (num_rows), the row of x for each row; null: row r uses x[r]
  const float* weights;  // if WEIGHTED: (num_rows)
  i64 row_stride;
  u32 num_tokens;
};
static_assert(sizeof(Source) == SOURCE_BYTES && sizeof(Transposed) == SHARED_BYTES);

// Thread blocks per SM: as many as registers allow.
constexpr int RESIDENT = VECTOR && PER_WORD == 2 ? WEIGHTED ? 3 : 4 : 2;

// Loads a thread's values of a tile, and the weights. Rows that do not exist, and their weights, are zero.
__device__ void load_rows(const Source& source, Shared& s, const ThreadPosition& p, i64 first_column, i64 width,
                          Values& values) {
  const int lane_row = p.row + p.lane % SIDE;
  int lane_token = -1;
  float weight = 0.f;
  if (lane_row < s.tile.count) {
    const int row = s.tile.first + lane_row;
    lane_token = source.tokens ? source.tokens[row] : row;
    if (static_cast<u32>(lane_token) >= source.num_tokens) lane_token = -1;
    if (WEIGHTED && lane_token >= 0) weight = source.weights[row];
  }
  if (WEIGHTED) {
    if (p.column_group < SIDE) s.weights[lane_row] = weight;
    __syncwarp();
  }
  const int columns = inside(first_column, width, BLOCK) - p.column(0);
  const Element* first = source.x + first_column + p.column(0);
#pragma unroll
  for (int r = 0; r < SIDE; ++r) {
    const int token = __shfl_sync(FULL_WARP, lane_token, r, ROW_LANES);
    const int count = token >= 0 ? columns : 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      values[r][i] = Vector::load(first + token * source.row_stride + i * STEP, count - i * STEP);
    }
  }
}

// Grid: as for find_tile.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    quantize_transpose(const __grid_constant__ Results results, const __grid_constant__ Source source) {
  __shared__ Shared s;
  wait_for_previous_kernel();
  allow_next_kernel();
  const i64 column = find_tile(results, s.tile);
  if (s.tile.count == 0) return;
  const ThreadPosition p;
  Values values;
  load_rows(source, s, p, column, results.width, values);
  quantize_tile<BY_ROWS>(results, s, p, column, values);
}
