// SPDX-License-Identifier: Apache-2.0
// NamedThread: starts a thread of the daemon with a name that `top -H`, perf and debuggers show.
#pragma once

#include <pthread.h>

#include <chrono>
#include <cstdlib>
#include <system_error>
#include <thread>
#include <utility>

#include "daemon/runtime/log.h"

namespace ashlar::daemon {

// `name` has at most 15 characters, the kernel's limit. For the startup of the daemon, after CheckThreads. If another
// process has used up the threads since, a daemon without this thread would hang, so the process ends with an error
// message and exit code 1.
template <typename Work>
std::thread NamedThread(const char* name, Work work) {
  try {
    return std::thread([name, work = std::move(work)]() mutable {
      pthread_setname_np(pthread_self(), name);
      work();
    });
  } catch (const std::system_error& error) {
    Log(LogLevel::kError, "cannot start a thread; raise pids.max of the control group, or RLIMIT_NPROC",
        {{"thread", name}, {"error", error.what()}});
    FlushLog(std::chrono::seconds(1));
    std::_Exit(EXIT_FAILURE);
  }
}

}  // namespace ashlar::daemon
