// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/token_file.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/regular_file.h"
#include "proto/tokens.h"

namespace ashlar::ctl {
namespace {

absl::Status Bad(const std::string& path, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", why));
}

// Removes a string with its length from the front of `rest`.
bool TakePrefixed(absl::string_view& rest, std::string& value) {
  uint32_t size = 0;
  if (rest.size() < sizeof size) return false;
  std::memcpy(&size, rest.data(), sizeof size);
  rest.remove_prefix(sizeof size);
  if (rest.size() < size) return false;
  value.assign(rest.data(), size);
  rest.remove_prefix(size);
  return true;
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  constexpr size_t kMaxBytes = size_t{256} << 20;  // the longest prompts, as text
  return ReadRegularFile("", path, kMaxBytes);
}

absl::StatusOr<std::string> ReadTokenFile(const std::string& path, bool binary) {
  absl::StatusOr<std::string> bytes = ReadFile(path);
  if (!bytes.ok()) return bytes;
  if (binary) {
    if (bytes->size() % sizeof(int32_t) != 0) return Bad(path, "length is not a multiple of 4 bytes (int32)");
    return bytes;
  }
  std::vector<int32_t> tokens;
  for (const absl::string_view word : absl::StrSplit(*bytes, absl::ByAnyChar(" \t\r\n,[]"), absl::SkipEmpty())) {
    int32_t token = 0;
    if (!absl::SimpleAtoi(word, &token)) return Bad(path, absl::StrCat("\"", word, "\" is not a token id"));
    tokens.push_back(token);
  }
  return PackTokens(tokens);
}

absl::StatusOr<ModelFile> ReadModelFile(const std::string& path) {
  const absl::StatusOr<std::string> bytes = ReadFile(path);
  if (!bytes.ok()) return bytes.status();
  absl::string_view rest(*bytes);
  ModelFile model;
  if (!TakePrefixed(rest, model.identity)) return Bad(path, "truncated in the identity");
  if (!TakePrefixed(rest, model.layout)) return Bad(path, "truncated in the layout");
  if (!rest.empty()) return Bad(path, absl::StrCat(rest.size(), " unexpected bytes at the end"));
  return model;
}

}  // namespace ashlar::ctl
