// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/raw_streams.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

namespace ashlar::bench {
namespace {

enum class Command : uint64_t { kFetch, kSeconds };
struct Request {
  Command command;
  uint64_t offset, bytes;
};
constexpr uint64_t kChunk = 256 * 1024;  // bytes of one system call

bool SendAll(int socket, const void* data, uint64_t bytes) {
  for (const char* at = static_cast<const char*>(data); bytes > 0;) {
    const ssize_t sent = send(socket, at, std::min(bytes, kChunk), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    at += sent;
    bytes -= sent;
  }
  return true;
}

bool ReceiveAll(int socket, void* data, uint64_t bytes) {
  for (char* at = static_cast<char*>(data); bytes > 0;) {
    const ssize_t received = recv(socket, at, std::min(bytes, kChunk), 0);
    if (received <= 0) return false;
    at += received;
    bytes -= received;
  }
  return true;
}

sockaddr_in Address(const std::string& host, uint16_t port) {
  sockaddr_in address{.sin_family = AF_INET, .sin_port = htons(port)};
  inet_pton(AF_INET, host.c_str(), &address.sin_addr);
  return address;
}

void NoDelay(int socket) {
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

void Serve(int socket, std::vector<char>& memory) {
  NoDelay(socket);
  for (Request request; ReceiveAll(socket, &request, sizeof request);) {
    bool fine = true;
    if (request.command == Command::kSeconds) {
      const double seconds = ProcessSeconds();
      fine = SendAll(socket, &seconds, sizeof seconds);
    } else {
      fine = SendAll(socket, memory.data() + request.offset, request.bytes);
    }
    if (!fine) break;
  }
  close(socket);
}

}  // namespace

double ProcessSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + 1e-6 * (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

uint16_t ServeRawStreams(const std::string& host) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = Address(host, 0);
  socklen_t size = sizeof address;
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(listener, 64) != 0) return 0;
  if (getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  const auto memory = std::make_shared<std::vector<char>>(kTransferMemory, 1);
  std::thread([listener, memory] {
    for (int one; (one = accept(listener, nullptr, nullptr)) >= 0;) {
      std::thread([one, memory] { Serve(one, *memory); }).detach();
    }
  }).detach();
  return ntohs(address.sin_port);
}

RawStreams::RawStreams(const std::string& host, uint16_t port, int streams) : memory_(kTransferMemory, 1) {
  const sockaddr_in address = Address(host, port);
  for (int i = 0; i < streams; ++i) {
    sockets_.push_back(socket(AF_INET, SOCK_STREAM, 0));
    connected_ = connected_ && connect(sockets_[i], reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    NoDelay(sockets_[i]);
  }
}

RawStreams::~RawStreams() {
  for (const int socket : sockets_) close(socket);
}

bool RawStreams::MoveOne(int stream, uint64_t bytes, int number) {
  const uint64_t offset = number % (kTransferMemory / bytes) * bytes;
  const Request request{Command::kFetch, offset, bytes};
  return SendAll(sockets_[stream], &request, sizeof request) &&
         ReceiveAll(sockets_[stream], memory_.data() + offset, bytes);
}

double RawStreams::Move(uint64_t bytes, int count) {
  const auto begin = std::chrono::steady_clock::now();
  std::atomic<int> next{0};
  std::vector<std::thread> threads;
  for (size_t i = 0; i < sockets_.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int number; (number = next.fetch_add(1)) < count;) {
        if (!MoveOne(static_cast<int>(i), bytes, number)) connected_ = false;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double RawStreams::ServerSeconds() {
  const Request request{Command::kSeconds, 0, 0};
  double seconds = 0;
  if (!SendAll(sockets_[0], &request, sizeof request) || !ReceiveAll(sockets_[0], &seconds, sizeof seconds)) return 0;
  return seconds;
}

}  // namespace ashlar::bench
