// SPDX-License-Identifier: Apache-2.0
// In-place sharing through the client: requests of an engine, of two of its processes, and across lost connections.
#include "client/session/shared_pages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/integration/daemon_process.h"
#include "tests/integration/engine_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

constexpr size_t kTokens = 60;
const std::vector<uint64_t> kLengths(3, kTokens);

// An engine whose pages the daemon allocates.
class SharingEngine {
 public:
  explicit SharingEngine(const DaemonProcess& daemon)
      : engine_(daemon.client_options(), {}, TestEngine::Memory::kHosted), cache_(engine_.pages()) {
    cache_.allocate = true;
    const absl::Status status = model().DeclarePages(engine_.region(), cache_);
    EXPECT_TRUE(status.ok()) << status;
  }

  Model& model() { return engine_.model(); }
  TestEngine& engine() { return engine_; }
  uint32_t pages() const { return cache_.pages; }
  uint32_t page_tokens() const { return cache_.page_tokens; }

  Admitted Admit(uint64_t seed, uint32_t own_pages) {
    Tokens tokens;
    for (const Tokens& run : MakePrompt(seed, kLengths.size(), kTokens)) {
      tokens.insert(tokens.end(), run.begin(), run.end());
    }
    return model().Admit({.tokens = tokens, .segment_lengths = kLengths}, own_pages);
  }

 private:
  TestEngine engine_;
  PagedCache cache_;
};

TEST(SharedPages, RequestsShareOneCopyAndReleaseIt) {
  DaemonProcess daemon;
  SharingEngine engine(daemon);
  Admitted first = engine.Admit(1, 4);
  ASSERT_EQ(first.outcome, AdmitOutcome::kAdmitted);
  const std::vector<uint32_t> all = {0, 1, 2};
  for (const uint32_t segment : all) {
    EXPECT_EQ(first.admission->segments()[segment].content, PageContent::kToFill);
    EXPECT_EQ(first.admission->PageTable(segment).size(),
              first.admission->segments()[segment].placement.first_page +
                  first.admission->segments()[segment].placement.shared_pages);
  }
  Admitted second = engine.Admit(1, 4);
  ASSERT_EQ(second.outcome, AdmitOutcome::kAdmitted);
  EXPECT_EQ(second.admission->segments()[2].pages, first.admission->segments()[2].pages);
  EXPECT_EQ(second.admission->segments()[2].content, PageContent::kBeingFilled);
  EXPECT_FALSE(second.admission->ReportFilled(all));
  EXPECT_TRUE(first.admission->ReportFilled(all));
  EXPECT_TRUE(second.admission->Refresh());
  EXPECT_EQ(second.admission->segments()[2].content, PageContent::kFilled);

  // All pages are given back; filled segments stay until their space is needed.
  PageShortage shortage;
  EXPECT_EQ(second.admission->Extend(engine.pages(), &shortage), AdmitOutcome::kNoPages);
  EXPECT_GT(shortage.held, 0u);
  const auto held = shortage.held;
  first.admission->Release();
  EXPECT_TRUE(Eventually([&] {
    EXPECT_EQ(second.admission->Extend(engine.pages(), &shortage), AdmitOutcome::kNoPages);
    return shortage.held == held - 4;
  }));
  second.admission.reset();
  std::optional<Admitted> whole;
  EXPECT_TRUE(Eventually([&] {
    whole = engine.Admit(2, 0);
    return whole->outcome == AdmitOutcome::kAdmitted &&
           whole->admission->Extend(engine.pages() / 2) == AdmitOutcome::kAdmitted;
  }));
}

TEST(SharedPages, AfterALostConnectionOldRequestsKeepTheirPages) {
  DaemonProcess daemon;
  SharingEngine engine(daemon);
  std::optional<Admitted> old = engine.Admit(1, 4);
  ASSERT_EQ(old->outcome, AdmitOutcome::kAdmitted);
  BreakConnections(daemon.client_options().session_socket);
  EXPECT_TRUE(Eventually([&] { return !old->admission->valid(); }));
  EXPECT_EQ(old->admission->Extend(8), AdmitOutcome::kUnavailable);
  // The daemon no longer knows the old request's pages: none may be allocated meanwhile.
  EXPECT_TRUE(Eventually([&] { return engine.Admit(2, 1).outcome == AdmitOutcome::kOldRequests; }));
  old.reset();
  EXPECT_TRUE(Eventually([&] { return engine.Admit(2, 1).outcome == AdmitOutcome::kAdmitted; }));
}

TEST(SharedPages, NoRequestIsAdmittedWithoutADaemon) {
  DaemonProcess daemon;
  SharingEngine engine(daemon);
  Admitted request = engine.Admit(1, 4);
  ASSERT_EQ(request.outcome, AdmitOutcome::kAdmitted);
  daemon.Kill();
  EXPECT_TRUE(Eventually([&] { return engine.Admit(1, 4).outcome == AdmitOutcome::kUnavailable; }));
  EXPECT_FALSE(request.admission->valid());
}

TEST(SharedPages, NeedTheDaemonsAllocation) {
  DaemonProcess daemon;
  TestEngine engine(daemon.client_options());
  PagedCache cache = engine.pages();
  cache.allocate = true;
  EXPECT_EQ(engine.model().DeclarePages(engine.region(), cache).code(), absl::StatusCode::kInvalidArgument);
  const Tokens tokens = MakeRun(1, kTokens);
  const std::vector<uint64_t> lengths = {kTokens};
  EXPECT_EQ(engine.model().Admit({.tokens = tokens, .segment_lengths = lengths}, 1).outcome, AdmitOutcome::kInvalid);
}

}  // namespace
}  // namespace ashlar::integration
