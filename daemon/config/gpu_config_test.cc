// SPDX-License-Identifier: Apache-2.0
#include "daemon/config/gpu_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/config/config.h"

namespace ashlar::daemon {
namespace {

std::string WithGpus(const std::string& more) {
  return absl::StrCat("listen: {rpc_socket: /run/a.sock, session_socket: /run/b.sock}\ndram: {capacity_bytes: 4GiB}\n",
                      more);
}

TEST(GpuConfig, AcceptsSingleEntryWithoutList) {
  v1::Config none;
  ASSERT_TRUE(ParseConfig(WithGpus(""), &none).ok());
  EXPECT_TRUE(none.gpu().empty());
  for (const auto& [yaml, device] :
       {std::pair("gpu: {}\n", 0u), {"gpu: {device: 3}\n", 3u}, {"gpu: [{device: 3}]\n", 3u}}) {
    v1::Config config;
    ASSERT_TRUE(ParseConfig(WithGpus(absl::StrCat(yaml, "hbm: {capacity_bytes: 1GiB}\n")), &config).ok()) << yaml;
    ASSERT_EQ(config.gpu_size(), 1) << yaml;
    EXPECT_EQ(config.gpu(0).device(), device) << yaml;
    ASSERT_EQ(config.hbm_size(), 1) << yaml;
    EXPECT_EQ(config.hbm(0).device(), device) << yaml;
    EXPECT_EQ(config.tenants(0).hbm_bytes(), uint64_t{1} << 30) << yaml;
  }
  v1::Config nothing;
  ASSERT_TRUE(ParseConfig(WithGpus("hbm: {capacity_bytes: 0}\n"), &nothing).ok());
  EXPECT_TRUE(nothing.hbm().empty());
}

TEST(GpuConfig, EachGpuMayHaveATier) {
  v1::Config config;
  ASSERT_TRUE(ParseConfig(WithGpus("gpu: [{device: 0}, {device: 1}, {device: 2}]\n"
                                   "hbm: [{capacity_bytes: 8GiB}, {capacity_bytes: 4GiB, device: 2}]\n"),
                          &config)
                  .ok());
  ASSERT_EQ(config.hbm_size(), 2);
  EXPECT_EQ(config.hbm(0).device(), 0u) << "its place in the list";
  EXPECT_EQ(config.hbm(1).device(), 2u);
  EXPECT_EQ(config.hbm(1).arena_bytes(), uint64_t{64} << 20);
  EXPECT_EQ(config.tenants(0).hbm_bytes(), uint64_t{4} << 30) << "what each of them has";
}

TEST(GpuConfig, ErrorsNameTheField) {
  std::string many = "gpu: [";
  for (int i = 0; i < 17; ++i) absl::StrAppend(&many, i == 0 ? "" : ", ", "{device: ", i, "}");
  const std::vector<std::pair<std::string, std::string>> cases = {
      {many + "]\n", "gpu: too many; expected at most 16"},
      {"gpu: [{device: 0}, {device: 1024}]\n", "gpu[1].device: out of range"},
      {"gpu: [{device: 0}, {}]\n", "gpu[1].device: 0 is given twice"},
      {"gpu: [{number: 0}]\n", "gpu[0].number: unknown field"},
      {"gpu: 3\n", "gpu: expected a list"},
      {"gpu: {}\nhbm: [{capacity_bytes: 1GiB}, {capacity_bytes: 1GiB}]\n", "hbm: 2 tiers for 1 GPUs"},
      {"hbm: {capacity_bytes: 1GiB, device: 0}\n", "hbm.device: 0 is not the device of any gpu entry"},
      {"gpu: [{device: 0}, {device: 1}]\nhbm: [{capacity_bytes: 1GiB}, {capacity_bytes: 1GiB, device: 0}]\n",
       "hbm[1].device: GPU 0 already has an hbm tier; expected one entry per GPU"},
      {"gpu: [{device: 0}, {device: 1}]\nhbm: [{capacity_bytes: 1GiB}, {capacity_bytes: 1MiB, arena_bytes: 2MiB}]\n",
       "hbm[1].arena_bytes: 2097152; expected at most hbm[1].capacity_bytes, 1048576"},
      {"gpu: [{device: 0}, {device: 1}]\nhbm: [{capacity_bytes: 1GiB}, {capacity_bytes: 2GiB}]\n"
       "tenants: [{name: a, uids: [1], dram_bytes: 1GiB, hbm_bytes: 2GiB}]\n",
       "tenants[0].hbm_bytes: the tenants' budgets together exceed hbm[0].capacity_bytes"},
  };
  for (const auto& [yaml, error] : cases) {
    v1::Config config;
    const absl::Status status = ParseConfig(WithGpus(yaml), &config);
    EXPECT_THAT(std::string(status.message()), ::testing::StartsWith(error)) << yaml;
  }
}

}  // namespace
}  // namespace ashlar::daemon
