#include "tools/ashlarctl/host.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>

namespace ashlar::ctl {
namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;

HostFacts GoodHost() {
  return {.memory_bytes = 128 * kGiB,
          .locked_memory_limit = UINT64_MAX,
          .open_files_limit = 1 << 20,
          .mappings_limit = 1 << 20,
          .shared_huge_pages = "advise",
          .swap_bytes = 0,
          .node_bytes = {128 * kGiB},
          .clock_synchronised = true,
          .fabric = {"mlx5_0:1 InfiniBand"},
          .fabric_present = true,
          .folder = "/data",
          .file_system = "xfs",
          .direct_io = true,
          .folder_free_bytes = 500 * kGiB};
}
const HostNeeds kNeeds = {.dram_bytes = 64 * kGiB, .ssd_bytes = 400 * kGiB, .locked = true, .fabric = true};

TEST(Host, AGoodOneHasNothingToRemedy) {
  for (const Finding& finding : Judge(GoodHost(), kNeeds)) {
    EXPECT_EQ(finding.verdict, Verdict::kFine) << finding.check << ": " << finding.found;
    EXPECT_EQ(finding.remedy, "");
  }
}

struct Ill {
  const char* check;
  Verdict verdict;
  std::function<void(HostFacts&)> make;
};

TEST(Host, EachIllnessIsFoundWithItsRemedyAndNoOther) {
  const Ill ills[] = {
      {"memory", Verdict::kBad, [](HostFacts& facts) { facts.memory_bytes = 66 * kGiB; }},
      {"locked memory", Verdict::kBad, [](HostFacts& facts) { facts.locked_memory_limit = 8 << 20; }},
      {"huge pages", Verdict::kNote, [](HostFacts& facts) { facts.shared_huge_pages = "never"; }},
      {"open files", Verdict::kNote, [](HostFacts& facts) { facts.open_files_limit = 1024; }},
      {"mappings", Verdict::kNote, [](HostFacts& facts) { facts.mappings_limit = 65530; }},
      {"swap", Verdict::kNote, [](HostFacts& facts) { facts.swap_bytes = kGiB; }},
      {"NUMA", Verdict::kNote,
       [](HostFacts& facts) {
         facts.node_bytes = {32 * kGiB, 96 * kGiB};
       }},
      {"clock", Verdict::kNote, [](HostFacts& facts) { facts.clock_synchronised = false; }},
      {"fabric", Verdict::kBad, [](HostFacts& facts) { facts.fabric.clear(); }},
      {"disk", Verdict::kBad, [](HostFacts& facts) { facts.file_system = "nfs"; }},
      {"disk", Verdict::kBad, [](HostFacts& facts) { facts.folder_error = "Permission denied"; }},
      {"O_DIRECT", Verdict::kBad, [](HostFacts& facts) { facts.direct_io = false; }},
      {"disk space", Verdict::kBad, [](HostFacts& facts) { facts.folder_free_bytes = kGiB; }},
  };
  for (const Ill& ill : ills) {
    HostFacts facts = GoodHost();
    ill.make(facts);
    for (const Finding& finding : Judge(facts, kNeeds)) {
      const bool its = finding.check == ill.check;
      EXPECT_EQ(finding.verdict, its ? ill.verdict : Verdict::kFine) << finding.check << " of ill " << ill.check;
      EXPECT_EQ(finding.remedy.empty(), !its) << finding.check << " of ill " << ill.check;
    }
  }
}

TEST(Host, ACapabilityIsAsGoodAsALimitForLocking) {
  HostFacts facts = GoodHost();
  facts.locked_memory_limit = 0;
  facts.may_lock = true;
  EXPECT_TRUE(std::ranges::all_of(Judge(facts, kNeeds),
                                  [](const Finding& finding) { return finding.verdict == Verdict::kFine; }));
}

TEST(Host, ThisOneIsLookedAtAndNothingIsLeftInTheFolder) {
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "ashlar-doctor";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const HostFacts facts = LookAtHost(folder);
  EXPECT_GT(facts.memory_bytes.value_or(0), 0u);
  EXPECT_GT(facts.open_files_limit.value_or(0), 0u);
  EXPECT_GT(facts.mappings_limit.value_or(0), 0u);
  EXPECT_NE(facts.file_system, "");
  EXPECT_EQ(facts.folder_error, "");
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  std::filesystem::remove_all(folder);
  EXPECT_NE(LookAtHost(folder).folder_error, "");
}

}  // namespace
}  // namespace ashlar::ctl
