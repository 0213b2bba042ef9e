// SPDX-License-Identifier: Apache-2.0
// Plain TCP streams: the limit that transfers between daemons are compared with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ashlar::bench {

// Serves until the process ends, with one thread per connection. Returns the port; 0: none is available.
uint16_t ServeRawStreams(const std::string& host);

class RawStreams {
 public:
  RawStreams(const std::string& host, uint16_t port, int streams);
  ~RawStreams();
  RawStreams(const RawStreams&) = delete;
  RawStreams& operator=(const RawStreams&) = delete;

  bool connected() const { return connected_; }
  // Seconds for `count` values of `bytes`, fetched from the server. Each stream transfers one value at a time.
  double Move(uint64_t bytes, int count);
  // CPU seconds that the server's process has used.
  double ServerSeconds();

 private:
  bool MoveOne(int stream, uint64_t bytes, int number);

  std::vector<int> sockets_;
  std::vector<char> memory_;
  bool connected_ = true;
};

// Memory used for transfers on each side, large enough that they come from memory and not from a core's cache.
inline constexpr uint64_t kTransferMemory = uint64_t{128} << 20;

// CPU seconds of this process.
double ProcessSeconds();

}  // namespace ashlar::bench
