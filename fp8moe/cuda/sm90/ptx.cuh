// Thin wrappers over the PTX instructions that the kernels use (PTX ISA 9.0; section names in the comments). Includes
// no toolkit header, so NVRTC alone compiles every kernel. Each architecture has its own ptx.cuh; the files of common/
// and ops/ include the one of the target.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int WARP = 32;
constexpr int WARPGROUP = 128;

struct alignas(64) TensorMap {
  char opaque[128];
};

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ u32 lane_id() {
  u32 lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Tells the compiler that x is the same in all lanes, so that values derived from it may use uniform registers.
__device__ __forceinline__ int same_in_warp(int x) { return __shfl_sync(0xFFFFFFFF, x, 0); }

// ---- mbarrier ("Parallel Synchronization and Communication Instructions: mbarrier") ----

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the async proxy and to the other blocks of the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 phase) {
  u32 done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(phase)
        : "memory");
  }
}

// Waits for a phase, including arrivals from other blocks of the cluster.
__device__ __forceinline__ void mbarrier_wait_cluster(u32 barrier, u32 phase) {
  u32 done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(phase)
        : "memory");
  }
}

// ---- clusters ----

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address of the same shared variable in block `rank` of the cluster.
__device__ __forceinline__ u32 cluster_address(u32 address, u32 rank) {
  u32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Orders execution only, not memory: .release would wait for every memory access in flight.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// ---- asynchronous copies ----

// Copies 16 bytes to shared memory, bypassing L1, or 4 bytes. If `there` is false, writes zeros and does not read the
// source.
__device__ __forceinline__ void async_copy_16(u32 target, const void* source, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(there ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void async_copy_4(u32 target, const void* source, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(there ? 4 : 0)
               : "memory");
}

// async_commit closes a group of the copies that this thread has issued. async_wait waits until all but the last
// `Pending` groups are complete.
__device__ __forceinline__ void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Has the mbarrier count one arrival of this thread when the copies that it has issued are complete.
__device__ __forceinline__ void async_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
template <int Pending>
__device__ __forceinline__ void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Loads a tile by TMA and signals the mbarrier. x, y: coordinates in elements, the innermost dimension first.
__device__ __forceinline__ void tma_load(u32 target, const TensorMap& map, u32 barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(target),
      "l"(&map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

__device__ __forceinline__ void tma_load(u32 target, const TensorMap& map, u32 barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Like tma_load, for data that is read once: L2 evicts it first.
__device__ __forceinline__ void tma_load_once(u32 target, const TensorMap& map, u32 barrier, int x, int y) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "l"(policy)
      : "memory");
}

// Prefetches a 32-byte sector of global memory to this SM's L1.
__device__ __forceinline__ void prefetch_near(const void* source) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(source));
}

// Prefetches a tensor map to the cache that TMA reads it from.
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies contiguous bytes from global to shared memory and signals the mbarrier. Addresses and `bytes` are multiples of
// 16.
__device__ __forceinline__ void bulk_load(u32 target, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// Adds to the number of bytes that the mbarrier's current phase waits for. Call before the last arrival of the phase.
__device__ __forceinline__ void mbarrier_expect_more(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Writes a tile from shared memory by TMA; elements outside the map are not written.
__device__ __forceinline__ void tma_store(const TensorMap& map, u32 source, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
               "r"(source), "r"(x), "r"(y)
               : "memory");
}

// The same in three dimensions. tma_add adds the tile to global memory, each float32 element atomically.
__device__ __forceinline__ void tma_store(const TensorMap& map, u32 source, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
               "r"(source), "r"(x), "r"(y), "r"(z)
               : "memory");
}
__device__ __forceinline__ void tma_add(const TensorMap& map, u32 source, int x, int y, int z) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(source), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// bulk_commit closes a group of the stores that this thread has issued. bulk_wait_read waits until all but the last
// `Pending` groups have read their source; bulk_wait, until all groups have been written.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int Pending = 0>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Copies contiguous bytes to another block's shared memory and signals the mbarrier there. `bytes` is a multiple of 16.
__device__ __forceinline__ void bulk_copy_to_block(u32 target, u32 source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
      "r"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Makes this thread's ordinary stores to shared memory visible to asynchronous copies that follow.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barrier `id` (1 to 15) among `threads` threads of the block.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- programmatic dependent launch ("Miscellaneous Instructions: griddepcontrol") ----
//
// All kernels follow one protocol: a kernel first waits for its predecessor, then lets its successor start. So before
// its wait, a kernel may rely on all earlier kernels of the stream except its immediate predecessor. There it reads
// only data that no kernel of its chain writes, or that was written at least two kernels earlier: weights, group sizes.
// The first kernel of a chain is launched normally, after all earlier work; a kernel that is always first need not
// wait.

__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- wgmma ("Asynchronous Warpgroup Level Matrix Instructions") ----

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Waits until at most the last `Later` products are in flight. Then `product`, an earlier one, may be read.
template <int Later, int Accumulators>
__device__ __forceinline__ void wgmma_wait(float (&product)[Accumulators]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Later) : "memory");
#pragma unroll
  for (int i = 0; i < Accumulators; ++i) asm volatile("" : "+f"(product[i]));  // no read before the wait
}

