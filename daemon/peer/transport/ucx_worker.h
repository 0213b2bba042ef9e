// SPDX-License-Identifier: Apache-2.0
// UcxWorker: Ucx implemented with the library. The class is in a header because two files implement it: connections and
// messages (ucx.cc), and reads of peers' memory (ucx_reads.cc).
#pragma once

#include <ucp/api/ucp.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "daemon/peer/transport/ucx.h"
#include "daemon/peer/transport/ucx_api.h"
#include "daemon/peer/transport/ucx_context.h"
#include "daemon/peer/transport/ucx_listener.h"
#include "daemon/peer/transport/ucx_memory.h"

namespace ashlar::daemon {

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

  HostPort address() const override { return listener_.address(); }
  const std::vector<UcxSetting>& settings() const override { return context_.settings(); }
  bool has_rdma() const override { return context_.has_rdma(); }
  absl::StatusOr<Link*> Connect(const HostPort& peer) override;
  void Send(Link& link, const Message& message, ConstSpans pieces, std::function<void(absl::Status)> sent) override;
  void SendText(Link& link, const Message& message, std::string text) override;
  void Close(Link& link) override;
  std::string Lanes(Link& link) const override;
  bool reads() const override { return context_.reads(); }
  bool ReadsOver(const std::string& lanes) const override { return context_.ReadsOver(lanes); }
  bool Reaches(MemoryType type) const override { return context_.Reaches(type); }
  absl::StatusOr<std::string> Register(std::byte* data, uint64_t bytes, MemoryType type) override {
    return memory_.Register(data, bytes, type);
  }
  MemoryType TypeOf(const std::byte* data) const override { return memory_.TypeOf(data); }
  absl::StatusOr<std::unique_ptr<RemoteKey>> Unpack(Link& link, const std::string& packed) override;
  void Get(Link& link, RemoteKey& key, uint64_t address, std::span<std::byte> target,
           std::function<void(absl::Status)> got) override;
  bool Progress() override;
  bool Arm() override { return !listener_.pending() && lost_.empty() && ucp_worker_arm(worker_) == UCS_OK; }
  int event() const override { return event_; }

 private:
  absl::Status OpenWorker();
  absl::StatusOr<UcxLink*> AddLink(ucp_ep_params_t params, std::string peer, bool accepted);
  void Accept(ucp_conn_request_h request);
  void Post(std::unique_ptr<UcxSend> send);
  void Sent(UcxSend* send, ucs_status_t status);
  void DropClosed();

  static ucs_status_t OnMessage(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                                const ucp_am_recv_param_t* param);
  static ucs_status_t OnForeignMessage(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                                       const ucp_am_recv_param_t* param);
  static void OnError(void* link_self, ucp_ep_h ep, ucs_status_t status);

  LinkEvents events_;
  UcxContext context_;
  UcxMemory memory_{context_};
  ucp_worker_h worker_ = nullptr;
  UcxListener listener_;
  int event_ = -1;
  uint64_t next_link_ = 1;
  absl::flat_hash_map<ucp_ep_h, std::unique_ptr<UcxLink>> links_;
  std::vector<ucp_ep_h> lost_;                     // keys in links_
  std::vector<std::unique_ptr<UcxLink>> closing_;  // UCX may have reused the addresses of their endpoints
};

}  // namespace ashlar::daemon
