// SPDX-License-Identifier: Apache-2.0
// The shortest complete engine: one linear and one attention layer, prompts assembled from cached segments, greedy
// decoding. It uses only ashlar/engine.h. docs/integrate.md walks through it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "ashlar/engine.h"

using namespace ashlar::engine;

constexpr uint32_t kHeads = 2, kDim = 16, kWidth = kHeads * kDim, kPageTokens = 16, kLinear = 0, kAttention = 1;
constexpr int32_t kSeparator = '.';               // a token is a character
constexpr float kDecays[kHeads] = {-0.3, -0.01};  // decays of the linear layer's heads, logarithms per token

Status Check(Status status) {
  if (status.ok() || status.code == Code::kRestart) return status;
  std::fprintf(stderr, "shortest: %s\n", status.message);
  std::exit(1);
}

class Engine {
 public:
  Engine(const char* rpc_socket, const char* session_socket) : table_(64) {
    Layer layers[2] = {{.kind = LayerKind::kLinear, .family = Family::kRetnet}, {.kind = LayerKind::kGqa}};
    layers[kLinear].key_heads = layers[kLinear].value_heads = layers[kAttention].kv_heads = kHeads;
    layers[kLinear].d_k = layers[kLinear].d_v = layers[kAttention].key_dim = layers[kAttention].value_dim = kDim;
    layers[kLinear].decay_table = kDecays;
    OpenOptions options = {.rpc_socket = rpc_socket, .session_socket = session_socket};
    options.model = {.model_id = "shortest", .weights_digest = "1", .page_tokens = kPageTokens, .head = 4, .tail = 4};
    options.model.layers = layers;
    options.model.layer_count = 2;
    options.memory.pages = static_cast<uint32_t>(table_.size());
    Check(Cache::Open(options, &cache_));
    place_ = *cache_.places(nullptr);  // place of one attention layer
    std::iota(table_.begin(), table_.end(), 0);
  }

  // Computes the prompt, whose segments end with a period, decodes, and reports what came from the cache.
  std::string Serve(const std::string& text, int decode) {
    std::vector<int32_t> tokens(text.begin(), text.end());
    uint64_t lengths[8], segments;
    Check(SegmentLengths(tokens.data(), tokens.size(), &kSeparator, 1, 0, lengths, std::size(lengths), &segments));
    Prompt prompt = {tokens.data(), tokens.size(), lengths, segments, table_.data(), table_.size()};
    prompt.fill = true;
    Request request;
    Check(cache_.Begin(&prompt, 1, &request));
    uint32_t missing;
    const Run* const runs = request.missing(&missing);
    for (uint32_t i = 0; i < missing; ++i) Publish(request, i, runs[i]);
    if (missing > 0) Check(request.LookAgain(table_.data(), table_.size()));
    do {  // once, or again if a hit failed to land
      Clear();
      state_.assign(kHeads * kDim * kDim, 0);
      for (const Step *step = request.plan().steps, *end = step + request.plan().step_count; step < end; ++step) {
        if (step->kind == StepKind::kCompute) Embed(tokens.data(), step->begin, step->end);
      }
      if (Advance(request, 0, tokens.size()) && Check(request.WaitLayer(kAttention)).ok()) Attend();
    } while (!Check(request.Finish()).ok());
    std::printf("%zu of %zu segments hit, %zu of %zu tokens computed: ", segments - missing, segments,
                positions_.size(), tokens.size());
    for (int i = 0; i < decode; ++i) {
      tokens.push_back(BestToken());
      Clear();
      Embed(tokens.data(), tokens.size() - 1, tokens.size());
      Advance(request, tokens.size() - 1, tokens.size());
      Attend();
    }
    return {tokens.end() - decode, tokens.end()};
  }

