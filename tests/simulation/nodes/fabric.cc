// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/nodes/fabric.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ashlar::simulation::nodes {
namespace {

constexpr size_t kMostUnderWay = 8;  // messages of a connection; later ones stay in the queue
constexpr Nanos kFullPause = 5 * kMillisecond;

}  // namespace

SimulatedUcx::SimulatedUcx(Fabric& fabric, size_t machine, const std::shared_ptr<Life>& life, Wire::Order order,
                           daemon::LinkEvents events, std::function<void()> wake)
    : fabric_(fabric),
      machine_(machine),
      life_(life),
      order_(order),
      events_(std::move(events)),
      wake_(std::move(wake)) {
  fabric_.at[machine] = this;
}

SimulatedUcx::~SimulatedUcx() {
  fabric_.at.erase(machine_);
  CompleteSends();
  for (const auto& [id, link] : links_) {
    for (Outgoing& each : std::exchange(link->outgoing, {})) {
      --link->sends;
      each.sent(absl::CancelledError("the process ends"));
    }
    ReportClose(*link);
  }
}

SimulatedUcx::SimulatedLink& SimulatedUcx::Add(size_t other, bool accepted) {
  auto link = std::make_unique<SimulatedLink>();
  link->id = ++drawn_;
  link->peer = absl::StrCat(Fabric::AddressOf(other), ":7462");
  link->accepted = accepted;
  link->other = other;
  link->wire = std::make_shared<Wire>(fabric_.network, machine_, other, order_);
  return *(links_[link->id] = std::move(link));
}

SimulatedUcx::SimulatedLink* SimulatedUcx::Find(uint64_t id) {
  const auto found = links_.find(id);
  return found == links_.end() || found->second->closing ? nullptr : found->second.get();
}

void SimulatedUcx::Do(std::function<void()> event) {
  inbox_.push_back(std::move(event));
  wake_();
}

void SimulatedUcx::At(size_t machine, const std::weak_ptr<Life>& life, const std::shared_ptr<Wire>& over,
                      std::function<void(SimulatedUcx&)> event) {
  over->Send([&fabric = fabric_, machine, life, event = std::move(event)] {
    const std::shared_ptr<Life> lives = life.lock();
    if (lives == nullptr) return;
    fabric.network.schedule().For(lives, 0, [&fabric, machine, event] {
      const auto there = fabric.at.find(machine);
      if (there != fabric.at.end()) event(*there->second);
    });
  });
}

absl::StatusOr<daemon::Link*> SimulatedUcx::Connect(const daemon::HostPort& peer) {
  size_t number = 0;
  if (!absl::SimpleAtoi(peer.host.substr(peer.host.rfind('.') + 1), &number) || number == 0) {
    return absl::InvalidArgumentError("no address of this network");
  }
  const size_t other = number - 1;
  SimulatedLink& link = Add(other, false);
  const auto first = std::make_shared<Wire>(fabric_.network, machine_, other, Wire::Order::kKept);
  first->Send([&fabric = fabric_, from = machine_, other, id = link.id, life = std::weak_ptr(life_)] {
    const auto there = fabric.at.find(other);
    if (there != fabric.at.end()) {
      return fabric.network.schedule().For(there->second->life_, 0, [&fabric, from, other, id, life] {
        if (const auto at = fabric.at.find(other); at != fabric.at.end()) at->second->Accept(from, life, id);
      });
    }
    // No process listens there: the machine reports that.
    const auto back = std::make_shared<Wire>(fabric.network, other, from, Wire::Order::kKept);
    back->Send([&fabric, from, id, life] {
      const auto still = fabric.at.find(from);
      const auto lives = life.lock();
      if (lives == nullptr || lives->ended || still == fabric.at.end()) return;
      still->second->Broken(id, "refused");
    });
  });
  return &link;
}

void SimulatedUcx::Accept(size_t from, const std::weak_ptr<Life>& life, uint64_t id) {
  Do([this, from, life, id] {
    const bool admitted = events_.admit(absl::StrCat(Fabric::AddressOf(from), ":", 40000 + id));
    const auto back = std::make_shared<Wire>(fabric_.network, machine_, from, Wire::Order::kKept);
    if (!admitted) return At(from, life, back, [id](SimulatedUcx& there) { there.Broken(id, "rejected"); });
    SimulatedLink& link = Add(from, true);
    link.other_life = life;
    link.other_id = id;
    events_.accepted(link);
    At(from, life, back,
       [id, own = std::weak_ptr(life_), own_id = link.id](SimulatedUcx& there) { there.Accepted(id, own, own_id); });
  });
}

void SimulatedUcx::Accepted(uint64_t id, const std::weak_ptr<Life>& life, uint64_t other_id) {
  SimulatedLink* const link = Find(id);
  if (link == nullptr) return;
  link->other_life = life;
  link->other_id = other_id;
  if (!link->outgoing.empty()) Leave(id);
}

void SimulatedUcx::Post(SimulatedLink& link, Outgoing outgoing) {
  ++link.sends;
  link.outgoing.push_back(std::move(outgoing));
  if (link.outgoing.size() == 1 && link.other_id != 0) Leave(link.id);
}

