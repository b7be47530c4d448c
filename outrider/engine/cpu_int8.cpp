// Linears with int8 weights on a CPU, on oneDNN's exact product of 8-bit integers.
//
// Activations are not rounded to 8 bits: a row becomes 16-bit integers of its own scale, which go
// through the product as two rows of 8-bit digits. The weights are read once for both, and integer
// sums have the same bits whatever the order, so a row does not depend on its neighbours.

#include <ATen/core/Tensor.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "cpu_common.h"

namespace {

constexpr int kZero = 128;  // Digits are unsigned for oneDNN; this one stands for 0.
constexpr float kLargest = 127.0f * 256.0f;
constexpr int64_t kGrain = 2048;  // Values that are worth a thread.

struct Int8Weight {
  at::Tensor packed;   // [out, in] int8 in oneDNN's layout
  at::Tensor scales;   // [out] float32
  at::Tensor zeros;    // [out] int64, all 0
};

std::mutex mutex;
std::unordered_map<int64_t, std::shared_ptr<Int8Weight>> weights;
int64_t last_handle = 0;

// By handle: an opaque tensor cannot be part of a traced graph.
int64_t keep_int8(const at::Tensor& packed, const at::Tensor& scales) {
  auto zeros = at::zeros({scales.numel()}, at::kLong);
  auto weight = std::make_shared<Int8Weight>(Int8Weight{packed, scales.contiguous(), zeros});
  std::lock_guard<std::mutex> lock(mutex);
  weights.emplace(++last_handle, std::move(weight));
  return last_handle;
}

void drop_int8(int64_t handle) {
  std::lock_guard<std::mutex> lock(mutex);
  weights.erase(handle);
}

std::shared_ptr<Int8Weight> find(int64_t handle) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = weights.find(handle);
  TORCH_CHECK(found != weights.end(), "no int8 weight ", handle);
  return found->second;
}

// row[i] = scale * (256 * high[i] + low[i]), both digits in [-128, 127]; the scale.
template <typename T>
float to_digits(const T* row, int64_t width, uint8_t* high, uint8_t* low) {
  float peak = 0.0f;
  for (int64_t i = 0; i < width; ++i) peak = std::max(peak, std::fabs(widen(row[i])));
  float scale = peak / kLargest;
  float inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
  for (int64_t i = 0; i < width; ++i) {
    int value = static_cast<int>(std::nearbyint(widen(row[i]) * inverse));
    int upper = (value + 128) >> 8;
    high[i] = static_cast<uint8_t>(upper + kZero);
    low[i] = static_cast<uint8_t>(value - 256 * upper + kZero);
  }
  return scale;
}

// [count, in] uint8 -> [count, out] float32: exact sums, each times the scale of its column.
at::Tensor multiply(const at::Tensor& digits, const Int8Weight& weight) {
  static auto linear =
      c10::Dispatcher::singleton().findSchemaOrThrow("onednn::qlinear_pointwise", "");
  torch::jit::Stack stack;
  torch::jit::push(stack, digits, 1.0, static_cast<int64_t>(kZero), weight.packed, weight.scales,
                   weight.zeros, c10::IValue(), 1.0, static_cast<int64_t>(0), at::kFloat, "none",
                   c10::List<std::optional<at::Scalar>>(), "");
  linear.callBoxed(stack);
  return torch::jit::pop(stack).toTensor();
}

template <typename T>
void linear_rows(const T* rows, T* output, int64_t count, int64_t width, int64_t out,
                 const Int8Weight& weight, const float* bias) {
  auto digits = at::empty({2 * count, width}, at::kByte);
  auto scales = at::empty({count}, at::kFloat);
  auto* digit = digits.data_ptr<uint8_t>();
  auto* scale = scales.data_ptr<float>();
  at::parallel_for(0, count, std::max<int64_t>(1, kGrain / width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      scale[row] = to_digits(rows + row * width, width, digit + row * width,
                             digit + (count + row) * width);
  });
  auto sums = multiply(digits, weight);
  const auto* high = sums.data_ptr<float>();
  const auto* low = high + count * out;
  at::parallel_for(0, out, std::max<int64_t>(1, kGrain / count), [&](int64_t begin, int64_t end) {
    for (int64_t row = 0; row < count; ++row)
      for (int64_t i = begin; i < end; ++i) {
        float sum = (256.0f * high[row * out + i] + low[row * out + i]) * scale[row];
        output[row * out + i] = static_cast<T>(bias ? sum + bias[i] : sum);
      }
  });
}

// rows [..., in] float32 or bfloat16, bias [out] float32 -> [..., out]
at::Tensor int8_linear(const at::Tensor& rows, int64_t handle,
                       const std::optional<at::Tensor>& bias) {
  auto weight = find(handle);
  auto from = rows.contiguous();
  int64_t width = rows.size(-1), out = weight->scales.numel();
  int64_t count = from.numel() / std::max<int64_t>(1, width);
  auto sizes = rows.sizes().vec();
  sizes.back() = out;
  auto to = at::empty(sizes, rows.options());
  if (count == 0) return to;
  const float* added = bias ? bias->data_ptr<float>() : nullptr;
  if (rows.scalar_type() == at::kBFloat16) {
    linear_rows(from.data_ptr<at::BFloat16>(), to.data_ptr<at::BFloat16>(), count, width, out,
                *weight, added);
  } else {
    TORCH_CHECK(rows.scalar_type() == at::kFloat, "int8 weights need float32 or bfloat16 rows");
    linear_rows(from.data_ptr<float>(), to.data_ptr<float>(), count, width, out, *weight, added);
  }
  return to;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(outrider_cpu, library) {
  library.def("keep_int8(Tensor packed, Tensor scales) -> int", &keep_int8);
  library.def("drop_int8(int handle) -> ()", &drop_int8);
  library.def("int8_linear(Tensor rows, int handle, Tensor? bias) -> Tensor", &int8_linear);
}
