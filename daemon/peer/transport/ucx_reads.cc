// SPDX-License-Identifier: Apache-2.0
// Reads of peers' memory.
#include <ucp/api/ucp.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/peer/transport/ucx_worker.h"

namespace ashlar::daemon {
namespace {

struct UcxKey final : RemoteKey {
  explicit UcxKey(ucp_rkey_h its_key) : key(its_key) {}
  ~UcxKey() override { ucp_rkey_destroy(key); }
  const ucp_rkey_h key;
};

// UCX unpacks a key without a length: a map of domains, a memory type, and for each domain up to 255 bytes after their
// length. In a zeroed buffer of this size it never reads past the end, whatever a peer has sent.
constexpr size_t kLongestKey = sizeof(uint64_t) + 1 + 64 * 256;

}  // namespace

absl::StatusOr<std::unique_ptr<RemoteKey>> UcxWorker::Unpack(Link& link, const std::string& packed) {
  constexpr size_t kType = sizeof(uint64_t);  // offset of the memory type
  if (packed.size() <= kType || packed.size() > kLongestKey ||
      static_cast<uint8_t>(packed[kType]) >= UCS_MEMORY_TYPE_LAST) {
    return absl::InvalidArgumentError("remote_key: invalid");
  }
  std::string buffer(kLongestKey, '\0');
  std::memcpy(buffer.data(), packed.data(), packed.size());
  ucp_rkey_h key = nullptr;
  const ucs_status_t status = ucp_ep_rkey_unpack(static_cast<UcxLink&>(link).ep, buffer.data(), &key);
  if (status != UCS_OK) return ToStatus(status, "ucp_ep_rkey_unpack");
  return std::make_unique<UcxKey>(key);
}

void UcxWorker::Get(Link& link, RemoteKey& key, uint64_t address, std::span<std::byte> target,
                    std::function<void(absl::Status)> got) {
  auto read = std::make_unique<UcxSend>();
  read->worker = this;
  read->link = static_cast<UcxLink*>(&link);
  read->bytes = target.size();
  read->reads = true;
  read->sent = std::move(got);
  ++link.sends;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.memory_type = UcsTypeOf(memory_.TypeOf(target.data()));
  if (const ucp_mem_h handle = memory_.HandleOf(target); handle != nullptr) {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;  // avoids a registration for this read
    param.memh = handle;
  }
  param.user_data = read.get();
  param.cb.send = [](void* request, ucs_status_t status, void* of) {
    ucp_request_free(request);
    auto* const completed = static_cast<UcxSend*>(of);
    completed->worker->Sent(completed, status);
  };
  UcxSend* const posted = read.release();
  const ucs_status_ptr_t result =
      ucp_get_nbx(posted->link->ep, target.data(), target.size(), address, static_cast<UcxKey&>(key).key, &param);
  if (!UCS_PTR_IS_PTR(result)) Sent(posted, UCS_PTR_STATUS(result));
}

}  // namespace ashlar::daemon
