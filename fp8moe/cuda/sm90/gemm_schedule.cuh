// Distributes tiles over blocks. Only this file knows how groups are laid out.
#pragma once

#include "gemm_layout.cuh"
#include "warp.cuh"

// The first row and column of a slab within its tile.
struct Slab {
  int row, column;
};

__device__ __forceinline__ Slab slab_of(const Tile& tile, int warpgroup, int slab) {
  if (slab == 1 && tile.upright()) return {BLOCK_M, 0};
  return {slab_row(warpgroup, slab), slab_column(slab)};
}

// The number of a warpgroup's slabs that lie in the tile and have rows of the group. They are its first slabs.
__device__ __forceinline__ int slabs_in_use(const Tile& tile, int warpgroup) {
  if constexpr (!PARTIAL) return tile.halved() ? 1 : SLABS;
  const int rows = tile.end - tile.m - slab_row(warpgroup, 0);
  if constexpr (!EVEN) {
    const bool one = tile.halved() || tile.upright() && warpgroup == 1;
    return rows <= 0 ? 0 : one ? 1 : SLABS;
  }
  return max(0, min(ceil_div(rows, slab_row(0, 1)), SLABS));
}

// The arguments of a launch that the schedule and the loader use.
struct ScheduleArguments {
  const int* groups;  // sizes or offsets of the groups: see Schedule below
  const int* rows;    // GATHERS: (m / top_k, top_k), the row of each token's assignments; otherwise unused
  int m;              // rows of the result, and of a unless GATHERS
  int max_m;
  int raster;        // tile rows in a band, see RasterPosition
  int group_pitch;   // distance from one group to the next in `groups`
  int tile_m;        // without groups: see tokens_of_tile()
  int tile_rows;     // without groups: number of tile rows
  int counter;       // DYNAMIC: index of the counter in `groups`; set to 0 by a kernel before the previous one
  int early_stages;  // `most` of fill_ring()
  int top_k;         // GATHERS

  // The number of rows in a tile. Without groups this may be less than BLOCK_M, so that tiles share the rows of a
  // evenly: TMA is slowest at loading rows past the end. With STAGED it is BLOCK_M, because TMA stores only whole slabs
  // of 64.
  __device__ __forceinline__ int tokens_of_tile() const { return GROUPS || STAGED ? BLOCK_M : tile_m; }
};

// Iterates over this block's tiles. In each round every block gets one tile; the blocks of a split get the same tile.
template <typename Derived>
struct TileWalk {
  int place = blockIdx.x / SPLIT_K, index = place, tiles = 0;
  int halved_from = 0;  // HALVES: tiles from this index on are halved, with two indices for each

  // Sets the number of tiles, counted as whole ones, and decides which are halved.
  __device__ __forceinline__ void set_tiles(int count) {
    tiles = count;
    if constexpr (HALVES) {
      const int last = count % gridDim.x;
      if (2 * last <= gridDim.x) tiles += last;
      halved_from = 2 * last <= gridDim.x ? count - last : count;
    }
  }

  __device__ __forceinline__ bool ended() const { return index >= tiles; }

  // The tile or half tile at `index`.
  __device__ __forceinline__ Tile at(int index) const {
    const bool half = HALVES && index >= halved_from;
    const int beyond = index - halved_from;
    const Tile tile = static_cast<const Derived*>(this)->tile_at(half ? halved_from + beyond / 2 : index);
    return half ? tile.half(beyond % 2) : tile;
  }

  // DYNAMIC: takes the next tile from the counter. Called by the loader, which then announces the tile to the math
  // warps.
  __device__ __forceinline__ void ask() {
    const ScheduleArguments& args = static_cast<const Derived*>(this)->args;
    index = gridDim.x + atomicAdd(const_cast<int*>(args.groups) + args.counter, 1);
  }
  __device__ __forceinline__ void announce(Tile& tile) const {
    if (ended()) {
      tile.group = -1;
    } else {
      tile = at(index);
    }
  }

