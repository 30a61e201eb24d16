// Quantizes a tile of 128 rows and 128 columns along its rows and along its columns: rows with the bits of
// quantize_1x128.cu, and the transpose in which each group of rows is padded with zeros to a multiple of 128.
//
// A thread block of 8 warps has the tile in registers, a thread 8 rows of 8 columns. Half a warp covers the 128 columns
// of its rows, so that loads and stores cover whole 32-byte sectors. The largest magnitudes meet in shared memory,
// where a thread makes the scale of one row or one column, and so do the transposed bytes.
//
// Compile-time constants: those of quantize.cuh with UE8M0 = 0 and of row_tiles.cuh; WEIGHTED (the transposed rows are
// multiplied by a weight each).
#pragma once

#include "quantize.cuh"
#include "row_tiles.cuh"

constexpr int ROW_LANES = 16;               // lanes that share 8 rows
constexpr int SIDE = BLOCK / ROW_LANES;     // rows and columns of a thread
constexpr int VECTORS = SIDE / PER_VECTOR;  // of a thread in a row
constexpr int STEP = ROW_LANES * PER_VECTOR;
constexpr int HALF = SIDE / 2;                      // rows that are quantized or loaded together
constexpr bool PAIRS = PER_WORD == 2 && !WEIGHTED;  // magnitudes of two columns in a word
constexpr int CHUNK = 16;                           // bytes of a transposed row that move as one
constexpr int CHUNKS = BLOCK / CHUNK;
static_assert(!UE8M0 && THREADS * SIDE * SIDE == BLOCK * BLOCK);

// A thread's part of a tile.
using Values = Vector[SIDE][VECTORS];

// The transposed bytes of a tile, in dynamic shared memory.
struct Transposed {
  Bytes16 chunks[BLOCK * CHUNKS];
};
extern __shared__ uint4 dynamic_shared[];
__device__ Transposed& transposed_tile() { return *reinterpret_cast<Transposed*>(dynamic_shared); }

struct Shared {
  alignas(16) u32 column_amax[WARPS][PAIRS ? BLOCK / 2 : BLOCK];
  u32 row_amax[BLOCK];
  Divisor<> columns[BLOCK];  // see column_slot
  Divisor<> rows[BLOCK];
  float weights[BLOCK];
  RowTile tile;
};

// Offset of a thread's column c from its first column.
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

// Reduces 8 magnitudes, one for each row of a thread, to the largest over the lanes that share the rows. Lane i of
// these lanes returns the result of row i / 2.
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

// The slot of a column's divisor: column c of all threads of a row is contiguous, in different banks.
__device__ int column_slot(int column) {
  const int c = column / STEP * PER_VECTOR + column % PER_VECTOR;
  return c * ROW_LANES + column / PER_VECTOR % ROW_LANES;
}

// Maximum of the magnitudes of columns.
__device__ u32 larger(u32 a, u32 b) { return WEIGHTED ? max(a, b) : Input::larger(a, b); }

// Finds the maxima of rows and columns together: each magnitude is used twice at once and needs no register later.
__device__ void find_amax(Shared& s, const ThreadPosition& p, const Values& values) {
  constexpr int WORDS = PAIRS ? SIDE / 2 : SIDE;
  u32 rows[SIDE], columns[WORDS] = {};
#pragma unroll
  for (int r = 0; r < SIDE; ++r) {
    u32 row = 0;
#pragma unroll
    for (int i = 0; i < SIDE / PER_WORD; ++i) {
      const u32 word = Input::magnitude(values[r][i / 4].words[i % 4]);
      row = Input::larger(row, word);
      if constexpr (WEIGHTED) {
#pragma unroll
        for (int j = 0; j < PER_WORD; ++j) {
          const float weighted = __fmul_rn(Input::value(Input::bits(word, j)), fabsf(s.weights[p.row + r]));
          columns[i * PER_WORD + j] = max(columns[i * PER_WORD + j], __float_as_uint(weighted));
        }
      } else {
        columns[i] = Input::larger(columns[i], word);
      }
    }
    rows[r] = Input::largest(row);
  }
  const u32 row = largest_of_rows(rows, p.lane);
  if (p.lane % 2 == 0) s.row_amax[p.row + p.column_group / 2] = row;
#pragma unroll
  for (u32& word : columns) word = warp_reduce<WARP / ROW_LANES, ROW_LANES>(word, larger);
  if (p.lane < ROW_LANES) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      store_16(&s.column_amax[p.warp][PAIRS ? p.column(0) / 2 : p.column(i)],
               {columns[i], columns[i + 1], columns[i + 2], columns[i + 3]});
    }
  }
}

