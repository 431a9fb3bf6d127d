// What compiled kernels and the fiber scheduler (runtime/fibers.cpp) agree on. Plain C++: no Metal words.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef unsigned int msl_uint3 __attribute__((ext_vector_type(3)));  // the same type as Metal's uint3

// Every attribute that a kernel parameter may ask for, under its Metal name.
struct msl_ids {
  msl_uint3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
  msl_uint3 threads_per_threadgroup, dispatch_threads_per_threadgroup, threadgroups_per_grid, threads_per_grid;
  msl_uint3 grid_origin, grid_size;
  unsigned thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  unsigned simdgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup;
  unsigned threads_per_simdgroup, thread_execution_width;
  unsigned thread_index_in_quadgroup, quadgroup_index_in_threadgroup;
  unsigned quadgroups_per_threadgroup, dispatch_quadgroups_per_threadgroup;
};

enum { MSL_LANES = 32, MSL_SLOT_BYTES = 16, MSL_SITE_COLUMNS = 4096 };

// A site is line * MSL_SITE_COLUMNS + column of a call in the kernel's text.
extern "C" {
// One thread of a kernel; written by the Python side for each kernel.
void msl_entry(void** buffers, const msl_ids& ids);
// Deposit n <= 16 bytes, wait for the whole SIMD-group, return its 32 slots of 16 bytes and which are filled.
const unsigned char* msl_simd_exchange(const void* value, unsigned n, unsigned site, unsigned* mask, unsigned* lane);
void msl_barrier(int simdgroup_only, unsigned site);
void msl_fail(const char* what, unsigned site);
}
