// CPU kernels of the engine: attention over paged KV, RMS norm, packed weights.
//
// Every output row is computed by the same operations in the same order whatever else is in the
// pass, so that its bits depend on its own sequence alone (docs/design.md, deterministic mode).
// Contexts are cut at fixed places: the blocks of the KV pool.
//
// Layout of the pool, per layer: keys [blocks][kv_heads][head_dim][B], so that one query element
// meets the keys of a block at once; values [blocks][kv_heads][B][head_dim].

#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "cpu_common.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kLanes = 32;     // partial sums of a norm
constexpr int64_t kNormRows = 64;  // that one thread takes on at least
constexpr int64_t kTile = 8;    // query rows that share what is loaded of K and V
constexpr int64_t kWide = 32;   // floats of a row that stay in registers meanwhile

// Rows first_row ... first_row + num_rows - 1 of a pass are the tokens at places start,
// start + 1, ... of a sequence whose blocks stand at `table`. A row sees the places up to its own,
// or in a tree what its sight says.
struct Task {
  int64_t first_row, num_rows, start, table;
};

// What a row sees: all places before `full`, and place full + i for each bit i of `mask`.
struct Sight {
  int64_t full;
  uint64_t mask;
};

struct Shape {
  int64_t heads, kv_heads, head_dim;
  int64_t groups() const { return heads / kv_heads; }
};

// scores[i][t] = scale * query[i] . key t, for one block of keys.
template <typename T, int64_t B, int N>
void score_block(const float* const* query, const T* keys, int64_t head_dim, float scale,
                 float* const* scores) {
  float sums[N][B] = {};
  for (int64_t d = 0; d < head_dim; ++d) {
    float wide[B];
#pragma omp simd
    for (int64_t t = 0; t < B; ++t) wide[t] = widen(keys[d * B + t]);
    for (int i = 0; i < N; ++i) {
      const float x = query[i][d];
#pragma omp simd
      for (int64_t t = 0; t < B; ++t) sums[i][t] += x * wide[t];
    }
  }
  for (int i = 0; i < N; ++i)
    for (int64_t t = 0; t < B; ++t) scores[i][t] = sums[i][t] * scale;
}

// output[i][d] += sum over t of weights[i][t] * value t [d], for one block of values and the kWide
// places from `first` on.
template <typename T, int64_t B, int N>
void weigh_part(float* const* weights, const T* values, int64_t head_dim, int64_t first,
                float* const* output) {
  float sums[N][kWide];
  for (int i = 0; i < N; ++i)
    for (int64_t d = 0; d < kWide; ++d) sums[i][d] = output[i][first + d];
  for (int64_t t = 0; t < B; ++t) {
    const T* value = values + t * head_dim + first;
    float wide[kWide];
#pragma omp simd
    for (int64_t d = 0; d < kWide; ++d) wide[d] = widen(value[d]);
    for (int i = 0; i < N; ++i) {
      const float weight = weights[i][t];
#pragma omp simd
      for (int64_t d = 0; d < kWide; ++d) sums[i][d] += weight * wide[d];
    }
  }
  for (int i = 0; i < N; ++i)
    for (int64_t d = 0; d < kWide; ++d) output[i][first + d] = sums[i][d];
}

// output[i] += sum over t of weights[i][t] * value t, for one block of values.
template <typename T, int64_t B, int N>
void weigh_block(float* const* weights, const T* values, int64_t head_dim, float* const* output) {
  int64_t whole = 0;
  for (; whole + kWide <= head_dim; whole += kWide)
    weigh_part<T, B, N>(weights, values, head_dim, whole, output);
  if (whole == head_dim) return;
  for (int64_t t = 0; t < B; ++t) {
    const T* value = values + t * head_dim;
    for (int i = 0; i < N; ++i) {
      const float weight = weights[i][t];
      float* out = output[i];
#pragma omp simd
      for (int64_t d = whole; d < head_dim; ++d) out[d] += weight * widen(value[d]);
    }
  }
}

