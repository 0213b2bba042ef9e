#include "daemon/events/zmq_publisher.h"

#include <zmq.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <initializer_list>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/events/kv_events.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kMostInABatch = 256;
constexpr storage::Nanos kReplayEvery = 50'000'000;  // how long a request for a replay waits at most

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

// False: the peer takes nothing more.
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
    zmq_setsockopt(socket.get(), ZMQ_SNDHWM, &options.most_waiting, sizeof options.most_waiting);
    const int64_t longest = 1024;  // of a request
    zmq_setsockopt(socket.get(), ZMQ_MAXMSGSIZE, &longest, sizeof longest);
    if (zmq_bind(socket.get(), address.c_str()) != 0) {
      return absl::UnavailableError(absl::StrCat(address, ": ", zmq_strerror(zmq_errno())));
    }
    return socket;
  }

  void Run() {
    while (!stopping) {
      Publish(subscription->Take(kMostInABatch, kReplayEvery));
      if (replay != nullptr) ServeReplays();
    }
  }
  void Publish(const std::vector<CacheEvent>& events) {
    std::string batch = EncodeKvEvents(events, texts, SecondsSince1970());
    if (batch.empty()) return;
    const uint64_t number = batches++;
    Send(publish.get(), {options.topic, Number(number), batch});
    kept.emplace_back(number, std::move(batch));
    if (kept.size() > options.kept) kept.pop_front();
  }
  void ServeReplays() {
    for (int i = 0; i < 16; ++i) {
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
      // Who asks, an empty frame, and from which number on.
      if (frames.size() != 3 || frames[2].size() != 8) continue;
      uint64_t from = 0;
      for (const char byte : frames[2]) from = from << 8 | static_cast<uint8_t>(byte);
      Replay(frames[0], from);
    }
  }
  void Replay(const std::string& to, uint64_t from) {
    for (const auto& [number, batch] : kept) {
      if (number >= from && !Send(replay.get(), {to, "", options.topic, Number(number), batch})) return;
    }
    Send(replay.get(), {to, "", "", Number(UINT64_MAX), ""});
  }

  const Options options;
  const BlockTexts& texts;
  const std::unique_ptr<void, EndContext> context;
  Socket publish, replay;
  std::string address, replay_address;
  std::shared_ptr<EventHub::Subscription> subscription;
  std::deque<std::pair<uint64_t, std::string>> kept;
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
  impl->thread = std::thread([impl = impl.get()] { impl->Run(); });
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
