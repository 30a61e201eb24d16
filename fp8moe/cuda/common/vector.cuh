// Vectors of 16 bytes, the most that one instruction loads or stores, and partial vectors at the end of a row.
#pragma once

#include "ptx.cuh"

using u8 = unsigned char;
using i64 = long long;

// The number of indices in [begin, begin + size) that are below `end`; may be negative.
__device__ __forceinline__ int inside(i64 begin, i64 end, int size) {
  return end - begin < size ? static_cast<int>(end - begin) : size;
}

struct alignas(16) Bytes16 {
  u32 words[4];
};

__device__ __forceinline__ Bytes16 load_16(const void* source) {
  const uint4 v = *static_cast<const uint4*>(source);
  return {v.x, v.y, v.z, v.w};
}

__device__ __forceinline__ void store_16(void* target, const Bytes16& v) {
  *static_cast<uint4*>(target) = make_uint4(v.words[0], v.words[1], v.words[2], v.words[3]);
}

// Loads the first `count` elements at `source` without keeping them in L1, and sets the others to zero. `count` may be
// negative or exceed the vector. Aligned: `source` is a multiple of 16 bytes, and if count > 0 all 16 bytes are loaded.
template <bool Aligned, class Element>
__device__ __forceinline__ Bytes16 load_elements(const Element* source, int count) {
  Bytes16 v = {};
  if constexpr (Aligned) {
    asm volatile(
        "{\n.reg .pred inside;\nsetp.ne.u32 inside, %5, 0;\n"
        "@inside ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}\n"
        : "+r"(v.words[0]), "+r"(v.words[1]), "+r"(v.words[2]), "+r"(v.words[3])
        : "l"(source), "r"(static_cast<u32>(count > 0))
        : "memory");
  } else {
    constexpr int EACH = 4 / sizeof(Element);  // elements in a word
#pragma unroll
    for (int i = 0; i < 4 * EACH; ++i) {
      if (i < count) v.words[i / EACH] |= static_cast<u32>(source[i]) << (i % EACH * 8 * sizeof(Element));
    }
  }
  return v;
}

// Copies the first `count` bytes, at most 16, from `source` to `target`; 16 bytes must be readable at `source`.
// aligned: `target` is a multiple of 16 bytes, and if count > 0 all 16 bytes are written.
__device__ __forceinline__ void copy_16(u8* target, const u8* source, int count, bool aligned) {
  if (aligned) {
    if (count > 0) store_16(target, load_16(source));
  } else {
    for (int i = 0; i < min(count, 16); ++i) target[i] = source[i];
  }
}

// Transposes a 4x4 matrix of bytes: moves byte j of word i to byte i of word j.
__device__ __forceinline__ void transpose_bytes(u32 (&words)[4]) {
  const u32 low01 = __byte_perm(words[0], words[1], 0x5140);
  const u32 high01 = __byte_perm(words[0], words[1], 0x7362);
  const u32 low23 = __byte_perm(words[2], words[3], 0x5140);
  const u32 high23 = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(low01, low23, 0x5410);
  words[1] = __byte_perm(low01, low23, 0x7632);
  words[2] = __byte_perm(high01, high23, 0x5410);
  words[3] = __byte_perm(high01, high23, 0x7632);
}
