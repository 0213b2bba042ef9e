// SPDX-License-Identifier: Apache-2.0
// ashlar-replay break-even: the shortest segments whose hits pay.
#include <cstdio>

#include "tools/replay/commands.h"
#include "tools/replay/models.h"
#include "tools/replay/segment_costs.h"

namespace ashlar::replay {
namespace {

constexpr uint64_t kStep = 16, kMost = uint64_t{1} << 20;  // tokens
constexpr uint64_t kPosition = 4096;                       // of the segment in its prompt

// The shortest segment whose hit pays at kPosition, in steps of kStep tokens. 0: none of at most kMost tokens.
uint64_t Shortest(const SegmentCosts& costs, double link_bytes_per_second) {
  for (uint64_t tokens = kStep; tokens <= kMost; tokens += kStep) {
    if (costs.Pays(kPosition, kPosition + tokens, link_bytes_per_second)) return tokens;
  }
  return 0;
}

}  // namespace

absl::Status FindBreakEven(const Options& options, Figures& figures) {
  figures.json["position"] = kPosition;
  figures.json["shortest"] = nlohmann::json::array();
  std::printf("%-12s %-5s %-8s │ %8s %8s │ shortest segment that pays, tokens\n", "model", "type", "stored", "tuple MB",
              "at 4096");
  for (const std::string& name : options.models) {
    const absl::StatusOr<Model> named = FindModel(name);
    if (!named.ok()) return named.status();
    for (const StateType type : {StateType::kBf16, StateType::kFp32}) {
      const Model model = Stored(*named, type);
      for (const bool adaptive : {false, true}) {
        const SegmentCosts costs(model, adaptive);
        std::printf("%-12s %-5s %-8s │ %8.1f %8.1f │", model.name.c_str(), type == StateType::kBf16 ? "bf16" : "fp32",
                    adaptive ? "adaptive" : "dense", static_cast<double>(costs.TupleBytes(kStep)) / 1e6,
                    static_cast<double>(costs.TupleBytes(kPosition)) / 1e6);
        for (const uint64_t link : options.links) {
          const uint64_t tokens = Shortest(costs, static_cast<double>(link));
          std::printf(" %7s", tokens == 0 ? "none" : std::to_string(tokens).c_str());
          figures.json["shortest"].push_back({{"model", model.name},
                                              {"state_type", type == StateType::kBf16 ? "bf16" : "fp32"},
                                              {"transitions", adaptive ? "adaptive" : "dense"},
                                              {"link_bytes_per_second", link},
                                              {"tuple_bytes", costs.TupleBytes(tokens == 0 ? kMost : tokens)},
                                              {"tokens", tokens == 0 ? nlohmann::json() : nlohmann::json(tokens)}});
        }
        std::printf("\n");
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace ashlar::replay
