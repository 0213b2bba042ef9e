// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <memory>
#include <span>

#include "absl/container/flat_hash_map.h"
#include "storage/policy/eviction.h"
#include "storage/policy/reuse_models.h"
#include "storage/prefix/cover.h"
#include "storage/prefix/prefix_planner.h"
#include "tools/replay/commands.h"
#include "tools/replay/models.h"
#include "tools/replay/trace.h"

namespace ashlar::replay {
namespace {

constexpr uint32_t kShortest = 32;     // tokens: what is shorter is not worth a segment
constexpr uint64_t kExtent = 1 << 18;  // bytes: what the daemon allocates
constexpr uint64_t kPrefixPart = 4;    // of a capacity, for prefixes: one such part

// The share of a gated delta rule's transitions that is stored, where the rest vanish over so many tokens: heads as
// they are initialised, ε = 3e-4 (docs/benchmarks/transitions.md).
double StoredShare(uint64_t tokens) {
  static constexpr std::pair<double, double> kMeasured[] = {{64, 0.75},    {128, 0.625},  {256, 0.367}, {512, 0.25},
                                                            {1024, 0.156}, {2048, 0.031}, {4096, 0}};
  const auto length = static_cast<double>(tokens);
  if (length <= kMeasured[0].first) return kMeasured[0].second;
  for (size_t i = 1; i < std::size(kMeasured); ++i) {
    const auto& [after, less] = kMeasured[i];
    const auto& [before, more] = kMeasured[i - 1];
    if (length <= after) return more + (less - more) * std::log2(length / before) / std::log2(after / before);
  }
  return 0;
}

struct Setting {
  uint64_t capacity_bytes;  // 0: no limit
  uint64_t seam;            // head and tail
  bool by_price;            // else least recently used first, and prefixes have a part of the capacity
  bool adaptive;
  bool only_what_pays;
};

struct Result {
  uint64_t tokens = 0, saved = 0;  // of prompts
  double flops_all = 0, flops_saved = 0;
  uint64_t hits = 0, hits_that_do_not_pay = 0;                              // of segments
  uint64_t segments = 0, bytes = 0, tuple_bytes = 0, transition_bytes = 0;  // that were published

  double token_hit_rate() const { return static_cast<double>(saved) / static_cast<double>(tokens); }
};

// Segments by content, and exact prefixes.
class SegmentReplay {
 public:
  SegmentReplay(const Model& model, const Setting& setting)
      : model_(model),
        setting_(setting),
        capacity_(setting.capacity_bytes == 0 ? kNoLimit : setting.capacity_bytes),
        prefixes_(model.costs, {.capacity_bytes = PrefixBytes(setting)}),
        order_(setting.by_price ? std::unique_ptr<storage::EvictionPolicy>(new storage::PricePolicy(reuse_))
                                : std::make_unique<storage::LruPolicy>()) {
    prefixes_.WhenGone([this](storage::PrefixNode& node) { GonePrefix(node); });
  }

  void Request(const Trace& trace, const Trace::Request& request);
  const Result& result() const { return result_; }

 private:
  static constexpr uint64_t kNoLimit = uint64_t{1} << 60;
  struct Object {
    storage::RankedObject ranked;
    storage::Rank rank;
    uint64_t bytes = 0;
    std::vector<int32_t> tokens;            // a segment's
    storage::PrefixNode* prefix = nullptr;  // or what it is a checkpoint of
  };
  static uint64_t PrefixBytes(const Setting& setting) {
    if (setting.capacity_bytes == 0) return kNoLimit;
    return setting.by_price ? setting.capacity_bytes : setting.capacity_bytes / kPrefixPart;
  }
  uint64_t Transitions(uint64_t tokens) const {
    const auto dense = static_cast<double>(model_.transition_bytes);
    return static_cast<uint64_t>(setting_.adaptive ? dense * StoredShare(tokens) : dense);
  }
  uint64_t TupleBytes(uint64_t tokens) const { return model_.costs.checkpoint_bytes + Transitions(tokens); }
  uint64_t Bytes(uint64_t tokens) const {
    const uint64_t pages = (tokens + model_.costs.page_tokens - 1) / model_.costs.page_tokens;
    return pages * model_.costs.page_bytes + TupleBytes(tokens);
  }
  // Returns whether transferring the run takes less time than computing it.
  bool Pays(uint64_t begin, uint64_t end) const {
    const double computed = (model_.costs.Flops(end) - model_.costs.Flops(begin)) / model_.flops_per_second;
    return static_cast<double>(Bytes(end - begin)) / model_.link_bytes_per_second < computed;
  }
  bool Find(const std::vector<int32_t>& text, uint64_t begin);
  void Publish(std::vector<int32_t> text);
  Object& Keep(uint64_t bytes, storage::Reuse reuse, const storage::Reuse* gone);
  void Erase(Object& object);
  void FindPrefix(std::span<const int32_t> tokens);
  void PublishPrefixes(std::span<const int32_t> tokens);
  void GonePrefix(storage::PrefixNode& node);
  uint64_t used() const { return used_ + (setting_.by_price ? prefixes_.budget().bytes() : 0); }
  // False: there is not so much.
  bool EvictFor(uint64_t bytes);

