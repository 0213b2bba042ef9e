// SPDX-License-Identifier: Apache-2.0
#include "daemon/testing/test_engine.h"

#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <numeric>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.grpc.pb.h"
#include "proto/limits.h"
#include "proto/tokens.h"

namespace ashlar::daemon {
namespace {

// Connects on the calling thread, so that the daemon sees that thread's user (AsUser).
std::unique_ptr<v1::Cache::Stub> MakeStub(const TestNode& node) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(limits::kMaxReplyBytes));
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address = {.sun_family = AF_UNIX};
  node.rpc_socket().copy(address.sun_path, sizeof address.sun_path - 1);
  Require(connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0, "connect");
  return v1::Cache::NewStub(grpc::CreateCustomInsecureChannelFromFd("localhost", fd.Release(), arguments));
}

absl::Status ToAbsl(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

const AttentionLayer& AttentionOf(const Layout& layout) {
  return std::get<AttentionLayer>(layout.layers[1]);
}

}  // namespace

Layout SmallLayout() {
  LinearLayer linear;
  linear.key_heads = 1;
  linear.value_heads = 2;
  linear.d_k = 8;
  linear.d_v = 6;
  linear.conv_channels = 20;
  linear.conv_kernel = 4;
  AttentionLayer attention;
  attention.kv_heads = 2;
  attention.key_dim = 8;
  attention.value_dim = 6;
  attention.rope.kind = RopeStyle::kHalfSplit;
  attention.rope.rotary_dim = 4;
  attention.rope.frequencies = {1.0, 0.1};
  Layout layout;
  layout.page_tokens = 4;
  layout.head = 4;
  layout.tail = 2;
  layout.layers = {linear, attention};
  return layout;
}

Identity SmallIdentity() {
  Identity identity;
  identity.model_id = "test";
  identity.weights_digest = "sha256:0";
  return identity;
}

