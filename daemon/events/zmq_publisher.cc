#include "daemon/events/zmq_publisher.h"

#include <zmq.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <deque>
#include <initializer_list>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/events/kv_events.h"
#include "daemon/runtime/named_thread.h"
#include "daemon/runtime/port_wait.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kMostATurn = 256, kReplayPortion = 32;
constexpr storage::Nanos kReplayEvery = 50'000'000;  // how long a request for a replay waits at most
constexpr storage::Nanos kReplayBlocked = 2'000'000;

struct EndSocket {
  void operator()(void* socket) const { zmq_close(socket); }
};
struct EndContext {
  void operator()(void* context) const { zmq_ctx_term(context); }
};
using Socket = std::unique_ptr<void, EndSocket>;

std::string Number(uint64_t number) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(number >> (56 - 8 * i));
  return bytes;
}

// False: the peer takes nothing more (EAGAIN), or has gone.
bool Send(void* socket, std::initializer_list<std::string_view> frames) {
  size_t left = frames.size();
  for (const std::string_view frame : frames) {
    const int flags = ZMQ_DONTWAIT | (--left > 0 ? ZMQ_SNDMORE : 0);
    if (zmq_send(socket, frame.data(), frame.size(), flags) < 0) return false;
  }
  return true;
}

std::string BoundAt(void* socket) {
  std::array<char, 512> address{};
  size_t size = address.size();
  if (socket == nullptr || zmq_getsockopt(socket, ZMQ_LAST_ENDPOINT, address.data(), &size) != 0) return {};
  return address.data();
}

double SecondsSince1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

struct ZmqPublisher::Impl {
  Impl(Options given, const BlockTexts& texts) : options(std::move(given)), texts(texts), context(zmq_ctx_new()) {}
  ~Impl() {
    stopping = true;
    if (thread.joinable()) thread.join();
  }

  absl::StatusOr<Socket> Bind(int type, const std::string& address) const {
    Socket socket(zmq_socket(context.get(), type));
    const int now = 0;
    zmq_setsockopt(socket.get(), ZMQ_LINGER, &now, sizeof now);
    // ZeroMQ counts messages; one of ours has at most kMostBatchBytes.
    const size_t waiting = std::max<size_t>(1, options.most_bytes / kMostBatchBytes);
    const bool replays = type == ZMQ_ROUTER;
    const int most = static_cast<int>(replays ? std::min(waiting, kMostReplayWaiting) : waiting);
    zmq_setsockopt(socket.get(), ZMQ_SNDHWM, &most, sizeof most);
    if (replays) {
      const int tell = 1, requests = kMostReplays;
      zmq_setsockopt(socket.get(), ZMQ_ROUTER_MANDATORY, &tell, sizeof tell);  // who takes nothing, instead of dropping
      zmq_setsockopt(socket.get(), ZMQ_RCVHWM, &requests, sizeof requests);
    }
    const int64_t longest = 1024;  // of a request
    zmq_setsockopt(socket.get(), ZMQ_MAXMSGSIZE, &longest, sizeof longest);
    int error = 0;
    WaitForPort(address, kPortPatience, [&] {
      error = zmq_bind(socket.get(), address.c_str()) == 0 ? 0 : zmq_errno();
      return error == EADDRINUSE;
    });
    if (error != 0) {
      return absl::UnavailableError(absl::StrCat(address, ": ", zmq_strerror(error)));
    }
    return socket;
  }

  void Run() {
    bool blocked = false;
    while (!stopping) {
      const storage::Nanos patience = blocked ? kReplayBlocked : replays.empty() ? kReplayEvery : 0;
      Publish(subscription->Take(kMostATurn, patience));
      DropForgotten();
      if (replay == nullptr) continue;
      TakeRequests();
      blocked = !SendReplay();
    }
  }

  void Publish(std::span<const CacheEvent> events) {
    while (!events.empty()) {
      const size_t count = CountForABatch(events);
      PublishBatch(events.first(count));
      events = events.subspan(count);
    }
  }
  void PublishBatch(std::span<const CacheEvent> events) {
    std::string batch;
    do {  // again without the tokens that were forgotten meanwhile
      DropForgotten();
      batch = EncodeKvEvents(events, texts, SecondsSince1970());
    } while (forgettings != texts.forgettings());
    if (batch.empty()) return;
    const uint64_t number = batches++;
    Send(publish.get(), {options.topic, Number(number), batch});
    kept_bytes += batch.size();
    kept.emplace_back(number, std::move(batch));
    for (; kept.size() > options.kept || kept_bytes > options.most_bytes; kept.pop_front()) {
      kept_bytes -= kept.front().second.size();
    }
  }
  void DropForgotten() {
    if (const uint64_t now = texts.forgettings(); std::exchange(forgettings, now) == now) return;
    kept.clear();
    kept_bytes = 0;
  }

