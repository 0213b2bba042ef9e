// The shortest complete engine: a model of one linear layer and one attention layer, prompts set from cached segments,
// greedy decoding. All that it knows of the cache is ashlar/engine.h. docs/integrate.md walks through it.
//
// usage: shortest RPC_SOCKET SESSION_SOCKET
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "ashlar/engine.h"

namespace {

using namespace ashlar::engine;

constexpr uint32_t kHeads = 2, kDim = 16, kWidth = kHeads * kDim, kPageTokens = 16, kPages = 64;
constexpr uint32_t kLinear = 0, kAttention = 1;  // the layers
const float kDecays[kHeads] = {-0.02f, -0.2f};   // logarithms, a token

Status Check(Status status) {
  if (status.ok() || status.code >= Code::kPending) return status;
  std::fprintf(stderr, "shortest: %s\n", status.message);
  std::exit(1);
}

class Engine {
 public:
  Engine(const char* rpc_socket, const char* session_socket) {
    const Layer layers[] = {
        {.kind = LayerKind::kLinear, .family = Family::kRetnet, .key_heads = kHeads, .value_heads = kHeads, .d_k = kDim,
         .d_v = kDim, .decay_table = kDecays},
        {.kind = LayerKind::kGqa, .kv_heads = kHeads, .key_dim = kDim, .value_dim = kDim}};
    Check(Cache::Open({.rpc_socket = rpc_socket,
                       .session_socket = session_socket,
                       .model = {.model_id = "shortest", .weights_digest = "1", .dtype = "f32",
                                 .page_tokens = kPageTokens, .head = 4, .tail = 4, .layers = layers, .layer_count = 2},
                       .memory = {.pages = kPages}},
                      &cache_));
    uint32_t count;
    place_ = *cache_.places(&count);
  }

  // Computes the prompt, decodes, and says what came from the cache.
  std::string Serve(const std::vector<std::string>& segments, const std::string& query, int decode) {
    std::vector<int32_t> tokens;
    std::vector<uint64_t> lengths;
    for (const std::string& segment : segments) {
      tokens.insert(tokens.end(), segment.begin(), segment.end());
      lengths.push_back(segment.size());
    }
    tokens.insert(tokens.end(), query.begin(), query.end());
    std::vector<int32_t> table((tokens.size() + decode) / kPageTokens + 1);
    std::iota(table.begin(), table.end(), 0);

    const Prompt prompt = {.tokens = tokens.data(), .token_count = tokens.size(), .segment_lengths = lengths.data(),
                           .segment_count = lengths.size(), .page_table = table.data(), .page_count = table.size(),
                           .fill = true};
    Request request;
    Check(cache_.Begin(&prompt, 1, &request));
    uint32_t missing;
    const Run* const runs = request.missing(&missing);
    for (uint32_t i = 0; i < missing; ++i) Publish(request, i, runs[i], table);
    const uint64_t hits = lengths.size() - missing;
    if (missing > 0) Check(request.LookAgain(table.data(), table.size()));

    std::vector<float> state, rows;
    do {  // once; again, where something that was found did not land
      state.assign(kHeads * kDim * kDim, 0);
      rows.clear();
      std::vector<uint64_t> positions;
      const Plan& plan = request.plan();
      for (uint32_t i = 0; i < plan.step_count; ++i) {
        if (plan.steps[i].kind != StepKind::kCompute) continue;
        for (uint64_t p = plan.steps[i].begin; p < plan.steps[i].end; ++p) positions.push_back(p);
      }
      Embed(tokens, positions, rows);
      if (!Advance(request, 0, tokens.size(), rows, state)) continue;
      if (request.WaitLayer(kAttention).ok()) Attend(positions, table, rows);
    } while (Check(request.Finish()).code == Code::kRestart);

    std::printf("%zu of %zu segments hit, %zu of %zu tokens computed\n", static_cast<size_t>(hits), lengths.size(),
                rows.size() / kWidth, tokens.size());
    std::string answer;
    for (int i = 0; i < decode; ++i) {
      tokens.push_back(Best(rows.data() + rows.size() - kWidth));
      answer += static_cast<char>(tokens.back());
      const uint64_t position = tokens.size() - 1;
      Embed(tokens, {position}, rows);
      Advance(request, position, position + 1, rows, state);
      Attend({position}, table, rows);
    }
    return answer;
  }

