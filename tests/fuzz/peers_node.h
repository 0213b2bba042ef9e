// SPDX-License-Identifier: Apache-2.0
// The node that is fuzzed: cache, peers, router and transport as a daemon puts them together, on one thread, and the
// operations that an input is a list of.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "daemon/peer/peers.h"
#include "daemon/router/router.h"
#include "daemon/runtime/event_loop.h"
#include "kernels/kernels.h"
#include "proto/tokens.h"
#include "storage/cache.h"
#include "storage/testing/engine.h"
#include "storage/testing/executors.h"
#include "storage/testing/manual_clock.h"
#include "storage/testing/rig.h"
#include "storage/transfer/mover.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/peers_surroundings.h"

namespace ashlar::fuzz {

inline constexpr storage::TenantId kTenant = 0;
inline constexpr storage::SessionId kEngine = 1, kWorker = 2;
inline constexpr uint64_t kTexts = 6, kTokens = 64, kExtents = 16;
inline constexpr storage::Nanos kMillisecond = 1'000'000, kSecond = 1000 * kMillisecond;
inline constexpr size_t kMostCalls = 256;  // pending calls of the peer

// Adds what the peers' target reads.
class PeersInput : public Input {
 public:
  using Input::Input;
  // Reads a length byte, and that number of bytes.
  std::string Bytes() {
    const size_t asked = Byte();  // before the rest is measured
    const size_t length = std::min(asked, data_.size());
    const std::string bytes(reinterpret_cast<const char*>(data_.data()), length);
    data_ = data_.subspan(length);
    return bytes;
  }
  // Any size, in two bytes.
  uint64_t Number() {
    const uint8_t digits = Byte();
    return uint64_t{digits} << (Byte() & 63);
  }
};

inline const ObjectHeader& PlanOf(size_t text) {
  static const auto* const plans = [] {
    auto* made = new std::vector<ObjectHeader>;
    for (uint64_t i = 0; i < kTexts; ++i) made->push_back(storage::TestPlan(i, kTokens));
    return made;
  }();
  return (*plans)[text % kTexts];
}
// The tokens of TestPlan's text.
inline std::string TokensOf(size_t text) {
  const int32_t id[] = {static_cast<int32_t>(text % kTexts), static_cast<int32_t>(kTokens)};
  return PackTokens(id);
}

template <size_t kSize>
std::string Text(const std::array<uint8_t, kSize>& bytes) {
  return {bytes.begin(), bytes.end()};
}

// Work is done at once, and completes when the loop gets to it.
class Workers final : public storage::Executor {
 public:
  explicit Workers(daemon::EventLoop& loop) : loop_(loop) {}
  bool Run(storage::TenantId tenant, std::function<void()> work, std::function<void()> done) override {
    work();
    loop_.PostCompletion(tenant, std::move(done));
    return true;
  }
  void Post(storage::TenantId tenant, std::function<void()> event) override {
    loop_.PostCompletion(tenant, std::move(event));
  }

 private:
  daemon::EventLoop& loop_;
};

class Node {
 public:
  Node() {
    directory.members = {Named("this", 1), Named("peer", 2), Named("third", 3)};
    asker.now = [this] { return clock.Now(); };
    asker.fill = [](google::protobuf::Message& reply) { Fill(reply); };
    cache.emplace(CacheOptions(), storage::Tiers{.memory = {&Memory()}, .remote = &peers.source()}, mover, workers,
                  clock, nullptr);
    router.emplace(clock, *cache, daemon::Router::Options{});
    peers.Start(*cache, {&Memory()});
    peers.Route(*router);
    for (const storage::SessionId session : {kEngine, kWorker}) cache->OpenSession(session, kTenant);
  }
  ~Node() { End(); }

  // Does one operation.
  void Do(PeersInput& input) {
    switch (input.Byte() % 12) {
      case 0:
      case 1:
        return Request(input);
      case 2:
      case 3:
        return Answer(input);
      case 4:
      case 5:
        return Say(input);
      case 6:
        return Greet(input.Byte());
      case 7:
        return Pass(kMillisecond << (input.Byte() & 15));
      case 8:
        return LookUp(input.Byte());
      case 9:
        return Engine(input.Byte());
      case 10:
        return ReportEntry(input);
      default:
        return Prefill(input.Byte());
    }
  }

