// SPDX-License-Identifier: Apache-2.0
// TensorSources: the places of one object's tensors in an engine's regions, as its request gives them.
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
  // A declared run of transitions, and which of the request's parts it is.
  struct Run {
    TransitionRun run;
    int part = 0;
  };
  using Regions = std::vector<std::shared_ptr<const Region>>;

  // Adds the `index`-th part, which is `field`. INVALID_ARGUMENT names what is wrong, as far as that shows without the
  // object's plan.
  absl::Status Add(const std::string& field, int index, const v1::PartSource& part, const Session& session);

  const std::vector<Run>& runs() const { return runs_; }

  // Fills `tensors` in the plan's order, and `regions` with what they lie in. False unless there is one for every part
  // of the plan that has bytes and is no rows, inside its region, and no other.
  bool Fit(const ObjectHeader& plan, std::vector<storage::PublishSource::Tensor>& tensors, Regions& regions) const;

 private:
  struct Tensor {
    std::shared_ptr<const Region> region;  // null: unknown
    uint64_t offset = 0;
  };
  using Name = std::tuple<uint32_t, PartForm, uint32_t>;  // layer, form, first head

  std::map<Name, Tensor> tensors_;
  std::vector<Run> runs_;
  const Region* whole_ = nullptr;  // the last one that was looked at, and is kept
};

}  // namespace ashlar::daemon
