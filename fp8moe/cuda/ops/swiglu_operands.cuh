// Operands of SwiGLU and its backward, staged in shared memory. Each thread copies its operands there, because
// registers would hold too few loads in flight. Its results replace the operands, rounded to bfloat16, so that a tile
// needs only 32 registers when it is quantized.
//
// Compile-time constants: those of quantize_tile.cuh with INPUT = BFloat16 and VECTOR = 1; SWIGLU_FORM
// (see swiglu.cuh), OPERANDS (2, or 3 with a gradient), BESIDE, SOURCE_BYTES, SHARED_BYTES.
#pragma once

#include "quantize_tile_rows.cuh"
#include "swiglu.cuh"

static_assert(VECTOR && VECTORS == 1);

enum Operand { GATE, UP, GRAD };  // the transposed tile overwrites GATE

// Values of BESIDE, the results in addition to quantized rows: none, quantized columns (only the backward), or the
// values in bfloat16.
enum Beside { NOTHING, COLUMNS, VALUES };

struct OperandVectors {
  Bytes16 of[OPERANDS][SIDE][THREADS];
};
static_assert(sizeof(OperandVectors) == SHARED_BYTES && sizeof(Transposed) <= sizeof(OperandVectors) / OPERANDS);

__device__ Bytes16& slot(int operand, int r) {
  return reinterpret_cast<OperandVectors*>(dynamic_shared)->of[operand][r][threadIdx.x];
}

__device__ Vector vector_in(Operand operand, int r) { return {load_16(&slot(operand, r))}; }

__device__ void put_vector(Operand operand, int r, const u32 (&words)[4]) {
  store_16(&slot(operand, r), {words[0], words[1], words[2], words[3]});
}

// A matrix of operands; its rows correspond to the rows of the results.
struct Rows {
  const Element* data;
  i64 stride;
};

// Starts to load the rows of a tile of one operand. Rows that do not exist are not read; they become zeros.
__device__ void copy_operand(Operand operand, const Rows& rows, const RowTile& tile, const ThreadPosition& p,
                             i64 column) {
  const int count = tile.count - p.row;
  const Element* source = rows.data + (tile.first + p.row) * rows.stride + column + p.column(0);
#pragma unroll
  for (int r = 0; r < SIDE; ++r, source += rows.stride) {
    async_copy_16(shared_address(&slot(operand, r)), source, r < count);
  }
}

// A contiguous bfloat16 matrix that is written if BESIDE == VALUES.
struct ValuesBeside {
  Element* data;
  i64 width;

  // Stores row r of a thread's results.
  __device__ void store(const RowTile& tile, const ThreadPosition& p, i64 column, int r, const u32 (&words)[4]) const {
    if (BESIDE != VALUES || p.row + r >= tile.count) return;
    store_16(data + (tile.first + p.row + r) * width + column + p.column(0), {words[0], words[1], words[2], words[3]});
  }
};

// Quantizes the values that have replaced `operand`, and stores them: along rows, and with BESIDE == COLUMNS along
// columns as well. `first_column`: the tile's first column in the results. Calls meanwhile() when the values are in
// registers.
template <bool ROWS = true, bool BLOCKS = false, typename Meanwhile>
__device__ void quantize(Operand operand, const Results& results, Shared& s, const ThreadPosition& p, i64 first_column,
                         const Meanwhile& meanwhile) {
  Values values;
#pragma unroll
  for (int r = 0; r < SIDE; ++r) values[r][0] = vector_in(operand, r);
  if constexpr (BESIDE == COLUMNS) {
    quantize_tile<ROWS, BLOCKS>(results, s, p, first_column, values, meanwhile);
  } else {
    quantize_rows(results, s.tile, p, first_column, values, meanwhile);
  }
}
