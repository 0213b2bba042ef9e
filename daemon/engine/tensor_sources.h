// SPDX-License-Identifier: Apache-2.0
// TensorSources: the locations of one object's tensors in an engine's regions, as its request gives them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "daemon/session/region.h"
#include "daemon/session/session.h"
#include "proto/object.h"
#include "storage/transfer/transfer.h"

namespace ashlar::v1 {
class PartSource;
}

namespace ashlar::daemon {

class TensorSources {
 public:
  // A declared run of transitions, and the index of its part in the request.
  struct Run {
    TransitionRun run;
    int part = 0;
  };
  using Regions = std::vector<std::shared_ptr<const Region>>;

  // Adds part `index`, which is `field` in the request. INVALID_ARGUMENT for errors that can be found without the
  // object's plan.
  absl::Status Add(const std::string& field, int index, const v1::PartSource& part, const Session& session);

  const std::vector<Run>& runs() const { return runs_; }

  // Fills `tensors` in the order of the plan, and `regions` with the regions of the tensors. Returns false unless every
  // part with bytes that is not rows has a tensor inside its region, and no other tensor is given.
  bool Fit(const ObjectHeader& plan, std::vector<storage::PublishSource::Tensor>& tensors, Regions& regions) const;

 private:
  struct Tensor {
    std::shared_ptr<const Region> region;  // null if unknown
    uint64_t offset = 0;
  };
  using Name = std::tuple<uint32_t, PartForm, uint32_t>;  // layer, form, first head

  std::map<Name, Tensor> tensors_;
  std::vector<Run> runs_;
  const Region* whole_ = nullptr;  // the region checked last; kept in tensors_
};

}  // namespace ashlar::daemon
