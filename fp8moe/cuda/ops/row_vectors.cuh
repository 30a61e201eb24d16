// The division of a row among ROW_THREADS threads: vector i of a thread begins at column PER_VECTOR * thread + i *
// STEP.
//
// Compile-time constants: those of input.cuh; HIDDEN (columns); ROW_THREADS.
#pragma once

#include "input.cuh"

constexpr int ROW_WARPS = ceil_div(ROW_THREADS, WARP);
constexpr int STEP = ROW_THREADS * PER_VECTOR;
constexpr int VECTORS = ceil_div(HIDDEN, STEP);
