// SPDX-License-Identifier: Apache-2.0
// RequestReader: reads the long requests of one tenant, one at a time, on its own thread.
//
// Checking, parsing and hashing a long request takes up to half a second. gRPC has few threads (two on a small machine)
// for the requests of all tenants, so one tenant's long requests on those threads would delay every tenant.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <thread>

#include "kernels/mutex.h"

namespace ashlar::daemon {

class RequestReader {
 public:
  // Requests up to this size are read on gRPC's thread, which is faster than switching threads twice.
  static constexpr size_t kAtOnceBytes = 4096;

  RequestReader();
  // Runs everything that was posted.
  ~RequestReader();
  RequestReader(const RequestReader&) = delete;
  RequestReader& operator=(const RequestReader&) = delete;

  // Runs `read` on the thread. Any thread may call. gRPC's memory limit for requests bounds the queue, because each
  // request keeps its share until it is read.
  void Post(std::function<void()> read);

 private:
  void Run();

  Mutex mutex_;
  CondVar posted_;
  std::deque<std::function<void()>> waiting_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ashlar::daemon
