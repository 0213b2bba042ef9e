// SPDX-License-Identifier: Apache-2.0
// The prompts of all simulations, with all states, keys and values that engines compute of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "storage/testing/prefix_engine.h"
#include "storage/testing/tokens.h"

namespace ashlar::simulation {

inline constexpr uint64_t kSpanTokens = 128;  // limit of the span from which engines rebuild

// A few long texts of one tenant that share prefixes; a prompt is a prefix of one of them, possibly with another token
// after it. Their numbers are computed once per process and never change, because computing them for every commit would
// take longer than the rest of a simulation.
class Prompts {
 public:
  static const Prompts& Of(storage::TenantId tenant);

  size_t size() const { return texts_.size(); }
  const storage::Tokens& tokens(size_t text) const { return texts_[text].tokens; }
  // Returns the depths at which its engine has states, rising; the last one is the text's end.
  const std::vector<uint64_t>& depths(size_t text) const { return texts_[text].depths; }

  // A prompt as requested by an engine that can, or cannot, rebuild states from spans.
  storage::PrefixText Ask(storage::Tokens tokens, const ConversationId& conversation, bool rebuilds) const;

  // The first `end` tokens of a text.
  struct Offer {
    size_t text = 0;
    uint64_t end = 0;
    std::vector<uint64_t> inside;  // depths of states before the end, rising; as the end, among its depths
    uint64_t span_begin = 0;       // among them; 0: no span
    ConversationId conversation{};
    // The simulator's deliberate faults: the states are the next text's, the span begins a token later.
    bool others_states = false, shifts_span = false;
  };
  storage::PrefixCommit Commit(const Offer& offer, bool rebuilds) const;

  // Returns whether the landed rows of a prompt's first tokens equal the computed ones bit by bit.
  bool RowsAre(const storage::TestPages& pages, const storage::Tokens& prompt, uint64_t tokens) const;
  // The same for a match's checkpoint in place, and for the matched part of its span.
  bool TensorsAre(const storage::Tier& top, const storage::Match& match, const storage::Tokens& prompt) const;

 private:
  using States = std::vector<storage::PublishSource::Tensor>;
  struct Text {
    storage::Tokens tokens;
    std::vector<uint64_t> depths;
    States span;  // states of everything after the first token
    std::vector<storage::PagedRows> rows;
    std::shared_ptr<const std::vector<int32_t>> page_table;
    std::shared_ptr<const void> keep;
  };

  explicit Prompts(storage::TenantId tenant);
  void Add(storage::Tokens tokens);
  const Text& Beginning(std::span<const int32_t> tokens) const;  // a text that begins so

  const storage::TenantId tenant_;
  const storage::PrefixEngine rebuilding_, plain_;
  std::vector<Text> texts_;
  std::map<storage::Tokens, States> states_;                       // keyed by prefix
  std::map<PartForm, std::map<uint32_t, size_t>> span_row_bytes_;  // keyed by layer: size of one token
};

}  // namespace ashlar::simulation
