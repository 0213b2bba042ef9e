// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/pass.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "examples/refengine/tokenizer.h"
#include "proto/invalid.h"

namespace ashlar::refengine {
namespace {

bool IsComplete(const CachedLayer& layer, int32_t heads, bool checkpoint) {
  if (layer.tuple.heads == nullptr || layer.conv_tail == nullptr) return false;
  return std::all_of(layer.tuple.heads, layer.tuple.heads + heads, [&](const kernels::HeadTuple& head) {
    return head.state != nullptr && (checkpoint || head.transition != nullptr || head.form == TransitionForm::kZero);
  });
}

// `filled`: the tuples are there before the first layer.
absl::Status CheckCached(const ModelConfig& config, bool may_be_checkpoint, bool filled, const Step& step,
                         const std::string& name) {
  if (!step.tokens.empty()) return Invalid(name, ": both tokens and cached layers");
  if (step.cached_tokens <= 0) return Invalid(name, ".cached_tokens: ", step.cached_tokens);
  if (step.cached.size() != static_cast<size_t>(config.layers())) {
    return Invalid(name, ".cached: ", step.cached.size(), " layers; expected ", config.layers(),
                   ", the model's number of layers");
  }
  if (step.checkpoint && !may_be_checkpoint) {
    return Invalid(name, ".checkpoint: only the first step of an empty sequence may be one");
  }
  for (int32_t layer = 0; filled && layer < config.layers(); ++layer) {
    if (config.is_attention(layer)) continue;
    if (!IsComplete(step.cached[layer], config.linear.value_heads, step.checkpoint)) {
      return Invalid(name, ".cached[", layer, "]: incomplete");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTokens(const Step& step, const std::string& name) {
  if (step.tokens.empty()) return Invalid(name, ": neither tokens nor cached layers");
  for (size_t i = 0; i < step.tokens.size(); ++i) {
    if (step.tokens[i] < 0 || step.tokens[i] >= kVocabulary) {
      return Invalid(name, ".tokens[", i, "]: ", step.tokens[i], " is not in the vocabulary");
    }
  }
  return absl::OkStatus();
}

// True when all of [begin, end) is computed by the chain, without an interior in between.
bool IsComputed(int64_t start, std::span<const Step> chain, int64_t begin, int64_t end) {
  if (begin < start) return false;
  int64_t position = start;
  for (const Step& step : chain) {
    const int64_t step_end = position + step.count();
    if (!step.cached.empty() && position < end && begin < step_end) return false;
    position = step_end;
  }
  return end <= position;
}

absl::Status CheckCaptures(const ModelConfig& config, int64_t start, std::span<const Step> chain,
                           std::span<const CaptureRange> captures) {
  for (size_t i = 0; i < captures.size(); ++i) {
    const CaptureRange& range = captures[i];
    const std::string name = absl::StrCat("captures[", i, "]");
    if (range.begin >= range.end) return Invalid(name, ": empty range");
    if (!IsComputed(start, chain, range.begin, range.end)) {
      return Invalid(name, ": positions ", range.begin, " to ", range.end, " are not all computed by this chain");
    }
    if (range.linear.size() != static_cast<size_t>(config.linear_layers())) {
      return Invalid(name, ".linear: ", range.linear.size(), " layers; expected ", config.linear_layers(),
                     ", the model's number of linear layers");
    }
    for (const TupleBuffers& buffers : range.linear) {
      if (buffers.state == nullptr || buffers.conv_tail == nullptr) return Invalid(name, ".linear: null buffer");
    }
  }
  return absl::OkStatus();
}

void AddCached(const Step& step, Pass& pass) {
  pass.steps.push_back({.cached = step.cached,
                        .checkpoint = step.checkpoint,
                        .begin = pass.rows(),
                        .end = pass.rows(),
                        .snapshot = step.snapshot});
}

// Adds tokens [from, from + count) of a computed step.
void AddTokens(const Step& step, int64_t from, int64_t count, Pass& pass) {
  const int64_t position = pass.end, row = pass.rows();
  const bool step_ends = from + count == step.count();
  const bool follows_cached = !pass.steps.empty() && !pass.steps.back().cached.empty();
  if (follows_cached) {
    pass.runs.push_back({.begin = row, .position = position, .before = pass.steps.back().cached});
  } else if (pass.runs.empty()) {
    pass.runs.push_back({.begin = row, .position = position});
  }
  pass.runs.back().end = row + count;
  pass.steps.push_back({.begin = row, .end = row + count, .snapshot = step_ends ? step.snapshot : nullptr});
  for (int64_t i = 0; i < count; ++i) {
    pass.tokens.push_back(step.tokens[from + i]);
    pass.positions.push_back(position + i);
  }
}

// The rows of each capture range that `pass` computes. Its rows ascend in position and have no gap inside a range.
void AddCaptures(std::span<const CaptureRange> captures, Pass& pass) {
  const auto row_of = [&](int64_t position) {
    return std::lower_bound(pass.positions.begin(), pass.positions.end(), position) - pass.positions.begin();
  };
  for (const CaptureRange& range : captures) {
    const int64_t begin = row_of(range.begin), end = row_of(range.end);
    if (begin == end) continue;
    pass.captures.push_back({.range = &range,
                             .begin = begin,
                             .end = end,
                             .first = pass.positions[begin] == range.begin,
                             .last = pass.positions[end - 1] == range.end - 1});
  }
}

}  // namespace

absl::Status CheckChain(const ModelConfig& config, int64_t start, std::span<const Step> chain,
                        const AdvanceOptions& options) {
  if (chain.empty()) return Invalid("chain: empty");
  bool computes = false;
  for (size_t i = 0; i < chain.size(); ++i) {
    const std::string name = absl::StrCat("chain[", i, "]");
    const bool cached = !chain[i].cached.empty();
    const absl::Status status =
        cached ? CheckCached(config, start == 0 && i == 0, options.on_layer == nullptr, chain[i], name)
               : CheckTokens(chain[i], name);
    if (!status.ok()) return status;
    computes |= !cached;
  }
  if (!computes && (options.last_logits != nullptr || options.all_logits != nullptr)) {
    return Invalid(options.last_logits != nullptr ? "last_logits" : "all_logits", ": the chain computes no token");
  }
  return CheckCaptures(config, start, chain, options.captures);
}

std::vector<Pass> CutIntoPasses(int64_t start, std::span<const Step> chain, std::span<const CaptureRange> captures,
                                int64_t pass_tokens) {
  std::vector<Pass> passes(1);
  passes.back().end = start;
  for (const Step& step : chain) {
    if (!step.cached.empty()) {
      AddCached(step, passes.back());
      passes.back().end += step.count();
      continue;
    }
    for (int64_t done = 0; done < step.count();) {
      if (passes.back().rows() == pass_tokens) passes.push_back({.end = passes.back().end});
      Pass& pass = passes.back();
      const int64_t count = std::min(step.count() - done, pass_tokens - pass.rows());
      AddTokens(step, done, count, pass);
      pass.end += count;
      done += count;
    }
  }
  for (Pass& pass : passes) AddCaptures(captures, pass);
  return passes;
}

}  // namespace ashlar::refengine
