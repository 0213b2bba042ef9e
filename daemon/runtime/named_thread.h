// NamedThread: starts a thread under a name that `top -H`, perf and debuggers show.
#pragma once

#include <pthread.h>

#include <thread>
#include <utility>

namespace ashlar::daemon {

// `name`: at most 15 characters, which is all that the kernel keeps.
template <typename Work>
std::thread NamedThread(const char* name, Work work) {
  return std::thread([name, work = std::move(work)]() mutable {
    pthread_setname_np(pthread_self(), name);
    work();
  });
}

}  // namespace ashlar::daemon
