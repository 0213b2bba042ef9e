// SPDX-License-Identifier: Apache-2.0
// Conversations: the states that each conversation keeps for its next turn.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "proto/key.h"
#include "proto/prefix.h"
#include "storage/history/bounded_table.h"
#include "storage/ids.h"
#include "storage/objects/object_table.h"
#include "storage/prefix/prefix_text.h"

namespace ashlar::storage {

class Conversations {
 public:
  // A state, or a span.
  struct Mark {
    uint64_t depth = 0;  // 0: none
    Key key;             // key of the checkpoint or the span
    // For a span: the checkpoint before it and its tokens, for prompts that share only some of them.
    uint64_t span_begin = 0;
    Key base;
    std::vector<int32_t> tokens;
    uint64_t checkpoint() const { return span_begin > 0 ? span_begin : depth; }
    const Key& checkpoint_key() const { return span_begin > 0 ? base : key; }
  };
  struct States {
    Mark last, before;  // the earlier one is used when the last turn is repeated
    Mark saved;         // the latest earlier one on the disk, if writes are deferred
  };

  explicit Conversations(ObjectTable& table) : table_(table) {}
  Conversations(const Conversations&) = delete;
  Conversations& operator=(const Conversations&) = delete;

  // Returns the states of the text's conversation; null without a conversation, or if it is unknown. Valid until the
  // next change.
  const States* Find(TenantId tenant, const PrefixText& text) const;
  // Returns the depths of its checkpoints before the end of the text, the latest one first.
  std::vector<uint64_t> Checkpoints(TenantId tenant, const PrefixText& text) const;
  // Remembers the state at `depth`, or with `span_begin` the span from there, and ends the objects of states that the
  // conversation no longer keeps. Returns false if it was known.
  bool Remember(TenantId tenant, const PrefixText& text, uint64_t depth, uint64_t span_begin = 0);
  // Erases the conversations of a tenant, or of one of its namespaces. Keeps their objects.
  void Erase(TenantId tenant, const NamespaceId* ns);

 private:
  static constexpr size_t kConversations = 1 << 16;  // per tenant; beyond that, the oldest one is dropped

  struct Name {
    NamespaceId ns;
    ConversationId id{};
    bool operator==(const Name&) const = default;
    template <typename H>
    friend H AbslHashValue(H state, const Name& name) {
      return H::combine(std::move(state), name.ns, name.id);
    }
  };
  using Table = BoundedTable<Name, States>;

  ObjectTable& table_;
  std::map<TenantId, std::unique_ptr<Table>> tables_;
};

}  // namespace ashlar::storage
