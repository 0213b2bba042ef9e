// SPDX-License-Identifier: Apache-2.0
#include "tests/nodes/relay.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace ashlar::nodes {
namespace {

constexpr size_t kBatch = 64;         // frames of one system call
constexpr size_t kHeaderBytes = 18;   // Ethernet, with a VLAN's tag
constexpr size_t kHeldMost = 65'536;  // frames on their way; a network has bounded memory, too

}  // namespace

// The place into which one system call reads.
struct Relay::Inbox {
  explicit Inbox(size_t frame_bytes) : bytes(kBatch * frame_bytes) {
    for (size_t i = 0; i < kBatch; ++i) {
      places[i] = {.iov_base = bytes.data() + i * frame_bytes, .iov_len = frame_bytes};
      messages[i] = {};
      messages[i].msg_hdr.msg_iov = &places[i];
      messages[i].msg_hdr.msg_iovlen = 1;
    }
  }
  std::vector<std::byte> bytes;
  struct iovec places[kBatch];
  struct mmsghdr messages[kBatch];
};

// The frames that the next system call sends to one port; it points to the inbox or to held frames.
struct Relay::Outbox {
  size_t count = 0;
  struct iovec places[kBatch];
  struct mmsghdr messages[kBatch];
  Link* links[kBatch];
};

std::array<unsigned char, 6> MacOf(size_t node) {
  return {0x02, 0, 0, 0, 0, static_cast<unsigned char>(node + 1)};
}

Relay::Relay(std::vector<int> ports, size_t mtu, uint64_t seed)
    : ports_(std::move(ports)),
      frame_bytes_(mtu + kHeaderBytes),
      inbox_(std::make_unique<Inbox>(frame_bytes_)),
      wake_(::eventfd(0, EFD_CLOEXEC)),
      links_(ports_.size() * ports_.size()),
      random_(seed) {
  for (size_t i = 0; i < ports_.size(); ++i) outboxes_.push_back(std::make_unique<Outbox>());
  thread_ = std::thread([this] { Run(); });
}

Relay::~Relay() {
  ::eventfd_write(wake_, 1);
  thread_.join();
  ::close(wake_);
  for (const int port : ports_) ::close(port);
}

void Relay::Set(size_t from, size_t to, const LinkConditions& conditions) {
  MutexLock lock(mutex_);
  link(from, to).conditions = conditions;
}

LinkCounts Relay::counts(size_t from, size_t to) const {
  MutexLock lock(mutex_);
  return links_[from * ports_.size() + to].counts;
}

void Relay::Run() {
  std::vector<struct pollfd> polled;
  for (const int port : ports_) polled.push_back({.fd = port, .events = POLLIN, .revents = 0});
  polled.push_back({.fd = wake_, .events = POLLIN, .revents = 0});
  for (;;) {
    struct timespec wait {};
    if (!held_.empty()) {
      const auto left = std::max(held_.top()->due - Clock::now(), Clock::duration::zero());
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
      wait = {.tv_sec = seconds.count(), .tv_nsec = std::chrono::nanoseconds(left - seconds).count()};
    }
    ::ppoll(polled.data(), polled.size(), held_.empty() ? nullptr : &wait, nullptr);
    if (polled.back().revents != 0) return;
    MutexLock lock(mutex_);
    DeliverDue();
    for (size_t port = 0; port < ports_.size(); ++port) {
      if (polled[port].revents != 0) ReadPort(port);
    }
  }
}

// One batch only, so that neither held frames nor other ports wait for a flooded port.
void Relay::ReadPort(size_t from) {
  const int got = ::recvmmsg(ports_[from], inbox_->messages, kBatch, MSG_DONTWAIT, nullptr);
  const Clock::time_point now = Clock::now();
  for (int i = 0; i < got; ++i) {
    const struct mmsghdr& message = inbox_->messages[i];
    if ((message.msg_hdr.msg_flags & MSG_TRUNC) != 0) {
      ++oversized_;
      continue;
    }
    const std::byte* const frame = inbox_->bytes.data() + i * frame_bytes_;
    const size_t to = static_cast<size_t>(frame[5]) - 1;
    const bool everybody = (frame[0] & std::byte{1}) != std::byte{0};
    for (size_t port = 0; port < ports_.size(); ++port) {
      if (port != from && (everybody || port == to)) Accept(from, port, frame, message.msg_len, now);
    }
  }
  for (size_t port = 0; port < ports_.size(); ++port) Flush(port);
}

