// SPDX-License-Identifier: Apache-2.0
// One explanation, for people and for programs.
#pragma once

#include <string>

#include "ashlar/v1/admin.pb.h"
#include "nlohmann/json.hpp"

namespace ashlar::ctl {

// "segment of 512 tokens: evicted 12 s ago from dram by price after 3 uses, 1.2 MiB; …"
std::string ExplanationText(const v1::ExplainedText& text);
// Names in place of numbers, digests in hexadecimal.
nlohmann::json ExplanationJson(const v1::ExplainedText& text);

}  // namespace ashlar::ctl
