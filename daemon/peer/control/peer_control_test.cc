// SPDX-License-Identifier: Apache-2.0
// Calls between two daemons over real sockets: which peers are accepted, which are refused, and what is detected.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <thread>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "ashlar/v1/peer.grpc.pb.h"
#include "daemon/peer/control/peer_client.h"
#include "daemon/peer/control/peer_listener.h"
#include "daemon/peer/control/peer_server.h"
#include "daemon/testing/certificates.h"
#include "daemon/testing/fake_peer_calls.h"
#include "daemon/testing/http_peer.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

constexpr storage::Nanos kMilli = 1'000'000;

bool Await(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

PeerHello Hello(const std::string& node, uint8_t incarnation = 1) {
  PeerHello hello{.node = node, .transport_address = node + ":1"};
  hello.incarnation.fill(incarnation);
  return hello;
}

class PeerControlTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
    config_.mutable_cluster()->set_node("holder");
    config_.add_tenants()->set_name("acme");
    config_.add_tenants()->set_name("other");
  }
  void TearDown() override {
    client_ = nullptr;
    calls_.AnswerHeld();
    server_ = nullptr;
    tls_.clear();
    std::filesystem::remove_all(folder_);
  }

  void WriteFiles(const std::string& node, const std::string& ca, const TestPair& pair) {
    ReplaceFile(File(node, "ca"), ca);
    ReplaceFile(File(node, "key"), pair.key);
    ReplaceFile(File(node, "cert"), pair.cert);
  }
  std::string File(const std::string& node, const std::string& what) const {
    return absl::StrCat(folder_, "/", node, ".", what);
  }
  Tls* OpenTls(const std::string& node, std::function<bool(const std::string&)> member) {
    auto tls = Tls::Open({.node = node,
                          .ca_file = File(node, "ca"),
                          .cert_file = File(node, "cert"),
                          .key_file = File(node, "key"),
                          .check_every = 20 * kMilli},
                         std::move(member), node == "holder" ? refusals_ : client_refusals_);
    EXPECT_TRUE(tls.ok()) << tls.status();
    tls_.push_back(*std::move(tls));
    return tls_.back().get();
  }
  Tls* OpenGood(const std::string& node) {
    WriteFiles(node, authority_.pem(), authority_.Sign({.name = node}));
    return OpenTls(node, [](const std::string&) { return true; });
  }
  void Serve(bool with_tls = true) {
    policy_ = std::make_unique<PeerPolicy>(config_);
    Tls* tls = nullptr;
    if (with_tls) {
      WriteFiles("holder", authority_.pem(), authority_.Sign({.name = "holder"}));
      tls = OpenTls("holder", [this](const std::string& node) { return policy_->Member(node); });
    }
    auto server = PeerServer::Start({.listen = {.host = "127.0.0.1", .port = 0},
                                     .self = Hello("holder"),
                                     .timeout = 2000 * kMilli,
                                     .check_every = 50 * kMilli},
                                    tls, *policy_, calls_, refusals_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  PeerClient::Options ClientOptions(const std::string& node, uint8_t incarnation = 1) {
    return {.node = "holder",
            .address = absl::StrCat("127.0.0.1:", server_->port()),
            .self = Hello(node, incarnation),
            .timeout = 2000 * kMilli,
            .call_timeout = 20'000 * kMilli,
            .first_retry = 10 * kMilli,
            .longest_retry = 100 * kMilli,
            .here = [this](const PeerHello&) { ++here_; },
            .gone = [this] { ++gone_; }};
  }
  std::unique_ptr<PeerClient> Dial(const std::string& node, const Tls* tls, uint8_t incarnation = 1) {
    return std::make_unique<PeerClient>(ClientOptions(node, incarnation), tls, client_refusals_);
  }
  absl::StatusOr<std::vector<PeerOpened>> Open(PeerClient& client, const std::string& tenant = "acme") {
    std::promise<absl::StatusOr<std::vector<PeerOpened>>> answer;
    client.Open(tenant, {.objects = {{}}, .lease_ms = 1000}, [&](auto opened) { answer.set_value(std::move(opened)); });
    return answer.get_future().get();
  }
  // A peer with these files is refused, and the server gives the reason.
  void ExpectRefused(const TestPair& pair, const std::string& ca, Refusal refusal) {
    SCOPED_TRACE(std::string(Name(refusal)));
    const TestPair good = authority_.Sign({.name = "asker"});
    const uint64_t before = refusals_.count(refusal);
    grpc::SslCredentialsOptions options{.pem_root_certs = ca, .pem_private_key = pair.key, .pem_cert_chain = pair.cert};
    grpc::ChannelArguments arguments;
    arguments.SetSslTargetNameOverride("holder");
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel = grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", server_->port()),
                                                   grpc::SslCredentials(options), arguments);
    const auto stub = v1::Peer::NewStub(channel);
    grpc::ClientContext context;
    v1::PeerRenewRequest request;
    v1::PeerRenewReply reply;
    EXPECT_FALSE(stub->Renew(&context, request, &reply).ok());
    EXPECT_TRUE(Await([&] { return refusals_.count(refusal) > before; }));
    EXPECT_TRUE(calls_.notes().empty());
  }

  std::string folder_ = "/tmp/ashlar_peers_XXXXXX";
  const TestAuthority authority_{"cluster"};
  v1::Config config_;
  std::unique_ptr<PeerPolicy> policy_;
  Refusals refusals_, client_refusals_;
  FakePeerCalls calls_;
  std::atomic<int> here_{0}, gone_{0};
  std::vector<std::unique_ptr<Tls>> tls_;
  std::unique_ptr<PeerServer> server_;
  std::unique_ptr<PeerClient> client_;
};

