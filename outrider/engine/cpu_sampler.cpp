// Sampling: what sampling/logits.py and verify.py say, in few passes over a row that stays in the
// cache. sampling/cuda_sampler.py is its twin.
//
// One thread does one row, in spans of 64 tokens at fixed places, the last one filled up with -inf.
// A pass is one rounded operation (or one exp) by one compiled function, never inlined, and sums
// are of spans, in order. So no bit of a row depends on where it lies, on other rows or on threads,
// and -ffast-math finds nothing to rearrange. Probabilities by which tokens are cut are added up
// exactly, as integers in units of 2^-60.

#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

#include "cpu_common.h"

namespace {

constexpr int64_t kSpan = 64;  // tokens
constexpr int64_t kNoise = 8;  // words of a block of noise
constexpr int kIdBits = 21, kCodeBits = 27, kDigitBits = 10;
constexpr uint64_t kDigitMask = (1 << kDigitBits) - 1;
constexpr uint64_t kNoBorder = std::numeric_limits<uint64_t>::max();
constexpr float kUnit = 0x1p60f;

struct alignas(64) Span {
  float of[kSpan];
};

// A row of `params`, as sampling/row_params.py packs it.
struct __attribute__((packed)) Sampling {
  float temperature;
  int32_t top_k;
  double top_p;
  float log_min_p;
  uint64_t seed, position;
};
constexpr int64_t kParamWords = sizeof(Sampling) / sizeof(int32_t);
static_assert(kParamWords == 9);

// A token by its rank, and how it counts in a cut.
struct Ranked {
  uint64_t rank, weight;
};

// A row in work: logits, then log probs. Where the top of a span is -inf all of it is cut, and what
// stands in it is not looked at.
struct Row {
  int64_t vocab = 0;
  std::vector<Span> spans;
  std::vector<float> tops;  // highest of each span
  std::vector<float> sorted_tops;
  std::vector<Ranked> ranked;

  bool lives(size_t s) const { return tops[s] != -kInfinity; }
  size_t likeliest() const { return std::max_element(tops.begin(), tops.end()) - tops.begin(); }
};

float highest(const Span& span) {
  float lanes[16];
  std::copy(span.of, span.of + 16, lanes);
  for (int64_t first = 16; first < kSpan; first += 16)
#pragma omp simd
    for (int64_t t = 0; t < 16; ++t)
      lanes[t] = lanes[t] > span.of[first + t] ? lanes[t] : span.of[first + t];
  return *std::max_element(lanes, lanes + 16);
}

template <typename T>
void load_row(const T* logits, int64_t vocab, Row& row) {
  row.vocab = vocab;
  row.spans.resize((vocab + kSpan - 1) / kSpan);
  row.tops.resize(row.spans.size());
  for (size_t s = 0; s < row.spans.size(); ++s, logits += kSpan) {
    Span& span = row.spans[s];
    const int64_t count = vocab - static_cast<int64_t>(s) * kSpan;
    if (count < kSpan) {
      std::fill(span.of, span.of + kSpan, -kInfinity);
      for (int64_t t = 0; t < count; ++t) span.of[t] = widen(logits[t]);
    } else {
#pragma omp simd
      for (int64_t t = 0; t < kSpan; ++t) span.of[t] = widen(logits[t]);
    }
    row.tops[s] = highest(span);
  }
}

__attribute__((noinline)) void subtract(Row& row, float amount) {
  for (size_t s = 0; s < row.spans.size(); ++s) {
    if (!row.lives(s)) continue;
#pragma omp simd
    for (int64_t t = 0; t < kSpan; ++t) row.spans[s].of[t] -= amount;
    row.tops[s] -= amount;
  }
}

__attribute__((noinline)) void scale(Row& row, float factor) {
  for (size_t s = 0; s < row.spans.size(); ++s) {
    if (!row.lives(s)) continue;
#pragma omp simd
    for (int64_t t = 0; t < kSpan; ++t) row.spans[s].of[t] *= factor;
    row.tops[s] *= factor;
  }
}

__attribute__((noinline)) void take_exp(const Span& span, Span& exps) {
#pragma omp simd
  for (int64_t t = 0; t < kSpan; ++t) exps.of[t] = exp_negative(span.of[t]);
}

// log(sum of exp); the highest value is 0.
__attribute__((noinline)) float log_sum(const Row& row) {
  double total = 0.0;
  for (size_t s = 0; s < row.spans.size(); ++s) {
    if (!row.lives(s)) continue;
    Span exps;
    take_exp(row.spans[s], exps);
    float sum = 0.f;
#pragma omp simd reduction(+ : sum)
    for (int64_t t = 0; t < kSpan; ++t) sum += exps.of[t];
    total += sum;
  }
  return static_cast<float>(std::log(total));
}

// A log prob as 27 bits, low is likely: the bits of a float that is never above 0. Only one token
// can be above -1/2, and below -2^15 a probability is 0 in any format: neither needs bits. The rank
// of a token is its code and then its id.
inline int32_t code(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return std::min(std::max((bits & 0x7FFFFFFF) - 0x3F000000, 0), (1 << kCodeBits) - 1);
}

// Probabilities in units of 2^-60, at least 1.
__attribute__((noinline)) void weigh(const Span& span, uint64_t* weights) {
  Span probs;
  take_exp(span, probs);
#pragma omp simd
  for (int64_t t = 0; t < kSpan; ++t)
    weights[t] = static_cast<uint64_t>(std::max(probs.of[t] * kUnit, 1.f));
}

// What the tokens of each digit weigh. Neighbours count in two lanes, because an addition to a
// place waits for the one before.
class Digits {
 public:
  void add(int64_t lane, uint64_t digit, uint64_t weight) { lanes_[lane % 2][digit] += weight; }

