// SPDX-License-Identifier: Apache-2.0
// The two processes of a transfer measurement.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "daemon/peer/transport/transport.h"
#include "kernels/mutex.h"
#include "proto/hex.h"
#include "tools/bench/raw_streams.h"
#include "tools/bench/transfer.h"

namespace ashlar::bench {
namespace {

using daemon::Grant;
using daemon::HostPort;
using daemon::Transport;

constexpr int kStreams = 4;
constexpr uint64_t kRound = uint64_t{512} << 20;  // bytes of one measurement
constexpr int kInFlight = 16;

class Memory final : public daemon::GrantedBytes {
 public:
  explicit Memory(std::vector<std::byte>& bytes) : bytes_(bytes) {}
  void Resolve(uint64_t offset, uint64_t length, std::function<void(absl::StatusOr<daemon::Spans>)> answer) override {
    answer(daemon::Spans{std::span(bytes_).subspan(offset, length)});
  }

 private:
  std::vector<std::byte>& bytes_;
};

std::string ToText(const Grant& grant) {
  const std::string secret(reinterpret_cast<const char*>(grant.secret.data()), grant.secret.size());
  return absl::StrCat(grant.number, " ", absl::BytesToHexString(secret));
}

Grant GrantOf(absl::string_view number, absl::string_view secret) {
  Grant grant{std::strtoull(std::string(number).c_str(), nullptr, 10), {}};
  const std::string bytes = BytesOfHex(secret);
  std::memcpy(grant.secret.data(), bytes.data(), std::min(bytes.size(), grant.secret.size()));
  return grant;
}

struct Holder {
  HostPort transport;
  HostPort raw;
  Grant read;
};

class Asker {
 public:
  Asker(Transport& transport, const Holder& holder)
      : transport_(transport), holder_(holder), memory_(kTransferMemory, std::byte{1}) {}

  // Seconds for `count` values of which `depth` are in flight at a time; `each` gets the microseconds of every value.
  double Move(uint64_t bytes, int count, int depth, std::vector<double>* each) {
    const auto begin = std::chrono::steady_clock::now();
    struct {
      Mutex mutex;
      CondVar ended;
      int running ABSL_GUARDED_BY(mutex) = 0;
    } moves;
    for (int i = 0; i < count; ++i) {
      {
        MutexLock lock(moves.mutex);
        while (moves.running >= depth) moves.ended.Wait(moves.mutex);
        ++moves.running;
      }
      const auto asked = std::chrono::steady_clock::now();
      const auto done = [&, asked](const absl::Status& status) {
        const double took = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - asked).count();
        MutexLock lock(moves.mutex);
        if (!status.ok()) status_ = status;
        if (each != nullptr) each->push_back(took);
        --moves.running;
        moves.ended.NotifyOne();
      };
      const uint64_t offset = i % (kTransferMemory / bytes) * bytes;
      const auto here = std::span(memory_).subspan(offset, bytes);
      transport_.Fetch(holder_.transport, holder_.read, offset, {here}, 0, done);
    }
    MutexLock lock(moves.mutex);
    while (moves.running > 0) moves.ended.Wait(moves.mutex);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  const absl::Status& status() const { return status_; }

 private:
  Transport& transport_;
  const Holder& holder_;
  std::vector<std::byte> memory_;
  absl::Status status_;
};

double Percentile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(part * values.size()))];
}

nlohmann::json Measure(Asker& asker, RawStreams& raw, uint64_t bytes, int repetitions, uint64_t round) {
  const int count = std::max<int>(static_cast<int>(round / bytes), 4);
  std::vector<double> gbps, raw_gbps, cpu, raw_cpu, ratio, times;
  asker.Move(bytes, std::max(count / 8, 1), kInFlight, nullptr);
  raw.Move(bytes, std::max(count / 8, 1));
  const double gigabytes = static_cast<double>(bytes) * count / 1e9;
  for (int i = 0; i < repetitions; ++i) {
    const double before = ProcessSeconds() + raw.ServerSeconds();
    gbps.push_back(gigabytes / asker.Move(bytes, count, kInFlight, nullptr));
    const double between = ProcessSeconds() + raw.ServerSeconds();
    cpu.push_back((between - before) / gigabytes);
    raw_gbps.push_back(gigabytes / raw.Move(bytes, count));
    raw_cpu.push_back((ProcessSeconds() + raw.ServerSeconds() - between) / gigabytes);
    ratio.push_back(gbps.back() / raw_gbps.back());
  }
  asker.Move(bytes, std::clamp(count, 20, 500), 1, &times);
  return {{"op", "fetch"},
          {"bytes", bytes},
          {"gbps", Median(gbps)},
          {"p50_us", Percentile(times, 0.5)},
          {"p99_us", Percentile(times, 0.99)},
          {"cpu_s_per_gb", Median(cpu)},
          {"raw_gbps", Median(raw_gbps)},
          {"raw_cpu_s_per_gb", Median(raw_cpu)},
          {"ratio", Median(ratio)}};
}

}  // namespace

int RunTransferHolder(const char* host) {
  auto transport = Transport::Start({.listen = {host, 0}});
  const uint16_t raw = ServeRawStreams(host);
  if (!transport.ok() || raw == 0) {
    std::fprintf(stderr, "transfer-holder: %s\n", transport.status().ToString().c_str());
    return 1;
  }
  std::vector<std::byte> bytes(kTransferMemory, std::byte{1});
  const auto memory = std::make_shared<Memory>(bytes);
  const Grant read = (*transport)->Allow(bytes.size(), memory);
  std::printf("%s %u %u %s\n", host, (*transport)->address().port, raw, ToText(read).c_str());
  std::fflush(stdout);
  while (std::getchar() != EOF) {
  }
  (*transport).reset();
  std::_Exit(0);  // the raw streams' threads never end
}

int RunTransferAsker(const char* host, const char* description, const char* repetitions, const char* quick) {
  const std::vector<std::string> parts = absl::StrSplit(description, ' ');
  if (parts.size() != 5) return 2;
  const auto port = [&](int i) { return static_cast<uint16_t>(std::atoi(parts[i].c_str())); };
  const Holder holder{{parts[0], port(1)}, {parts[0], port(2)}, GrantOf(parts[3], parts[4])};
  const auto log = [](const std::string& event, const std::string& peer, const std::string& detail) {
    if (event == daemon::kConnectionLost)
      std::fprintf(stderr, "transfer-asker: %s: %s\n", peer.c_str(), detail.c_str());
  };
  auto transport = Transport::Start({.listen = {host, 0}, .log = log});
  RawStreams raw(holder.raw.host, holder.raw.port, kStreams);
  if (!transport.ok() || !raw.connected()) {
    std::fprintf(stderr, "transfer-asker: %s\n", transport.status().ToString().c_str());
    return 1;
  }
  Asker asker(**transport, holder);
  const bool small = std::strcmp(quick, "quick") == 0;
  std::vector<uint64_t> sizes = {64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};
  if (small) sizes = {64 << 10, 4 << 20};
  nlohmann::json cases = nlohmann::json::array();
  for (const uint64_t bytes : sizes) {
    cases.push_back(Measure(asker, raw, bytes, std::atoi(repetitions), small ? kRound / 32 : kRound));
  }
  if (!asker.status().ok()) {
    std::fprintf(stderr, "transfer-asker: %s\n", asker.status().ToString().c_str());
    return 1;
  }
  std::printf("%s\n", cases.dump().c_str());
  std::fflush(stdout);
  return 0;
}

}  // namespace ashlar::bench