// Turns the first `seen` of `length` scores into exp(score - max), the others into 0; their sum.
template <int64_t B>
float exponentiate(float* scores, int64_t seen, int64_t length) {
  std::fill(scores + seen, scores + length, -kInfinity);
  float lanes[B];
  std::fill(lanes, lanes + B, -kInfinity);
  for (int64_t b = 0; b < length; b += B) {
#pragma omp simd
    for (int64_t t = 0; t < B; ++t)
      lanes[t] = scores[b + t] > lanes[t] ? scores[b + t] : lanes[t];
  }
  const float best = *std::max_element(lanes, lanes + B);
  std::fill(lanes, lanes + B, 0.f);
  for (int64_t b = 0; b < length; b += B) {
#pragma omp simd
    for (int64_t t = 0; t < B; ++t) {
      const float e = exp_negative(scores[b + t] - best);
      scores[b + t] = e;
      lanes[t] += e;
    }
  }
  std::fill(scores + seen, scores + length, 0.f);  // In `lanes` they were too small to count.
  float sum = 0.f;
  for (int64_t t = 0; t < B; ++t) sum += lanes[t];
  return sum;
}

// Moves the scores of what a row sees together, so that its sums are those of a chain; how many.
int64_t gather(const Sight& sight, float* scores) {
  int64_t count = sight.full;
  for (uint64_t left = sight.mask; left; left &= left - 1)
    scores[count++] = scores[sight.full + __builtin_ctzll(left)];
  return count;
}

// Moves `count` weights, and what is hidden gets 0, back to the places that `gather` took them from.
void spread(const Sight& sight, int64_t count, float* weights) {
  for (int64_t bit = 63; bit >= 0; --bit) {
    if (!(sight.mask >> bit & 1)) continue;
    const float weight = weights[--count];
    weights[count] = 0.f;
    weights[sight.full + bit] = weight;
  }
}

// A tile's rows: where they stand in query and output, and how many places each sees.
struct Row {
  int64_t offset, seen;
  const Sight* sight;
};

template <int N>
int64_t find_rows(const Sight* sights, const Task& task, int64_t kv_head, int64_t first,
                  const Shape& shape, Row* rows) {
  for (int i = 0; i < N; ++i) {
    const int64_t row = (first + i) / shape.groups();
    const int64_t head = kv_head * shape.groups() + (first + i) % shape.groups();
    rows[i] = {((task.first_row + row) * shape.heads + head) * shape.head_dim,
               task.start + row + 1, sights ? sights + task.first_row + row : nullptr};
  }
  return task.start + (first + N - 1) / shape.groups() + 1;
}

// Scores of a row become weights; their sum.
template <int64_t B>
float weights_of(const Row& row, float* scores, int64_t length) {
  const int64_t seen = row.sight ? gather(*row.sight, scores) : row.seen;
  const float sum = exponentiate<B>(scores, seen, length);
  if (row.sight) spread(*row.sight, seen, scores);
  return sum;
}

// Up to kTile query rows of one KV head against their sequence's context; `sights` can be null.
template <typename T, int64_t B, int N>
void attend_tile(const T* query, const T* keys, const T* values, const int32_t* table,
                 const Sight* sights, const Task& task, int64_t kv_head, int64_t first,
                 const Shape& shape, float scale, std::vector<float>& scratch, T* output) {
  const int64_t dim = shape.head_dim;
  Row rows[N];
  const int64_t places = find_rows<N>(sights, task, kv_head, first, shape, rows);
  const int64_t length = (places + B - 1) / B * B;
  scratch.resize(N * (2 * dim + length));
  float *q[N], *o[N], *scores[N], *at_block[N];
  for (int i = 0; i < N; ++i) {
    q[i] = scratch.data() + i * (2 * dim + length);
    o[i] = q[i] + dim;
    scores[i] = o[i] + dim;
    for (int64_t d = 0; d < dim; ++d) {
      q[i][d] = widen(query[rows[i].offset + d]);
      o[i][d] = 0.f;
    }
  }
  const int64_t block_size = shape.kv_heads * B * dim, in_block = kv_head * B * dim;
  for (int64_t b = 0; b < length / B; ++b) {
    for (int i = 0; i < N; ++i) at_block[i] = scores[i] + b * B;
    score_block<T, B, N>(q, keys + table[b] * block_size + in_block, dim, scale, at_block);
  }
  float sums[N];
  for (int i = 0; i < N; ++i) sums[i] = weights_of<B>(rows[i], scores[i], length);
  for (int64_t b = 0; b < length / B; ++b) {
    for (int i = 0; i < N; ++i) at_block[i] = scores[i] + b * B;
    weigh_block<T, B, N>(at_block, values + table[b] * block_size + in_block, dim, o);
  }
  for (int i = 0; i < N; ++i)
    for (int64_t d = 0; d < dim; ++d)
      output[rows[i].offset + d] = narrow<T>(o[i][d] / sums[i]);
}

