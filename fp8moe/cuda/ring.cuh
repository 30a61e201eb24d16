// Walking over a ring of STAGES stages in shared memory, a constant of the kernel.
#pragma once

#include "ptx.cuh"

struct Ring {
  u32 stage = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};