  // A subscriber's later request takes the place of its earlier one.
  void TakeRequests() {
    while (replays.size() < kMostReplays) {
      std::vector<std::string> frames;
      while (true) {
        std::array<char, 1024> frame{};
        const int size = zmq_recv(replay.get(), frame.data(), frame.size(), ZMQ_DONTWAIT);
        if (size < 0) return;
        if (frames.size() < 4) frames.emplace_back(frame.data(), std::min<size_t>(size, frame.size()));
        int more = 0;
        size_t length = sizeof more;
        zmq_getsockopt(replay.get(), ZMQ_RCVMORE, &more, &length);
        if (more == 0) break;
      }
      // The asker, an empty frame, and the number to begin with.
      if (frames.size() != 3 || frames[2].size() != 8) continue;
      Replay asked{.to = frames[0], .next = 0, .end = batches, .moved = Clock::now()};
      for (const char byte : frames[2]) asked.next = asked.next << 8 | static_cast<uint8_t>(byte);
      const auto earlier = std::ranges::find(replays, asked.to, &Replay::to);
      if (earlier == replays.end()) {
        replays.push_back(std::move(asked));
      } else {
        asked.moved = earlier->moved;
        *earlier = std::move(asked);
      }
    }
  }
  // Sends a portion of one of them. False: its reader takes nothing.
  bool SendReplay() {
    if (replays.empty()) return true;
    Replay one = std::move(replays.front());
    replays.pop_front();
    const Clock::time_point now = Clock::now();
    bool moved = false;
    for (size_t i = 0; i < kReplayPortion; ++i) {
      DropForgotten();
      if (!kept.empty()) one.next = std::max(one.next, kept.front().first);
      const bool over = kept.empty() || one.next >= one.end;
      const bool sent = over ? Send(replay.get(), {one.to, "", "", Number(UINT64_MAX), ""})
                             : Send(replay.get(), {one.to, "", options.topic, Number(one.next),
                                                   kept[one.next - kept.front().first].second});
      if (sent && over) return true;
      if (!sent) {
        const bool waits = zmq_errno() == EAGAIN && now - one.moved < std::chrono::nanoseconds(kReplayPatience);
        if (waits) replays.push_back(std::move(one));
        return moved || !waits;
      }
      moved = true;
      one.moved = now;
      ++one.next;
    }
    replays.push_back(std::move(one));
    return true;
  }

  using Clock = std::chrono::steady_clock;
  struct Replay {
    std::string to;
    uint64_t next = 0, end = 0;  // batches still to be sent
    Clock::time_point moved;     // when its reader last took one
  };

  const Options options;
  const BlockTexts& texts;
  const std::unique_ptr<void, EndContext> context;
  Socket publish, replay;
  std::string address, replay_address;
  std::shared_ptr<EventHub::Subscription> subscription;
  std::deque<std::pair<uint64_t, std::string>> kept;  // their numbers follow one another
  size_t kept_bytes = 0;
  uint64_t forgettings = 0;  // of the texts, that `kept` has seen
  std::deque<Replay> replays;
  std::atomic<uint64_t> batches{0};
  std::atomic<bool> stopping{false};
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<ZmqPublisher>> ZmqPublisher::Start(Options options, EventHub& hub,
                                                                  const BlockTexts& texts) {
  auto impl = std::make_unique<Impl>(std::move(options), texts);
  absl::StatusOr<Socket> publish = impl->Bind(ZMQ_PUB, impl->options.address);
  if (!publish.ok()) return publish.status();
  impl->publish = *std::move(publish);
  impl->address = BoundAt(impl->publish.get());
  if (!impl->options.replay_address.empty()) {
    absl::StatusOr<Socket> replay = impl->Bind(ZMQ_ROUTER, impl->options.replay_address);
    if (!replay.ok()) return replay.status();
    impl->replay = *std::move(replay);
    impl->replay_address = BoundAt(impl->replay.get());
  }
  impl->subscription = hub.Subscribe({}, EventHub::kMostWaiting);
  if (impl->subscription == nullptr) return absl::ResourceExhaustedError("too many follow the events");
  impl->thread = NamedThread("events", [impl = impl.get()] { impl->Run(); });
  return std::unique_ptr<ZmqPublisher>(new ZmqPublisher(std::move(impl)));
}

ZmqPublisher::ZmqPublisher(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ZmqPublisher::~ZmqPublisher() = default;

std::string ZmqPublisher::address() const {
  return impl_->address;
}

std::string ZmqPublisher::replay_address() const {
  return impl_->replay_address;
}

uint64_t ZmqPublisher::batches() const {
  return impl_->batches;
}

}  // namespace ashlar::daemon
