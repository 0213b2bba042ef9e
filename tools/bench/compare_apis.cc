// SPDX-License-Identifier: Apache-2.0
// `ashlar-bench land`, last table: the time of ashlar/engine.h beside that of the calls below it. Both make their calls
// in turn, in one session and on the same pages. A value is a segment of one attention layer, as `ashlar-bench store`
// has it.
#include "tools/bench/compare_apis.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/engine/expert.h"

namespace ashlar::bench {
namespace {

constexpr uint32_t kKvHeads = 2, kHeadDim = 256, kPageTokens = 16;
constexpr uint64_t kHeadBytes = kHeadDim * 2, kRowBytes = kKvHeads * kHeadBytes, kTokenBytes = 2 * kRowBytes;
constexpr uint64_t kPageBytes = kPageTokens * kTokenBytes;
constexpr uint64_t kLargest = uint64_t{16} << 20;

struct Batch {
  uint64_t value_bytes;
  uint32_t count;
  uint64_t bytes() const { return value_bytes * count; }
};
constexpr Batch kBatches[] = {{64 << 10, 1}, {1 << 20, 1}, {16 << 20, 1}, {64 << 10, 16}, {1 << 20, 16}};

absl::Status ToStatus(const char* call, const engine::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(call, ": ", static_cast<int>(status.code), " ", status.message));
}

// A page's first segment that is always there, then values, then a token that is computed in any case.
struct Prompted {
  std::vector<int32_t> tokens;
  std::vector<uint64_t> lengths;
};
Prompted PromptOf(const Batch& batch, int32_t first) {
  Prompted prompt{.tokens = std::vector<int32_t>(kPageTokens, 1), .lengths = {kPageTokens}};
  for (uint32_t i = 0; i < batch.count; ++i) {
    prompt.lengths.push_back(batch.value_bytes / kTokenBytes);
    prompt.tokens.insert(prompt.tokens.end(), prompt.lengths.back(), first + static_cast<int32_t>(i));
  }
  prompt.tokens.push_back(0);
  return prompt;
}

class BothApis {
 public:
  static absl::StatusOr<std::unique_ptr<BothApis>> Open(Client& client);

  absl::Status PutByClient(const Prompted& prompt);
  absl::Status PutByEngine(const Prompted& prompt);
  absl::Status GetByClient(const Prompted& prompt);
  absl::Status GetByEngine(const Prompted& prompt);

 private:
  Region region_;
  engine::Cache cache_;
  Model* model_ = nullptr;  // the cache's
  std::vector<int32_t> pages_;
};

absl::StatusOr<std::unique_ptr<BothApis>> BothApis::Open(Client& client) {
  auto both = std::make_unique<BothApis>();
  const uint64_t pages = kLargest / kPageBytes + 2;
  auto region = client.HostRegion(pages * kPageBytes);
  if (!region.ok()) return region.status();
  both->region_ = *std::move(region);
  std::fill(both->region_.data(), both->region_.data() + both->region_.size(), std::byte{1});
  both->pages_.resize(pages);
  std::iota(both->pages_.begin(), both->pages_.end(), 0);
  AttentionLayer attention{.kv_heads = kKvHeads, .key_dim = kHeadDim, .value_dim = kHeadDim, .dtype = DType::kF16};
  const engine::PagePlace place = {.value_offset = kPageTokens * kRowBytes,
                                   .page_stride = kPageBytes,
                                   .token_stride = kRowBytes,
                                   .key_head_stride = kHeadBytes,
                                   .value_head_stride = kHeadBytes};
  engine::OpenOptions options;
  options.memory = {.kind = engine::MemoryKind::kHosted,
                    .pages = static_cast<uint32_t>(pages),
                    .places = &place,
                    .place_count = 1,
                    .bytes = both->region_.size()};
  const Identity identity{.model_id = "both", .weights_digest = "none", .dtype = "fp16", .tokenizer_digest = "none"};
  const Layout layout = {.page_tokens = kPageTokens, .layers = {attention}};
  const engine::Status opened = engine::OpenOn(client, both->region_, identity, layout, {}, options, &both->cache_);
  if (!opened.ok()) return ToStatus("OpenOn", opened);
  both->model_ = &engine::ModelOf(both->cache_);
  return both;
}

absl::Status BothApis::PutByClient(const Prompted& prompt) {
  const Match match = model_->Lookup({.tokens = prompt.tokens, .segment_lengths = prompt.lengths});
  std::vector<ObjectRun> runs;
  uint64_t start = prompt.lengths[0];
  for (size_t i = 1; i < prompt.lengths.size(); start += prompt.lengths[i++]) {
    runs.push_back({.tokens = std::span(prompt.tokens).subspan(start, prompt.lengths[i])});
  }
  std::vector<Publication> objects;
  for (const Reservation& reservation : model_->Reserve(runs)) {
    if (!reservation.granted()) {
      return absl::InternalError(absl::StrCat("reserve: ", std::string(Name(reservation.outcome))));
    }
    PublishParts parts;
    parts.region = region_;
    parts.page_table = pages_;
    objects.push_back({reservation, std::move(parts)});
  }
  for (PublishOutcome outcome : model_->Publish(objects)) {
    if (outcome != PublishOutcome::kPublished) {
      return absl::InternalError(absl::StrCat("publish: ", std::string(Name(outcome))));
    }
  }
  return absl::OkStatus();
}

// Nothing is to land: begun without pages, a request looks up as the client's put does.
absl::Status BothApis::PutByEngine(const Prompted& prompt) {
  engine::Prompt asked = {prompt.tokens.data(), prompt.tokens.size(), prompt.lengths.data(), prompt.lengths.size()};
  asked.fill = true;
  engine::Request request;
  if (absl::Status status = ToStatus("Begin", cache_.Begin(&asked, 1, &request)); !status.ok()) return status;
  uint32_t count;
  request.missing(&count);
  std::vector<uint32_t> missing(count);
  std::iota(missing.begin(), missing.end(), 0);
  const std::vector<engine::ComputedRun> computed(count, {.page_table = pages_.data(), .page_count = pages_.size()});
  std::vector<uint8_t> outcomes(count);
  const engine::Status published = request.Publish(missing.data(), computed.data(), count, outcomes.data());
  if (!published.ok()) return ToStatus("Publish", published);
  if (std::ranges::count(outcomes, static_cast<uint8_t>(PublishOutcome::kPublished)) != std::ssize(outcomes)) {
    return absl::InternalError("publish: a value was refused");
  }
  return count + 1 >= prompt.lengths.size() ? absl::OkStatus() : absl::InternalError("a value was there already");
}

absl::Status BothApis::GetByClient(const Prompted& prompt) {
  auto [match, segments, landing] =
      model_->LookupAndLand({.tokens = prompt.tokens, .segment_lengths = prompt.lengths}, pages_);
  if (segments.size() != prompt.lengths.size()) return absl::NotFoundError("get: a value is missing");
  for (MissReason reason : landing.Wait(std::chrono::seconds(30))) {
    if (reason != MissReason::kNone) return absl::NotFoundError(absl::StrCat("get: ", std::string(Name(reason))));
  }
  return absl::OkStatus();
}

absl::Status BothApis::GetByEngine(const Prompted& prompt) {
  const engine::Prompt asked = {prompt.tokens.data(),  prompt.tokens.size(), prompt.lengths.data(),
                                prompt.lengths.size(), pages_.data(),        pages_.size()};
  engine::Request request;
  if (absl::Status status = ToStatus("Begin", cache_.Begin(&asked, 1, &request)); !status.ok()) return status;
  if (request.plan().cached_tokens + 1 != prompt.tokens.size()) return absl::NotFoundError("get: a value is missing");
  return ToStatus("Finish", request.Finish());
}

}  // namespace