  // Gets the next tile; returns false if none is left.
  __device__ __forceinline__ bool next(Tile& tile) {
    if (ended()) return false;
    tile = at(index);
    const int places = gridDim.x / SPLIT_K;
    if constexpr (DYNAMIC) {
      // ask() has set the index.
    } else if constexpr (GROUPS > 0) {
      // The last tile of a group takes less time. If every second tile is such a tile, half of the blocks would get all
      // of them. So a block's position moves by one each round.
      const bool last = place == places - 1;
      index += last ? 1 : places + 1;
      place = last ? 0 : place + 1;
    } else {
      index += places;
    }
    return true;
  }
};

// Schedule<Groups>: call prepare(), then ready(), then next() for each tile. Schedule<0>: one matrix for all m rows.
template <int Groups>
struct Schedule;

template <>
struct Schedule<0> : TileWalk<Schedule<0>> {
  const ScheduleArguments& args;

  __device__ __forceinline__ Schedule(const ScheduleArguments& args, GroupTable<0>&) : args(args) {
    set_tiles(args.tile_rows * TILE_COLUMNS);
  }

  __device__ __forceinline__ void prepare() {}
  __device__ __forceinline__ void ready() {}

  __device__ __forceinline__ Tile tile_at(int index) const {
    const RasterPosition position(index, args.tile_rows, args.raster);
    const int m = position.row * args.tokens_of_tile();
    return {m, position.column * BLOCK_N, min(args.m, m + args.tokens_of_tile()), 0, WHOLE};
  }
};

// GATHERS: the rows of the assignments, loaded ahead of their use, with the sizes of the groups.
template <bool Gathers>
struct AssignmentRows {
  static constexpr int EACH = GATHERED_ROWS / WARP;
  u32 rows[EACH];
  u32 factor;  // of assignments below GATHERED_ROWS, assignment / top_k is assignment * factor >> 20

  __device__ __forceinline__ explicit AssignmentRows(const ScheduleArguments& args)
      : factor((1u << 20) / static_cast<u32>(args.top_k) + 1) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) rows[i] = row(args, i * WARP + lane_id());
  }

  // Writes the token of each row to the table. Rows without an assignment keep arbitrary tokens.
  __device__ __forceinline__ void invert(TokensOfRows<Gathers>& table, const ScheduleArguments& args) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const u32 assignment = i * WARP + lane_id();
      if (rows[i] < static_cast<u32>(args.m)) table.token_of_row[rows[i]] = static_cast<u8>(assignment * factor >> 20);
    }
  }

 private:
  // The row of an assignment; none for one that does not exist.
  static __device__ __forceinline__ u32 row(const ScheduleArguments& args, u32 assignment) {
    return assignment < static_cast<u32>(args.m) ? static_cast<u32>(args.rows[assignment]) : 0xFFFFFFFFu;
  }
};
template <>
struct AssignmentRows<false> {
  __device__ __forceinline__ explicit AssignmentRows(const ScheduleArguments&) {}
  __device__ __forceinline__ void invert(TokensOfRows<false>&, const ScheduleArguments&) const {}
};

// One weight matrix for each group of rows. Group sizes are known only on the device: one warp turns them into a table
// in shared memory. Rows are clamped to m, whatever `groups` contains.
// `groups` has one of three layouts:
//   (Groups + 1)  offsets of the groups' rows
//   (Groups, 2)   first row and end of each group, in any order; with group_pitch = 2
//   (Groups)      number of used rows of each group; with max_m > 0, where group e begins at row e * max_m
template <int Groups>
struct Schedule : TileWalk<Schedule<Groups>> {
  static constexpr int EACH = ceil_div(Groups, WARP);  // groups per lane

  const ScheduleArguments& args;
  GroupTable<Groups>& table;

  __device__ __forceinline__ Schedule(const ScheduleArguments& args, GroupTable<Groups>& table)
      : args(args), table(table) {}

