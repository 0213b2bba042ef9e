// SPDX-License-Identifier: Apache-2.0
// The shortest engine with conversations: the first turn is assembled from cached segments, and every later turn
// resumes where the previous one ended. docs/integrate.md explains the differences from main.cc.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "ashlar/engine.h"
#include "examples/shortest/tiny_model.h"

using namespace ashlar::engine;
using Tiny = ashlar::shortest::TinyModel;

Status Check(Status status) {
  if (status.ok() || status.code == Code::kRestart) return status;
  std::fprintf(stderr, "conversation: %s\n", status.message);
  std::exit(1);
}

uint64_t Append(std::vector<int32_t>& tokens, const std::string& text) {
  tokens.insert(tokens.end(), text.begin(), text.end());
  return text.size();
}

struct Conversation {
  Conversation() {
    std::random_device random;
    for (uint8_t& byte : id) byte = static_cast<uint8_t>(random());
  }
  uint8_t id[16];
  std::vector<int32_t> tokens;  // text so far
};

class Engine {
 public:
  Engine(const char* rpc_socket, const char* session_socket) : table_(64) {
    OpenOptions options = {.rpc_socket = rpc_socket, .session_socket = session_socket};
    options.model = {.model_id = "conversation", .head = 4, .tail = 4};
    model_.Describe(options.model);
    options.memory.pages = static_cast<uint32_t>(table_.size());
    options.capture_tokens = Tiny::kPageTokens;  // prefixes are in use
    Check(Cache::Open(options, &cache_));
    place_ = *cache_.places(nullptr);  // place of one attention layer
    std::iota(table_.begin(), table_.end(), 0);
  }

  // Appends segments and a message to the conversation, answers, and leaves the states to the next turn.
  void Turn(Conversation& conversation, const std::vector<std::string>& segments, const std::string& message,
            int decode) {
    std::vector<int32_t>& tokens = conversation.tokens;
    std::vector<uint64_t> lengths;
    for (const std::string& segment : segments) lengths.push_back(Append(tokens, segment));
    Append(tokens, message);
    const uint64_t prompt_tokens = tokens.size();
    tokens.reserve(prompt_tokens + decode);  // the request points into them
    Prompt prompt = {tokens.data(), prompt_tokens, lengths.data(), lengths.size(), table_.data(), table_.size()};
    std::ranges::copy(conversation.id, prompt.conversation);
    prompt.fill = true;
    Request request;
    Check(cache_.Begin(&prompt, 1, &request));
    uint32_t missing;
    const Run* const runs = request.missing(&missing);
    for (uint32_t i = 0; i < missing; ++i) Publish(request, i, runs[i]);
    if (missing > 0) Check(request.LookAgain(table_.data(), table_.size()));
    do {  // once, or again if a hit failed to land
      model_.Clear();
      for (const Step *step = request.plan().steps, *end = step + request.plan().step_count; step < end; ++step) {
        if (step->kind == StepKind::kCompute) model_.Embed(tokens.data(), step->begin, step->end);
      }
      state_.assign(Tiny::kState, 0);
      if (Advance(request, 0, prompt_tokens) && Check(request.WaitLayer(Tiny::kAttention)).ok()) Attend();
    } while (!Check(request.Finish()).ok());
    std::printf("%s%zu of %zu tokens computed, ", request.plan().own ? "its own states, " : "",
                model_.positions().size(), tokens.size());
    for (int i = 0; i < decode; ++i) {
      tokens.push_back(model_.BestToken());
      model_.Clear();
      model_.Embed(tokens.data(), tokens.size() - 1, tokens.size());
      Advance(request, tokens.size() - 1, tokens.size());
      Attend();
    }
    Commit(conversation, request, prompt_tokens);
    std::printf("%s\n", std::string(tokens.end() - decode, tokens.end()).c_str());
  }

 private:
  // Offers states and pages of the whole text. After a cached interior they belong only to this conversation.
  void Commit(const Conversation& conversation, const Request& request, uint64_t prompt_tokens) {
    const LinearTensors tensors = {.layer = Tiny::kLinear, .state = state_.data()};
    const Checkpoint end = {conversation.tokens.size(), &tensors, 1};
    Text text = {&request, conversation.tokens.data(), conversation.tokens.size(), prompt_tokens, &end, 1};
    text.page_table = table_.data();
    text.page_count = table_.size();
    std::ranges::copy(conversation.id, text.conversation);
    uint8_t outcome;
    text.outcomes = &outcome;
    Check(cache_.Commit(&text, 1));
    std::printf("%s: ", CommitName(outcome));
  }
  // Computes a segment alone, from a zero state at position 0, in pages where nothing lands meanwhile.
  void Publish(Request& request, uint32_t missing, const Run& run) {
    model_.Clear();
    model_.Embed(run.tokens, 0, run.token_count);
    std::vector<float> out(run.token_count * Tiny::kWidth), transition(Tiny::kHeads);
    state_.resize(Tiny::kState);
    Check(cache_.ComputeAlone(
        {Tiny::kLinear, Inputs(), out.data(), Tiny::kWidth, &run, {state_.data()}, transition.data()}));
    model_.Add(out);
    Attend();
    const LinearTensors tensors = {.layer = Tiny::kLinear, .state = state_.data(), .transition = transition.data()};
    Check(request.Publish(missing, {&tensors, 1, table_.data(), table_.size()}, nullptr));
  }
  // The linear layer: cached parts are composed, and rows run between them. False: the plan has changed.
  bool Advance(Request& request, uint64_t begin, uint64_t end) {
    std::vector<float> out(model_.positions().size() * Tiny::kWidth);
    const LayerAdvance layer = {Tiny::kLinear, begin, end, Inputs(), {state_.data()}, out.data(), Tiny::kWidth};
    if (!Check(request.Advance(layer)).ok()) return false;
    model_.Add(out);
    return true;
  }
  void Attend() { model_.Attend(cache_.data(), place_, table_); }
  TokenRows Inputs() const {
    const float* const rows = model_.rows();
    return {model_.positions().size(), rows, rows, rows, nullptr, nullptr, Tiny::kWidth, Tiny::kWidth, Tiny::kWidth};
  }

  Tiny model_;
  Cache cache_;
  PagePlace place_;
  std::vector<int32_t> table_;  // one prompt at a time uses all pages
  std::vector<float> state_;    // the linear layer's
};

int main(int argc, char** argv) {
  Engine engine(argc > 1 ? argv[1] : "", argc > 2 ? argv[2] : "");  // the daemon's sockets: rpc, session
  const std::string rules = "Answer from these pages.", arch = "An arch stands because every stone wants to fall.";
  Conversation conversation;
  engine.Turn(conversation, {rules, arch, "Ashlar is cut to one face."}, "Why does it stand?", 12);
  engine.Turn(conversation, {}, "And why does it fall?", 12);
  engine.Turn(conversation, {}, "Thank you.", 12);
}