  uint64_t weight_of(uint64_t digit) const { return lanes_[0][digit] + lanes_[1][digit]; }

  uint64_t total() const {
    uint64_t sum = 0;
    for (uint64_t digit = 0; digit <= kDigitMask; ++digit) sum += weight_of(digit);
    return sum;
  }

  // The last digit with any weight that less than `left` comes before, which is taken off `left`.
  uint64_t find(uint64_t& left) const {
    uint64_t found = 0, before = 0, passed = 0;
    for (uint64_t digit = 0; digit <= kDigitMask && passed < left; ++digit) {
      const uint64_t weight = weight_of(digit);
      if (weight == 0) continue;
      found = digit;
      before = passed;
      passed += weight;
    }
    left -= before;
    return found;
  }

 private:
  uint64_t lanes_[2][kDigitMask + 2] = {};  // The last place is for what does not count.
};

// The rank of the last of the first `count` > 0 tokens that less than `left` > 0 comes before.
uint64_t last_of(std::vector<Ranked>& ranked, size_t count, uint64_t left) {
  while (count > 1) {
    // By the highest bits in which ranks differ.
    uint64_t differing = 0;
    for (size_t i = 0; i < count; ++i) differing |= ranked[i].rank ^ ranked[0].rank;
    const int shift = std::max(64 - __builtin_clzll(differing) - kDigitBits, 0);
    const auto digit_of = [=](const Ranked& token) { return token.rank >> shift & kDigitMask; };
    Digits digits;
    for (size_t i = 0; i < count; ++i) digits.add(i, digit_of(ranked[i]), ranked[i].weight);
    const uint64_t digit = digits.find(left);
    size_t same = 0;
    for (size_t i = 0; i < count; ++i) {
      const Ranked token = ranked[i];
      ranked[same] = token;
      same += digit_of(token) == digit;
    }
    count = same;
  }
  return ranked[0].rank;
}

// The tokens that a cut chooses among, those of at least this log prob, and whether they count by
// probability or one by one.
struct Choice {
  float lowest;
  bool by_mass;
};

// The weight of all tokens of each digit, the first of their codes.
__attribute__((noinline)) void count_digits(const Row& row, const Choice& choice, Digits& digits) {
  uint64_t weights[kSpan];
  uint32_t first[kSpan];
  std::fill(weights, weights + kSpan, 1);
  for (size_t s = 0; s < row.spans.size(); ++s) {
    if (!(row.tops[s] >= choice.lowest)) continue;
    const Span& span = row.spans[s];
    if (choice.by_mass) weigh(span, weights);
#pragma omp simd
    for (int64_t t = 0; t < kSpan; ++t) {
      const uint32_t digit = code(span.of[t]) >> (kCodeBits - kDigitBits);
      first[t] = span.of[t] >= choice.lowest ? digit : kDigitMask + 1;
    }
    for (int64_t t = 0; t < kSpan; ++t) digits.add(t, first[t], weights[t]);
  }
}

// Into row.ranked: the tokens with this first digit; their number.
__attribute__((noinline)) size_t collect(Row& row, const Choice& choice, uint32_t digit) {
  row.ranked.resize(row.spans.size() * kSpan + 1);
  size_t count = 0;
  for (size_t s = 0; s < row.spans.size(); ++s) {
    if (!(row.tops[s] >= choice.lowest)) continue;
    const float* values = row.spans[s].of;
    uint8_t found[kSpan];
#pragma omp simd
    for (int64_t t = 0; t < kSpan; ++t) {
      const uint32_t first = code(values[t]) >> (kCodeBits - kDigitBits);
      found[t] = (first == digit) & (values[t] >= choice.lowest);
    }
    for (int64_t i = 0; i < kSpan; i += 8) {
      uint64_t any;
      std::memcpy(&any, found + i, sizeof any);
      if (any == 0) continue;
      for (int64_t t = i; t < i + 8; ++t) {
        const uint64_t rank = static_cast<uint64_t>(code(values[t])) << kIdBits | (s * kSpan + t);
        row.ranked[count] = {rank, 1};
        count += found[t];
      }
    }
  }
  return count;
}

// Gives the first `count` that were collected the weights that `count_digits` gave them.
void weigh_ranked(Row& row, size_t count) {
  for (size_t first = 0; first < count; first += kSpan) {
    const size_t some = std::min<size_t>(kSpan, count - first);
    Ranked* ranked = row.ranked.data() + first;
    Span values = {};
    uint64_t weights[kSpan];
    for (size_t i = 0; i < some; ++i) {
      const uint64_t id = ranked[i].rank & ((1 << kIdBits) - 1);
      values.of[i] = row.spans[id / kSpan].of[id % kSpan];
    }
    weigh(values, weights);
    for (size_t i = 0; i < some; ++i) ranked[i].weight = weights[i];
  }
}

// The rank of the last token of the choice that less than `left_of(weight of all)` > 0 comes
// before; kNoBorder where all do not weigh as much. All tokens are looked at by the first digit of
// their ranks, few by what follows.
template <typename LeftOf>
uint64_t last_kept(Row& row, const Choice& choice, const LeftOf& left_of) {
  Digits digits;
  count_digits(row, choice, digits);
  uint64_t left = left_of(digits.total());
  if (left > digits.total()) return kNoBorder;
  const size_t count = collect(row, choice, digits.find(left));
  if (choice.by_mass) weigh_ranked(row, count);
  return last_of(row.ranked, count, left);
}

// At least `count` tokens are not below this.
float lowest_of_count(Row& row, int64_t count) {
  if (count > static_cast<int64_t>(row.tops.size())) return -kInfinity;
  row.sorted_tops = row.tops;
  const auto last = row.sorted_tops.begin() + count - 1;
  std::nth_element(row.sorted_tops.begin(), last, row.sorted_tops.end(), std::greater<float>());
  return *last;
}

// The rank of the last token that top_k keeps.
uint64_t count_border(Row& row, int64_t top_k) {
  return last_kept(row, {lowest_of_count(row, top_k), false}, [=](uint64_t) { return top_k; });
}

// The rank of the last token that top_p keeps.
uint64_t mass_border(Row& row, double top_p, bool by_count) {
  const auto left_of = [=](double mass) {
    return std::max<uint64_t>(static_cast<uint64_t>(top_p * mass), 1);
  };
  // What the top_k sum up to is what top_p counts in; else the row is normalised.
  if (by_count) return last_kept(row, {std::numeric_limits<float>::lowest(), true}, left_of);
  // All tokens below this share of the whole vocabulary are together less than what top_p cuts; but
  // mostly those above a larger share suffice.
  for (const int64_t tokens : {int64_t{32}, int64_t{1024}, row.vocab}) {
    const double lowest = std::log((1.0 - top_p) / (2.0 * static_cast<double>(tokens)));
    const Choice choice = {static_cast<float>(lowest), true};
    const uint64_t border = last_kept(row, choice, [&](uint64_t) { return left_of(kUnit); });
    if (border != kNoBorder) return border;
  }
  return kNoBorder;
}

// Puts -inf where a token ranks behind the border or is below `lowest`.
__attribute__((noinline)) void cut(Row& row, uint64_t border, float lowest) {
  const int32_t last_code = std::min<uint64_t>(border >> kIdBits, 1 << kCodeBits);
  const int32_t last_id = border & ((1 << kIdBits) - 1);
  for (size_t s = 0; s < row.spans.size(); ++s) {
    if (!row.lives(s)) continue;
    Span& span = row.spans[s];
    if (code(row.tops[s]) > last_code || !(row.tops[s] >= lowest)) {
      row.tops[s] = -kInfinity;
      continue;
    }
    const int32_t last_here = last_id - static_cast<int32_t>(s * kSpan);
#pragma omp simd
    for (int32_t t = 0; t < kSpan; ++t) {
      const float value = span.of[t];
      const int32_t here = code(value);
      const bool kept = (here < last_code) | ((here == last_code) & (t <= last_here));
      span.of[t] = kept & (value >= lowest) ? value : -kInfinity;
    }
    row.tops[s] = highest(span);
  }
}

// Log-probabilities of a row that is not greedy.
__attribute__((noinline)) void process(Row& row, const Sampling& sampling) {
  subtract(row, row.tops[row.likeliest()]);
  if (sampling.temperature != 1.f) scale(row, 1.f / sampling.temperature);
  const float top = -log_sum(row);
  subtract(row, -top);
  const bool by_count = sampling.top_k > 0 && sampling.top_k < row.vocab;
  const bool by_mass = sampling.top_p < 1.0;
  if (!by_count && !by_mass && sampling.log_min_p == -kInfinity) return;
  if (by_count) cut(row, count_border(row, sampling.top_k), -kInfinity);
  const uint64_t border = by_mass ? mass_border(row, sampling.top_p, by_count) : kNoBorder;
  cut(row, border, top + sampling.log_min_p);
  subtract(row, top);
  subtract(row, log_sum(row));
}

// The first token with the highest logit.
int64_t greedy_pick(const Row& row) {
  const size_t s = row.likeliest();
  const float* values = row.spans[s].of;
  const int64_t id = s * kSpan + (std::find(values, values + kSpan, row.tops[s]) - values);
  return std::min(id, row.vocab - 1);
}

// The 8 words of one block of sampling/noise.py's coupled stream: Philox4x64-10.
inline void make_noise(const Sampling& sampling, uint64_t block, uint32_t* words) {
  uint64_t c0 = block + 1;  // numpy counts up before its first block.
  uint64_t c1 = sampling.position, c2 = 0, c3 = 0, k0 = sampling.seed, k1 = 0;
  for (int round = 0; round < 10; ++round) {
    const auto a = static_cast<unsigned __int128>(c0) * 0xD2E7470EE14C6C93u;
    const auto b = static_cast<unsigned __int128>(c2) * 0xCA5A826395121157u;
    c0 = static_cast<uint64_t>(b >> 64) ^ c1 ^ k0;
    c1 = static_cast<uint64_t>(b);
    c2 = static_cast<uint64_t>(a >> 64) ^ c3 ^ k1;
    c3 = static_cast<uint64_t>(a);
    k0 += 0x9E3779B97F4A7C15u;
    k1 += 0xBB67AE8584CAA73Bu;
  }
  const uint64_t longs[] = {c0, c1, c2, c3};
  for (int i = 0; i < kNoise; ++i) words[i] = static_cast<uint32_t>(longs[i / 2] >> i % 2 * 32);
}

// log prob - log(exponential).
__attribute__((noinline)) float score_of(float log_prob, uint32_t word) {
  const float uniform = static_cast<float>(word + 0.5) * 0x1p-32f;
  return log_prob - std::log(-std::log1p(-std::min(uniform, 1.f - 0x1p-24f)));
}

// The best so far of a race: the highest score, the lowest id among equals.
struct Race {
  const Row& row;
  const Sampling& sampling;
  float best = -kInfinity;
  int64_t pick = 0;

