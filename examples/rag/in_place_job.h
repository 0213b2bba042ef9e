// SPDX-License-Identifier: Apache-2.0
// The demo's run with segments shared in place: all requests run at the same time, as in a batch, and the pages that
// they hold are compared with copies of their own. Each request's logits are compared with those from landed copies.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "examples/rag/main_job.h"
#include "nlohmann/json.hpp"

namespace ashlar::rag {

struct InPlaceRequest {
  std::string question;
  uint64_t tokens = 0, segments = 0;
  uint64_t missed = 0;      // segments that the request computed
  uint64_t copy_pages = 0;  // pages of the request if its segments were copied
  uint64_t own_pages = 0;   // pages that only this request holds
  uint64_t new_pages = 0;   // pages that no earlier request held: own ones, and shared pages that it filled
  bool same_token = false;  // the first token is that of landed copies
  double logits_rel_l2 = 0;
};

struct InPlaceResult {
  uint64_t page_tokens = 0;
  std::vector<InPlaceRequest> requests;
  uint64_t copy_pages = 0;      // held by all requests if each had its own copies
  uint64_t in_place_pages = 0;  // held by all requests in place, each page counted once
  double worst_rel_l2 = 0;

  uint64_t saved_pages() const { return copy_pages - in_place_pages; }
  // Whether the logits equal the ones with landed copies.
  bool Holds() const { return worst_rel_l2 <= 1e-5; }
};

// Starts a daemon, runs the job, and prints its requests as they are served.
absl::StatusOr<InPlaceResult> RunInPlaceJob(const JobOptions& options);

void PrintSummary(const InPlaceResult& result);
nlohmann::json ToJson(const InPlaceResult& result);

}  // namespace ashlar::rag