absl::Status CompareApis(Client& client, const Options& options, nlohmann::json& rows) {
  auto both = BothApis::Open(client);
  if (!both.ok()) return both.status();
  // The first segment of all prompts is published with the first value.
  int32_t next = 2;
  if (absl::Status status = (*both)->PutByEngine(PromptOf(kBatches[0], next++)); !status.ok()) return status;
  std::printf("\n%-6s %10s %6s %12s %12s %8s\n", "op", "bytes", "values", "client µs", "engine µs", "ratio");
  for (const Batch& batch : kBatches) {
    std::vector<double> times[2][2];  // put, get; by client, by engine
    const auto measure = [&](bool get, bool by_engine, const Prompted& prompt) {
      const auto call = get         ? by_engine ? &BothApis::GetByEngine : &BothApis::GetByClient
                        : by_engine ? &BothApis::PutByEngine
                                    : &BothApis::PutByClient;
      absl::Status status;
      times[get][by_engine].push_back(Seconds([&] { status = (**both.*call)(prompt); }));
      return status;
    };
    for (int i = -1; i < 4 * options.repetitions; ++i) {
      if (i == 0) std::ranges::for_each(times, [](auto& of) { of[0].clear(), of[1].clear(); });  // warm
      for (const bool by_engine : {i % 2 == 0, i % 2 != 0}) {
        const Prompted prompt = PromptOf(batch, std::exchange(next, next + static_cast<int32_t>(batch.count)));
        if (absl::Status status = measure(false, by_engine, prompt); !status.ok()) return status;
        // The first get of a value is nobody's figure.
        if (absl::Status status = (*both)->GetByClient(prompt); !status.ok()) return status;
        for (const bool got_by_engine : {by_engine, !by_engine}) {
          if (absl::Status status = measure(true, got_by_engine, prompt); !status.ok()) return status;
        }
      }
    }
    for (const bool get : {false, true}) {
      const double client_s = Median(times[get][0]), engine_s = Median(times[get][1]);
      rows.push_back({{"op", get ? "get" : "put"},
                      {"bytes", batch.bytes()},
                      {"values", batch.count},
                      {"client_us", client_s * 1e6},
                      {"engine_us", engine_s * 1e6},
                      {"ratio", engine_s / client_s}});
      std::printf("%-6s %10lu %6u %12.1f %12.1f %8.2f\n", get ? "get" : "put",
                  static_cast<unsigned long>(batch.bytes()), batch.count, client_s * 1e6, engine_s * 1e6,
                  engine_s / client_s);
    }
  }
  return absl::OkStatus();
}

}  // namespace ashlar::bench
