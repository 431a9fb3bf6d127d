// Address spaces, scalar and vector types, type traits.
//
// The address spaces are clang's own: converting a device pointer to a threadgroup one, or dropping the
// qualifier in a helper's parameter, is an error as it is in Metal. MSL_FLAT does without them, for running.
#pragma once
#include <limits>
#include <type_traits>

#define __METAL_VERSION__ 320
#define __METAL__ 1
#ifdef MSL_FLAT
#define device
#define constant
#define threadgroup
#else
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#endif
#define thread
#define kernel
#define METAL_FUNC inline __attribute__((__always_inline__))
// A threadgroup variable is one static object: a CPU runs the threadgroups one after another. The section lets
// the scheduler find all of them, to poison them and to add up their size.
#define MSL_THREADGROUP_VARIABLE static __attribute__((section("msl_tg"), used))

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;

#define MSL_EACH_NUMBER(F) \
  F(char) F(uchar) F(short) F(ushort) F(int) F(uint) F(long) F(ulong) F(half) F(bfloat) F(float)

#define MSL_VECTORS(T)                                     \
  typedef T T##2 __attribute__((ext_vector_type(2)));      \
  typedef T T##3 __attribute__((ext_vector_type(3)));      \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_EACH_NUMBER(MSL_VECTORS)
typedef bool bool2 __attribute__((ext_vector_type(2)));
typedef bool bool3 __attribute__((ext_vector_type(3)));
typedef bool bool4 __attribute__((ext_vector_type(4)));

#undef INFINITY
#undef NAN
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT __FLT_MAX__
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX ((half)65504.0f)
#define M_E_F 2.71828183f
#define M_PI_F 3.14159274f
#define M_PI_2_F 1.57079637f
#define M_1_PI_F 0.318309873f
#define M_LOG2E_F 1.44269502f
#define M_LN2_F 0.693147182f
#define M_SQRT2_F 1.41421354f

namespace metal {
using std::conditional;
using std::enable_if;
using std::false_type;
using std::integral_constant;
using std::is_convertible;
using std::is_same;
using std::make_unsigned;
using std::remove_cv;
using std::remove_reference;
using std::true_type;
template <bool B, class T = void>
using enable_if_t = typename std::enable_if<B, T>::type;
template <bool B, class T, class F>
using conditional_t = typename std::conditional<B, T, F>::type;
template <class A, class B>
constexpr bool is_same_v = std::is_same<A, B>::value;

template <typename T, unsigned N>
struct msl_vec_of {
  typedef T type __attribute__((ext_vector_type(N)));
};
template <typename T, unsigned N>
using vec = typename msl_vec_of<T, N>::type;

// Element type and length of a scalar (length 1) or vector.
template <typename T>
struct msl_traits {
  typedef T element;
  enum { length = 1 };
};
#define MSL_TRAITS(T) MSL_TRAITS_OF(T, 2) MSL_TRAITS_OF(T, 3) MSL_TRAITS_OF(T, 4)
#define MSL_TRAITS_OF(T, N)   \
  template <>                 \
  struct msl_traits<T##N> {   \
    typedef T element;        \
    enum { length = N };      \
  };
MSL_EACH_NUMBER(MSL_TRAITS)
MSL_TRAITS(bool)

template <typename T>
constexpr bool msl_is_float_scalar = is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <typename T>
constexpr bool msl_is_float = msl_is_float_scalar<typename msl_traits<T>::element>;
template <typename T>
struct is_floating_point : integral_constant<bool, msl_is_float_scalar<typename remove_cv<T>::type>> {};
template <typename T>
struct is_integral : std::is_integral<T> {};
template <typename T>
struct is_arithmetic : integral_constant<bool, is_floating_point<T>::value || is_integral<T>::value> {};
template <typename T>
constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <typename T>
constexpr bool is_integral_v = is_integral<T>::value;

template <typename T>
struct numeric_limits : std::numeric_limits<T> {};
#define MSL_LIMITS(T, MAX, MIN, EPSILON)                                   \
  template <>                                                              \
  struct numeric_limits<T> {                                               \
    static constexpr T infinity() { return (T)__builtin_inff(); }          \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); }       \
    static constexpr T max() { return (T)MAX; }                            \
    static constexpr T lowest() { return (T) - MAX; }                      \
    static constexpr T min() { return (T)MIN; }                            \
    static constexpr T epsilon() { return (T)EPSILON; }                    \
  };
MSL_LIMITS(half, 65504.0f, 6.103515625e-05f, 0.0009765625f)
MSL_LIMITS(bfloat, 3.38953139e38f, 1.17549435e-38f, 0.0078125f)
}  // namespace metal
