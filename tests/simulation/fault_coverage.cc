// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/fault_coverage.h"

#include <algorithm>
#include <tuple>

namespace ashlar::simulation {

void FaultCoverage::Note(Fault fault) {
  const bool states[kStates] = {
      !clients_.leases.empty(),
      !clients_.reservations.empty(),
      std::ranges::any_of(clients_.reservations, &Reservation::publishing),
      !clients_.landings.empty(),
      cache().stats().copies_under_way > 0,
      clients_.draining > 0,
      !clients_.commits.empty(),
      std::ranges::any_of(clients_.commits, [](const auto& item) { return item.second.spanning; }),
      !clients_.compositions.empty(),
      pages_.admitted(),
      pages_.filling(),
      oracle_.SomethingIsOverdue(),
      history_.drains,
  };
  for (size_t state = 0; state < kStates; ++state) {
    report_.coverage.pairs[static_cast<size_t>(fault)][state] += states[state] ? 1 : 0;
  }
}

void FaultCoverage::NoteNew() {
  const storage::SimulatedDisk::Counts now = world_.disk.counts();
  const std::tuple<Fault, uint64_t, uint64_t> struck[] = {
      {Fault::kReadError, now.read_errors, seen_.read_errors},
      {Fault::kWriteError, now.write_errors, seen_.write_errors},
      {Fault::kSyncError, now.sync_errors, seen_.sync_errors},
      {Fault::kRecordError, now.batch_errors, seen_.batch_errors},
      {Fault::kBitFlip, now.bit_flips, seen_.bit_flips},
      {Fault::kDiskFull, now.refused_full, seen_.refused_full},
      {Fault::kNoSpace, now.short_writes, seen_.short_writes},
      {Fault::kQueueFull, world_.executor.refused() + world_.io.refused(), seen_refused_},
  };
  for (const auto& [fault, count, before] : struck) {
    if (count > before) Note(fault);
  }
  seen_ = now;
  seen_refused_ = world_.executor.refused() + world_.io.refused();
}

}  // namespace ashlar::simulation
