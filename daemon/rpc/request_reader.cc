// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/request_reader.h"

#include <utility>

#include "daemon/runtime/named_thread.h"

namespace ashlar::daemon {

RequestReader::RequestReader() : thread_(NamedThread("request-reader", [this] { Run(); })) {}

RequestReader::~RequestReader() {
  {
    MutexLock lock(mutex_);
    ending_ = true;
  }
  posted_.NotifyOne();
  thread_.join();
}

void RequestReader::Post(std::function<void()> read) {
  {
    MutexLock lock(mutex_);
    waiting_.push_back(std::move(read));
  }
  posted_.NotifyOne();
}

void RequestReader::Run() {
  MutexLock lock(mutex_);
  for (;;) {
    while (!ending_ && waiting_.empty()) posted_.Wait(mutex_);
    if (waiting_.empty()) return;
    std::function<void()> read = std::move(waiting_.front());
    waiting_.pop_front();
    lock.Unlock();
    read();
    read = nullptr;  // destroys the request too
    lock.Lock();
  }
}

}  // namespace ashlar::daemon
