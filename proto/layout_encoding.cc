// SPDX-License-Identifier: Apache-2.0
// The canonical encoding (tables in docs/formats.md). Both directions use layout_fields.h.
#include <bit>
#include <cstring>
#include <optional>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "proto/layout.h"
#include "proto/layout_fields.h"
#include "proto/limits.h"

namespace ashlar {
namespace {

static_assert(std::endian::native == std::endian::little, "integers are copied as they lie in memory");

constexpr absl::string_view kLayoutTag = "AshL";
constexpr absl::string_view kIdentityTag = "AshI";

class Writer {
 public:
  template <typename T>
  void operator()(const char*, const T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void operator()(const char* name, const bool& value) { (*this)(name, static_cast<uint8_t>(value)); }
  void operator()(const char* name, const std::optional<DType>& value) { (*this)(name, value.value_or(DType{0})); }
  template <typename T>
  void operator()(const char* name, const std::vector<T>& values) {
    (*this)(name, static_cast<uint32_t>(values.size()));
    if (!values.empty()) bytes_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }
  void operator()(const char* name, const std::string& value) {
    (*this)(name, static_cast<uint32_t>(value.size()));
    bytes_.append(value);
  }
  void Enter(const std::string&) {}
  void Tag(absl::string_view tag, uint32_t version) {
    bytes_.append(tag.data(), tag.size());
    (*this)("version", version);
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Reads the output of Writer. After the first error all reads do nothing, so callers check once.
class Reader {
 public:
  Reader(std::string scope, absl::string_view bytes) : scope_(std::move(scope)), rest_(bytes) {}

  template <typename T>
  void operator()(const char* name, T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    Copy(name, &value, sizeof value);
  }
  void operator()(const char* name, bool& value) {
    uint8_t byte = 0;
    (*this)(name, byte);
    if (byte > 1) Fail(name, "must be 0 or 1");
    value = byte == 1;
  }
  void operator()(const char* name, std::optional<DType>& value) {
    auto dtype = DType{0};
    (*this)(name, dtype);
    if (dtype != DType{0}) value = dtype;
  }
  template <typename T>
  void operator()(const char* name, std::vector<T>& values) {
    const uint32_t count = Count(name, sizeof(T));
    values.resize(count);
    if (count != 0) Copy(name, values.data(), count * sizeof(T));
  }
  void operator()(const char* name, std::string& value) {
    const uint32_t count = Count(name, 1);
    value.assign(rest_.data(), count);
    rest_.remove_prefix(count);
  }

  // Returns the version.
  uint32_t Tag(absl::string_view tag, uint32_t min, uint32_t max) {
    if (status_.ok() && rest_.substr(0, tag.size()) != tag) {
      Fail("tag", absl::StrCat("must begin with \"", tag, "\""));
    }
    if (!status_.ok()) return min;
    rest_.remove_prefix(tag.size());
    uint32_t version = 0;
    (*this)("version", version);
    if (version < min || version > max) {
      const std::string read = min == max ? absl::StrCat(min) : absl::StrCat(min, " to ", max);
      Fail("version", absl::StrCat(version, "; expected ", read));
    }
    return version;
  }
  // Reads a count of elements of at least `element_bytes` each. It is never larger than the remaining bytes allow.
  uint32_t Count(const char* name, size_t element_bytes) {
    uint32_t count = 0;
    (*this)(name, count);
    if (status_.ok() && count > rest_.size() / element_bytes) Fail(name, "truncated");
    return status_.ok() ? count : 0;
  }
  void Fail(absl::string_view name, absl::string_view why) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat(scope_, ".", name, ": ", why));
  }
  void Enter(std::string scope) { scope_ = std::move(scope); }
  absl::Status Finish() {
    if (!rest_.empty()) Fail("encoding", absl::StrCat(rest_.size(), " unexpected bytes at the end"));
    return status_;
  }

 private:
  void Copy(const char* name, void* target, size_t size) {
    if (!status_.ok()) return;
    if (rest_.size() < size) return Fail(name, "truncated");
    std::memcpy(target, rest_.data(), size);
    rest_.remove_prefix(size);
  }

  std::string scope_;
  absl::string_view rest_;
  absl::Status status_;
};

}  // namespace

std::string EncodeLayoutAs(uint32_t version, const Layout& layout) {
  Writer write;
  write.Tag(kLayoutTag, version);
  CodeLayout(write, layout, version);
  return write.Take();
}

std::string EncodeLayout(const Layout& layout) {
  return EncodeLayoutAs(LayoutVersion(layout), layout);
}

absl::StatusOr<Layout> DecodeLayout(absl::string_view bytes) {
  Reader read("layout", bytes);
  Layout layout;
  const uint32_t version = read.Tag(kLayoutTag, kLayoutVersionMin, kLayoutVersionMax);
  CodeSeams(read, layout);
  const uint32_t layers = read.Count("layers", 1);
  // A layer needs much more memory than the byte that announces it.
  if (layers > limits::kMaxLayers)
    read.Fail("layers", absl::StrCat(layers, " is too many; expected at most ", limits::kMaxLayers));
  for (uint32_t i = 0; i < layers && i < limits::kMaxLayers; ++i) {
    read.Enter(absl::StrCat("layout.layers[", i, "]"));
    uint8_t type = 0;
    read("type", type);
    if (type == kAttentionTag) {
      CodeAttention(read, std::get<AttentionLayer>(layout.layers.emplace_back(AttentionLayer{})));
    } else if (type == kLinearTag) {
      CodeLinear(read, std::get<LinearLayer>(layout.layers.emplace_back(LinearLayer{})), version);
    } else if (type == kOpaqueTag) {
      CodeOpaque(read, std::get<OpaqueLayer>(layout.layers.emplace_back(OpaqueLayer{})));
    } else {
      read.Fail("type",
                absl::StrCat(type, " is unknown; expected ", kAttentionTag, ", ", kLinearTag, " or ", kOpaqueTag));
      break;
    }
  }
  read.Enter("layout");
  if (absl::Status status = read.Finish(); !status.ok()) return status;
  if (absl::Status status = Validate(layout); !status.ok()) return status;
  // A value has only one valid encoding.
  if (const uint32_t least = LayoutVersion(layout); version != least) {
    return absl::InvalidArgumentError(absl::StrCat("layout.version: ", version, "; expected ", least,
                                                   ", the lowest version that can express the layout"));
  }
  return layout;
}

std::string EncodeIdentity(const Identity& identity) {
  Writer write;
  write.Tag(kIdentityTag, kIdentityVersion);
  CodeIdentity(write, identity);
  return write.Take();
}

absl::StatusOr<Identity> DecodeIdentity(absl::string_view bytes) {
  Reader read("identity", bytes);
  Identity identity;
  read.Tag(kIdentityTag, kIdentityVersion, kIdentityVersion);
  CodeIdentity(read, identity);
  if (absl::Status status = read.Finish(); !status.ok()) return status;
  if (absl::Status status = Validate(identity); !status.ok()) return status;
  return identity;
}

}  // namespace ashlar
