// What is behind a Model.
#pragma once

#include <memory>
#include <optional>

#include "client/client.h"
#include "client/keeper.h"
#include "client/opened_model.h"

namespace ashlar::v1 {
class PublishObject;
}

namespace ashlar {

struct Model::Impl {
  std::shared_ptr<internal::Keeper> keeper;
  std::shared_ptr<internal::OpenedModel> opened;

  // The model's handles on the connection of now.
  absl::StatusOr<internal::ModelBinding> Bind() const {
    if (absl::Status status = keeper->CheckProcess(); !status.ok()) return status;
    return opened->binding();
  }

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
