// SPDX-License-Identifier: Apache-2.0
// Engines that violate the protocol are refused by the field's name, without other effects.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>

#include "ashlar/v1/cache.grpc.pb.h"
#include "ashlar/v1/session.pb.h"
#include "proto/limits.h"
#include "proto/tokens.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/raw_session.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using testing::HasSubstr;

std::string RandomBytes(std::mt19937& random, size_t size) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

uint32_t Code(absl::StatusCode code) {
  return static_cast<uint32_t>(code);
}

// A file with these seals, closed at the end.
class Memfd {
 public:
  Memfd(off_t bytes, int seals) : fd_(::memfd_create("hostile", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    EXPECT_EQ(::ftruncate(fd_, bytes), 0);
    EXPECT_EQ(::fcntl(fd_, F_ADD_SEALS, seals), 0);
  }
  ~Memfd() { ::close(fd_); }
  int get() const { return fd_; }

 private:
  const int fd_;
};

// A well-behaved engine shares the daemon with hostile ones, and must not be affected.
class Hostile : public testing::Test {
 protected:
  Hostile() { engine_.PublishPrompt(prompt_); }
  void TearDown() override {
    const Match match = engine_.Lookup(prompt_);
    EXPECT_TRUE(match.segments()[1].hit());
    EXPECT_THAT(engine_.Land(match, prompt_).Wait(kPatience), testing::Each(MissReason::kNone));
    EXPECT_TRUE(Eventually([&] { return daemon_.Metric("ashlar_sessions") == 1; }));
  }

  DaemonProcess daemon_;
  TestEngine engine_{daemon_.client_options()};
  const std::vector<Tokens> prompt_ = MakePrompt(8, 2, 40);
};

TEST_F(Hostile, InvalidSessionMessagesAreRefused) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int trial = 0; trial < 50; ++trial) {
    RawSession session(daemon_.client_options());
    ASSERT_TRUE(session.connected());
    if (trial % 2 == 0) session.Greet();
    session.Send(RandomBytes(random, 1 + random() % 1000));
    session.Receive();
  }
  RawSession session(daemon_.client_options());
  session.Greet();
  session.Send(std::string(limits::kMaxSessionMessageBytes + 1, 'x'));
  EXPECT_NE(session.Receive().code(), Code(absl::StatusCode::kOk));
}

TEST_F(Hostile, SessionRequestsOutOfOrderAreRefused) {
  v1::SessionRequest arena;
  arena.mutable_get_arena()->set_arena(0);
  EXPECT_EQ(RawSession(daemon_.client_options()).Ask(arena).code(), Code(absl::StatusCode::kInvalidArgument));

  v1::SessionRequest hello;
  hello.mutable_hello()->set_protocol_min(limits::kProtocolMax + 1);
  hello.mutable_hello()->set_protocol_max(limits::kProtocolMax + 9);
  EXPECT_EQ(RawSession(daemon_.client_options()).Ask(hello).code(), Code(absl::StatusCode::kFailedPrecondition));
  hello.mutable_hello()->set_protocol_max(limits::kProtocolMin);
  EXPECT_EQ(RawSession(daemon_.client_options()).Ask(hello).code(), Code(absl::StatusCode::kInvalidArgument));

  RawSession twice(daemon_.client_options());
  twice.Greet();
  EXPECT_EQ(twice.Greet(), "");
}

TEST_F(Hostile, RegionsThatCouldKillTheDaemonAreRefused) {
  RawSession session(daemon_.client_options());
  session.Greet();
  const auto refusal = [&](uint64_t bytes, const std::vector<int>& descriptors) {
    v1::SessionRequest request;
    request.mutable_register_region()->set_bytes(bytes);
    const v1::SessionReply reply = session.Ask(request, descriptors);
    EXPECT_EQ(reply.code(), Code(absl::StatusCode::kInvalidArgument)) << reply.message();
    return reply.message();
  };
  const Memfd shrinkable(1 << 20, F_SEAL_GROW), good(1 << 20, F_SEAL_SHRINK);
  EXPECT_THAT(refusal(1 << 20, {shrinkable.get()}), HasSubstr("SHRINK"));
  EXPECT_EQ(::ftruncate(shrinkable.get(), 0), 0);  // would have caused SIGBUS in the daemon
  EXPECT_THAT(refusal(1 << 21, {good.get()}), HasSubstr("bytes"));
  EXPECT_THAT(refusal(0, {good.get()}), HasSubstr("bytes"));
  EXPECT_THAT(refusal(1 << 20, {}), HasSubstr("descriptor"));
  EXPECT_THAT(refusal(1 << 20, {good.get(), good.get()}), HasSubstr("descriptor"));
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  refusal(4096, {ends[0]});
  ::close(ends[0]);
  ::close(ends[1]);

  v1::SessionRequest host;
  host.mutable_host_region()->set_bytes(UINT64_MAX);
  EXPECT_NE(session.Ask(host).code(), Code(absl::StatusCode::kOk));
  v1::SessionRequest drop;
  drop.mutable_drop_region()->set_region(12345);
  EXPECT_EQ(session.Ask(drop).code(), Code(absl::StatusCode::kInvalidArgument));
}

