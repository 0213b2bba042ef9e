// SPDX-License-Identifier: Apache-2.0
// Helpers for tests of the directory: keys by number, waiting, and members in processes that a test can kill.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/peer/directory/etcd_directory.h"
#include "daemon/testing/child_process.h"
#include "daemon/testing/etcd_process.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {

class SteadyClock final : public storage::Clock {
 public:
  storage::Nanos Now() const override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

// A digest per number, uniform in all bytes.
inline Digest DigestOf(uint64_t number) {
  Digest digest;
  for (size_t i = 0; i < 4; ++i) {
    uint64_t word = number * 4 + i + 0x9e3779b97f4a7c15;
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
    word = (word ^ word >> 27) * 0x94d049bb133111eb;
    word ^= word >> 31;
    std::memcpy(digest.bytes.data() + 8 * i, &word, sizeof word);
  }
  return digest;
}
inline NamespaceId NamespaceOf(uint64_t number) {
  return DigestOf(uint64_t{1} << 40 | number);
}

// The limit is generous for a busy machine. Returns as soon as the condition holds.
inline bool Until(const std::function<bool()>& holds, std::chrono::seconds limit = std::chrono::seconds(60)) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

inline EtcdDirectoryOptions OptionsFor(const std::string& endpoint) {
  EtcdDirectoryOptions options;
  options.endpoints = {endpoint};
  options.lease_seconds = 3;
  options.writes_per_second = 1000000;
  options.cluster_writes_per_second = 1000000;
  return options;
}

// A directory and its node. The node announces its objects, and announces them again on request.
class Node {
 public:
  Node(const std::string& name, const EtcdDirectoryOptions& options)
      : directory(options,
                  {.node = name, .control_address = name + ":1", .transport_address = name + ":2", .version = "1"},
                  {.members_changed = [this] { ++member_changes; },
                   .announce_again = [this] { Again(); },
                   .erasures_changed = [this] { ++erasures_changes; },
                   .health_changed = [this](const DirectoryHealth&) { ++health_changes; }},
                  clock_) {}

  void Hold(uint64_t ns, uint64_t key, const Holding& holding = {.bytes = 1 << 20}) {
    MutexLock lock(mutex_);
    held_[{ns, key}] = holding;
    directory.Announce(NamespaceOf(ns), DigestOf(key), holding, 1);
  }
  void Drop(uint64_t ns, uint64_t key) {
    MutexLock lock(mutex_);
    held_.erase({ns, key});
    directory.Withdraw(NamespaceOf(ns), DigestOf(key), {});
  }
  // The nodes that hold the object, as this node sees them.
  std::set<std::string> Holders(uint64_t ns, uint64_t key) const {
    const Key keys[] = {DigestOf(key)};
    std::set<std::string> holders;
    for (const Located& located : directory.Locate(NamespaceOf(ns), keys)) holders.insert(located.member->node);
    return holders;
  }
  size_t members() const { return directory.Members().size(); }

 private:
  void Again() {
    ++asked_again;
    MutexLock lock(mutex_);
    for (const auto& [at, holding] : held_) {
      directory.Announce(NamespaceOf(at.first), DigestOf(at.second), holding, 1);
    }
  }
  SteadyClock clock_;
  Mutex mutex_;
  std::map<std::pair<uint64_t, uint64_t>, Holding> held_ ABSL_GUARDED_BY(mutex_);

 public:
  std::atomic<int> member_changes{0}, erasures_changes{0}, health_changes{0}, asked_again{0};
  EtcdDirectory directory;  // last member, because its thread uses the others
};

// A node in its own process, which holds keys [first, first + count): key k in namespace 1 + k % spaces.
class NodeProcess {
 public:
  NodeProcess(const std::string& endpoint, const std::string& name, uint64_t first, uint64_t count,
              uint64_t spaces = 1) {
    process_.Start(
        {.command = {"/proc/self/exe", "--gtest_filter=NodeProcess.*"},
         .environment = {"ASHLAR_NODE_ENDPOINT=" + endpoint, "ASHLAR_NODE_NAME=" + name,
                         absl::StrCat("ASHLAR_NODE_FIRST=", first), absl::StrCat("ASHLAR_NODE_COUNT=", count),
                         absl::StrCat("ASHLAR_NODE_SPACES=", spaces)},
         .log = "/dev/null"});
  }
  void Kill() { process_.Kill(); }
  void Freeze() { process_.Freeze(); }
  void Thaw() { process_.Thaw(); }

 private:
  ChildProcess process_;
};

// Returns the output of a command, which must succeed.
std::string Shell(const std::string& command);

}  // namespace ashlar::daemon
