// SPDX-License-Identifier: Apache-2.0
// NamedThread: starts one of the daemon's threads, under a name that `top -H`, perf and debuggers show.
#pragma once

#include <pthread.h>

#include <chrono>
#include <cstdlib>
#include <system_error>
#include <thread>
#include <utility>

#include "daemon/runtime/log.h"

namespace ashlar::daemon {

// `name`: at most 15 characters, which is all that the kernel keeps. For the start of the daemon, which has found that
// there may be enough threads (CheckThreads). When another process has taken them since, a daemon without this thread
// would hang: the process ends with an error message and exit code 1.
template <typename Work>
std::thread NamedThread(const char* name, Work work) {
  try {
    return std::thread([name, work = std::move(work)]() mutable {
      pthread_setname_np(pthread_self(), name);
      work();
    });
  } catch (const std::system_error& error) {
    Log(LogLevel::kError, "cannot start: no more threads; raise the limit (pids.max, or RLIMIT_NPROC)",
        {{"thread", name}, {"error", error.what()}});
    FlushLog(std::chrono::seconds(1));
    std::_Exit(EXIT_FAILURE);
  }
}

}  // namespace ashlar::daemon
