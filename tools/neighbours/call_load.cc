// SPDX-License-Identifier: Apache-2.0
#include "tools/neighbours/call_load.h"

#include <grpcpp/channel.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

namespace ashlar::neighbours {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::milliseconds kAfterRefusal{100};
constexpr std::chrono::milliseconds kTurn{5};

grpc::ByteBuffer ToBuffer(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

std::string ToString(const grpc::ByteBuffer& buffer) {
  grpc::Slice slice;
  if (!buffer.TrySingleSlice(&slice).ok() && !buffer.DumpToSingleSlice(&slice).ok()) return "";
  return {reinterpret_cast<const char*>(slice.begin()), slice.size()};
}

// One call: a request, any number of messages, a status. Its address is the tag of all its events.
class Call {
 public:
  Call(size_t slot, grpc::GenericStub& stub, const std::string& method, const std::string& request,
       grpc::CompletionQueue& queue)
      : slot_(slot), request_(ToBuffer(request)), stream_(stub.PrepareCall(&context_, method, &queue)) {
    stream_->StartCall(this);
  }

  size_t slot() const { return slot_; }
  const grpc::Status& status() const { return status_; }
  const grpc::ByteBuffer& last() const { return last_; }
  void Cancel() { context_.TryCancel(); }

  // True once it has ended.
  bool OnEvent(bool ok) {
    switch (std::exchange(step_, Step::kEnded)) {
      case Step::kStarting:
        if (!ok) break;
        step_ = Step::kWriting;
        stream_->WriteLast(request_, {}, this);
        return false;
      case Step::kReading:
        if (ok) last_ = std::exchange(message_, {});
        if (!ok) break;
        [[fallthrough]];
      case Step::kWriting:
        request_.Clear();
        if (!ok) break;
        step_ = Step::kReading;
        stream_->Read(&message_, this);
        return false;
      case Step::kEnded:
        return true;
    }
    stream_->Finish(&status_, this);
    return false;
  }

 private:
  enum class Step { kStarting, kWriting, kReading, kEnded };

  const size_t slot_;
  grpc::ByteBuffer request_, message_, last_;
  grpc::ClientContext context_;
  const std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  Step step_ = Step::kStarting;
  grpc::Status status_;
};

class LoadRunner {
 public:
  explicit LoadRunner(const CallLoad& load) : load_(load), method_("/ashlar.v1.Cache/" + load.method) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // separate connections
    arguments.SetMaxReceiveMessageSize(-1);
    for (size_t i = 0; i < load.connections; ++i) {
      stubs_.push_back(std::make_unique<grpc::GenericStub>(
          grpc::CreateCustomChannel("unix:" + load.rpc_socket, grpc::InsecureChannelCredentials(), arguments)));
    }
    calls_.resize(load.at_a_time);
  }

  LoadResult Run(const std::stop_token& stop) {
    for (size_t slot = 0; slot < calls_.size(); ++slot) waiting_.emplace_back(steady_clock::now(), slot);
    while (!stop.stop_requested()) {
      const auto now = steady_clock::now();
      while (!waiting_.empty() && waiting_.front().first <= now) {
        Begin(waiting_.front().second);
        waiting_.pop_front();
      }
      if (const Call* ended = Next(std::chrono::system_clock::now() + kTurn)) Judge(*ended);
    }
    for (const auto& call : calls_) {
      if (call != nullptr) call->Cancel();
    }
    while (under_way_ > 0) Next(std::chrono::system_clock::time_point::max());
    queue_.Shutdown();
    return result_;
  }

 private:
  void Begin(size_t slot) {
    calls_[slot] = std::make_unique<Call>(slot, *stubs_[slot % stubs_.size()], method_, load_.request(slot), queue_);
    ++result_.calls;
    result_.most_at_a_time = std::max(result_.most_at_a_time, ++under_way_);
  }

  // A call that has ended by then.
  const Call* Next(std::chrono::system_clock::time_point deadline) {
    for (;;) {
      void* tag = nullptr;
      bool ok = false;
      if (queue_.AsyncNext(&tag, &ok, deadline) != grpc::CompletionQueue::GOT_EVENT) return nullptr;
      Call* const call = static_cast<Call*>(tag);
      if (!call->OnEvent(ok)) continue;
      --under_way_;
      return call;
    }
  }

  void Judge(const Call& call) {
    const uint64_t granted = call.status().ok() ? load_.granted(call.slot(), ToString(call.last())) : 0;
    result_.granted += granted;
    if (granted > 0) return Begin(call.slot());
    if (result_.refused++ == 0 && !call.status().ok()) result_.error = call.status().error_message();
    waiting_.emplace_back(steady_clock::now() + kAfterRefusal, call.slot());
  }

  const CallLoad& load_;
  const std::string method_;
  std::vector<std::unique_ptr<grpc::GenericStub>> stubs_;
  grpc::CompletionQueue queue_;
  std::vector<std::unique_ptr<Call>> calls_;  // one per slot, kept until the slot's next call
  std::deque<std::pair<steady_clock::time_point, size_t>> waiting_;
  size_t under_way_ = 0;
  LoadResult result_;
};

}  // namespace

LoadResult RunLoad(const CallLoad& load, const std::stop_token& stop) {
  return LoadRunner(load).Run(stop);
}

}  // namespace ashlar::neighbours
