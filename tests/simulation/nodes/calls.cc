// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/nodes/calls.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ashlar/v1/peer.pb.h"
#include "daemon/peer/control/peer_messages.h"

namespace ashlar::simulation::nodes {

using daemon::Member;
using daemon::PeerCalls;

Calls::Calls(CallSwitch& all, size_t machine, const std::shared_ptr<Life>& life, const MachineClock& clock,
             std::vector<std::string> tenants, std::function<void(const Member&)> gone)
    : all_(all),
      machine_(machine),
      life_(life),
      clock_(clock),
      tenants_(std::move(tenants)),
      gone_(std::move(gone)),
      self_{.node = NameOf(machine)} {
  for (uint8_t& byte : self_.incarnation) byte = static_cast<uint8_t>(all_.network.schedule().Random());
  all_.at[machine] = this;
}

Calls::~Calls() {
  End();
  all_.at.erase(machine_);
}

void Calls::At(CallSwitch& all, size_t machine, const std::weak_ptr<Life>& life, const std::shared_ptr<Wire>& over,
               std::function<void(Calls&)> event) {
  over->Send([&all, machine, life, event = std::move(event)] {
    const std::shared_ptr<Life> lives = life.lock();
    if (lives == nullptr) return;
    all.network.schedule().For(lives, 0, [&all, machine, event] {
      if (const auto there = all.at.find(machine); there != all.at.end()) event(*there->second);
    });
  });
}

size_t Calls::MachineOf(const Member& member) {
  size_t machine = 0;
  if (!absl::SimpleAtoi(member.node.substr(4), &machine)) std::abort();
  return machine;
}

void Calls::Update(const std::vector<std::shared_ptr<const Member>>& members) {
  std::map<uint64_t, Client> before = std::exchange(clients_, {});
  std::vector<uint64_t> fresh;
  for (const auto& member : members) {
    if (member->node == self_.node) continue;
    if (auto known = before.extract(member->incarnation)) {
      clients_.insert(std::move(known));
      continue;
    }
    Client& client = clients_[member->incarnation];
    client.member = member;
    client.machine = MachineOf(*member);
    fresh.push_back(member->incarnation);
  }
  for (auto& [incarnation, client] : before) {
    if (client.connected) {
      At(all_, client.machine, client.there, client.wire,
         [from = machine_, number = client.number](Calls& there) { there.ServerEnded(from, number); });
    }
    for (const auto& [number, fail] : std::map(client.calls)) fail(absl::CancelledError("the node has left"));
    if (client.connected) gone_(*client.member);
  }
  for (const uint64_t incarnation : fresh) Connect(incarnation);
}

void Calls::End() {
  Update({});
  for (auto& [from, server] : std::exchange(servers_, {})) {
    if (served_ != nullptr) served_->PeerGone(server.hello.node);
    At(all_, from, server.there, server.wire, [number = server.number](Calls& there) { there.Reset(number); });
  }
}

// The other end of a connection reports that there is none.
void Calls::Reset(uint64_t number) {
  for (const auto& [incarnation, client] : clients_) {
    if (client.number == number) return ClientEnded(incarnation, client.attempt);
  }
}

void Calls::Connect(uint64_t incarnation) {
  const auto found = clients_.find(incarnation);
  if (found == clients_.end() || found->second.connected) return;
  Client& client = found->second;
  const uint64_t attempt = client.attempt = ++drawn_;
  const size_t to = client.machine;
  client.number = all_.network.schedule().Random();
  const auto first = std::make_shared<Wire>(all_.network, machine_, to, Wire::Order::kKept);
  first->Send([&all = all_, hello = self_, to, from = machine_, life = std::weak_ptr(life_), incarnation, attempt,
               number = client.number] {
    const auto there = all.at.find(to);
    if (there != all.at.end() && there->second->served_ != nullptr) {
      return all.network.schedule().For(
          there->second->life_, 0, [&all, to, hello, from, life, incarnation, attempt, number] {
            const auto at = all.at.find(to);
            if (at == all.at.end()) return;
            at->second->Greeted(hello, from, life, number);
            At(all, from, life, std::make_shared<Wire>(all.network, to, from, Wire::Order::kKept),
               [incarnation, attempt, own = std::weak_ptr(at->second->life_), number](Calls& caller) {
                 caller.Welcomed(incarnation, attempt, own, number);
               });
          });
    }
    At(all, from, life, std::make_shared<Wire>(all.network, to, from, Wire::Order::kKept),
       [incarnation, attempt](Calls& caller) { caller.ClientEnded(incarnation, attempt); });  // refused
  });
  // gRPC stops connecting after a while.
  all_.network.schedule().For(life_, 2 * kTimeout, [this, incarnation, attempt] {
    const auto still = clients_.find(incarnation);
    if (still != clients_.end() && !still->second.connected) ClientEnded(incarnation, attempt);
  });
}

void Calls::Greeted(const daemon::PeerHello& greeting, size_t from, const std::weak_ptr<Life>& life, uint64_t number) {
  if (served_ == nullptr) return;
  const daemon::PeerHello& first = first_.try_emplace(from, greeting).first->second;
  const daemon::PeerHello& hello = all_.bug == Bug::kServesFormerNodes ? first : greeting;
  const auto former = servers_.find(from);
  if (former != servers_.end()) {
    if (former->second.hello.incarnation != hello.incarnation) served_->PeerGone(hello.node);
    // A later one replaces it.
    At(all_, from, former->second.there, former->second.wire,
       [replaced = former->second.number](Calls& there) { there.Reset(replaced); });
  }
  servers_[from] = {.hello = hello,
                    .there = life,
                    .number = number,
                    .wire = std::make_shared<Wire>(all_.network, machine_, from, Wire::Order::kAny)};
  served_->PeerHere(hello);
  WatchServer(from, number);
}

void Calls::Welcomed(uint64_t incarnation, uint64_t attempt, const std::weak_ptr<Life>& life, uint64_t number) {
  const auto found = clients_.find(incarnation);
  if (found == clients_.end() || found->second.attempt != attempt || found->second.connected) {
    // It has been cancelled here meanwhile.
    for (const auto& [machine, calls] : all_.at) {
      if (calls->life_ != life.lock()) continue;
      At(all_, machine, life, std::make_shared<Wire>(all_.network, machine_, machine, Wire::Order::kKept),
         [from = machine_, number](Calls& there) { there.ServerEnded(from, number); });
    }
    return;
  }
  Client& client = found->second;
  client.connected = true;
  client.there = life;
  client.number = number;
  client.retry_in = kSecond / 10;
  client.wire = std::make_shared<Wire>(all_.network, machine_, client.machine, Wire::Order::kAny);
  WatchClient(incarnation, attempt);
}

// Either end detects by itself that nothing arrives over the link any longer.
void Calls::WatchClient(uint64_t incarnation, uint64_t attempt) {
  all_.network.schedule().For(life_, kTimeout / 4, [this, incarnation, attempt] {
    const auto found = clients_.find(incarnation);
    if (found == clients_.end() || found->second.attempt != attempt || !found->second.connected) return;
    if (all_.network.Silent(machine_, found->second.machine, kTimeout)) return ClientEnded(incarnation, attempt);
    WatchClient(incarnation, attempt);
  });
}

void Calls::WatchServer(size_t from, uint64_t number) {
  all_.network.schedule().For(life_, kTimeout / 4, [this, from, number] {
    const auto found = servers_.find(from);
    if (found == servers_.end() || found->second.number != number) return;
    if (all_.network.Silent(machine_, from, kTimeout)) return ServerEnded(from, number);
    WatchServer(from, number);
  });
}

void Calls::ClientEnded(uint64_t incarnation, uint64_t attempt) {
  const auto found = clients_.find(incarnation);
  if (found == clients_.end() || found->second.attempt != attempt) return;
  Client& client = found->second;
  const bool was_connected = std::exchange(client.connected, false);
  client.attempt = ++drawn_;
  if (client.wire != nullptr) client.wire->Close();
  const Nanos wait = client.retry_in / 2 + all_.network.schedule().DrawTime(client.retry_in / 2);
  client.retry_in = std::min(2 * client.retry_in, kSecond);
  all_.network.schedule().For(life_, wait, [this, incarnation] { Connect(incarnation); });
  const std::shared_ptr<const Member> member = client.member;
  for (const auto& [number, fail] : std::map(client.calls)) fail(absl::UnavailableError("the connection has ended"));
  if (was_connected) gone_(*member);
}

void Calls::ServerEnded(size_t from, uint64_t number) {
  const auto found = servers_.find(from);
  if (found == servers_.end() || found->second.number != number) return;
  const std::string node = found->second.hello.node;
  At(all_, from, found->second.there, found->second.wire, [number](Calls& there) { there.Reset(number); });
  servers_.erase(found);
  if (all_.bug != Bug::kKeepsPeersGone) served_->PeerGone(node);
}

size_t Calls::connected() const {
  return static_cast<size_t>(std::ranges::count_if(clients_, [](const auto& one) { return one.second.connected; }));
}

size_t Calls::under_way() const {
  size_t count = 0;
  for (const auto& [incarnation, client] : clients_) count += client.calls.size();
  return count;
}

const Calls::Server* Calls::From(size_t machine, uint64_t number) const {
  const auto found = servers_.find(machine);
  return found == servers_.end() || found->second.number != number ? nullptr : &found->second;
}

uint32_t Calls::TenantOf(const std::string& name) const {
  return static_cast<uint32_t>(std::ranges::find(tenants_, name) - tenants_.begin());
}

// `handle` serves the request at the other end: (Calls&, hello, request, done of absl::StatusOr<Reply>).
template <typename Request, typename Reply, typename Result, typename Handle, typename ReadReply>
void Calls::Start(const Member& member, Nanos patience, Request request, Handle handle, ReadReply read,
                  PeerCalls::Done<Result> done) {
  const auto found = clients_.find(member.incarnation);
  if (found == clients_.end() || !found->second.connected) {
    return done(absl::UnavailableError(absl::StrCat("peer ", member.node, " is not connected")));
  }
  Client& client = found->second;
  if constexpr (requires { request.tenant(); }) {
    if (!Shares(member, request.tenant())) {
      ++all_.refused_tenant;
      return done(absl::PermissionDeniedError("the tenant is not shared with this peer"));
    }
  }
  if (client.calls.size() >= kMostCalls) return done(absl::ResourceExhaustedError("too many calls in flight"));
  const uint64_t number = ++drawn_;
  // Ends the call, once.
  const auto end = [this, incarnation = member.incarnation, number, done](absl::StatusOr<Result> result) {
    const auto of = clients_.find(incarnation);
    if (of != clients_.end() && of->second.calls.erase(number) == 0) return;
    ++(result.ok() ? all_.answered : all_.failed);
    done(std::move(result));
  };
  const auto open = std::make_shared<bool>(true);
  const auto once = [open, end](absl::StatusOr<Result> result) {
    if (std::exchange(*open, false)) end(std::move(result));
  };
  client.calls[number] = [once](const absl::Status& why) { once(why); };
  all_.network.schedule().For(life_, clock_.Until(clock_.Now() + kCallTimeout + patience),
                              [once] { once(absl::DeadlineExceededError("the peer does not answer")); });
  if (all_.bug == Bug::kDropsCalls && all_.network.schedule().Chance(20)) {
    *open = false;  // nothing reports it
    return;
  }
  At(all_, client.machine, client.there, client.wire,
     [&all = all_, own = std::weak_ptr(life_), from = machine_, connection = client.number, request, handle, once,
      read](Calls& there) {
       const Server* const server = there.From(from, connection);
       if (server == nullptr || there.served_ == nullptr) {
         return At(all, from, own, std::make_shared<Wire>(all.network, there.machine_, from, Wire::Order::kKept),
                   [connection](Calls& back) { back.Reset(connection); });
       }
       ++all.unanswered;
       const auto answered = std::make_shared<bool>(false);
       const auto answer = [&all, own, from, connection, once, read, answered,
                            at = there.machine_](absl::StatusOr<Reply> reply) {
         if (std::exchange(*answered, true)) all.wrong = "a peer's call was answered twice";
         --all.unanswered;
         const auto still = all.at.find(at);
         if (still == all.at.end()) return;
         const Server* const to = still->second->From(from, connection);
         if (to == nullptr) return;
         At(all, from, own, to->wire, [once, read, reply = std::move(reply)](Calls&) {
           if (!reply.ok()) return once(reply.status());
           absl::StatusOr<Result> result = read(*reply);
           if (!result.ok())
             return once(absl::InternalError(absl::StrCat("invalid reply from the peer: ", result.status().message())));
           once(std::move(result));
         });
       };
       if (all.network.schedule().Chance(all.busy_percent)) {
         ++all.refused_busy;
         return answer(absl::ResourceExhaustedError("the daemon's metadata queue is full; try again"));
       }
       if constexpr (requires { request.tenant(); }) {
         if (!all.Shares(there.machine_, from, request.tenant())) {
           ++all.refused_tenant;
           return answer(absl::NotFoundError("tenant: not shared with this peer"));
         }
       }
       handle(there, server->hello, request, answer);
     });
}

namespace {

// Serves one call like PeerServer: reads the message, and writes the answer.
template <typename Reply, typename Result, typename Read, typename Serve, typename Answer>
void ServeCall(const Read& read, const Serve& serve, const Answer& answer) {
  if (!read.ok()) return answer(read.status());
  serve(*read, [answer](absl::StatusOr<Result> result) {
    if (!result.ok()) return answer(result.status());
    Reply reply;
    daemon::Write(*result, &reply);
    answer(std::move(reply));
  });
}

}  // namespace

void Calls::Open(const Member& member, const std::string& tenant, daemon::PeerOpen open,
                 PeerCalls::Done<std::vector<daemon::PeerOpened>> done) {
  v1::PeerOpenRequest request;
  daemon::Write(open, tenant, &request);
  Start<v1::PeerOpenRequest, v1::PeerOpenReply, std::vector<daemon::PeerOpened>>(
      member, 0, std::move(request),
      [](Calls& there, const daemon::PeerHello& hello, const v1::PeerOpenRequest& asked, const auto& answer) {
        ServeCall<v1::PeerOpenReply, std::vector<daemon::PeerOpened>>(
            daemon::Read(asked),
            [&](const daemon::PeerOpen& it, auto served) {
              there.served_->Open(hello, there.TenantOf(asked.tenant()), it, std::move(served));
            },
            answer);
      },
      [open](const v1::PeerOpenReply& reply) { return daemon::Read(reply, open); }, std::move(done));
}

void Calls::Renew(const Member& member, daemon::PeerRenew renew, PeerCalls::Done<std::vector<uint32_t>> done) {
  v1::PeerRenewRequest request;
  daemon::Write(renew, &request);
  Start<v1::PeerRenewRequest, v1::PeerRenewReply, std::vector<uint32_t>>(
      member, 0, std::move(request),
      [](Calls& there, const daemon::PeerHello& hello, const v1::PeerRenewRequest& asked, const auto& answer) {
        ServeCall<v1::PeerRenewReply, std::vector<uint32_t>>(
            daemon::Read(asked),
            [&](const daemon::PeerRenew& it, auto served) { there.served_->Renew(hello, it, std::move(served)); },
            answer);
      },
      [renew](const v1::PeerRenewReply& reply) { return daemon::Read(reply, renew); }, std::move(done));
}

void Calls::Offer(const Member& member, const std::string& tenant, daemon::PeerOffer offer,
                  PeerCalls::Done<std::vector<TakeOutcome>> done) {
  v1::PeerOfferRequest request;
  daemon::Write(offer, tenant, &request);
  Start<v1::PeerOfferRequest, v1::PeerOfferReply, std::vector<TakeOutcome>>(
      member, kMillisecond * offer.patience_ms, std::move(request),
      [](Calls& there, const daemon::PeerHello& hello, const v1::PeerOfferRequest& asked, const auto& answer) {
        ServeCall<v1::PeerOfferReply, std::vector<TakeOutcome>>(
            daemon::Read(asked),
            [&](const daemon::PeerOffer& it, auto served) {
              if (there.all_.bug == Bug::kNeverTakesOffers) {
                return served(std::vector<TakeOutcome>(it.objects.size(), TakeOutcome::kBusy));
              }
              there.served_->Offer(hello, there.TenantOf(asked.tenant()), it, std::move(served));
            },
            answer);
      },
      [offer](const v1::PeerOfferReply& reply) { return daemon::Read(reply, offer); }, std::move(done));
}

void Calls::Close(const Member& member, std::vector<daemon::PeerLease> leases, std::function<void(absl::Status)> done) {
  v1::PeerCloseRequest request;
  daemon::Write(leases, &request);
  Start<v1::PeerCloseRequest, v1::PeerCloseReply, bool>(
      member, 0, std::move(request),
      [](Calls& there, const daemon::PeerHello& hello, const v1::PeerCloseRequest& asked, const auto& answer) {
        const absl::StatusOr<std::vector<daemon::PeerLease>> read = daemon::Read(asked);
        if (!read.ok()) return answer(read.status());
        there.served_->Close(hello, *read);
        answer(v1::PeerCloseReply());
      },
      [](const v1::PeerCloseReply&) { return absl::StatusOr<bool>(true); },
      [done = std::move(done)](const absl::StatusOr<bool>& closed) { done(closed.status()); });
}

void Calls::Workers(const Member& member, const std::string& tenant, const NamespaceId& ns,
                    PeerCalls::Done<std::vector<daemon::PeerWorker>> done) {
  v1::PeerWorkersRequest request;
  daemon::Write(ns, tenant, &request);
  Start<v1::PeerWorkersRequest, v1::PeerWorkersReply, std::vector<daemon::PeerWorker>>(
      member, 0, std::move(request),
      [](Calls& there, const daemon::PeerHello& hello, const v1::PeerWorkersRequest& asked, const auto& answer) {
        ServeCall<v1::PeerWorkersReply, std::vector<daemon::PeerWorker>>(
            daemon::Read(asked),
            [&](const NamespaceId& it, auto served) {
              there.served_->Workers(hello, there.TenantOf(asked.tenant()), it, std::move(served));
            },
            answer);
      },
      [](const v1::PeerWorkersReply& reply) { return daemon::Read(reply); }, std::move(done));
}

void Calls::Prefill(const Member& member, const std::string& tenant, daemon::PeerPrefill prefill,
                    PeerCalls::Done<daemon::PeerOpened> done) {
  v1::PeerPrefillRequest request;
  daemon::Write(prefill, tenant, &request);
  Start<v1::PeerPrefillRequest, v1::PeerPrefillReply, daemon::PeerOpened>(
      member, kMillisecond * prefill.patience_ms, std::move(request),
      [](Calls& there, const daemon::PeerHello& hello, const v1::PeerPrefillRequest& asked, const auto& answer) {
        ServeCall<v1::PeerPrefillReply, daemon::PeerOpened>(
            daemon::Read(asked),
            [&](const daemon::PeerPrefill& it, auto served) {
              there.served_->Prefill(hello, there.TenantOf(asked.tenant()), it, std::move(served));
            },
            answer);
      },
      [prefill](const v1::PeerPrefillReply& reply) { return daemon::Read(reply, prefill); }, std::move(done));
}

void Calls::Probe(const Member& member, const std::string& tenant, const daemon::PeerProbe& probe,
                  PeerCalls::Done<v1::NodeProbe> done) {
  v1::PeerProbeRequest request;
  daemon::Write(probe, tenant, &request);
  Start<v1::PeerProbeRequest, v1::PeerProbeReply, v1::NodeProbe>(
      member, 0, std::move(request),
      [](Calls& there, const daemon::PeerHello& hello, const v1::PeerProbeRequest& asked, const auto& answer) {
        ServeCall<v1::PeerProbeReply, v1::NodeProbe>(
            daemon::Read(asked),
            [&](const daemon::PeerProbe& it, auto served) {
              there.served_->Probe(hello, there.TenantOf(asked.tenant()), it, std::move(served));
            },
            answer);
      },
      [](const v1::PeerProbeReply& reply) { return daemon::Read(reply); }, std::move(done));
}

}  // namespace ashlar::simulation::nodes
