// SPDX-License-Identifier: Apache-2.0
// UcxMemory: memory of this process that is registered with UCX: read by peers, or the target of reads.
#pragma once

#include <ucp/api/ucp.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/peer/transport/transport.h"
#include "daemon/peer/transport/ucx_context.h"

namespace ashlar::daemon {

class UcxMemory {
 public:
  // The context must outlive the object.
  explicit UcxMemory(const UcxContext& context) : context_(context) {}
  ~UcxMemory() { UnregisterAll(); }
  UcxMemory(const UcxMemory&) = delete;
  UcxMemory& operator=(const UcxMemory&) = delete;

  // As in Ucx. Call it after the context was opened.
  absl::StatusOr<std::string> Register(std::byte* data, uint64_t bytes, MemoryType type);
  MemoryType TypeOf(const std::byte* data) const;
  // Returns the handle of the registered area that contains all of `memory`, which is not empty; null if there is none.
  ucp_mem_h HandleOf(std::span<const std::byte> memory) const;
  void UnregisterAll();

 private:
  struct Area {
    uint64_t bytes = 0;
    MemoryType type = MemoryType::kHost;
    ucp_mem_h handle = nullptr;  // null if only the type is known
  };
  const Area* AreaOf(const std::byte* data) const;

  const UcxContext& context_;
  std::map<const std::byte*, Area> areas_;  // key: start address
};

}  // namespace ashlar::daemon
