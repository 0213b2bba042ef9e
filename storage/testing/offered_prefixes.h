// SPDX-License-Identifier: Apache-2.0
// OfferedPrefixes: the texts that engines have offered. A lookup may find nothing else.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "proto/prefix.h"
#include "storage/lookup/match.h"
#include "storage/prefix/prefixes.h"
#include "storage/testing/tokens.h"

namespace ashlar::storage {

// Prefixes with states, and spans with their begins.
struct OfferedTexts {
  std::set<Tokens> states;
  std::set<std::pair<Tokens, uint64_t>> spans;

  // Returns whether a prompt may resume from the prefix: from states, or by a span of its last `span_tokens` tokens.
  bool Has(const Tokens& prefix, uint64_t span_tokens) const {
    if (span_tokens == 0) return states.contains(prefix);
    return std::ranges::any_of(spans, [&](const auto& span) {
      const auto& [text, begin] = span;
      return begin == prefix.size() - span_tokens && text.size() >= prefix.size() &&
             std::equal(prefix.begin(), prefix.end(), text.begin());
    });
  }
};

// Prefixes of one tenant.
struct OfferedPrefixes {
  OfferedTexts exact;
  std::map<ConversationId, OfferedTexts> own;

  // An exact text that the namespace does not keep may be kept for its conversation.
  void Add(const PrefixCommit& commit) {
    const bool is_exact = commit.provenance == Provenance::kExact;
    const ConversationId& conversation = commit.text.conversation();
    const Tokens text(commit.text.tokens().begin(), commit.text.tokens().end());
    const auto add = [&](OfferedTexts& offered) {
      for (const PrefixCommit::Checkpoint& checkpoint : commit.checkpoints) {
        offered.states.emplace(text.begin(), text.begin() + static_cast<ptrdiff_t>(checkpoint.depth));
      }
      if (commit.span) offered.spans.emplace(text, commit.span->begin);
    };
    if (is_exact) add(exact);
    if (conversation != ConversationId{}) add(own[conversation]);
  }

  // Returns whether a prompt of this conversation may resume in this way.
  bool Has(const MatchedPrefix& found, const Tokens& prompt, const ConversationId& conversation) const {
    const Tokens prefix(prompt.begin(), prompt.begin() + static_cast<ptrdiff_t>(found.depth));
    if (found.provenance == Provenance::kExact) return exact.Has(prefix, found.span_tokens);
    const auto texts = own.find(conversation);
    return found.own && texts != own.end() && texts->second.Has(prefix, found.span_tokens);
  }
};

}  // namespace ashlar::storage