  const Model& model_;
  const Setting setting_;
  const uint64_t capacity_;
  storage::PrefixPlanner prefixes_;
  storage::ReuseModels reuse_;
  const std::unique_ptr<storage::EvictionPolicy> order_;
  uint64_t used_ = 0, published_ = 0;
  absl::flat_hash_map<storage::ObjectId, std::unique_ptr<Object>> kept_;
  absl::flat_hash_map<std::vector<int32_t>, storage::ObjectId> by_tokens_;
  absl::flat_hash_map<std::vector<int32_t>, storage::Reuse> gone_;
  absl::flat_hash_map<const storage::PrefixNode*, storage::ObjectId> by_prefix_;
  Result result_;
};

void SegmentReplay::Request(const Trace& trace, const Trace::Request& request) {
  reuse_.Tick(0);
  std::vector<int32_t> tokens;
  const uint64_t prompt = trace.Tokens(request, tokens);
  std::vector<storage::CoverSegment> runs;
  std::vector<std::vector<int32_t>> missing;
  uint64_t begin = 0;
  for (const Trace::Piece& piece : request.prompt) {
    const uint64_t end = begin + piece.tokens;
    if (piece.boundary && piece.tokens >= kShortest) {
      const auto first = tokens.begin() + static_cast<ptrdiff_t>(begin);
      std::vector<int32_t> text(first, first + piece.tokens);
      runs.push_back({begin, end, Find(text, begin)});
      missing.push_back(std::move(text));
    }
    begin = end;
  }
  const auto match = prefixes_.Lookup(std::span(tokens).first(prompt));
  const auto flops = [this](uint64_t depth) { return model_.costs.Flops(depth); };
  const storage::Cover cover = storage::BestCover(match.resumable, runs, setting_.seam, setting_.seam, flops);
  FindPrefix(std::span(tokens).first(cover.prefix));
  result_.tokens += prompt;
  result_.saved += cover.prefix;
  for (const size_t i : cover.segments) result_.saved += runs[i].end - runs[i].begin - 2 * setting_.seam;
  result_.flops_all += flops(prompt);
  result_.flops_saved += cover.saved;
  for (std::vector<int32_t>& text : missing) Publish(std::move(text));
  // Tokens behind a landed interior are not exact, and no prefix of any other prompt. Before the interior, other
  // prompts are likely to part at boundaries; and at the end of the segment's head they can resume with it and need not
  // compute the head again.
  const uint64_t exact = cover.segments.empty() ? tokens.size() : runs[cover.segments.front()].begin + setting_.seam;
  std::vector<uint64_t> captured = match.checkpoint_at;
  for (const storage::CoverSegment& run : runs) {
    for (const uint64_t depth : {run.begin + setting_.seam, run.end}) {
      if (run.begin > 0 || depth == run.end) captured.push_back(depth);
    }
  }
  std::erase_if(captured, [&match](uint64_t depth) { return depth <= match.resume; });
  std::sort(captured.begin(), captured.end());
  captured.erase(std::unique(captured.begin(), captured.end()), captured.end());
  std::erase_if(captured, [exact](uint64_t depth) { return depth > exact; });
  prefixes_.Commit(match, std::span(tokens).first(exact), std::min(prompt, exact), captured);
  if (setting_.by_price) PublishPrefixes(std::span(tokens).first(exact));
}

bool SegmentReplay::Find(const std::vector<int32_t>& text, uint64_t begin) {
  const auto found = by_tokens_.find(text);
  if (found == by_tokens_.end()) return false;
  Object& object = *kept_.at(found->second);
  reuse_.Used(0, object.ranked.reuse);
  order_->Touch(object.rank);
  ++result_.hits;
  if (Pays(begin, begin + text.size())) return true;
  ++result_.hits_that_do_not_pay;
  return !setting_.only_what_pays;
}

void SegmentReplay::Publish(std::vector<int32_t> text) {
  const uint64_t bytes = (Bytes(text.size()) + kExtent - 1) / kExtent * kExtent;
  if (by_tokens_.contains(text) || bytes > capacity_ || !EvictFor(bytes)) return;
  const auto gone = gone_.find(text);
  const double saves = model_.costs.Flops(text.size()) / static_cast<double>(bytes);
  Object& object = Keep(bytes, {.kind = storage::ReuseKind::kSegment, .saves_a_byte = static_cast<float>(saves)},
                        gone == gone_.end() ? nullptr : &gone->second);
  if (gone != gone_.end()) gone_.erase(gone);
  used_ += bytes;
  ++result_.segments;
  result_.bytes += bytes;
  result_.tuple_bytes += TupleBytes(text.size());
  result_.transition_bytes += Transitions(text.size());
  object.tokens = text;
  by_tokens_.emplace(std::move(text), object.ranked.id);
}

SegmentReplay::Object& SegmentReplay::Keep(uint64_t bytes, storage::Reuse reuse, const storage::Reuse* gone) {
  const storage::ObjectId id = ++published_;
  auto object = std::make_unique<Object>();
  object->ranked.id = id;
  object->ranked.reuse = reuse;
  reuse_.Came(0, object->ranked.reuse, gone);
  object->bytes = bytes;
  object->rank.object = &object->ranked;
  object->rank.extents = static_cast<uint32_t>((bytes + kExtent - 1) / kExtent);
  object->rank.idle = true;
  order_->Track({}, object->rank);
  return *kept_.emplace(id, std::move(object)).first->second;
}

void SegmentReplay::Erase(Object& object) {
  reuse_.GivenUp(0, object.ranked.reuse);
  order_->Erase(object.rank);
  if (object.prefix != nullptr) {
    by_prefix_.erase(object.prefix);
  } else {
    used_ -= object.bytes;
    by_tokens_.erase(object.tokens);
    gone_.insert_or_assign(std::move(object.tokens), object.ranked.reuse);
  }
  kept_.erase(storage::ObjectId{object.ranked.id});
}

// All on the way are of use: their pages.
void SegmentReplay::FindPrefix(std::span<const int32_t> tokens) {
  prefixes_.tree().Walk(tokens, [this](storage::PrefixNode& node) {
    const auto found = by_prefix_.find(&node);
    if (found == by_prefix_.end()) return;
    Object& object = *kept_.at(found->second);
    reuse_.Used(0, object.ranked.reuse);
    order_->Touch(object.rank);
  });
}

void SegmentReplay::PublishPrefixes(std::span<const int32_t> tokens) {
  uint64_t before = 0;
  prefixes_.tree().Walk(tokens, [this, &before](storage::PrefixNode& node) {
    if (!node.data.kept) return;
    if (!by_prefix_.contains(&node)) {
      const uint64_t page = model_.costs.page_tokens;
      const uint64_t bytes =
          model_.costs.checkpoint_bytes + (node.depth() / page - before / page) * model_.costs.page_bytes;
      const double saves = (model_.costs.Flops(node.depth()) - model_.costs.Flops(before)) / static_cast<double>(bytes);
      Object& object =
          Keep(bytes, {.kind = storage::ReuseKind::kCheckpoint, .saves_a_byte = static_cast<float>(saves)}, nullptr);
      object.prefix = &node;
      by_prefix_.emplace(&node, object.ranked.id);
    }
    before = node.depth();
  });
  EvictFor(0);
}

void SegmentReplay::GonePrefix(storage::PrefixNode& node) {
  const auto found = by_prefix_.find(&node);
  if (found != by_prefix_.end()) Erase(*kept_.at(found->second));
}

bool SegmentReplay::EvictFor(uint64_t bytes) {
  const uint64_t capacity = setting_.by_price              ? capacity_
                            : setting_.capacity_bytes == 0 ? kNoLimit
                                                           : capacity_ - PrefixBytes(setting_);
  while (used() + bytes > capacity) {
    const storage::EvictionPolicy::Allowance any{{}, kNoLimit};
    const std::vector<storage::RankedObject*> victims = order_->Victims({&any, 1}, 1);
    if (victims.empty()) return false;
    Object& victim = *kept_.at(victims.front()->id);
    if (victim.prefix == nullptr) {
      Erase(victim);
      continue;
    }
    std::vector<int32_t> tokens;
    for (const storage::PrefixNode* at = victim.prefix; at->parent() != nullptr; at = at->parent()) {
      tokens.insert(tokens.begin(), at->edge().begin(), at->edge().end());
    }
    prefixes_.Lost(tokens);
  }
  return true;
}

nlohmann::json JsonOf(const Trace& trace, const Setting& setting, const Result& result) {
  return {{"trace", trace.name()},
          {"capacity_bytes", setting.capacity_bytes},
          {"head", setting.seam},
          {"tail", setting.seam},
          {"eviction", setting.by_price ? "price" : "recency"},
          {"transitions", setting.adaptive ? "adaptive" : "dense"},
          {"only_what_pays", setting.only_what_pays},
          {"requests", trace.requests().size()},
          {"trace_seconds", trace.span_seconds()},
          {"tokens", result.tokens},
          {"token_hit_rate", result.token_hit_rate()},
          {"flops_saved", result.flops_saved},
          {"flops_all", result.flops_all},
          {"segments", result.segments},
          {"bytes", result.bytes},
          {"tuple_bytes", result.tuple_bytes},
          {"transition_bytes", result.transition_bytes},
          {"hits", result.hits},
          {"hits_that_do_not_pay", result.hits_that_do_not_pay}};
}

void Print(const Trace& trace, const Setting& setting, const Result& result) {
  char capacity[32] = "no limit";
  if (setting.capacity_bytes > 0) {
    std::snprintf(capacity, sizeof capacity, "%.1f", static_cast<double>(setting.capacity_bytes) / 1e9);
  }
  const auto share = [](uint64_t part, uint64_t all) {
    return all == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(all);
  };
  std::printf("%-20s %8s │ (%llu, %llu) %-8s %-8s %-6s │ %8.4f %8.4f │ %9llu %8.1f %6.2f │ %6.2f\n",
              trace.name().c_str(), capacity, static_cast<unsigned long long>(setting.seam),
              static_cast<unsigned long long>(setting.seam), setting.by_price ? "price" : "recency",
              setting.adaptive ? "adaptive" : "dense", setting.only_what_pays ? "pays" : "all", result.token_hit_rate(),
              result.flops_saved / result.flops_all, static_cast<unsigned long long>(result.segments),
              static_cast<double>(result.bytes) / 1e9, share(result.tuple_bytes, result.bytes),
              share(result.hits_that_do_not_pay, result.hits));
}

std::vector<Setting> Settings(const std::vector<uint64_t>& capacities) {
  std::vector<uint64_t> all = {0};
  all.insert(all.end(), capacities.begin(), capacities.end());
  std::vector<Setting> settings;
  for (const uint64_t capacity : all) {
    for (const uint64_t seam : {0, 8}) {
      for (const bool by_price : {false, true}) {
        for (const bool adaptive : {false, true}) {
          for (const bool pays : {false, true}) settings.push_back({capacity, seam, by_price, adaptive, pays});
        }
      }
    }
  }
  return settings;
}

}  // namespace

absl::Status ReuseSegments(const Options& options, Figures& figures) {
  const absl::StatusOr<Model> model = FindModel(options.model);
  if (!model.ok()) return model.status();
  figures.json["model"] = model->name;
  figures.json["segments"] = nlohmann::json::array();
  std::printf("%-20s %8s │ %-6s %-8s %-8s %-6s │ %8s %8s │ %9s %8s %6s │ %s\n", "trace", "GB", "seams", "policy",
              "stored", "hits", "tokens", "FLOPs", "segments", "GB", "tuples", "unprofitable hits");
  for (const std::string& path : options.traces) {
    const absl::StatusOr<Trace> trace = ReadTrace(options.format, path);
    if (!trace.ok()) return trace.status();
    if (!trace->has_boundaries()) {
      return absl::InvalidArgumentError(options.format +
                                        ": the format has no segment boundaries; expected stf, cc or mooncake");
    }
    ProgressLine progress(trace->name());
    const std::vector<Setting> settings = Settings(options.capacities);
    for (size_t i = 0; i < settings.size(); ++i) {
      SegmentReplay replay(*model, settings[i]);
      for (const Trace::Request& request : trace->requests()) replay.Request(*trace, request);
      Print(*trace, settings[i], replay.result());
      figures.json["segments"].push_back(JsonOf(*trace, settings[i], replay.result()));
      progress.Show(i + 1, settings.size());
    }
  }
  return absl::OkStatus();
}

}  // namespace ashlar::replay
