// SPDX-License-Identifier: Apache-2.0
// UcxContext: UCX's library context: the transports that it uses, and whether memory is read over them.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/peer/transport/transport.h"

namespace ashlar::daemon {

class UcxContext {
 public:
  UcxContext() = default;
  ~UcxContext() { Close(); }  // after the worker
  UcxContext(const UcxContext&) = delete;
  UcxContext& operator=(const UcxContext&) = delete;

  absl::Status Open(const TransportOptions& options);

  ucp_context_h handle() const { return handle_; }
  const std::vector<UcxSetting>& settings() const { return settings_; }
  bool has_rdma() const;
  bool reads() const { return reads_ != RemoteReads::kNever; }
  // See Ucx::ReadsOver and Ucx::Reaches.
  bool ReadsOver(const std::string& lanes) const;
  bool Reaches(MemoryType type) const;

 private:
  absl::Status OpenWith(const TransportOptions& options, const std::string& transports, uint64_t more_features);
  void Close();
  std::string Info() const;

  RemoteReads reads_ = RemoteReads::kNever;  // the effective setting
  std::vector<UcxSetting> settings_;
  ucp_context_h handle_ = nullptr;
};

}  // namespace ashlar::daemon