  // Tokens that cannot win are left out, by margins far above the rounding of scores. To win, a
  // token needs an exponential, and so a uniform below it, of at most exp(log prob - best); and no
  // exponential is below 2^-33.
  void enter(size_t s) {
    if (!row.lives(s)) return;
    const double limit = 0x1p32 * std::exp(row.tops[s] - best + 1e-4f);
    if (!(limit >= 0.49)) return;
    const uint32_t last = static_cast<uint32_t>(std::min(limit, 0x1p32 - 1));
    for (int64_t i = 0; i < kSpan; i += kNoise) {
      const float* values = row.spans[s].of + i;
      const float floor = best - 22.9f;
      bool hopes = false;
      for (int64_t t = 0; t < kNoise; ++t) hopes |= values[t] > floor;
      if (!hopes) continue;
      uint32_t words[kNoise];
      make_noise(sampling, (s * kSpan + i) / kNoise, words);
      for (int64_t t = 0; t < kNoise; ++t)
        if (words[t] <= last) run(s * kSpan + i + t, values[t], words[t]);
    }
  }

  void run(int64_t id, float log_prob, uint32_t word) {
    if (log_prob == -kInfinity) return;
    const float score = score_of(log_prob, word);
    if (score > best || (score == best && id < pick)) {
      best = score;
      pick = id;
    }
  }
};

int64_t coupled_pick(const Row& row, const Sampling& sampling) {
  Race race{row, sampling};
  // From the likeliest on, so that there is soon a score that most cannot reach.
  const size_t likeliest = row.likeliest();
  race.enter(likeliest);
  for (size_t s = 0; s < row.spans.size(); ++s)
    if (s != likeliest) race.enter(s);
  return race.pick;
}

// A thread keeps the memory: fresh pages cost more than the work.
Row& scratch() {
  static thread_local Row row;
  return row;
}

Sampling sampling_of(const at::Tensor& params, int64_t row) {
  Sampling sampling;
  std::memcpy(&sampling, params.const_data_ptr<int32_t>() + row * kParamWords, sizeof sampling);
  return sampling;
}

// Calls work(row number, Row, Sampling) for each row, in parallel.
template <typename Work>
void for_each_row(const at::Tensor& logits, const at::Tensor& params, const Work& work) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && logits.size(1) <= 1 << kIdBits &&
                  logits.stride(1) == 1,
              "logits must be [rows, vocab], rows contiguous, and vocab at most 2^21");
  TORCH_CHECK(params.sizes() == at::IntArrayRef({logits.size(0), kParamWords}) &&
                  params.scalar_type() == at::kInt && params.is_contiguous(),
              "params must be int32 [rows, 9]");
  const bool is_bf16 = logits.scalar_type() == at::kBFloat16;
  TORCH_CHECK(is_bf16 || logits.scalar_type() == at::kFloat, "float32 or bfloat16 is needed");
  const int64_t vocab = logits.size(1), stride = logits.stride(0);
  at::parallel_for(0, logits.size(0), 1, [&](int64_t begin, int64_t end) {
    Row& row = scratch();
    for (int64_t r = begin; r < end; ++r) {
      const Sampling sampling = sampling_of(params, r);
      if (is_bf16)
        load_row(logits.const_data_ptr<at::BFloat16>() + r * stride, vocab, row);
      else
        load_row(logits.const_data_ptr<float>() + r * stride, vocab, row);
      work(r, row, sampling);
    }
  });
}