void Relay::Accept(size_t from, size_t to, const std::byte* frame, size_t bytes, Clock::time_point now) {
  Link& carrier = link(from, to);
  const LinkConditions& conditions = carrier.conditions;
  if (conditions.cut) {
    ++carrier.counts.cut;
    return;
  }
  if (Happens(conditions.loss)) {
    ++carrier.counts.lost;
    return;
  }
  Clock::time_point due = now;
  if (conditions.bytes_per_second > 0) {
    due = std::max(now, carrier.free_at);
    if (due - now > conditions.queue) {
      ++carrier.counts.overflowed;
      return;
    }
    due += std::chrono::nanoseconds(bytes * 1'000'000'000 / conditions.bytes_per_second);
    carrier.free_at = due;
  }
  due += conditions.delay;
  if (Happens(conditions.reorder)) {
    ++carrier.counts.reordered;
    due += conditions.hold_back;
  }
  const bool twice = Happens(conditions.duplicate);
  if (twice) ++carrier.counts.duplicated;
  for (int i = 0; i < 1 + twice; ++i) {
    if (due > now) {
      Hold(carrier, to, frame, bytes, due);
    } else {
      Queue(carrier, to, frame, bytes);
    }
  }
}

bool Relay::Happens(double probability) {
  return probability > 0 && std::uniform_real_distribution<double>()(random_) < probability;
}

void Relay::Hold(Link& carrier, size_t port, const std::byte* frame, size_t bytes, Clock::time_point due) {
  if (held_.size() >= kHeldMost) {
    ++carrier.counts.overflowed;
    return;
  }
  held_.push(std::make_unique<Frame>(Frame{due, next_number_++, &carrier, port, {frame, frame + bytes}}));
}

void Relay::DeliverDue() {
  const Clock::time_point now = Clock::now();
  std::vector<std::unique_ptr<Frame>> leaving;  // until they are sent
  while (!held_.empty() && held_.top()->due <= now) {
    // The queue's order needs no frame's content.
    leaving.push_back(std::move(const_cast<std::unique_ptr<Frame>&>(held_.top())));
    held_.pop();
    Frame& frame = *leaving.back();
    if (frame.link->conditions.cut) {
      ++frame.link->counts.cut;
    } else {
      Queue(*frame.link, frame.port, frame.bytes.data(), frame.bytes.size());
    }
  }
  for (size_t port = 0; port < ports_.size(); ++port) Flush(port);
}

void Relay::Queue(Link& carrier, size_t port, const std::byte* frame, size_t bytes) {
  Outbox& outbox = *outboxes_[port];
  const size_t i = outbox.count++;
  outbox.places[i] = {.iov_base = const_cast<std::byte*>(frame), .iov_len = bytes};
  outbox.messages[i] = {};
  outbox.messages[i].msg_hdr.msg_iov = &outbox.places[i];
  outbox.messages[i].msg_hdr.msg_iovlen = 1;
  outbox.links[i] = &carrier;
  if (outbox.count == kBatch) Flush(port);
}

void Relay::Flush(size_t port) {
  Outbox& outbox = *outboxes_[port];
  for (size_t i = 0; i < outbox.count;) {
    const int sent = ::sendmmsg(ports_[port], outbox.messages + i, outbox.count - i, MSG_DONTWAIT);
    for (int k = 0; k < sent; ++k, ++i) {
      ++outbox.links[i]->counts.delivered;
      outbox.links[i]->counts.bytes += outbox.messages[i].msg_len;
    }
    // The refused frame is dropped, as by a switch with a busy port; so is one for a node that has left.
    if (sent <= 0 && errno != EINTR) ++outbox.links[i++]->counts.overflowed;
  }
  outbox.count = 0;
}

}  // namespace ashlar::nodes
