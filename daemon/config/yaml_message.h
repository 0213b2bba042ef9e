// SPDX-License-Identifier: Apache-2.0
// YAML to a protobuf message and back, by reflection: the message is the only declaration of what may stand in the
// file.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace google::protobuf {
class Message;
}

namespace ashlar::daemon {

// Fills `message` from one YAML document whose keys are the message's field names. INVALID_ARGUMENT names the field by
// its full path ("dram.capacty_bytes: unknown field") for unknown or repeated keys, wrong types and numbers out of
// range, 0 among them where it says neither none nor off. Unsigned fields whose name ends in _bytes, or begins with
// bytes_, also take KiB, MiB, GiB and TiB.
absl::Status ParseYaml(const std::string& yaml, google::protobuf::Message* message);

// A YAML document with every field of `message`, set or not; ParseYaml reads it back.
std::string FormatYaml(const google::protobuf::Message& message);

}  // namespace ashlar::daemon
