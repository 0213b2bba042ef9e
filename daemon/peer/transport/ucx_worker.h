// SPDX-License-Identifier: Apache-2.0
// UcxWorker: Ucx implemented with the library. The class is in a header because two files implement it: connections and
// messages (ucx.cc), and RDMA memory (ucx_memory.cc).
#pragma once

#include <ucp/api/ucp.h>

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "daemon/peer/transport/silent_sockets.h"
#include "daemon/peer/transport/ucx.h"

namespace ashlar::daemon {

absl::Status ToStatus(ucs_status_t status, absl::string_view what);
inline ucs_memory_type_t UcsTypeOf(MemoryType type) {
  return type == MemoryType::kCuda ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
}

struct UcxLink final : Link {
  ucp_ep_h ep = nullptr;
  bool lost = false;  // the error handler was called
  ucs_status_t why = UCS_OK;
  bool ep_closed = false;
};

// A send or read in flight, with the data that UCX uses until it completes.
struct UcxSend {
  class UcxWorker* worker;
  UcxLink* link;
  HeaderBytes header;
  std::string text;
  std::vector<ucp_dt_iov_t> pieces;
  uint64_t bytes = 0;
  ucs_memory_type_t type = UCS_MEMORY_TYPE_HOST;
  bool reads = false;  // a read of remote memory
  std::function<void(absl::Status)> sent;
};

class UcxWorker final : public Ucx {
 public:
  explicit UcxWorker(LinkEvents events) : events_(std::move(events)) {}
  ~UcxWorker() override;

  absl::Status Open(const TransportOptions& options);

  HostPort address() const override { return address_; }
  const std::vector<UcxSetting>& settings() const override { return settings_; }
  bool has_rdma() const override;
  absl::StatusOr<Link*> Connect(const HostPort& peer) override;
  void Send(Link& link, const Message& message, ConstSpans pieces, std::function<void(absl::Status)> sent) override;
  void SendText(Link& link, const Message& message, std::string text) override;
  void Close(Link& link) override;
  std::string Lanes(Link& link) const override;
  bool reads() const override { return reads_ != RemoteReads::kNever; }
  bool ReadsOver(const std::string& lanes) const override;
  bool Reaches(MemoryType type) const override;
  absl::StatusOr<std::string> Register(std::byte* data, uint64_t bytes, MemoryType type) override;
  MemoryType TypeOf(const std::byte* data) const override;
  absl::StatusOr<std::unique_ptr<RemoteKey>> Unpack(Link& link, const std::string& packed) override;
  void Get(Link& link, RemoteKey& key, uint64_t address, std::span<std::byte> target,
           std::function<void(absl::Status)> got) override;
  bool Progress() override;
  bool Arm() override { return accepts_.empty() && lost_.empty() && ucp_worker_arm(worker_) == UCS_OK; }
  int event() const override { return event_; }

 private:
  absl::Status OpenContext(const TransportOptions& options);
  absl::Status OpenContext(const TransportOptions& options, const std::string& transports, uint64_t more_features);
  void CloseContext();
  absl::Status OpenWorker();
  std::string Info() const;
  absl::Status Listen(const HostPort& at);
  absl::StatusOr<UcxLink*> AddLink(ucp_ep_params_t params, std::string peer, bool accepted);
  void Accept(ucp_conn_request_h request);
  void Post(std::unique_ptr<UcxSend> send);
  void Sent(UcxSend* send, ucs_status_t status);
  void DropClosed();
  void EndSilent();
  void RefuseConnections();
  void UnregisterAll();

  static ucs_status_t OnMessage(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                                const ucp_am_recv_param_t* param);
  static ucs_status_t OnForeignMessage(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                                       const ucp_am_recv_param_t* param);
  static void OnError(void* link_self, ucp_ep_h ep, ucs_status_t status);

  struct Area {
    uint64_t bytes = 0;
    MemoryType type = MemoryType::kHost;
    ucp_mem_h handle = nullptr;  // null if only the type is known
  };
  const Area* AreaOf(const std::byte* data) const;

  LinkEvents events_;
  RemoteReads reads_ = RemoteReads::kNever;  // the effective setting
  std::map<const std::byte*, Area> areas_;   // key: start address
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_listener_h listener_ = nullptr;
  std::set<int> listening_;  // UCX's sockets
  std::unique_ptr<SilentSockets> silent_;
  std::chrono::steady_clock::time_point silent_ended_;  // last call of SilentSockets::End
  int event_ = -1;
  HostPort address_;
  std::vector<UcxSetting> settings_;
  uint64_t next_link_ = 1;
  absl::flat_hash_map<ucp_ep_h, std::unique_ptr<UcxLink>> links_;
  std::deque<ucp_conn_request_h> accepts_;
  std::vector<ucp_ep_h> lost_;                     // keys in links_
  std::vector<std::unique_ptr<UcxLink>> closing_;  // UCX may have reused the addresses of their endpoints
};

}  // namespace ashlar::daemon