#ifdef __AVX512BF16__

// The same for bfloat16 and blocks of 32, by products of pairs: two places of a query and a key at
// once, two values and their weights (rounded to bfloat16) at once. `head_dim` is a multiple of 32.
// Interleaving two vectors of 32 leaves the order 0-3, 8-11, ... and 4-7, 12-15, ...: sums stay in
// it until they are stored.
constexpr int64_t kPaired = 32;

struct Paired {
  __m512bh low, high;
};

inline Paired interleave(const at::BFloat16* first, const at::BFloat16* second) {
  const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
  return {reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(a, b)),
          reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(a, b))};
}

inline __m512bh both(const at::BFloat16* pair) {
  int32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
}

inline void store_in_order(__m512 low, __m512 high, float* to) {
  const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i back =
      _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  _mm512_storeu_ps(to, _mm512_permutex2var_ps(low, front, high));
  _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(low, back, high));
}

template <int N>
void attend_paired(const at::BFloat16* query, const at::BFloat16* keys, const at::BFloat16* values,
                   const int32_t* table, const Sight* sights, const Task& task, int64_t kv_head,
                   int64_t first, const Shape& shape, float scale, std::vector<float>& scratch,
                   at::BFloat16* output) {
  constexpr int64_t B = kPaired;
  const int64_t dim = shape.head_dim;
  Row rows[N];
  const int64_t places = find_rows<N>(sights, task, kv_head, first, shape, rows);
  const int64_t length = (places + B - 1) / B * B;
  scratch.resize(N * (length + length / 2));
  float* scores[N];
  at::BFloat16* weights[N];
  for (int i = 0; i < N; ++i) {
    scores[i] = scratch.data() + i * length;
    weights[i] = reinterpret_cast<at::BFloat16*>(scratch.data() + N * length) + i * length;
  }
  const int64_t block_size = shape.kv_heads * B * dim, in_block = kv_head * B * dim;
  for (int64_t b = 0; b < length / B; ++b) {
    const at::BFloat16* key = keys + table[b] * block_size + in_block;
    __m512 low[N], high[N];
    for (int i = 0; i < N; ++i) low[i] = high[i] = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d += 2) {
      const Paired pair = interleave(key + d * B, key + (d + 1) * B);
      for (int i = 0; i < N; ++i) {
        const __m512bh x = both(query + rows[i].offset + d);
        low[i] = _mm512_dpbf16_ps(low[i], pair.low, x);
        high[i] = _mm512_dpbf16_ps(high[i], pair.high, x);
      }
    }
    const __m512 factor = _mm512_set1_ps(scale);
    for (int i = 0; i < N; ++i)
      store_in_order(_mm512_mul_ps(low[i], factor), _mm512_mul_ps(high[i], factor),
                     scores[i] + b * B);
  }
  float sums[N];
  for (int i = 0; i < N; ++i) {
    sums[i] = weights_of<B>(rows[i], scores[i], length);
    for (int64_t t = 0; t < length; ++t) weights[i][t] = narrow<at::BFloat16>(scores[i][t]);
  }
  for (int64_t d = 0; d < dim; d += kPaired) {
    __m512 low[N], high[N];
    for (int i = 0; i < N; ++i) low[i] = high[i] = _mm512_setzero_ps();
    for (int64_t b = 0; b < length / B; ++b) {
      const at::BFloat16* value = values + table[b] * block_size + in_block + d;
      for (int64_t t = 0; t < B; t += 2) {
        const Paired pair = interleave(value + t * dim, value + (t + 1) * dim);
        for (int i = 0; i < N; ++i) {
          const __m512bh weight = both(weights[i] + b * B + t);
          low[i] = _mm512_dpbf16_ps(low[i], pair.low, weight);
          high[i] = _mm512_dpbf16_ps(high[i], pair.high, weight);
        }
      }
    }
    for (int i = 0; i < N; ++i) {
      float part[kPaired];
      store_in_order(low[i], high[i], part);
      for (int64_t j = 0; j < kPaired; ++j)
        output[rows[i].offset + d + j] = narrow<at::BFloat16>(part[j] / sums[i]);
    }
  }
}