TEST_F(PeerControlTest, MembersCallEachOther) {
  Serve();
  client_ = Dial("asker", OpenGood("asker"));
  ASSERT_TRUE(Await([&] { return client_->connected(); }));
  const auto opened = Open(*client_);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->at(0).miss, MissReason::kEvicted);
  EXPECT_EQ(calls_.Count("open asker 0"), 1u);
  EXPECT_EQ(server_->peers(), 1u);
  client_ = nullptr;
  EXPECT_TRUE(Await([&] { return calls_.Count("gone asker") == 1; }));
  EXPECT_EQ(calls_.Count("here asker"), 1u);
}

TEST_F(PeerControlTest, BadCertificatesAreRefusedAndCountedByReason) {
  config_.mutable_cluster()->add_peers()->set_node("asker");
  Serve();
  // MembersCallEachOther shows that valid files are accepted.
  const std::string ca = authority_.pem();
  ExpectRefused({}, ca, Refusal::kNoCertificate);
  ExpectRefused(TestAuthority::SelfSigned({.name = "asker"}), ca, Refusal::kUntrusted);
  ExpectRefused(TestAuthority("cluster").Sign({.name = "asker"}), ca, Refusal::kUntrusted);
  ExpectRefused(authority_.Sign({.name = "asker", .from_seconds = -9, .to_seconds = -5}), ca, Refusal::kExpired);
  ExpectRefused(authority_.Sign({.name = "asker", .from_seconds = 900}), ca, Refusal::kNotYetValid);
  ExpectRefused(authority_.Sign({.name = "asker", .usage = "serverAuth"}), ca, Refusal::kBadCertificate);
  ExpectRefused(authority_.Sign({.name = "not a node"}), ca, Refusal::kNoName);
  ExpectRefused(authority_.Sign({.name = "stranger"}), ca, Refusal::kNotAMember);
  EXPECT_EQ(server_->peers(), 0u);
}

TEST_F(PeerControlTest, AGreetingNamesTheNodeOfTheCertificate) {
  Serve();
  client_ = Dial("somebody-else", OpenGood("asker"));
  EXPECT_TRUE(Await([&] { return refusals_.count(Refusal::kWrongNode) > 0; }));
  EXPECT_FALSE(client_->connected());
  EXPECT_TRUE(calls_.notes().empty());
}

TEST_F(PeerControlTest, AClientRefusesAnotherNodesCertificate) {
  Serve();
  auto options = ClientOptions("asker");
  options.node = "another";
  client_ = std::make_unique<PeerClient>(options, OpenGood("asker"), client_refusals_);
  EXPECT_TRUE(Await([&] { return client_refusals_.count(Refusal::kWrongNode) > 0; }));
  EXPECT_FALSE(client_->connected());
}

