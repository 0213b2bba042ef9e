// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/engine.h"
#include "client/engine/prompt_run.h"
#include "examples/testing/local_daemon.h"
#include "tools/bench/value_store.h"

namespace ashlar::bench {
namespace {

using std::chrono::seconds;

// Keys and values of one attention layer as Qwen3-Next has them, not rotated: a token takes 2 KiB, and a value's pages
// lie one behind the other, so that what is landed is what was stored, byte by byte.
constexpr uint32_t kKvHeads = 2, kHeadDim = 256, kPageTokens = 16;
constexpr uint64_t kHeadBytes = kHeadDim * 2, kRowBytes = kKvHeads * kHeadBytes, kTokenBytes = 2 * kRowBytes;
constexpr uint64_t kPageBytes = kPageTokens * kTokenBytes;
static_assert(kPageBytes == kValueGrain);
constexpr uint64_t kFillerIds = 1u << 30;  // of values that nobody asks for

// Room for a ring of the smallest values, which take an extent of four times their size each, and for the batches that
// come while the oldest are still held.
uint64_t CapacityOf(const StoreSizes& sizes) {
  return 4 * sizes.ring_bytes + 2 * sizes.batch_bytes + (256u << 20);
}

// A daemon, a session with it, and memory of pages: targets, and behind them what puts are copied into.
class AshlarSession {
 public:
  static absl::StatusOr<std::shared_ptr<AshlarSession>> Open(const StoreSizes& sizes, int threads);

  Model& model() { return engine::Access::Of(cache)->model; }
  const Region& region() const { return engine::Access::Of(cache)->region; }
  std::span<const std::byte> targets() const { return {region().data(), ring_bytes}; }
  // The pages of `bytes` bytes of the region.
  std::span<const int32_t> Pages(uint64_t offset, uint64_t bytes) const {
    return std::span(pages).subspan(offset / kPageBytes, bytes / kPageBytes);
  }
  // The pages that the next put's value `i` is copied into.
  std::span<const int32_t> SourcePages(const Batch& batch, size_t i) const {
    return Pages(ring_bytes + i * batch.value_bytes, batch.value_bytes);
  }
  void CopyIn(const Batch& batch, const std::byte* values) {
    std::memcpy(region().data() + ring_bytes, values, batch.bytes());
  }

  uint64_t ring_bytes = 0;
  std::unique_ptr<tools::LocalDaemon> daemon;
  engine::Cache cache;
  std::vector<int32_t> pages;  // all of the region's, in order
  int32_t spare[2] = {};       // the last ones, which hold no values
};

absl::StatusOr<std::shared_ptr<AshlarSession>> AshlarSession::Open(const StoreSizes& sizes, int threads) {
  auto session = std::make_shared<AshlarSession>();
  session->ring_bytes = sizes.ring_bytes;
  auto daemon = tools::LocalDaemon::Start({.dram_bytes = CapacityOf(sizes), .threads = static_cast<uint32_t>(threads)});
  if (!daemon.ok()) return daemon.status();
  session->daemon = *std::move(daemon);
  const uint64_t bytes = sizes.ring_bytes + sizes.batch_bytes + 2 * kPageBytes;
  session->pages.resize(bytes / kPageBytes);
  std::iota(session->pages.begin(), session->pages.end(), 0);
  std::copy_n(session->pages.end() - 2, 2, session->spare);
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
  options.rpc_socket = session->daemon->client_options().rpc_socket.c_str();
  options.session_socket = session->daemon->client_options().session_socket.c_str();
  options.model = {.model_id = "bench",
                   .weights_digest = "none",
                   .dtype = "fp16",
                   .tokenizer_digest = "none",
                   .page_tokens = kPageTokens,
                   .layers = &layer,
                   .layer_count = 1};
  options.land_ms = 30'000;
  options.memory = {.kind = engine::MemoryKind::kHosted,
                    .pages = static_cast<uint32_t>(session->pages.size()),
                    .places = &place,
                    .place_count = 1,
                    .bytes = bytes};
  const engine::Status opened = engine::Cache::Open(options, &session->cache);
  if (!opened.ok()) return absl::InternalError(opened.message);
  return session;
}

// Appends the tokens that name a value: one token of its own, repeated. Lengths enter the key.
void AppendTokens(const Batch& batch, size_t i, std::vector<int32_t>& tokens) {
  tokens.insert(tokens.end(), batch.value_bytes / kTokenBytes, static_cast<int32_t>(batch.first + i));
}

// By the calls of client/session.
class ClientStore final : public ValueStore {
 public:
  explicit ClientStore(std::shared_ptr<AshlarSession> session) : session_(std::move(session)) {}

  absl::Status Put(const Batch& batch, const std::byte* values) override;
  absl::Status Get(const Batch& batch, uint64_t offset) override;
  std::span<const std::byte> targets() const override { return session_->targets(); }
  pid_t server() const override { return session_->daemon->pid(); }

