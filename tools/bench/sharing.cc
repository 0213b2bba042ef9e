// SPDX-License-Identifier: Apache-2.0
// `ashlar-bench sharing`: what requests that share segments in place hold, against copies for each (MEPIC §4.3, §4.4).
//
// The page pools are those of the daemon (storage/sharing/page_pools.h), with the sizes of Qwen3-Next: pages are
// counted, not accessed. A stream of requests uses them; each has a prefix, retrieved chunks, and a text that it
// decodes meanwhile.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>
#include <map>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/object.h"
#include "proto/page_placement.h"
#include "storage/sharing/page_pools.h"
#include "tools/bench/bench.h"

namespace ashlar::bench {
namespace {

using storage::PagePool;

constexpr uint32_t kPageTokens = 16;
constexpr uint64_t kPrefixTokens = 64, kChunkTokens = 512, kQueryTokens = 48, kDecodedTokens = 64;
constexpr uint64_t kFinished = 400;  // requests that a case measures, once its number of requests is in flight
constexpr storage::SessionId kSession = 1;
constexpr storage::TenantId kTenant = 0;

// Qwen3-Next-80B-A3B: 48 layers, every fourth full attention. The first page of a chunk is its head seam: recomputed.
Layout QwenLayout() {
  Layout layout{.page_tokens = kPageTokens, .head = kPageTokens, .tail = 0};
  LinearLayer linear{.key_heads = 16, .value_heads = 32, .d_k = 128, .d_v = 128, .state_dtype = DType::kBF16};
  linear.conv_channels = (2 * 16 + 32) * 128;
  linear.conv_kernel = 4;
  AttentionLayer attention{.kv_heads = 2, .key_dim = 256, .value_dim = 256, .dtype = DType::kBF16};
  attention.stored = StoredKeys::kUnrotated;
  attention.rope = {.kind = RopeStyle::kHalfSplit, .rotary_dim = 64};
  for (int i = 0; i < 32; ++i) attention.rope.frequencies.push_back(std::pow(1e7, -i / 32.0));
  for (int i = 0; i < 48; ++i) layout.layers.push_back(i % 4 == 3 ? Layer(attention) : Layer(linear));
  return layout;
}

uint64_t PagesOf(uint64_t tokens) {
  return (tokens + kPageTokens - 1) / kPageTokens;
}

struct Sizes {
  uint64_t token = 0;         // bytes of a token's keys and values
  uint64_t page = 0;          // bytes of a page of all attention layers
  uint64_t chunk_tuple = 0;   // bytes of a chunk's tuples, with dense transitions
  uint64_t prefix_state = 0;  // bytes of a prefix's states, without transitions
};

absl::StatusOr<Sizes> SizesOf(const Layout& layout) {
  if (absl::Status status = Validate(layout); !status.ok()) return status;
  const auto tuples = [&](ObjectKind kind, uint64_t tokens) -> absl::StatusOr<uint64_t> {
    const absl::StatusOr<ObjectHeader> plan = PlanObject(layout, {}, {}, kind, tokens);
    if (!plan.ok()) return plan.status();
    uint64_t bytes = 0;
    for (const Part& part : plan->parts) bytes += IsPaged(part.form) ? 0 : part.Bytes();
    return bytes;
  };
  Sizes sizes;
  for (const Layer& layer : layout.layers) {
    const auto* attention = std::get_if<AttentionLayer>(&layer);
    if (attention == nullptr) continue;
    sizes.token +=
        uint64_t{attention->kv_heads} * (attention->key_dim + attention->value_dim) * ElementBytes(attention->dtype);
  }
  sizes.page = sizes.token * kPageTokens;
  const auto chunk = tuples(ObjectKind::kSegment, kChunkTokens);
  const auto prefix = tuples(ObjectKind::kCheckpoint, kPrefixTokens);
  if (!chunk.ok() || !prefix.ok()) return chunk.ok() ? prefix.status() : chunk.status();
  sizes.chunk_tuple = *chunk;
  sizes.prefix_state = *prefix;
  return sizes;
}

// Chunks of one request: distinct ones, as from a retrieval, each drawn with weight 1 / rank.
class Retrieval {
 public:
  Retrieval(uint64_t catalogue, uint64_t seed) : random_(seed) {
    for (uint64_t rank = 1; rank <= catalogue; ++rank) weights_.push_back(1.0 / static_cast<double>(rank));
  }
  std::vector<uint64_t> Draw(uint64_t count) {
    std::vector<double> weights = weights_;
    std::vector<uint64_t> chunks;
    while (chunks.size() < count) {
      chunks.push_back(std::discrete_distribution<uint64_t>(weights.begin(), weights.end())(random_));
      weights[chunks.back()] = 0;
    }
    return chunks;
  }

