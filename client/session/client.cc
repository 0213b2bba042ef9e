// SPDX-License-Identifier: Apache-2.0
#include "client/session/client.h"

#include <chrono>
#include <utility>

#include "client/session/opened_model.h"
#include "client/session/process_bound.h"
#include "client/session/reconnector.h"
#include "client/session/region_memory.h"

namespace ashlar {

using internal::Connection;
using internal::Deadline;
using internal::Mapping;
using internal::SharedMemory;

namespace {

constexpr std::chrono::hours kLongestTimeout{1};

absl::Status LostMeanwhile() {
  return absl::UnavailableError("the daemon exited or closed the session during the call");
}

}  // namespace

Client::~Client() {
  if (reconnector_->CheckProcess().ok()) reconnector_->Stop();
}

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const ClientOptions& options) {
  static const internal::CreatorProcess first_use;
  if (first_use.InChild()) {
    return absl::FailedPreconditionError(
        "this process was forked after its parent had connected; call exec, or fork before connecting");
  }
  if (options.timeout <= std::chrono::milliseconds::zero() || options.timeout > kLongestTimeout) {
    return absl::InvalidArgumentError("timeout: out of range; expected more than 0 and at most 1 hour");
  }
  absl::StatusOr<std::shared_ptr<internal::Reconnector>> reconnector = internal::Reconnector::Start(options);
  if (!reconnector.ok()) return reconnector.status();
  return std::unique_ptr<Client>(new Client(*std::move(reconnector)));
}

bool Client::connected() const {
  return reconnector_->connection().ok();
}
const std::string& Client::tenant() const {
  return reconnector_->tenant();
}

absl::StatusOr<Model> Client::OpenModel(const Identity& identity, const Layout& layout, const Shard& shard,
                                        const CostModel& cost, const PrefixUse& prefixes) {
  if (absl::Status status = Validate(identity); !status.ok()) return status;
  if (absl::Status status = Validate(layout); !status.ok()) return status;
  absl::StatusOr<std::shared_ptr<Connection>> connection = reconnector_->connection();
  if (!connection.ok()) return connection.status();
  absl::StatusOr<std::shared_ptr<internal::OpenedModel>> opened =
      internal::OpenedModel::Open({identity, layout, shard, cost, prefixes}, *connection, reconnector_->CallDeadline());
  if (!opened.ok()) return opened.status();
  if (!reconnector_->Keep(*opened, *connection)) return LostMeanwhile();
  Model model;
  model.reconnector_ = reconnector_;
  model.opened_ = *std::move(opened);
  return model;
}

absl::StatusOr<Region> Client::RegisterRegion(int memfd, size_t bytes) {
  absl::StatusOr<std::shared_ptr<Connection>> connection = reconnector_->connection();
  if (!connection.ok()) return connection.status();
  absl::StatusOr<internal::Descriptor> copy = internal::Descriptor::Duplicate(memfd);
  if (!copy.ok()) return absl::InvalidArgumentError("memfd: not an open descriptor");
  absl::StatusOr<Mapping> mapping = Mapping::Map(copy->get(), bytes, Mapping::Access::kReadWrite);
  if (!mapping.ok()) return mapping.status();
  return Keep(*std::move(copy), SharedMemory(*std::move(mapping)), std::nullopt, *connection,
              reconnector_->CallDeadline());
}

absl::StatusOr<Region> Client::RegisterGpuRegion(int descriptor, std::byte* data, size_t bytes,
                                                 const kernels::GpuId& gpu) {
  absl::StatusOr<std::shared_ptr<Connection>> connection = reconnector_->connection();
  if (!connection.ok()) return connection.status();
  if (data == nullptr || bytes == 0)
    return absl::InvalidArgumentError("data, bytes: required; expected the address and size of the memory");
  absl::StatusOr<internal::Descriptor> copy = internal::Descriptor::Duplicate(descriptor);
  if (!copy.ok()) return absl::InvalidArgumentError("descriptor: not an open descriptor");
  const kernels::Gpu* const own = (*connection)->arenas().gpu();
  const kernels::GpuId& lies_on = gpu == kernels::GpuId{} && own != nullptr ? own->id() : gpu;
  return Keep(*std::move(copy), SharedMemory(data, bytes, lies_on), std::nullopt, *connection,
              reconnector_->CallDeadline());
}

absl::StatusOr<Region> Client::HostRegion(size_t bytes) {
  const Deadline deadline = reconnector_->CallDeadline();
  absl::StatusOr<std::shared_ptr<Connection>> connection = reconnector_->connection();
  if (!connection.ok()) return connection.status();
  internal::SessionChannel& channel = (*connection)->channel();
  auto hosted = channel.HostRegion(bytes, deadline);
  if (!hosted.ok()) return hosted.status();
  absl::StatusOr<Mapping> mapping = Mapping::Map(hosted->memory.get(), bytes, Mapping::Access::kReadWrite);
  if (!mapping.ok()) {
    channel.DropRegion(hosted->id);
    return absl::InternalError("the memory that the daemon hosted cannot be mapped");
  }
  return Keep(std::move(hosted->memory), SharedMemory(*std::move(mapping)), hosted->id, *connection, deadline);
}

absl::StatusOr<Region> Client::Keep(internal::Descriptor memory, SharedMemory place, std::optional<uint64_t> hosted_id,
                                    const std::shared_ptr<Connection>& connection, Deadline deadline) const {
  Region region;
  region.memory_ = internal::MakeProcessBound<internal::RegionMemory>(std::move(memory), std::move(place));
  if (hosted_id.has_value()) {
    region.memory_->SetId(connection, *hosted_id);
  } else if (absl::Status status = region.memory_->Restore(connection, deadline); !status.ok()) {
    return status;
  }
  if (!reconnector_->Keep(region.memory_, connection)) return LostMeanwhile();
  return region;
}

}  // namespace ashlar
