// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/engine.h"
#include "examples/testing/local_daemon.h"
#include "proto/outcome.h"
#include "tools/bench/value_store.h"

namespace ashlar::bench {
namespace {

// Keys and values of one attention layer like Qwen3-Next's, not rotated: a token takes 2 KiB, and a value's pages are
// consecutive, so that the landed bytes equal the stored ones.
constexpr uint32_t kKvHeads = 2, kHeadDim = 256, kPageTokens = 16;
constexpr uint64_t kHeadBytes = kHeadDim * 2, kRowBytes = kKvHeads * kHeadBytes, kTokenBytes = 2 * kRowBytes;
constexpr uint64_t kPageBytes = kPageTokens * kTokenBytes;
static_assert(kPageBytes == kValueGrain);
constexpr uint64_t kFillerIds = 1u << 30;  // numbers of values that are never requested

// Space for a ring of the smallest values, each of which takes an extent of four times its size, and for the batches
// that arrive while the oldest are still held.
uint64_t CapacityOf(const StoreSizes& sizes) {
  return 4 * sizes.ring_bytes + 2 * sizes.batch_bytes + (256u << 20);
}

// A daemon, and a cache of it whose memory holds the targets, followed by the space into which puts are copied. A put
// does not look up (store_only), and reserves what is missing. The first put publishes the first segment of all
// prompts, which lands in a spare page.
class AshlarStore final : public ValueStore {
 public:
  static absl::StatusOr<std::unique_ptr<AshlarStore>> Open(const StoreSizes& sizes, int threads);

  absl::Status Put(const Batch& batch, const std::byte* values) override;
  absl::Status Get(const Batch& batch, uint64_t offset) override;
  std::span<const std::byte> targets() const override { return {memory(), ring_bytes_}; }
  pid_t server() const override { return daemon_->pid(); }

 private:
  AshlarStore(const StoreSizes& sizes, std::unique_ptr<tools::LocalDaemon> daemon);

  std::byte* memory() const { return reinterpret_cast<std::byte*>(cache_.data()); }
  // The pages of `bytes` bytes of the memory.
  std::span<const int32_t> Pages(uint64_t offset, uint64_t bytes) const {
    return std::span(pages_).subspan(offset / kPageBytes, bytes / kPageBytes);
  }
  // The pages that the next put's value `i` is copied into.
  std::span<const int32_t> SourcePages(const Batch& batch, size_t i) const {
    return Pages(ring_bytes_ + i * batch.value_bytes, batch.value_bytes);
  }
  engine::Status OpenCache();
  absl::Status Begin(const Batch& batch, bool fill, std::span<const int32_t> page_table, engine::Request& request);

