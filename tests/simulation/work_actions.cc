// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/work_actions.h"

#include <utility>

namespace ashlar::simulation {
namespace {

constexpr int kMostWorkLeft = 10000;  // pieces, of what can be in flight at once

}  // namespace

void WorkActions::Execute() {
  const size_t of_disk = world_.io.hangs() ? 0 : world_.io.pending();
  const bool first = of_disk == 0 || (world_.executor.pending() > 0 && Draw(2) == 0);
  SimulatedExecutor& executor = first ? world_.executor : world_.io;
  if ((first ? world_.executor.pending() : of_disk) == 0) return;
  const bool drop = world_.bug == Bug::kDropsCompletions && Draw(8) == 0;
  executor.Proceed(Draw(executor.pending()), drop);
}

void WorkActions::SetFaults() {
  storage::SimulatedDisk::Faults faults;
  const auto rate = [&] { return Draw(3) == 0 ? 0.3 : 0.0; };
  faults.read_error = rate();
  faults.write_error = rate();
  faults.sync_error = rate();
  faults.record_error = rate();
  faults.bit_flip = rate();
  faults.no_space = rate();
  faults.full = Draw(4) == 0;
  if (world_.bug == Bug::kLosesFlushes) faults = {.lost_flush = 1};
  world_.disk.set_faults(faults);
  world_.executor.set_capacity(Draw(3) == 0 ? 2 : 64);
  world_.io.set_capacity(Draw(3) == 0 ? 3 : 64);
}

// For some steps; or it responds again.
void WorkActions::HangDisk() {
  if (!world_.io.hangs()) {
    coverage_.Note(Fault::kHang);
    history_.hung = true;
    return world_.io.Hang(true);
  }
  if (Draw(2) == 0) OutlastHang();
  world_.io.Hang(false);
}

// The disk's deadline passes. Promise 10: then nothing waits for the disk.
void WorkActions::OutlastHang() {
  if (world_.io.pending() == 0) return;
  slices_.EndAll();
  world_.clock.Advance(storage::SsdHealth::kDeadline);
  for (int ticks = 0; ticks < 2; ++ticks) {  // the first one may be late
    for (storage::Slice whole; !cache().Tick(whole);) {
    }
  }
  clients_.ticks = clients_.ticked_in_parts = false;
  oracle_.CheckDeadlines();
  while (world_.executor.pending() > 0) world_.executor.Proceed(0, false);
  if (!world_.ssd->health().degraded()) Fail("a disk hangs, and its tier is not degraded");
  if (!clients_.landings.empty() || !clients_.compositions.empty())
    Fail("a landing or a composition waits for a disk that hangs");
}

void WorkActions::RunAll() {
  // Memory before the disk, as long as that takes: work that only waits for the disk must not keep memory busy.
  for (int work = 0; world_.executor.pending() + world_.io.pending() > 0; ++work) {
    if (work == kMostWorkLeft) return Fail("copies are made for ever, of what waits for the disk");
    (world_.executor.pending() > 0 ? world_.executor : world_.io).Proceed(0, false);
  }
}

void WorkActions::Heal() {
  world_.disk.set_faults({});
  world_.io.Hang(false);
  world_.executor.set_capacity(1024);
  world_.io.set_capacity(1024);
}

}  // namespace ashlar::simulation