 private:
  static std::shared_ptr<const daemon::Member> Named(const char* node, uint64_t incarnation) {
    return std::make_shared<const daemon::Member>(
        daemon::Member{.node = node, .incarnation = incarnation, .transport_address = "10.0.0.2:7462"});
  }
  // Shared by one node after another, because creating it takes longer than everything else.
  static storage::MemoryTier& Memory() {
    static auto* const memory = storage::TestTier({{kTenant, kExtents}}).release();
    return *memory;
  }
  storage::CacheOptions CacheOptions() {
    storage::CacheOptions options{.random = [this] { return random(); }};
    options.objects.residence = peers.residence();
    return options;
  }
  daemon::PeersOptions Options() {
    daemon::PeersOptions options{.self = "this"};
    options.announce = daemon::AnnounceMode::kAll;
    options.replicas.bytes_per_second = 1 << 20;
    options.holder.leases_of_a_node = 8;
    return options;
  }
  std::unique_ptr<daemon::Transport> MakeTransport() {
    daemon::TransportSurroundings surroundings{
        .now = [this] { return clock.Now(); },
        .random = [this] { return random(); },
        .open = [this](const daemon::TransportOptions&,
                       daemon::LinkEvents events) -> absl::StatusOr<std::unique_ptr<daemon::Ucx>> {
          auto made = std::make_unique<HostileUcx>(std::move(events));
          ucx = made.get();
          return made;
        }};
    auto made = daemon::Transport::Start({}, std::move(surroundings), [] {});
    FUZZ_EXPECT(made.ok());
    return *std::move(made);
  }

