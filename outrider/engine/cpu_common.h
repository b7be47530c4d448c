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

}  // namespace