TEST_F(Hostile, OtherProtocolsThanGrpcAreRefused) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  for (int trial = 0; trial < 50; ++trial) {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_un address {};
    address.sun_family = AF_UNIX;
    const std::string path = daemon_.client_options().rpc_socket;
    std::memcpy(address.sun_path, path.data(), path.size());
    ASSERT_EQ(::connect(fd, reinterpret_cast<struct sockaddr*>(&address), sizeof address), 0);
    const std::string bytes = (trial % 2 == 0 ? preface : "") + RandomBytes(random, 1 + random() % 500);
    EXPECT_GT(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), 0);
    ::close(fd);
  }
}

class HostileCalls : public Hostile {
 protected:
  void SetUp() override {
    secret_ = session_->Greet();
    stub_ = v1::Cache::NewStub(
        grpc::CreateChannel("unix:" + daemon_.client_options().rpc_socket, grpc::InsecureChannelCredentials()));
    v1::OpenModelReply reply;
    ASSERT_TRUE(Call(&v1::Cache::Stub::OpenModel, GoodModel(), &reply).ok());
    model_ = reply.model();
  }
  void TearDown() override {
    session_.reset();
    Hostile::TearDown();
  }

  v1::OpenModelRequest GoodModel() {
    v1::OpenModelRequest request;
    request.set_session(secret_);
    request.set_identity(EncodeIdentity(TestEngine::identity()));
    request.set_layout(EncodeLayout(engine_.model().layout()));
    return request;
  }

  template <typename Method, typename Request, typename Reply>
  grpc::Status Call(Method method, const Request& request, Reply* reply) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    return ((*stub_).*method)(&context, request, reply);
  }

  template <typename Reply, typename Method, typename Request>
  void ExpectRefused(Method method, const Request& request, const std::string& field) {
    Reply reply;
    const grpc::Status status = Call(method, request, &reply);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(field));
  }

  std::unique_ptr<RawSession> session_ = std::make_unique<RawSession>(daemon_.client_options());
  std::string secret_;
  std::unique_ptr<v1::Cache::Stub> stub_;
  uint64_t model_ = 0;
};

TEST_F(HostileCalls, CallsWithoutSessionAreRefused) {
  for (const std::string& secret : {std::string(), std::string(16, 'x'), std::string(1000, 'y')}) {
    v1::MatchRequest request;
    request.set_session(secret);
    v1::MatchReply reply;
    EXPECT_EQ(Call(&v1::Cache::Stub::Match, request, &reply).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  }
}

TEST_F(HostileCalls, HandlesOfOtherSessionsAreRefused) {
  v1::MatchRequest request;
  request.set_session(secret_);
  request.set_model(model_ + 1000);
  ExpectRefused<v1::MatchReply>(&v1::Cache::Stub::Match, request, "model");

  v1::DeclarePagesRequest pages;
  pages.set_session(secret_);
  pages.set_model(model_);
  pages.set_region(1);  // the good engine's
  pages.set_page_tokens(16);
  pages.set_pages(1);
  ExpectRefused<v1::DeclarePagesReply>(&v1::Cache::Stub::DeclarePages, pages, "region");
}

TEST_F(HostileCalls, InvalidDeclarationsAreRefused) {
  v1::OpenModelRequest request = GoodModel();
  request.set_layout(request.layout().substr(0, request.layout().size() - 3));
  ExpectRefused<v1::OpenModelReply>(&v1::Cache::Stub::OpenModel, request, "layout");
  Layout narrow = engine_.model().layout();
  narrow.head = 1;
  request.set_layout(EncodeLayout(narrow));
  ExpectRefused<v1::OpenModelReply>(&v1::Cache::Stub::OpenModel, request, "layout.head");
  request = GoodModel();
  request.set_identity("");
  ExpectRefused<v1::OpenModelReply>(&v1::Cache::Stub::OpenModel, request, "identity");

  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int trial = 0; trial < 100; ++trial) {
    request = GoodModel();
    std::string& layout = *request.mutable_layout();
    for (int flips = 0; flips < 3; ++flips) layout[random() % layout.size()] ^= static_cast<char>(1 << random() % 8);
    v1::OpenModelReply reply;
    const grpc::Status status = Call(&v1::Cache::Stub::OpenModel, request, &reply);
    const bool expected = status.ok() || status.error_code() == grpc::StatusCode::INVALID_ARGUMENT ||
                          status.error_code() == grpc::StatusCode::UNIMPLEMENTED ||
                          status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
    EXPECT_TRUE(expected) << status.error_message();
  }
}

