// SPDX-License-Identifier: Apache-2.0
// PageStore: pages of bytes under keys that the caller makes, stored as objects of the cache. For engines that hash
// prefixes themselves and pass no tokens (SGLang's HiCache): the key is converted to a text of eight tokens,
// followed by zeros up to the number of tokens that the page stands for.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/engine/quarantine.h"
#include "client/session/client.h"

namespace ashlar::python {

// The shape that a page's bytes have in a layout: `tokens` tokens of `layers` attention layers, whose keys and values
// are rows of heads × dim bytes each, not rotated and without seams. A token's rows are consecutive.
struct PageShape {
  uint32_t tokens = 0, layers = 0, heads = 0, dim = 0;
  uint64_t row_bytes() const { return uint64_t{heads} * dim; }
  uint64_t token_bytes() const { return 2 * layers * row_bytes(); }
  uint64_t slot_bytes() const { return tokens * token_bytes(); }  // the page and its padding
};
// The shape with at most a sixteenth of padding, or the least possible padding.
PageShape ShapePage(uint64_t page_bytes, uint32_t page_tokens);

// 256 bits that name a page. Use a hash, so that no two pages have the same name.
using PageKey = Digest;

// Thread-safe, but no slot may be in two calls at once. Every call returns within the client's timeout; Get may take
// `land` in addition. A cache failure is a miss.
class PageStore {
 public:
  struct Options {
    Identity identity;
    uint64_t page_bytes = 0;
    uint32_t page_tokens = 0;      // tokens per page, at least 8; for the break-even check
    double tokens_per_second = 0;  // prefill speed; 0: unknown
    double flops_per_token = 0;    // FLOPs that a hit saves per token, for eviction; 0: estimated from the page's bytes
    uint32_t slots = 0;            // pages of memory shared with the daemon
    std::chrono::milliseconds land{5000};
  };

  // Errors name the field, or the reason why the memory cannot be allocated.
  static absl::StatusOr<std::unique_ptr<PageStore>> Open(std::shared_ptr<Client> client, const Options& options);

  std::byte* slot(uint32_t index) const { return region_.data() + index * shape_.slot_bytes(); }
  uint32_t slots() const { return slots_; }
  const Region& region() const { return region_; }
  const PageShape& shape() const { return shape_; }
  bool connected() const { return client_->connected(); }

  std::vector<bool> Exists(std::span<const PageKey> keys);

  // At most one engine stores a page. Only granted reservations may be published, and each must be published or
  // abandoned.
  std::vector<Reservation> Reserve(std::span<const PageKey> keys);
  std::vector<PublishOutcome> Publish(std::span<const Reservation> reservations, std::span<const uint32_t> slots);
  void Abandon(std::span<const Reservation> reservations) { model_.Abandon(reservations); }

  // kNone: the page is in its slot. If `quiesced` is false, the store owns the slot until TakeQuiesced returns it.
  struct Landed {
    MissReason reason = MissReason::kNone;
    bool quiesced = true;
    TierKind tier = TierKind::kNone;  // the tier of the hit
  };
  std::vector<Landed> Get(std::span<const PageKey> keys, std::span<const uint32_t> slots);
  std::vector<int32_t> TakeQuiesced(uint32_t most);

 private:
  PageStore(std::shared_ptr<Client> client, Model model, Region region, const Options& options);
  std::vector<int32_t> TokensOf(const PageKey& key) const;
  std::vector<Match> Lookup(std::span<const PageKey> keys);

  const std::shared_ptr<Client> client_;
  const PageShape shape_;
  const uint32_t slots_;
  const std::chrono::milliseconds land_;
  Region region_;
  Model model_;
  engine::Quarantine unresolved_;  // destroyed first, and waits
};

}  // namespace ashlar::python