// The shared-memory matrix descriptor of a K-major tile whose rows are as long as the swizzle: 128, 64 or 32 bytes.
// Groups of 8 rows are contiguous. Adding 2 to the descriptor advances 32 bytes along K.
template <int RowBytes = 128>
__device__ __forceinline__ u64 wgmma_descriptor(u32 address) {
  static_assert(RowBytes == 128 || RowBytes == 64 || RowBytes == 32);
  constexpr u64 swizzle = RowBytes == 128 ? 1 : RowBytes == 64 ? 2 : 3;
  return (swizzle << 62) | (u64{8 * RowBytes >> 4} << 32) | ((address & 0x3FFFF) >> 4);
}

// A descriptor of a tile with rows of 128 bytes, kept in one register from stage to stage.
struct TileStart {
  u32 start;

  TileStart() = default;
  __device__ __forceinline__ explicit TileStart(u32 address) : start(address >> 4) {}
  __device__ __forceinline__ TileStart operator+(int step) const {
    TileStart later = *this;
    later.start += step;
    return later;
  }
  __device__ __forceinline__ operator u64() const { return wgmma_descriptor(0) | start; }
};

// ---- mma ("Warp-level matrix instructions: mma.sync") ----

// Adds a 16 x 8 product, 16 deep, to a warp's sums, which are laid out as in wgmma: a lane has rows lane / 4 and lane /
// 4 + 8, and of each row the columns 2 * (lane % 4) and the next. upper, lower: four values of these two rows. columns:
// the matching four values of column lane / 4. The four lanes that share a row or column hold its 16 values, in any
// order.
__device__ __forceinline__ void mma_bfloat16(float* sum, uint2 upper, uint2 lower, uint2 columns) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(upper.x), "r"(lower.x), "r"(upper.y), "r"(lower.y), "r"(columns.x), "r"(columns.y));
}

__device__ __forceinline__ void mma_float16(float* sum, uint2 upper, uint2 lower, uint2 columns) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(upper.x), "r"(lower.x), "r"(upper.y), "r"(lower.y), "r"(columns.x), "r"(columns.y));
}

// Loads four 8 x 8 matrices of 16-bit elements. Each group of eight lanes passes the addresses of one matrix's rows, 16
// bytes each. From each matrix a lane gets, in row lane / 4, columns 2 * (lane % 4) and the next; load_transposed
// returns instead, in column lane / 4, rows 2 * (lane % 4) and the next.
__device__ __forceinline__ void load_matrices(u32 address, u32 (&v)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_transposed(u32 address, u32 (&v)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address)
               : "memory");
}

template <int Registers>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// ---- conversions and stores ----

__device__ __forceinline__ u32 pack_bfloat16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float bfloat16_to_float(u16 x) { return __uint_as_float(u32{x} << 16); }

// Converts two values to E4M3, `low` in the lower byte: rounded to nearest even, saturated; NaN stays NaN.
__device__ __forceinline__ u16 pack_e4m3(float low, float high) {
  u16 packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}

// Converts four E4M3 codes to float16, exactly: the lower two, and the upper two.
__device__ __forceinline__ uint2 unpack_e4m3(u32 codes) {
  uint2 values;
  asm("{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}\n"
      : "=r"(values.x), "=r"(values.y)
      : "r"(codes));
  return values;
}

// The smaller, or the larger, of two values; NaN if either is NaN.
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// 1 / x to one unit in the last place. A division has a slow path, whose branch would keep enclosing loops from using
// uniform registers.
__device__ __forceinline__ float reciprocal(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
}

// 1 / (1 + e^-x) to about 1e-6. Saturates to 0 and 1 for large |x|; NaN for NaN.
__device__ __forceinline__ float sigmoid(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
  return reciprocal(1.f + power);
}

__device__ __forceinline__ void stmatrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// Picks four of the eight bytes of two words, by the nibbles of `selector`: three bits are a byte's number, and the
// fourth asks for its top bit in all eight.
__device__ __forceinline__ u32 select_bytes(u32 low, u32 high, u32 selector) {
  u32 picked;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(low), "r"(high), "r"(selector));
  return picked;
}

__device__ __forceinline__ u32 load_shared_1(u32 address) {
  u32 v;
  asm volatile("ld.shared::cta.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ u32 load_shared_2(u32 address) {
  u16 v;
  asm volatile("ld.shared::cta.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ u32 load_shared_4(const u32* p) {
  u32 v;
  asm volatile("ld.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(p)) : "memory");
  return v;
}

__device__ __forceinline__ float load_shared_float(const float* p) {
  float v;
  asm volatile("ld.shared::cta.f32 %0, [%1];" : "=f"(v) : "r"(shared_address(p)) : "memory");
  return v;
}

__device__ __forceinline__ uint2 load_shared_8(u32 address) {
  uint2 v;
  asm volatile("ld.shared::cta.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint4 load_shared_16(u32 address) {
  uint4 v;
  asm volatile("ld.shared::cta.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared_16(u32 address, uint4 v) {
  asm volatile("st.shared::cta.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
