// SPDX-License-Identifier: Apache-2.0
// Fabric: the data plane's connections in a simulation, below the code that has grants, tickets and transfers
// (daemon/peer/transport/exchange.h). Bytes leave their sources some time after they were handed over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/peer/transport/ucx.h"
#include "tests/simulation/nodes/network.h"
#include "tests/simulation/nodes/nodes.h"

namespace ashlar::simulation::nodes {

class SimulatedUcx;

class Fabric {
 public:
  Fabric(Network& its_network, Bug its_bug) : network(its_network), bug(its_bug) {}

  static std::string AddressOf(size_t machine) { return "10.0.0." + std::to_string(machine + 1); }

  Network& network;
  const Bug bug;
  std::map<size_t, SimulatedUcx*> at;  // keyed by machine: the listening processes
  uint64_t flips_percent = 0;          // percentage of data messages in which a bit flips
  uint64_t flipped = 0, data_bytes = 0;
};

class SimulatedUcx final : public daemon::Ucx {
 public:
  // Calls `wake` when there is something for Progress to do.
  SimulatedUcx(Fabric& fabric, size_t machine, const std::shared_ptr<Life>& life, Wire::Order order,
               daemon::LinkEvents events, std::function<void()> wake);
  ~SimulatedUcx() override;

  daemon::HostPort address() const override { return {Fabric::AddressOf(machine_), 7462}; }
  const std::vector<daemon::UcxSetting>& settings() const override { return settings_; }
  bool has_rdma() const override { return false; }
  absl::StatusOr<daemon::Link*> Connect(const daemon::HostPort& peer) override;
  void Send(daemon::Link& link, const daemon::Message& message, daemon::ConstSpans pieces,
            std::function<void(absl::Status)> sent) override;
  void SendText(daemon::Link& link, const daemon::Message& message, std::string text) override;
  void Close(daemon::Link& link) override;
  std::string Lanes(daemon::Link&) const override { return "simulated"; }
  bool Progress() override;
  bool Arm() override { return false; }
  int event() const override { return -1; }

 private:
  struct Outgoing {
    daemon::HeaderBytes header;
    daemon::ConstSpans pieces;
    std::string text;
    std::function<void(absl::Status)> sent;
  };
  struct SimulatedLink final : daemon::Link {
    size_t other = 0;                // machine
    std::weak_ptr<Life> other_life;  // set once the process at the other end has accepted
    uint64_t other_id = 0;           // number of its link; 0: not accepted yet
    std::shared_ptr<Wire> wire;
    std::deque<Outgoing> outgoing;  // messages that have not left
    bool leaving = false;           // an event sends the first one
    bool lost = false;
  };
  using Links = std::map<uint64_t, std::unique_ptr<SimulatedLink>>;

  SimulatedLink& Add(size_t other, bool accepted);
  SimulatedLink* Find(uint64_t id);
  void Post(SimulatedLink& link, Outgoing outgoing);
  void Leave(uint64_t id);
  void Do(std::function<void()> event);
  void Accept(size_t from, const std::weak_ptr<Life>& life, uint64_t id);
  void Accepted(uint64_t id, const std::weak_ptr<Life>& life, uint64_t other_id);
  void Arrived(uint64_t id, const daemon::HeaderBytes& header, const std::string& payload);
  void Broken(uint64_t id, const std::string& why);
  void CompleteSends();
  void ReportClose(const SimulatedLink& link);
  // Runs `event` at the process of another machine that has this life, when it arrives.
  void At(size_t machine, const std::weak_ptr<Life>& life, const std::shared_ptr<Wire>& over,
          std::function<void(SimulatedUcx&)> event);

  Fabric& fabric_;
  const size_t machine_;
  const std::shared_ptr<Life> life_;
  const Wire::Order order_;
  const daemon::LinkEvents events_;
  const std::function<void()> wake_;
  const std::vector<daemon::UcxSetting> settings_;
  uint64_t drawn_ = 0;
  Links links_;
  std::deque<std::function<void()>> inbox_;
  std::vector<std::pair<uint64_t, std::function<void(absl::Status)>>> left_;  // sends, by their link
  std::vector<uint64_t> closed_;
};

}  // namespace ashlar::simulation::nodes
