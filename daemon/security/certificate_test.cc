// SPDX-License-Identifier: Apache-2.0
#include "daemon/security/certificate.h"

#include <gtest/gtest.h>

#include <ctime>

#include "daemon/testing/certificates.h"

namespace ashlar::daemon {
namespace {

class CertificateTest : public ::testing::Test {
 protected:
  std::optional<Refusal> Judge(const TestPair& pair, TlsRole role = TlsRole::kClient, absl::string_view prefix = "") {
    verdict_ = (*Trust::Parse(authority_.pem()))->Check(pair.cert, "", role, prefix);
    EXPECT_EQ(verdict_.why.empty(), !verdict_.refusal.has_value());
    return verdict_.refusal;
  }
  const TestAuthority authority_{"the authority"};
  CertificateVerdict verdict_;
};

TEST_F(CertificateTest, NamesItsNode) {
  for (const TlsRole role : {TlsRole::kServer, TlsRole::kClient}) {
    EXPECT_EQ(Judge(authority_.Sign({.name = "node-1.a"}), role), std::nullopt) << verdict_.why;
    EXPECT_EQ(verdict_.node, "node-1.a");
  }
}

TEST_F(CertificateTest, InvalidOnesAreRefusedByReason) {
  EXPECT_EQ(Judge({}), Refusal::kNoCertificate);
  EXPECT_EQ(Judge({.cert = "nonsense"}), Refusal::kBadCertificate);
  EXPECT_EQ(Judge(TestAuthority::SelfSigned({.name = "a"})), Refusal::kUntrusted);
  EXPECT_EQ(Judge(TestAuthority("another").Sign({.name = "a"})), Refusal::kUntrusted);
  // An authority that only has the same name.
  EXPECT_EQ(Judge(TestAuthority("the authority").Sign({.name = "a"})), Refusal::kUntrusted);
  EXPECT_EQ(Judge(authority_.Sign({.name = "a", .from_seconds = -9, .to_seconds = -5})), Refusal::kExpired);
  EXPECT_EQ(Judge(authority_.Sign({.name = "a", .from_seconds = 900})), Refusal::kNotYetValid);
  const TestPair server_only = authority_.Sign({.name = "a", .usage = "serverAuth"});
  EXPECT_EQ(Judge(server_only, TlsRole::kServer), std::nullopt);
  EXPECT_EQ(Judge(server_only, TlsRole::kClient), Refusal::kBadCertificate);
  for (const char* name : {"", "a b", "a/b", "*"}) {
    EXPECT_EQ(Judge(authority_.Sign({.name = name})), Refusal::kNoName) << name;
  }
  EXPECT_EQ(Judge(authority_.Sign({.name = std::string("a\0b", 3)})), Refusal::kNoName);
}

TEST_F(CertificateTest, ASpiffeIdentityIsThePrefixAndTheNode) {
  const auto judge = [&](const std::string& uri) {
    return Judge(authority_.Sign({.name = "other", .uri = uri}), TlsRole::kClient, "spiffe://example.org/ashlar/");
  };
  EXPECT_EQ(judge("URI:spiffe://example.org/ashlar/node-7"), std::nullopt) << verdict_.why;
  EXPECT_EQ(verdict_.node, "node-7");
  EXPECT_EQ(judge(""), Refusal::kNoName) << "the common name does not count";
  EXPECT_EQ(judge("URI:spiffe://example.com/ashlar/node-7"), Refusal::kNoName);
  EXPECT_EQ(judge("URI:spiffe://example.org/web/node-7"), Refusal::kNoName);
  EXPECT_EQ(judge("URI:spiffe://example.org/ashlar/x/node-7"), Refusal::kNoName);
  EXPECT_EQ(judge("URI:spiffe://example.org/ashlar/"), Refusal::kNoName);
  EXPECT_EQ(judge("DNS:node-7"), Refusal::kNoName);
  EXPECT_EQ(judge("URI:spiffe://example.org/ashlar/a,URI:spiffe://example.org/ashlar/b"), Refusal::kNoName);
}

TEST_F(CertificateTest, AuthoritiesAreReadWholeOrNotAtAll) {
  const TestAuthority second("second");
  const std::string both = authority_.pem() + second.pem();
  ASSERT_TRUE(Trust::Parse(both).ok());
  EXPECT_EQ((*Trust::Parse(both))->Check(second.Sign({.name = "b"}).cert, "", TlsRole::kClient, "").node, "b");
  EXPECT_FALSE(Trust::Parse("").ok());
  // Truncated inside the second certificate: the file is being written.
  for (size_t cut = authority_.pem().size() + 30; cut + 2 < both.size(); cut += 40) {
    EXPECT_FALSE(Trust::Parse(both.substr(0, cut)).ok()) << cut;
  }
}

TEST_F(CertificateTest, TheChainEndsWithItsFirstExpiry) {
  const int64_t now = time(nullptr);
  const std::string own = authority_.Sign({.name = "a", .to_seconds = 5000}).cert;
  const std::string between = authority_.Sign({.name = "b", .from_seconds = -86400, .to_seconds = 1000}).cert;
  EXPECT_NEAR(static_cast<double>(TermOf(own).ends - now), 5000, 60);
  EXPECT_NEAR(static_cast<double>(TermOf(own + between).ends - now), 1000, 60);
  EXPECT_EQ(TermOf(own).seconds, 5000 + 3600) << "from an hour ago";
  EXPECT_EQ(TermOf(own + between).seconds, 1000 + 86400);
  EXPECT_EQ(TermOf("nonsense").ends, 0);
}

TEST_F(CertificateTest, RequiresAMatchingPair) {
  const TestPair one = authority_.Sign({.name = "a"}), other = authority_.Sign({.name = "a"});
  EXPECT_TRUE(CheckPair(one.cert, one.key).ok());
  EXPECT_EQ(CheckPair(one.cert, other.key).message(),
            "key_file: does not match cert_file; expected the certificate's private key");
  EXPECT_EQ(CheckPair("", one.key).message(), "cert_file: the file has no certificate; expected PEM");
  EXPECT_EQ(CheckPair(one.cert, one.key.substr(0, 60)).message(),
            "key_file: the file has no private key, or the key has a passphrase; expected PEM without a passphrase");
}

}  // namespace
}  // namespace ashlar::daemon
