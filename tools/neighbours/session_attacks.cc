// SPDX-License-Identifier: Apache-2.0
// Attacks on the session socket: the daemon's mappings and descriptors in flight.
#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <vector>

#include "ashlar/v1/session.pb.h"
#include "tools/neighbours/attack.h"
#include "tools/neighbours/raw_engine.h"

namespace ashlar::neighbours {
namespace {

constexpr auto kAfterClosed = std::chrono::milliseconds(10);
constexpr uint64_t kPage = 4096;
constexpr uint64_t kPublishedBytes = 16 * kPageBytes;  // so that there is an arena

absl::Status OpenSessions(const ClientOptions& daemon, size_t count, std::vector<std::optional<RawSession>>& sessions) {
  for (size_t i = 0; i < count; ++i) {
    absl::StatusOr<RawSession> session = RawSession::Open(daemon);
    if (!session.ok()) return session.status();
    sessions.push_back(*std::move(session));
  }
  return absl::OkStatus();
}

// Regions of one page each, all from one memfd: they cost their engine nothing, and the daemon one mapping each.
class Mappings final : public Attack {
 public:
  Mappings(const Target& target, bool quick) : daemon_(target.daemon), sessions_wanted_(quick ? 16 : 64) {}

  absl::Status Prepare() override {
    absl::StatusOr<internal::Descriptor> memory = SealedMemory(kPage);
    if (!memory.ok()) return memory.status();
    memory_ = *std::move(memory);
    return OpenSessions(daemon_, sessions_wanted_, sessions_);
  }

  Achieved Run(const std::stop_token& stop) override {
    std::vector<Achieved> parts(kThreads);
    {
      std::vector<std::jthread> threads;
      for (size_t i = 0; i < kThreads; ++i) threads.emplace_back([&, i] { parts[i] = RunPart(i, stop); });
    }
    Achieved achieved{.sessions = sessions_.size(), .most_at_a_time = kThreads};
    for (const Achieved& part : parts) {
      achieved.asked += part.asked;
      achieved.granted += part.granted;
      achieved.refused += part.refused;
      if (achieved.why.empty()) achieved.why = part.why;
    }
    return achieved;
  }

 private:
  static constexpr size_t kThreads = 4, kRegions = 1024;  // kRegions: regions of one session

  // One region per session in turn, so that all sessions are full at the same time; then repeatedly, for freed ones.
  Achieved RunPart(size_t part, const std::stop_token& stop) {
    Achieved achieved;
    v1::SessionRequest request;
    request.mutable_register_region()->set_bytes(kPage);
    for (size_t region = 0; !stop.stop_requested(); ++region) {
      for (size_t i = part; i < sessions_.size() && !stop.stop_requested(); i += kThreads) {
        ++achieved.asked;
        const absl::Status status =
            sessions_[i] ? sessions_[i]->Ask(request, memory_.get()).status() : absl::UnavailableError("");
        if (status.ok()) {
          ++achieved.granted;
          continue;
        }
        if (achieved.refused++ == 0) achieved.why = std::string(status.message());
        if (absl::IsUnavailable(status)) Reopen(sessions_[i]);
        if (region >= kRegions || absl::IsUnavailable(status)) std::this_thread::sleep_for(kAfterClosed);
      }
    }
    return achieved;
  }

  void Reopen(std::optional<RawSession>& session) {
    session.reset();
    if (absl::StatusOr<RawSession> again = RawSession::Open(daemon_); again.ok()) session = *std::move(again);
  }

  const ClientOptions daemon_;
  const size_t sessions_wanted_;
  internal::Descriptor memory_;
  std::vector<std::optional<RawSession>> sessions_;
};

// Requests whose replies carry a descriptor and are never read. The kernel counts descriptors in flight for the sending
// user.
class UnreadReplies final : public Attack {
 public:
  UnreadReplies(const Target& target, bool) : daemon_(target.daemon) {}

  absl::Status Prepare() override {
    {
      absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(daemon_);
      if (!client.ok()) return client.status();
      const auto published = SegmentEngine::Open(**client, kPublishedBytes);
      if (!published.ok()) return published.status();
    }
    absl::StatusOr<RawEngine> engine = RawEngine::Open(daemon_);
    if (!engine.ok()) return engine.status();
    const absl::StatusOr<RawEngine::Found> found = engine->Match(SegmentPrompt(kPublishedBytes));
    if (!found.ok()) return found.status();
    arena_ = found->arena;
    engine_ = *std::move(engine);
    return OpenSessions(daemon_, kSessions, sessions_);
  }

  Achieved Run(const std::stop_token& stop) override {
    Achieved achieved{.sessions = sessions_.size()};
    v1::SessionRequest request;
    request.mutable_get_arena()->set_arena(arena_);
    std::vector<size_t> unread(sessions_.size());
    while (!stop.stop_requested()) {
      for (size_t i = 0; i < sessions_.size() && !stop.stop_requested(); ++i) {
        if (sessions_[i] && unread[i] == kUnread) continue;
        const absl::Status status = sessions_[i] ? sessions_[i]->Send(request) : absl::UnavailableError("");
        if (status.ok()) {
          ++achieved.asked;
          ++achieved.granted;
          ++unread[i];
          continue;
        }
        if (absl::IsResourceExhausted(status)) continue;
        ++achieved.refused;
        sessions_[i].reset();
        unread[i] = 0;
        absl::StatusOr<RawSession> again = RawSession::Open(daemon_);
        if (again.ok()) {
          sessions_[i] = *std::move(again);
        } else if (achieved.why.empty()) {
          achieved.why = std::string(again.status().message());
        }
      }
      size_t all = 0;
      for (const size_t count : unread) all += count;
      achieved.most_at_a_time = std::max<uint64_t>(achieved.most_at_a_time, all);
      if (all == kUnread * sessions_.size()) std::this_thread::sleep_for(kAfterClosed);
    }
    return achieved;
  }

 private:
  // Per session: fewer than its buffer holds, beyond which the session would be ended.
  static constexpr size_t kSessions = 126, kUnread = 200;

  const ClientOptions daemon_;
  std::optional<RawEngine> engine_;
  uint32_t arena_ = 0;
  std::vector<std::optional<RawSession>> sessions_;
};

}  // namespace

std::unique_ptr<Attack> MakeMappings(const Target& target, bool quick) {
  return std::make_unique<Mappings>(target, quick);
}

std::unique_ptr<Attack> MakeUnreadReplies(const Target& target, bool quick) {
  return std::make_unique<UnreadReplies>(target, quick);
}

}  // namespace ashlar::neighbours