  // Runs until nothing is left to do.
  void Run() {
    for (int rounds = 0;; ++rounds) {
      FUZZ_EXPECT(rounds < 100'000);
      const bool turned = transport != nullptr && transport->Turn();
      if (!loop.RunNext() && !turned) return;
    }
  }
  void Pass(storage::Nanos time) {
    clock.Advance(time);
    asker.Expire();
    peers.Flush();
    router->Tick();
    peers.Tick();
    cache->Tick();
    Run();
  }

  // A field of one byte selects one of the values that a peer would have.
  void FillKey(std::string* key) const {
    if (key->size() == 1) *key = Text(PlanOf(static_cast<uint8_t>((*key)[0])).key.bytes);
  }
  static void FillNamespace(std::string* ns) {
    if (ns->size() == 1) *ns = Text(PlanOf(0).ns.bytes);
  }
  static void FillSecret(std::string* secret) {
    if (secret->size() == 1) secret->resize(16, (*secret)[0]);
  }
  void FillLease(std::string* lease) const {
    if (lease->size() == 1 && !leases.empty()) *lease = Text(leases[static_cast<uint8_t>((*lease)[0]) % leases.size()]);
  }
  static void FillOpened(v1::PeerOpened* opened) {
    if (opened->header().size() == 1) {
      const ObjectHeader& plan = PlanOf(static_cast<uint8_t>(opened->header()[0]));
      opened->set_header(EncodeHeader(plan));
      opened->set_bytes(plan.bytes);
    }
    FillSecret(opened->mutable_lease());
    FillSecret(opened->mutable_grant()->mutable_secret());
  }
  static void Fill(google::protobuf::Message& reply) {
    if (auto* const opened = dynamic_cast<v1::PeerOpenReply*>(&reply)) {
      for (v1::PeerOpened& one : *opened->mutable_objects()) FillOpened(&one);
    } else if (auto* const prefilled = dynamic_cast<v1::PeerPrefillReply*>(&reply)) {
      FillOpened(prefilled->mutable_object());
    }
  }
  void Complete(v1::PeerOpenRequest& request) const {
    for (v1::PeerKey& key : *request.mutable_keys()) FillKey(key.mutable_key());
  }
  void Complete(v1::PeerRenewRequest& request) const {
    for (std::string& lease : *request.mutable_leases()) FillLease(&lease);
  }
  void Complete(v1::PeerCloseRequest& request) const {
    for (std::string& lease : *request.mutable_leases()) FillLease(&lease);
  }
  void Complete(v1::PeerOfferRequest& request) const {
    for (v1::PeerOffered& one : *request.mutable_objects()) {
      FillKey(one.mutable_key());
      FillNamespace(one.mutable_namespace_());
    }
  }
  void Complete(v1::PeerWorkersRequest& request) const { FillNamespace(request.mutable_ns()); }
  void Complete(v1::PeerPrefillRequest& request) const {
    FillNamespace(request.mutable_ns());
    FillKey(request.mutable_key());
    if (request.tokens().size() == 1) request.set_tokens(TokensOf(static_cast<uint8_t>(request.tokens()[0])));
  }

  // Records that a call is answered, once, with the peer's reading of the reply. `read` checks the reply.
  template <typename Reply, typename Result, typename ReadIt>
  PeerCalls::Done<Result> Answered(ReadIt read) {
    ++asked;
    const auto answers = std::make_shared<int>(0);
    return [this, answers, read](absl::StatusOr<Result> result) {
      FUZZ_EXPECT(++*answers == 1);
      ++answered;
      if (!result.ok()) return;
      Reply reply;
      daemon::Write(*result, &reply);
      FUZZ_EXPECT(read(reply).ok());
      if constexpr (std::is_same_v<Result, std::vector<daemon::PeerOpened>>) {
        for (const daemon::PeerOpened& one : *result) Note(one);
      } else if constexpr (std::is_same_v<Result, daemon::PeerOpened>) {
        Note(*result);
      }
    };
  }
  void Note(const daemon::PeerOpened& opened) {
    if (opened.miss != MissReason::kNone) return;
    leases.push_back(opened.lease);
    grants.push_back({.number = opened.grant.number, .secret = opened.grant.secret});
  }
  // Reads a request as PeerServer does.
  template <typename Message, typename Serve>
  void Read(const std::string& bytes, Serve serve) {
    Message message;
    if (asked - answered >= kMostCalls || !message.ParseFromString(bytes)) return;
    Complete(message);
    const auto read = daemon::Read(message);
    if (read.ok()) serve(*read);
  }

  void Request(PeersInput& input);
  void Answer(PeersInput& input) {
    const size_t which = input.Byte();
    const std::string bytes = input.Bytes();
    asker.Answer(which, which >= 0xf0 ? nullptr : &bytes);
    Run();
  }
  void Say(PeersInput& input);
  void Greet(uint8_t how) {
    if ((how & 1) != 0) {
      peers.PeerGone("peer");
    } else {
      self.incarnation.fill(how >> 1 & 1);
      peers.PeerHere(self);
    }
    Run();
  }
  void LookUp(uint8_t texts);
  void Land(const storage::Match& match, const std::vector<size_t>& found);
  void Engine(uint8_t what);
  void ReportEntry(PeersInput& input);
  void Prefill(uint8_t what);
  void End();

 public:
  std::mt19937_64 random{1};
  storage::ManualClock clock;
  daemon::EventLoop loop{1024, clock};
  HostileUcx* ucx = nullptr;
  HostileDirectory directory;
  HostilePeer asker;
  Workers workers{loop};
  storage::InlineWorkers threads;
  std::unique_ptr<daemon::Transport> transport = MakeTransport();
  daemon::Peers peers{loop, clock, {"default"}, directory, *transport, asker, asker, Options()};
  storage::Mover mover{kernels::Host(), threads, workers, Memory()};
  std::optional<storage::Cache> cache;
  std::optional<daemon::Router> router;

 private:
  daemon::PeerHello self{.node = "peer", .transport_address = "10.0.0.2:7462"};
  std::vector<daemon::PeerLease> leases;  // leases that the node was given
  std::vector<daemon::Grant> grants;
  size_t asked = 0, answered = 0, lookups = 0, found_out = 0, plans = 0, planned = 0;
  storage::LandingId landings = 0;
  std::vector<uint64_t> open_plans;
  uint64_t assignment = 0;  // the latest assignment of the worker here
  bool draining = false;
};

}  // namespace ashlar::fuzz
