// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/ucx_memory.h"

#include <iterator>

#include "daemon/peer/transport/ucx_api.h"

namespace ashlar::daemon {

const UcxMemory::Area* UcxMemory::AreaOf(const std::byte* data) const {
  const auto next = areas_.upper_bound(data);
  if (next == areas_.begin()) return nullptr;
  const auto& [begin, area] = *std::prev(next);
  return data < begin + area.bytes ? &area : nullptr;
}

MemoryType UcxMemory::TypeOf(const std::byte* data) const {
  const Area* const area = AreaOf(data);
  return area == nullptr ? MemoryType::kHost : area->type;
}

ucp_mem_h UcxMemory::HandleOf(std::span<const std::byte> memory) const {
  const Area* const area = AreaOf(memory.data());
  return area != nullptr && AreaOf(&memory.back()) == area ? area->handle : nullptr;
}

// A GPU's memory is registered by address: UCX chooses the method (dmabuf, or the driver's peer memory).
absl::StatusOr<std::string> UcxMemory::Register(std::byte* data, uint64_t bytes, MemoryType type) {
  if (AreaOf(data) != nullptr) return absl::AlreadyExistsError("memory: already registered");
  if (!context_.reads()) {
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
  if (absl::Status s = ToStatus(ucp_mem_map(context_.handle(), &params, &handle), "ucp_mem_map"); !s.ok()) return s;
  areas_[data].handle = handle;
  void* packed = nullptr;
  size_t size = 0;
  if (absl::Status s = ToStatus(ucp_rkey_pack(context_.handle(), handle, &packed, &size), "ucp_rkey_pack"); !s.ok())
    return s;
  std::string key(static_cast<const char*>(packed), size);
  ucp_rkey_buffer_release(packed);
  return key;
}

void UcxMemory::UnregisterAll() {
  for (const auto& [data, area] : areas_) {
    if (area.handle != nullptr) ucp_mem_unmap(context_.handle(), area.handle);
  }
  areas_.clear();
}

}  // namespace ashlar::daemon
