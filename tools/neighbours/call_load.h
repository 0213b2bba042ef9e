// SPDX-License-Identifier: Apache-2.0
// CallLoad: a load of calls of ashlar.v1.Cache that keeps a number of calls in flight, without waiting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stop_token>
#include <string>

namespace ashlar::neighbours {

struct CallLoad {
  std::string rpc_socket;
  std::string method;
  size_t at_a_time = 1;
  size_t connections = 1;  // connections over which they are distributed
  // The bytes of the next request of a slot.
  std::function<std::string(size_t slot)> request;
  // Returns how much the last message of a call's reply grants. 0: the call was refused, and `slot` makes its next call
  // a tenth of a second later, as after an error.
  std::function<uint64_t(size_t slot, const std::string& message)> granted;
};

struct LoadResult {
  uint64_t calls = 0;  // calls that were begun
  uint64_t refused = 0;
  uint64_t granted = 0;
  size_t most_at_a_time = 0;
  std::string error;  // the first failed call left this text
};

// Runs until told to stop; then cancels the calls in progress.
LoadResult RunLoad(const CallLoad& load, const std::stop_token& stop);

}  // namespace ashlar::neighbours
