// A row that ROW_THREADS threads share: vector i of a thread has the columns from PER_VECTOR * thread + i * STEP on.
//
// Compile-time constants: those of input.cuh; HIDDEN, the columns; ROW_THREADS.
#pragma once

#include "input.cuh"

constexpr int STEP = ROW_THREADS * PER_VECTOR;
constexpr int VECTORS = ceil_div(HIDDEN, STEP);
