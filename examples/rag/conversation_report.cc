// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/conversation_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>

namespace ashlar::rag {
namespace {

constexpr Source kSources[] = {Source::kNothing, Source::kSegments, Source::kTree, Source::kOwn};

using TurnValue = std::function<double(const TurnResult&)>;

double Speedup(const TurnResult& turn) {
  return turn.full_ttft_ms / turn.ttft_ms;
}

std::vector<TurnResult> From(const ConversationResult& run, Source source) {
  std::vector<TurnResult> turns;
  std::ranges::copy_if(run.results, std::back_inserter(turns),
                       [&](const TurnResult& turn) { return turn.source == source; });
  return turns;
}

double Median(const std::vector<TurnResult>& turns, const TurnValue& value) {
  if (turns.empty()) return std::nan("");
  std::vector<double> values;
  for (const TurnResult& turn : turns) values.push_back(value(turn));
  std::ranges::sort(values);
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

struct Bits {
  size_t same = 0, of = 0;
};

Bits BitsOf(const ConversationResult& run, bool composed) {
  Bits bits;
  for (const TurnResult& turn : run.results) {
    if (turn.composed != composed || !turn.logits_rel_l2) continue;
    ++bits.of;
    bits.same += turn.bit_identical;
  }
  return bits;
}

struct Spans {
  size_t rebuilt = 0, kept = 0;
  uint64_t saved_bytes = 0;
};

Spans SpansOf(const ConversationResult& run) {
  Spans spans;
  for (const TurnResult& turn : run.results) {
    spans.rebuilt += turn.span_tokens > 0;
    spans.kept += turn.saved_bytes > 0;
    spans.saved_bytes += turn.saved_bytes;
  }
  return spans;
}

std::string SameCuts(const TurnResult& turn) {
  if (!turn.logits_rel_l2) return "–";
  if (turn.bit_identical) return "bits";
  char text[16];
  std::snprintf(text, sizeof(text), "%.1e", *turn.logits_rel_l2);
  return text;
}

nlohmann::json ToJson(const TurnResult& turn) {
  nlohmann::json json = {{"conversation", turn.conversation},
                         {"turn", turn.turn},
                         {"kind", turn.composed ? "composed" : "exact"},
                         {"tokens", turn.tokens},
                         {"resumed", turn.resumed},
                         {"source", Name(turn.source)},
                         {"computed_tokens", turn.computed_tokens},
                         {"ttft_ms", turn.ttft_ms},
                         {"full_ttft_ms", turn.full_ttft_ms},
                         {"flop_floor_speedup", turn.flop_floor_speedup},
                         {"full_rel_l2", turn.full_rel_l2},
                         {"bit_identical", turn.bit_identical},
                         {"checkpoints_asked", turn.checkpoints_offered},
                         {"kept", turn.kept},
                         {"commit_ms", turn.commit_ms}};
  if (turn.span_tokens > 0) json["span_tokens"] = turn.span_tokens;
  if (turn.state_rel_l2) json["state_rel_l2"] = *turn.state_rel_l2;
  if (turn.saved_bytes > 0) json["saved_bytes"] = turn.saved_bytes;
  json["logits_rel_l2"] = turn.logits_rel_l2 ? nlohmann::json(*turn.logits_rel_l2) : nullptr;
  return json;
}

}  // namespace

const char* Name(Source source) {
  switch (source) {
    case Source::kNothing:
      return "nothing";
    case Source::kSegments:
      return "segments";
    case Source::kTree:
      return "tree";
    case Source::kOwn:
      return "own";
  }
  return "unknown";
}

double ConversationResult::WorstExact() const {
  double worst = 0;
  for (const TurnResult& turn : results) {
    if (!turn.composed) worst = std::max(worst, turn.full_rel_l2);
  }
  return worst;
}

double ConversationResult::WorstRebuilt() const {
  double worst = 0;
  for (const TurnResult& turn : results) worst = std::max(worst, turn.state_rel_l2.value_or(0));
  return worst;
}

bool ConversationResult::Holds() const {
  if (!spans || *spans == DType::kF32) return WorstExact() <= kExactBound && WorstRebuilt() <= kExactBound;
  return WorstRebuilt() <= (*spans == DType::kF16 ? kHalfBound : kBFloat16Bound);
}

void PrintTurnHeader() {
  std::printf("%4s %4s %8s │ %6s %7s %8s %8s │ %8s %8s %7s │ %9s %9s │ %s\n", "chat", "turn", "kind", "tokens",
              "resumed", "from", "computed", "full ms", "ashlar", "speedup", "vs full", "same cuts", "kept");
}

void PrintTurn(const TurnResult& turn) {
  std::printf("%4ld %4ld %8s │ %6lu %7lu %8s %8lu │ %8.0f %8.1f %6.1f× │ %9.1e %9s │ %lu of %lu",
              static_cast<long>(turn.conversation), static_cast<long>(turn.turn), turn.composed ? "composed" : "exact",
              static_cast<unsigned long>(turn.tokens), static_cast<unsigned long>(turn.resumed), Name(turn.source),
              static_cast<unsigned long>(turn.computed_tokens), turn.full_ttft_ms, turn.ttft_ms, Speedup(turn),
              turn.full_rel_l2, SameCuts(turn).c_str(), static_cast<unsigned long>(turn.kept),
              static_cast<unsigned long>(turn.checkpoints_offered));
  if (turn.span_tokens > 0) std::printf(" │ rebuilt through %lu", static_cast<unsigned long>(turn.span_tokens));
  if (turn.state_rel_l2) std::printf(", states off by %.1e", *turn.state_rel_l2);
  std::printf("\n");
  std::fflush(stdout);
}

void PrintSummary(const ConversationResult& run) {
  std::printf("\n%ld conversations of %ld turns; %d threads\n\n  time to first token, medians, ms:\n",
              static_cast<long>(run.conversations), static_cast<long>(run.turns), run.threads);
  for (const Source source : kSources) {
    const std::vector<TurnResult> turns = From(run, source);
    if (turns.empty()) continue;
    std::printf("    from %-9s %3zu turns  full %5.0f  ashlar %6.1f  %5.1f× (FLOPs alone: %.1f×)  then commit %.1f\n",
                Name(source), turns.size(), Median(turns, [](const auto& t) { return t.full_ttft_ms; }),
                Median(turns, [](const auto& t) { return t.ttft_ms; }), Median(turns, Speedup),
                Median(turns, [](const auto& t) { return t.flop_floor_speedup; }),
                Median(turns, [](const auto& t) { return t.commit_ms; }));
  }
  if (run.spans) {
    const Spans spans = SpansOf(run);
    std::printf(
        "\n  resumed inside an answer, by a span: %zu turns; their states against full recompute, worst relative L2: "
        "%.1e\n",
        spans.rebuilt, run.WorstRebuilt());
    std::printf("  kept as spans: %zu ends of texts, %.1f MiB less than their states\n", spans.kept,
                static_cast<double>(spans.saved_bytes) / (1 << 20));
  }
  const Bits exact = BitsOf(run, false), composed = BitsOf(run, true);
  std::printf("\n  exact turns, first token's logits against full recompute, worst relative L2: %.1e\n",
              run.WorstExact());
  std::printf("  the same bits as without a cache, cut alike:     %zu of %zu exact turns\n", exact.same, exact.of);
  std::printf("  the same bits as a sequence that was never left: %zu of %zu composed turns\n", composed.same,
              composed.of);
}

nlohmann::json ToJson(const ConversationResult& run) {
  nlohmann::json json;
  json["turns"] = nlohmann::json::array();
  for (const TurnResult& turn : run.results) json["turns"].push_back(ToJson(turn));
  nlohmann::json& summary = json["summary"];
  summary = {{"conversations", run.conversations},
             {"turns", run.turns},
             {"threads", run.threads},
             {"worst_exact_rel_l2", run.WorstExact()}};
  if (run.spans) {
    const Spans spans = SpansOf(run);
    summary["spans"] = {{"rebuilt", spans.rebuilt},
                        {"worst_state_rel_l2", run.WorstRebuilt()},
                        {"kept", spans.kept},
                        {"saved_bytes", spans.saved_bytes}};
  }
  for (const bool composed : {false, true}) {
    const Bits bits = BitsOf(run, composed);
    summary["bit_identical"][composed ? "composed" : "exact"] = {{"same", bits.same}, {"of", bits.of}};
  }
  for (const Source source : kSources) {
    const std::vector<TurnResult> turns = From(run, source);
    if (turns.empty()) continue;
    summary["from"][Name(source)] = {
        {"turns", turns.size()},
        {"ttft_ms", Median(turns, [](const auto& t) { return t.ttft_ms; })},
        {"full_ttft_ms", Median(turns, [](const auto& t) { return t.full_ttft_ms; })},
        {"speedup", Median(turns, Speedup)},
        {"flop_floor_speedup", Median(turns, [](const auto& t) { return t.flop_floor_speedup; })},
        {"commit_ms", Median(turns, [](const auto& t) { return t.commit_ms; })}};
  }
  return json;
}

}  // namespace ashlar::rag