// Schedules the send of the link's first queued message after a random delay.
void SimulatedUcx::Leave(uint64_t id) {
  SimulatedLink* const waiting = Find(id);
  if (waiting == nullptr || std::exchange(waiting->leaving, true)) return;
  fabric_.network.schedule().For(life_, fabric_.network.schedule().DrawTime(kMillisecond / 2), [this, id] {
    SimulatedLink* const link = Find(id);
    if (link == nullptr) return;
    link->leaving = false;
    if (link->outgoing.empty() || link->lost) return;
    if (link->wire->under_way() >= kMostUnderWay) {
      link->leaving = true;
      return fabric_.network.schedule().For(life_, kFullPause, [this, id] {
        if (SimulatedLink* const full = Find(id)) full->leaving = false;
        Leave(id);
      });
    }
    auto out = std::make_shared<Outgoing>(std::move(link->outgoing.front()));
    link->outgoing.pop_front();
    std::string payload = std::move(out->text);
    for (const auto& piece : out->pieces) payload.append(reinterpret_cast<const char*>(piece.data()), piece.size());
    if (!out->pieces.empty()) {
      fabric_.data_bytes += payload.size();
      if (fabric_.flips_percent > 0 && fabric_.network.schedule().Chance(fabric_.flips_percent)) {
        ++fabric_.flipped;
        payload[fabric_.network.schedule().Draw(payload.size())] ^= 4;
      }
    }
    link->bytes_sent += payload.size();
    At(link->other, link->other_life, link->wire,
       [other_id = link->other_id, header = out->header, payload = std::move(payload)](SimulatedUcx& there) {
         there.Arrived(other_id, header, payload);
       });
    left_.emplace_back(id, std::move(out->sent));
    wake_();
    if (!link->outgoing.empty()) Leave(id);
  });
}

void SimulatedUcx::Arrived(uint64_t id, const daemon::HeaderBytes& header, const std::string& payload) {
  Do([this, id, header, payload] {
    SimulatedLink* const link = Find(id);
    if (link == nullptr || link->lost) return;
    link->bytes_received += payload.size();
    events_.received(link, header, std::as_bytes(std::span(payload.data(), payload.size())));
  });
}

void SimulatedUcx::Broken(uint64_t id, const std::string& why) {
  Do([this, id, why] {
    SimulatedLink* const link = Find(id);
    if (link == nullptr || std::exchange(link->lost, true)) return;
    events_.lost(*link, absl::UnavailableError(absl::StrCat("connection with ", link->peer, ": ", why)));
    if (Find(id) != nullptr) Close(*link);
  });
}

// The other end learns of this one's end, if it is still reachable.
void SimulatedUcx::ReportClose(const SimulatedLink& link) {
  if (link.other_id == 0) return;
  const auto last = std::make_shared<Wire>(fabric_.network, machine_, link.other, Wire::Order::kKept);
  At(link.other, link.other_life, last, [id = link.other_id](SimulatedUcx& there) { there.Broken(id, "closed"); });
}

void SimulatedUcx::Send(daemon::Link& link, const daemon::Message& message, daemon::ConstSpans pieces,
                        std::function<void(absl::Status)> sent) {
  Post(static_cast<SimulatedLink&>(link),
       {.header = daemon::EncodeMessage(message), .pieces = std::move(pieces), .text = {}, .sent = std::move(sent)});
}

void SimulatedUcx::SendText(daemon::Link& link, const daemon::Message& message, std::string text) {
  Post(static_cast<SimulatedLink&>(link), {.header = daemon::EncodeMessage(message),
                                           .pieces = {},
                                           .text = std::move(text),
                                           .sent = [](const absl::Status&) {}});
}

void SimulatedUcx::Close(daemon::Link& closing) {
  auto& link = static_cast<SimulatedLink&>(closing);
  if (link.closing) return;
  ReportClose(link);
  link.closing = true;
  closed_.push_back(link.id);
  wake_();
}

void SimulatedUcx::CompleteSends() {
  for (const auto& [id, sent] : std::exchange(left_, {})) {
    SimulatedLink& link = *links_.at(id);
    --link.sends;
    ++link.completed;
    sent(absl::OkStatus());
  }
}

bool SimulatedUcx::Progress() {
  bool some = !inbox_.empty() || !left_.empty();
  if (fabric_.bug == Bug::kDropsSends) left_.clear();
  CompleteSends();
  // The next call has the events that follow from these.
  for (const auto& event : std::exchange(inbox_, {})) event();
  for (const uint64_t id : std::exchange(closed_, {})) {
    some = true;
    SimulatedLink& link = *links_.at(id);
    link.wire->Close();
    for (Outgoing& each : std::exchange(link.outgoing, {})) {
      --link.sends;
      ++link.completed;
      each.sent(absl::CancelledError("the connection was closed"));
    }
    CompleteSends();  // messages that have left are complete, whatever happens to them
    events_.closed(link);
    links_.erase(id);
  }
  return some;
}

}  // namespace ashlar::simulation::nodes
