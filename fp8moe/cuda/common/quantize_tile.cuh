// Quantizes a tile of 128 rows and 128 columns twice: along its rows, bit for bit like quantize_1x128.cu, and along its
// columns, stored transposed; or, where ROWS is false, along its columns alone. In the transposed result each group of
// rows is padded with zeros to a multiple of 128. BLOCKS: the transposed result has one scale for the tile, from its
// finite values; the others become NaN.
//
// A thread block of 8 warps keeps the tile in registers; a thread holds 8 rows of 8 columns. Half a warp covers all 128
// columns of its rows, so loads and stores cover whole 32-byte sectors. Shared memory has two uses: to combine the
// largest magnitudes, from which each thread computes the scale of one row or column, and to transpose the bytes.
//
// Compile-time constants: those of quantize.cuh with UE8M0 = 0 and of row_tiles.cuh.
#pragma once

#include "quantize.cuh"
#include "row_tiles.cuh"

constexpr int ROW_LANES = 16;               // lanes that share the same 8 rows
constexpr int SIDE = BLOCK / ROW_LANES;     // rows, and columns, of a thread
constexpr int VECTORS = SIDE / PER_VECTOR;  // vectors of a thread in one row
constexpr int STEP = ROW_LANES * PER_VECTOR;
constexpr int HALF = SIDE / 2;         // rows that are quantized or loaded together
constexpr bool PAIRS = PER_WORD == 2;  // one word holds the magnitudes of two columns
constexpr int CHUNK = 16;              // bytes of a transposed row that one thread moves
constexpr int CHUNKS = BLOCK / CHUNK;
static_assert(!UE8M0 && THREADS * SIDE * SIDE == BLOCK * BLOCK);

// The values of one thread of a tile.
using Values = Vector[SIDE][VECTORS];

// The tile transposed, as bytes, in dynamic shared memory.
struct Transposed {
  Bytes16 chunks[BLOCK * CHUNKS];
};
extern __shared__ uint4 dynamic_shared[];
__device__ Transposed& transposed_tile() { return *reinterpret_cast<Transposed*>(dynamic_shared); }

struct Shared {
  alignas(16) u32 column_amax[WARPS][PAIRS ? BLOCK / 2 : BLOCK];
  u32 row_amax[BLOCK];
  alignas(16) u32 block_amax[WARPS];  // raised, see input.cuh
  Divisor<> columns[BLOCK];           // indexed by column_slot()
  Divisor<> rows[BLOCK];
  RowTile tile;
};

// The distance from a thread's first column to its column c.
__device__ constexpr int offset(int c) { return c / PER_VECTOR * STEP + c % PER_VECTOR; }

// The place of a thread in its tile.
struct ThreadPosition {
  u32 lane, warp, column_group;
  int row;

  __device__ ThreadPosition()
      : lane(threadIdx.x % WARP),
        warp(threadIdx.x / WARP),
        column_group(lane % ROW_LANES),
        row((threadIdx.x / ROW_LANES) * SIDE) {}

  __device__ int column(int c) const { return column_group * PER_VECTOR + offset(c); }
};

// ---- reductions and scales ----

// Reduces a thread's 8 magnitudes, one for each of its rows, to the largest over all lanes that share the rows. Of
// these 16 lanes, lane i returns the result of row i / 2.
__device__ u32 largest_of_rows(u32 (&amax)[SIDE], u32 lane) {
#pragma unroll
  for (int half = SIDE / 2; half > 0; half /= 2) {
    const bool upper = lane & 2 * half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const u32 other = __shfl_xor_sync(FULL_WARP, upper ? amax[i] : amax[i + half], 2 * half);
      amax[i] = max(upper ? amax[i + half] : amax[i], other);
    }
  }
  return max(amax[0], __shfl_xor_sync(FULL_WARP, amax[0], 1));
}

// The index of a column's divisor in Shared::columns. When all threads of a row read their column c, the slots are
// contiguous, so they are in different banks.
__device__ int column_slot(int column) {
  const int c = column / STEP * PER_VECTOR + column % PER_VECTOR;
  return c * ROW_LANES + column / PER_VECTOR % ROW_LANES;
}

