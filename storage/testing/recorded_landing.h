// SPDX-License-Identifier: Apache-2.0
// RecordedLanding: a landing whose sources are all whole. It records what the mover reports.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "proto/outcome.h"
#include "storage/transfer/mover.h"

namespace ashlar::storage {

struct RecordedLanding : LandingOwner {
  std::optional<uint64_t> Loaded(size_t) override { return UINT64_MAX; }
  void WhenLoaded(size_t, uint64_t, std::function<void()>) override { std::abort(); }
  void Landed(uint32_t layers) override {
    progress.push_back(layers);
    events.push_back("landed " + std::to_string(layers));
  }
  void Corrupt(size_t source) override {
    corrupt.push_back(source);
    events.push_back("corrupt " + std::to_string(source));
  }
  void Ended(MissReason outcome) override {
    done = outcome;
    events.emplace_back(Name(outcome));
  }

  std::vector<uint32_t> progress;
  std::vector<size_t> corrupt;
  std::optional<MissReason> done;
  std::vector<std::string> events;  // all of them, in order
};

}  // namespace ashlar::storage
