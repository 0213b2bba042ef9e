// SPDX-License-Identifier: Apache-2.0
// EtcdDirectory while etcd is unreachable, slow, empty, compacted, or refuses calls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>

#include "absl/strings/match.h"
#include "daemon/peer/directory/etcd_directory.h"
#include "daemon/peer/directory/testing/directory_fixture.h"

namespace ashlar::daemon {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Names = std::set<std::string>;

class EtcdFaultsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = EtcdProcess::WhyNot(); !why.empty()) GTEST_SKIP() << why;
  }
  void StartPair() {
    etcd_ = std::make_unique<EtcdProcess>();
    a_ = std::make_unique<Node>("a", OptionsFor(etcd_->endpoint()));
    b_ = std::make_unique<Node>("b", OptionsFor(etcd_->endpoint()));
    a_->directory.Follow(NamespaceOf(1));
    b_->directory.Follow(NamespaceOf(1));
    for (uint64_t key = 0; key < 500; ++key) a_->Hold(1, key);
    ASSERT_TRUE(Until([&] { return b_->Holders(1, 499) == Names{"a"} && a_->members() == 2; }));
    ASSERT_TRUE(Until([&] { return b_->directory.Stats().entries == 500; }));
  }
  std::string Etcdctl(const std::string& arguments) const {
    return Shell("ETCDCTL_API=3 etcdctl --endpoints " + etcd_->endpoint() + " " + arguments);
  }

  std::unique_ptr<EtcdProcess> etcd_;
  std::unique_ptr<Node> a_, b_;
};

TEST_F(EtcdFaultsTest, UsesKnownEntriesWhileEtcdIsDown) {
  ASSERT_NO_FATAL_FAILURE(StartPair());
  const int asked = a_->asked_again;
  etcd_->Kill();
  ASSERT_TRUE(Until([&] { return !a_->directory.Health().connected && !b_->directory.Health().connected; }));
  EXPECT_THAT(a_->directory.Health().reason, HasSubstr(etcd_->endpoint()));
  EXPECT_GT(a_->directory.Health().since, 0);
  EXPECT_EQ(b_->Holders(1, 499), Names{"a"});
  EXPECT_EQ(b_->members(), 2u);
  a_->Hold(1, 500);
  a_->Drop(1, 0);
  b_->Hold(1, 1);
  std::this_thread::sleep_for(std::chrono::seconds(5));  // longer than a lease: the end of a member cannot be detected
  EXPECT_EQ(b_->members(), 2u);
  EXPECT_EQ(b_->Holders(1, 0), Names{"a"});
  EXPECT_EQ(a_->directory.Stats().queued_announcements, 1u);
  EXPECT_EQ(a_->directory.Stats().queued_withdrawals, 1u);
  etcd_->Start();
  ASSERT_TRUE(Until([&] {
    return b_->Holders(1, 500) == Names{"a"} && b_->Holders(1, 0).empty() && a_->Holders(1, 1) == Names{"b"};
  }));
  EXPECT_TRUE(a_->directory.Health().connected);
  EXPECT_GE(a_->directory.Stats().connections, 2u);
  EXPECT_EQ(a_->asked_again, asked) << "the lease lives on where etcd does, and so does what was announced";
  EXPECT_EQ(b_->directory.Stats().resyncs, 1u) << "it went on from its revision";
}

