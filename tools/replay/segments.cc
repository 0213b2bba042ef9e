// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <memory>
#include <span>

#include "absl/container/flat_hash_map.h"
#include "storage/policy/eviction.h"
#include "storage/policy/reuse_models.h"
#include "storage/prefix/cover.h"
#include "storage/prefix/prefix_planner.h"
#include "tools/replay/commands.h"
#include "tools/replay/models.h"
#include "tools/replay/replay.h"
#include "tools/replay/segment_costs.h"
#include "tools/replay/trace.h"

namespace ashlar::replay {
namespace {

constexpr uint32_t kShortest = 32;     // tokens: shorter pieces are not worth a segment
constexpr uint64_t kExtent = 1 << 18;  // bytes: what the daemon allocates
constexpr uint64_t kPrefixPart = 4;    // prefixes get 1 / kPrefixPart of the capacity

struct Setting {
  uint64_t capacity_bytes;  // 0: no limit
  bool segments;            // false: prefixes alone
  uint64_t seam;            // head and tail
  bool by_price;            // otherwise least recently used first, and prefixes have a part of the capacity
  bool adaptive;
  bool only_what_pays;
};

struct Result {
  uint64_t tokens = 0, saved = 0;  // tokens of prompts
  double flops_all = 0, flops_saved = 0;
  std::vector<double> first_token_ms;           // by request: its computed tokens and moved bytes, one after the other
  uint64_t hits = 0, hits_that_do_not_pay = 0;  // hits of segments
  uint64_t segments = 0, bytes = 0, tuple_bytes = 0, transition_bytes = 0;  // published segments

  double token_hit_rate() const { return static_cast<double>(saved) / static_cast<double>(tokens); }
  double Quantile(double q) const { return replay::Quantile(first_token_ms, q); }
};

// Segments by content, and exact prefixes.
class SegmentReplay {
 public:
  SegmentReplay(const Model& model, const Setting& setting, uint64_t capture)
      : model_(model),
        setting_(setting),
        capture_(capture),
        costs_(model, setting.adaptive),
        capacity_(setting.capacity_bytes == 0 ? kNoLimit : setting.capacity_bytes),
        prefixes_(model.costs, {.capacity_bytes = PrefixBytes(setting), .capture_tokens = capture}),
        order_(setting.by_price ? std::unique_ptr<storage::EvictionPolicy>(new storage::PricePolicy(reuse_, loading_))
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
    storage::PrefixNode* prefix = nullptr;  // or the prefix whose checkpoint it is
  };
  static uint64_t PrefixBytes(const Setting& setting) {
    if (setting.capacity_bytes == 0) return kNoLimit;
    return setting.by_price ? setting.capacity_bytes : setting.capacity_bytes / kPrefixPart;
  }
  double FirstTokenMs(const storage::Cover& cover, std::span<const storage::CoverSegment> runs, uint64_t prompt) const;
  bool Find(const std::vector<int32_t>& text, uint64_t begin);
  void Publish(std::vector<int32_t> text);
  Object& Keep(uint64_t bytes, storage::Reuse reuse, const storage::Reuse* gone);
  void Erase(Object& object);
  void FindPrefix(std::span<const int32_t> tokens);
  void PublishPrefixes(std::span<const int32_t> tokens);
  void GonePrefix(storage::PrefixNode& node);
  uint64_t used() const { return used_ + (setting_.by_price ? prefixes_.budget().bytes() : 0); }
  // False: the cache does not have enough bytes to evict.
  bool EvictFor(uint64_t bytes);

