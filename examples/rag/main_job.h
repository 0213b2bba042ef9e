// SPDX-License-Identifier: Apache-2.0
// The main job: questions retrieve sections of documents, and every prompt is served four ways (HYPIC §6.1).
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "examples/rag/cached_serving.h"
#include "examples/rag/report.h"

namespace ashlar::rag {

struct JobOptions {
  std::string docs = "/usr/share/common-licenses";
  int64_t sections = 96;  // sections of the corpus; 0: all
  int64_t sections_per_prompt = 16;
  int64_t requests = 40;
  int threads = 0;    // 0: the machine's cores
  uint64_t seed = 1;  // seed of weights and questions
  ComposeBy compose = ComposeBy::kEngine;
  Family family = Family::kGdn;  // kGdn or kLightning
  double epsilon = kPublishedEpsilon;
  size_t nodes = 1;  // daemons of one cluster; requests alternate between them
  // Capacities of each daemon's tiers. dram 0: enough for everything that the job publishes; hbm, ssd 0: no such tier.
  uint64_t hbm_bytes = 0, dram_bytes = 0, ssd_bytes = 0;
};

// Starts its own daemons, runs the job, and prints its results as they arrive.
absl::StatusOr<RunResult> RunMainJob(const JobOptions& options);

}  // namespace ashlar::rag
