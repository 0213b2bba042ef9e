// SPDX-License-Identifier: Apache-2.0
// CacheState, the implementation behind Cache: the session, the model, the memory, and the state that its requests
// share.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ashlar/engine.h"
#include "client/engine/background.h"
#include "client/engine/describe.h"
#include "client/engine/lent_workers.h"
#include "client/engine/page_tables.h"
#include "client/engine/quarantine.h"
#include "client/engine/staging.h"
#include "client/session/client.h"
#include "client/session/process_bound.h"
#include "kernels/mutex.h"

namespace ashlar::engine {

// The requests and jobs hold it too. It is destroyed with the last of them, on the thread that ends that one.
struct CacheState : std::enable_shared_from_this<CacheState> {
  using Milliseconds = std::chrono::milliseconds;

  // Opens the model on a client, in the memory of `region` or, if that is empty, in the memory that the options
  // describe. Ignores the sockets and the model in the options.
  static absl::StatusOr<std::shared_ptr<CacheState>> Open(std::shared_ptr<Client> client, Region region,
                                                          const DescribedModel& model, const OpenOptions& options);

  bool has_pages() const { return !places.empty(); }
  const ashlar::Layout& layout() const { return model.layout(); }
  // INVALID_ARGUMENT if the layer does not exist or is not linear.
  absl::StatusOr<const LinearLayer*> LinearAt(uint32_t layer) const;
  absl::Status CheckHasState(uint32_t layer) const;  // INVALID_ARGUMENT unless the layer is linear or an opaque state
  bool has_attention() const;
  // False for a cache without pages, for example a scheduler's: another process of the engine publishes.
  bool publishes() const { return has_pages() || !has_attention(); }
  // The number of blocks of the match's prefix that requests share in place. A conversation's own prefix is not shared.
  uint32_t SharedBlocks(const ashlar::Match& match) const;

  std::shared_ptr<CacheState> open;  // this object; null once the Cache has ended
  const internal::CreatorProcess creator;
  const std::shared_ptr<Client> client;
  ashlar::Model model;
  Region region;  // empty without a memory
  std::vector<PagePlace> places;
  uint32_t page_tokens = 0;
  LayerGroups groups;
  uint32_t tensor_parallel_size = 1;
  bool shares_in_place = false;
  PrefixUse prefixes;
  double epsilon = 0;
  std::string warning;  // non-fatal warning about the options; empty: none
  ComposeBy compose = ComposeBy::kProcess;
  Milliseconds land{0}, quiesce{0};
  Milliseconds patience{0};                   // how long a started call waits for a free thread
  std::unique_ptr<kernels::Workers> workers;  // null: only the calling thread works

  // Ordered by dependence: started work ends first.
  Staging staging;
  Quarantine quarantine;
  Mutex stored_mutex;
  StoredSegments stored ABSL_GUARDED_BY(stored_mutex);
  std::vector<PrefillResult> served ABSL_GUARDED_BY(stored_mutex);  // results that the daemon does not have yet
  // Records the result of work for another engine.
  void Served(PrefillResult result, bool published) {
    result.published = published;
    MutexLock lock(stored_mutex);
    served.push_back(result);
  }
  std::atomic<uint64_t> daemon_advances = 0;  // layers that the daemon has advanced
  // Separate threads for calls that may wait long, so that they do not delay one another. The threads of lookups end
  // before those that a lookup uses.
  Background fills, background, lookups, handoffs, cold_waits, serving;

 private:
  explicit CacheState(std::shared_ptr<Client> its_client) : client(std::move(its_client)), staging(*client) {}
  absl::Status OpenModel(const DescribedModel& described);
  absl::Status CheckSharing(const Memory& memory) const;
  absl::Status TakeMemory(const Memory& memory);
  absl::StatusOr<Region> MakeRegion(const Memory& memory, uint64_t bytes);
  absl::Status CheckStaging();
};

struct JobState {
  std::shared_ptr<CacheState> cache;
  std::shared_ptr<Background::Task> task;  // null: done
  Status result;                           // result of the call; written by the task
  std::unique_ptr<Background> own = {};    // runs the task of a call without a cache
  internal::CreatorProcess creator{};
};

}  // namespace ashlar::engine
