// SPDX-License-Identifier: Apache-2.0
// The fields of each command's answer with --json, for the manual page and for those who read the answers.
#pragma once

#include <string>
#include <vector>

namespace ashlar::ctl {

struct JsonField {
  const char* path;     // "objects[].key"; "tiers.*": of objects whose names are data
  const char* meaning;  // units are in the name
};

// Of a command by its name, in the order in which they stand there.
std::vector<JsonField> JsonFieldsOf(const std::string& command);

}  // namespace ashlar::ctl