#endif

// How many rows of a tile, at compile time.
template <int N>
using Rows = std::integral_constant<int, N>;

template <typename T, int64_t B>
void attend(const T* query, const T* keys, const T* values, const int32_t* table,
            const Sight* sights, const Task& task, int64_t kv_head, const Shape& shape, float scale,
            T* output) {
  std::vector<float> scratch;
  const int64_t count = task.num_rows * shape.groups();
  int64_t first = 0;
  const auto next = [&](auto rows) {
    constexpr int N = decltype(rows)::value;
#ifdef __AVX512BF16__
    if constexpr (std::is_same_v<T, at::BFloat16> && B == kPaired) {
      if (shape.head_dim % kPaired == 0) {
        attend_paired<N>(query, keys, values, table, sights, task, kv_head, first, shape, scale,
                         scratch, output);
        return;
      }
    }
#endif
    attend_tile<T, B, N>(query, keys, values, table, sights, task, kv_head, first, shape, scale,
                         scratch, output);
  };
  for (; first + kTile <= count; first += kTile) next(Rows<kTile>());
  switch (count - first) {
    case 7: next(Rows<7>()); break;
    case 6: next(Rows<6>()); break;
    case 5: next(Rows<5>()); break;
    case 4: next(Rows<4>()); break;
    case 3: next(Rows<3>()); break;
    case 2: next(Rows<2>()); break;
    case 1: next(Rows<1>()); break;
    default: break;
  }
}

template <typename T, int64_t B>
void store(const at::Tensor& key, const at::Tensor& value, const int64_t* slots, T* keys,
           T* values) {
  const int64_t kv_heads = key.size(1), dim = key.size(2), per_head = B * dim;
  for (int64_t r = 0; r < key.size(0); ++r) {
    const int64_t block = slots[r] / B, at = slots[r] % B;
    for (int64_t h = 0; h < kv_heads; ++h) {
      const T* from_key = key.data_ptr<T>() + r * key.stride(0) + h * key.stride(1);
      const T* from_value = value.data_ptr<T>() + r * value.stride(0) + h * value.stride(1);
      T* to_key = keys + (block * kv_heads + h) * per_head + at;
      T* to_value = values + (block * kv_heads + h) * per_head + at * dim;
      for (int64_t d = 0; d < dim; ++d) to_key[d * B] = from_key[d];
      std::copy(from_value, from_value + dim, to_value);
    }
  }
}

