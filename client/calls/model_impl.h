// SPDX-License-Identifier: Apache-2.0
// The implementation behind Model.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "ashlar/client.h"
#include "ashlar/shared_pages.h"
#include "client/session/opened_model.h"
#include "client/session/reconnector.h"

namespace ashlar::v1 {
class PublishObject;
}

namespace ashlar {

struct Model::Impl {
  std::shared_ptr<internal::Reconnector> reconnector;
  std::shared_ptr<internal::OpenedModel> opened;

  // The model's handles on the connection of now.
  absl::StatusOr<internal::ModelBinding> Bind() const {
    if (absl::Status status = reconnector->CheckProcess(); !status.ok()) return status;
    return opened->binding();
  }

  // A request's pages under a lease that is held from here on, but not granted yet; null where an earlier release of it
  // is still on its way.
  std::unique_ptr<Admission::Impl> NewAdmission(const internal::ModelBinding& binding,
                                                std::span<const uint64_t> segment_lengths, const std::string& lease,
                                                internal::Deadline deadline) const;

  // Looks up and lands in one call. Empty if that takes two calls: the daemon is too old, the prompt is too long, or
  // the pages cannot be landed in now.
  std::optional<MatchAndLanding> TryLookupAndLand(Model& model, const Prompt& prompt,
                                                  std::span<const int32_t> page_table,
                                                  std::span<const uint32_t> group_pages) const;

  // Says in `object` what the daemon is told of one finished object. Its outcome where the daemon need not be asked.
  std::optional<PublishOutcome> Describe(const Publication& publication, const internal::ModelBinding& binding,
                                         v1::PublishObject& object) const;

  // Asks the composition service and waits for its answer. `match`: under whose lease `segments` of the request lie;
  // null where there are none. `fill` completes the request; false: it makes no sense.
  template <typename Request, typename Fill>
  std::unique_ptr<Composition::Impl> AskToCompose(const Match::Impl* match, size_t segments,
                                                  const std::shared_ptr<internal::RegionMemory>& region,
                                                  Fill fill) const;
};

}  // namespace ashlar