// Finds the maxima of rows and columns in one pass: each magnitude is used for both at once, and is then no longer held
// in a register.
template <bool ROWS, bool BLOCKS>
__device__ void find_amax(Shared& s, const ThreadPosition& p, const Values& values) {
  constexpr int WORDS = BLOCKS ? 1 : PAIRS ? SIDE / 2 : SIDE;
  u32 rows[SIDE], columns[WORDS] = {};
#pragma unroll
  for (int r = 0; r < SIDE; ++r) {
    u32 row = 0;
#pragma unroll
    for (int i = 0; i < SIDE / PER_WORD; ++i) {
      const u32 word = Input::magnitude(values[r][i / 4].words[i % 4]);
      if constexpr (ROWS) row = Input::larger(row, word);
      if constexpr (BLOCKS) {
        columns[0] = Input::larger_raised(columns[0], Input::raised(word));
      } else {
        columns[i] = Input::larger(columns[i], word);
      }
    }
    rows[r] = Input::largest(row);
  }
  if constexpr (ROWS) {
    const u32 row = largest_of_rows(rows, p.lane);
    if (p.lane % 2 == 0) s.row_amax[p.row + p.column_group / 2] = row;
  }
  if constexpr (BLOCKS) {
    const u32 block = warp_reduce(columns[0], Input::larger_raised);
    if (p.lane == 0) s.block_amax[p.warp] = block;
    return;
  }
#pragma unroll
  for (u32& word : columns) word = warp_reduce<WARP / ROW_LANES, ROW_LANES>(word, Input::larger);
  if (p.lane < ROW_LANES) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      store_16(&s.column_amax[p.warp][PAIRS ? p.column(0) / 2 : p.column(i)],
               {columns[i], columns[i + 1], columns[i + 2], columns[i + 3]});
    }
  }
}

// Computes the scale of the whole tile, in every thread, and stores it. Returns the divisor of its values.
__device__ Divisor<> make_block_scale(const Results& results, const Shared& s, i64 first_column) {
  u32 word = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) word = Input::larger_raised(word, s.block_amax[w]);
  const BlockScale<> scale(Input::value(Input::largest_lowered(word)));
  if (threadIdx.x == 0) {
    results.column_scale[s.tile.index * results.column_scale_pitch + first_column / BLOCK] = scale.value;
  }
  return scale.divisor;
}

// Computes and stores the scales of columns and rows: half of the threads handle one column each, the other half one
// row each.
template <bool ROWS, bool COLUMNS>
__device__ void make_scales(const Results& results, Shared& s, i64 first_column) {
  const int t = threadIdx.x % BLOCK;
  const bool is_column = threadIdx.x < BLOCK;
  if (is_column ? !COLUMNS : !ROWS) return;
  float amax;
  if (is_column) {
    u32 word = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) word = Input::larger(word, s.column_amax[w][PAIRS ? t / 2 : t]);
    amax = Input::value(Input::bits(word, PAIRS ? t % 2 : 0));
  } else {
    amax = Input::value(s.row_amax[t]);
  }
  const BlockScale<> scale(amax);
  (is_column ? s.columns[column_slot(t)] : s.rows[t]) = scale.divisor;
  if (is_column) {
    if (first_column + t < results.width) {
      results.column_scale[s.tile.index * results.column_scale_pitch + first_column + t] = scale.value;
    }
  } else if (t < s.tile.count) {
    results.row_scale[first_column / BLOCK * results.row_scale_pitch + s.tile.first + t] = scale.value;
  }
}

// ---- values ----

// Stores the first `count` of a thread's 8 quantized elements of one row; `count` is at least 1.
__device__ void store_row(u8* target, const u32 (&words)[2], int count) {
  if constexpr (VECTOR && VECTORS == 1) {
    *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
  } else if constexpr (VECTOR) {
    *reinterpret_cast<u32*>(target) = words[0];
    if (count > STEP) *reinterpret_cast<u32*>(target + STEP) = words[1];
  } else {
#pragma unroll
    for (int c = 0; c < SIDE; ++c) {
      if (offset(c) < count) target[offset(c)] = static_cast<u8>(words[c / 4] >> (c % 4 * 8));
    }
  }
}

