#include "client/land_call.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/support/async_stream.h>
#include <grpcpp/support/async_unary_call.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>

#include "ashlar/v1/cache.grpc.pb.h"
#include "client/process_bound.h"

namespace ashlar::internal {
namespace {

// Between two questions whether the landing is quiet, when the daemon lives but did not answer the first.
constexpr std::chrono::milliseconds kAskAgain{20};

}  // namespace

struct LandCall::Impl {
  enum Tag : intptr_t { kStarted = 1, kRead, kFinished, kQuiesced };
  enum class Doubt { kNone, kAsking, kUnanswered };  // kNone also before there is any

  explicit Impl(std::shared_ptr<Connection> to)
      : connection(std::move(to)), stub(v1::Cache::NewStub(connection->rpc().channel())) {}
  ~Impl();

  void Start(v1::LandRequest& request);
  template <typename Done>
  bool WaitUntil(std::unique_lock<std::mutex>& lock, Deadline deadline, Done done);
  void Take(Tag tag, bool ok);
  void TakeEvent();
  void AskQuiet();

  const std::shared_ptr<Connection> connection;
  const uint64_t landing = connection->NextLanding();
  grpc::CompletionQueue queue;

  std::mutex mutex;  // guards all that follows
  std::condition_variable changed;
  std::unique_ptr<v1::Cache::Stub> stub;
  bool taking = false;  // a thread waits on the queue, the others for `changed`
  uint32_t layers_done = 0;
  std::optional<std::vector<uint32_t>> verdict;
  bool over = false;  // the stream has ended
  bool quiet = false;
  Doubt doubt = Doubt::kNone;

  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientAsyncReader<v1::LandEvent>> reader;
  v1::LandEvent event;
  grpc::Status status;

