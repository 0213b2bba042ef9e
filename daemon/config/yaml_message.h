// SPDX-License-Identifier: Apache-2.0
// Converts YAML to a protobuf message and back by reflection. The message declares all fields of the file.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace google::protobuf {
class Message;
}

namespace ashlar::daemon {

// Fills `message` from one YAML document, whose keys are the field names of the message. INVALID_ARGUMENT names the
// full path of the field ("dram.capacty_bytes: unknown field") for unknown or repeated keys, wrong types and numbers
// out of range. 0 is refused for fields where it has no meaning. Unsigned fields whose names end in _bytes or begin
// with bytes_ also take KiB, MiB, GiB and TiB.
absl::Status ParseYaml(const std::string& yaml, google::protobuf::Message* message);

// Returns a YAML document with every field of `message`, set or not. ParseYaml accepts it.
std::string FormatYaml(const google::protobuf::Message& message);

}  // namespace ashlar::daemon
