// SPDX-License-Identifier: Apache-2.0
// Floods of requests that are small to send and expensive to serve.
#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "ashlar/v1/cache.grpc.pb.h"
#include "ashlar/v1/session.pb.h"
#include "proto/limits.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/raw_session.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using testing::Each;

constexpr size_t kMiB = 1 << 20;
// The most memory that a flood may add to a daemon's. A sanitizer keeps freed memory and shadow memory.
#if defined(__SANITIZE_THREAD__)
constexpr bool kShadowed = true;
#else
constexpr bool kShadowed = false;
#endif
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kMost = 1024 * kMiB;
#else
constexpr size_t kMost = (kShadowed ? 1024 : 160) * kMiB;
#endif

class Flood : public testing::Test {
 protected:
  void TearDown() override {
    EXPECT_THAT(engine_.Land(match_, prompt_).Wait(kPatience), Each(MissReason::kNone)) << "the lease is still there";
  }

  Match PublishAndMatch() {
    engine_.PublishPrompt(prompt_);
    return engine_.Lookup(prompt_);
  }

  // A call in progress. It ends on the thread that waits for it, because in gRPC 1.51 the last holder of a channel must
  // not be one of gRPC's own threads.
  struct Call {
    explicit Call(const std::shared_ptr<grpc::Channel>& channel) : stub(channel) {}
    grpc::GenericStub stub;
    grpc::ClientContext context;
    grpc::ByteBuffer reply;
  };
  class Answer {
   public:
    Answer(std::unique_ptr<Call> call, std::future<grpc::StatusCode> code)
        : call_(std::move(call)), code_(std::move(code)) {}
    Answer(Answer&&) = default;
    ~Answer() {
      if (code_.valid()) code_.wait();
    }
    grpc::StatusCode get() { return code_.get(); }
    bool there() const { return code_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }

   private:
    std::unique_ptr<Call> call_;
    std::future<grpc::StatusCode> code_;
  };
  // Sends bytes as the request of a call.
  static Answer Send(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                     const grpc::ByteBuffer& request, bool compressed = false) {
    auto call = std::make_unique<Call>(channel);
    if (compressed) call->context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
    const auto code = std::make_shared<std::promise<grpc::StatusCode>>();
    call->stub.UnaryCall(&call->context, "/ashlar.v1.Cache/" + method, grpc::StubOptions(), &request, &call->reply,
                         [code](const grpc::Status& status) { code->set_value(status.error_code()); });
    return Answer(std::move(call), code->get_future());
  }
  static grpc::ByteBuffer Bytes(const std::string& bytes) {
    const grpc::Slice slice(bytes);
    return grpc::ByteBuffer(&slice, 1);
  }
  static void AsUser(uid_t user, const std::function<void()>& work) {
    std::thread([&] {  // the system call itself changes only this thread
      ASSERT_EQ(::syscall(SYS_setresuid, -1, user, -1), 0);
      work();
    })
        .join();
  }
  // A channel of the thread's user.
  std::shared_ptr<grpc::Channel> ConnectHere() const {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    struct sockaddr_un address {};
    address.sun_family = AF_UNIX;
    const std::string path = daemon_.client_options().rpc_socket;
    std::memcpy(address.sun_path, path.data(), path.size());
    EXPECT_EQ(::connect(fd, reinterpret_cast<struct sockaddr*>(&address), sizeof address), 0);
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);  // it reads ahead only as much as it announces at first
    return grpc::CreateCustomInsecureChannelFromFd("localhost", fd, arguments);
  }
  std::shared_ptr<grpc::Channel> MakeChannel() const {
    return grpc::CreateChannel("unix:" + daemon_.client_options().rpc_socket, grpc::InsecureChannelCredentials());
  }

  static constexpr uid_t kOtherTenant = 65531;

  DaemonProcess daemon_{DaemonOptions{.tenants = "tenants:\n  - {name: alpha, uids: [" + std::to_string(::getuid()) +
                                                 "], dram_bytes: 32MiB}\n  - {name: beta, uids: [" +
                                                 std::to_string(kOtherTenant) + "], dram_bytes: 16MiB}\n"}};
  TestEngine engine_{daemon_.client_options()};
  const std::vector<Tokens> prompt_ = MakePrompt(8, 2, 40);
  const Match match_ = PublishAndMatch();
};

