// SPDX-License-Identifier: Apache-2.0
// FakePeerCalls, for tests: has no objects, and records its calls.
#pragma once

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/prompt.pb.h"
#include "daemon/peer/control/peer_calls.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {

// Records: "here NODE", "gone NODE", "open NODE TENANT", "close NODE", "abandon NODE".
class FakePeerCalls final : public PeerCalls {
 public:
  void PeerHere(const PeerHello& peer) override { Note("here " + peer.node); }
  void PeerGone(const std::string& node) override { Note("gone " + node); }
  void Open(const PeerHello& peer, storage::TenantId tenant, PeerOpen open,
            Done<std::vector<PeerOpened>> done) override {
    Note(absl::StrCat("open ", peer.node, " ", tenant));
    MutexLock lock(mutex_);
    if (hangs) {
      held.push_back(std::move(done));
      return;
    }
    lock.Unlock();
    done(std::vector<PeerOpened>(open.objects.size(), {.miss = MissReason::kEvicted}));
  }
  void Renew(const PeerHello&, PeerRenew renew, Done<std::vector<uint32_t>> done) override {
    done(std::vector<uint32_t>(renew.leases.size(), renew.lease_ms));
  }
  void Offer(const PeerHello& peer, storage::TenantId tenant, PeerOffer offer,
             Done<std::vector<TakeOutcome>> done) override {
    Note(absl::StrCat("offer ", peer.node, " ", tenant));
    done(std::vector<TakeOutcome>(offer.objects.size(), TakeOutcome::kNoSpace));
  }
  void Close(const PeerHello& peer, std::vector<PeerLease>) override { Note("close " + peer.node); }
  void Workers(const PeerHello& peer, storage::TenantId tenant, const NamespaceId&,
               Done<std::vector<PeerWorker>> done) override {
    Note(absl::StrCat("workers ", peer.node, " ", tenant));
    done(std::vector<PeerWorker>{{.worker = 7, .tokens_per_second = 1000, .queued_tokens = 5, .capacity = 3}});
  }
  void Prefill(const PeerHello& peer, storage::TenantId tenant, PeerPrefill, Done<PeerOpened> done) override {
    Note(absl::StrCat("prefill ", peer.node, " ", tenant));
    done(PeerOpened{.miss = MissReason::kEvicted});
  }
  void Probe(const PeerHello& peer, storage::TenantId tenant, PeerProbe probe, Done<v1::NodeProbe> done) override {
    Note(absl::StrCat("probe ", peer.node, " ", tenant));
    v1::NodeProbe answer;
    answer.set_prompt_tokens(probe.prompt->tokens().size() / sizeof(int32_t));
    answer.set_prefix_tokens(2);
    done(answer);
  }

  size_t Count(const std::string& what) {
    MutexLock lock(mutex_);
    return static_cast<size_t>(std::count(notes_.begin(), notes_.end(), what));
  }
  std::vector<std::string> notes() {
    MutexLock lock(mutex_);
    return notes_;
  }
  void AnswerHeld() {
    MutexLock lock(mutex_);
    for (auto& done : held) done(std::vector<PeerOpened>{{.miss = MissReason::kBusy}});
    held.clear();
  }

  std::atomic<bool> hangs{false};
  std::vector<Done<std::vector<PeerOpened>>> held;

 private:
  void Note(std::string what) {
    MutexLock lock(mutex_);
    notes_.push_back(std::move(what));
  }
  Mutex mutex_;
  std::vector<std::string> notes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ashlar::daemon
