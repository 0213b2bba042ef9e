// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/transport.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <deque>
#include <future>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "daemon/peer/transport/exchange.h"
#include "daemon/runtime/named_thread.h"
#include "daemon/runtime/unique_fd.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {
namespace {

// Lowers the thread's priority below that of local engines. Without the permission it keeps its priority.
void MakeWay() {
  constexpr int kNicer = 5, kMost = 19;
  const auto self = static_cast<id_t>(gettid());
  setpriority(PRIO_PROCESS, self, std::min(getpriority(PRIO_PROCESS, self) + kNicer, kMost));
}

// Closures for the transport's thread. Its length is bounded by its users: requests are counted, replies belong to
// served requests, and other callers wait for their closures.
class Inbox {
 public:
  // Empty `wake`: wakes the thread that waits for the event.
  explicit Inbox(std::function<void()> wake)
      : event_(wake ? -1 : eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), wake_(std::move(wake)) {}

  void Put(std::function<void()> closure) {
    {
      MutexLock lock(mutex_);
      if (closed_) return;
      closures_.push_back(std::move(closure));
      if (closures_.size() > 1) return;  // the first one has woken the thread
    }
    Wake();
  }
  void Wake() const {
    if (wake_) return wake_();
    const uint64_t one = 1;
    if (write(event_.get(), &one, sizeof one) < 0) return;  // full: it is already awake
  }
  std::deque<std::function<void()>> Take() {
    MutexLock lock(mutex_);
    return std::exchange(closures_, {});
  }
  void Close() {
    std::deque<std::function<void()>> dropped;  // destroyed without the lock
    MutexLock lock(mutex_);
    closed_ = true;
    dropped.swap(closures_);
  }
  bool valid() const { return event_.valid(); }
  int event() const { return event_.get(); }

 private:
  UniqueFd event_;
  const std::function<void()> wake_;
  Mutex mutex_;
  std::deque<std::function<void()>> closures_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

class Transport::Thread {
 public:
  Thread(TransportOptions options, TransportSurroundings surroundings, std::function<void()> wake)
      : options_(std::move(options)),
        driven_(!wake),
        inbox_(std::make_shared<Inbox>(std::move(wake))),
        exchange_(std::make_unique<Exchange>(
            options_, std::move(surroundings),
            [inbox = inbox_](std::function<void()> closure) { inbox->Put(std::move(closure)); })) {}

  ~Thread() {
    if (!opened_) return;
    if (!driven_) {
      End();
      return;
    }
    inbox_->Put([this] { stopping_ = true; });
    thread_.join();
  }

  absl::Status Start() {
    if (driven_ && !inbox_->valid()) return absl::ResourceExhaustedError("transport: cannot create an eventfd");
    if (options_.enter_gpu) options_.enter_gpu();
    if (absl::Status s = exchange_->Open(); !s.ok()) return s;
    opened_ = true;
    address_ = exchange_->ucx().address();
    settings_ = exchange_->ucx().settings();
    reads_ = exchange_->ucx().reads();
    reaches_cuda_ = exchange_->ucx().Reaches(MemoryType::kCuda);
    if (driven_) {
      thread_ = NamedThread("transport", [this] {
        MakeWay();
        Run();
      });
    }
    return absl::OkStatus();
  }

  void Put(std::function<void()> closure) { inbox_->Put(std::move(closure)); }
  // Runs on the thread and waits for the result.
  template <class Result>
  Result Ask(std::function<Result()> question) {
    if (!driven_) return question();
    std::promise<Result> answer;
    Put([&] { answer.set_value(question()); });
    return answer.get_future().get();
  }
  Exchange& exchange() { return *exchange_; }
  const TransportOptions& options() const { return options_; }
  const HostPort& address() const { return address_; }
  const std::vector<UcxSetting>& settings() const { return settings_; }
  bool reads() const { return reads_; }
  bool Reaches(MemoryType type) const { return type == MemoryType::kHost || reaches_cuda_; }

  uint64_t Begin(Request request, int64_t deadline) {
    const int64_t wait = deadline > 0 ? deadline : options_.deadline;
    request.number = exchange_->NextNumber();
    request.deadline = exchange_->Now() + std::min(wait, int64_t{1} << 60);
    const uint64_t number = request.number;
    if (requests_.fetch_add(1) >= options_.requests) {
      Put([this, done = std::move(request.done)] {
        requests_.fetch_sub(1);
        done(absl::ResourceExhaustedError("transport: too many requests are queued; try again"));
      });
      return number;
    }
    request.done = [this, done = std::move(request.done)](const absl::Status& status) {
      requests_.fetch_sub(1);
      done(status);
    };
    // std::function copies the closure, but not the request.
    auto shared = std::make_shared<Request>(std::move(request));
    Put([this, shared] { exchange_->Begin(std::move(*shared)); });
    return number;
  }

  bool Turn() {
    for (auto& closure : inbox_->Take()) closure();
    bool some = true;
    for (int i = 0; some && i < kRounds; ++i) some = exchange_->Progress();
    return some;
  }

