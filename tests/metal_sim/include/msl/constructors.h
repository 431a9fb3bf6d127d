// float4(a, b, c, d): clang's vectors have no such constructors, so the name followed by "(" is a macro.
// A cast (float4)x and a declaration float4 x are left alone. vec<T, 4>(...) is not simulated.
#pragma once

namespace metal {
template <typename V>
inline void msl_fill(V&, int) {}
template <typename V, typename A, typename... Rest>
inline void msl_fill(V& v, int i, A a, Rest... rest) {
  typedef typename msl_traits<V>::element E;
  if constexpr (msl_traits<A>::length == 1) {
    v[i] = (E)a;
  } else {
    for (int j = 0; j < msl_traits<A>::length; j++) v[i + j] = (E)a[j];
  }
  msl_fill(v, i + msl_traits<A>::length, rest...);
}
template <typename... A>
constexpr int msl_count() {
  int sum = 0;
  int each[] = {0, (sum += msl_traits<A>::length)...};
  (void)each;
  return sum;
}
// One scalar fills every component; otherwise the components must add up.
template <typename V, typename... A>
inline V msl_make(A... a) {
  typedef typename msl_traits<V>::element E;
  if constexpr (sizeof...(A) == 0) {
    return V{};
  } else if constexpr (sizeof...(A) == 1 && msl_count<A...>() == 1) {
    V v = ((E)a, ...);
    return v;
  } else {
    static_assert(msl_count<A...>() == (int)msl_traits<V>::length, "wrong number of vector components");
    V v;
    msl_fill(v, 0, a...);
    return v;
  }
}
}  // namespace metal

// clang refuses half <-> bfloat even when the cast is explicit; Metal allows it.
template <typename T, typename U>
inline constexpr T msl_cast(U u) {
  if constexpr ((metal::is_same_v<T, half> && metal::is_same_v<U, bfloat>) ||
                (metal::is_same_v<T, bfloat> && metal::is_same_v<U, half>)) {
    return (T)(float)u;
  } else {
    return static_cast<T>(u);
  }
}
#define static_cast msl_cast

#define char2(...) metal::msl_make<char2>(__VA_ARGS__)
#define char3(...) metal::msl_make<char3>(__VA_ARGS__)
#define char4(...) metal::msl_make<char4>(__VA_ARGS__)
#define uchar2(...) metal::msl_make<uchar2>(__VA_ARGS__)
#define uchar3(...) metal::msl_make<uchar3>(__VA_ARGS__)
#define uchar4(...) metal::msl_make<uchar4>(__VA_ARGS__)
#define short2(...) metal::msl_make<short2>(__VA_ARGS__)
#define short3(...) metal::msl_make<short3>(__VA_ARGS__)
#define short4(...) metal::msl_make<short4>(__VA_ARGS__)
#define ushort2(...) metal::msl_make<ushort2>(__VA_ARGS__)
#define ushort3(...) metal::msl_make<ushort3>(__VA_ARGS__)
#define ushort4(...) metal::msl_make<ushort4>(__VA_ARGS__)
#define int2(...) metal::msl_make<int2>(__VA_ARGS__)
#define int3(...) metal::msl_make<int3>(__VA_ARGS__)
#define int4(...) metal::msl_make<int4>(__VA_ARGS__)
#define uint2(...) metal::msl_make<uint2>(__VA_ARGS__)
#define uint3(...) metal::msl_make<uint3>(__VA_ARGS__)
#define uint4(...) metal::msl_make<uint4>(__VA_ARGS__)
#define long2(...) metal::msl_make<long2>(__VA_ARGS__)
#define long3(...) metal::msl_make<long3>(__VA_ARGS__)
#define long4(...) metal::msl_make<long4>(__VA_ARGS__)
#define ulong2(...) metal::msl_make<ulong2>(__VA_ARGS__)
#define ulong3(...) metal::msl_make<ulong3>(__VA_ARGS__)
#define ulong4(...) metal::msl_make<ulong4>(__VA_ARGS__)
#define half2(...) metal::msl_make<half2>(__VA_ARGS__)
#define half3(...) metal::msl_make<half3>(__VA_ARGS__)
#define half4(...) metal::msl_make<half4>(__VA_ARGS__)
#define bfloat2(...) metal::msl_make<bfloat2>(__VA_ARGS__)
#define bfloat3(...) metal::msl_make<bfloat3>(__VA_ARGS__)
#define bfloat4(...) metal::msl_make<bfloat4>(__VA_ARGS__)
#define float2(...) metal::msl_make<float2>(__VA_ARGS__)
#define float3(...) metal::msl_make<float3>(__VA_ARGS__)
#define float4(...) metal::msl_make<float4>(__VA_ARGS__)
#define bool2(...) metal::msl_make<bool2>(__VA_ARGS__)
#define bool3(...) metal::msl_make<bool3>(__VA_ARGS__)
#define bool4(...) metal::msl_make<bool4>(__VA_ARGS__)
