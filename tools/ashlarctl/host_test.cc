// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/host.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/userfaultfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <functional>

namespace ashlar::ctl {
namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;

HostFacts GoodHost() {
  return {.memory_bytes = 128 * kGiB,
          .locked_memory_limit = UINT64_MAX,
          .open_files_limit = 1 << 20,
          .userfaultfd = true,
          .landlock = true,
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
const HostNeeds kNeeds = {.dram_bytes = 64 * kGiB,
                          .ssd_bytes = 400 * kGiB,
                          .ssd_folder = "/data",
                          .locked = true,
                          .fabric = true,
                          .sandbox = true};

TEST(Host, AGoodHostNeedsNoRemedy) {
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

TEST(Host, EachProblemIsFoundWithItsRemedyAndNoOther) {
  const Ill ills[] = {
      {"memory", Verdict::kBad, [](HostFacts& facts) { facts.memory_bytes = 66 * kGiB; }},
      {"memory", Verdict::kNote,
       [](HostFacts& facts) {
         facts.memory_bytes = 75 * kGiB;
         facts.memory_limited = true;
       }},
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
      {"userfaultfd", Verdict::kNote, [](HostFacts& facts) { facts.userfaultfd = false; }},
      {"landlock", Verdict::kNote, [](HostFacts& facts) { facts.landlock = false; }},
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

// 12 GiB besides dram are required if a control group would kill the process, and only then.
TEST(Host, AControlGroupsLimitLeavesSpaceBesideDram) {
  const auto of_memory = [](uint64_t bytes, bool limited, uint64_t dram) {
    HostFacts facts = GoodHost();
    facts.memory_bytes = bytes;
    facts.memory_limited = limited;
    HostNeeds needs = kNeeds;
    needs.dram_bytes = dram;
    return Judge(facts, needs).front();
  };
  EXPECT_EQ(of_memory(76 * kGiB, true, 64 * kGiB).verdict, Verdict::kFine);
  EXPECT_EQ(of_memory(75 * kGiB, false, 64 * kGiB).verdict, Verdict::kFine) << "the machine's own";
  EXPECT_EQ(of_memory(2 * kGiB, true, 0).verdict, Verdict::kFine) << "dram is not said";
  EXPECT_EQ(of_memory(66 * kGiB, true, 64 * kGiB).verdict, Verdict::kBad);
  const Finding tight = of_memory(75 * kGiB, true, 64 * kGiB);
  EXPECT_EQ(tight.check, "memory");
  EXPECT_EQ(tight.verdict, Verdict::kNote);
  EXPECT_NE(tight.found.find("11.0 GiB of it beyond dram"), std::string::npos) << tight.found;
  EXPECT_NE(tight.remedy.find("12.0 GiB for the daemon"), std::string::npos) << tight.remedy;
}

TEST(Host, ACapabilityAllowsLockingWithoutALimit) {
  HostFacts facts = GoodHost();
  facts.locked_memory_limit = 0;
  facts.may_lock = true;
  EXPECT_TRUE(std::ranges::all_of(Judge(facts, kNeeds),
                                  [](const Finding& finding) { return finding.verdict == Verdict::kFine; }));
}

TEST(Host, ExistingSlabNeedsNoSpace) {
  HostFacts facts = GoodHost();
  facts.folder_free_bytes = 10 * kGiB;
  facts.folder_own_bytes = 400 * kGiB;
  for (const Finding& finding : Judge(facts, kNeeds)) EXPECT_EQ(finding.verdict, Verdict::kFine) << finding.found;
}

TEST(Host, AConfigurationDeterminesTheNeeds) {
  setenv("ASHLAR_TEST_DISK", "data", 1);
  const auto needs = NeedsOf(
      "dram: {capacity_bytes: 48GiB, lock: true}\n"
      "ssd: {folder: /${ASHLAR_TEST_DISK}, capacity_bytes: 4096}\nsandbox: on\n"
      "cluster: {node: ${NODE_NAME}, control_address: ${POD_IP}:7461, expect_transport: rdma}\n");
  ASSERT_TRUE(needs.ok()) << needs.status();
  EXPECT_EQ(needs->dram_bytes, 48 * kGiB);
  EXPECT_EQ(needs->ssd_bytes, 4096u);
  EXPECT_EQ(needs->ssd_folder, "/data");
  EXPECT_TRUE(needs->locked && needs->fabric && needs->sandbox);
  EXPECT_EQ(NeedsOf("ssd: {folder: \"/${ASHLAR_TEST_NONE}\"}\n")->ssd_folder, "/$ASHLAR_TEST_NONE");
  const auto least = NeedsOf("dram: {capacity_bytes: 1GiB}\n");
  ASSERT_TRUE(least.ok()) << least.status();
  EXPECT_FALSE(least->locked || least->fabric || least->sandbox || !least->ssd_folder.empty());
  EXPECT_NE(NeedsOf("dram: {capacity_bytes: much}\n").status().message().find("dram.capacity_bytes"),
            std::string::npos);
  EXPECT_FALSE(NeedsOf("just words").ok());
  EXPECT_FALSE(NeedsOf("dram: {").ok());
}

TEST(Host, AnotherProcessIsCheckedByItsOwnLimits) {
  constexpr rlim_t kFiles = 200, kLocked = 12'288;
  const int descriptor = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY));
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const rlimit files = {kFiles, kFiles}, locked = {kLocked, kLocked};
    const bool set = setrlimit(RLIMIT_NOFILE, &files) == 0 && setrlimit(RLIMIT_MEMLOCK, &locked) == 0;
    if (write(ready[1], set ? "y" : "n", 1) == 1) pause();
    _exit(0);
  }
  char set = 'n';
  EXPECT_EQ(read(ready[0], &set, 1), 1);
  EXPECT_EQ(set, 'y');
  const HostFacts facts = LookAtHost("", child);
  EXPECT_EQ(facts.open_files_limit, kFiles);
  EXPECT_EQ(facts.locked_memory_limit, kLocked);
  EXPECT_EQ(facts.userfaultfd, descriptor >= 0) << "the child has its parent's";
  if (descriptor >= 0) close(descriptor);
  EXPECT_NE(LookAtHost("").open_files_limit, kFiles);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  close(ready[0]);
  close(ready[1]);
}

TEST(Host, ExaminesThisHostWithoutLeftovers) {
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
