// SPDX-License-Identifier: Apache-2.0
// etcd on a separate node, with its clients on others.
#include <gtest/gtest.h>

#include <string>

#include "daemon/testing/etcd_process.h"
#include "tests/integration/daemon_process.h"
#include "tests/nodes/network.h"
#include "tests/nodes/traffic.h"

namespace ashlar::nodes {
namespace {

using daemon::EtcdProcess;
using integration::Eventually;
using integration::InNetworkNamespace;
using std::chrono::milliseconds;

class EtcdTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = Network::WhyNot(); !why.empty()) GTEST_SKIP() << why;
    if (const std::string why = EtcdProcess::WhyNot(); !why.empty()) GTEST_SKIP() << why;
  }
};

// etcd's JSON gateway: base64 of "key" and "value" with a number of one digit.
constexpr char kPut[] = R"({"key":"a2V5","value":"dmFsdWUx"})", kGet[] = R"({"key":"a2V5"})";
constexpr char kValue[] = "dmFsdWUx";

// The answer to a POST from that node; empty if none arrives in time.
std::string Ask(const Network& network, size_t node, size_t etcd, const std::string& call, const std::string& body,
                milliseconds patience = std::chrono::seconds(10)) {
  const InNetworkNamespace here(network.stack(node));
  return Post(Network::address(etcd), 2379, "/v3/kv/" + call, body, patience);
}

bool Has(const std::string& answer) {
  return answer.find(" 200 ") != std::string::npos && answer.find(kValue) != std::string::npos;
}

TEST_F(EtcdTest, ServesOtherNodesAndKeepsItsDataWhenKilled) {
  Network network;
  EtcdProcess etcd({.address = Network::address(1), .network_namespace = network.stack(1)});
  EXPECT_EQ(etcd.endpoint(), "10.77.0.2:2379");
  EXPECT_NE(Ask(network, 0, 1, "put", kPut).find(" 200 "), std::string::npos);
  EXPECT_TRUE(Has(Ask(network, 0, 1, "range", kGet)));

  etcd.Kill();
  EXPECT_EQ(Ask(network, 0, 1, "range", kGet), "");
  etcd.Start();
  EXPECT_TRUE(Has(Ask(network, 0, 1, "range", kGet)));

  etcd.Wipe();
  etcd.Start();
  const std::string empty = Ask(network, 0, 1, "range", kGet);
  EXPECT_NE(empty.find(" 200 "), std::string::npos);
  EXPECT_FALSE(Has(empty));
}

TEST_F(EtcdTest, CanBeFrozenAndCutOff) {
  Network network;
  EtcdProcess etcd({.address = Network::address(1), .network_namespace = network.stack(1)});
  EXPECT_NE(Ask(network, 0, 1, "put", kPut).find(" 200 "), std::string::npos);
  etcd.Freeze();
  EXPECT_EQ(Ask(network, 0, 1, "range", kGet, milliseconds(300)), "");
  etcd.Thaw();
  EXPECT_TRUE(Has(Ask(network, 0, 1, "range", kGet)));
  network.SetBetween(0, 1, {.cut = true});
  EXPECT_EQ(Ask(network, 0, 1, "range", kGet, milliseconds(300)), "");
  network.Heal();
  EXPECT_TRUE(Eventually([&] { return Has(Ask(network, 0, 1, "range", kGet)); }));
}

TEST_F(EtcdTest, TwoInOneStackUseSeparatePorts) {
  EtcdProcess first, second;
  EXPECT_NE(first.endpoint(), second.endpoint());
}

}  // namespace
}  // namespace ashlar::nodes
