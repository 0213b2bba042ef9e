#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "examples/local_daemon/local_daemon.h"
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

Layout StoreLayout() {
  AttentionLayer attention{.kv_heads = kKvHeads, .key_dim = kHeadDim, .value_dim = kHeadDim, .dtype = DType::kF16};
  return {.page_tokens = kPageTokens, .layers = {attention}};
}

class AshlarStore final : public ValueStore {
 public:
  static absl::StatusOr<std::unique_ptr<ValueStore>> Open(const StoreSizes& sizes, int threads);

  absl::Status Put(const Batch& batch, const std::byte* values) override;
  absl::Status Get(const Batch& batch, uint64_t offset) override;
  std::span<const std::byte> targets() const override { return {region_.data(), ring_bytes_}; }
  pid_t server() const override { return daemon_->pid(); }

 private:
  explicit AshlarStore(uint64_t ring_bytes) : ring_bytes_(ring_bytes) {}
  absl::Status FillCapacity(uint64_t capacity, uint64_t batch_bytes);
  // The pages of `bytes` bytes of the region.
  std::span<const int32_t> Pages(uint64_t offset, uint64_t bytes) const {
    return std::span(pages_).subspan(offset / kPageBytes, bytes / kPageBytes);
  }

  const uint64_t ring_bytes_;
  std::unique_ptr<tools::LocalDaemon> daemon_;
  std::unique_ptr<Client> client_;
  Model model_;
  Region region_;               // targets, and behind them what puts are copied into
  std::vector<int32_t> pages_;  // all of the region's, in order
};

absl::StatusOr<std::unique_ptr<ValueStore>> AshlarStore::Open(const StoreSizes& sizes, int threads) {
  std::unique_ptr<AshlarStore> store(new AshlarStore(sizes.ring_bytes));
  // Room for a ring of the smallest values, which take an extent of four times their size each, and for the batches
  // that come while the oldest are still held.
  const uint64_t capacity = 4 * sizes.ring_bytes + 2 * sizes.batch_bytes + (256u << 20);
  auto daemon = tools::LocalDaemon::Start({.dram_bytes = capacity, .threads = static_cast<uint32_t>(threads)});
  if (!daemon.ok()) return daemon.status();
  store->daemon_ = *std::move(daemon);
  auto client = Client::Connect(store->daemon_->client_options());
  if (!client.ok()) return client.status();
  store->client_ = *std::move(client);
  const Identity identity{.model_id = "bench", .weights_digest = "none", .dtype = "fp16", .tokenizer_digest = "none"};
  auto model = store->client_->OpenModel(identity, StoreLayout());
  if (!model.ok()) return model.status();
  store->model_ = *std::move(model);
  auto region = store->client_->HostRegion(sizes.ring_bytes + sizes.batch_bytes);
  if (!region.ok()) return region.status();
  store->region_ = *std::move(region);
  store->pages_.resize(store->region_.size() / kPageBytes);
  std::iota(store->pages_.begin(), store->pages_.end(), 0);
  const PagedLayer layer{.key_offset = 0,
                         .value_offset = kPageTokens * kRowBytes,
                         .page_stride = kPageBytes,
                         .token_stride = kRowBytes,
                         .key_head_stride = kHeadBytes,
                         .value_head_stride = kHeadBytes};
  const PagedCache paged{
      .page_tokens = kPageTokens, .pages = static_cast<uint32_t>(store->pages_.size()), .layers = {layer}};
  if (absl::Status status = store->model_.DeclarePages(store->region_, paged); !status.ok()) return status;
  if (absl::Status status = store->FillCapacity(capacity, sizes.batch_bytes); !status.ok()) return status;
  return store;
}

// A daemon that has run for a while has all of its memory, and a put evicts.
absl::Status AshlarStore::FillCapacity(uint64_t capacity, uint64_t batch_bytes) {
  Batch filler{.first = kFillerIds, .count = 16, .value_bytes = batch_bytes / 16};
  for (uint64_t filled = 0; filled < capacity; filled += filler.bytes(), filler.first += filler.count) {
    if (absl::Status status = Put(filler, region_.data()); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// Appends the tokens that name a value: one token of its own, repeated. Lengths enter the key.
void AppendTokens(const Batch& batch, size_t i, std::vector<int32_t>& tokens) {
  tokens.insert(tokens.end(), batch.value_bytes / kTokenBytes, static_cast<int32_t>(batch.first + i));
}

absl::Status AshlarStore::Put(const Batch& batch, const std::byte* values) {
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < batch.count; ++i) AppendTokens(batch, i, tokens);
  const size_t length = batch.value_bytes / kTokenBytes;
  std::vector<ObjectRun> runs;
  for (size_t i = 0; i < batch.count; ++i) runs.push_back({.tokens = std::span(tokens).subspan(i * length, length)});
  std::vector<Publication> objects;
  for (const Reservation& reservation : model_.Reserve(runs)) {
    if (!reservation.granted()) {
      return absl::InternalError(absl::StrCat("reserve: ", std::string(Name(reservation.outcome))));
    }
    PublishParts parts;
    parts.region = region_;
    parts.page_table = Pages(ring_bytes_ + objects.size() * batch.value_bytes, batch.value_bytes);
    objects.push_back({reservation, std::move(parts)});
  }
  std::memcpy(region_.data() + ring_bytes_, values, batch.bytes());
  for (PublishOutcome outcome : model_.Publish(objects)) {
    if (outcome != PublishOutcome::kPublished) {
      return absl::InternalError(absl::StrCat("publish: ", std::string(Name(outcome))));
    }
  }
  return absl::OkStatus();
}

absl::Status AshlarStore::Get(const Batch& batch, uint64_t offset) {
  // A first segment of one page that nobody published: values are segments, which stand behind it. Nothing lands there.
  std::vector<int32_t> tokens(kPageTokens, 0);
  std::vector<uint64_t> lengths(1, kPageTokens);
  std::vector<int32_t> page_table(1, -1);
  for (size_t i = 0; i < batch.count; ++i) {
    AppendTokens(batch, i, tokens);
    lengths.push_back(batch.value_bytes / kTokenBytes);
  }
  const std::span<const int32_t> pages = Pages(offset, batch.bytes());
  page_table.insert(page_table.end(), pages.begin(), pages.end());
  auto [match, segments, landing] = model_.LookupAndLand({.tokens = tokens, .segment_lengths = lengths}, page_table);
  if (segments.size() != batch.count) return absl::NotFoundError("get: a value is missing");
  for (MissReason reason : landing.Wait(seconds(30))) {
    if (reason != MissReason::kNone) return absl::NotFoundError(absl::StrCat("get: ", std::string(Name(reason))));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ValueStore>> OpenAshlarStore(const StoreSizes& sizes, int threads) {
  return AshlarStore::Open(sizes, threads);
}

}  // namespace ashlar::bench