// Quantizes each value by its row's and by its column's scale, two rows and two columns at a time. Values by row go to
// global memory. Values by column go to shared memory, in pieces of 8 bytes of one column. To keep a warp's writes in
// different banks, the pieces are permuted by column group, and the two halves of every second piece are swapped.
// block: the divisor of values by column, with BLOCKS.
template <bool ROWS, bool BLOCKS>
__device__ void quantize_values(const Results& results, const Shared& s, const ThreadPosition& p, i64 first_column,
                                const Values& values, Divisor<> block) {
  const auto value = [&](int r, int c) { return values[r][c / PER_VECTOR][c % PER_VECTOR]; };
  const int group = p.row / SIDE, swapped = group % 2;
  u8* const pieces = reinterpret_cast<u8*>(transposed_tile().chunks) + p.column(0) * BLOCK;
  u32* const piece = reinterpret_cast<u32*>(pieces + (group ^ p.column_group) * SIDE);
#pragma unroll
  for (int first = 0; first < SIDE; first += HALF) {
    Divisor<> divisors[HALF];
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      if constexpr (ROWS) divisors[i] = s.rows[p.row + first + i];
    }
    u32 row_words[HALF][2] = {};
#pragma unroll
    for (int c = 0; c < SIDE; c += 2) {
      const Divisor<> left = BLOCKS ? block : s.columns[c * ROW_LANES + p.column_group];
      const Divisor<> right = BLOCKS ? block : s.columns[(c + 1) * ROW_LANES + p.column_group];
      u32 left_word = 0, right_word = 0;
#pragma unroll
      for (int i = 0; i < HALF; i += 2) {
        const int r = first + i;
        const float upper_left = value(r, c), upper_right = value(r, c + 1);
        const float lower_left = value(r + 1, c), lower_right = value(r + 1, c + 1);
        if constexpr (ROWS) {
          row_words[i][c / 4] |= divisors[i].quantize(upper_left, upper_right) << (c % 4 * 8);
          row_words[i + 1][c / 4] |= divisors[i + 1].quantize(lower_left, lower_right) << (c % 4 * 8);
        }
        left_word |= left.quantize(upper_left, lower_left) << (i * 8);
        right_word |= right.quantize(upper_right, lower_right) << (i * 8);
      }
      u32* const column = piece + offset(c) * BLOCK / 4 + (first / HALF ^ swapped);
      column[0] = left_word;
      column[BLOCK / 4] = right_word;
    }
    if constexpr (ROWS) {
      const int row = p.row + first, columns = inside(first_column, results.width, BLOCK) - p.column(0);
      u8* target = results.rows + i64{s.tile.first + row} * results.width + first_column + p.column(0);
#pragma unroll
      for (int i = 0; i < HALF; ++i, target += results.width) {
        if (columns > 0 && row + i < s.tile.count) store_row(target, row_words[i], columns);
      }
    }
    __syncwarp();  // keeps the compiler from merging the two passes, which would need more registers
  }
}

__device__ void store_columns(const Results& results, u32 row_tile, i64 first_column) {
  constexpr int STEPS = THREADS / CHUNKS;  // columns that are stored together
  const i64 pitch = i64{results.row_tiles} * BLOCK;
  const int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
  const int columns = inside(first_column, results.width, BLOCK);
  u8* target = results.columns + (first_column + first) * pitch + i64{row_tile} * BLOCK + chunk * CHUNK;
#pragma unroll
  for (int column = first; column < BLOCK; column += STEPS, target += STEPS * pitch) {
    const int group = column / PER_VECTOR % ROW_LANES;
    const Bytes16 v = load_16(&transposed_tile().chunks[column * CHUNKS + (chunk ^ group / 2)]);
    const auto& w = v.words;
    const bool odd = group % 2;
    const Bytes16 sorted = {odd ? w[2] : w[0], odd ? w[3] : w[1], odd ? w[1] : w[3], odd ? w[0] : w[2]};
    if (column < columns) store_16(target, sorted);
  }
}

// Quantizes a tile and stores the results. `first_column`: the tile's first column in the matrix. Calls meanwhile()
// when the largest magnitudes have been found.
template <bool ROWS, bool BLOCKS, typename Meanwhile>
__device__ void quantize_tile(const Results& results, Shared& s, const ThreadPosition& p, i64 first_column,
                              const Values& values, const Meanwhile& meanwhile) {
  find_amax<ROWS, BLOCKS>(s, p, values);
  meanwhile();
  __syncthreads();
  Divisor<> block;
  if constexpr (BLOCKS) block = make_block_scale(results, s, first_column);
  if constexpr (ROWS || !BLOCKS) {
    make_scales<ROWS, !BLOCKS>(results, s, first_column);
    __syncthreads();
  }
  quantize_values<ROWS, BLOCKS>(results, s, p, first_column, values, block);
  __syncthreads();
  store_columns(results, s.tile.index, first_column);
}
