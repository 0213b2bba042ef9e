// SPDX-License-Identifier: Apache-2.0
// Fakes around the peers of a fuzzed node: links, a directory and calls to another node, which the fuzzer answers. One
// thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ashlar/v1/peer.pb.h"
#include "daemon/peer/channels/peer_asker.h"
#include "daemon/peer/channels/prefill_asker.h"
#include "daemon/peer/transport/ucx.h"
#include "proto/limits.h"
#include "tests/fuzz/fuzz.h"

namespace ashlar::fuzz {

using daemon::PeerCalls;

// Links whose other end is the fuzzer. Messages that this node sends over them are kept, for their tickets.
class HostileUcx final : public daemon::Ucx {
 public:
  explicit HostileUcx(daemon::LinkEvents events) : events_(std::move(events)) {}
  ~HostileUcx() override {
    for (Outgoing& each : std::exchange(outgoing_, {})) Sent(each, absl::CancelledError("the process ends"));
  }

  // The fuzzer's side.
  void Connects() {
    inbox_.push_back([this] {
      if (links_.size() < kMostLinks && events_.admit("10.0.0.2:40000")) events_.accepted(Add(true));
    });
  }
  void Says(size_t which, const daemon::Message& message, std::string payload) {
    inbox_.push_back([this, which, header = daemon::EncodeMessage(message), payload = std::move(payload)] {
      if (daemon::Link* const link = Pick(which)) {
        link->bytes_received += payload.size();
        events_.received(link, header, std::as_bytes(std::span(payload)));
      }
    });
  }
  void Breaks(size_t which) {
    inbox_.push_back([this, which] {
      daemon::Link* const link = Pick(which);
      if (link == nullptr) return;
      events_.lost(*link, absl::UnavailableError("the peer has gone"));
      Close(*link);
    });
  }
  const std::deque<daemon::Message>& said() const { return said_; }

  daemon::HostPort address() const override { return {"10.0.0.1", 7462}; }
  const std::vector<daemon::UcxSetting>& settings() const override { return settings_; }
  bool has_rdma() const override { return false; }
  absl::StatusOr<daemon::Link*> Connect(const daemon::HostPort&) override {
    if (links_.size() >= kMostLinks) return absl::UnavailableError("too many links");
    return &Add(false);
  }
  void Send(daemon::Link& link, const daemon::Message& message, daemon::ConstSpans pieces,
            std::function<void(absl::Status)> sent) override {
    FUZZ_EXPECT(!link.closing);
    ++link.sends;
    outgoing_.push_back({link.id, std::move(pieces), std::move(sent)});
    Note(message);
  }
  void SendText(daemon::Link& link, const daemon::Message& message, std::string) override {
    Send(link, message, {}, [](const absl::Status&) {});
  }
  void Close(daemon::Link& link) override {
    if (std::exchange(link.closing, true)) return;
    closed_.push_back(link.id);
  }
  std::string Lanes(daemon::Link&) const override { return "tcp/fuzz"; }
  bool Progress() override {
    const bool some = !outgoing_.empty() || !inbox_.empty() || !closed_.empty();
    for (Outgoing& each : std::exchange(outgoing_, {})) Sent(each, absl::OkStatus());
    for (const auto& event : std::exchange(inbox_, {})) event();
    for (const uint64_t id : std::exchange(closed_, {})) {
      for (Outgoing& each : std::exchange(outgoing_, {})) Sent(each, absl::CancelledError("closed"));
      events_.closed(*links_.at(id));
      links_.erase(id);
    }
    return some;
  }
  bool Arm() override { return outgoing_.empty() && inbox_.empty() && closed_.empty(); }
  int event() const override { return -1; }

 private:
  struct Outgoing {
    uint64_t link = 0;
    daemon::ConstSpans pieces;
    std::function<void(absl::Status)> sent;
  };
  static constexpr size_t kMostLinks = 8, kMostSaid = 256;

