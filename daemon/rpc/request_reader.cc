// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/request_reader.h"

#include <utility>

#include "daemon/runtime/named_thread.h"

namespace ashlar::daemon {

RequestReader::RequestReader() : thread_(NamedThread("request-reader", [this] { Run(); })) {}

RequestReader::~RequestReader() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  posted_.notify_one();
  thread_.join();
}

void RequestReader::Post(std::function<void()> read) {
  {
    std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(read));
  }
  posted_.notify_one();
}

void RequestReader::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    posted_.wait(lock, [this] { return ending_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    std::function<void()> read = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    read();
    read = nullptr;  // and the request with it
    lock.lock();
  }
}

}  // namespace ashlar::daemon
