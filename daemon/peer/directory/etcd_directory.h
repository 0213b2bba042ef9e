// SPDX-License-Identifier: Apache-2.0
// EtcdDirectory: a directory in etcd, of which every node keeps a mirror that etcd's watches update.
//
// A thread of its own does all I/O. While etcd is not reachable, the known entries stay in use, announcements wait in a
// bounded queue, and the thread retries after a random time of at most a third of a lease. Data that etcd lost or
// compacted is read or announced again. Entries of absent members are ignored; the oldest member deletes them.
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
  // Draws `self.incarnation` at random. `clock` must be monotonic. The clock and what the events use must outlive the
  // directory.
  EtcdDirectory(const EtcdDirectoryOptions& options, Member self, DirectoryEvents events, const storage::Clock& clock);
  // The same without a thread. The owner calls Step when it is due and after every callback or wake-up. `random` draws
  // the incarnation and the retry times.
  EtcdDirectory(const EtcdDirectoryOptions& options, Member self, DirectoryEvents events, const storage::Clock& clock,
                std::unique_ptr<EtcdClient> client, const std::function<uint64_t()>& random);
  storage::Nanos Step();      // returns when the next one is due
  ~EtcdDirectory() override;  // leaves the cluster, which may take a second

  bool Announce(const NamespaceId& ns, const Key& key, const Holding& holding, double worth) override;
  void Withdraw(const NamespaceId& ns, const Key& key, const TensorShard& shard) override;
  size_t RemainingCapacity() const override;
  bool WasDisplaced(const NamespaceId& ns, const Key& key, const TensorShard& shard) const override;
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
