// Quantizes a matrix along its rows and along its columns in one pass over it, or along its columns alone; see
// quantize_tile.cuh.
//
// Compile-time constants: those of quantize_tile.cuh; BY_ROWS (0: along columns alone), BLOCK_SCALES (columns have one
// scale per 128x128 block), SOURCE_BYTES, SHARED_BYTES.
#include "quantize_tile.cuh"

struct Source {
  const Element* x;   // (num_tokens, width), rows `row_stride` apart
  const int* tokens;  // (num_rows), the row of x for each row; null: row r uses x[r]
  i64 row_stride;
  u32 num_tokens;
};

// Thread blocks per SM: as many as registers and shared memory allow.
constexpr int RESIDENT = VECTOR && PER_WORD == 2 ? 4 : 2;

// The values of the next tile, each where its thread alone writes and reads it.
struct Slots {
  Bytes16 of[SIDE][VECTORS][THREADS];
};
static_assert(sizeof(Source) == SOURCE_BYTES && sizeof(Transposed) + sizeof(Slots) == SHARED_BYTES);

__device__ Bytes16& slot(int r, int i) {
  return reinterpret_cast<Slots*>(&transposed_tile() + 1)->of[r][i][threadIdx.x];
}

// Where the rows of a tile begin in x, in elements; negative for rows that do not exist, which are not read.
struct alignas(16) Starts {
  i64 of[BLOCK];
};

// Finds the rows that this warp reads.
__device__ void find_starts(const Source& source, const RowTile& tile, const ThreadPosition& p, Starts& starts) {
  const int row = p.row + p.lane % SIDE;
  int token = -1;
  if (row < tile.count) token = source.tokens ? source.tokens[tile.first + row] : tile.first + row;
  starts.of[row] = static_cast<u32>(token) < source.num_tokens ? token * source.row_stride : -PER_VECTOR;
  __syncwarp();
}

// Starts to load a thread's values of a column tile. Rows that do not exist become zeros.
__device__ void copy_rows(const Source& source, const Starts& starts, const ThreadPosition& p, u32 column_tile,
                          i64 width) {
  const i64 first_column = i64{column_tile} * BLOCK;
  const int columns = inside(first_column, width, BLOCK) - p.column(0);
  const Element* first = source.x + first_column + p.column(0);
  i64 begin[SIDE];
#pragma unroll
  for (int r = 0; r < SIDE; ++r) begin[r] = starts.of[p.row + r];
#pragma unroll
  for (int r = 0; r < SIDE; ++r) {
    const Element* row = first + begin[r];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const int count = begin[r] >= 0 ? columns - i * STEP : 0;
      if constexpr (VECTOR) {
        async_copy_16(shared_address(&slot(r, i)), row + i * STEP, count > 0);
      } else {
        store_16(&slot(r, i), Vector::load(row + i * STEP, count));
      }
    }
  }
  async_commit();
}

// Grid: as for find_strip. A tile is loaded while the one before it is quantized.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    quantize_transpose(const __grid_constant__ Results results, const __grid_constant__ Source source) {
  __shared__ Shared s;
  __shared__ Starts starts;
  wait_for_previous_kernel();
  allow_next_kernel();
  const Strip& strip = find_strip(results, s.tile);
  if (s.tile.count == 0) return;
  const ThreadPosition p;
  find_starts(source, s.tile, p, starts);
  copy_rows(source, starts, p, strip.begin, results.width);
#pragma unroll 1
  for (u32 tile = strip.begin; tile < strip.end; ++tile) {
    Values values;
    async_wait<0>();
#pragma unroll
    for (int r = 0; r < SIDE; ++r) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) values[r][i] = {load_16(&slot(r, i))};
    }
    quantize_tile<BY_ROWS, BLOCK_SCALES>(results, s, p, i64{tile} * BLOCK, values, [&] {
      if (tile + 1 < strip.end) copy_rows(source, starts, p, tile + 1, results.width);
    });
  }
}
