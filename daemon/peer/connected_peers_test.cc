// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/connected_peers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace ashlar::daemon {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

PeerHello HelloOf(const std::string& node, uint8_t incarnation) {
  PeerHello hello;
  hello.node = node;
  hello.incarnation.fill(incarnation);
  return hello;
}

TEST(ConnectedPeers, ARestartedDaemonReplacesTheEarlierReader) {
  std::vector<std::string> gone;
  ConnectedPeers peers([&](const std::string& reader) { gone.push_back(reader); });
  const PeerHello first = HelloOf("a", 1), second = HelloOf("a", 2);
  EXPECT_FALSE(peers.Has(first));
  peers.Connected(first);
  peers.Connected(first);  // a reconnected daemon is the same reader
  EXPECT_THAT(gone, IsEmpty());
  EXPECT_TRUE(peers.Has(first));
  peers.Connected(second);
  EXPECT_THAT(gone, ElementsAre(ConnectedPeers::ReaderOf(first)));
  EXPECT_FALSE(peers.Has(first));
  EXPECT_TRUE(peers.Has(second));
}

TEST(ConnectedPeers, ADisconnectedNodeIsGoneOnce) {
  std::vector<std::string> gone;
  ConnectedPeers peers([&](const std::string& reader) { gone.push_back(reader); });
  const PeerHello a = HelloOf("a", 1), b = HelloOf("b", 1);
  peers.Connected(a);
  peers.Connected(b);
  peers.Disconnected("a");
  peers.Disconnected("a");
  EXPECT_THAT(gone, ElementsAre(ConnectedPeers::ReaderOf(a)));
  EXPECT_FALSE(peers.Has(a));
  EXPECT_TRUE(peers.Has(b));
}

}  // namespace
}  // namespace ashlar::daemon
