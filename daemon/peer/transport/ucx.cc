// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/ucx.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "daemon/peer/transport/address_filter.h"
#include "daemon/peer/transport/socket_address.h"
#include "daemon/peer/transport/ucx_settings.h"
#include "daemon/peer/transport/ucx_worker.h"
#include "daemon/runtime/port_wait.h"

namespace ashlar::daemon {
namespace {

constexpr int kMessageId = 0;  // the only kind of active message; wire.h distinguishes messages

// Returns the text that `print` writes to its file.
template <class Print>
std::string Printed(Print print) {
  char* text = nullptr;
  size_t size = 0;
  FILE* file = open_memstream(&text, &size);
  if (file == nullptr) return "";
  print(file);
  std::fclose(file);
  std::string result(text, size);
  std::free(text);
  return result;
}

}  // namespace

absl::Status ToStatus(ucs_status_t status, absl::string_view what) {
  if (status == UCS_OK) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(what, ": ", ucs_status_string(status)));
}

// UCX's own thread accepts connections; UCX 1.13 does so even after their listener was destroyed. So the kernel first
// drops packets for the listening sockets, and connections made in between are accepted and refused.
void UcxWorker::RefuseConnections() {
  if (listener_ == nullptr) return;
  constexpr auto kInBetween = std::chrono::milliseconds(50);
  AdmitOnly(listening_, {"0.0.0.0"}).IgnoreError();
  const auto end = std::chrono::steady_clock::now() + kInBetween;
  while (std::chrono::steady_clock::now() < end) {
    if (ucp_worker_progress(worker_) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (ucp_conn_request_h request : accepts_) ucp_listener_reject(listener_, request);
    accepts_.clear();
    DropClosed();
  }
}

UcxWorker::~UcxWorker() {
  std::vector<UcxLink*> links;
  for (auto& [ep, link] : links_) links.push_back(link.get());
  for (UcxLink* link : links) Close(*link);
  RefuseConnections();
  while (!closing_.empty()) {
    ucp_worker_progress(worker_);
    DropClosed();
  }
  if (listener_ != nullptr) ucp_listener_destroy(listener_);
  UnregisterAll();
  if (worker_ != nullptr) ucp_worker_destroy(worker_);
  CloseContext();
}

void UcxWorker::CloseContext() {
  if (context_ != nullptr) ucp_cleanup(std::exchange(context_, nullptr));
}

absl::Status UcxWorker::Open(const TransportOptions& options) {
  if (absl::Status s = OpenContext(options); !s.ok()) return s;
  const std::set<int> before = ListeningSockets();
  if (absl::Status s = OpenWorker(); !s.ok()) return s;
  if (absl::Status s = Listen(options.listen); !s.ok()) return s;
  listening_ = ListeningSockets();
  for (const int fd : before) listening_.erase(fd);
  silent_ = std::make_unique<SilentSockets>(listening_);
  return options.allow.empty() ? absl::OkStatus() : AdmitOnly(listening_, options.allow);
}

// With UCP_FEATURE_RMA, UCX serves reads and writes of any address in software where RDMA is missing, without a key. So
// a context with this feature has no TCP, and one with TCP lacks the feature. Of the RDMA transports it has rc: closing
// an rc connection ends the peer's access, whereas a dc target serves all peers.
absl::Status UcxWorker::OpenContext(const TransportOptions& options) {
  if (options.reads == RemoteReads::kBySoftware) {
    reads_ = options.reads;
    return OpenContext(options, "tcp,self", UCP_FEATURE_RMA);
  }
  if (!options.expect_rdma) return OpenContext(options, "tcp,self", 0);
  if (options.reads == RemoteReads::kNever) return OpenContext(options, "rc,dc,tcp,self", 0);
  if (OpenContext(options, "rc,self", UCP_FEATURE_RMA).ok() && has_rdma()) {
    reads_ = options.reads;
    return absl::OkStatus();
  }
  CloseContext();
  return OpenContext(options, "tcp,self", 0);
}

absl::Status UcxWorker::OpenContext(const TransportOptions& options, const std::string& transports,
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
  if (absl::Status s = ToStatus(ucp_init(&params, config, &context_), "ucp_init"); !s.ok()) return s;
  // UCX silently omits an interface that is not up, and no peer could be reached.
  const bool networked = Info().find("tcp/") != std::string::npos || has_rdma();
  return networked ? absl::OkStatus() : absl::UnavailableError("UCX found no active network interface");
}

absl::Status UcxWorker::OpenWorker() {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // created on one thread, used on another
  if (absl::Status s = ToStatus(ucp_worker_create(context_, &params, &worker_), "ucp_worker_create"); !s.ok()) return s;
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  handler.arg = this;
  // UCX 1.13 reads the handler of an unset ID from uninitialised memory. The largest ID is set first, so that the table
  // grows once.
  for (int id = UINT16_MAX; id >= 0; --id) {
    handler.id = id;
    handler.cb = id == kMessageId ? OnMessage : OnForeignMessage;
    absl::Status s = ToStatus(ucp_worker_set_am_recv_handler(worker_, &handler), "ucp_worker_set_am_recv_handler");
    if (!s.ok()) return s;
  }
  return ToStatus(ucp_worker_get_efd(worker_, &event_), "ucp_worker_get_efd");
}

absl::Status UcxWorker::Listen(const HostPort& at) {
  auto address = ToSocketAddress(at);
  if (!address.ok()) return address.status();
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr = {reinterpret_cast<const sockaddr*>(&address->bytes), address->size};
  params.conn_handler.cb = [](ucp_conn_request_h request, void* self) {
    static_cast<UcxWorker*>(self)->accepts_.push_back(request);
  };
  params.conn_handler.arg = this;
  const std::string what = absl::StrCat("cannot listen on port ", at.port, " of ", at.host);
  ucs_status_t listened = UCS_OK;
  WaitForPort(absl::StrCat(at.host, ":", at.port), kPortPatience, [&] {
    listened = ucp_listener_create(worker_, &params, &listener_);
    return listened == UCS_ERR_BUSY;  // EADDRINUSE
  });
  if (absl::Status s = ToStatus(listened, what); !s.ok()) return s;
  ucp_listener_attr_t attributes{.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR};
  if (absl::Status s = ToStatus(ucp_listener_query(listener_, &attributes), what); !s.ok()) return s;
  address_ = {at.host, PortOf(attributes.sockaddr)};
  return absl::OkStatus();
}

std::string UcxWorker::Info() const {
  return Printed([this](FILE* file) { ucp_context_print_info(context_, file); });
}

bool UcxWorker::has_rdma() const {
  const std::string text = Info();
  return text.find("rc_") != std::string::npos || text.find("dc_") != std::string::npos;
}

absl::StatusOr<UcxLink*> UcxWorker::AddLink(ucp_ep_params_t params, std::string peer, bool accepted) {
  auto link = std::make_unique<UcxLink>();
  link->id = next_link_++;
  link->peer = std::move(peer);
  link->accepted = accepted;
  params.field_mask |=
      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_USER_DATA;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = OnError;
  params.err_handler.arg = this;
  params.user_data = this;
  const ucs_status_t status = ucp_ep_create(worker_, &params, &link->ep);
  if (status != UCS_OK) return ToStatus(status, absl::StrCat("connection to ", link->peer));
  UcxLink* const added = link.get();
  links_[added->ep] = std::move(link);
  return added;
}

absl::StatusOr<Link*> UcxWorker::Connect(const HostPort& peer) {
  auto address = ToSocketAddress(peer);
  if (!address.ok()) return address.status();
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr = {reinterpret_cast<const sockaddr*>(&address->bytes), address->size};
  auto link = AddLink(params, ToText(address->bytes), false);
  if (!link.ok()) return link.status();
  return *link;
}

void UcxWorker::Accept(ucp_conn_request_h request) {
  ucp_conn_request_attr_t attributes{.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR};
  const bool known = ucp_conn_request_query(request, &attributes) == UCS_OK;
  const std::string peer = known ? ToText(attributes.client_address) : "?";
  if (!events_.admit(peer)) {
    ucp_listener_reject(listener_, request);
    return;
  }
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
  params.conn_request = request;
  auto link = AddLink(params, peer, true);
  if (link.ok()) events_.accepted(**link);
}

ucs_status_t UcxWorker::OnMessage(void* self, const void* header, size_t header_bytes, void* data, size_t bytes,
                                  const ucp_am_recv_param_t* param) {
  auto* const worker = static_cast<UcxWorker*>(self);
  UcxLink* link = nullptr;
  if (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) {
    const auto found = worker->links_.find(param->reply_ep);
    if (found != worker->links_.end()) link = found->second.get();
  }
  if (link != nullptr && link->lost) return UCS_OK;
  // The data of a rendezvous is still at the sender and stays there.
  if (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) link = nullptr;
  if (link != nullptr) link->bytes_received += bytes;
  worker->events_.received(link, {static_cast<const std::byte*>(header), header == nullptr ? 0 : header_bytes},
                           {static_cast<const std::byte*>(data), link == nullptr ? 0 : bytes});
  return UCS_OK;
}

ucs_status_t UcxWorker::OnForeignMessage(void* self, const void*, size_t, void*, size_t,
                                         const ucp_am_recv_param_t* param) {
  return OnMessage(self, nullptr, 0, nullptr, 0, param);  // without a header, so it is malformed
}

void UcxWorker::OnError(void* self, ucp_ep_h ep, ucs_status_t status) {
  auto* const worker = static_cast<UcxWorker*>(self);
  const auto found = worker->links_.find(ep);
  if (found == worker->links_.end() || found->second->lost) return;
  found->second->lost = true;
  found->second->why = status;
  worker->lost_.push_back(ep);
}

void UcxWorker::Send(Link& link, const Message& message, ConstSpans pieces, std::function<void(absl::Status)> sent) {
  auto send = std::make_unique<UcxSend>();
  send->link = static_cast<UcxLink*>(&link);
  send->header = EncodeMessage(message);
  send->sent = std::move(sent);
  for (const auto& piece : pieces) {
    send->pieces.push_back({const_cast<std::byte*>(piece.data()), piece.size()});
    send->bytes += piece.size();
  }
  if (!pieces.empty()) send->type = UcsTypeOf(TypeOf(pieces.front().data()));
  Post(std::move(send));
}

void UcxWorker::SendText(Link& link, const Message& message, std::string text) {
  auto send = std::make_unique<UcxSend>();
  send->link = static_cast<UcxLink*>(&link);
  send->header = EncodeMessage(message);
  send->text = std::move(text);
  if (!send->text.empty()) send->pieces.push_back({send->text.data(), send->text.size()});
  send->bytes = send->text.size();
  send->sent = [](absl::Status) {};
  Post(std::move(send));
}

void UcxWorker::Post(std::unique_ptr<UcxSend> send) {
  UcxLink& link = *send->link;
  ++link.sends;
  send->worker = this;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS |
                       UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FIELD_DATATYPE;
  param.flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER;
  param.memory_type = send->type;
  param.user_data = send.get();
  param.cb.send = [](void* request, ucs_status_t status, void* of) {
    ucp_request_free(request);
    auto* const completed = static_cast<UcxSend*>(of);
    completed->worker->Sent(completed, status);
  };
  const void* buffer = nullptr;
  size_t count = 0;
  param.datatype = ucp_dt_make_contig(1);
  if (send->pieces.size() == 1) {
    buffer = send->pieces[0].buffer;
    count = send->pieces[0].length;
  } else if (send->pieces.size() > 1) {
    param.datatype = ucp_dt_make_iov();
    buffer = send->pieces.data();
    count = send->pieces.size();
  }
  UcxSend* const posted = send.release();
  const ucs_status_ptr_t result =
      ucp_am_send_nbx(link.ep, kMessageId, posted->header.data(), posted->header.size(), buffer, count, &param);
  if (!UCS_PTR_IS_PTR(result)) Sent(posted, UCS_PTR_STATUS(result));
}

void UcxWorker::Sent(UcxSend* completed, ucs_status_t status) {
  const std::unique_ptr<UcxSend> send(completed);
  UcxLink& link = *send->link;
  --link.sends;
  ++link.completed;
  if (status == UCS_OK) (send->reads ? link.bytes_received : link.bytes_sent) += send->bytes;
  send->sent(ToStatus(status, absl::StrCat("connection to ", link.peer)));
}

void UcxWorker::Close(Link& closing) {
  auto& link = static_cast<UcxLink&>(closing);
  if (link.closing) return;
  link.closing = true;
  const auto found = links_.find(link.ep);
  closing_.push_back(std::move(found->second));
  links_.erase(found);
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  param.user_data = &link;
  param.cb.send = [](void* request, ucs_status_t, void* of) {
    ucp_request_free(request);
    static_cast<UcxLink*>(of)->ep_closed = true;
  };
  const ucs_status_ptr_t result = ucp_ep_close_nbx(link.ep, &param);
  if (!UCS_PTR_IS_PTR(result)) link.ep_closed = true;
}

void UcxWorker::DropClosed() {
  for (size_t i = 0; i < closing_.size();) {
    if (!closing_[i]->ep_closed || closing_[i]->sends > 0) {
      ++i;
      continue;
    }
    const std::unique_ptr<UcxLink> gone = std::move(closing_[i]);
    closing_.erase(closing_.begin() + i);
    events_.closed(*gone);
  }
}

std::string UcxWorker::Lanes(Link& link) const {
  const std::string text = Printed([&](FILE* file) { ucp_ep_print_info(static_cast<UcxLink&>(link).ep, file); });
  std::set<std::string> lanes;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    // "#                 lane[0]:  0:tcp/eth0.0 md[0]  -> …"
    const size_t at = line.find(" md[");
    if (line.find("lane[") == absl::string_view::npos || at == absl::string_view::npos) continue;
    const absl::string_view device = line.substr(0, at);
    lanes.emplace(device.substr(device.rfind(':', device.find('/')) + 1));
  }
  std::string joined;
  for (const std::string& lane : lanes) absl::StrAppend(&joined, joined.empty() ? "" : " ", lane);
  return joined;
}

