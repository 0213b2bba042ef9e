// SPDX-License-Identifier: Apache-2.0
// The gate before the parser: checks of a request while it is still bytes. Two bytes can become a hundred of heap.
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

// Fields that this version does not know are kept by the parser, so they are bounded too: as many in one request.
inline constexpr size_t kMaxUnknownFields = 65536;

// The secret in a request's field `session`, which is number 1 in all of them; empty when there is none, or when it is
// longer than any.
std::string FindSession(google::protobuf::io::ZeroCopyInputStream& request);

// Returns how often one message may have a field: once, or as often as proto/limits.h says of a repeated one. 0:
// proto/limits.h says nothing of it.
uint64_t MaxCount(const google::protobuf::FieldDescriptor& field);

// INVALID_ARGUMENT, naming the field, when a message of `type` has more of one than MaxCount, or more than
// kMaxUnknownFields that are unknown; also when it is no message at all, as far as that shows. One pass over the tags.
absl::Status CheckCounts(const google::protobuf::Descriptor& type, google::protobuf::io::ZeroCopyInputStream& request);

}  // namespace ashlar::daemon