  // Fills the table; called by one warp.
  __device__ __forceinline__ void prepare() {
    const int* groups = args.groups;
    const AssignmentRows<GATHERS> rows(args);
    int first[EACH], end[EACH], tile_rows = 0;
    const int lane = lane_id();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int group = min(lane * EACH + i, Groups - 1);
      if (args.max_m > 0) {
        first[i] = group * args.max_m;
        end[i] = first[i] + min(max(groups[group], 0), args.max_m);
      } else {
        const int* range = groups + group * args.group_pitch;
        first[i] = min(max(range[0], 0), args.m);
        end[i] = min(max(range[1], first[i]), args.m);
      }
      if (lane * EACH + i < Groups) tile_rows += ceil_div(end[i] - first[i], BLOCK_M);
    }
    const int sum = warp_inclusive_sum(tile_rows);
    int before = sum - tile_rows;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int group = lane * EACH + i;
      if (group < Groups) {
        table.tile_rows_before[group] = before;
        table.first[group] = first[i];
        table.end[group] = end[i];
        before += ceil_div(end[i] - first[i], BLOCK_M);
      }
    }
    if (lane == WARP - 1) table.tile_rows_before[Groups] = sum;
    rows.invert(table, args);
    __syncwarp();
  }

  // Reads the number of tiles; called by whole warps once the table is filled. A block of a split has at most one tile.
  // If groups overlap, there may be more tiles than blocks; the last tiles are then left out.
  __device__ __forceinline__ void ready() {
    const int count = same_in_warp(table.tile_rows_before[Groups]) * TILE_COLUMNS;
    this->set_tiles(SPLIT_K > 1 ? min(count, static_cast<int>(gridDim.x) / SPLIT_K) : count);
  }

  __device__ __forceinline__ Tile tile_at(int index) const {
    int group = 0, beyond = Groups;
#pragma unroll 1
    while (beyond - group > 1) {
      const int middle = (group + beyond) / 2;
      if (table.tile_rows_before[middle] * TILE_COLUMNS <= index) {
        group = middle;
      } else {
        beyond = middle;
      }
    }
    const int before = table.tile_rows_before[group], rows = table.tile_rows_before[group + 1] - before;
    const RasterPosition position(index - before * TILE_COLUMNS, rows, args.raster);
    int m = table.first[group] + position.row * BLOCK_M, n = position.column * BLOCK_N, end = table.end[group];
    int shape = WHOLE;
    const int last = table.first[group] + (rows - 1) * BLOCK_M;
    const bool short_last = rows > 1 && end - last <= 64 && position.row >= rows - 2;
    if constexpr (EVEN && BLOCK_M == 256) {
      // A last tile of 64 rows would occupy only one warpgroup. So it gets 128 rows, and the tile before it 192.
      if (short_last && position.row == rows - 1) m = last - 64;
      if (short_last && position.row == rows - 2) end = last - 64;
    }
    if constexpr (UPRIGHTS) {
      if (short_last && n + HALF_N < N) {
        m = last - BLOCK_M;
        n += (position.row - (rows - 2)) * HALF_N;
        shape = UPRIGHT;
      }
    }
    return {m, n, end, group, shape};
  }
};

// GATHERS: the token of a tile's row; of a row past the end of the group, any token.
template <int Groups>
__device__ __forceinline__ int token_of(const GroupTable<Groups>& groups, const Tile& tile, int row) {
  return groups.token_of_row[min(tile.m + row, tile.end - 1)] % GATHERED_TOKENS;
}

// Tells the compiler that the tile is the same in all lanes, so that values derived from it may use uniform registers.
__device__ __forceinline__ Tile same_in_warp(Tile tile) {
  if (GROUPS == 0) return tile;
  return {same_in_warp(tile.m), same_in_warp(tile.n), same_in_warp(tile.end), same_in_warp(tile.group),
          HALVES ? same_in_warp(tile.shape) : WHOLE};
}
