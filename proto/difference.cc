// SPDX-License-Identifier: Apache-2.0
#include "proto/difference.h"

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/layout_fields.h"

namespace ashlar {
namespace {

absl::string_view TypeName(absl::string_view tag) {
  if (tag == absl::StrCat(kLinearTag)) return "linear";
  return tag == absl::StrCat(kOpaqueTag) ? "opaque" : "attention";
}

// Walks over fields and stops at the one whose canonical bytes contain `offset`.
class Locator {
 public:
  // `at`: offset of the first field.
  Locator(std::string scope, size_t at, size_t offset) : scope_(std::move(scope)), at_(at), offset_(offset) {}

  template <typename T>
  void operator()(absl::string_view name, const T& value) {
    if (Passes(sizeof value)) return;
    if constexpr (std::is_floating_point_v<T>) {
      Found(name, absl::StrFormat("%.9g", value));
    } else {
      Found(name, absl::StrCat(static_cast<uint64_t>(value)));
    }
  }
  void operator()(absl::string_view name, const double& value) {
    if (!Passes(sizeof value)) Found(name, absl::StrFormat("%.17g", value));
  }
  void operator()(absl::string_view name, const std::optional<DType>& value) {
    (*this)(name, value.value_or(DType{0}));
  }
  void operator()(absl::string_view name, const bool& value) {
    if (!Passes(1)) Found(name, value ? "true" : "false");
  }
  void operator()(absl::string_view name, const std::string& value) {
    if (!Passes(sizeof(uint32_t) + value.size())) Found(name, absl::StrCat("\"", value, "\""));
  }
  template <typename T>
  void operator()(absl::string_view name, const std::vector<T>& values) {
    if (!Passes(sizeof(uint32_t))) return Found(name, absl::StrCat(values.size(), " numbers"));
    for (size_t i = 0; i < values.size() && !difference_; ++i) {
      if (at_ + sizeof(T) <= offset_) {
        at_ += sizeof(T);
      } else {
        (*this)(absl::StrCat(name, "[", i, "]"), values[i]);
      }
    }
  }
  void Enter(std::string scope) { scope_ = std::move(scope); }

  std::optional<Difference> Take() { return std::move(difference_); }

 private:
  // Skips `bytes`; returns true if the difference is not in them.
  bool Passes(size_t bytes) {
    if (difference_) return true;
    at_ += bytes;
    return at_ <= offset_;
  }
  void Found(absl::string_view name, std::string value) {
    if (name == "type") value = std::string(TypeName(value));
    difference_ = Difference{.field = absl::StrCat(scope_, ".", name), .first = std::move(value)};
  }

  std::string scope_;
  size_t at_;
  const size_t offset_;
  std::optional<Difference> difference_;
};

constexpr size_t kAfterTag = 8;  // offset of the first field in an encoding

// All bytes before the first difference are equal, so it is in the same field of both.
template <typename Walk>
std::optional<Difference> Locate(const std::string& first, const std::string& second, Walk walk) {
  if (first == second) return std::nullopt;
  const auto [a, b] = std::mismatch(first.begin(), first.end(), second.begin(), second.end());
  const auto offset = static_cast<size_t>(a - first.begin());
  std::optional<Difference> difference = walk(true, offset);
  const std::optional<Difference> other = walk(false, offset);
  if (difference && other) difference->second = other->first;
  return difference;
}

}  // namespace

std::optional<Difference> FirstDifference(const Identity& first, const Identity& second) {
  return Locate(EncodeIdentity(first), EncodeIdentity(second), [&](bool is_first, size_t offset) {
    Locator locator("identity", kAfterTag, offset);
    CodeIdentity(locator, is_first ? first : second);
    return locator.Take();
  });
}

std::optional<Difference> FirstDifference(const Layout& first, const Layout& second) {
  // Both are encoded in the same version; otherwise only the version would differ.
  const uint32_t version = std::max(LayoutVersion(first), LayoutVersion(second));
  return Locate(EncodeLayoutAs(version, first), EncodeLayoutAs(version, second), [&](bool is_first, size_t offset) {
    Locator locator("layout", kAfterTag, offset);
    CodeLayout(locator, is_first ? first : second, version);
    return locator.Take();
  });
}

}  // namespace ashlar
