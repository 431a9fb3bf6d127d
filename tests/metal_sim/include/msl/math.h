// Floating-point functions, element by element over vectors.
//
// half and bfloat are computed in float and rounded once, so results are at least as exact as Metal's.
// Integers are refused: Metal has a half and a float overload of each, and the call is ambiguous there.
#pragma once

namespace metal {
// Apply F to each element of a (and b, c), in float.
template <typename T, typename F>
inline T msl_map(F f, T a) {
  typedef typename msl_traits<T>::element E;
  if constexpr (msl_traits<T>::length == 1) {
    return (T)f((float)a);
  } else {
    T r;
    for (int i = 0; i < msl_traits<T>::length; i++) r[i] = (E)f((float)a[i]);
    return r;
  }
}
template <typename T, typename F>
inline T msl_map(F f, T a, T b) {
  typedef typename msl_traits<T>::element E;
  if constexpr (msl_traits<T>::length == 1) {
    return (T)f((float)a, (float)b);
  } else {
    T r;
    for (int i = 0; i < msl_traits<T>::length; i++) r[i] = (E)f((float)a[i], (float)b[i]);
    return r;
  }
}
template <typename T, typename F>
inline T msl_map(F f, T a, T b, T c) {
  typedef typename msl_traits<T>::element E;
  if constexpr (msl_traits<T>::length == 1) {
    return (T)f((float)a, (float)b, (float)c);
  } else {
    T r;
    for (int i = 0; i < msl_traits<T>::length; i++) r[i] = (E)f((float)a[i], (float)b[i], (float)c[i]);
    return r;
  }
}

#define MSL_UNARY(NAME, EXPRESSION)                              \
  template <typename T, typename = enable_if_t<msl_is_float<T>>> \
  inline T NAME(T a) {                                           \
    return msl_map([](float x) { return EXPRESSION; }, a);       \
  }
#define MSL_BINARY(NAME, EXPRESSION)                                     \
  template <typename T, typename = enable_if_t<msl_is_float<T>>>         \
  inline T NAME(T a, T b) {                                              \
    return msl_map([](float x, float y) { return EXPRESSION; }, a, b);   \
  }
#define MSL_PREDICATE(NAME)                                             \
  template <typename T, typename = enable_if_t<msl_is_float_scalar<T>>> \
  inline bool NAME(T a) {                                               \
    return __builtin_##NAME((float)a);                                  \
  }

#define MSL_FLOAT_FUNCTIONS                                                                       \
  MSL_UNARY(exp, __builtin_expf(x))                                                               \
  MSL_UNARY(exp2, __builtin_exp2f(x))                                                             \
  MSL_UNARY(exp10, __builtin_powf(10.0f, x))                                                      \
  MSL_UNARY(log, __builtin_logf(x))                                                               \
  MSL_UNARY(log2, __builtin_log2f(x))                                                             \
  MSL_UNARY(log10, __builtin_log10f(x))                                                           \
  MSL_UNARY(sqrt, __builtin_sqrtf(x))                                                             \
  MSL_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))                                                     \
  MSL_UNARY(sin, __builtin_sinf(x))                                                               \
  MSL_UNARY(cos, __builtin_cosf(x))                                                               \
  MSL_UNARY(tan, __builtin_tanf(x))                                                               \
  MSL_UNARY(sinh, __builtin_sinhf(x))                                                             \
  MSL_UNARY(cosh, __builtin_coshf(x))                                                             \
  MSL_UNARY(tanh, __builtin_tanhf(x))                                                             \
  MSL_UNARY(asin, __builtin_asinf(x))                                                             \
  MSL_UNARY(acos, __builtin_acosf(x))                                                             \
  MSL_UNARY(atan, __builtin_atanf(x))                                                             \
  MSL_UNARY(floor, __builtin_floorf(x))                                                           \
  MSL_UNARY(ceil, __builtin_ceilf(x))                                                             \
  MSL_UNARY(trunc, __builtin_truncf(x))                                                           \
  MSL_UNARY(rint, __builtin_rintf(x))                                                             \
  MSL_UNARY(round, __builtin_roundf(x))                                                           \
  MSL_UNARY(fabs, __builtin_fabsf(x))                                                             \
  MSL_UNARY(fract, x - __builtin_floorf(x))                                                       \
  MSL_BINARY(pow, __builtin_powf(x, y))                                                           \
  MSL_BINARY(powr, __builtin_powf(x, y))                                                          \
  MSL_BINARY(atan2, __builtin_atan2f(x, y))                                                       \
  MSL_BINARY(fmod, __builtin_fmodf(x, y))                                                         \
  MSL_BINARY(fmax, __builtin_fmaxf(x, y))                                                         \
  MSL_BINARY(fmin, __builtin_fminf(x, y))                                                         \
  MSL_BINARY(copysign, __builtin_copysignf(x, y))                                                 \
  template <typename T, typename = enable_if_t<msl_is_float<T>>>                                  \
  inline T fma(T a, T b, T c) {                                                                   \
    return msl_map([](float x, float y, float z) { return __builtin_fmaf(x, y, z); }, a, b, c);   \
  }

MSL_FLOAT_FUNCTIONS
namespace precise { MSL_FLOAT_FUNCTIONS }
namespace fast { MSL_FLOAT_FUNCTIONS }

MSL_PREDICATE(isnan)
MSL_PREDICATE(isinf)
MSL_PREDICATE(isfinite)
MSL_PREDICATE(signbit)

template <typename T>
inline T sign(T x) {
  return x > (T)0 ? (T)1 : x < (T)0 ? (T)-1 : x;
}
template <typename T>
inline T mix(T a, T b, T t) {
  return a + (b - a) * t;
}
template <typename V>
inline typename msl_traits<V>::element dot(V a, V b) {
  static_assert(msl_traits<V>::length > 1 && msl_is_float<V>, "dot takes floating-point vectors");
  typename msl_traits<V>::element s = a[0] * b[0];
  for (int i = 1; i < msl_traits<V>::length; i++) s += a[i] * b[i];
  return s;
}
template <typename V>
inline typename msl_traits<V>::element length_squared(V a) {
  return dot(a, a);
}
inline float4 unpack_unorm4x8_to_float(uint x) {
  return float4{(x & 255) / 255.0f, (x >> 8 & 255) / 255.0f, (x >> 16 & 255) / 255.0f, (x >> 24) / 255.0f};
}
}  // namespace metal
