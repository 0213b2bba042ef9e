// SPDX-License-Identifier: Apache-2.0
// The shortest engine that reuses exact prefixes only: a text resumes at the token at which an earlier one was
// checkpointed. docs/integrate.md explains the differences from main.cc.
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "ashlar/engine.h"
#include "examples/shortest/tiny_model.h"

using namespace ashlar::engine;
using Tiny = ashlar::shortest::TinyModel;

Status Check(Status status) {
  if (status.ok() || status.code == Code::kRestart) return status;
  std::fprintf(stderr, "prefixes: %s\n", status.message);
  std::exit(1);
}

class Engine {
 public:
  Engine(const char* rpc_socket, const char* session_socket) : table_(64) {
    OpenOptions options = {.rpc_socket = rpc_socket, .session_socket = session_socket};
    options.model = {.model_id = "prefixes"};
    model_.Describe(options.model);
    options.memory.pages = static_cast<uint32_t>(table_.size());
    options.capture_tokens = 1;  // states can be captured after any token
    Check(Cache::Open(options, &cache_));
    place_ = *cache_.places(nullptr);  // place of one attention layer
    std::iota(table_.begin(), table_.end(), 0);
  }

  // Computes the prompt, decodes, and commits the states that the plan requested, and those at the end.
  void Serve(const std::string& text, int decode) {
    std::vector<int32_t> tokens(text.begin(), text.end());
    tokens.reserve(text.size() + decode);  // the request points into them
    const Prompt prompt = {tokens.data(), text.size(), nullptr, 0, table_.data(), table_.size()};
    Request request;
    Check(cache_.Begin(&prompt, 1, &request));
    do {  // once, or again if the prefix failed to land
      Prepare(request.plan(), tokens.data());
      if (Advance(request, 0, text.size()) && Check(request.WaitLayer(Tiny::kAttention)).ok()) Attend();
    } while (!Check(request.Finish()).ok());
    std::printf("%zu of %zu tokens computed: ", model_.positions().size(), text.size());
    const std::vector<StateCopy> captured = std::move(copies_);  // decoding requests none
    copies_.clear();
    for (int i = 0; i < decode; ++i) {
      tokens.push_back(model_.BestToken());
      model_.Clear();
      model_.Embed(tokens.data(), tokens.size() - 1, tokens.size());
      Advance(request, tokens.size() - 1, tokens.size());
      Attend();
    }
    Commit(request, tokens, text.size(), captured);
    std::printf("%s\n", std::string(tokens.end() - decode, tokens.end()).c_str());
  }

 private:
  // The rows that the plan lets the engine compute, a zero state, and memory for the requested states.
  void Prepare(const Plan& plan, const int32_t* tokens) {
    model_.Clear();
    state_.assign(Tiny::kState, 0);
    copies_.clear();
    captured_states_.assign(plan.step_count, std::vector<float>(Tiny::kState));
    for (uint32_t i = 0; i < plan.step_count; ++i) {
      const Step& step = plan.steps[i];
      if (step.kind == StepKind::kCompute) model_.Embed(tokens, step.begin, step.end);
      if (step.capture) copies_.push_back({step.end, {captured_states_[i].data()}});
    }
  }
  void Commit(const Request& request, const std::vector<int32_t>& tokens, uint64_t prompt_tokens,
              std::vector<StateCopy> captured) {
    if (captured.empty() || captured.back().position < tokens.size()) {
      captured.push_back({tokens.size(), {state_.data()}});
    }
    std::vector<LinearTensors> tensors;
    for (const StateCopy& copy : captured) tensors.push_back({.layer = Tiny::kLinear, .state = copy.state.data});
    std::vector<Checkpoint> checkpoints;
    for (size_t i = 0; i < captured.size(); ++i) checkpoints.push_back({captured[i].position, &tensors[i], 1});
    std::vector<uint8_t> outcomes(captured.size());
    Text text = {&request,      tokens.data(),      tokens.size(),
                 prompt_tokens, checkpoints.data(), static_cast<uint32_t>(checkpoints.size())};
    text.page_table = table_.data();
    text.page_count = table_.size();
    text.outcomes = outcomes.data();
    Check(cache_.Commit(&text, 1));
  }
  // The linear layer: a cached prefix replaces the state, and rows run after it. False: the plan has changed.
  bool Advance(Request& request, uint64_t begin, uint64_t end) {
    const size_t count = model_.positions().size();
    const float* const rows = model_.rows();
    std::vector<float> out(count * Tiny::kWidth);
    LayerAdvance layer = {Tiny::kLinear, begin, end, {count, rows, rows, rows}, {state_.data()}, out.data()};
    layer.inputs.q_stride = layer.inputs.k_stride = layer.inputs.v_stride = layer.out_stride = Tiny::kWidth;
    layer.copies = copies_.data();
    layer.copy_count = static_cast<uint32_t>(copies_.size());
    if (!Check(request.Advance(layer)).ok()) return false;
    model_.Add(out);
    return true;
  }
  void Attend() { model_.Attend(cache_.data(), place_, table_); }

  Tiny model_;
  Cache cache_;
  PagePlace place_;
  std::vector<int32_t> table_;  // one prompt at a time uses all pages
  std::vector<float> state_;    // the linear layer's state, and the ones after captured steps
  std::vector<std::vector<float>> captured_states_;
  std::vector<StateCopy> copies_;
};

int main(int argc, char** argv) {
  Engine engine(argc > 1 ? argv[1] : "", argc > 2 ? argv[2] : "");  // the daemon's sockets: rpc, session
  const std::string rules = "You are a mason: name the stone in one sentence. ";
  engine.Serve(rules + "Is granite hard", 12);
  engine.Serve(rules + "What is marble", 12);
  engine.Serve(rules + "How does it fall", 12);
}
