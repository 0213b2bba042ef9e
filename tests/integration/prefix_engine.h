// SPDX-License-Identifier: Apache-2.0
// The test engine on exact prefixes: the keys and values of a token, and the states after it, are made from all tokens
// up to it, so that what is resumed from can only be right.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/integration/test_engine.h"

namespace ashlar::integration {

// Text that an engine has run through its model.
struct Text {
  Tokens tokens;
  std::vector<uint64_t> depths;  // depths with states; ascending, the last is the text's end
  Provenance provenance = Provenance::kExact;
  ConversationId conversation{};
};

class PrefixEngine : public TestEngine {
 public:
  static constexpr uint32_t kCaptures = 4;

  // With memory for `spare` additional sets of states.
  explicit PrefixEngine(const ClientOptions& options, const TensorShard& shard = {},
                        const PrefixUse& prefixes = {.capture_tokens = 1}, uint32_t spare = 0);

  Match Lookup(const Tokens& prompt, const ConversationId& conversation = {}, std::span<const uint64_t> lengths = {});

  // Writes the text's content into the engine's memory, and returns its places. Spans point into `text`.
  CommitParts Compute(const Text& text);
  std::vector<CommitOutcome> Commit(const Text& text, const Match* match = nullptr);

  Landing LandPrefix(const Match& match);
  // Lands the match's prefix of `depth` tokens, and compares all of it with computed values.
  void ExpectResumes(const Match& match, const Tokens& prompt, uint64_t depth);
  // Compares the landed prefix, in slots that were all `around`, and its states.
  void ExpectResumed(const Match& match, const Tokens& prompt, std::byte around);
  void ExpectStates(const Match& match, const Tokens& prompt) const;

  // Returns space in the region for the states of a linear layer.
  float* StatePlace() {
    return reinterpret_cast<float*>(region().data() + reinterpret_cast<uintptr_t>(places(0)[0].state));
  }

  // Returns the place of the spare sets in the region.
  std::byte* SpareMemory() { return region().data() + reinterpret_cast<uintptr_t>(places(kCaptures)[0].state); }

  // The bytes of a token's row of values, and of the first head's state after a text, to search for in memory.
  std::string ValuesAt(const Tokens& text, uint64_t token, uint32_t layer) const;
  std::string StateAfter(const Tokens& text, uint32_t layer) const;

 private:
  // Calls `row(target, form, floats, content)` for keys and values of each of the first `count` tokens.
  template <typename Row>
  void ForRows(std::span<const int32_t> text, uint64_t count, Row row) const;
};

}  // namespace ashlar::integration
