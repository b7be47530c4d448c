// What the CPU kernels share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
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

}  // namespace
