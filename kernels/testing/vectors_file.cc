// SPDX-License-Identifier: Apache-2.0
#include "kernels/testing/vectors_file.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "kernels/attention.h"
#include "kernels/testing/names.h"

namespace ashlar::kernels::testing {
namespace {

using nlohmann::json;

// The first error in a file. A reader continues with zeros after an error, and checks at the end.
class Errors {
 public:
  void Add(const std::string& field, const std::string& what) {
    if (first_.empty()) first_ = field + ": " + what;
  }
  bool Any() const { return !first_.empty(); }
  const std::string& first() const { return first_; }

 private:
  std::string first_;
};

// One value of the file, with its name.
class Field {
 public:
  Field(const json& value, std::string name, Errors& errors) : value_(value), name_(std::move(name)), errors_(errors) {}

  // Returns whether an array of this name is there and not empty; reading finds out whether it is an array.
  bool Has(const char* key) const {
    return value_.is_object() && value_.contains(key) && !(value_[key].is_array() && value_[key].empty());
  }
  Field operator[](const std::string& key) const {
    const std::string name = name_.empty() ? key : name_ + "." + key;
    if (!value_.is_object()) return Missing(name_.empty() ? "file" : name_, "not an object");
    if (!value_.contains(key)) return Missing(name, "missing");
    return Field(value_[key], name, errors_);
  }
  // Elements of an array, of which there must be one at least.
  std::vector<Field> Elements() const {
    std::vector<Field> elements;
    if (!value_.is_array()) {
      errors_.Add(name_, "not an array");
    } else if (value_.empty()) {
      errors_.Add(name_, "empty");
    } else {
      for (const json& element : value_) {
        elements.emplace_back(element, name_ + "[" + std::to_string(elements.size()) + "]", errors_);
      }
    }
    return elements;
  }

  double Number() const {
    if (value_.is_number()) return value_.get<double>();
    errors_.Add(name_, "not a number");
    return 0;
  }
  int64_t Integer(int64_t least, int64_t most) const {
    if (value_.is_number_integer()) {
      const bool fits = !value_.is_number_unsigned() || value_.get<uint64_t>() <= INT64_MAX;
      const int64_t integer = fits ? value_.get<int64_t>() : INT64_MAX;
      if (integer >= least && integer <= most) return integer;
    }
    errors_.Add(name_, "not an integer of " + std::to_string(least) + " … " + std::to_string(most));
    return least;
  }
  std::string Text() const {
    if (value_.is_string()) return value_.get<std::string>();
    errors_.Add(name_, "not a string");
    return {};
  }
  // Nested arrays of exactly these sizes, as one row-major array; no size: one number.
  std::vector<double> Array(std::initializer_list<int64_t> sizes) const {
    std::vector<double> numbers;
    Append(sizes.begin(), sizes.end(), numbers);
    return numbers;
  }
  int64_t Size() const { return value_.is_array() ? static_cast<int64_t>(value_.size()) : 0; }
  void Refuse(const std::string& what) const { errors_.Add(name_, what); }

 private:
  Field Missing(const std::string& name, const char* what) const {
    static const json null;
    errors_.Add(name, what);
    return Field(null, name, errors_);
  }
  void Append(const int64_t* size, const int64_t* end, std::vector<double>& to) const {
    if (size == end) {
      to.push_back(Number());
      return;
    }
    if (!value_.is_array() || Size() != *size) {
      errors_.Add(name_, "not an array of " + std::to_string(*size));
      to.resize(to.size() + std::accumulate(size, end, int64_t{1}, std::multiplies<>()));
      return;
    }
    for (const Field& element : Elements()) element.Append(size + 1, end, to);
  }

