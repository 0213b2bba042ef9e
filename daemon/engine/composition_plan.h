// SPDX-License-Identifier: Apache-2.0
// CompositionPlan: a parsed Advance request. All numbers are checked before anything runs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/session/pages.h"
#include "daemon/session/session.h"
#include "storage/cache.h"
#include "storage/transfer/composition.h"

namespace ashlar::v1 {
class AdvanceRequest;
}  // namespace ashlar::v1

namespace ashlar::daemon {

struct CompositionPlan {
  storage::LandingId number = 0;
  storage::LeaseId lease{};  // all zero if no interior is requested
  std::shared_ptr<const Model> model;
  storage::Composition composition;
  std::vector<std::string> fields;  // names of the request's fields, one per interior
};

// INVALID_ARGUMENT names the field.
absl::StatusOr<CompositionPlan> ReadAdvance(const v1::AdvanceRequest& request, const Session& session);

// Checks the part of a plan that needs the lease: the segments belong to the model of the plan and may be at their
// positions.
absl::Status CheckInteriors(const CompositionPlan& plan, const storage::Match& match);

}  // namespace ashlar::daemon