 private:
  std::mt19937_64 random_;
  std::vector<double> weights_;
};

struct Case {
  uint64_t catalogue = 0, requests = 0, chunks = 0;
};

// Sums over the moments at which it was looked.
struct Sum {
  double in_use = 0;              // shared in place: pages and tuples, each segment's counted once
  double pages_in_use = 0;        // the pages of these
  double needed = 0;              // distinct segments in flight, counted by token, and the requests' own pages
  double copied = 0;              // every request with its own pages and tuples
  double copied_pages = 0;        // the pages of these
  double copied_tuples_once = 0;  // every request with its own pages, but tuples counted once
  double worst = 0;               // in_use / needed
  uint64_t moments = 0;
};

class Stream {
 public:
  Stream(const Case& shape, const Layout& layout, const Sizes& sizes, uint64_t seed)
      : shape_(shape),
        sizes_(sizes),
        retrieval_(shape.catalogue, seed),
        chunk_(PlaceInPages(layout, ObjectKind::kSegment, kChunkTokens, kPageTokens)),
        prefix_(PlaceInPages(layout, ObjectKind::kCheckpoint, kPrefixTokens, kPageTokens)) {}

  // As many pages as copies would take.
  absl::Status Run(Sum& sum) {
    auto pool =
        pools_.Open(kTenant, /*region=*/1, static_cast<uint32_t>(shape_.requests * CopiedPages(kDecodedTokens)));
    if (!pool.ok()) return pool.status();
    pool_ = *std::move(pool);
    for (uint64_t i = 0; i < shape_.requests + kFinished; ++i) {
      if (running_.size() == shape_.requests) {
        pools_.Release(kSession, running_.front().lease);
        running_.pop_front();
      }
      if (absl::Status status = Admit(i); !status.ok()) return status;
      if (absl::Status status = Decode(); !status.ok()) return status;
      if (running_.size() == shape_.requests) Look(sum);
    }
    return absl::OkStatus();
  }
  uint64_t reclaimed() const { return pool_->levels().reclaimed_segments; }

 private:
  struct Request {
    storage::LeaseId lease{};
    std::vector<uint64_t> chunks;
    uint64_t decoded = 0;
  };

  static Key KeyOf(uint64_t text) {
    const int32_t token = static_cast<int32_t>(text);
    return MakeKey({}, ObjectKind::kSegment, {&token, 1});
  }
  uint64_t OwnPages(uint64_t decoded) const {
    return shape_.chunks * (PagesOf(kChunkTokens) - chunk_.shared_pages) + PagesOf(kQueryTokens + decoded);
  }
  uint64_t CopiedPages(uint64_t decoded) const {
    return PagesOf(kPrefixTokens) + shape_.chunks * PagesOf(kChunkTokens) + PagesOf(kQueryTokens + decoded);
  }

  absl::Status Admit(uint64_t number) {
    Request request{.chunks = retrieval_.Draw(shape_.chunks)};
    std::copy_n(reinterpret_cast<const uint8_t*>(&number), sizeof number, request.lease.begin());
    std::vector<PagePool::Want> wants = {{KeyOf(shape_.catalogue), static_cast<uint32_t>(prefix_.shared_pages)}};
    for (const uint64_t chunk : request.chunks) {
      wants.push_back({KeyOf(chunk), static_cast<uint32_t>(chunk_.shared_pages)});
    }
    const auto answer = pools_.Admit(kSession, kTenant, request.lease, pool_, wants, OwnPages(0));
    if (!answer.ok()) return answer.status();
    if (answer->admission == 0) return absl::InternalError("a request was refused where copies would have fit");
    const auto segments = pool_->Segments(answer->admission);
    for (size_t i = 0; i < segments.size(); ++i) {
      if (segments[i].content == PageContent::kToFill) pool_->Filled(answer->admission, i);
    }
    running_.push_back(std::move(request));
    return absl::OkStatus();
  }

  // Every request advances so that it finishes when it is its turn to end.
  absl::Status Decode() {
    for (Request& request : running_) {
      request.decoded =
          std::min(kDecodedTokens, request.decoded + (kDecodedTokens + shape_.requests - 1) / shape_.requests);
      const auto* held = pools_.Find(kSession, request.lease);
      PagePool::Shortage shortage;
      if (!pool_->Extend(held->admission, OwnPages(request.decoded), shortage)) {
        return absl::InternalError("a request could not decode where copies would have fit");
      }
    }
    return absl::OkStatus();
  }

