// SPDX-License-Identifier: Apache-2.0
// EtcdDirectory: a directory of which every node keeps a mirror, fed by etcd's watches.
//
// A thread of its own does all input and output. Where etcd is away, what is known goes on being used, announcements
// wait within their bound, and the thread tries again after a random time of at most a third of a lease. What etcd
// lost, or compacted, is read or announced again. Entries of absent members are not believed; the member that has been
// there for longest deletes them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "daemon/peer/directory/directory.h"
#include "daemon/peer/directory/options.h"

namespace ashlar::daemon {

class EtcdClient;

class EtcdDirectory final : public Directory {
 public:
  // `self.incarnation` is drawn at random here. `clock` must be the monotonic one. Both it and what the events use
  // outlive the directory.
  EtcdDirectory(const EtcdDirectoryOptions& options, Member self, DirectoryEvents events, const storage::Clock& clock);
  // The same without a thread, for an owner that calls Step when it is due, and after anything has called back or been
  // woken. `random` draws the incarnation and the times after which etcd is tried again.
  EtcdDirectory(const EtcdDirectoryOptions& options, Member self, DirectoryEvents events, const storage::Clock& clock,
                std::unique_ptr<EtcdClient> client, const std::function<uint64_t()>& random);
  storage::Nanos Step();      // returns when the next one is due
  ~EtcdDirectory() override;  // leaves the cluster, which may take a second

  bool Announce(const NamespaceId& ns, const Key& key, const Holding& holding, double worth) override;
  void Withdraw(const NamespaceId& ns, const Key& key, const TensorShard& shard) override;
  size_t Room() const override;
  bool GaveUp(const NamespaceId& ns, const Key& key, const TensorShard& shard) const override;
  void Follow(const NamespaceId& ns) override;
  void Unfollow(const NamespaceId& ns) override;
  std::vector<Located> Locate(const NamespaceId& ns, std::span<const Key> keys) const override;
  std::vector<uint64_t> Depths(const NamespaceId& ns, uint64_t end, size_t most) const override;
  std::vector<uint64_t> SpanEnds(const NamespaceId& ns, uint64_t begin, uint64_t end, size_t most) const override;
  void Erase(const ClusterErasure& erasure, std::function<void(const absl::Status&)> done) override;
  std::vector<ClusterErasure> Erasures() const override;
  void Erased(int64_t revision) override;
  bool BeingErased(const std::string& tenant, const NamespaceId& ns) const override;
  std::vector<std::shared_ptr<const Member>> Members() const override;
  DirectoryHealth Health() const override;
  DirectoryStats Stats() const override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ashlar::daemon
