// BlockTexts: the tokens of prefixes' blocks, which the cache itself does not keep, for those who are told of blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "proto/key.h"
#include "proto/prefix.h"

namespace ashlar::daemon {

struct BlockText {
  std::optional<Key> before;  // the block before it; none: it begins the text
  std::vector<int32_t> tokens;
};

// The latest blocks of texts that engines committed, within a bound. Thread-safe.
class BlockTexts {
 public:
  explicit BlockTexts(size_t most_tokens = size_t{8} << 20) : most_tokens_(most_tokens) {}

  void Note(const PrefixKeys& keys);
  std::optional<BlockText> Find(const Key& block) const;

 private:
  struct Known {
    Key key;
    BlockText text;
  };
  const size_t most_tokens_;
  mutable std::mutex mutex_;
  std::list<Known> order_;  // guarded by mutex_, as below; the latest last
  absl::flat_hash_map<Key, std::list<Known>::iterator> known_;
  size_t tokens_ = 0;
};

}  // namespace ashlar::daemon