  std::unique_ptr<grpc::ClientContext> quiesce_context;
  std::unique_ptr<grpc::ClientAsyncResponseReader<v1::QuiesceReply>> quiesce;
  v1::QuiesceReply quiesce_reply;
  grpc::Status quiesce_status;
};

namespace {

void* AsTag(intptr_t tag) {
  return reinterpret_cast<void*>(tag);
}

}  // namespace

void LandCall::Impl::Start(v1::LandRequest& request) {
  request.set_session(connection->session());
  request.set_landing(landing);
  reader = stub->PrepareAsyncLand(&context, request, &queue);
  reader->StartCall(AsTag(kStarted));
}

// Takes events in until done() or the deadline. One thread at a time waits on the queue.
template <typename Done>
bool LandCall::Impl::WaitUntil(std::unique_lock<std::mutex>& lock, Deadline deadline, Done done) {
  while (!done()) {
    if (taking) {
      if (changed.wait_until(lock, deadline) == std::cv_status::timeout && !done()) return false;
      continue;
    }
    taking = true;
    lock.unlock();
    void* tag = nullptr;
    bool ok = false;
    const auto wall = deadline == Deadline::max()
                          ? std::chrono::system_clock::time_point::max()
                          : std::chrono::system_clock::now() + std::chrono::ceil<std::chrono::system_clock::duration>(
                                                                   deadline - std::chrono::steady_clock::now());
    const auto next = queue.AsyncNext(&tag, &ok, wall);
    lock.lock();
    taking = false;
    if (next == grpc::CompletionQueue::GOT_EVENT) Take(static_cast<Tag>(reinterpret_cast<intptr_t>(tag)), ok);
    changed.notify_all();
    if (next != grpc::CompletionQueue::GOT_EVENT && Passed(deadline)) return done();
  }
  return true;
}

void LandCall::Impl::Take(Tag tag, bool ok) {
  switch (tag) {
    case kStarted:
    case kRead:
      if (ok && tag == kRead) TakeEvent();
      if (ok) {
        reader->Read(&event, AsTag(kRead));
      } else {
        reader->Finish(&status, AsTag(kFinished));
      }
      return;
    case kFinished:
      over = true;
      if (!quiet && doubt == Doubt::kNone) AskQuiet();
      return;
    case kQuiesced:
      quiet = quiet || quiesce_status.ok();
      doubt = quiet ? Doubt::kNone : Doubt::kUnanswered;
      return;
  }
}

void LandCall::Impl::TakeEvent() {
  layers_done = std::max(layers_done, event.layers_done());
  if (!event.has_verdict()) return;
  verdict.emplace(event.verdict().miss_reasons().begin(), event.verdict().miss_reasons().end());
  quiet = true;
}

// Without a deadline: an answer that comes late is still the one that frees the slots.
void LandCall::Impl::AskQuiet() {
  doubt = Doubt::kAsking;
  v1::QuiesceRequest request;
  request.set_session(connection->session());
  request.set_landing(landing);
  request.set_run(connection->run());
  quiesce_context = std::make_unique<grpc::ClientContext>();
  quiesce = stub->PrepareAsyncQuiesce(quiesce_context.get(), request, &queue);
  quiesce->StartCall();
  quiesce->Finish(&quiesce_reply, &quiesce_status, AsTag(kQuiesced));
}

// Only when quiet: what is still under way then is cancelled, and comes back at once.
LandCall::Impl::~Impl() {
  std::unique_lock lock(mutex);
  context.TryCancel();
  if (doubt == Doubt::kAsking) quiesce_context->TryCancel();
  WaitUntil(lock, Deadline::max(), [this] { return over && doubt != Doubt::kAsking; });
  queue.Shutdown();
  void* tag;
  bool ok;
  while (queue.Next(&tag, &ok)) {
  }
}

LandCall::LandCall(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

std::shared_ptr<LandCall> LandCall::Start(std::shared_ptr<Connection> connection, v1::LandRequest& request) {
  if (!connection->EnterLanding()) return nullptr;
  auto impl = std::make_unique<Impl>(std::move(connection));
  impl->Start(request);
  return MakeProcessBound<LandCall>(std::move(impl));
}

LandCall::~LandCall() {
  {
    std::lock_guard lock(impl_->mutex);
    if (!impl_->quiet) impl_->context.TryCancel();
  }
  WaitQuiet(Deadline::max());
  impl_->connection->LeaveLanding();
}

bool LandCall::WaitLayers(uint32_t layers, Deadline deadline) {
  Impl& call = *impl_;
  std::unique_lock lock(call.mutex);
  const auto over = [&] { return call.verdict.has_value() || call.over; };
  call.WaitUntil(lock, deadline, [&] { return over() || call.layers_done >= layers; });
  if (call.verdict.has_value()) return std::ranges::all_of(*call.verdict, [](uint32_t reason) { return reason == 0; });
  return !call.over && call.layers_done >= layers;
}

absl::StatusOr<std::vector<uint32_t>> LandCall::WaitVerdict(Deadline deadline) {
  Impl& call = *impl_;
  std::unique_lock lock(call.mutex);
  if (!call.WaitUntil(lock, deadline, [&] { return call.verdict.has_value() || call.over; })) {
    call.context.TryCancel();
    if (call.doubt == Impl::Doubt::kNone) call.AskQuiet();
    return absl::DeadlineExceededError("no verdict in time");
  }
  if (call.verdict.has_value()) return *call.verdict;
  return absl::Status(static_cast<absl::StatusCode>(call.status.error_code()), call.status.error_message());
}

bool LandCall::WaitQuiet(Deadline deadline) {
  Impl& call = *impl_;
  std::unique_lock lock(call.mutex);
  for (;;) {
    call.WaitUntil(lock, deadline, [&] { return call.quiet || call.doubt == Impl::Doubt::kUnanswered; });
    if (!call.quiet && call.connection->daemon().Dead()) call.quiet = true;
    if (call.quiet || Passed(deadline)) return call.quiet;
    lock.unlock();
    call.connection->daemon().WaitDead(std::min(deadline, After(kAskAgain)));
    // It may be only the connection that is broken.
    const absl::StatusOr<std::unique_ptr<Rpc>> dialed =
        call.connection->DialAgain(std::min(deadline, After(kAskAgain)));
    lock.lock();
    if (call.doubt != Impl::Doubt::kUnanswered) continue;
    if (dialed.ok()) call.stub = v1::Cache::NewStub((*dialed)->channel());
    call.AskQuiet();
  }
}

}  // namespace ashlar::internal
