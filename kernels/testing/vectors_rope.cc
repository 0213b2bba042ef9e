// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/testing/backends.h"
#include "kernels/testing/errors.h"
#include "kernels/testing/vectors.h"

namespace ashlar::kernels::testing {
namespace {

// Rotated keys: cos, sin, two products and a sum, each rounded once in fp32.
constexpr double kRotationTolerance = 1e-6;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> Floats(const std::vector<double>& numbers) {
  return {numbers.begin(), numbers.end()};
}

double Error(const std::vector<float>& actual, const std::vector<double>& expected) {
  return RelativeError(std::vector<double>(actual.begin(), actual.end()), expected);
}

// Rows of one head in pages of two tokens, the last page first, from the middle of a page on.
class PagedHead {
 public:
  static constexpr int64_t kFirst = 1;

  PagedHead(int64_t rows, int32_t dim) : rows_(rows), dim_(dim) {
    const auto pages = static_cast<int32_t>((kFirst + rows + kPageTokens - 1) / kPageTokens);
    for (int32_t page = pages - 1; page >= 0; --page) table_.push_back(page);
    slots_.assign(int64_t{pages} * kPageTokens * dim, kNan);
  }

  PagedSlots Slots() {
    return {.base = slots_.data(),
            .page_stride = int64_t{kPageTokens} * dim_,
            .token_stride = dim_,
            .head_stride = dim_,
            .page_tokens = kPageTokens,
            .page_table = table_.data()};
  }
  void Land(Runner& runner, const std::vector<float>& rows, const Rotation& rotation, int64_t delta) {
    std::vector<const void*> units;  // of three tokens
    for (int64_t t = 0; t < rows_; t += kUnitTokens) units.push_back(rows.data() + t * dim_);
    runner.Run(LandArgs{
        .source = {.units = units.data(), .unit_tokens = kUnitTokens, .tokens = rows_, .heads = 1, .dim = dim_},
        .rotation = rotation,
        .delta = delta,
        .target = Slots(),
        .first_position = kFirst});
  }
  std::vector<float> Rows() const {
    std::vector<float> rows;
    for (int64_t p = kFirst; p < kFirst + rows_; ++p) {
      const float* row = slots_.data() + (table_[p / kPageTokens] * kPageTokens + p % kPageTokens) * dim_;
      rows.insert(rows.end(), row, row + dim_);
    }
    return rows;
  }

 private:
  static constexpr int32_t kPageTokens = 2, kUnitTokens = 3;

  const int64_t rows_;
  const int32_t dim_;
  std::vector<int32_t> table_;
  std::vector<float> slots_;
};

class RopeChecker {
 public:
  RopeChecker(const RopeVector& vector, size_t index, const Kernels& kernels, std::vector<VectorCheck>& checks)
      : vector_(vector),
        name_("rope[" + std::to_string(index) + "], " +
              (vector.style == RopeStyle::kHalfSplit ? "half_split " : "interleaved ") +
              std::to_string(vector.rotary_dim) + " of " + std::to_string(vector.dim)),
        runner_(kernels),
        checks_(checks) {}

  void Run() {
    TurnKeys();
    for (const RopeVector::Landed& landed : vector_.landed) Land(landed);
    const std::vector<float> zero_based = Floats(vector_.zero_based), unrotated = Floats(vector_.unrotated);
    Attend("AttendLanded", &Kernels::AttendLanded, zero_based, /*landed=*/true);
    Attend("AttendUnrotated", &Kernels::AttendUnrotated, unrotated, /*landed=*/false);
    Attend("AttendRotatedQuery", &Kernels::AttendRotatedQuery, zero_based, /*landed=*/false);
  }

 private:
  void Add(const char* operation, const std::string& what, double error, double bound) {
    checks_.push_back({operation, what, name_, error, bound});
  }
  std::vector<float> Turned(const std::vector<float>& keys, int64_t delta) {
    std::vector<float> turned(keys.size(), kNan);
    runner_.Run(RotateKeysArgs{.rotation = vector_.rotation(),
                               .delta = delta,
                               .rows = static_cast<int64_t>(keys.size()) / vector_.dim,
                               .dim = vector_.dim,
                               .source = keys.data(),
                               .target = turned.data()});
    return turned;
  }

