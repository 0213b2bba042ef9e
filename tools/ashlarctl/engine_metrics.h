// SPDX-License-Identifier: Apache-2.0
// The metrics that an engine exports of its use of the cache (docs/vllm-options.md).
#pragma once

#include <chrono>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ashlar::ctl {

struct Sample {
  std::string name;
  std::map<std::string, std::string> labels;
  double value = 0;
};

struct EngineMetrics {
  std::set<std::string> families;  // names that the endpoint describes, with and without samples
  std::vector<Sample> samples;
};

// Reads Prometheus's text format. Lines that are not understood are skipped.
EngineMetrics ParseMetrics(const std::string& text);

// Body of the answer to GET `url`, "http://HOST:PORT/PATH"; the default path is /metrics. The errors begin with
// "--engine". INVALID_ARGUMENT: not such a URL.
absl::StatusOr<std::string> FetchMetrics(const std::string& url, std::chrono::milliseconds timeout);

}  // namespace ashlar::ctl