std::vector<int32_t> Ascending(int count, int first) {
  std::vector<int32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

v1::LandSegment At(uint32_t segment, uint64_t first_position) {
  v1::LandSegment out;
  out.set_segment(segment);
  out.set_first_position(first_position);
  return out;
}

struct TestEngine::Rpc {
  std::unique_ptr<v1::Cache::Stub> stub;
};

absl::Status TestEngine::Call(const v1::OpenModelRequest& request, v1::OpenModelReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->OpenModel(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::CloseModelRequest& request, v1::CloseModelReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->CloseModel(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::DeclarePagesRequest& request, v1::DeclarePagesReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->DeclarePages(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::MatchRequest& request, v1::MatchReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->Match(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::ReserveRequest& request, v1::ReserveReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->Reserve(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::PublishRequest& request, v1::PublishReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->Publish(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::CommitRequest& request, v1::CommitReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->Commit(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::AbandonRequest& request, v1::AbandonReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->Abandon(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::QuiesceRequest& request, v1::QuiesceReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->Quiesce(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::ReleaseRequest& request, v1::ReleaseReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->Release(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::AttachLeaseRequest& request, v1::AttachLeaseReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->AttachLease(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::AdmitRequest& request, v1::AdmitReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->Admit(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::ExtendAdmissionRequest& request, v1::AdmitReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->ExtendAdmission(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::MarkFilledRequest& request, v1::MarkFilledReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->MarkFilled(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::AttachAdmissionRequest& request, v1::AdmitReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->AttachAdmission(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::PlanPrefillRequest& request, v1::PlanPrefillReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->PlanPrefill(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::AwaitPrefillRequest& request, v1::AwaitPrefillReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->AwaitPrefill(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::EndPrefillRequest& request, v1::EndPrefillReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->EndPrefill(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::ServePrefillRequest& request, v1::ServePrefillReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->ServePrefill(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::HandOffRequest& request, v1::HandOffReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->HandOff(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::ProbeRequest& request, v1::ProbeReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->Probe(&context, request, reply));
}
absl::Status TestEngine::Call(const v1::AdvanceRequest& request, v1::CompositionReply* reply) {
  grpc::ClientContext context;
  return ToAbsl(rpc_->stub->Advance(&context, request, reply));
}

TestEngine::TestEngine(const TestNode& node, const Layout& layout, std::unique_ptr<RawSession> socket)
    : layout_(layout),
      socket_(socket != nullptr ? std::move(socket) : std::make_unique<RawSession>(node)),
      rpc_(std::make_unique<Rpc>(Rpc{MakeStub(node)})) {
  const auto welcome = socket_->Hello();
  Require(StatusOf(welcome).ok(), StatusOf(welcome).ToString());
  secret_ = welcome->welcome().session();
  daemon_epoch_ = welcome->welcome().daemon_epoch();
  tenant_ = welcome->welcome().tenant();

  const UniqueFd memfd = MakeMemfd(kRegionBytes, F_SEAL_SHRINK);
  void* mapped = mmap(nullptr, kRegionBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.get(), 0);
  Require(mapped != MAP_FAILED, "mmap");
  memory_ = static_cast<std::byte*>(mapped);
  v1::SessionRequest registering;
  registering.mutable_register_region()->set_bytes(kRegionBytes);
  const int descriptors[] = {memfd.get()};
  const auto region = socket_->Ask(registering, descriptors);
  Require(StatusOf(region).ok(), StatusOf(region).ToString());
  region_ = region->region().region();

  auto opening = Make<v1::OpenModelRequest>();
  opening.set_identity(EncodeIdentity(SmallIdentity()));
  opening.set_layout(EncodeLayout(layout_));
  v1::OpenModelReply opened;
  const absl::Status open = Call(opening, &opened);
  Require(open.ok(), open.ToString());
  model_ = opened.model();

  v1::DeclarePagesReply declared;
  const absl::Status declare = Call(PagesRequest(), &declared);
  Require(declare.ok(), declare.ToString());
  pages_ = declared.pages_id();
}

TestEngine::~TestEngine() {
  munmap(memory_, kRegionBytes);
}

void TestEngine::FillMemory() {
  auto* floats = reinterpret_cast<float*>(memory_);
  for (size_t i = 0; i < kRegionBytes / sizeof(float); ++i) floats[i] = static_cast<float>(i % 9973) - 5000;
}

v1::DeclarePagesRequest TestEngine::PagesRequest() const {
  const AttentionLayer& attention = AttentionOf(layout_);
  const uint64_t key_row = attention.key_dim * sizeof(float), value_row = attention.value_dim * sizeof(float);
  auto request = Make<v1::DeclarePagesRequest>();
  request.set_model(model_);
  request.set_region(region_);
  request.set_page_tokens(layout_.page_tokens);
  request.set_pages(kPages);
  v1::PagedLayer* layer = request.add_layers();
  layer->set_layer(1);
  layer->set_key_offset(0);
  layer->set_value_offset(attention.kv_heads * key_row);
  layer->set_token_stride(attention.kv_heads * (key_row + value_row));
  layer->set_page_stride(layer->token_stride() * layout_.page_tokens);
  layer->set_key_head_stride(key_row);
  layer->set_value_head_stride(value_row);
  return request;
}

float* TestEngine::Key(int32_t page, uint32_t slot, uint32_t head) {
  const v1::DeclarePagesRequest request = PagesRequest();
  const v1::PagedLayer& layer = request.layers(0);
  return reinterpret_cast<float*>(memory_ + layer.key_offset() + page * layer.page_stride() +
                                  slot * layer.token_stride() + head * layer.key_head_stride());
}

float* TestEngine::Value(int32_t page, uint32_t slot, uint32_t head) {
  const v1::DeclarePagesRequest request = PagesRequest();
  const v1::PagedLayer& layer = request.layers(0);
  return reinterpret_cast<float*>(memory_ + layer.value_offset() + page * layer.page_stride() +
                                  slot * layer.token_stride() + head * layer.value_head_stride());
}

absl::StatusOr<v1::PromptMatch> TestEngine::Match(std::span<const int32_t> tokens, std::vector<uint64_t> lengths) {
  auto request = Make<v1::MatchRequest>();
  request.set_model(model_);
  v1::Prompt* prompt = request.add_prompts();
  prompt->set_tokens(PackTokens(tokens));
  prompt->mutable_segment_lengths()->Assign(lengths.begin(), lengths.end());
  v1::MatchReply reply;
  if (absl::Status status = Call(request, &reply); !status.ok()) return status;
  return reply.prompts(0);
}

v1::ReserveResult TestEngine::Reserve(ObjectKind kind, std::span<const int32_t> tokens) {
  auto request = Make<v1::ReserveRequest>();
  request.set_model(model_);
  request.add_objects()->set_kind(static_cast<uint32_t>(kind));
  request.mutable_objects(0)->set_tokens(PackTokens(tokens));
  v1::ReserveReply reply;
  const absl::Status status = Call(request, &reply);
  Require(status.ok() && reply.results_size() == 1, status.ToString());
  return reply.results(0);
}

v1::PublishObject TestEngine::Sources(ObjectKind kind, uint64_t reservation, uint64_t tokens) const {
  v1::PublishObject object;
  object.set_reservation(reservation);
  object.set_provenance(static_cast<uint32_t>(Provenance::kExact));
  const auto plan = PlanObject(layout_, {}, {}, kind, tokens);
  Require(plan.ok(), std::string(plan.status().message()));
  uint64_t offset = kTensors;
  for (const Part& part : plan->parts) {
    if (part.form == PartForm::kKeys || part.form == PartForm::kValues) continue;
    v1::PartSource* source = object.add_parts();
    source->set_layer(part.layer);
    source->set_form(static_cast<uint32_t>(part.form));
    source->set_region(region_);
    source->set_offset(offset);
    offset += part.Bytes();
  }
  object.set_pages_id(pages_);
  for (uint64_t page = 0; page * layout_.page_tokens < tokens; ++page) {
    object.add_page_table(static_cast<int32_t>(page));
  }
  return object;
}

TestEngine::Opened TestEngine::OpenWithPrefixes(uint32_t capture_tokens, uint32_t span_tokens) {
  auto opening = Make<v1::OpenModelRequest>();
  opening.set_identity(EncodeIdentity(SmallIdentity()));
  opening.set_layout(EncodeLayout(layout_));
  opening.mutable_prefixes()->set_capture_tokens(capture_tokens);
  opening.mutable_prefixes()->set_span_tokens(span_tokens);
  v1::OpenModelReply opened;
  const absl::Status open = Call(opening, &opened);
  Require(open.ok(), open.ToString());
  v1::DeclarePagesRequest declaring = PagesRequest();
  declaring.set_model(opened.model());
  v1::DeclarePagesReply declared;
  const absl::Status declare = Call(declaring, &declared);
  Require(declare.ok(), declare.ToString());
  return {opened.model(), declared.pages_id()};
}

v1::CommitRequest TestEngine::CommitRequest(const Opened& opened, std::span<const int32_t> tokens) const {
  const v1::PublishObject sources = Sources(ObjectKind::kCheckpoint, 0, tokens.size());
  auto request = Make<v1::CommitRequest>();
  request.set_model(opened.model);
  request.set_tokens(PackTokens(tokens));
  request.set_prompt_tokens(tokens.size());
  request.set_provenance(static_cast<uint32_t>(Provenance::kExact));
  v1::CapturedState* end = request.add_checkpoints();
  end->set_depth(tokens.size());
  *end->mutable_parts() = sources.parts();
  request.set_pages_id(opened.pages);
  *request.mutable_page_table() = sources.page_table();
  return request;
}

PublishOutcome TestEngine::Publish(const v1::PublishObject& object) {
  auto request = Make<v1::PublishRequest>();
  *request.add_objects() = object;
  v1::PublishReply reply;
  const absl::Status status = Call(request, &reply);
  Require(status.ok() && reply.outcomes_size() == 1, status.ToString());
  return static_cast<PublishOutcome>(reply.outcomes(0));
}

PublishOutcome TestEngine::PublishRun(ObjectKind kind, std::span<const int32_t> tokens) {
  const v1::ReserveResult reserved = Reserve(kind, tokens);
  Require(reserved.outcome() == static_cast<uint32_t>(ReserveOutcome::kGranted), "not granted");
  return Publish(Sources(kind, reserved.reservation(), tokens.size()));
}

v1::LandRequest TestEngine::LandRequest(const std::string& lease, std::vector<v1::LandSegment> segments) const {
  static std::atomic<uint64_t> next{1};
  auto request = Make<v1::LandRequest>();
  request.set_landing(next++);
  request.set_lease(lease);
  request.set_pages_id(pages_);
  for (uint32_t page = 0; page < kPages; ++page) request.add_page_table(static_cast<int32_t>(page));
  for (v1::LandSegment& segment : segments) *request.add_segments() = std::move(segment);
  return request;
}

v1::QuiesceRequest TestEngine::QuiesceRequest(uint64_t landing) const {
  auto request = Make<v1::QuiesceRequest>();
  request.set_landing(landing);
  request.set_daemon_epoch(daemon_epoch_);
  return request;
}

namespace {

// Reads the stream to its end.
template <typename Stream>
absl::StatusOr<TestEngine::Landed> ReadAll(Stream& stream, bool has_match) {
  TestEngine::Landed landed;
  v1::LandEvent event;
  int events = 0, verdicts = 0;
  uint32_t layers = 0;
  while (stream.Read(&event)) {
    Require(event.has_match() == (has_match && events++ == 0), "the match is in the first event, and there alone");
    if (event.has_match()) landed.match = event.match();
    Require(verdicts == 0, "an event behind the verdict");
    Require(event.layers_done() >= layers, "layers went backwards");
    layers = event.layers_done();
    if (!event.has_verdict()) continue;
    ++verdicts;
    for (uint32_t reason : event.verdict().miss_reasons()) landed.verdict.push_back(static_cast<MissReason>(reason));
  }
  if (absl::Status status = ToAbsl(stream.Finish()); !status.ok()) return status;
  Require(verdicts == 1, "no verdict");
  return landed;
}

}  // namespace

absl::StatusOr<std::vector<MissReason>> TestEngine::Land(const v1::LandRequest& request) {
  grpc::ClientContext context;
  auto landed = ReadAll(*rpc_->stub->Land(&context, request), /*has_match=*/false);
  if (!landed.ok()) return landed.status();
  return std::move(landed->verdict);
}

v1::LookupAndLandRequest TestEngine::LookupAndLandRequest(std::span<const int32_t> tokens,
                                                          std::vector<uint64_t> lengths,
                                                          const std::string& lease) const {
  const v1::LandRequest landing = LandRequest(lease, {});
  auto request = Make<v1::LookupAndLandRequest>();
  request.set_landing(landing.landing());
  request.set_lease(lease);
  request.set_pages_id(pages_);
  *request.mutable_page_table() = landing.page_table();
  request.set_model(model_);
  request.mutable_prompt()->set_tokens(PackTokens(tokens));
  request.mutable_prompt()->mutable_segment_lengths()->Add(lengths.begin(), lengths.end());
  return request;
}

absl::StatusOr<TestEngine::Landed> TestEngine::LookupAndLand(const v1::LookupAndLandRequest& request) {
  grpc::ClientContext context;
  return ReadAll(*rpc_->stub->LookupAndLand(&context, request), /*has_match=*/true);
}

void TestEngine::LandAndCancel(const v1::LandRequest& request) {
  grpc::ClientContext context;
  const auto stream = rpc_->stub->Land(&context, request);
  context.TryCancel();
  v1::LandEvent event;
  while (stream->Read(&event)) {
  }
  stream->Finish();
}

}  // namespace ashlar::daemon