 private:
  std::shared_ptr<AshlarSession> session_;
};

absl::Status ClientStore::Put(const Batch& batch, const std::byte* values) {
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < batch.count; ++i) AppendTokens(batch, i, tokens);
  const size_t length = batch.value_bytes / kTokenBytes;
  std::vector<ObjectRun> runs;
  for (size_t i = 0; i < batch.count; ++i) runs.push_back({.tokens = std::span(tokens).subspan(i * length, length)});
  std::vector<Publication> objects;
  for (const Reservation& reservation : session_->model().Reserve(runs)) {
    if (!reservation.granted()) {
      return absl::InternalError(absl::StrCat("reserve: ", std::string(Name(reservation.outcome))));
    }
    PublishParts parts;
    parts.region = session_->region();
    parts.page_table = session_->SourcePages(batch, objects.size());
    objects.push_back({reservation, std::move(parts)});
  }
  session_->CopyIn(batch, values);
  for (PublishOutcome outcome : session_->model().Publish(objects)) {
    if (outcome != PublishOutcome::kPublished) {
      return absl::InternalError(absl::StrCat("publish: ", std::string(Name(outcome))));
    }
  }
  return absl::OkStatus();
}

absl::Status ClientStore::Get(const Batch& batch, uint64_t offset) {
  // A first segment of one page that nobody published: values are segments, which stand behind it. Nothing lands there.
  std::vector<int32_t> tokens(kPageTokens, 0);
  std::vector<uint64_t> lengths(1, kPageTokens);
  std::vector<int32_t> page_table(1, -1);
  for (size_t i = 0; i < batch.count; ++i) {
    AppendTokens(batch, i, tokens);
    lengths.push_back(batch.value_bytes / kTokenBytes);
  }
  const std::span<const int32_t> pages = session_->Pages(offset, batch.bytes());
  page_table.insert(page_table.end(), pages.begin(), pages.end());
  auto [match, segments, landing] =
      session_->model().LookupAndLand({.tokens = tokens, .segment_lengths = lengths}, page_table);
  if (segments.size() != batch.count) return absl::NotFoundError("get: a value is missing");
  for (MissReason reason : landing.Wait(seconds(30))) {
    if (reason != MissReason::kNone) return absl::NotFoundError(absl::StrCat("get: ", std::string(Name(reason))));
  }
  return absl::OkStatus();
}

// By ashlar/engine.h: a put looks nothing up (store_only), and reserves what is not there. The first segment of all
// prompts is published by the first put; it lands in a spare page.
class EngineStore final : public ValueStore {
 public:
  explicit EngineStore(std::shared_ptr<AshlarSession> session) : session_(std::move(session)) {}

  absl::Status Put(const Batch& batch, const std::byte* values) override;
  absl::Status Get(const Batch& batch, uint64_t offset) override;
  std::span<const std::byte> targets() const override { return session_->targets(); }
  pid_t server() const override { return session_->daemon->pid(); }

 private:
  absl::Status Begin(const Batch& batch, bool fill, std::span<const int32_t> page_table, engine::Request& request);

  std::shared_ptr<AshlarSession> session_;
  std::vector<int32_t> tokens_;
};

absl::Status EngineStore::Begin(const Batch& batch, bool fill, std::span<const int32_t> page_table,
                                engine::Request& request) {
  tokens_.assign(kPageTokens, 1);
  std::vector<uint64_t> lengths(1, kPageTokens);
  for (size_t i = 0; i < batch.count; ++i) {
    AppendTokens(batch, i, tokens_);
    lengths.push_back(batch.value_bytes / kTokenBytes);
  }
  tokens_.push_back(0);  // computed in any case
  engine::Prompt prompt = {tokens_.data(), tokens_.size(),    lengths.data(),
                           lengths.size(), page_table.data(), page_table.size()};
  prompt.fill = prompt.store_only = fill;
  const engine::Status begun = session_->cache.Begin(&prompt, 1, &request);
  return begun.ok() ? absl::OkStatus() : absl::InternalError(absl::StrCat("Begin: ", begun.message));
}

absl::Status EngineStore::Put(const Batch& batch, const std::byte* values) {
  engine::Request request;
  if (absl::Status status = Begin(batch, /*fill=*/true, {}, request); !status.ok()) return status;
  uint32_t count = 0;
  const engine::Run* const runs = request.missing(&count);
  if (count < batch.count) return absl::InternalError("Begin: a value was there already");
  std::vector<uint32_t> missing(count);
  std::iota(missing.begin(), missing.end(), 0);
  std::vector<engine::ComputedRun> computed;
  for (uint32_t i = 0; i < count; ++i) {
    const std::span<const int32_t> pages = runs[i].segment == 0 ? std::span<const int32_t>(session_->spare, 1)
                                                                : session_->SourcePages(batch, runs[i].segment - 1);
    computed.push_back({.page_table = pages.data(), .page_count = pages.size()});
  }
  session_->CopyIn(batch, values);
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

absl::Status EngineStore::Get(const Batch& batch, uint64_t offset) {
  const std::span<const int32_t> pages = session_->Pages(offset, batch.bytes());
  std::vector<int32_t> page_table(1, session_->spare[0]);
  page_table.insert(page_table.end(), pages.begin(), pages.end());
  page_table.push_back(session_->spare[1]);
  engine::Request request;
  if (absl::Status status = Begin(batch, /*fill=*/false, page_table, request); !status.ok()) return status;
  for (size_t i = 1; i <= batch.count; ++i) {
    if (!request.plan().segments[i].used) return absl::NotFoundError("get: a value is missing");
  }
  const engine::Status status = request.Finish();
  return status.ok() ? absl::OkStatus() : absl::NotFoundError(absl::StrCat("Finish: ", status.message));
}

}  // namespace

absl::StatusOr<AshlarStores> OpenAshlarStores(const StoreSizes& sizes, int threads) {
  auto session = AshlarSession::Open(sizes, threads);
  if (!session.ok()) return session.status();
  AshlarStores stores{std::make_unique<ClientStore>(*session), std::make_unique<EngineStore>(*session)};
  // A daemon that has run for a while has all of its memory, and a put evicts.
  Batch filler{.first = kFillerIds, .count = 16, .value_bytes = sizes.batch_bytes / 16};
  for (uint64_t filled = 0; filled < CapacityOf(sizes); filled += filler.bytes(), filler.first += filler.count) {
    if (absl::Status status = stores.by_client->Put(filler, stores.by_client->targets().data()); !status.ok()) {
      return status;
    }
  }
  return stores;
}

}  // namespace ashlar::bench