TEST_F(PeerControlTest, AnotherVersionIsRefusedByName) {
  Serve(false);
  const auto stub = v1::Peer::NewStub(
      grpc::CreateChannel(absl::StrCat("127.0.0.1:", server_->port()), grpc::InsecureChannelCredentials()));
  for (const uint32_t version : {limits::kPeerProtocolMin - 1, limits::kPeerProtocolMax + 1}) {
    v1::PeerGreeting greeting, answer;
    Write(Hello("asker"), &greeting);
    greeting.set_protocol_min(version);
    greeting.set_protocol_max(version);
    grpc::ClientContext context;
    const auto reader = stub->Greet(&context, greeting);
    EXPECT_FALSE(reader->Read(&answer));
    const grpc::Status status = reader->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_EQ(status.error_message(),
              absl::StrCat("protocol: no common version; the peer speaks ", version, " to ", version,
                           "; this node speaks ", limits::kPeerProtocolMin, " to ", limits::kPeerProtocolMax));
  }
  EXPECT_EQ(refusals_.count(Refusal::kVersion), 2u);
}

TEST_F(PeerControlTest, TenantsAreThoseThatAreSharedWithThePeer) {
  v1::ClusterPeer* peer = config_.mutable_cluster()->add_peers();
  peer->set_node("asker");
  peer->add_tenants("other");
  Serve();
  client_ = Dial("asker", OpenGood("asker"));
  ASSERT_TRUE(Await([&] { return client_->connected(); }));
  EXPECT_TRUE(Open(*client_, "other").ok());
  EXPECT_EQ(calls_.Count("open asker 1"), 1u);
  for (const char* name : {"acme", "unheard", ""}) {
    EXPECT_EQ(Open(*client_, name).status().code(), absl::StatusCode::kNotFound) << name;
  }
  EXPECT_EQ(refusals_.count(Refusal::kTenant), 3u);
  EXPECT_TRUE(Open(*client_, "other").ok()) << "the connection goes on";
  const auto offer = [&](const std::string& tenant) {
    std::promise<absl::StatusOr<std::vector<TakeOutcome>>> outcomes;
    client_->Offer(tenant, {.objects = {{.bytes = 1}}, .patience_ms = 1000},
                   [&](auto reply) { outcomes.set_value(std::move(reply)); });
    return outcomes.get_future().get();
  };
  EXPECT_EQ(offer("other")->at(0), TakeOutcome::kNoSpace);
  EXPECT_EQ(calls_.Count("offer asker 1"), 1u);
  EXPECT_EQ(offer("acme").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(refusals_.count(Refusal::kTenant), 4u);
}

TEST_F(PeerControlTest, CertificatesAndAuthoritiesRotateUnderCalls) {
  Serve();
  Tls* const tls = OpenGood("asker");
  client_ = Dial("asker", tls);
  ASSERT_TRUE(Await([&] { return client_->connected(); }));
  calls_.hangs = true;
  std::promise<absl::Status> answer;
  client_->Open("acme", {.objects = {{}}, .lease_ms = 1}, [&](auto opened) { answer.set_value(opened.status()); });
  ASSERT_TRUE(Await([&] { return calls_.Count("open asker 0") == 1; }));

  // Both nodes first trust the new authority as well, then get its certificates, then trust only it.
  const TestAuthority next("next");
  for (const char* node : {"holder", "asker"}) ReplaceFile(File(node, "ca"), authority_.pem() + next.pem());
  ASSERT_TRUE(Await([&] { return tls_[0]->reloads() == 1 && tls_[1]->reloads() == 1; }));
  for (const char* node : {"holder", "asker"}) {
    const TestPair pair = next.Sign({.name = node});
    ReplaceFile(File(node, "key"), pair.key);  // half of a pair: neither file is used
    const uint64_t before = tls_[0]->reloads() + tls_[1]->reloads();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    EXPECT_EQ(tls_[0]->reloads() + tls_[1]->reloads(), before);
    WriteFiles("second", authority_.pem() + next.pem(), authority_.Sign({.name = "second"}));
    const auto second = Dial("second", OpenTls("second", [](const std::string&) { return true; }));
    EXPECT_EQ(second->connected() || Await([&] { return second->connected(); }), true) << "the former pair serves";
    ReplaceFile(File(node, "cert"), pair.cert);
    ASSERT_TRUE(Await([&] { return tls_[0]->reloads() + tls_[1]->reloads() == before + 1; }));
  }
  EXPECT_TRUE(client_->connected());
  calls_.hangs = false;
  calls_.AnswerHeld();
  EXPECT_TRUE(answer.get_future().get().ok());

  // An older connection is closed when its certificate's authority is removed; the client reconnects with its new
  // certificate.
  const int seen = here_;
  for (const char* node : {"holder", "asker"}) ReplaceFile(File(node, "ca"), next.pem());
  ASSERT_TRUE(Await([&] { return here_ > seen && client_->connected(); }));
  EXPECT_TRUE(Await([&] { return Open(*client_).ok(); }));
  EXPECT_GE(refusals_.count(Refusal::kUntrusted), 1u);
}

TEST_F(PeerControlTest, InvalidBytesAndUnknownPeersAreRefused) {
  Serve();
  const uint64_t before = refusals_.count(Refusal::kHandshake);
  for (const char* bytes :
       {"", "GET / HTTP/1.1\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "\x16\x03\x01\x02\x00garbage"}) {
    HttpPeer peer(server_->port());
    ASSERT_TRUE(peer.Send(bytes));
    if (*bytes == '\0') shutdown(peer.fd(), SHUT_RDWR);
  }
  EXPECT_TRUE(Await([&] { return refusals_.count(Refusal::kHandshake) == before + 4; }));
  client_ = Dial("asker", OpenGood("asker"));
  EXPECT_TRUE(Await([&] { return client_->connected(); }));
}

TEST_F(PeerControlTest, ConnectionsOfAnAddressAreBounded) {
  Serve();
  std::vector<std::unique_ptr<HttpPeer>> held;
  for (size_t i = 0; i < PeerListener::kOfAnAddress; ++i) held.push_back(std::make_unique<HttpPeer>(server_->port()));
  EXPECT_EQ(refusals_.count(Refusal::kTooMany), 0u);
  HttpPeer more(server_->port());
  EXPECT_TRUE(more.Closed());
  EXPECT_EQ(refusals_.count(Refusal::kTooMany), 1u);
  held.clear();
  client_ = Dial("asker", OpenGood("asker"));
  EXPECT_TRUE(Await([&] { return client_->connected(); }));
}

TEST_F(PeerControlTest, AHungHandlerEndsAtTheDeadline) {
  Serve();
  calls_.hangs = true;
  auto options = ClientOptions("asker");
  options.call_timeout = 100 * kMilli;
  client_ = std::make_unique<PeerClient>(options, OpenGood("asker"), client_refusals_);
  ASSERT_TRUE(Await([&] { return client_->connected(); }));
  EXPECT_EQ(Open(*client_).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(client_->connected());
}

TEST_F(PeerControlTest, CallsInFlightAreBounded) {
  Serve();
  calls_.hangs = true;
  client_ = Dial("asker", OpenGood("asker"));
  ASSERT_TRUE(Await([&] { return client_->connected(); }));
  std::atomic<size_t> answered{0};
  for (size_t i = 0; i < PeerClient::kCalls; ++i) {
    client_->Open("acme", {.objects = {{}}, .lease_ms = 1}, [&](auto) { ++answered; });
  }
  EXPECT_EQ(answered, 0u);
  EXPECT_EQ(Open(*client_).status().code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(Await([&] { return calls_.Count("open asker 0") == PeerClient::kCalls; }));
  calls_.hangs = false;
  calls_.AnswerHeld();
  EXPECT_TRUE(Await([&] { return answered == PeerClient::kCalls; }));
}

TEST_F(PeerControlTest, ACallWithoutAGreetingIsRefused) {
  Serve(false);
  const auto stub = v1::Peer::NewStub(
      grpc::CreateChannel(absl::StrCat("127.0.0.1:", server_->port()), grpc::InsecureChannelCredentials()));
  v1::PeerRenewRequest request;
  v1::PeerRenewReply reply;
  grpc::ClientContext context;
  EXPECT_EQ(stub->Renew(&context, request, &reply).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(refusals_.count(Refusal::kBadGreeting), 1u);
}

TEST_F(PeerControlTest, ANewIncarnationEndsTheFormersLeases) {
  Serve();
  Tls* const tls = OpenGood("asker");
  client_ = Dial("asker", tls, 1);
  ASSERT_TRUE(Await([&] { return calls_.Count("here asker") == 1; }));
  {
    const auto next = Dial("asker", tls, 2);
    ASSERT_TRUE(Await([&] { return calls_.Count("here asker") >= 2; }));
    EXPECT_GE(calls_.Count("gone asker"), 1u);
    EXPECT_EQ(calls_.notes()[1], "gone asker");
    EXPECT_EQ(calls_.notes()[2], "here asker");
    client_ = nullptr;
  }
  EXPECT_TRUE(Await([&] { return server_->peers() == 0; }));
}

// Forwards bytes between a client and the server until it is told to drop them, like a dead peer whose machine sends no
// final packet.
class Wire {
 public:
  explicit Wire(uint16_t to) : to_(to) {
    listener_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
    EXPECT_EQ(listen(listener_, 4), 0);
    socklen_t size = sizeof at;
    getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &size);
    port_ = ntohs(at.sin_port);
    thread_ = std::thread([this] { Run(); });
  }
  ~Wire() {
    stopping_ = true;
    thread_.join();
    close(listener_);
  }
  uint16_t port() const { return port_; }
  void Cut() { cut_ = true; }

 private:
  void Run() {
    timeval slice{.tv_sec = 0, .tv_usec = 2000};
    setsockopt(listener_, SOL_SOCKET, SO_RCVTIMEO, &slice, sizeof slice);
    int from = -1;
    while (from < 0 && !stopping_) from = accept(listener_, nullptr, nullptr);
    if (from < 0) return;
    HttpPeer to(to_);
    char bytes[4096];
    for (int ends[] = {from, to.fd()}; !stopping_;) {
      for (int i : {0, 1}) {
        const ssize_t got = recv(ends[i], bytes, sizeof bytes, MSG_DONTWAIT);
        if (got > 0 && !cut_) send(ends[1 - i], bytes, static_cast<size_t>(got), MSG_NOSIGNAL);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(500));
    }
    close(from);
  }

  const uint16_t to_;
  int listener_;
  uint16_t port_ = 0;
  std::atomic<bool> cut_{false}, stopping_{false};
  std::thread thread_;
};

TEST_F(PeerControlTest, ASilentPeerIsDisconnectedAtBothEnds) {
  Serve();
  Wire wire(server_->port());
  auto options = ClientOptions("asker");
  options.address = absl::StrCat("127.0.0.1:", wire.port());
  client_ = std::make_unique<PeerClient>(options, OpenGood("asker"), client_refusals_);
  ASSERT_TRUE(Await([&] { return client_->connected(); }));
  wire.Cut();
  EXPECT_TRUE(Await([&] { return calls_.Count("gone asker") == 1 && gone_ == 1; }));
  EXPECT_FALSE(client_->connected());
  EXPECT_EQ(Open(*client_).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(PeerControlTest, ARestartedServerIsFoundAgain) {
  Serve();
  client_ = Dial("asker", OpenGood("asker"));
  ASSERT_TRUE(Await([&] { return client_->connected(); }));
  const uint16_t port = server_->port();
  server_ = nullptr;
  EXPECT_EQ(calls_.Count("gone asker"), 1u);
  ASSERT_TRUE(Await([&] { return gone_ == 1; }));
  auto server = PeerServer::Start({.listen = {.host = "127.0.0.1", .port = port}, .self = Hello("holder", 2)},
                                  tls_[0].get(), *policy_, calls_, refusals_);
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  EXPECT_TRUE(Await([&] { return client_->connected(); }));
}

}  // namespace
}  // namespace ashlar::daemon