  const Model& model_;
  const Setting setting_;
  const uint64_t capture_;
  const SegmentCosts costs_;
  const uint64_t capacity_;
  storage::PrefixPlanner prefixes_;
  storage::PromotionCosts loading_;  // empty: there is one tier
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
    if (setting_.segments && piece.boundary && piece.tokens >= kShortest) {
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
  result_.first_token_ms.push_back(FirstTokenMs(cover, runs, prompt));
  for (std::vector<int32_t>& text : missing) Publish(std::move(text));
  // Tokens after a landed interior are not exact, and not a prefix of another prompt. Before the interior, other
  // prompts are likely to diverge at boundaries. At the end of the segment's head they can resume without computing the
  // head again.
  const uint64_t known = cover.segments.empty() ? tokens.size() : runs[cover.segments.front()].begin + setting_.seam;
  const uint64_t exact = known / capture_ * capture_;
  if (exact == 0) return prefixes_.Release(match);
  std::vector<uint64_t> captured = match.checkpoint_at;
  for (const storage::CoverSegment& run : runs) {
    for (const uint64_t depth : {run.begin + setting_.seam, run.end}) {
      if (run.begin > 0 || depth == run.end) captured.push_back(depth);
    }
  }
  std::erase_if(captured, [&match](uint64_t depth) { return depth <= match.resume; });
  std::sort(captured.begin(), captured.end());
  captured.erase(std::unique(captured.begin(), captured.end()), captured.end());
  std::erase_if(captured, [&](uint64_t depth) { return depth > exact || depth % capture_ != 0; });
  prefixes_.Commit(match, std::span(tokens).first(exact), std::min(prompt, exact), captured);
  if (setting_.by_price) PublishPrefixes(std::span(tokens).first(exact));
}

double SegmentReplay::FirstTokenMs(const storage::Cover& cover, std::span<const storage::CoverSegment> runs,
                                   uint64_t prompt) const {
  uint64_t bytes = cover.prefix == 0 ? 0 : costs_.PageBytes(cover.prefix) + model_.costs.checkpoint_bytes;
  for (const size_t i : cover.segments) bytes += costs_.Bytes(runs[i].end - runs[i].begin);
  return 1e3 * ((model_.costs.Flops(prompt) - cover.saved) / model_.flops_per_second +
                static_cast<double>(bytes) / model_.link_bytes_per_second);
}

bool SegmentReplay::Find(const std::vector<int32_t>& text, uint64_t begin) {
  const auto found = by_tokens_.find(text);
  if (found == by_tokens_.end()) return false;
  Object& object = *kept_.at(found->second);
  reuse_.Used(0, object.ranked.reuse);
  order_->Touch(object.rank);
  ++result_.hits;
  if (costs_.Pays(begin, begin + text.size())) return true;
  ++result_.hits_that_do_not_pay;
  return !setting_.only_what_pays;
}

void SegmentReplay::Publish(std::vector<int32_t> text) {
  const uint64_t bytes = (costs_.Bytes(text.size()) + kExtent - 1) / kExtent * kExtent;
  if (by_tokens_.contains(text) || bytes > capacity_ || !EvictFor(bytes)) return;
  const auto gone = gone_.find(text);
  const double saves = model_.costs.Flops(text.size()) / static_cast<double>(bytes);
  Object& object = Keep(bytes, {.kind = storage::ReuseKind::kSegment, .saves_a_byte = static_cast<float>(saves)},
                        gone == gone_.end() ? nullptr : &gone->second);
  if (gone != gone_.end()) gone_.erase(gone);
  used_ += bytes;
  ++result_.segments;
  result_.bytes += bytes;
  result_.tuple_bytes += costs_.TupleBytes(text.size());
  result_.transition_bytes += costs_.Transitions(text.size());
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

// All nodes on the path count as used: their pages are needed.
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

const char* Transitions(const Setting& setting) {
  return !setting.segments ? "none" : setting.adaptive ? "adaptive" : "dense";
}

nlohmann::json JsonOf(const Trace& trace, const Setting& setting, const Result& result) {
  return {{"trace", trace.name()},
          {"capacity_bytes", setting.capacity_bytes},
          {"reuse", setting.segments ? "segments" : "prefixes"},
          {"head", setting.seam},
          {"tail", setting.seam},
          {"eviction", setting.by_price ? "price" : "recency"},
          {"transitions", Transitions(setting)},
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
          {"hits_that_do_not_pay", result.hits_that_do_not_pay},
          {"ttft_ms", {{"p50", result.Quantile(0.5)}, {"p95", result.Quantile(0.95)}, {"p99", result.Quantile(0.99)}}}};
}

void Print(const Trace& trace, const Setting& setting, const Result& result) {
  char capacity[32] = "no limit";
  if (setting.capacity_bytes > 0) {
    std::snprintf(capacity, sizeof capacity, "%.1f", static_cast<double>(setting.capacity_bytes) / 1e9);
  }
  const auto share = [](uint64_t part, uint64_t all) {
    return all == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(all);
  };
  std::printf("%-20s %8s │ %-8s (%llu, %llu) %-8s %-8s %-6s │ %8.4f %8.4f │ %8.1f %8.1f │ %9llu %8.1f %6.2f │ %6.2f\n",
              trace.name().c_str(), capacity, setting.segments ? "segments" : "prefixes",
              static_cast<unsigned long long>(setting.seam), static_cast<unsigned long long>(setting.seam),
              setting.by_price ? "price" : "recency", Transitions(setting), setting.only_what_pays ? "pays" : "all",
              result.token_hit_rate(), result.flops_saved / result.flops_all, result.Quantile(0.5),
              result.Quantile(0.95), static_cast<unsigned long long>(result.segments),
              static_cast<double>(result.bytes) / 1e9, share(result.tuple_bytes, result.bytes),
              share(result.hits_that_do_not_pay, result.hits));
}

std::vector<Setting> Settings(const std::vector<uint64_t>& capacities) {
  std::vector<uint64_t> all = {0};
  all.insert(all.end(), capacities.begin(), capacities.end());
  std::vector<Setting> settings;
  for (const uint64_t capacity : all) {
    settings.push_back({.capacity_bytes = capacity, .by_price = true});  // prefixes alone
    for (const uint64_t seam : {0, 8}) {
      for (const bool by_price : {false, true}) {
        for (const bool adaptive : {false, true}) {
          for (const bool pays : {false, true}) settings.push_back({capacity, true, seam, by_price, adaptive, pays});
        }
      }
    }
  }
  return settings;
}

}  // namespace

absl::Status ReuseSegments(const Options& options, Figures& figures) {
  const absl::StatusOr<Model> named = FindModel(options.model);
  if (!named.ok()) return named.status();
  const Model model = Stored(*named, options.state_type == "fp32" ? StateType::kFp32 : StateType::kBf16);
  figures.json["model"] = model.name;
  figures.json["state_type"] = options.state_type;
  figures.json["capture"] = options.capture;
  figures.json["segments"] = nlohmann::json::array();
  std::printf("%-20s %8s │ %-8s %-6s %-8s %-8s %-6s │ %8s %8s │ %8s %8s │ %9s %8s %6s │ %s\n", "trace", "GB", "reuse",
              "seams", "policy", "stored", "hits", "tokens", "FLOPs", "TTFT p50", "p95, ms", "segments", "GB", "tuples",
              "unprofitable hits");
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
      SegmentReplay replay(model, settings[i], options.capture);
      for (const Trace::Request& request : trace->requests()) replay.Request(*trace, request);
      Print(*trace, settings[i], replay.result());
      figures.json["segments"].push_back(JsonOf(*trace, settings[i], replay.result()));
      progress.Show(i + 1, settings.size());
    }
  }
  return absl::OkStatus();
}

}  // namespace ashlar::replay
