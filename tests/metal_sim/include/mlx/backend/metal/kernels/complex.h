#pragma once
// Only enough of MLX's complex_t for its utils.h to parse: the methods of the real one carry
// address-space qualifiers that C++ cannot express. Complex arrays are not simulated.
template <typename T>
struct complex_t {
  T real, imag;
  constexpr complex_t(T r = 0, T i = 0) : real(r), imag(i) {}
};
typedef complex_t<float> complex64_t;
