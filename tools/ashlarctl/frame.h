// SPDX-License-Identifier: Apache-2.0
// One screen of `ashlarctl top`.
#pragma once

#include <cstddef>
#include <string>

#include "ashlar/v1/admin.pb.h"
#include "nlohmann/json.hpp"

namespace ashlar::ctl {

struct Screen {
  size_t columns = 80, rows = 24;
  bool colour = false;
};

// Shows the change between two answers, `seconds` apart, in at most screen.rows lines of at most screen.columns
// characters. Tenants with most requests come first; the ones that do not fit are counted in the last line.
std::string Frame(const v1::StatsReply& before, const v1::StatsReply& now, double seconds, const Screen& screen);
nlohmann::json FrameJson(const v1::StatsReply& before, const v1::StatsReply& now, double seconds);

}  // namespace ashlar::ctl