  const uint64_t ring_bytes_;
  const std::unique_ptr<tools::LocalDaemon> daemon_;
  engine::Cache cache_;
  std::vector<int32_t> pages_;  // all pages of the memory, in order
  int32_t spare_[2] = {};       // the last pages, which hold no values
  std::vector<int32_t> tokens_;
};

AshlarStore::AshlarStore(const StoreSizes& sizes, std::unique_ptr<tools::LocalDaemon> daemon)
    : ring_bytes_(sizes.ring_bytes), daemon_(std::move(daemon)) {
  pages_.resize((sizes.ring_bytes + sizes.batch_bytes) / kPageBytes + 2);
  std::iota(pages_.begin(), pages_.end(), 0);
  std::copy_n(pages_.end() - 2, 2, spare_);
}

absl::StatusOr<std::unique_ptr<AshlarStore>> AshlarStore::Open(const StoreSizes& sizes, int threads) {
  auto daemon = tools::LocalDaemon::Start({.dram_bytes = CapacityOf(sizes), .threads = static_cast<uint32_t>(threads)});
  if (!daemon.ok()) return daemon.status();
  std::unique_ptr<AshlarStore> store(new AshlarStore(sizes, *std::move(daemon)));
  if (const engine::Status opened = store->OpenCache(); !opened.ok()) return absl::InternalError(opened.message);
  return store;
}

engine::Status AshlarStore::OpenCache() {
  const engine::PagePlace place = {.value_offset = kPageTokens * kRowBytes,
                                   .page_stride = kPageBytes,
                                   .token_stride = kRowBytes,
                                   .key_head_stride = kHeadBytes,
                                   .value_head_stride = kHeadBytes};
  const engine::Layer layer{.kind = engine::LayerKind::kGqa,
                            .kv_heads = kKvHeads,
                            .key_dim = kHeadDim,
                            .value_dim = kHeadDim,
                            .dtype = DType::kF16};
  engine::OpenOptions options;
  options.rpc_socket = daemon_->sockets().rpc_socket.c_str();
  options.session_socket = daemon_->sockets().session_socket.c_str();
  options.model = {.model_id = "bench",
                   .weights_digest = "none",
                   .dtype = "fp16",
                   .tokenizer_digest = "none",
                   .page_tokens = kPageTokens,
                   .layers = &layer,
                   .layer_count = 1};
  options.land_ms = 30'000;
  options.memory = {.kind = engine::MemoryKind::kHosted,
                    .pages = static_cast<uint32_t>(pages_.size()),
                    .places = &place,
                    .place_count = 1,
                    .bytes = pages_.size() * kPageBytes};
  return engine::Cache::Open(options, &cache_);
}

// Appends the tokens that name a value: one unique token, repeated. Lengths are part of the key.
void AppendTokens(const Batch& batch, size_t i, std::vector<int32_t>& tokens) {
  tokens.insert(tokens.end(), batch.value_bytes / kTokenBytes, static_cast<int32_t>(batch.first + i));
}

absl::Status AshlarStore::Begin(const Batch& batch, bool fill, std::span<const int32_t> page_table,
                                engine::Request& request) {
  tokens_.assign(kPageTokens, 1);
  std::vector<uint64_t> lengths(1, kPageTokens);
  for (size_t i = 0; i < batch.count; ++i) {
    AppendTokens(batch, i, tokens_);
    lengths.push_back(batch.value_bytes / kTokenBytes);
  }
  tokens_.push_back(0);  // the last token is computed in any case
  engine::Prompt prompt = {tokens_.data(), tokens_.size(),    lengths.data(),
                           lengths.size(), page_table.data(), page_table.size()};
  prompt.fill = prompt.store_only = fill;
  const engine::Status begun = cache_.Begin(&prompt, 1, &request);
  return begun.ok() ? absl::OkStatus() : absl::InternalError(absl::StrCat("Begin: ", begun.message));
}

absl::Status AshlarStore::Put(const Batch& batch, const std::byte* values) {
  engine::Request request;
  if (absl::Status status = Begin(batch, /*fill=*/true, {}, request); !status.ok()) return status;
  uint32_t count = 0;
  const engine::Run* const runs = request.missing(&count);
  if (count < batch.count) return absl::InternalError("Begin: a value was already cached");
  std::vector<uint32_t> missing(count);
  std::iota(missing.begin(), missing.end(), 0);
  std::vector<engine::ComputedRun> computed;
  for (uint32_t i = 0; i < count; ++i) {
    const std::span<const int32_t> pages =
        runs[i].segment == 0 ? std::span<const int32_t>(spare_, 1) : SourcePages(batch, runs[i].segment - 1);
    computed.push_back({.page_table = pages.data(), .page_count = pages.size()});
  }
  std::memcpy(memory() + ring_bytes_, values, batch.bytes());
  std::vector<uint8_t> outcomes(count);
  const engine::Status status = request.Publish(missing.data(), computed.data(), count, outcomes.data());
  if (!status.ok()) return absl::InternalError(absl::StrCat("Publish: ", status.message));
  for (const uint8_t outcome : outcomes) {
    if (outcome != static_cast<uint8_t>(PublishOutcome::kPublished)) {
      return absl::InternalError(absl::StrCat("Publish: ", engine::PublishName(outcome)));
    }
  }
  return absl::OkStatus();
}

absl::Status AshlarStore::Get(const Batch& batch, uint64_t offset) {
  const std::span<const int32_t> pages = Pages(offset, batch.bytes());
  std::vector<int32_t> page_table(1, spare_[0]);
  page_table.insert(page_table.end(), pages.begin(), pages.end());
  page_table.push_back(spare_[1]);
  engine::Request request;
  if (absl::Status status = Begin(batch, /*fill=*/false, page_table, request); !status.ok()) return status;
  for (size_t i = 1; i <= batch.count; ++i) {
    if (!request.plan().segments[i].used) return absl::NotFoundError("get: a value is missing");
  }
  const engine::Status status = request.Finish();
  return status.ok() ? absl::OkStatus() : absl::NotFoundError(absl::StrCat("Finish: ", status.message));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ValueStore>> OpenAshlarStore(const StoreSizes& sizes, int threads) {
  auto store = AshlarStore::Open(sizes, threads);
  if (!store.ok()) return store.status();
  // A daemon that has run for a while has allocated all of its memory, and a put evicts.
  Batch filler{.first = kFillerIds, .count = 16, .value_bytes = sizes.batch_bytes / 16};
  for (uint64_t filled = 0; filled < CapacityOf(sizes); filled += filler.bytes(), filler.first += filler.count) {
    if (absl::Status status = (*store)->Put(filler, (*store)->targets().data()); !status.ok()) {
      return status;
    }
  }
  return *std::move(store);
}

}  // namespace ashlar::bench