  void Look(Sum& sum) {
    std::map<uint64_t, uint64_t> distinct;
    double own = 0, copied_pages = 0;
    for (const Request& request : running_) {
      for (const uint64_t chunk : request.chunks) ++distinct[chunk];
      own += static_cast<double>(OwnPages(request.decoded) * sizes_.page);
      copied_pages += static_cast<double>(CopiedPages(request.decoded) * sizes_.page);
    }
    const auto requests = static_cast<double>(running_.size()), chunks = static_cast<double>(distinct.size());
    const auto state = static_cast<double>(sizes_.prefix_state), tuple = static_cast<double>(sizes_.chunk_tuple);
    const double tuples = state + chunks * tuple;
    const PagePool::Levels levels = pool_->levels();
    const double pages = static_cast<double>((levels.shared + levels.own) * sizes_.page);
    const double rows = static_cast<double>(prefix_.end_token * sizes_.token) +
                        chunks * static_cast<double>((chunk_.end_token - chunk_.first_token) * sizes_.token);
    const double needed = rows + tuples + own;
    sum.in_use += pages + tuples;
    sum.pages_in_use += pages;
    sum.needed += needed;
    sum.copied += copied_pages + requests * (state + static_cast<double>(shape_.chunks) * tuple);
    sum.copied_pages += copied_pages;
    sum.copied_tuples_once += copied_pages + tuples;
    sum.worst = std::max(sum.worst, (pages + tuples) / needed);
    ++sum.moments;
  }

  const Case shape_;
  const Sizes sizes_;
  Retrieval retrieval_;
  const PagePlacement chunk_, prefix_;
  storage::PagePools pools_;
  std::shared_ptr<PagePool> pool_;
  std::deque<Request> running_;
};

}  // namespace

absl::Status Sharing(const Options& options, nlohmann::json& figures) {
  const Layout layout = QwenLayout();
  const absl::StatusOr<Sizes> sizes = SizesOf(layout);
  if (!sizes.ok()) return sizes.status();
  figures["machine"] = Machine();
  figures["sizes"] = {{"page_tokens", kPageTokens},
                      {"chunk_tokens", kChunkTokens},
                      {"prefix_tokens", kPrefixTokens},
                      {"query_tokens", kQueryTokens},
                      {"decoded_tokens", kDecodedTokens},
                      {"page_bytes", sizes->page},
                      {"chunk_tuple_bytes", sizes->chunk_tuple},
                      {"prefix_state_bytes", sizes->prefix_state}};
  const uint64_t seed = std::random_device()();
  figures["seed"] = seed;
  std::printf("%9s %8s %6s | %9s %9s | %8s | times less: all   pages  tuples once\n", "catalogue", "requests", "chunks",
              "in use", "copies", "/ needed");
  constexpr double kGigabyte = 1e9;
  const std::vector<uint64_t> in_flight =
      options.quick ? std::vector<uint64_t>{25} : std::vector<uint64_t>{2, 5, 10, 15, 20, 25};
  for (const uint64_t catalogue : {20, 100, 1000}) {
    for (const uint64_t requests : in_flight) {
      for (const uint64_t chunks : {2, 4, 8, 12, 16}) {
        Sum sum;
        Stream stream({catalogue, requests, chunks}, layout, *sizes, seed);
        if (absl::Status status = stream.Run(sum); !status.ok()) return status;
        const auto moments = static_cast<double>(sum.moments);
        figures["cases"].push_back({{"catalogue", catalogue},
                                    {"requests", requests},
                                    {"chunks", chunks},
                                    {"bytes_in_use", sum.in_use / moments},
                                    {"page_bytes_in_use", sum.pages_in_use / moments},
                                    {"bytes_needed", sum.needed / moments},
                                    {"ratio_to_needed", sum.in_use / sum.needed},
                                    {"worst_ratio_to_needed", sum.worst},
                                    {"copied_bytes", sum.copied / moments},
                                    {"copied_page_bytes", sum.copied_pages / moments},
                                    {"times_less", sum.copied / sum.in_use},
                                    {"times_less_pages", sum.copied_pages / sum.pages_in_use},
                                    {"times_less_tuples_once", sum.copied_tuples_once / sum.in_use},
                                    {"reclaimed_segments", stream.reclaimed()}});
        std::printf("%9lu %8lu %6lu | %6.2f GB %6.2f GB | %8.4f | %15.2f %7.2f %12.2f\n", catalogue, requests, chunks,
                    sum.in_use / moments / kGigabyte, sum.copied / moments / kGigabyte, sum.worst,
                    sum.copied / sum.in_use, sum.copied_pages / sum.pages_in_use, sum.copied_tuples_once / sum.in_use);
        if (sum.worst > 1.1) return absl::InternalError("the memory in use exceeded 1.1 times the memory needed");
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace ashlar::bench