 private:
  static constexpr int kRounds = 64;  // rounds of progress between checks of the inbox

  void Run() {
    if (options_.enter_gpu) options_.enter_gpu();
    while (!stopping_) {
      if (!Turn() && !stopping_) Sleep();
    }
    End();
  }

  void End() {
    for (auto& closure : inbox_->Take()) closure();  // requests that came meanwhile end like all others
    exchange_.reset();
    inbox_->Close();
  }

  void Sleep() {
    if (!exchange_->ucx().Arm()) return;
    pollfd events[] = {{exchange_->ucx().event(), POLLIN, 0}, {inbox_->event(), POLLIN, 0}};
    const int64_t due = exchange_->due();
    // Silent connections wake no thread and are checked once a second.
    constexpr int64_t kMillisecond = 1'000'000, kLongest = 1'000;
    int timeout = kLongest;
    if (due != INT64_MAX) {
      timeout = static_cast<int>(std::clamp<int64_t>((due - exchange_->Now()) / kMillisecond + 1, 0, kLongest));
    }
    if (poll(events, 2, timeout) > 0 && events[1].revents != 0) {
      uint64_t count;
      if (read(inbox_->event(), &count, sizeof count) < 0) return;  // another wake came first
    }
  }

  const TransportOptions options_;
  const bool driven_;  // runs on its own thread
  const std::shared_ptr<Inbox> inbox_;
  std::unique_ptr<Exchange> exchange_;
  HostPort address_;
  std::vector<UcxSetting> settings_;
  bool reads_ = false, reaches_cuda_ = false;
  std::atomic<size_t> requests_{0};
  bool opened_ = false;
  bool stopping_ = false;  // transport thread only
  std::thread thread_;
};

TransportSurroundings TransportSurroundings::OfThisProcess() {
  return {.now =
              [] {
                timespec now{};
                clock_gettime(CLOCK_MONOTONIC, &now);
                return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
              },
          .random = [] { return uint64_t{std::random_device{}()}; },
          .open = &Ucx::Open};
}

absl::StatusOr<std::unique_ptr<Transport>> Transport::Start(TransportOptions options,
                                                            TransportSurroundings surroundings,
                                                            std::function<void()> wake) {
  auto thread = std::make_unique<Thread>(std::move(options), std::move(surroundings), std::move(wake));
  if (absl::Status s = thread->Start(); !s.ok()) return s;
  return std::unique_ptr<Transport>(new Transport(std::move(thread)));
}

bool Transport::Turn() {
  return thread_->Turn();
}
int64_t Transport::due() const {
  return thread_->exchange().due();
}

Transport::Transport(std::unique_ptr<Thread> thread) : thread_(std::move(thread)) {}
Transport::~Transport() = default;

HostPort Transport::address() const {
  return thread_->address();
}
std::vector<UcxSetting> Transport::settings() const {
  return thread_->settings();
}
bool Transport::reads() const {
  return thread_->reads();
}
bool Transport::Reaches(MemoryType type) const {
  return thread_->Reaches(type);
}

TransportStats Transport::stats() const {
  return thread_->Ask<TransportStats>([this] { return thread_->exchange().Stats(); });
}

void Transport::Register(std::byte* data, uint64_t bytes, MemoryType type, CopyIn copy_in) {
  thread_->Put([this, data, bytes, type, copy_in = std::move(copy_in)] {
    thread_->exchange().Register(data, bytes, type, copy_in);
  });
}

RemoteMemory Transport::Describe(const Spans& spans) const {
  return thread_->exchange().Describe(spans);
}

Grant Transport::Allow(uint64_t bytes, std::shared_ptr<GrantedBytes> granted) {
  const Grant grant{thread_->exchange().NextNumber(), DrawSecret()};
  thread_->exchange().Allow(grant, bytes, std::move(granted));
  return grant;
}

void Transport::Revoke(uint64_t number, std::function<void()> quiesced) {
  thread_->Put([this, number, quiesced = std::move(quiesced)] { thread_->exchange().Revoke(number, quiesced); });
}

uint64_t Transport::Fetch(const HostPort& peer, const Grant& grant, uint64_t offset, Spans targets, int64_t deadline,
                          Done done, std::shared_ptr<const RemoteMemory> memory,
                          std::shared_ptr<std::atomic<uint64_t>> received_bytes) {
  return thread_->Begin({.peer = peer,
                         .grant = grant,
                         .offset = offset,
                         .targets = std::move(targets),
                         .memory = std::move(memory),
                         .received_bytes = std::move(received_bytes),
                         .done = std::move(done)},
                        deadline);
}

void Transport::Cancel(uint64_t request) {
  thread_->Put([this, request] { thread_->exchange().Cancel(request); });
}

void Transport::KeepPeers(std::vector<HostPort> peers) {
  thread_->Put([this, peers = std::move(peers)] { thread_->exchange().KeepPeers(peers); });
}

}  // namespace ashlar::daemon
