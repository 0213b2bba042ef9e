// SPDX-License-Identifier: Apache-2.0
// Memory of this process for RDMA: read by peers, or the target of reads.
#include <ucp/api/ucp.h>

#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
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

// The first release whose usual protocols read into memory of a type given by the caller; earlier ones assume host
// memory.
constexpr unsigned kMemoryTypesSince = 16;

}  // namespace

bool UcxWorker::ReadsOver(const std::string& lanes) const {
  if (reads_ != RemoteReads::kByCards) return reads_ == RemoteReads::kBySoftware;
  for (absl::string_view lane : absl::StrSplit(lanes, ' ')) {
    if (!absl::StartsWith(lane, "rc_")) return false;
  }
  return true;
}

bool UcxWorker::Reaches(MemoryType type) const {
  if (type == MemoryType::kHost) return true;
  unsigned major = 0, minor = 0, release = 0;
  ucp_get_version(&major, &minor, &release);
  ucp_context_attr_t attributes{.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};
  return (major > 1 || minor >= kMemoryTypesSince) && ucp_context_query(context_, &attributes) == UCS_OK &&
         (attributes.memory_types & UCS_BIT(UcsTypeOf(type))) != 0;
}

const UcxWorker::Area* UcxWorker::AreaOf(const std::byte* data) const {
  const auto next = areas_.upper_bound(data);
  if (next == areas_.begin()) return nullptr;
  const auto& [begin, area] = *std::prev(next);
  return data < begin + area.bytes ? &area : nullptr;
}

MemoryType UcxWorker::TypeOf(const std::byte* data) const {
  const Area* const area = AreaOf(data);
  return area == nullptr ? MemoryType::kHost : area->type;
}

// A GPU's memory is registered by address: UCX chooses the method (dmabuf, or the driver's peer memory).
absl::StatusOr<std::string> UcxWorker::Register(std::byte* data, uint64_t bytes, MemoryType type) {
  if (AreaOf(data) != nullptr) return absl::AlreadyExistsError("memory: already registered");
  if (!reads()) {
    if (type != MemoryType::kHost) areas_[data] = {bytes, type, nullptr};
    return "";
  }
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_PROT |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.address = data;
  params.length = bytes;
  params.prot = UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_LOCAL_WRITE | UCP_MEM_MAP_PROT_REMOTE_READ;
  params.memory_type = UcsTypeOf(type);
  areas_[data] = {bytes, type, nullptr};  // messages also need the type, even without RDMA
  ucp_mem_h handle = nullptr;
  if (absl::Status s = ToStatus(ucp_mem_map(context_, &params, &handle), "ucp_mem_map"); !s.ok()) return s;
  areas_[data].handle = handle;
  void* packed = nullptr;
  size_t size = 0;
  if (absl::Status s = ToStatus(ucp_rkey_pack(context_, handle, &packed, &size), "ucp_rkey_pack"); !s.ok()) return s;
  std::string key(static_cast<const char*>(packed), size);
  ucp_rkey_buffer_release(packed);
  return key;
}

void UcxWorker::UnregisterAll() {
  for (const auto& [data, area] : areas_) {
    if (area.handle != nullptr) ucp_mem_unmap(context_, area.handle);
  }
  areas_.clear();
}

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
  const Area* const area = AreaOf(target.data());
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.memory_type = UcsTypeOf(TypeOf(target.data()));
  if (area != nullptr && area->handle != nullptr && AreaOf(&target.back()) == area) {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;  // avoids a registration for this read
    param.memh = area->handle;
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