template <typename T, int64_t B>
void run_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   at::Tensor& keys, at::Tensor& values, const at::Tensor& slots,
                   const at::Tensor& tasks, const at::Tensor& tables, const at::Tensor& sights,
                   float scale, at::Tensor& output) {
  const Shape shape{query.size(1), key.size(1), query.size(2)};
  store<T, B>(key, value, slots.data_ptr<int64_t>(), keys.data_ptr<T>(), values.data_ptr<T>());
  const int64_t* numbers = tasks.data_ptr<int64_t>();
  const int32_t* table = tables.data_ptr<int32_t>();
  static_assert(sizeof(Sight) == 2 * sizeof(int64_t));
  const auto* sight =
      sights.numel() ? reinterpret_cast<const Sight*>(sights.data_ptr<int64_t>()) : nullptr;
  at::parallel_for(0, tasks.size(0) * shape.kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t* row = numbers + i / shape.kv_heads * 4;
      const Task task{row[0], row[1], row[2], row[3]};
      attend<T, B>(query.data_ptr<T>(), keys.data_ptr<T>(), values.data_ptr<T>(),
                table + task.table, sight, task, i % shape.kv_heads, shape, scale,
                output.data_ptr<T>());
    }
  });
}

template <typename T>
void run_blocks(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                at::Tensor& keys, at::Tensor& values, const at::Tensor& slots,
                const at::Tensor& tasks, const at::Tensor& tables, const at::Tensor& sights,
                float scale, at::Tensor& output) {
  const auto run = keys.size(-1) == 32 ? run_attention<T, 32> : run_attention<T, 8>;
  run(query, key, value, keys, values, slots, tasks, tables, sights, scale, output);
}

// query [rows, heads, head_dim], key and value [rows, kv_heads, head_dim], slots [rows],
// tasks [n, 4] as struct Task, tables flat int32, sights [rows, 2] as struct Sight, or empty where
// no row is of a tree. Writes the rows' KV, then attends.
at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           at::Tensor keys, at::Tensor values, const at::Tensor& slots,
                           const at::Tensor& tasks, const at::Tensor& tables,
                           const at::Tensor& sights, double scale) {
  TORCH_CHECK(key.stride(2) == 1 && value.stride(2) == 1, "head_dim must be contiguous");
  TORCH_CHECK(keys.size(-1) == 32 || keys.size(-1) == 8, "blocks must have 8 or 32 tokens");
  const at::Tensor rows = query.contiguous();
  at::Tensor output = at::empty_like(rows);
  const bool is_bf16 = rows.scalar_type() == at::kBFloat16;
  TORCH_CHECK(is_bf16 || rows.scalar_type() == at::kFloat, "float32 or bfloat16 is needed");
  const auto run = is_bf16 ? run_blocks<at::BFloat16> : run_blocks<float>;
  run(rows, key, value, keys, values, slots, tasks, tables, sights, static_cast<float>(scale),
      output);
  return output;
}

template <typename T>
void norm_rows(const T* inputs, const T* weight, T* outputs, int64_t begin, int64_t end,
               int64_t width, float epsilon) {
  for (int64_t r = begin; r < end; ++r) {
    const T* input = inputs + r * width;
    T* output = outputs + r * width;
    float lanes[kLanes] = {};
    const int64_t whole = width / kLanes * kLanes;
    for (int64_t b = 0; b < whole; b += kLanes) {
#pragma omp simd
      for (int64_t t = 0; t < kLanes; ++t) {
        const float x = widen(input[b + t]);
        lanes[t] += x * x;
      }
    }
    for (int64_t d = whole; d < width; ++d) lanes[d - whole] += widen(input[d]) * widen(input[d]);
    float sum = 0.f;
    for (int64_t t = 0; t < kLanes; ++t) sum += lanes[t];
    const float scale = 1.f / std::sqrt(sum / static_cast<float>(width) + epsilon);
#pragma omp simd
    for (int64_t d = 0; d < width; ++d)
      output[d] = narrow<T>(widen(weight[d]) * widen(narrow<T>(widen(input[d]) * scale)));
  }
}

