// SPDX-License-Identifier: Apache-2.0
// Schedule: simulated time, and the events that happen in it, one after another.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "storage/executor.h"

namespace ashlar::simulation::nodes {

using storage::Nanos;

inline constexpr Nanos kMicrosecond = 1'000, kMillisecond = 1'000'000, kSecond = 1'000'000'000;

// A process. Its events end with it, and wait while it is frozen.
struct Life {
  Nanos frozen_until = 0;
  bool ended = false;
  bool leaves = false;  // whether it leaves etcd explicitly at its end
};

class Schedule {
 public:
  explicit Schedule(uint64_t seed) : random_(seed) {}

  Nanos now() const { return now_; }
  void After(Nanos wait, std::function<void()> event);
  // The same, unless that process has ended by then.
  void For(const std::shared_ptr<Life>& life, Nanos wait, std::function<void()> event);
  // Runs the next event, and advances time to it. False: there is none until `end`, and the time is now `end`.
  bool RunNext(Nanos end);
  uint64_t events() const { return drawn_; }

  uint64_t Random() { return random_(); }
  uint64_t Draw(uint64_t below) { return random_() % below; }
  Nanos DrawTime(Nanos below) { return static_cast<Nanos>(random_() % static_cast<uint64_t>(below)); }
  bool Chance(uint64_t percent) { return Draw(100) < percent; }
  // A hash of the order of all events: equal for equal seeds.
  void Trace(uint64_t value) { trace_ = (trace_ ^ value) * 0x100000001B3; }
  uint64_t trace() const { return trace_; }

 private:
  struct Event {
    Nanos at;
    uint64_t number;
    std::function<void()> run;
  };
  static bool Later(const Event& a, const Event& b) { return a.at != b.at ? a.at > b.at : a.number > b.number; }
  static void RunFor(Schedule& schedule, const std::weak_ptr<Life>& life, const std::function<void()>& event);

  Nanos now_ = kSecond;
  uint64_t drawn_ = 0, trace_ = 0;
  std::mt19937_64 random_;
  std::vector<Event> heap_;
};

// The monotonic clock of one machine: it starts at any time, and runs too fast or too slow.
class MachineClock final : public storage::Clock {
 public:
  MachineClock(const Schedule& schedule, Nanos offset, double rate)
      : schedule_(schedule), offset_(offset), rate_(rate) {}
  Nanos Now() const override {
    return stopped_at_ > 0 ? stopped_at_ : offset_ + static_cast<Nanos>(static_cast<double>(schedule_.now()) * rate_);
  }
  // The time on the schedule until this clock shows `time`; at least 0.
  Nanos Until(Nanos at) const;
  void Stop() { stopped_at_ = Now(); }  // an error of the simulator

 private:
  const Schedule& schedule_;
  const Nanos offset_;
  const double rate_;
  Nanos stopped_at_ = 0;
};

}  // namespace ashlar::simulation::nodes
