// SPDX-License-Identifier: Apache-2.0
// RequestReader: reads one tenant's long requests, one behind the other, on a thread of their own.
//
// Checking, parsing and hashing a request takes up to half a second, by its length. gRPC has few threads (two on a
// machine of few cores) for the requests of all tenants. On those threads one tenant's long requests would make every
// tenant wait.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace ashlar::daemon {

class RequestReader {
 public:
  // Requests that are no longer are read where they came: that takes less than handing them over twice.
  static constexpr size_t kAtOnceBytes = 4096;

  RequestReader();
  // Runs all that was posted.
  ~RequestReader();
  RequestReader(const RequestReader&) = delete;
  RequestReader& operator=(const RequestReader&) = delete;

  // Runs `read` on the thread. Any thread may call. gRPC's memory for requests bounds the queue, because each request
  // keeps its share until it was read.
  void Post(std::function<void()> read);

 private:
  void Run();

  std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<std::function<void()>> waiting_;  // guarded by mutex_, as below
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace ashlar::daemon