  daemon::Link& Add(bool accepted) {
    auto link = std::make_unique<daemon::Link>();
    link->id = ++drawn_;
    link->peer = "10.0.0.2:7462";
    link->accepted = accepted;
    return *(links_[link->id] = std::move(link));
  }
  daemon::Link* Pick(size_t which) {
    if (links_.empty()) return nullptr;
    daemon::Link* const link = std::next(links_.begin(), static_cast<ptrdiff_t>(which % links_.size()))->second.get();
    return link->closing ? nullptr : link;
  }
  // Reads the bytes like the network, so that freed memory is detected.
  void Sent(Outgoing& each, const absl::Status& status) {
    for (const auto& piece : each.pieces) {
      for (size_t at = 0; at < piece.size(); at += 512) sum_ = sum_ + std::to_integer<uint64_t>(piece[at]);
      if (!piece.empty()) sum_ = sum_ + std::to_integer<uint64_t>(piece.back());
    }
    daemon::Link& link = *links_.at(each.link);
    --link.sends;
    ++link.completed;
    each.sent(status);
  }
  void Note(const daemon::Message& message) {
    said_.push_back(message);
    if (said_.size() > kMostSaid) said_.pop_front();
  }

  const daemon::LinkEvents events_;
  const std::vector<daemon::UcxSetting> settings_;
  std::map<uint64_t, std::unique_ptr<daemon::Link>> links_;
  std::vector<Outgoing> outgoing_;
  std::vector<std::function<void()>> inbox_;
  std::vector<uint64_t> closed_;
  std::deque<daemon::Message> said_;
  uint64_t drawn_ = 0;
  volatile uint64_t sum_ = 0;
};

// Reports what the fuzzer lets the other node announce.
class HostileDirectory final : public daemon::Directory {
 public:
  using Holding = daemon::Holding;
  std::vector<std::shared_ptr<const daemon::Member>> members;  // this node is the first
  std::map<Key, Holding> claims;                               // what the others claim to hold
  std::vector<daemon::ClusterErasure> erasures;

  bool Announce(const NamespaceId&, const Key&, const Holding&, double) override { return true; }
  void Withdraw(const NamespaceId&, const Key&, const TensorShard&) override {}
  size_t RemainingCapacity() const override { return SIZE_MAX; }
  bool WasDisplaced(const NamespaceId&, const Key&, const TensorShard&) const override { return false; }
  void Follow(const NamespaceId&) override {}
  void Unfollow(const NamespaceId&) override {}
  std::vector<daemon::Located> Locate(const NamespaceId&, std::span<const Key> keys) const override {
    std::vector<daemon::Located> located;
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto claim = claims.find(keys[i]);
      if (claim == claims.end()) continue;
      for (size_t holder = 1; holder < members.size(); ++holder) {
        located.push_back({i, members[holder], claim->second});
      }
    }
    return located;
  }
  std::vector<uint64_t> Depths(const NamespaceId&, uint64_t, size_t) const override { return {}; }
  std::vector<uint64_t> SpanEnds(const NamespaceId&, uint64_t, uint64_t, size_t) const override { return {}; }
  void Erase(const daemon::ClusterErasure&, std::function<void(const absl::Status&)> done) override {
    done(absl::UnavailableError("not simulated"));
  }
  std::vector<daemon::ClusterErasure> Erasures() const override { return erasures; }
  void Erased(int64_t) override {}
  bool BeingErased(const std::string& tenant, const NamespaceId& ns) const override {
    return std::ranges::any_of(erasures, [&](const daemon::ClusterErasure& one) {
      return one.tenant == tenant && (!one.ns.has_value() || *one.ns == ns);
    });
  }
  std::vector<std::shared_ptr<const daemon::Member>> Members() const override { return members; }
  daemon::DirectoryHealth Health() const override { return {.connected = true}; }
  daemon::DirectoryStats Stats() const override { return {}; }
};

// Calls of this node, which wait until the fuzzer answers them with a reply's bytes, read by PeerClient's code. Like
// its calls, they end by themselves, once.
class HostilePeer final : public daemon::PeerAsker, public daemon::PrefillAsker {
 public:
  std::function<void(google::protobuf::Message&)> fill;  // completes a reply with values that a fuzzer cannot guess
  std::function<int64_t()> now;

