// SPDX-License-Identifier: Apache-2.0
// TCP streams without anything above them: the limit that transfers between daemons are held to.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ashlar::bench {

// Serves until the process ends: threads of its own, one a connection. Returns the port; 0: none can be had.
uint16_t ServeRawStreams(const std::string& host);

class RawStreams {
 public:
  RawStreams(const std::string& host, uint16_t port, int streams);
  ~RawStreams();
  RawStreams(const RawStreams&) = delete;
  RawStreams& operator=(const RawStreams&) = delete;

  bool connected() const { return connected_; }
  // Seconds for `count` values of `bytes`, fetched from the server; each stream moves one at a time,
  // and its next one when that has come whole.
  double Move(uint64_t bytes, int count);
  // Processor seconds that the server's process has used.
  double ServerSeconds();

 private:
  bool MoveOne(int stream, uint64_t bytes, int number);

  std::vector<int> sockets_;
  std::vector<char> memory_;
  bool connected_ = true;
};

// As much memory lies behind transfers on each side, so that they come from memory, not from a core's cache.
inline constexpr uint64_t kTransferMemory = uint64_t{128} << 20;

// Processor seconds of this process.
double ProcessSeconds();

}  // namespace ashlar::bench
