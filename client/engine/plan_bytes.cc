// SPDX-License-Identifier: Apache-2.0
#include "client/engine/plan_bytes.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/checksum.h"
#include "proto/invalid.h"
#include "proto/limits.h"

namespace ashlar::engine {
namespace {

constexpr char kMagic[4] = {'A', 'S', 'P', 'L'};
constexpr uint64_t kMostCaptures = 1 << 16;
constexpr size_t kHeader = sizeof kMagic + sizeof(uint32_t) + sizeof(uint64_t), kChecksum = sizeof(uint64_t);

class Writer {
 public:
  template <typename Number>
  void Put(Number number) {
    for (size_t i = 0; i < sizeof number; ++i) bytes_.push_back(static_cast<char>(number >> (8 * i)));
  }
  template <typename Number>
  void PutList(const std::vector<Number>& numbers) {
    Put(static_cast<uint64_t>(numbers.size()));
    for (const Number number : numbers) Put(number);
  }
  void PutBytes(std::span<const uint8_t> bytes) { bytes_.append(bytes.begin(), bytes.end()); }
  std::string& bytes() { return bytes_; }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const uint8_t> bytes) : rest_(bytes) {}

  template <typename Number>
  Number Get() {
    Number number = 0;
    if (!Has(sizeof number)) return 0;
    for (size_t i = 0; i < sizeof number; ++i) number |= static_cast<Number>(rest_[i]) << (8 * i);
    rest_ = rest_.subspan(sizeof number);
    return number;
  }
  // Reads a list with at most this number of elements.
  template <typename Number>
  std::vector<Number> GetList(uint64_t most) {
    const auto count = Get<uint64_t>();
    std::vector<Number> numbers(count <= most && Has(count * sizeof(Number)) ? count : 0);
    whole_ &= numbers.size() == count;
    for (Number& number : numbers) number = Get<Number>();
    return numbers;
  }
  void GetBytes(std::span<uint8_t> out) {
    if (!Has(out.size())) return;
    std::ranges::copy(rest_.first(out.size()), out.begin());
    rest_ = rest_.subspan(out.size());
  }
  bool whole() const { return whole_; }  // no read has failed so far
  bool at_end() const { return rest_.empty(); }

 private:
  bool Has(size_t bytes) {
    whole_ &= rest_.size() >= bytes;
    return whole_;
  }

  std::span<const uint8_t> rest_;
  bool whole_ = true;
};

absl::Status CheckRising(const std::vector<uint64_t>& depths, uint64_t most) {
  for (size_t i = 0; i < depths.size(); ++i) {
    if (depths[i] > most || (i > 0 && depths[i] <= depths[i - 1]))
      return ashlar::Invalid("captures[", i, "]: ", depths[i], "; expected ascending depths, at most ", most);
  }
  return absl::OkStatus();
}

absl::Status Check(const PlannedLanding& plan) {
  if (plan.tensor_parallel_size == 0 || plan.tensor_parallel_size > limits::kMaxTensorShards) {
    return ashlar::Invalid("tensor_parallel_size: ", plan.tensor_parallel_size, "; expected 1 to ",
                           limits::kMaxTensorShards);
  }
  if (plan.tokens > limits::kMaxPromptTokens)
    return ashlar::Invalid("tokens: ", plan.tokens, "; expected at most ", limits::kMaxPromptTokens);
  uint64_t end = 0;
  for (size_t i = 0; i < plan.segment_lengths.size(); ++i) {
    if (plan.segment_lengths[i] > plan.tokens - end)
      return ashlar::Invalid("segment_lengths[", i, "]: exceeds the prompt");
    end += plan.segment_lengths[i];
  }
  if (plan.prefix_tokens > plan.tokens)
    return ashlar::Invalid("prefix_tokens: ", plan.prefix_tokens, "; the prompt has ", plan.tokens);
  for (size_t i = 0; i < plan.segments.size(); ++i) {
    const bool rises = i == 0 || plan.segments[i] > plan.segments[i - 1];
    if (!rises || plan.segments[i] >= plan.segment_lengths.size())
      return ashlar::Invalid("segments[", i, "]: ", plan.segments[i], "; expected ascending segments of the prompt");
  }
  return CheckRising(plan.captures, plan.tokens);
}

}  // namespace

std::string EncodePlan(const PlannedLanding& plan) {
  Writer out;
  out.bytes().append(kMagic, sizeof kMagic);
  out.Put(kPlanVersion);
  out.Put(uint64_t{0});  // size of all bytes, written at the end
  out.Put(plan.tensor_parallel_size);
  out.PutBytes(plan.ns.bytes);
  out.PutBytes(plan.lease);
  out.Put(plan.tokens);
  out.PutList(plan.segment_lengths);
  out.Put(plan.prefix_tokens);
  out.PutList(plan.segments);
  out.PutList(plan.captures);
  const uint64_t bytes = out.bytes().size() + kChecksum;
  for (size_t i = 0; i < sizeof bytes; ++i) {
    out.bytes()[sizeof kMagic + sizeof kPlanVersion + i] = static_cast<char>(bytes >> (8 * i));
  }
  out.Put(kernels::UnitChecksum(out.bytes().data(), out.bytes().size()));
  return std::move(out.bytes());
}

absl::StatusOr<PlannedLanding> DecodePlan(std::span<const uint8_t> bytes) {
  if (bytes.size() < kHeader || std::memcmp(bytes.data(), kMagic, sizeof kMagic) != 0)
    return ashlar::Invalid("magic: not a plan");
  Reader header(bytes.subspan(sizeof kMagic));
  const auto version = header.Get<uint32_t>();
  if (version != kPlanVersion)
    return ashlar::Invalid("version: ", version, "; this build reads version ", kPlanVersion, " only");
  const auto size = header.Get<uint64_t>();
  if (size != bytes.size()) return ashlar::Invalid("bytes: ", bytes.size(), "; the header gives ", size);
  if (size < kHeader + kChecksum) return ashlar::Invalid("bytes: too short for a plan");
  const auto covered = bytes.first(bytes.size() - kChecksum);
  if (Reader(bytes.last(kChecksum)).Get<uint64_t>() != kernels::UnitChecksum(covered.data(), covered.size())) {
    return ashlar::Invalid("checksum: mismatch");
  }
  Reader in(covered.subspan(kHeader));
  PlannedLanding plan;
  plan.tensor_parallel_size = in.Get<uint32_t>();
  in.GetBytes(plan.ns.bytes);
  in.GetBytes(plan.lease);
  plan.tokens = in.Get<uint64_t>();
  plan.segment_lengths = in.GetList<uint64_t>(limits::kMaxSegments);
  plan.prefix_tokens = in.Get<uint64_t>();
  plan.segments = in.GetList<uint32_t>(limits::kMaxSegments);
  plan.captures = in.GetList<uint64_t>(kMostCaptures);
  if (!in.whole() || !in.at_end()) return ashlar::Invalid("bytes: the fields do not match the size");
  if (absl::Status status = Check(plan); !status.ok()) return status;
  return plan;
}

}  // namespace ashlar::engine