  const json& value_;
  std::string name_;
  Errors& errors_;
};

void AppendTo(std::vector<double>& to, const std::vector<double>& numbers) {
  to.insert(to.end(), numbers.begin(), numbers.end());
}

// Reads one head's numbers of the family's decay table, which must be the same for every token.
void ReadTable(const Field& token, const std::vector<double>& numbers, std::vector<double>& table) {
  if (table.empty()) table = numbers;
  if (table != numbers) token.Refuse("decays otherwise than token 0");
}

void ReadToken(const Field& token, LinearVector& vector) {
  const bool mamba = vector.family == Family::kMamba1 || vector.family == Family::kMamba2;
  AppendTo(vector.q, token["q"].Array({vector.d_k}));
  AppendTo(vector.k, token[mamba ? "B" : "k"].Array({vector.d_k}));
  AppendTo(vector.v, token[mamba ? "x" : "v"].Array({vector.d_v}));
  switch (vector.family) {
    case Family::kRetnet:
    case Family::kLightning:
      return ReadTable(token, token["log_decay"].Array({}), vector.decay_table);
    case Family::kMamba2:
      AppendTo(vector.beta, token["dt"].Array({}));
      return ReadTable(token, token["A"].Array({}), vector.decay_table);
    case Family::kMamba1:
      AppendTo(vector.beta, token["dt"].Array({vector.d_v}));
      return ReadTable(token, token["A"].Array({vector.d_k, vector.d_v}), vector.decay_table);
    case Family::kGla:
      return AppendTo(vector.gate, token["log_gate"].Array({vector.d_k}));
    case Family::kGdn:
      AppendTo(vector.gate, token["g"].Array({}));
      return AppendTo(vector.beta, token["beta"].Array({}));
    case Family::kKda:
      AppendTo(vector.gate, token["g"].Array({vector.d_k}));
      return AppendTo(vector.beta, token["beta"].Array({}));
    case Family::kDeltanet:
      return AppendTo(vector.beta, token["beta"].Array({}));
  }
}

LinearVector ReadLinear(const Field& head) {
  LinearVector vector;
  const std::string family = head["family"].Text();
  const auto known = std::ranges::find(kFamilies, family, [](Family f) { return Name(f); });
  if (known == std::end(kFamilies)) {
    head["family"].Refuse("unknown");
    return vector;
  }
  vector.family = *known;
  vector.d_k = static_cast<int32_t>(head["d_k"].Integer(1, kMaxHeadDim));
  vector.d_v = static_cast<int32_t>(head["d_v"].Integer(1, kMaxHeadDim));
  for (const Field& token : head["tokens"].Elements()) ReadToken(token, vector);
  vector.tokens = head["tokens"].Size();
  vector.initial_state = head["initial_state"].Array({vector.d_k, vector.d_v});
  vector.final_state = head["final_state"].Array({vector.d_k, vector.d_v});
  vector.outputs = head["outputs_q_dot_S"].Array({vector.tokens, vector.d_v});
  int64_t tokens = 0;
  const int32_t columns = vector.family == Family::kMamba1 ? vector.d_v : vector.d_k;
  for (const Field& segment : head["segments"].Elements()) {
    vector.segments.push_back({.tokens = segment["tokens"].Integer(0, vector.tokens),
                               .transition = segment["T"].Array({vector.d_k, columns}),
                               .state = segment["S"].Array({vector.d_k, vector.d_v})});
    tokens += vector.segments.back().tokens;
  }
  if (tokens != vector.tokens) head["segments"].Refuse("do not have as many tokens as the head");
  return vector;
}

RopeVector ReadRope(const Field& table) {
  RopeVector vector;
  const std::string style = table["style"].Text();
  if (style != "half_split" && style != "interleaved") table["style"].Refuse("neither half_split nor interleaved");
  vector.style = style == "half_split" ? RopeStyle::kHalfSplit : RopeStyle::kInterleaved;
  constexpr int64_t kLargest = INT64_C(1) << 40;  // positions
  vector.dim = static_cast<int32_t>(table["dim"].Integer(2, kMaxRotaryDim));
  vector.rotary_dim = static_cast<int32_t>(table["rotary_dim"].Integer(2, vector.dim));
  if (vector.rotary_dim % 2 != 0) table["rotary_dim"].Refuse("odd");
  vector.frequencies = table["freqs"].Array({vector.rotary_dim / 2});
  vector.rows = static_cast<int64_t>(table["unrotated_keys"].Elements().size());
  vector.unrotated = table["unrotated_keys"].Array({vector.rows, vector.dim});
  vector.zero_based = table["zero_based_keys"].Array({vector.rows, vector.dim});
  vector.value_dim = static_cast<int32_t>(table["attention_output"].Elements().size());
  if (vector.value_dim > kMaxQueryDim) table["attention_output"].Refuse("too wide");
  vector.values = table["values"].Array({vector.rows, vector.value_dim});
  for (const Field& start : table["starts"].Elements()) {
    const int64_t position = start.Integer(0, kLargest);
    vector.landed.push_back(
        {position, table["landed_keys"][std::to_string(position)].Array({vector.rows, vector.dim})});
  }
  vector.query = table["query_unrotated"].Array({vector.dim});
  vector.query_position = table["query_position"].Integer(0, kLargest);
  vector.attention = table["attention_output"].Array({vector.value_dim});
  return vector;
}

}  // namespace

std::variant<VectorsFile, std::string> ParseVectors(const std::string& text) {
  const json root = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded()) return "file: not JSON";
  Errors errors;
  const Field file(root, "", errors);
  VectorsFile vectors;
  if (!file.Has("linear") && !file.Has("rope")) errors.Add("file", "neither linear nor rope");
  if (file.Has("linear")) {
    for (const Field& head : file["linear"].Elements()) {
      vectors.linear.push_back(ReadLinear(head));
      if (errors.Any()) return errors.first();
    }
  }
  if (file.Has("rope")) {
    for (const Field& table : file["rope"].Elements()) {
      vectors.rope.push_back(ReadRope(table));
      if (errors.Any()) return errors.first();
    }
  }
  if (errors.Any()) return errors.first();
  return vectors;
}

}  // namespace ashlar::kernels::testing
