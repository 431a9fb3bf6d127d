// Switching between fibers: save the callee-saved registers on this stack, continue on another one.
#pragma once
#include <stdint.h>

extern "C" void msl_switch(void** save, void* to);

#if defined(__x86_64__)
enum { MSL_FRAME_WORDS = 8 };  // rbp rbx r12..r15, return address, one word that keeps the stack 16-byte aligned
enum { MSL_RETURN_WORD = 6 };
asm(R"(
.text
.globl msl_switch
msl_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
#elif defined(__aarch64__)
enum { MSL_FRAME_WORDS = 20 };  // x19..x28, x29 (frame), x30 (return address), d8..d15
enum { MSL_RETURN_WORD = 11 };
asm(R"(
.text
.globl msl_switch
msl_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "msl_switch is written for x86-64 and aarch64"
#endif

// The stack of a fiber that has not run yet: as if msl_switch had been called from the start of `entry`.
static inline void* msl_new_stack(unsigned char* top, void (*entry)()) {
  uint64_t* words = (uint64_t*)top - MSL_FRAME_WORDS;
  for (int i = 0; i < MSL_FRAME_WORDS; i++) words[i] = 0;
  words[MSL_RETURN_WORD] = (uint64_t)entry;
  return words;
}