  // `bytes`: a reply's; null: no reply arrives. Returns false if no call waits.
  bool Answer(size_t which, const std::string* bytes) {
    if (waiting_.empty()) return false;
    const auto at = waiting_.begin() + static_cast<ptrdiff_t>(which % waiting_.size());
    const Waiting one = std::move(*at);
    waiting_.erase(at);
    one.answer(bytes);
    return true;
  }
  void Expire() {
    for (size_t i = 0; i < waiting_.size();) {
      if (waiting_[i].until > now()) {
        ++i;
      } else {
        Answer(i, nullptr);
      }
    }
  }
  void End() {
    ended_ = true;
    while (Answer(0, nullptr)) {
    }
  }

  bool Shares(const daemon::Member&, const std::string&) const override { return true; }
  void Open(const daemon::Member&, const std::string&, daemon::PeerOpen open,
            PeerCalls::Done<std::vector<daemon::PeerOpened>> done) override {
    Ask<v1::PeerOpenReply>([open](const auto& reply) { return daemon::Read(reply, open); }, std::move(done), 0);
  }
  void Renew(const daemon::Member&, daemon::PeerRenew renew, PeerCalls::Done<std::vector<uint32_t>> done) override {
    Ask<v1::PeerRenewReply>([renew](const auto& reply) { return daemon::Read(reply, renew); }, std::move(done), 0);
  }
  void Offer(const daemon::Member&, const std::string&, daemon::PeerOffer offer,
             PeerCalls::Done<std::vector<TakeOutcome>> done) override {
    Ask<v1::PeerOfferReply>([offer](const auto& reply) { return daemon::Read(reply, offer); }, std::move(done),
                            offer.patience_ms);
  }
  void Close(const daemon::Member&, std::vector<daemon::PeerLease> leases,
             std::function<void(absl::Status)> done) override {
    FUZZ_EXPECT(!leases.empty() && leases.size() <= limits::kMaxPeerLeasesPerCall);
    done(absl::OkStatus());
  }
  void Workers(const daemon::Member&, const std::string&, const NamespaceId&,
               PeerCalls::Done<std::vector<daemon::PeerWorker>> done) override {
    Ask<v1::PeerWorkersReply>([](const auto& reply) { return daemon::Read(reply); }, std::move(done), 0);
  }
  void Probe(const daemon::Member&, const std::string&, const daemon::PeerProbe&,
             PeerCalls::Done<v1::NodeProbe> done) override {
    Ask<v1::PeerProbeReply>([](const auto& reply) { return daemon::Read(reply); }, std::move(done), 0);
  }
  void Prefill(const daemon::Member&, const std::string&, daemon::PeerPrefill prefill,
               PeerCalls::Done<daemon::PeerOpened> done) override {
    Ask<v1::PeerPrefillReply>([prefill](const auto& reply) { return daemon::Read(reply, prefill); }, std::move(done),
                              prefill.patience_ms);
  }

 private:
  static constexpr int64_t kMilli = 1'000'000, kCallTimeout = 10'000 * kMilli;
  static constexpr size_t kMostWaiting = 64;  // see PeerClient::kCalls

  struct Waiting {
    int64_t until = 0;
    std::function<void(const std::string* bytes)> answer;
  };

  template <typename Message, typename ReadIt, typename Result>
  void Ask(ReadIt read, PeerCalls::Done<Result> done, uint32_t patience_ms) {
    if (ended_) return done(absl::UnavailableError("the node is not connected"));
    if (waiting_.size() >= kMostWaiting) return done(absl::ResourceExhaustedError("too many calls under way"));
    waiting_.push_back({now() + kCallTimeout + patience_ms * kMilli, [this, read, done](const std::string* bytes) {
                          Message reply;
                          if (bytes == nullptr || !reply.ParseFromString(*bytes)) {
                            return done(absl::UnavailableError("no answer"));
                          }
                          fill(reply);
                          absl::StatusOr<Result> result = read(reply);
                          if (!result.ok()) return done(absl::InternalError(result.status().message()));
                          done(std::move(result));
                        }});
  }

  std::vector<Waiting> waiting_;
  bool ended_ = false;
};

}  // namespace ashlar::fuzz