  void TurnKeys() {
    std::vector<float> zero_based;
    const std::vector<float> unrotated = Floats(vector_.unrotated);
    for (int64_t row = 0; row < vector_.rows; ++row) {
      const auto begin = unrotated.begin() + row * vector_.dim;
      const std::vector<float> turned = Turned({begin, begin + vector_.dim}, row);
      zero_based.insert(zero_based.end(), turned.begin(), turned.end());
    }
    Add("RotateKeys", "zero-based from unrotated keys", Error(zero_based, vector_.zero_based), kRotationTolerance);
    for (const RopeVector::Landed& landed : vector_.landed) {
      const std::vector<float> turned = Turned(Floats(vector_.zero_based), landed.start);
      Add("RotateKeys", "to " + std::to_string(landed.start), Error(turned, landed.keys), kRotationTolerance);
    }
  }

  void Land(const RopeVector::Landed& landed) {
    PagedHead pages(vector_.rows, vector_.dim);
    pages.Land(runner_, Floats(vector_.zero_based), vector_.rotation(), landed.start);
    Add("Land", "to " + std::to_string(landed.start), Error(pages.Rows(), landed.keys), kRotationTolerance);
  }

  // The query over all keys, one span per start; this back end lands the landed keys there.
  void Attend(const char* name, Event (Kernels::*operation)(const AttendArgs&, Queue&) const,
              const std::vector<float>& keys, bool landed) {
    const std::vector<float> values = Floats(vector_.values), query = Floats(vector_.query);
    std::vector<PagedHead> key_pages, value_pages;
    for (const RopeVector::Landed& stand : vector_.landed) {
      key_pages.emplace_back(vector_.rows, vector_.dim);
      key_pages.back().Land(runner_, keys, landed ? vector_.rotation() : Rotation{}, landed ? stand.start : 0);
      value_pages.emplace_back(vector_.rows, vector_.value_dim);
      value_pages.back().Land(runner_, values, {}, 0);
    }
    std::vector<KeySpan> spans;
    for (size_t i = 0; i < key_pages.size(); ++i) {
      spans.push_back({.keys = key_pages[i].Slots(),
                       .values = value_pages[i].Slots(),
                       .first_slot = PagedHead::kFirst,
                       .tokens = vector_.rows,
                       .position = vector_.landed[i].start,
                       .origin = vector_.landed[i].start});
    }
    std::vector<float> out(vector_.value_dim, kNan);
    runner_.Run(operation, AttendArgs{.shape = {.query_heads = 1,
                                                .kv_heads = 1,
                                                .key_dim = vector_.dim,
                                                .value_dim = vector_.value_dim,
                                                .scale = 1 / std::sqrt(static_cast<float>(vector_.dim))},
                                      .rotation = vector_.rotation(),
                                      .spans = spans,
                                      .tokens = 1,
                                      .q = query.data(),
                                      .positions = &vector_.query_position,
                                      .out = out.data(),
                                      .q_stride = vector_.dim,
                                      .out_stride = vector_.value_dim});
    Add(name, "attention", Error(out, vector_.attention), kTolerance);
  }

  const RopeVector& vector_;
  const std::string name_;
  Runner runner_;
  std::vector<VectorCheck>& checks_;
};

}  // namespace

std::vector<VectorCheck> CheckRope(const std::vector<RopeVector>& vectors, const Kernels& kernels) {
  std::vector<VectorCheck> checks;
  for (size_t i = 0; i < vectors.size(); ++i) RopeChecker(vectors[i], i, kernels, checks).Run();
  return checks;
}

std::vector<VectorCheck> CheckVectors(const VectorsFile& file, const Kernels& kernels) {
  std::vector<VectorCheck> checks = CheckLinear(file.linear, kernels);
  const std::vector<VectorCheck> rope = CheckRope(file.rope, kernels);
  checks.insert(checks.end(), rope.begin(), rope.end());
  return checks;
}

}  // namespace ashlar::kernels::testing
