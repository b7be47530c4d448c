// What the CPU kernels share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline float widen(float x) { return x; }
inline float widen(at::BFloat16 x) {
  union {
    uint32_t bits;
    float value;
  } both;
  both.bits = static_cast<uint32_t>(x.x) << 16;
  return both.value;
}

// Round to nearest even, as c10 does, but without a branch: so that loops stay vectors.
template <typename T>
T narrow(float x);
template <>
inline float narrow<float>(float x) {
  return x;
}
template <>
inline at::BFloat16 narrow<at::BFloat16>(float x) {
  union {
    float value;
    uint32_t bits;
  } both;
  both.value = x;
  const uint32_t rounded = (both.bits + 0x7fffu + (both.bits >> 16 & 1u)) >> 16;
  const bool is_nan = (both.bits & 0x7fffffffu) > 0x7f800000u;
  return at::BFloat16(static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded),
                      at::BFloat16::from_bits());
}

// exp of what is at most 0; below the range of normal numbers it is their lowest. Without a branch,
// so that loops stay vectors, which libm's is not. The polynomial is Cephes' for 2^f, |f| <= 1/2
// (Moshier). The relative error, 1e-7 near 0 and 1e-6 at -20, is that which log probs have by their
// own rounding.
inline float exp_negative(float x) {
  const float log2 = (x > -87.f ? x : -87.f) * 1.44269504f;
  const int32_t whole = static_cast<int32_t>(log2 - 0.5f);
  const float f = log2 - static_cast<float>(whole);
  float power = 1.535336188319500e-4f;
  power = power * f + 1.339887440266574e-3f;
  power = power * f + 9.618437357674640e-3f;
  power = power * f + 5.550332471162809e-2f;
  power = power * f + 2.402264791363012e-1f;
  power = power * f + 6.931472028550421e-1f;
  power = power * f + 1.f;
  int32_t bits;
  std::memcpy(&bits, &power, sizeof bits);
  bits += whole * (1 << 23);
  std::memcpy(&power, &bits, sizeof bits);
  return power;
}

}  // namespace
