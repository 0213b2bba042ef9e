// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "examples/rag/baselines.h"
#include "examples/rag/cached_serving.h"
#include "examples/rag/local_pages.h"
#include "examples/rag/retrieval.h"
#include "kernels/host/thread_pool.h"
#include "tools/load/load.h"

namespace ashlar::load {
namespace {

using rag::PagesFor;

constexpr const char* kDocuments = "/usr/share/common-licenses";
constexpr size_t kSections = 40, kSectionsPerPrompt = 4, kPrompts = 512, kPrefixPrompts = 16;
constexpr int64_t kSeam = 8;

// About a tenth of the demo's operations a token: a sweep serves thousands of prompts.
refengine::ModelConfig LoadConfig() {
  refengine::ModelConfig config;
  config.d_model = 256;
  config.blocks = 1;
  config.mlp_dim = 704;
  config.linear = {.key_heads = 2, .value_heads = 4, .d_k = 64, .d_v = 64};
  config.attention = {.query_heads = 4, .kv_heads = 2, .head_dim = 64, .rotary_dim = 16};
  return config;
}

// The same prompts in every engine.
absl::StatusOr<std::vector<rag::RagPrompt>> MakePrompts() {
  absl::StatusOr<std::vector<rag::Section>> sections = rag::ReadSections(kDocuments, {.max_sections = kSections});
  if (!sections.ok()) return sections.status();
  const rag::Bm25 index(*sections);
  std::vector<rag::RagPrompt> prompts;
  for (const std::string& question : rag::MakeQuestions(*sections, index, kPrompts, /*seed=*/1)) {
    prompts.push_back(rag::MakePrompt(*sections, index.Search(question, kSectionsPerPrompt), question));
  }
  return prompts;
}

struct Sockets {
  std::string rpc, session;
};

class Engine {
 public:
  Engine()
      : config_(LoadConfig()),
        model_(config_),
        queue_(kernels::Host().MakeQueue(&workers_)),
        engine_(model_, kernels::Host(), workers_) {}

  absl::Status Open(const std::string& way, const Sockets& daemon);
  int Serve();

 private:
  absl::Status OpenCached(const Sockets& daemon);
  rag::Runtime runtime() { return {model_, engine_, kernels::Host(), *queue_, workers_}; }

  kernels::ThreadPool workers_{1};
  const refengine::ModelConfig config_;
  const refengine::Model model_;
  const std::unique_ptr<kernels::Queue> queue_;
  refengine::Engine engine_;
  std::vector<rag::RagPrompt> prompts_;
  size_t longest_ = 0;
  std::unique_ptr<rag::LocalPages> pages_;
  std::unique_ptr<rag::FullRecompute> full_;
  std::unique_ptr<rag::ExactPrefixes> prefix_;
  std::unique_ptr<rag::CachedServing> cached_;
  std::function<absl::StatusOr<rag::Served>(const rag::RagPrompt&)> serve_;
};

absl::Status Engine::Open(const std::string& way, const Sockets& daemon) {
  auto prompts = MakePrompts();
  if (!prompts.ok()) return prompts.status();
  prompts_ = *std::move(prompts);
  for (const rag::RagPrompt& prompt : prompts_) longest_ = std::max(longest_, prompt.tokens.size());
  if (way == "ashlar") return OpenCached(daemon);
  const bool prefix = way == "prefix";
  if (!prefix && way != "full") return absl::InvalidArgumentError("way: must be full, prefix or ashlar");
  pages_ = std::make_unique<rag::LocalPages>(config_, PagesFor(longest_, prefix ? kPrefixPrompts + 1 : 2));
  if (prefix) {
    prefix_ = std::make_unique<rag::ExactPrefixes>(runtime(), pages_->pool(), kPrefixPrompts);
    serve_ = [this](const rag::RagPrompt& prompt) { return prefix_->Serve(prompt); };
  } else {
    full_ = std::make_unique<rag::FullRecompute>(runtime(), pages_->pool());
    serve_ = [this](const rag::RagPrompt& prompt) { return full_->Serve(prompt); };
  }
  return absl::OkStatus();
}

absl::Status Engine::OpenCached(const Sockets& daemon) {
  auto cached = rag::CachedServing::Open(
      runtime(),
      {.rpc_socket = daemon.rpc,
       .session_socket = daemon.session,
       .seams = {kSeam, kSeam},
       .pages = PagesFor(longest_, 3)});  // the prompt being served, the one before it, a segment being filled
  if (!cached.ok()) return cached.status();
  cached_ = *std::move(cached);
  serve_ = [this](const rag::RagPrompt& prompt) { return cached_->Serve(prompt); };
  return absl::OkStatus();
}

int Engine::Serve() {
  std::printf("ready\n");
  std::fflush(stdout);
  for (unsigned long number; std::scanf("%lu", &number) == 1;) {
    const rag::RagPrompt& prompt = prompts_[number % prompts_.size()];
    const absl::StatusOr<rag::Served> served = serve_(prompt);
    if (!served.ok()) {
      std::fprintf(stderr, "engine: %s\n", served.status().ToString().c_str());
      return 1;
    }
    std::printf("%zu %.3f %lu %lu\n", prompt.tokens.size(), served->ttft_ms, static_cast<unsigned long>(served->hits),
                static_cast<unsigned long>(served->misses));
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int RunEngine(const std::string& way, const std::string& rpc_socket, const std::string& session_socket) {
  Engine engine;
  if (absl::Status status = engine.Open(way, {rpc_socket, session_socket}); !status.ok()) {
    std::fprintf(stderr, "engine: %s\n", status.ToString().c_str());
    return 1;
  }
  return engine.Serve();
}

}  // namespace ashlar::load
