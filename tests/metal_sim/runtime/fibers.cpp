// Runs a compiled kernel: every thread of a threadgroup is a fiber, and the threadgroups run one after another.
//
// A fiber runs until it calls a SIMD-group function or a barrier, where it sleeps until all the others that must
// come have come. Which fiber runs next is the schedule's choice, so a kernel that needs a barrier it does not have
// gives another result under another schedule. The same choice orders the SIMD-groups and the threadgroups.
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "../include/msl/abi.h"
#include "context.h"
#include "faults.h"

// Bounds of the section that holds all threadgroup variables; the linker defines them where there are any.
extern "C" unsigned char __start_msl_tg[] __attribute__((weak));
extern "C" unsigned char __stop_msl_tg[] __attribute__((weak));

enum { MAX_THREADS = 1024, MAX_GROUPS = MAX_THREADS / MSL_LANES, MAX_THREADGROUP_BYTES = 32768 };
enum { STACK_BYTES = 192 << 10, STACK_GUARD_BYTES = 64 << 10 };
enum Schedule { FORWARD, BACKWARD, SHUFFLED };
enum State { READY, AT_SIMD, AT_SIMD_BARRIER, AT_BARRIER, DONE };

struct Fiber {
  void* stack;
  State state;
  unsigned site;    // where it sleeps
  unsigned parity;  // SIMD-group functions alternate between two sets of slots: a fast lane may not
                    // overwrite what a slow one still has to read
  msl_ids ids;
};

static Fiber fibers[MAX_THREADS];
static unsigned char* stacks;
static void* scheduler_stack;
static void** buffers;
static int threads, current;
static unsigned char slots[MAX_GROUPS][2][MSL_LANES * MSL_SLOT_BYTES];
static unsigned masks[MAX_GROUPS][2];
static uint64_t random_state;

static unsigned random_below(unsigned n) {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return (unsigned)(random_state >> 33) % n;
}

static void fill_order(unsigned* order, unsigned n, uint32_t schedule) {
  for (unsigned i = 0; i < n; i++) order[i] = schedule == BACKWARD ? n - 1 - i : i;
  if (schedule != SHUFFLED) return;
  for (unsigned i = n; i > 1; i--) {
    const unsigned j = random_below(i), t = order[i - 1];
    order[i - 1] = order[j];
    order[j] = t;
  }
}

// ---- what fibers call ----
static void sleep_at(State state, unsigned site) {
  fibers[current].state = state;
  fibers[current].site = site;
  msl_switch(&fibers[current].stack, scheduler_stack);
}

static void fiber_main() {
  msl_entry(buffers, fibers[current].ids);
  for (;;) sleep_at(DONE, 0);
}

extern "C" const unsigned char* msl_simd_exchange(const void* value, unsigned n, unsigned site, unsigned* mask,
                                                  unsigned* lane) {
  const int me = current, group = me / MSL_LANES;
  const unsigned parity = fibers[me].parity ^= 1;
  memcpy(slots[group][parity] + MSL_SLOT_BYTES * (me % MSL_LANES), value, n);
  sleep_at(AT_SIMD, site);
  *mask = masks[group][parity];
  *lane = me % MSL_LANES;
  return slots[group][parity];
}

extern "C" void msl_barrier(int simdgroup_only, unsigned site) {
  sleep_at(simdgroup_only ? AT_SIMD_BARRIER : AT_BARRIER, site);
}

extern "C" void msl_fail(const char* what, unsigned site) {
  msl_report_and_exit(what, site / MSL_SITE_COLUMNS, &fibers[current].ids);
}

// ---- the scheduler ----
static void fail_at(int fiber, const char* what) {
  current = fiber;
  msl_fail(what, fibers[fiber].site);
}

// Run the SIMD-group of fibers [begin, end) until every one is done or at a threadgroup barrier.
static void run_simdgroup(int begin, int end, uint32_t schedule) {
  for (;;) {
    unsigned order[MSL_LANES];
    fill_order(order, end - begin, schedule);
    for (int i = 0; i < end - begin; i++) {
      current = begin + order[i];
      if (fibers[current].state == READY) msl_switch(&scheduler_stack, fibers[current].stack);
    }
    int waiting = -1;
    for (int i = begin; i < end && waiting < 0; i++)
      if (fibers[i].state == AT_SIMD || fibers[i].state == AT_SIMD_BARRIER) waiting = i;
    if (waiting < 0) return;
    unsigned mask = 0;
    for (int i = begin; i < end; i++) {
      if (fibers[i].state != fibers[waiting].state || fibers[i].site != fibers[waiting].site)
        fail_at(waiting, fibers[waiting].state == AT_SIMD
                             ? "SIMD-group function reached by only part of the SIMD-group"
                             : "simdgroup_barrier reached by only part of the SIMD-group");
      mask |= 1u << (i - begin);
    }
    masks[begin / MSL_LANES][fibers[waiting].parity] = mask;
    for (int i = begin; i < end; i++) fibers[i].state = READY;
  }
}

