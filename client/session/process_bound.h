// SPDX-License-Identifier: Apache-2.0
// MakeProcessBound, CreatorProcess: objects that belong to one process. A forked child has a copy of its parent's
// client, but not the parent's threads, and locks may be held forever: nothing in that copy may be called or destroyed,
// least of all gRPC.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <memory>
#include <utility>

namespace ashlar::internal {

// A shared object that is destroyed only in the process that created it. A child's copy is never destroyed.
template <typename T, typename... Args>
std::shared_ptr<T> MakeProcessBound(Args&&... args) {
  return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [owner = ::getpid()](T* object) {
    if (::getpid() == owner) delete object;
  });
}

// Remembers the process in which it was made.
class CreatorProcess {
 public:
  bool InChild() const { return ::getpid() != owner_; }

 private:
  pid_t owner_ = ::getpid();
};

}  // namespace ashlar::internal
