// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/ucx_context.h"

#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "daemon/peer/transport/ucx_api.h"
#include "daemon/peer/transport/ucx_settings.h"

namespace ashlar::daemon {
namespace {

// The first release whose usual protocols read into memory of a type given by the caller; earlier ones assume host
// memory.
constexpr unsigned kMemoryTypesSince = 16;

}  // namespace

void UcxContext::Close() {
  if (handle_ != nullptr) ucp_cleanup(std::exchange(handle_, nullptr));
}

// With UCP_FEATURE_RMA, UCX serves reads and writes of any address in software where RDMA is missing, without a key. So
// a context with this feature has no TCP, and one with TCP lacks the feature. Of the RDMA transports it has rc: closing
// an rc connection ends the peer's access, whereas a dc target serves all peers.
absl::Status UcxContext::Open(const TransportOptions& options) {
  if (options.reads == RemoteReads::kBySoftware) {
    reads_ = options.reads;
    return OpenWith(options, "tcp,self", UCP_FEATURE_RMA);
  }
  if (!options.expect_rdma) return OpenWith(options, "tcp,self", 0);
  if (options.reads == RemoteReads::kNever) return OpenWith(options, "rc,dc,tcp,self", 0);
  if (OpenWith(options, "rc,self", UCP_FEATURE_RMA).ok() && has_rdma()) {
    reads_ = options.reads;
    return absl::OkStatus();
  }
  Close();
  return OpenWith(options, "tcp,self", 0);
}

absl::Status UcxContext::OpenWith(const TransportOptions& options, const std::string& transports,
                                  uint64_t more_features) {
  settings_.clear();
  ucp_config_t* config = nullptr;
  if (absl::Status s = ToStatus(ucp_config_read(nullptr, nullptr, &config), "ucp_config_read"); !s.ok()) return s;
  const absl::Cleanup release = [config] { ucp_config_release(config); };
  // UCX uses it to copy between GPU and host memory and to distinguish them. It does not connect nodes. If UCX lacks
  // it, the others are opened without a warning.
  const std::string all = options.enter_gpu ? transports + ",cuda_copy" : transports;
  if (absl::Status s = ApplyUcxSettings(options, all, config, settings_); !s.ok()) return s;
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP | more_features;
  if (absl::Status s = ToStatus(ucp_init(&params, config, &handle_), "ucp_init"); !s.ok()) return s;
  // UCX silently omits an interface that is not up, and no peer could be reached.
  const bool networked = Info().find("tcp/") != std::string::npos || has_rdma();
  return networked ? absl::OkStatus() : absl::UnavailableError("UCX found no active network interface");
}

std::string UcxContext::Info() const {
  return Printed([this](FILE* file) { ucp_context_print_info(handle_, file); });
}

bool UcxContext::has_rdma() const {
  const std::string text = Info();
  return text.find("rc_") != std::string::npos || text.find("dc_") != std::string::npos;
}

bool UcxContext::ReadsOver(const std::string& lanes) const {
  if (reads_ != RemoteReads::kByCards) return reads_ == RemoteReads::kBySoftware;
  for (absl::string_view lane : absl::StrSplit(lanes, ' ')) {
    if (!absl::StartsWith(lane, "rc_")) return false;
  }
  return true;
}

bool UcxContext::Reaches(MemoryType type) const {
  if (type == MemoryType::kHost) return true;
  unsigned major = 0, minor = 0, release = 0;
  ucp_get_version(&major, &minor, &release);
  ucp_context_attr_t attributes{.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};
  return (major > 1 || minor >= kMemoryTypesSince) && ucp_context_query(handle_, &attributes) == UCS_OK &&
         (attributes.memory_types & UCS_BIT(UcsTypeOf(type))) != 0;
}

}  // namespace ashlar::daemon