// logits [rows, vocab] float32 or bfloat16, params int32 [rows, 9] -> picks int64 [rows].
at::Tensor sample_rows(const at::Tensor& logits, const at::Tensor& params) {
  at::Tensor picks = at::empty({logits.size(0)}, at::kLong);
  int64_t* to = picks.data_ptr<int64_t>();
  for_each_row(logits, params, [&](int64_t r, Row& row, const Sampling& sampling) {
    if (sampling.temperature == 0.f) {
      to[r] = greedy_pick(row);
    } else {
      process(row, sampling);
      to[r] = coupled_pick(row, sampling);
    }
  });
  return picks;
}

// Log-probabilities, float32 [rows, vocab], -inf where cut; a greedy row is a point mass.
at::Tensor processed_rows(const at::Tensor& logits, const at::Tensor& params) {
  const int64_t vocab = logits.size(-1);
  at::Tensor output = at::empty({logits.size(0), vocab}, at::kFloat);
  float* outputs = output.data_ptr<float>();
  for_each_row(logits, params, [&](int64_t r, Row& row, const Sampling& sampling) {
    float* to = outputs + r * vocab;
    if (sampling.temperature == 0.f) {
      std::fill(to, to + vocab, -kInfinity);
      to[greedy_pick(row)] = 0.f;
      return;
    }
    process(row, sampling);
    for (size_t s = 0; s < row.spans.size(); ++s) {
      const int64_t first = s * kSpan, count = std::min(kSpan, vocab - first);
      const float* from = row.spans[s].of;
      if (row.lives(s))
        std::copy(from, from + count, to + first);
      else
        std::fill(to + first, to + first + count, -kInfinity);
    }
  });
  return output;
}

// The first `count` words of coupled noise of each row, as int64 [rows, count].
at::Tensor noise_words(const at::Tensor& params, int64_t count) {
  at::Tensor output = at::empty({params.size(0), count}, at::kLong);
  int64_t* to = output.data_ptr<int64_t>();
  for (int64_t r = 0; r < params.size(0); ++r, to += count) {
    const Sampling sampling = sampling_of(params, r);
    for (int64_t first = 0; first < count; first += kNoise) {
      uint32_t words[kNoise];
      make_noise(sampling, first / kNoise, words);
      std::copy(words, words + std::min(kNoise, count - first), to + first);
    }
  }
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(outrider_cpu, library) {
  library.def("sample_rows(Tensor logits, Tensor params) -> Tensor");
  library.def("processed_rows(Tensor logits, Tensor params) -> Tensor");
  library.def("noise_words(Tensor params, int count) -> Tensor");
}

TORCH_LIBRARY_IMPL(outrider_cpu, CPU, library) {
  library.impl("sample_rows", &sample_rows);
  library.impl("processed_rows", &processed_rows);
  library.impl("noise_words", &noise_words);
}
