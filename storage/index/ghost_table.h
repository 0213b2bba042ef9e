// Remembers objects that are gone, and why: the memory behind every reason of a miss.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"
#include "proto/key.h"
#include "proto/outcome.h"
#include "storage/executor.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// The last thing that happened to an object that no tier holds: it was evicted, dropped, declined, or never published
// after it had been reserved.
struct Ghost {
  MissReason reason = MissReason::kNeverSeen;
  PolicyKind policy = PolicyKind::kNone;  // by whose decision
  TierKind tier = TierKind::kNone;        // that held it last; none: no tier ever did
  uint32_t uses = 0;                      // look-ups that found it
  uint64_t bytes = 0;                     // of the object; of its plan where it was never published
  Nanos gone_at = 0;                      // when that happened, on the injected clock
  Nanos lived = 0;                        // from its publication until then; 0: never published
  Nanos idle = 0;                         // from its last use, or its publication, until then
};

// Keyed by tenant and key. Every call is O(1). Each tenant has a memory of its own, of a bounded number of ghosts with
// the oldest going first: one tenant's churn neither displaces what another one may ask for nor shows through.
class GhostTable {
 public:
  static constexpr size_t kDefaultGhosts = 1 << 16;

  explicit GhostTable(size_t ghosts_per_tenant = kDefaultGhosts) : max_ghosts_(ghosts_per_tenant) {}

  // Replaces what was remembered of this key; from now on it is the youngest.
  void Remember(TenantId tenant, const Key& key, const Ghost& ghost);
  // Null: nothing is remembered. Valid until the next Remember or Forget.
  const Ghost* Find(TenantId tenant, const Key& key) const;
  // The object is there again. Harmless for a key that is not remembered.
  void Forget(TenantId tenant, const Key& key);

  size_t size(TenantId tenant) const;

 private:
  using Place = uint32_t;  // of a node; kNowhere: of none
  static constexpr Place kNowhere = ~Place{0};

  struct Node {
    Key key;
    Ghost ghost;
    Place older = kNowhere;  // of a free node: the next free one
    Place younger = kNowhere;
  };

  // The index holds places and looks through them at the nodes' keys, so that a key is stored once.
  struct KeyOf {
    const std::vector<Node>* nodes;
    const Key& operator()(Place place) const { return (*nodes)[place].key; }
    const Key& operator()(const Key& key) const { return key; }
  };
  struct Hash : KeyOf {
    using is_transparent = void;
    size_t operator()(const auto& of) const { return absl::Hash<Key>()(KeyOf::operator()(of)); }
  };
  struct Equal : KeyOf {
    using is_transparent = void;
    bool operator()(const auto& a, const auto& b) const { return KeyOf::operator()(a) == KeyOf::operator()(b); }
  };

  // One tenant's ghosts: nodes linked by age. Nodes are made once and used again.
  class Memory {
   public:
    explicit Memory(size_t max_ghosts);
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    void Remember(const Key& key, const Ghost& ghost);
    const Ghost* Find(const Key& key) const;
    void Forget(const Key& key);
    size_t size() const { return index_.size(); }

   private:
    Place TakeNode();
    void Unlink(Place place);

    const size_t max_ghosts_;
    std::vector<Node> nodes_;
    absl::flat_hash_set<Place, Hash, Equal> index_;
    Place oldest_ = kNowhere;
    Place youngest_ = kNowhere;
    Place free_ = kNowhere;
  };

  // Nodes are reserved once. A flat_hash_set doubles at 25/32 of a load of 7/8: three slots, a place and a control byte
  // each, for every entry at most, and half as many again while it grows.
  static constexpr size_t kBytesPerGhost = sizeof(Node) + (sizeof(Place) + 1) * 9 / 2 + 1;
  static_assert(kDefaultGhosts * kBytesPerGhost <= 7 << 20, "what one tenant's ghosts take at most: 7 MiB");

  const size_t max_ghosts_;
  std::map<TenantId, Memory> memories_;
};

}  // namespace ashlar::storage
