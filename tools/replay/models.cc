// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/models.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "proto/regular_file.h"

namespace ashlar::replay {
namespace {

constexpr uint64_t kHalf = 2;          // bytes of a 16-bit number
constexpr double kPrefillRate = 4e14;  // FLOP/s: about what prefill reaches on one H100 in 16 bits
constexpr double kLinkRate = 5e10;     // bytes per second: about what PCIe 5.0 transfers over 16 lanes

// Marconi's 7B hybrid (its appendix A, and the constants of its published code): 4 attention, 24 SSM and 28 MLP layers,
// D = 4096, N = 128, one state of D · N and a convolution of kernel 4 over 2 D + 2 N channels per layer.
Model Marconi7b() {
  constexpr double d = 4096, n = 128;
  constexpr uint64_t d_bytes = 2 * 4096 * kHalf;  // one decay per channel of the state space
  constexpr uint64_t state = (4096 * 128 + (2 * 4096 + 2 * 128) * 4) * kHalf;
  return {.name = "marconi-7b",
          .costs = {.page_tokens = 1,
                    .page_bytes = 4 * 2 * 4096 * kHalf,
                    .checkpoint_bytes = 24 * state,
                    .flops_per_token = 24 * (12 * d * d + 16 * d * n + 10 * d) + 4 * 8 * d * d + 28 * 16 * d * d,
                    .flops_per_square = 4 * 4 * d},
          .transition_bytes = 24 * d_bytes,
          .flops_per_second = kPrefillRate,
          .link_bytes_per_second = kLinkRate};
}

// Linear layers with `heads` states of 128 × 128, after a convolution of kernel 4 over `channels` that keeps three
// tokens. FLOPs: two per active parameter, and causal attention over query heads of `width` numbers in total.
struct Hybrid {
  const char* name;
  uint64_t attention_layers, token_bytes;  // keys and values per layer
  uint64_t linear_layers, heads, channels;
  uint64_t transition;  // numbers per head
  double active_parameters, width;
};
constexpr Hybrid kHybrids[] = {
    // 12 attention layers of 2 key-value heads and 16 query heads of 256; 36 of gated DeltaNet with 32 value heads.
    {"qwen3-next", 12, 2 * 2 * 256 * kHalf, 36, 32, 2 * 16 * 128 + 32 * 128, 128 * 128, 3e9, 16 * 256},
    // 7 MLA layers with a latent of 512 and 64 more of the key; 32 heads, queries of 192 and values of 128; 20 of KDA.
    {"kimi-linear", 7, (512 + 64) * kHalf, 20, 32, 3 * 32 * 128, 128 * 128, 3e9, 32 * (192 + 128) / 2},
    // 4 attention layers of 4 key-value heads and 16 query heads of 128; 16 of lightning attention, no convolution.
    {"ring-mini", 4, 2 * 4 * 128 * kHalf, 16, 16, 0, 1, 1.6e9, 16 * 128},
};

Model Build(const Hybrid& hybrid) {
  constexpr uint64_t page_tokens = 16, kept = 3;
  const uint64_t layer = (hybrid.heads * 128 * 128 + hybrid.channels * kept) * kHalf;
  return {.name = hybrid.name,
          .costs = {.page_tokens = page_tokens,
                    .page_bytes = page_tokens * hybrid.attention_layers * hybrid.token_bytes,
                    .checkpoint_bytes = hybrid.linear_layers * layer,
                    .flops_per_token = 2 * hybrid.active_parameters,
                    .flops_per_square = 2 * static_cast<double>(hybrid.attention_layers) * hybrid.width},
          .transition_bytes = hybrid.linear_layers * hybrid.heads * hybrid.transition * kHalf,
          .flops_per_second = kPrefillRate,
          .link_bytes_per_second = kLinkRate};
}

absl::StatusOr<Model> ReadModel(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadRegularFile("model", path, kMaxConfigFileBytes);
  if (absl::IsNotFound(text.status())) {
    return absl::NotFoundError(absl::StrCat(
        "model: ", path, " is unknown; expected a JSON file, marconi-7b, qwen3-next, kimi-linear or ring-mini"));
  }
  if (!text.ok()) return text.status();
  const auto json = nlohmann::json::parse(*text, nullptr, false);
  if (!json.is_object()) return absl::InvalidArgumentError(absl::StrCat("model: ", path, ": expected a JSON object"));
  std::string wrong;
  const auto field = [&](const char* name, bool positive) -> double {
    const auto at = json.find(name);
    const bool good = at != json.end() && at->is_number() && std::isfinite(at->get<double>()) &&
                      (positive ? at->get<double>() > 0 : at->get<double>() >= 0);
    if (!good && wrong.empty()) wrong = name;
    return good ? at->get<double>() : 1;
  };
  const auto whole = [&](const char* name) { return static_cast<uint64_t>(field(name, true)); };
  Model model{.name = path,
              .costs = {.page_tokens = whole("page_tokens"),
                        .page_bytes = whole("page_bytes"),
                        .checkpoint_bytes = whole("checkpoint_bytes"),
                        .flops_per_token = field("flops_per_token", true),
                        .flops_per_square = field("flops_per_square", false)},
              .transition_bytes = whole("transition_bytes"),
              .flops_per_second = field("flops_per_second", true),
              .link_bytes_per_second = field("link_bytes_per_second", true)};
  if (!wrong.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("model: ", path, ": ", wrong, " must be a number above 0"));
  }
  return model;
}

}  // namespace

absl::StatusOr<Model> FindModel(const std::string& name) {
  if (name == "marconi-7b") return Marconi7b();
  for (const Hybrid& hybrid : kHybrids) {
    if (name == hybrid.name) return Build(hybrid);
  }
  return ReadModel(name);
}

}  // namespace ashlar::replay