// Half of the threads take a column each, the others a row.
__device__ void make_scales(const Results& results, Shared& s, i64 first_column) {
  const int t = threadIdx.x % BLOCK;
  const bool is_column = threadIdx.x < BLOCK;
  float amax;
  if (is_column) {
    u32 word = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) word = larger(word, s.column_amax[w][PAIRS ? t / 2 : t]);
    amax = WEIGHTED ? __uint_as_float(word) : Input::value(Input::bits(word, PAIRS ? t % 2 : 0));
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

// The first `count` of the 8 quantized elements of a row of a thread; at least one.
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

// Computes both quotients of each value, two rows and two columns at a time. Rows go to memory, columns to shared
// memory, 8 bytes of each of a thread's columns. These pieces are permuted by the column group, and the halves of every
// second piece are swapped, so that the writes of a warp fall in different banks.
__device__ void quantize_values(const Results& results, const Shared& s, const ThreadPosition& p, i64 first_column,
                                const Values& values) {
  const auto value = [&](int r, int c) { return values[r][c / PER_VECTOR][c % PER_VECTOR]; };
  const int group = p.row / SIDE, swapped = group % 2;
  u8* const pieces = reinterpret_cast<u8*>(transposed_tile().chunks) + p.column(0) * BLOCK;
  u32* const piece = reinterpret_cast<u32*>(pieces + (group ^ p.column_group) * SIDE);
  const int columns = inside(first_column, results.width, BLOCK) - p.column(0);
  const int count = columns > 0 ? s.tile.count - p.row : 0;
  u8* target = results.rows + i64{s.tile.first + p.row} * results.width + first_column + p.column(0);
#pragma unroll
  for (int first = 0; first < SIDE; first += HALF) {
    Divisor<> divisors[HALF];
#pragma unroll
    for (int i = 0; i < HALF; ++i) divisors[i] = s.rows[p.row + first + i];
    u32 row_words[HALF][2] = {};
#pragma unroll
    for (int c = 0; c < SIDE; c += 2) {
      const Divisor<> left = s.columns[c * ROW_LANES + p.column_group];
      const Divisor<> right = s.columns[(c + 1) * ROW_LANES + p.column_group];
      u32 left_word = 0, right_word = 0;
#pragma unroll
      for (int i = 0; i < HALF; i += 2) {
        const int r = first + i;
        float upper_left = value(r, c), upper_right = value(r, c + 1);
        float lower_left = value(r + 1, c), lower_right = value(r + 1, c + 1);
        row_words[i][c / 4] |= divisors[i].quantize(upper_left, upper_right) << (c % 4 * 8);
        row_words[i + 1][c / 4] |= divisors[i + 1].quantize(lower_left, lower_right) << (c % 4 * 8);
        if constexpr (WEIGHTED) {
          const float upper_weight = s.weights[p.row + r], lower_weight = s.weights[p.row + r + 1];
          upper_left = __fmul_rn(upper_left, upper_weight), upper_right = __fmul_rn(upper_right, upper_weight);
          lower_left = __fmul_rn(lower_left, lower_weight), lower_right = __fmul_rn(lower_right, lower_weight);
        }
        left_word |= left.quantize(upper_left, lower_left) << (i * 8);
        right_word |= right.quantize(upper_right, lower_right) << (i * 8);
      }
      u32* const column = piece + offset(c) * BLOCK / 4 + (first / HALF ^ swapped);
      column[0] = left_word;
      column[BLOCK / 4] = right_word;
    }
#pragma unroll
    for (int i = 0; i < HALF; ++i, target += results.width) {
      if (first + i < count) store_row(target, row_words[i], columns);
    }
    __syncwarp();  // keeps the compiler from merging the halves, which would need more registers
  }
}

__device__ void store_columns(const Results& results, u32 row_tile, i64 first_column) {
  const i64 pitch = i64{results.row_tiles} * BLOCK;
  const int columns = inside(first_column, results.width, BLOCK);
  const int chunk = threadIdx.x % CHUNKS;
  u8* target = results.columns + first_column * pitch + i64{row_tile} * BLOCK + chunk * CHUNK;
#pragma unroll
  for (int i = 0; i < BLOCK * CHUNKS / THREADS; ++i) {
    const int column = i * (THREADS / CHUNKS) + threadIdx.x / CHUNKS;
    const int group = column / PER_VECTOR % ROW_LANES;
    const Bytes16 v = load_16(&transposed_tile().chunks[column * CHUNKS + (chunk ^ group / 2)]);
    const auto& w = v.words;
    if (column < columns) {
      store_16(target + column * pitch, group % 2 ? Bytes16{w[2], w[3], w[1], w[0]} : Bytes16{w[0], w[1], w[3], w[2]});
    }
  }
}

// Quantizes the values of a tile both ways and stores the results, in the columns from `first_column` on.
__device__ void quantize_tile(const Results& results, Shared& s, const ThreadPosition& p, i64 first_column,
                              const Values& values) {
  find_amax(s, p, values);
  __syncthreads();
  make_scales(results, s, first_column);
  __syncthreads();
  quantize_values(results, s, p, first_column, values);
  __syncthreads();
  store_columns(results, s.tile.index, first_column);
}
