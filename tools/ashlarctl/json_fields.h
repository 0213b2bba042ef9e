// SPDX-License-Identifier: Apache-2.0
// The fields of each command's answer with --json, for the manual page and for programs.
#pragma once

#include <string>
#include <vector>

namespace ashlar::ctl {

struct JsonField {
  const char* path;     // "objects[].key"; "tiers.*": for objects whose field names are data
  const char* meaning;  // units are in the name
};

// Fields of a command's JSON, in order.
std::vector<JsonField> JsonFieldsOf(const std::string& command);

}  // namespace ashlar::ctl