// About once a second, if Progress is called that often.
void UcxWorker::EndSilent() {
  const auto now = std::chrono::steady_clock::now();
  if (now - silent_ended_ < std::chrono::seconds(1)) return;
  silent_ended_ = now;
  if (const size_t ended = silent_->End(); ended > 0) events_.silent(ended);
}

bool UcxWorker::Progress() {
  bool some = ucp_worker_progress(worker_) != 0;
  EndSilent();
  for (; !accepts_.empty(); some = true) {
    ucp_conn_request_h request = accepts_.front();
    accepts_.pop_front();
    Accept(request);
  }
  std::vector<ucp_ep_h> lost;
  lost.swap(lost_);
  for (ucp_ep_h ep : lost) {
    const auto found = links_.find(ep);
    if (found == links_.end() || found->second->closing) continue;
    events_.lost(*found->second, ToStatus(found->second->why, absl::StrCat("connection to ", found->second->peer)));
    Close(*found->second);
    some = true;
  }
  DropClosed();
  return some;
}

absl::StatusOr<std::unique_ptr<Ucx>> Ucx::Open(const TransportOptions& options, LinkEvents events) {
  auto worker = std::make_unique<UcxWorker>(std::move(events));
  if (absl::Status s = worker->Open(options); !s.ok()) return s;
  return worker;
}

}  // namespace ashlar::daemon
