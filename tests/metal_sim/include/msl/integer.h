// Functions on any number (min, max, clamp, select) and on integers. Both arguments must have one type,
// as in Metal, where max(x, 1) of a float is ambiguous.
#pragma once

namespace metal {
#define MSL_PICK(NAME, TAKE_B)                                                  \
  template <typename T>                                                         \
  inline T NAME(T a, T b) {                                                     \
    if constexpr (msl_traits<T>::length == 1) {                                 \
      return TAKE_B ? b : a;                                                    \
    } else {                                                                    \
      T r;                                                                      \
      for (int i = 0; i < msl_traits<T>::length; i++) r[i] = NAME(a[i], b[i]);  \
      return r;                                                                 \
    }                                                                           \
  }
MSL_PICK(max, (a < b))
MSL_PICK(min, (b < a))

template <typename T>
inline T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <typename T>
inline T saturate(T x) {
  return clamp(x, (T)0, (T)1);
}
template <typename T>
inline T select(T a, T b, bool take_b) {
  return take_b ? b : a;
}
template <typename T>
inline T abs(T a) {
  if constexpr (msl_traits<T>::length == 1) {
    return a < (T)0 ? (T)-a : a;
  } else {
    T r;
    for (int i = 0; i < msl_traits<T>::length; i++) r[i] = abs(a[i]);
    return r;
  }
}

template <typename T>
inline unsigned long long msl_bits(T x) {
  return (unsigned long long)(typename std::make_unsigned<T>::type)x;
}
template <typename T>
inline T popcount(T x) {
  return (T)__builtin_popcountll(msl_bits(x));
}
template <typename T>
inline T clz(T x) {
  return x ? (T)(__builtin_clzll(msl_bits(x)) - (64 - 8 * (int)sizeof(T))) : (T)(8 * sizeof(T));
}
template <typename T>
inline T ctz(T x) {
  return x ? (T)__builtin_ctzll(msl_bits(x)) : (T)(8 * sizeof(T));
}
template <typename T>
inline T extract_bits(T x, uint offset, uint count) {
  static_assert(std::is_unsigned<T>::value, "extract_bits is simulated for unsigned integers");
  return (T)(x >> offset) & (count >= 8 * sizeof(T) ? (T)~(T)0 : (T)(((T)1 << count) - 1));
}
template <typename T>
inline T mulhi(T a, T b) {
  static_assert(sizeof(T) <= 4, "mulhi is simulated up to 32 bits");
  return (T)(((long long)a * (long long)b) >> (8 * sizeof(T)));
}
template <typename T>
inline T rotate(T x, T count) {
  static_assert(std::is_unsigned<T>::value, "rotate is simulated for unsigned integers");
  const uint bits = 8 * sizeof(T), n = (uint)count % bits;
  return n ? (T)((x << n) | (x >> (bits - n))) : x;
}

template <typename T, typename U>
inline T msl_as_type(U u) {
  static_assert(sizeof(T) == sizeof(U), "as_type needs types of one size");
  return __builtin_bit_cast(T, u);
}
}  // namespace metal

template <typename T, typename U>
inline T as_type(U u) {
  return metal::msl_as_type<T>(u);
}
