// SPDX-License-Identifier: Apache-2.0
// Checks of a request before it is parsed. Two bytes can become a hundred bytes of heap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace google::protobuf {
class Descriptor;
class FieldDescriptor;
namespace io {
class ZeroCopyInputStream;
}
}  // namespace google::protobuf

namespace ashlar::daemon {

// Most unknown fields in one request; the parser keeps them.
inline constexpr size_t kMaxUnknownFields = 65536;

// Returns the secret in the field `session`, which has number 1 in all requests; empty if it is missing or too long.
std::string FindSession(google::protobuf::io::ZeroCopyInputStream& request);

// Returns how often a message may contain a field: once, or the limit of a repeated field in proto/limits.h. 0 if there
// is no limit.
uint64_t MaxCount(const google::protobuf::FieldDescriptor& field);

// INVALID_ARGUMENT names the field if a message of `type` has more of it than MaxCount. Also for more than
// kMaxUnknownFields unknown fields, and for bytes that are visibly not a message. One pass over the tags.
absl::Status CheckCounts(const google::protobuf::Descriptor& type, google::protobuf::io::ZeroCopyInputStream& request);

}  // namespace ashlar::daemon
