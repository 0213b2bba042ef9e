// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/ucx.h"

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "daemon/peer/transport/address_filter.h"
#include "daemon/peer/transport/socket_address.h"
#include "daemon/peer/transport/ucx_worker.h"

namespace ashlar::daemon {
namespace {

constexpr int kMessageId = 0;  // the only kind of active message; wire.h distinguishes messages

}  // namespace

UcxWorker::~UcxWorker() {
  std::vector<UcxLink*> links;
  for (auto& [ep, link] : links_) links.push_back(link.get());
  for (UcxLink* link : links) Close(*link);
  listener_.RefuseAll([this] {
    const bool some = ucp_worker_progress(worker_) != 0;
    DropClosed();
    return some;
  });
  while (!closing_.empty()) {
    ucp_worker_progress(worker_);
    DropClosed();
  }
  listener_.Close();
  memory_.UnregisterAll();
  if (worker_ != nullptr) ucp_worker_destroy(worker_);
}

absl::Status UcxWorker::Open(const TransportOptions& options) {
  if (absl::Status s = context_.Open(options); !s.ok()) return s;
  const std::set<int> before = ListeningSockets();
  if (absl::Status s = OpenWorker(); !s.ok()) return s;
  return listener_.Open(worker_, options, before);
}

absl::Status UcxWorker::OpenWorker() {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // created on one thread, used on another
  if (absl::Status s = ToStatus(ucp_worker_create(context_.handle(), &params, &worker_), "ucp_worker_create"); !s.ok())
    return s;
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
    listener_.Reject(request);
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
  if (!pieces.empty()) send->type = UcsTypeOf(memory_.TypeOf(pieces.front().data()));
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

bool UcxWorker::Progress() {
  bool some = ucp_worker_progress(worker_) != 0;
  if (const size_t ended = listener_.EndSilent(); ended > 0) events_.silent(ended);
  while (ucp_conn_request_h request = listener_.Next()) {
    Accept(request);
    some = true;
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
