// SPDX-License-Identifier: Apache-2.0
// OtherNode: a whole cache on another node, as the source of copies for the cache under test. The test says when its
// reads end, and how.
#pragma once

#include <cstddef>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "storage/objects/object_bytes.h"
#include "storage/testing/tiered_rig.h"
#include "storage/tier/remote_source.h"

namespace ashlar::storage {

class OtherNode final : public RemoteSource {
 public:
  static constexpr SessionId kItself = 100, kReader = 101;  // an engine's session on that node, and this node's session

  OtherNode() : rig({.hbm = 0, .dram = 256, .ssd = 0}) {
    for (const SessionId session : {kItself, kReader}) rig.cache->OpenSession(session, 1);
  }
  ~OtherNode() override {
    for (const SessionId session : {kItself, kReader}) rig.cache->CloseSession(session, [] {});
    rig.Settle();
  }

  // Leases the query's object on that node, and has `cache` adopt it. Returns false if that node lacks it, or this node
  // already has it.
  bool Offer(Cache& cache, const Query& query, Nanos cost = 0, PoolKind pool = PoolKind::kPublic) {
    const Match match = rig.cache->Lookup(kReader, {&query, 1});
    if (match.found[0].reason != MissReason::kNone) return false;
    const RemoteCopyId copy = ++drawn_;
    ObjectHeader header = *match.found[0].header;
    leases_[copy] = {match.lease, *match.found[0].slot, EncodeHeader(header)};
    if (cache.adoption().AdoptRemote({1, pool}, std::move(header), copy, cost)) return true;
    Release(copy);
    return false;
  }

  bool Reaches(const kernels::Gpu&) const override { return reaches; }
  bool Read(RemoteCopyId copy, uint64_t first, std::vector<std::byte*> targets, const kernels::Gpu* gpu,
            std::function<void(absl::Status)> done) override {
    if (reads_.size() >= most_reads) return false;
    reads_.push_back({copy, first, std::move(targets), gpu, std::move(done)});
    return true;
  }
  void Release(RemoteCopyId copy) override {
    for (const Reading& read : reads_) {
      if (read.copy == copy) std::abort();  // it is being read
    }
    rig.cache->Release(kReader, leases_.at(copy).lease);
    leases_.erase(copy);
  }

  void Damaged(RemoteCopyId copy) override { damaged.push_back(copy); }
  void SetRecompute(RemoteCopyId copy, Nanos recompute) override { recomputes[copy] = recompute; }

  size_t pending() const { return reads_.size(); }
  size_t leased() const { return leases_.size(); }
  // Ends one read, either with its bytes or only with the error.
  void End(size_t which, const absl::Status& status = {}) {
    const Reading read = std::move(reads_.at(which));
    reads_.erase(reads_.begin() + static_cast<ptrdiff_t>(which));
    if (status.ok()) Copy(read);
    read.done(status);
  }
  // Completes all work of both nodes; reads in the order in which they began.
  void Settle(TieredRig& here) {
    while (pending() + here.io.pending() + here.executor.pending() > 0) {
      while (pending() > 0) End(0);
      here.Settle();
    }
  }

  TieredRig rig;
  size_t most_reads = 1024;
  std::vector<RemoteCopyId> damaged;  // copies that the cache under test has reported
  std::map<RemoteCopyId, Nanos> recomputes;
  bool reaches = false;  // whether its transport reaches GPU memory
  bool corrupt = false;  // one byte of every piece differs, including the header's first extent

 private:
  struct Leased {
    LeaseId lease;
    Slot slot;
    std::string header;
  };
  struct Reading {
    RemoteCopyId copy;
    uint64_t first;
    std::vector<std::byte*> targets;
    const kernels::Gpu* gpu;
    std::function<void(absl::Status)> done;
  };

  void Copy(const Reading& read) {
    const Leased& from = leases_.at(read.copy);
    const std::vector<std::byte*> extents = ObjectBytes(*rig.dram, from.slot).extents();
    for (size_t i = 0; i < read.targets.size(); ++i) {
      const std::byte* const extent = extents.at(read.first + i);
      std::vector<std::byte> bytes(extent, extent + limits::kExtentBytes);
      if (corrupt && i == 0) bytes[limits::kExtentBytes / 8] ^= std::byte{1};
      if (read.first + i == 0) std::memcpy(bytes.data(), from.header.data(), from.header.size());
      if (read.gpu != nullptr) {
        read.gpu->CopyToDevice(read.targets[i], bytes.data(), bytes.size());
      } else {
        std::memcpy(read.targets[i], bytes.data(), bytes.size());
      }
    }
  }

  RemoteCopyId drawn_ = 0;
  std::map<RemoteCopyId, Leased> leases_;
  std::deque<Reading> reads_;
};

}  // namespace ashlar::storage
