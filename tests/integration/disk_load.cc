// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/disk_load.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iostream>

#include "ashlar/v1/admin.grpc.pb.h"

namespace ashlar::integration {
namespace {

constexpr std::byte kPoison{0x5a};
constexpr size_t kTokens = 60;  // tokens of a segment

}  // namespace

std::vector<Tokens> PromptOf(uint64_t seed) {
  return MakePrompt(seed, kPromptSegments, kTokens);
}

size_t Count(const Texts& texts) {
  size_t count = 0;
  for (const auto& [seed, segments] : texts) count += segments.size();
  return count;
}

bool HasDirectIo() {
  const int fd = ::open(testing::TempDir().c_str(), O_TMPFILE | O_RDWR | O_DIRECT | O_CLOEXEC, 0600);
  if (fd >= 0) ::close(fd);
  return fd >= 0;
}

struct Witness::Stub {
  explicit Stub(const std::string& socket)
      : admin(grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials())) {}
  v1::Admin::Stub admin;
};

Witness::Witness(const std::string& admin_socket, const NamespaceId& ns)
    : stub_(std::make_unique<Stub>(admin_socket)),
      ns_(reinterpret_cast<const char*>(ns.bytes.data()), ns.bytes.size()) {}

Witness::~Witness() = default;

bool Witness::Hear(const Prompts& prompts, Texts& acknowledged) {
  v1::Texts request;
  request.set_tenant("default");
  request.set_ns(ns_);
  std::vector<std::pair<uint64_t, size_t>> asked;
  for (const uint64_t seed : prompts) {
    const std::vector<Tokens> prompt = PromptOf(seed);
    for (size_t i = 0; i < prompt.size(); ++i) {
      if (acknowledged[seed].contains(i)) continue;
      v1::ObjectName* text = request.add_texts();
      text->set_kind(static_cast<uint32_t>(KindOfSegment(i)));
      text->set_tokens(prompt[i].data(), prompt[i].size() * sizeof(int32_t));
      asked.emplace_back(seed, i);
    }
  }
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  v1::ExplainReply reply;
  if (!stub_->admin.Explain(&context, request, &reply).ok()) return false;
  for (size_t i = 0; i < asked.size(); ++i) {
    const auto& tiers = reply.texts(static_cast<int>(i)).present().tiers();
    if (std::ranges::count(tiers, static_cast<uint32_t>(TierKind::kSsd)) == 0) continue;
    acknowledged[asked[i].first].insert(asked[i].second);
  }
  return true;
}

bool Lands(TestEngine& engine, uint64_t seed, const std::set<size_t>& wanted, size_t* landed) {
  const std::vector<Tokens> prompt = PromptOf(seed);
  const Match match = engine.Lookup(prompt);
  engine.FillTargets(kPoison);
  Landing landing = engine.Land(match, prompt);
  const std::vector<MissReason> reasons = landing.Wait(kPatience);
  EXPECT_TRUE(landing.WaitQuiesced(kPatience));
  bool all = true;
  for (size_t i = 0; i < prompt.size(); ++i) {
    if (reasons[i] == MissReason::kNone) {
      if (landed != nullptr) ++*landed;
      engine.ExpectTuples(match, i, prompt[i]);
      engine.ExpectLanded(KindOfSegment(i), prompt[i], i * kTokens, kPoison);
    } else if (wanted.contains(i)) {
      const SegmentResult& segment = match.segments()[i];
      std::cout << "prompt " << seed << " missed segment " << i << ": looked up " << Name(segment.reason) << ", landed "
                << Name(reasons[i]) << std::endl;
      all = false;
    }
  }
  return all;
}

void PublishWhatIsMissing(TestEngine& engine, uint64_t seed) {
  const std::vector<Tokens> prompt = PromptOf(seed);
  for (size_t i = 0; i < prompt.size(); ++i) {
    const ObjectKind kind = KindOfSegment(i);
    const Reservation reservation = engine.Reserve(kind, prompt[i]);
    if (reservation.granted()) engine.model().Publish(reservation, engine.Compute(kind, prompt[i]));
  }
}

Load::Load(const ClientOptions& options, std::mt19937_64& random, size_t most_prompts) : most_prompts_(most_prompts) {
  for (int i = 0; i < kEngines; ++i) {
    threads_.emplace_back([this, options, seed = random()] { Work(options, seed); });
  }
  EXPECT_TRUE(Eventually([this] { return working_ == kEngines; }));
}

void Load::End() {
  over_ = true;
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

Prompts Load::prompts() const {
  MutexLock lock(mutex_);
  return prompts_;
}

void Load::Work(const ClientOptions& options, uint64_t seed) {
  std::mt19937_64 random(seed);
  TestEngine engine(options, kPromptShape);
  ++working_;
  while (!over_ && !testing::Test::HasFailure()) {
    if (prompts().size() < most_prompts_) {
      const uint64_t fresh = random() >> 32;
      {
        MutexLock lock(mutex_);
        prompts_.push_back(fresh);
      }
      PublishWhatIsMissing(engine, fresh);
    }
    const Prompts known = prompts();
    Lands(engine, known[random() % known.size()], {});
  }
}

}  // namespace ashlar::integration
