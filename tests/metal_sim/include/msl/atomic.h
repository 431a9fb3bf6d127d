// Relaxed atomics. Fibers never preempt one another, so a plain read-modify-write is exact.
#pragma once

namespace metal {
enum memory_order { memory_order_relaxed };
// A vector of one: a type of its own, and unlike a struct it can be declared in any address space.
template <typename T>
using atomic = T __attribute__((ext_vector_type(1)));
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;

#define MSL_ATOMIC_UPDATE(SPACE, NAME, EXPRESSION)                                      \
  template <typename T, typename U>                                                     \
  inline T atomic_fetch_##NAME##_explicit(volatile SPACE atomic<T>* p, U u, memory_order) { \
    const T old = (*p)[0], x = (T)u;                                                   \
    (*p)[0] = (T)(EXPRESSION);                                                         \
    return old;                                                                         \
  }
#define MSL_ATOMICS(SPACE)                                                              \
  template <typename T>                                                                 \
  inline T atomic_load_explicit(const volatile SPACE atomic<T>* p, memory_order) {      \
    return (*p)[0];                                                                    \
  }                                                                                     \
  template <typename T, typename U>                                                     \
  inline void atomic_store_explicit(volatile SPACE atomic<T>* p, U u, memory_order) {   \
    (*p)[0] = (T)u;                                                                    \
  }                                                                                     \
  template <typename T, typename U>                                                     \
  inline T atomic_exchange_explicit(volatile SPACE atomic<T>* p, U u, memory_order) {   \
    const T old = (*p)[0];                                                             \
    (*p)[0] = (T)u;                                                                    \
    return old;                                                                         \
  }                                                                                     \
  MSL_ATOMIC_UPDATE(SPACE, add, old + x)                                                \
  MSL_ATOMIC_UPDATE(SPACE, sub, old - x)                                                \
  MSL_ATOMIC_UPDATE(SPACE, max, old < x ? x : old)                                      \
  MSL_ATOMIC_UPDATE(SPACE, min, x < old ? x : old)                                      \
  MSL_ATOMIC_UPDATE(SPACE, and, old& x)                                                 \
  MSL_ATOMIC_UPDATE(SPACE, or, old | x)                                                 \
  MSL_ATOMIC_UPDATE(SPACE, xor, old ^ x)
MSL_ATOMICS(device)
#ifndef MSL_FLAT
MSL_ATOMICS(threadgroup)
#endif
}  // namespace metal