 private:
  // Computes a segment alone, from a zero state at position 0, in pages where nothing lands meanwhile.
  void Publish(Request& request, uint32_t missing, const Run& run) {
    Clear();
    Embed(run.tokens, 0, run.token_count);
    std::vector<float> out(rows_.size()), transition(kHeads);
    state_.resize(kHeads * kDim * kDim);
    Check(cache_.ComputeAlone({kLinear, Inputs(), out.data(), kWidth, &run, {state_.data()}, transition.data()}));
    std::ranges::transform(rows_, out, rows_.begin(), std::plus());
    Attend();
    const LinearTensors tensors = {.layer = kLinear, .state = state_.data(), .transition = transition.data()};
    Check(request.Publish(missing, {&tensors, 1, table_.data(), table_.size()}, nullptr));
  }
  // The linear layer: cached interiors are composed, and rows run between them. False: the plan has changed.
  bool Advance(Request& request, uint64_t begin, uint64_t end) {
    std::vector<float> out(rows_.size());
    const LayerAdvance layer = {kLinear, begin, end, Inputs(), {state_.data()}, out.data(), kWidth};
    if (!Check(request.Advance(layer)).ok()) return false;
    std::ranges::transform(rows_, out, rows_.begin(), std::plus());
    return true;
  }
  // The attention layer: a row is its own key and value, and sees all positions up to its own.
  void Attend() {
    for (size_t h = 0; h < rows_.size(); h += kDim) {
      const uint64_t position = positions_[h / kWidth];
      std::copy_n(&rows_[h], kDim, Slot(position, place_.key_offset) + h % kWidth);
      std::copy_n(&rows_[h], kDim, Slot(position, place_.value_offset) + h % kWidth);
      float sum = 0, out[kDim] = {};
      for (uint64_t p = 0; p <= position; ++p) {
        const float *const key = Slot(p, place_.key_offset) + h % kWidth, *value = Slot(p, place_.value_offset);
        const float weight = std::exp(std::inner_product(key, key + kDim, &rows_[h], 0.0f));
        sum += weight;
        for (uint32_t i = 0; i < kDim; ++i) out[i] += weight * value[h % kWidth + i];
      }
      for (uint32_t i = 0; i < kDim; ++i) rows_[h + i] += out[i] / sum;
    }
  }
  float* Slot(uint64_t position, uint64_t offset) {
    offset += table_[position / kPageTokens] * place_.page_stride + position % kPageTokens * place_.token_stride;
    return reinterpret_cast<float*>(cache_.data() + offset);
  }
  void Clear() { rows_.clear(), positions_.clear(); }
  static float Weight(int32_t token, uint32_t i) { return 0.3f * std::sin(1.7f * (token + 1) * (i + 3)); }
  void Embed(const int32_t* tokens, uint64_t begin, uint64_t end) {
    for (uint64_t p = begin; p < end; positions_.push_back(p++)) {
      for (uint32_t i = 0; i < kWidth; ++i) rows_.push_back(Weight(tokens[p], i));
    }
  }
  TokenRows Inputs() const {
    const float* const rows = rows_.data();
    return {positions_.size(), rows, rows, rows, nullptr, nullptr, kWidth, kWidth, kWidth};
  }
  int32_t BestToken() const {
    float logits['z' + 1] = {};
    for (int32_t token = 'a'; token <= 'z'; ++token) {
      for (uint32_t i = 0; i < kWidth; ++i) logits[token] += rows_[rows_.size() - kWidth + i] * Weight(token, i);
    }
    return static_cast<int32_t>(std::max_element(logits + 'a', std::end(logits)) - logits);
  }

  Cache cache_;
  PagePlace place_;
  std::vector<int32_t> table_;       // one prompt at a time uses all pages
  std::vector<uint64_t> positions_;  // positions of the rows
  std::vector<float> rows_, state_;  // [tokens][kWidth]; the linear layer's
};

int main(int argc, char** argv) {
  Engine engine(argc > 1 ? argv[1] : "", argc > 2 ? argv[2] : "");  // the daemon's sockets: rpc, session
  const std::string rules = "Answer from these pages.", arch = "An arch stands because every stone wants to fall.";
  const std::string ashlar = "Ashlar is cut to one face.", query = "Why does it stand?";
  std::printf("%s\n", engine.Serve(rules + arch + ashlar + query, 12).c_str());
  std::printf("%s\n", engine.Serve(rules + ashlar + arch + query, 12).c_str());
}