 private:
  // A segment alone, from a zero state, in pages that the prompt does not use yet.
  void Publish(Request& request, uint32_t missing, const Run& run, const std::vector<int32_t>& table) {
    std::vector<uint64_t> positions(run.token_count);
    std::iota(positions.begin(), positions.end(), 0);
    std::vector<float> rows, state(kHeads * kDim * kDim), transition(kHeads);
    Embed({run.tokens, run.tokens + run.token_count}, positions, rows);
    std::vector<float> out(rows.size());
    Check(cache_.ComputeAlone({.layer = kLinear, .inputs = Inputs(rows), .out = out.data(), .out_stride = kWidth,
                               .capture_begin = run.capture_begin, .capture_end = run.capture_end,
                               .transition = run.transition ? transition.data() : nullptr,
                               .state = {.data = state.data()}}));
    for (size_t i = 0; i < rows.size(); ++i) rows[i] += out[i];
    Attend(positions, table, rows);
    const LinearTensors tensors = {.layer = kLinear, .state = state.data(), .transition = transition.data()};
    Check(request.Publish(missing, {&tensors, 1, table.data(), table.size(), 0}, nullptr));
  }

  // The linear layer of positions [begin, end): cached interiors are composed, `rows` run between them. False: restart.
  bool Advance(Request& request, uint64_t begin, uint64_t end, std::vector<float>& rows, std::vector<float>& state) {
    std::vector<float> out(rows.size());
    const bool done = Check(request.Advance({.layer = kLinear, .begin = begin, .end = end, .inputs = Inputs(rows),
                                             .state = {.data = state.data()}, .out = out.data(),
                                             .out_stride = kWidth})).ok();
    for (size_t i = 0; i < rows.size(); ++i) rows[i] += out[i];
    return done;
  }
  // The attention layer: keys are values are rows; each sees all positions up to its own.
  void Attend(const std::vector<uint64_t>& positions, const std::vector<int32_t>& table, std::vector<float>& rows) {
    const auto slot = [&](uint64_t position, uint64_t offset) {
      return reinterpret_cast<float*>(cache_.data() + offset + table[position / kPageTokens] * place_.page_stride +
                                      position % kPageTokens * place_.token_stride);
    };
    for (size_t r = 0; r < positions.size(); ++r) {
      for (const uint64_t offset : {place_.key_offset, place_.value_offset})
        std::memcpy(slot(positions[r], offset), &rows[r * kWidth], kWidth * sizeof(float));
    }
    for (size_t r = 0; r < positions.size(); ++r) {
      for (uint32_t h = 0; h < kWidth; h += kDim) {
        float* const row = &rows[r * kWidth + h];
        float sum = 0, out[kDim] = {};
        for (uint64_t p = 0; p <= positions[r]; ++p) {
          const float* const key = slot(p, place_.key_offset) + h;
          const float weight = std::exp(std::inner_product(row, row + kDim, key, 0.0f));
          sum += weight;
          for (uint32_t i = 0; i < kDim; ++i) out[i] += weight * slot(p, place_.value_offset)[h + i];
        }
        for (uint32_t i = 0; i < kDim; ++i) row[i] += out[i] / sum;
      }
    }
  }

  static TokenRows Inputs(const std::vector<float>& x) {
    return {.tokens = x.size() / kWidth, .q = x.data(), .k = x.data(), .v = x.data(), .q_stride = kWidth,
            .k_stride = kWidth, .v_stride = kWidth};
  }
  static float Weight(int32_t token, uint32_t i) { return 0.3f * std::sin(1.7f * (token + 1) * (i + 3)); }
  static void Embed(const std::vector<int32_t>& tokens, const std::vector<uint64_t>& positions, std::vector<float>& rows) {
    rows.clear();
    for (const uint64_t position : positions)
      for (uint32_t i = 0; i < kWidth; ++i) rows.push_back(Weight(tokens[position], i));
  }
  static int32_t Best(const float* row) {
    float best = -INFINITY;
    int32_t token = 0;
    for (int32_t t = 'a'; t <= 'z'; ++t) {
      float logit = 0;
      for (uint32_t i = 0; i < kWidth; ++i) logit += row[i] * Weight(t, i);
      if (logit > best) best = logit, token = t;
    }
    return token;
  }

  Cache cache_;
  PagePlace place_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "usage: shortest RPC_SOCKET SESSION_SOCKET\n"), 2;
  Engine engine(argv[1], argv[2]);
  const std::string rules = "You answer from these pages, in one word.";
  const std::string first = "An arch stands because every stone wants to fall.", second = "Ashlar is cut to one face.";
  std::printf("%s\n", engine.Serve({rules, first, second}, "Why does it stand?", 8).c_str());
  std::printf("%s\n", engine.Serve({rules, second, first}, "Why does it stand?", 8).c_str());
}