TEST_F(HostileCalls, InconsistentPromptsAreRefused) {
  const auto refused = [&](const std::string& tokens, std::vector<uint64_t> lengths, const std::string& field) {
    v1::MatchRequest request;
    request.set_session(secret_);
    request.set_model(model_);
    v1::Prompt* prompt = request.add_prompts();
    prompt->set_tokens(tokens);
    prompt->mutable_segment_lengths()->Add(lengths.begin(), lengths.end());
    ExpectRefused<v1::MatchReply>(&v1::Cache::Stub::Match, request, field);
  };
  refused("odd", {}, "tokens");
  refused(PackTokens(MakeRun(1, 10)), {11}, "segment_lengths");
  refused(PackTokens(MakeRun(1, 10)), {5, 0}, "segment_lengths");
  refused(PackTokens(MakeRun(1, 10)), {UINT64_MAX, 11}, "segment_lengths");
  refused(PackTokens(Tokens(limits::kMaxPromptTokens + 1)), {}, "tokens");
}

TEST_F(HostileCalls, CallsOnForeignLeasesAndReservationsChangeNothing) {
  const Match match = engine_.Lookup(prompt_);
  ASSERT_TRUE(match.segments()[1].hit());
  const Tokens run = MakeRun(99, 40);
  const Reservation reservation = engine_.Reserve(ObjectKind::kSegment, run);
  ASSERT_TRUE(reservation.granted());

  v1::ReleaseRequest release;
  release.set_session(secret_);
  release.add_leases(match.lease());  // the same tenant's, but this session does not hold it
  v1::ReleaseReply released;
  EXPECT_TRUE(Call(&v1::Cache::Stub::Release, release, &released).ok());
  v1::AbandonRequest abandon;
  abandon.set_session(secret_);
  abandon.add_reservations(reservation.id);
  v1::AbandonReply abandoned;
  EXPECT_TRUE(Call(&v1::Cache::Stub::Abandon, abandon, &abandoned).ok());
  v1::PublishRequest publish;
  publish.set_session(secret_);
  publish.add_objects()->set_reservation(reservation.id);
  publish.mutable_objects(0)->set_provenance(static_cast<uint32_t>(Provenance::kExact));
  v1::PublishReply published;
  ASSERT_TRUE(Call(&v1::Cache::Stub::Publish, publish, &published).ok());
  EXPECT_EQ(published.outcomes(0), static_cast<uint32_t>(PublishOutcome::kUnknownReservation));

  EXPECT_THAT(engine_.Land(match, prompt_).Wait(kPatience), testing::Each(MissReason::kNone));
  EXPECT_EQ(engine_.model().Publish(reservation, engine_.Compute(ObjectKind::kSegment, run)),
            PublishOutcome::kPublished);
}

TEST_F(HostileCalls, RandomBytesAreRefused) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int trial = 0; trial < 200; ++trial) {
    v1::LandRequest land;
    land.ParseFromString(RandomBytes(random, random() % 64));  // may produce any field
    land.set_session(secret_);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    auto stream = stub_->Land(&context, land);
    v1::LandEvent event;
    while (stream->Read(&event)) {
    }
    EXPECT_NE(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
    v1::ReserveRequest reserve;
    reserve.ParseFromString(RandomBytes(random, random() % 64));
    reserve.set_session(secret_);
    reserve.set_model(model_);
    v1::ReserveReply reserved;
    EXPECT_NE(Call(&v1::Cache::Stub::Reserve, reserve, &reserved).error_code(), grpc::StatusCode::UNAVAILABLE);
  }
}

}  // namespace
}  // namespace ashlar::integration
