// How a failing kernel says what it did: one report in memory shared with the parent process, then exit.
//
// Guard pages end in SIGSEGV. Undefined arithmetic and local arrays end in one of UBSan's handlers, which this
// file provides itself because they are told the source line.
#pragma once
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "../include/msl/abi.h"

struct msl_report {
  uint32_t finished, line;
  uint64_t fault_address;
  uint32_t has_fault;  // the address above is one that was accessed
  uint32_t has_thread, threadgroup[3], thread[3];
  char what[160];
};

static msl_report* msl_the_report;
static const msl_ids* (*msl_current_ids)();
static uint32_t msl_limit_s;

static void msl_report_and_exit(const char* what, unsigned line, const msl_ids* ids) {
  msl_report& r = *msl_the_report;
  snprintf(r.what, sizeof r.what, "%s", what);
  r.line = line;
  r.has_thread = ids != nullptr;
  for (int k = 0; ids && k < 3; k++) {
    r.threadgroup[k] = ids->threadgroup_position_in_grid[k];
    r.thread[k] = ids->thread_position_in_threadgroup[k];
  }
  _exit(1);
}

static void msl_on_signal(int sig, siginfo_t* info, void*) {
  if (sig == SIGSEGV || sig == SIGBUS) {
    msl_the_report->fault_address = (uint64_t)info->si_addr;
    msl_the_report->has_fault = 1;
    msl_report_and_exit("out-of-bounds access", 0, msl_current_ids());
  }
  char what[64];
  snprintf(what, sizeof what, sig == SIGALRM ? "still running after %u s" : "stopped by signal %u",
           sig == SIGALRM ? msl_limit_s : (unsigned)sig);
  msl_report_and_exit(what, 0, msl_current_ids());
}

static void msl_catch_faults(msl_report* report, uint32_t limit_s, const msl_ids* (*current_ids)()) {
  msl_the_report = report;
  msl_current_ids = current_ids;
  msl_limit_s = limit_s;
  static char alternate_stack[64 << 10];  // the fiber's own stack may be what has overflowed
  stack_t stack = {};
  stack.ss_sp = alternate_stack;
  stack.ss_size = sizeof alternate_stack;
  sigaltstack(&stack, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = msl_on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGALRM};
  sigset_t unblock;
  sigemptyset(&unblock);
  for (int sig : signals) {
    sigaction(sig, &action, nullptr);
    sigaddset(&unblock, sig);
  }
  sigprocmask(SIG_UNBLOCK, &unblock, nullptr);
  signal(SIGINT, SIG_DFL);
  alarm(limit_s);
}

// Each handler's first argument begins with the place in the source.
struct msl_source_location {
  const char* file;
  uint32_t line, column;
};
#define MSL_UBSAN(NAME, WHAT, ...)                                                          \
  extern "C" void __ubsan_handle_##NAME##_abort(msl_source_location* at, ##__VA_ARGS__) {   \
    msl_report_and_exit(WHAT, at->line, msl_current_ids());                                 \
  }
MSL_UBSAN(out_of_bounds, "index outside a local or constant array", void*)
MSL_UBSAN(shift_out_of_bounds, "shift by the type's width or more", void*, void*)
MSL_UBSAN(divrem_overflow, "integer division by zero or overflow", void*, void*)
MSL_UBSAN(type_mismatch_v1, "misaligned pointer: an MLX array may start at any element (see base_alignment)", void*)

// Conversions for which the compiler calls its runtime library where the CPU has no instruction.
extern "C" __attribute__((weak)) __bf16 __truncsfbf2(float f) {  // to nearest, ties to even
  const uint32_t u = __builtin_bit_cast(uint32_t, f);
  const bool nan = (u & 0x7fffffff) > 0x7f800000;
  return __builtin_bit_cast(__bf16, (uint16_t)(nan ? (u >> 16) | 64 : (u + 0x7fff + (u >> 16 & 1)) >> 16));
}