static void run_threadgroup(uint32_t schedule, unsigned char poison) {
  if (__start_msl_tg) memset(__start_msl_tg, poison, __stop_msl_tg - __start_msl_tg);
  for (int i = 0; i < threads; i++) {
    fibers[i].stack = msl_new_stack(stacks + (size_t)STACK_BYTES * (i + 1), fiber_main);
    fibers[i].state = READY;
    fibers[i].parity = 0;
  }
  const unsigned groups = (threads + MSL_LANES - 1) / MSL_LANES;
  for (;;) {
    unsigned order[MAX_GROUPS];
    fill_order(order, groups, schedule);
    for (unsigned i = 0; i < groups; i++) {
      const int begin = order[i] * MSL_LANES, end = begin + MSL_LANES;
      run_simdgroup(begin, end < threads ? end : threads, schedule);
    }
    int waiting = -1, done = 0;
    for (int i = 0; i < threads; i++) {
      if (fibers[i].state == DONE) done++;
      else if (waiting < 0) waiting = i;
      else if (fibers[i].site != fibers[waiting].site) fail_at(i, "threads wait at different threadgroup_barriers");
    }
    if (waiting < 0) return;
    if (done) fail_at(waiting, "threadgroup_barrier not reached by every thread of the threadgroup");
    for (int i = 0; i < threads; i++) fibers[i].state = READY;
  }
}

// ---- the launch ----
struct msl_launch {
  void** buffers;
  uint32_t grid[3], threadgroup[3];
  uint32_t schedule, seed, poison, limit_s;
  msl_report* report;
};

static void set_ids(msl_ids& d, int i, const uint32_t* group, const uint32_t* actual, const uint32_t* full,
                    const uint32_t* groups, const uint32_t* grid) {
  const uint32_t place[3] = {i % actual[0], i / actual[0] % actual[1], i / (actual[0] * actual[1])};
  for (int k = 0; k < 3; k++) {
    d.thread_position_in_threadgroup[k] = place[k];
    d.thread_position_in_grid[k] = group[k] * full[k] + place[k];
    d.threadgroup_position_in_grid[k] = group[k];
    d.threads_per_threadgroup[k] = actual[k];
    d.dispatch_threads_per_threadgroup[k] = full[k];
    d.threadgroups_per_grid[k] = groups[k];
    d.threads_per_grid[k] = d.grid_size[k] = grid[k];
    d.grid_origin[k] = 0;
  }
  const unsigned here = actual[0] * actual[1] * actual[2], dispatched = full[0] * full[1] * full[2];
  d.thread_index_in_threadgroup = i;
  d.thread_index_in_simdgroup = i % MSL_LANES;
  d.simdgroup_index_in_threadgroup = i / MSL_LANES;
  d.simdgroups_per_threadgroup = (here + MSL_LANES - 1) / MSL_LANES;
  d.dispatch_simdgroups_per_threadgroup = (dispatched + MSL_LANES - 1) / MSL_LANES;
  d.threads_per_simdgroup = d.thread_execution_width = MSL_LANES;
  d.thread_index_in_quadgroup = i % 4;
  d.quadgroup_index_in_threadgroup = i / 4;
  d.quadgroups_per_threadgroup = (here + 3) / 4;
  d.dispatch_quadgroups_per_threadgroup = (dispatched + 3) / 4;
}

// Runs in a process of its own: any failure writes the report and ends the process.
extern "C" void msl_run(const msl_launch* launch) {
  msl_catch_faults(launch->report, launch->limit_s, [] { return (const msl_ids*)&fibers[current].ids; });
  if (__start_msl_tg && __stop_msl_tg - __start_msl_tg > MAX_THREADGROUP_BYTES)
    msl_report_and_exit("more than 32768 bytes of threadgroup memory", 0, nullptr);
  const uint32_t *grid = launch->grid, *full = launch->threadgroup;
  uint32_t groups[3];
  for (int k = 0; k < 3; k++) groups[k] = (grid[k] + full[k] - 1) / full[k];
  const unsigned dispatched = full[0] * full[1] * full[2];
  stacks = (unsigned char*)mmap(nullptr, (size_t)STACK_BYTES * dispatched, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (unsigned i = 0; i < dispatched; i++) mprotect(stacks + (size_t)STACK_BYTES * i, STACK_GUARD_BYTES, PROT_NONE);
  buffers = launch->buffers;
  random_state = launch->seed;

  const uint64_t total = (uint64_t)groups[0] * groups[1] * groups[2];
  // A shuffled grid is walked with a stride that shares no factor with its size.
  uint64_t stride = launch->schedule == SHUFFLED ? total * 5 / 8 | 1 : 1;
  for (uint64_t a = stride, b = total; launch->schedule == SHUFFLED; a = ++stride, b = total) {
    while (b) { const uint64_t t = a % b; a = b; b = t; }
    if (a == 1) break;
  }
  for (uint64_t n = 0; n < total; n++) {
    const uint64_t at = launch->schedule == BACKWARD ? total - 1 - n : n * stride % total;
    const uint32_t group[3] = {(uint32_t)(at % groups[0]), (uint32_t)(at / groups[0] % groups[1]),
                               (uint32_t)(at / groups[0] / groups[1])};
    uint32_t actual[3];  // dispatchThreads cuts the threadgroups at the edge of the grid
    for (int k = 0; k < 3; k++) {
      const uint32_t left = grid[k] - group[k] * full[k];
      actual[k] = left < full[k] ? left : full[k];
    }
    threads = actual[0] * actual[1] * actual[2];
    for (int i = 0; i < threads; i++) set_ids(fibers[i].ids, i, group, actual, full, groups, grid);
    run_threadgroup(launch->schedule, (unsigned char)launch->poison);
  }
  launch->report->finished = 1;
}
