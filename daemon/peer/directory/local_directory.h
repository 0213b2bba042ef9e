// SPDX-License-Identifier: Apache-2.0
// LocalDirectory: the directory of a node outside a cluster. It has one member.
#pragma once

#include "daemon/peer/directory/directory.h"

namespace ashlar::daemon {

class LocalDirectory final : public Directory {
 public:
  explicit LocalDirectory(Member self) : self_(std::make_shared<const Member>(std::move(self))) {}

  bool Announce(const NamespaceId&, const Key&, const Holding&, double) override { return true; }
  void Withdraw(const NamespaceId&, const Key&, const TensorShard&) override {}
  size_t RemainingCapacity() const override { return SIZE_MAX; }
  bool WasDisplaced(const NamespaceId&, const Key&, const TensorShard&) const override { return false; }
  void Follow(const NamespaceId&) override {}
  void Unfollow(const NamespaceId&) override {}
  std::vector<Located> Locate(const NamespaceId&, std::span<const Key>) const override { return {}; }
  std::vector<uint64_t> Depths(const NamespaceId&, uint64_t, size_t) const override { return {}; }
  std::vector<uint64_t> SpanEnds(const NamespaceId&, uint64_t, uint64_t, size_t) const override { return {}; }
  void Erase(const ClusterErasure&, std::function<void(const absl::Status&)> done) override {
    done(absl::UnavailableError("this node is not part of a cluster"));
  }
  std::vector<ClusterErasure> Erasures() const override { return {}; }
  void Erased(int64_t) override {}
  bool BeingErased(const std::string&, const NamespaceId&) const override { return false; }
  std::vector<std::shared_ptr<const Member>> Members() const override { return {self_}; }
  DirectoryHealth Health() const override { return {.connected = true}; }
  DirectoryStats Stats() const override { return {.members = 1}; }

 private:
  const std::shared_ptr<const Member> self_;
};

}  // namespace ashlar::daemon