// weight * input / rms(input) over the last dimension, rounded before the weight as Llama does.
at::Tensor rms_norm(const at::Tensor& input, const at::Tensor& weight, double epsilon) {
  const at::Tensor from = input.contiguous();
  at::Tensor to = at::empty_like(from);
  const int64_t width = from.size(-1), rows = from.numel() / width;
  const float eps = static_cast<float>(epsilon);
  const bool is_bf16 = from.scalar_type() == at::kBFloat16;
  TORCH_CHECK(is_bf16 || from.scalar_type() == at::kFloat, "float32 or bfloat16 is needed");
  at::parallel_for(0, rows, kNormRows, [&](int64_t begin, int64_t end) {
    if (is_bf16) {
      norm_rows(from.data_ptr<at::BFloat16>(), weight.data_ptr<at::BFloat16>(),
                to.data_ptr<at::BFloat16>(), begin, end, width, eps);
    } else {
      norm_rows(from.data_ptr<float>(), weight.data_ptr<float>(), to.data_ptr<float>(), begin, end,
                width, eps);
    }
  });
  return to;
}

// Weights in oneDNN's own layout, by handle: an opaque tensor cannot be part of a traced graph.
struct PackedWeight {
  at::Tensor packed;
  int64_t out_features;
  int64_t least_rows;
};

class PackedWeights {
 public:
  int64_t add(PackedWeight weight) {
    std::lock_guard<std::mutex> lock(mutex_);
    weights_.emplace(++last_, std::make_shared<PackedWeight>(std::move(weight)));
    return last_;
  }

  std::shared_ptr<PackedWeight> get(int64_t handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = weights_.find(handle);
    TORCH_CHECK(found != weights_.end(), "no packed weight ", handle);
    return found->second;
  }

  void remove(int64_t handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    weights_.erase(handle);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<PackedWeight>> weights_;
  int64_t last_ = 0;
};

PackedWeights& packed_weights() {
  static PackedWeights weights;
  return weights;
}

int64_t keep_packed(const at::Tensor& packed, int64_t out_features, int64_t least_rows) {
  return packed_weights().add({packed, out_features, least_rows});
}

void drop_packed(int64_t handle) { packed_weights().remove(handle); }

at::Tensor multiply(const at::Tensor& rows, const PackedWeight& weight,
                    const std::optional<at::Tensor>& bias) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&,
                               const std::optional<at::Tensor>&, std::string_view,
                               c10::List<std::optional<at::Scalar>>,
                               std::optional<std::string_view>);
  static auto linear = c10::Dispatcher::singleton()
                           .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                           .typed<Signature>();
  return linear.call(rows, weight.packed, bias, "none",
                     c10::List<std::optional<at::Scalar>>(), "");
}

// rows [..., rows, in] -> [..., rows, out]. Fewer rows than `least_rows` are padded: oneDNN would
// sum in another order.
at::Tensor packed_linear(const at::Tensor& rows, int64_t handle,
                         const std::optional<at::Tensor>& bias) {
  auto weight = packed_weights().get(handle);
  int64_t count = rows.size(-2);
  if (count >= weight->least_rows) return multiply(rows, *weight, bias);
  if (count == 0) {
    auto sizes = rows.sizes().vec();
    sizes.back() = weight->out_features;
    return at::empty(sizes, rows.options());
  }
  auto sizes = rows.sizes().vec();
  sizes[sizes.size() - 2] = weight->least_rows - count;
  auto padded = at::cat({rows, at::zeros(sizes, rows.options())}, -2);
  return multiply(padded, *weight, bias).narrow(-2, 0, count);
}

}  // namespace

TORCH_LIBRARY(outrider_cpu, library) {
  library.def("keep_packed(Tensor packed, int out_features, int least_rows) -> int",
              &keep_packed);
  library.def("drop_packed(int handle) -> ()", &drop_packed);
  library.def("packed_linear(Tensor rows, int handle, Tensor? bias) -> Tensor", &packed_linear);
  library.def(
      "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, "
      "Tensor slots, Tensor tasks, Tensor tables, Tensor sights, float scale) -> Tensor");
  library.def("rms_norm(Tensor input, Tensor weight, float epsilon) -> Tensor");
}

TORCH_LIBRARY_IMPL(outrider_cpu, CPU, library) {
  library.impl("paged_attention", &paged_attention);
  library.impl("rms_norm", &rms_norm);
}