TEST_F(EtcdFaultsTest, AnEmptyRestoredEtcdIsFilledAgain) {
  ASSERT_NO_FATAL_FAILURE(StartPair());
  a_->Drop(1, 7);
  ASSERT_TRUE(Until([&] { return b_->Holders(1, 7).empty(); }));
  const int asked = a_->asked_again;
  etcd_->Wipe();
  ASSERT_TRUE(Until([&] { return !a_->directory.Health().connected; }));
  a_->Drop(1, 8);
  etcd_->Start();
  ASSERT_TRUE(Until([&] { return b_->directory.Health().connected; }));
  EXPECT_EQ(b_->Holders(1, 9), Names{"a"});
  ASSERT_TRUE(Until([&] { return b_->Holders(1, 8).empty() && b_->directory.Stats().entries == 498; }));
  EXPECT_EQ(a_->asked_again, asked + 1);
  EXPECT_EQ(b_->Holders(1, 0), Names{"a"});
  // Known entries are not erased before other nodes had a lease's time to announce them again.
  for (int i = 0; i < 800; ++i) {
    ASSERT_EQ(b_->Holders(1, 9), Names{"a"});
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(b_->directory.Stats().entries, 498u);
  Node c("c", OptionsFor(etcd_->endpoint()));
  c.directory.Follow(NamespaceOf(1));
  EXPECT_TRUE(Until([&] { return c.directory.Stats().entries == 498 && c.members() == 3; }));
}

// etcd is emptied, and by the time a node reconnects, others have written more than it had before.
TEST_F(EtcdFaultsTest, DetectsAnEmptiedEtcdWithHigherRevisions) {
  ASSERT_NO_FATAL_FAILURE(StartPair());
  etcd_->Wipe();
  a_.reset();
  ASSERT_TRUE(Until([&] { return !b_->directory.Health().connected; }));
  etcd_->Start();
  for (int i = 0; i < 3; ++i) Etcdctl(absl::StrCat("put x ", i));
  Node c("c", OptionsFor(etcd_->endpoint()));
  for (uint64_t key = 1000; key < 2000; ++key) c.Hold(1, key);
  ASSERT_TRUE(Until([&] { return b_->Holders(1, 1999) == Names{"c"}; }));
  EXPECT_TRUE(Until([&] { return b_->directory.Stats().entries == 1000; })) << "what a dead node held is gone";
}

TEST_F(EtcdFaultsTest, RereadsCompactedNamespace) {
  ASSERT_NO_FATAL_FAILURE(StartPair());
  NodeProcess stalled(etcd_->endpoint(), "stalled", 2000, 1);  // a third node, whose watch hangs
  ASSERT_TRUE(Until([&] { return b_->Holders(1, 2000) == Names{"stalled"}; }));
  etcd_->Kill();
  ASSERT_TRUE(Until([&] { return !a_->directory.Health().connected && !b_->directory.Health().connected; }));
  etcd_->Start();
  // b may reconnect first or last: in either case it ends with the contents of etcd.
  for (int i = 0; i < 20; ++i) Etcdctl("put x y");
  a_->Drop(1, 3);
  a_->Hold(1, 501);
  ASSERT_TRUE(Until([&] { return a_->directory.Health().connected; }));
  ASSERT_TRUE(Until([&] { return a_->directory.Stats().queued_withdrawals == 0; }));
  const std::string status = Etcdctl("get x --write-out fields | grep '\"Revision\"' | grep -o '[0-9]*'");
  Etcdctl("compact " + status.substr(0, status.find('\n')));
  EXPECT_TRUE(Until([&] {
    return b_->Holders(1, 501) == Names{"a"} && b_->Holders(1, 3).empty() && b_->directory.Stats().entries == 501;
  }));
}

// A member that was away for longer than etcd's history.
TEST_F(EtcdFaultsTest, AMemberReturnsAfterMissingACompaction) {
  etcd_ = std::make_unique<EtcdProcess>();
  const auto a = std::make_unique<Node>("a", OptionsFor(etcd_->endpoint()));
  a->directory.Follow(NamespaceOf(1));
  NodeProcess sleeper(etcd_->endpoint(), "sleeper", 0, 10);
  ASSERT_TRUE(Until([&] { return a->Holders(1, 9) == Names{"sleeper"}; }));
  sleeper.Freeze();
  for (uint64_t key = 100; key < 300; ++key) a->Hold(1, key);
  ASSERT_TRUE(Until([&] { return a->members() == 1; }));
  const std::string status = Etcdctl("get x --write-out fields | grep '\"Revision\"' | grep -o '[0-9]*'");
  Etcdctl("compact " + status.substr(0, status.find('\n')));
  sleeper.Thaw();
  EXPECT_TRUE(Until([&] { return a->Holders(1, 9) == Names{"sleeper"} && a->members() == 2; }));
}

// Limits of a transaction: for announcements, and for the sweep of a member that has nothing to announce.
TEST_F(EtcdFaultsTest, WorksWithAnEtcdThatAllowsFewerOperations) {
  etcd_ = std::make_unique<EtcdProcess>(EtcdOptions{.arguments = {"--max-txn-ops=10"}});
  const auto a = std::make_unique<Node>("a", OptionsFor(etcd_->endpoint()));
  a->directory.Follow(NamespaceOf(1));
  NodeProcess killed(etcd_->endpoint(), "killed", 0, 300);
  ASSERT_TRUE(Until([&] { return a->directory.Stats().entries == 300; }));
  const int health_changes = a->health_changes;
  killed.Kill();
  EXPECT_TRUE(Until([&] { return a->directory.Stats().swept == 300; }));
  EXPECT_TRUE(Until([&] { return a->directory.Stats().entries == 0; }));
  EXPECT_EQ(a->health_changes, health_changes) << "the connection is kept";
}

TEST_F(EtcdFaultsTest, WaitsForAPausedEtcd) {
  ASSERT_NO_FATAL_FAILURE(StartPair());
  etcd_->Freeze();
  a_->Hold(1, 600);
  std::this_thread::sleep_for(std::chrono::seconds(5));
  EXPECT_EQ(b_->Holders(1, 0), Names{"a"});
  EXPECT_FALSE(a_->directory.Health().connected) << "it noticed by itself";
  etcd_->Thaw();
  EXPECT_TRUE(Until([&] { return b_->Holders(1, 600) == Names{"a"} && b_->directory.Stats().entries == 501; }));
  EXPECT_TRUE(Until([&] { return a_->members() == 2 && b_->members() == 2; }));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // nothing may be loaded before a sanitizer
TEST_F(EtcdFaultsTest, AClockOffByAnHourChangesNothing) {
  const std::string library = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1";
  if (!std::filesystem::exists(library)) GTEST_SKIP() << library << " is not installed (Debian's faketime)";
  ASSERT_NO_FATAL_FAILURE(StartPair());
  std::vector<std::unique_ptr<ChildProcess>> wrong;
  for (const std::string hour : {"+3600", "-3600"}) {
    wrong.push_back(std::make_unique<ChildProcess>());
    wrong.back()->Start({.command = {"/proc/self/exe", "--gtest_filter=NodeProcess.*"},
                         .environment = {"ASHLAR_NODE_ENDPOINT=" + etcd_->endpoint(), "ASHLAR_NODE_NAME=wrong" + hour,
                                         "ASHLAR_NODE_FIRST=1000", "ASHLAR_NODE_COUNT=10", "ASHLAR_NODE_SPACES=1",
                                         "LD_PRELOAD=" + library, "FAKETIME=" + hour, "DONT_FAKE_MONOTONIC=1"},
                         .log = "/dev/null"});
  }
  ASSERT_TRUE(Until([&] { return a_->Holders(1, 1009) == Names{"wrong+3600", "wrong-3600"}; }));
  std::this_thread::sleep_for(std::chrono::seconds(5));  // longer than a lease, which they keep
  EXPECT_EQ(a_->members(), 4u);
  EXPECT_EQ(a_->Holders(1, 1009), (Names{"wrong+3600", "wrong-3600"}));
  wrong.clear();
  EXPECT_TRUE(Until([&] { return a_->members() == 2; })) << "their leases end as others'";
}
#endif

TEST_F(EtcdFaultsTest, TriesTheNextEndpointAfterAFailure) {
  etcd_ = std::make_unique<EtcdProcess>();
  EtcdDirectoryOptions options = OptionsFor(etcd_->endpoint());
  options.endpoints = {"127.0.0.1:1", etcd_->endpoint()};
  Node a("a", options);
  EXPECT_TRUE(Until([&] { return a.directory.Health().connected; }));
}

TEST_F(EtcdFaultsTest, UsersNeedTheirPassword) {
  etcd_ = std::make_unique<EtcdProcess>();
  const std::string folder = testing::TempDir() + "/";
  Etcdctl("user add root:secret");
  Etcdctl("user add ashlar:word");
  Etcdctl("role add ashlar");
  Etcdctl("role grant-permission ashlar --prefix=true readwrite /ashlar/");
  Etcdctl("user grant-role ashlar ashlar");
  Etcdctl("user grant-role root root");
  Etcdctl("auth enable");
  const std::string right = folder + "right", wrong = folder + "wrong";
  std::ofstream(right) << "word\n";
  std::ofstream(wrong) << "world\n";
  EtcdDirectoryOptions options = OptionsFor(etcd_->endpoint());
  Node nobody("nobody", options);
  EXPECT_TRUE(Until([&] { return absl::StrContains(nobody.directory.Health().reason, "user name is empty"); }))
      << nobody.directory.Health().reason;
  options.user = "ashlar";
  options.password_file = wrong;
  Node stranger("stranger", options);
  EXPECT_TRUE(Until([&] {
    return absl::StrContains(stranger.directory.Health().reason,
                             "cannot authenticate: etcdserver: authentication failed");
  })) << stranger.directory.Health().reason;
  options.password_file = folder + "none";
  Node forgetful("forgetful", options);
  EXPECT_TRUE(Until([&] { return absl::StrContains(forgetful.directory.Health().reason, folder + "none"); }))
      << forgetful.directory.Health().reason;
  options.password_file = right;
  Node a("a", options), b("b", options);
  b.directory.Follow(NamespaceOf(1));
  a.Hold(1, 1);
  EXPECT_TRUE(Until([&] { return b.Holders(1, 1) == Names{"a"} && b.members() == 2; })) << b.directory.Health().reason;
  // A revoked permission.
  Etcdctl("--user root:secret role revoke-permission ashlar --prefix=true /ashlar/");
  EXPECT_TRUE(Until([&] { return absl::StrContains(a.directory.Health().reason, "permission denied"); }))
      << a.directory.Health().reason;
  EXPECT_EQ(b.Holders(1, 1), Names{"a"});
}

TEST_F(EtcdFaultsTest, TlsRequiresTheAuthority) {
  std::string folder = testing::TempDir() + "/ashlar-tls-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  const auto make = [&](const std::string& authority, const std::string& name, const std::string& more, int days = 2) {
    Shell("cd " + folder + " && openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=" + name +
          " -keyout " + name + ".key -out " + name + ".csr && printf '" + more + "' > " + name +
          ".ext && openssl x509 -req -in " + name + ".csr -CA " + authority + ".pem -CAkey " + authority +
          ".key -CAcreateserial -days " + std::to_string(days) + " -extfile " + name + ".ext -out " + name + ".pem");
  };
  for (const std::string authority : {"ca", "foreign"}) {
    Shell("cd " + folder +
          " && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=" + authority +
          " -keyout " + authority + ".key -out " + authority + ".pem");
  }
  make("ca", "server", "subjectAltName=IP:127.0.0.1,DNS:localhost");
  make("ca", "client", "extendedKeyUsage=clientAuth");
  make("foreign", "stranger", "extendedKeyUsage=clientAuth");
  const auto file = [&](const std::string& name) { return folder + "/" + name; };
  EtcdOptions served;
  served.certificate = file("server.pem");
  served.key = file("server.key");
  served.client_authority = file("ca.pem");
  etcd_ = std::make_unique<EtcdProcess>(served);

  // One after another: each with its reason for failing, except the last.
  const struct {
    std::string authority, identity, reason;
  } kCases[] = {{"", "", "cannot read erasures"},
                {"ca.pem", "", "cannot read erasures"},
                {"ca.pem", "stranger", "cannot read erasures"},
                {"foreign.pem", "client", "cannot read erasures"},
                {"missing.pem", "client", file("missing.pem")},
                {"ca.pem", "client", ""}};
  for (const auto& c : kCases) {
    EtcdDirectoryOptions options = OptionsFor(etcd_->endpoint());
    if (!c.authority.empty()) options.ca_file = file(c.authority);
    if (!c.identity.empty()) options.cert_file = file(c.identity + ".pem");
    if (!c.identity.empty()) options.key_file = file(c.identity + ".key");
    const Node node("a", options);
    EXPECT_TRUE(Until([&] { return node.directory.Health().reason != "not connected yet"; }));
    EXPECT_THAT(node.directory.Health().reason, HasSubstr(c.reason)) << c.authority << " " << c.identity;
    EXPECT_EQ(node.directory.Health().connected, c.reason.empty());
    EXPECT_EQ(node.directory.Stats().connections, c.reason.empty() ? 1u : 0u);
    EXPECT_EQ(node.directory.Stats().certificate_expiry > 0, !c.identity.empty() && c.authority != "missing.pem");
    if (!c.reason.empty()) continue;
    // The certificate is renewed on the disk while the connection exists.
    const int64_t first = node.directory.Stats().certificate_expiry;
    make("ca", "client", "extendedKeyUsage=clientAuth", 9);
    EXPECT_TRUE(Until([&] { return node.directory.Stats().certificate_expiry > first + 5 * 86400; }));
    EXPECT_EQ(node.directory.Stats().certificate_seconds, 9 * 86400);
    EXPECT_EQ(node.directory.Stats().connections, 1u);
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace ashlar::daemon
