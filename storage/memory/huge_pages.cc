// SPDX-License-Identifier: Apache-2.0
#include "storage/memory/huge_pages.h"

#include <sys/mman.h>

#include <cstdlib>

namespace ashlar::storage {

void* HugePages::do_allocate(size_t bytes, size_t alignment) {
  if (bytes < kBytes) return ::operator new(bytes, std::align_val_t(alignment));
  const size_t whole = (bytes + kBytes - 1) / kBytes * kBytes;
  void* const at = std::aligned_alloc(kBytes, whole);
  if (at == nullptr) throw std::bad_alloc();
  ::madvise(at, whole, MADV_HUGEPAGE);  // on failure the pages stay small
  return at;
}

void HugePages::do_deallocate(void* at, size_t bytes, size_t alignment) {
  if (bytes < kBytes) return ::operator delete(at, std::align_val_t(alignment));
  std::free(at);
}

}  // namespace ashlar::storage