// Two bytes of an empty segment would become sixty bytes of heap: it is counted, or refused, before it is parsed.
TEST_F(Flood, ALargeRequestTakesNoMoreThanItsBytes) {
  std::string segments(20 * kMiB, '\0');
  for (size_t i = 0; i < segments.size(); i += 2) segments[i] = '\x32';  // LandRequest.segments
  RawSession session(daemon_.client_options());
  v1::LandRequest known;
  known.set_session(session.Greet());
  const size_t before = daemon_.peak_bytes();
  EXPECT_EQ(Send(MakeChannel(), "Land", Bytes(segments)).get(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(Send(MakeChannel(), "Land", Bytes(known.SerializeAsString() + segments)).get(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_LT(daemon_.peak_bytes(), before + kMost);
}

TEST_F(Flood, ACompressedRequestIsNotExpanded) {
  const size_t before = daemon_.peak_bytes();
  EXPECT_NE(Send(MakeChannel(), "Land", Bytes(std::string(512 * kMiB, '\0')), /*compressed=*/true).get(),
            grpc::StatusCode::OK);
  EXPECT_LT(daemon_.peak_bytes(), before + kMost);
}

// Unknown users' messages take no memory that an engine's calls need, and so never cost its connection.
TEST_F(Flood, UnknownUsersDoNotAffectEngines) {
  if (::getuid() != 0) GTEST_SKIP() << "only root can be several users";
  constexpr uid_t kStranger = 65533;
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  AsUser(kStranger, [&] {
    for (int i = 0; i < 8; ++i) channels.push_back(ConnectHere());
  });
  const size_t before = daemon_.peak_bytes();
  const grpc::ByteBuffer request = Bytes(std::string(8 * kMiB, '\0'));
  std::vector<Answer> answers;
  for (int round = 0; round < 22; ++round) {
    for (const auto& channel : channels) answers.push_back(Send(channel, "Land", request));
  }
  for (Answer& answer : answers) {
    EXPECT_NE(answer.get(), grpc::StatusCode::OK);
    ASSERT_TRUE(engine_.client().connected());
  }
  EXPECT_LT(daemon_.peak_bytes(), before + kMost);
}

// Requests that take long to read, and fail: no other tenant's call waits for their turn.
TEST_F(Flood, LongRequestsOfATenantDelayNoOtherTenant) {
  if (::getuid() != 0) GTEST_SKIP() << "only root can be several users";
  std::unique_ptr<RawSession> session;
  std::shared_ptr<grpc::Channel> channel;
  v1::MatchRequest request;
  AsUser(kOtherTenant, [&] {
    session = std::make_unique<RawSession>(daemon_.client_options());
    channel = ConnectHere();
  });
  v1::OpenModelRequest open;
  open.set_session(session->Greet());
  open.set_identity(EncodeIdentity(TestEngine::identity()));
  open.set_layout(EncodeLayout(engine_.model().layout()));
  v1::OpenModelReply opened;
  grpc::ClientContext context;
  ASSERT_TRUE(v1::Cache::NewStub(channel)->OpenModel(&context, open, &opened).ok());
  request.set_session(open.session());
  request.set_model(opened.model());
  for (uint64_t lookups = 0; lookups < limits::kMaxLookupsPerMatch; lookups += limits::kMaxSegments) {
    v1::Prompt& prompt = *request.add_prompts();
    prompt.set_tokens(std::string(limits::kMaxSegments * sizeof(int32_t), 'x'));
    for (uint64_t i = 0; i < limits::kMaxSegments; ++i) prompt.add_segment_lengths(1);
  }
  request.mutable_prompts()->rbegin()->mutable_tokens()->pop_back();  // seen when all others have been hashed
  constexpr size_t kRequests = 128;
  const grpc::ByteBuffer bytes = Bytes(request.SerializeAsString());
  std::vector<Answer> answers;
  for (size_t i = 0; i < kRequests; ++i) answers.push_back(Send(channel, "Match", bytes));
  ASSERT_TRUE(Eventually([&] { return std::ranges::any_of(answers, &Answer::there); }));
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(engine_.Lookup(prompt_).segments()[1].hit());
  EXPECT_GT(std::ranges::count_if(answers, [](const Answer& answer) { return !answer.there(); }), kRequests / 2);
  for (Answer& answer : answers) EXPECT_EQ(answer.get(), grpc::StatusCode::INVALID_ARGUMENT);
}

// The other tenant's engine, with a model that has no attention: its pages need no bytes of the region.
class PageFlood : public Flood {
 protected:
  void SetUp() override {
    if (::getuid() != 0) GTEST_SKIP() << "only root can be several users";
    AsUser(kOtherTenant, [&] {
      session_ = std::make_unique<RawSession>(daemon_.client_options());
      stub_ = v1::Cache::NewStub(ConnectHere());
    });
    secret_ = session_->Greet();
    v1::SessionRequest host;
    host.mutable_host_region()->set_bytes(4096);
    const v1::SessionReply hosted = session_->Ask(host);
    ASSERT_TRUE(hosted.has_region()) << hosted.message();
    region_ = hosted.region().region();
  }
  void TearDown() override {
    if (session_ != nullptr) Flood::TearDown();
  }
  template <typename Reply, typename Request>
  grpc::Status Call(grpc::Status (v1::Cache::Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                    const Request& request, Reply* reply) {
    grpc::ClientContext context;
    return ((*stub_).*method)(&context, request, reply);
  }
  uint64_t OpenModel() {
    Layout layout = engine_.model().layout();
    std::erase_if(layout.layers, [](const Layer& layer) { return !std::holds_alternative<LinearLayer>(layer); });
    v1::OpenModelRequest open;
    open.set_session(secret_);
    open.set_identity(EncodeIdentity(TestEngine::identity()));
    open.set_layout(EncodeLayout(layout));
    v1::OpenModelReply opened;
    EXPECT_TRUE(Call(&v1::Cache::Stub::OpenModel, open, &opened).ok());
    return opened.model();
  }
  grpc::Status Declare(uint64_t model, uint64_t* pages_id) {
    v1::DeclarePagesRequest declare;
    declare.set_session(secret_);
    declare.set_model(model);
    declare.set_region(region_);
    declare.set_page_tokens(1);
    declare.set_pages(limits::kMaxAllocatedPages);
    declare.set_allocate(true);
    v1::DeclarePagesReply declared;
    const grpc::Status status = Call(&v1::Cache::Stub::DeclarePages, declare, &declared);
    *pages_id = declared.pages_id();
    return status;
  }

  // A request that is answered with a million pages: 3 MiB.
  v1::AttachAdmissionRequest AdmitMany() {
    v1::AdmitRequest admit;
    admit.set_session(secret_);
    uint64_t pages_id = 0;
    EXPECT_TRUE(Declare(OpenModel(), &pages_id).ok());
    admit.set_pages_id(pages_id);
    admit.set_lease(std::string(16, 'a'));
    admit.mutable_prompt()->set_tokens(std::string(sizeof(int32_t), 1));
    admit.set_own_pages(limits::kMaxAllocatedPages);
    v1::AdmitReply admitted;
    const grpc::Status status = Call(&v1::Cache::Stub::Admit, admit, &admitted);
    EXPECT_EQ(admitted.admission().own_pages_size(), limits::kMaxAllocatedPages) << status.error_message();
    answer_bytes_ = admitted.ByteSizeLong();
    v1::AttachAdmissionRequest attach;
    attach.set_session(secret_);
    attach.set_lease(admit.lease());
    return attach;
  }
  grpc::Status Attach(const v1::AttachAdmissionRequest& attach) {
    v1::AdmitReply reply;
    return Call(&v1::Cache::Stub::AttachAdmission, attach, &reply);
  }
  struct Unread {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientAsyncResponseReader<v1::AdmitReply>> reader;
    v1::AdmitReply reply;
    grpc::Status status;
  };
  // Calls without requesting a message.
  std::vector<std::unique_ptr<Unread>> LeaveUnread(const v1::AttachAdmissionRequest& attach, size_t calls) {
    std::vector<std::unique_ptr<Unread>> unread;
    for (size_t i = 0; i < calls; ++i) {
      Unread& call = *unread.emplace_back(std::make_unique<Unread>());
      call.reader = stub_->PrepareAsyncAttachAdmission(&call.context, attach, &queue_);
      call.reader->StartCall();
      call.reader->ReadInitialMetadata(nullptr);  // sends the request
    }
    return unread;
  }
  void Abandon(const std::vector<std::unique_ptr<Unread>>& unread) {
    for (const auto& each : unread) {
      each->context.TryCancel();
      each->reader->Finish(&each->reply, &each->status, each.get());
    }
    void* tag = nullptr;
    bool ok = false;
    for (size_t i = 0; i < unread.size();) {
      ASSERT_TRUE(queue_.Next(&tag, &ok));
      i += tag != nullptr;
    }
  }

  std::unique_ptr<RawSession> session_;
  std::unique_ptr<v1::Cache::Stub> stub_;
  std::string secret_;
  uint64_t region_ = 0;
  size_t answer_bytes_ = 0;
  grpc::CompletionQueue queue_;
};

TEST_F(PageFlood, TablesOfPagesAreChargedToTheirTenant) {
  const size_t before = daemon_.peak_bytes();
  grpc::Status status;
  uint64_t pages_id = 0;
  int declared = 0;
  while ((status = Declare(OpenModel(), &pages_id)).ok() && declared < 64) ++declared;
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), testing::StartsWith("pages: "));
  EXPECT_GE(declared, 4);
  // 256 MiB of models are the tenant's by default.
  EXPECT_LT(daemon_.peak_bytes(), before + 256 * kMiB + kMost);
}

TEST_F(PageFlood, UnreadAnswersAreBounded) {
  if (kShadowed) GTEST_SKIP() << "the sanitizer's shadows are larger than what is bounded";
  constexpr size_t kCalls = 400;
  const v1::AttachAdmissionRequest attach = AdmitMany();
  const size_t before = daemon_.peak_bytes();
  const auto unread = LeaveUnread(attach, kCalls);
  grpc::Status refused;
  EXPECT_TRUE(Eventually([&] { return !(refused = Attach(attach)).ok(); }));
  EXPECT_THAT(refused.error_message(), testing::StartsWith("replies: "));
  v1::ReleaseRequest release;
  release.set_session(secret_);
  v1::ReleaseReply released;
  EXPECT_TRUE(Call(&v1::Cache::Stub::Release, release, &released).ok()) << "what gives back is served";
  ASSERT_TRUE(engine_.Lookup(prompt_).segments()[1].hit()) << "and so are others";
  EXPECT_LT(daemon_.peak_bytes(), before + 512 * kMiB + kMost);
  Abandon(unread);
  EXPECT_TRUE(Eventually([&] { return Attach(attach).ok(); })) << "the client has abandoned the unread calls";
}

// Landings of a longest prompt that has never been seen.
class LandingFlood : public PageFlood {
 protected:
  struct Landing {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientAsyncReader<v1::LandEvent>> reader;
    v1::LandEvent event;
    grpc::Status status;
    int matches = 0;
    bool ended = false, over = false;
  };

  void SetUp() override {
    PageFlood::SetUp();
    if (session_ == nullptr) return;
    const uint64_t model = OpenModel();
    uint64_t pages_id = 0;
    ASSERT_TRUE(Declare(model, &pages_id).ok());
    land_.set_session(secret_);
    land_.set_model(model);
    land_.set_pages_id(pages_id);
    land_.set_lease(std::string(16, 'l'));
    for (uint64_t i = 0; i < limits::kMaxSegments; ++i) {
      land_.add_page_table(static_cast<int32_t>(i));
      land_.mutable_prompt()->add_segment_lengths(1);
    }
    land_.mutable_prompt()->set_tokens(std::string(limits::kMaxSegments * sizeof(int32_t), 1));
  }
  std::unique_ptr<Landing> Start() {
    land_.set_landing(++landings_);
    auto landing = std::make_unique<Landing>();
    landing->reader = stub_->PrepareAsyncLookupAndLand(&landing->context, land_, &queue_);
    landing->reader->StartCall(landing.get());
    return landing;
  }
  // Runs until these are over.
  void ReadAll(const std::vector<std::unique_ptr<Landing>>& landings) {
    void* tag = nullptr;
    bool ok = false;
    while (!std::ranges::all_of(landings, [](const auto& landing) { return landing->over; })) {
      ASSERT_TRUE(queue_.Next(&tag, &ok));
      if (tag == nullptr) continue;  // of another call
      auto* const landing = static_cast<Landing*>(tag);
      landing->matches += ok && !landing->ended && landing->event.has_match();
      if (landing->ended) {
        landing->over = true;
      } else if (ok) {
        landing->event.Clear();
        landing->reader->Read(&landing->event, tag);
      } else {
        landing->ended = true;
        landing->reader->Finish(&landing->status, tag);
      }
    }
  }
  grpc::Status ReadOne() {
    land_.set_landing(++landings_);
    grpc::ClientContext context;
    const auto reader = stub_->LookupAndLand(&context, land_);
    v1::LandEvent event;
    while (reader->Read(&event)) event.Clear();
    return reader->Finish();
  }

  v1::LookupAndLandRequest land_;
  uint64_t landings_ = 0;
};

TEST_F(LandingFlood, UnreadRepliesAreBounded) {
  constexpr size_t kMostUnread = 128 * kMiB, kLeastAnswer = limits::kMaxSegments * 6;
  const v1::AttachAdmissionRequest attach = AdmitMany();
  const auto answers = LeaveUnread(attach, kMostUnread / answer_bytes_);  // less space is left than one more takes
  EXPECT_TRUE(ReadOne().ok());
  std::vector<std::unique_ptr<Landing>> landings;
  for (size_t i = 0; i < answer_bytes_ / kLeastAnswer + 1; ++i) landings.push_back(Start());
  grpc::Status refused;
  EXPECT_TRUE(Eventually([&] { return !(refused = Attach(attach)).ok(); }));
  // An answer that has just been read is still counted for a moment.
  EXPECT_TRUE(Eventually([&] { return !(refused = ReadOne()).ok(); }));
  EXPECT_THAT(refused.error_message(), testing::StartsWith("replies: "));
  ASSERT_TRUE(engine_.Lookup(prompt_).segments()[1].hit()) << "others are served";
  ReadAll(landings);
  Abandon(answers);
}

// As many at once as a client starts.
TEST_F(LandingFlood, ReadRepliesAreServedWithinMemory) {
  if (kShadowed) GTEST_SKIP() << "the sanitizer's shadows are larger than what is bounded";
  const size_t before = daemon_.peak_bytes();
  std::vector<std::unique_ptr<Landing>> landings;
  for (int i = 0; i < 1000; ++i) landings.push_back(Start());
  ReadAll(landings);
  const auto served = [](const auto& each) { return each->status.ok() && each->matches == 1; };
  EXPECT_GE(std::ranges::count_if(landings, served), 60);
  EXPECT_LT(daemon_.peak_bytes() - before, kMost + 512 * kMiB);
}

}  // namespace
}  // namespace ashlar::integration
