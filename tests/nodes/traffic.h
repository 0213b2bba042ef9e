// SPDX-License-Identifier: Apache-2.0
// Traffic: TCP between two nodes; the test holds both ends.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "tests/nodes/network.h"

namespace ashlar::nodes {

// One connection. Failures to create it are test failures.
class Connection {
 public:
  Connection(const Network& network, size_t from, size_t to);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Sends random bytes of that seed from one end, and compares them at the other end. Returns the bytes that arrived
  // within `patience`; equal() says whether they were right.
  uint64_t Carry(uint64_t bytes, uint64_t seed, std::chrono::milliseconds patience = std::chrono::seconds(60));
  bool equal() const { return equal_; }
  // Time from one byte sent to the other end's answer; `patience` or more: there was none.
  std::chrono::nanoseconds RoundTrip(std::chrono::milliseconds patience = std::chrono::seconds(20));

  int near() const { return near_; }
  int far() const { return far_; }

 private:
  int near_ = -1, far_ = -1;
  bool equal_ = true;
};

// A UDP socket of the calling thread's namespace at that address and port.
int OpenDatagrams(const std::string& address, uint16_t port);
void ConnectTo(int socket, const std::string& address, uint16_t port);

// A socket that listens in the calling thread's namespace, at the given port or any free one.
int Listen(const std::string& address, uint16_t port = 0);
uint16_t PortOf(int socket);
// Connects from the calling thread's namespace; negative if there is no answer in time.
int Dial(const std::string& address, uint16_t port, std::chrono::milliseconds patience = std::chrono::seconds(20));

// The answer to a POST of JSON from the calling thread's namespace, with its header; empty if none arrives in time.
std::string Post(const std::string& address, uint16_t port, const std::string& path, const std::string& body,
                 std::chrono::milliseconds patience = std::chrono::seconds(10));

}  // namespace ashlar::nodes
