// SIMD-group functions and barriers. Each call is a meeting point: a lane deposits its value and sleeps until
// the whole SIMD-group has come to the same call. Meeting at different calls, or not at all, is an error.
#pragma once

#define MSL_SITE unsigned site_ = __builtin_LINE() * MSL_SITE_COLUMNS + __builtin_COLUMN() % MSL_SITE_COLUMNS

namespace metal {
template <typename T>
struct msl_lanes {
  T value[MSL_LANES];
  uint mask, lane;
  bool active(uint i) const { return i < MSL_LANES && (mask >> i & 1); }
};

template <typename T>
inline msl_lanes<T> msl_exchange(T v, unsigned site) {
  static_assert(sizeof(T) <= MSL_SLOT_BYTES, "value too wide for a SIMD-group function");
  msl_lanes<T> all;
  const unsigned char* slots = msl_simd_exchange(&v, sizeof(T), site, &all.mask, &all.lane);
  for (int i = 0; i < MSL_LANES; i++) __builtin_memcpy(&all.value[i], slots + MSL_SLOT_BYTES * i, sizeof(T));
  return all;
}

// A tree of neighbours (1, 2, 4, 8, 16 apart); lanes that do not exist count as `identity`.
template <typename T, typename F>
inline T msl_reduce(T v, T identity, F f, unsigned site) {
  msl_lanes<T> all = msl_exchange(v, site);
  for (int i = 0; i < MSL_LANES; i++)
    if (!all.active(i)) all.value[i] = identity;
  for (int d = 1; d < MSL_LANES; d *= 2)
    for (int i = 0; i < MSL_LANES; i += 2 * d) all.value[i] = f(all.value[i], all.value[i + d]);
  return all.value[0];
}
#define MSL_SIMD_REDUCE(NAME, IDENTITY, EXPRESSION)                                            \
  template <typename T>                                                                        \
  inline T NAME(T v, MSL_SITE) {                                                               \
    return msl_reduce(v, IDENTITY, [](T a, T b) { return (T)(EXPRESSION); }, site_);           \
  }
MSL_SIMD_REDUCE(simd_sum, (T)0, a + b)
MSL_SIMD_REDUCE(simd_product, (T)1, a* b)
MSL_SIMD_REDUCE(simd_max, v, max(a, b))
MSL_SIMD_REDUCE(simd_min, v, min(a, b))
MSL_SIMD_REDUCE(simd_and, v, a& b)
MSL_SIMD_REDUCE(simd_or, v, a | b)
MSL_SIMD_REDUCE(simd_xor, (T)0, a ^ b)
inline bool simd_all(bool v, MSL_SITE) { return msl_reduce(v, v, [](bool a, bool b) { return a && b; }, site_); }
inline bool simd_any(bool v, MSL_SITE) { return msl_reduce(v, v, [](bool a, bool b) { return a || b; }, site_); }

template <typename T>
inline T msl_read_lane(const msl_lanes<T>& all, uint from, unsigned site) {
  if (!all.active(from)) msl_fail("a shuffle reads a lane that is inactive or beyond 31", site);
  return all.value[from % MSL_LANES];
}
template <typename T>
inline T simd_shuffle(T v, ushort from, MSL_SITE) {
  return msl_read_lane(msl_exchange(v, site_), from, site_);
}
template <typename T>
inline T simd_broadcast(T v, ushort from, MSL_SITE) {
  return msl_read_lane(msl_exchange(v, site_), from, site_);
}
template <typename T>
inline T simd_shuffle_xor(T v, ushort flip, MSL_SITE) {
  msl_lanes<T> all = msl_exchange(v, site_);
  return msl_read_lane(all, all.lane ^ flip, site_);
}
template <typename T>
inline T simd_broadcast_first(T v, MSL_SITE) {
  msl_lanes<T> all = msl_exchange(v, site_);
  return all.value[__builtin_ctz(all.mask)];
}
// Metal leaves the lanes past the edge undefined for up and down; a lane keeps its own value on Apple's chips.
template <typename T>
inline T simd_shuffle_down(T v, ushort by, MSL_SITE) {
  msl_lanes<T> all = msl_exchange(v, site_);
  return all.active(all.lane + by) ? all.value[all.lane + by] : v;
}
template <typename T>
inline T simd_shuffle_up(T v, ushort by, MSL_SITE) {
  msl_lanes<T> all = msl_exchange(v, site_);
  return all.lane >= by ? msl_read_lane(all, all.lane - by, site_) : v;
}
template <typename T>
inline T simd_shuffle_and_fill_up(T v, T fill, ushort by, MSL_SITE) {
  msl_lanes<T> all = msl_exchange(v, site_), fills = msl_exchange(fill, site_);
  return all.lane >= by ? msl_read_lane(all, all.lane - by, site_) : fills.value[(MSL_LANES + all.lane - by) % MSL_LANES];
}
template <typename T>
inline T msl_sum_below(const msl_lanes<T>& all, uint end) {
  T sum = 0;
  for (uint i = 0; i < end; i++)
    if (all.active(i)) sum = (T)(sum + all.value[i]);
  return sum;
}
template <typename T>
inline T simd_prefix_inclusive_sum(T v, MSL_SITE) {
  msl_lanes<T> all = msl_exchange(v, site_);
  return msl_sum_below(all, all.lane + 1);
}
template <typename T>
inline T simd_prefix_exclusive_sum(T v, MSL_SITE) {
  msl_lanes<T> all = msl_exchange(v, site_);
  return msl_sum_below(all, all.lane);
}

struct simd_vote {
  typedef ulong vote_t;
  ulong bits;
  explicit operator ulong() const { return bits; }
  bool any() const { return bits != 0; }
};
inline simd_vote simd_ballot(bool v, MSL_SITE) {
  msl_lanes<bool> all = msl_exchange(v, site_);
  ulong bits = 0;
  for (int i = 0; i < MSL_LANES; i++)
    if (all.active(i) && all.value[i]) bits |= 1ul << i;
  return {bits};
}

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((int)a | (int)b); }
inline void threadgroup_barrier(mem_flags, MSL_SITE) { msl_barrier(0, site_); }
inline void simdgroup_barrier(mem_flags, MSL_SITE) { msl_barrier(1, site_); }
}  // namespace metal
