// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/session_protocol.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/session.pb.h"
#include "proto/limits.h"
#include "storage/memory/memory_reserve.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kMaxClientName = 256;
constexpr size_t kMaxRelease = 64;

v1::SessionReply ErrorReply(const absl::Status& status) {
  v1::SessionReply reply;
  reply.set_code(static_cast<uint32_t>(status.code()));
  reply.set_message(std::string(status.message()));
  return reply;
}

SessionProtocol::Reply Encode(v1::SessionReply message) {
  message.set_clock_ns(MonotonicClock().Now());
  return {message.SerializeAsString(), {}, false};
}
SessionProtocol::Reply Error(const absl::Status& status) {
  return Encode(ErrorReply(status));
}

// Adds a descriptor to a reply. If it cannot be sent now, the peer is told to retry.
SessionProtocol::Reply With(UniqueFd descriptor, SessionProtocol::Reply reply) {
  reply.descriptor = std::move(descriptor);
  reply.otherwise = Error;
  return reply;
}

SessionProtocol::Reply RegionReply(uint64_t handle) {
  v1::SessionReply message;
  message.mutable_region()->set_region(handle);
  return Encode(message);
}

template <typename T>
absl::StatusOr<T> InField(absl::string_view field, absl::StatusOr<T> result) {
  if (result.ok()) return result;
  return absl::Status(result.status().code(), absl::StrCat(field, ": ", result.status().message()));
}

// A region's references to other objects, released in this order.
struct Holding {
  std::unique_ptr<HostedMemory::Use> hosted;  // null: the engine's own memory with its own pages
  Budget::Charge number, bytes;
};

// Returns the region as a session keeps it.
std::shared_ptr<Region> Kept(std::shared_ptr<Region> region, Holding holding, const Session& session,
                             EventLoop& mappings) {
  if (holding.hosted != nullptr && !holding.hosted->adopted()) region->SetBlock(holding.hosted->block());
  region->Keep(std::make_shared<Holding>(std::move(holding)));
  return Region::UnmapOn(mappings, session.about().tenant, std::move(region));
}

absl::Status NotOneDescriptor(const std::vector<UniqueFd>& descriptors) {
  return absl::InvalidArgumentError(
      absl::StrCat("register_region.descriptor: ", descriptors.size(), " descriptors; expected exactly one"));
}

absl::Status TooManyWaitForPages() {
  return absl::ResourceExhaustedError("register_region: too many requests are waiting for pages; try again");
}

// Only whole objects are copied between host and GPU memory, between tiers.
absl::Status OnlyOnGpu(absl::string_view field) {
  return absl::FailedPreconditionError(
      absl::StrCat(field, ": a session with a region on a GPU must have all regions on that GPU"));
}

// From now on places the engine's objects in the GPU's tier; done before it learns of its region.
SessionProtocol::Respond Seated(SessionServices& services, const std::shared_ptr<Session>& session,
                                const SessionServices::Seat& seat, SessionProtocol::Respond respond) {
  return [&services, session, seat, respond = std::move(respond)](SessionProtocol::Reply reply) {
    session->SetGpu(seat.gpu, seat.level.has_value());
    if (!seat.level.has_value()) return respond(std::move(reply));
    const auto kept = std::make_shared<SessionProtocol::Reply>(std::move(reply));
    services.loop.PostCompletion(session->about().tenant, [&services, session, level = *seat.level, kept, respond] {
      services.table.SetLevel(*session, level);
      respond(std::move(*kept));
    });
  };
}

// Adds the engine's own memory to a session.
void AddRegion(Session& session, std::shared_ptr<Region> region, const SessionProtocol::Respond& respond) {
  const auto handle = session.AddRegion(std::move(region));
  respond(handle.ok() ? RegionReply(*handle) : Error(handle.status()));
}

// Adds a region to a session and returns it to the peer. If the reply is never sent, the session ends.
SessionProtocol::Reply GivenRegion(HostedMemory& hosted, std::shared_ptr<Session> session, uint64_t handle,
                                   UniqueFd descriptor) {
  SessionProtocol::Reply reply = With(std::move(descriptor), RegionReply(handle));
  reply.otherwise = [&hosted, session = std::move(session), handle](const absl::Status& why) {
    if (const std::shared_ptr<Region> region = session->RemoveRegion(handle); region != nullptr) {
      region->WhenGone([&hosted, block = region->block()] { hosted.Drop(block); });
    }
    return Error(why);
  };
  return reply;
}

storage::SessionId NextSessionId() {
  static std::atomic<storage::SessionId> next{1};
  return next.fetch_add(1);
}

}  // namespace

SessionProtocol::Reply SessionProtocol::Goodbye(const absl::Status& status) {
  Reply reply = Error(status);
  reply.close = true;
  return reply;
}

void SessionProtocol::Handle(absl::StatusOr<Datagram> datagram, Respond respond) {
  if (!datagram.ok()) return respond(Goodbye(datagram.status()));
  v1::SessionRequest request;
  if (!request.ParseFromString(datagram->bytes)) {
    return respond(Goodbye(absl::InvalidArgumentError("message: cannot be parsed as SessionRequest")));
  }
  using Kind = v1::SessionRequest::RequestCase;
  const Kind kind = request.request_case();
  if ((session_ == nullptr) != (kind == Kind::kHello)) {
    return respond(Goodbye(absl::InvalidArgumentError(session_ == nullptr ? "request: the first request must be hello"
                                                                          : "hello: already received")));
  }
  if (kind != Kind::kRegisterRegion && !datagram->descriptors.empty()) {
    return respond(Error(absl::InvalidArgumentError("message: this request takes no descriptor")));
  }
  switch (kind) {
    case Kind::kHello:
      return SayHello(request.hello(), std::move(respond));
    case Kind::kRegisterRegion:
      if (request.register_region().on_gpu()) {
        return RegisterOnGpu(request.register_region().bytes(), request.register_region().gpu(),
                             std::move(datagram->descriptors), std::move(respond));
      }
      return RegisterRegion(request.register_region().bytes(), datagram->descriptors, respond);
    case Kind::kHostRegion:
      return HostRegion(request.host_region().bytes(), std::move(respond));
    case Kind::kGetArena:
      return GetArena(request.get_arena().arena(), std::move(respond));
    case Kind::kDropRegion:
      return DropRegion(request.drop_region().region(), std::move(respond));
    case Kind::REQUEST_NOT_SET:
      return respond(Goodbye(absl::InvalidArgumentError("request: unknown request type")));
  }
}

void SessionProtocol::SayHello(const v1::Hello& hello, Respond respond) {
  if (hello.protocol_min() > hello.protocol_max()) {
    return respond(Goodbye(absl::InvalidArgumentError("hello.protocol_min: must not exceed hello.protocol_max")));
  }
  if (hello.protocol_max() < limits::kProtocolMin || hello.protocol_min() > limits::kProtocolMax) {
    const std::string why =
        absl::StrCat("hello.protocol_max: no common version; the daemon speaks ", limits::kProtocolMin, " to ",
                     limits::kProtocolMax, "; the client speaks ", hello.protocol_min(), " to ", hello.protocol_max());
    services_.refused.Add("session", RefusedConnection::kVersion,
                          absl::StrCat("uid ", peer_.uid, ", process ", peer_.pid), why);
    return respond(Goodbye(absl::FailedPreconditionError(why)));
  }
  if (hello.client().size() > kMaxClientName) {
    return respond(
        Goodbye(absl::InvalidArgumentError(absl::StrCat("hello.client: too long; expected at most ", kMaxClientName))));
  }
  if (hello.release().size() > kMaxRelease) {
    return respond(
        Goodbye(absl::InvalidArgumentError(absl::StrCat("hello.release: too long; expected at most ", kMaxRelease))));
  }
  Session::Description about;
  about.id = NextSessionId();
  about.secret = RandomSecret();
  about.tenant = tenant_.id;
  about.tenant_name = tenant_.name;
  about.pid = peer_.pid;
  about.uid = peer_.uid;
  about.client = hello.client();
  about.release = hello.release();
  about.regions = {
      std::make_shared<Budget>("a session", "bytes of regions", services_.region_bytes, tenant_.regions.bytes),
      std::make_shared<Budget>("a session", "regions", services_.max_regions, tenant_.regions.number)};
  about.models = tenant_.models;
  auto session = std::make_shared<Session>(std::move(about));

  v1::SessionReply welcome;
  welcome.mutable_welcome()->set_protocol(std::min(hello.protocol_max(), limits::kProtocolMax));
  welcome.mutable_welcome()->set_session(session->about().secret);
  welcome.mutable_welcome()->set_tenant(session->about().tenant_name);
  welcome.mutable_welcome()->set_extent_bytes(limits::kExtentBytes);
  welcome.mutable_welcome()->set_daemon_epoch(services_.table.daemon_epoch());
  const absl::Status opening = services_.table.Open(session, [respond, welcome] {
    UniqueFd process(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
    if (!process.valid()) return respond(Goodbye(absl::ErrnoToStatus(errno, "cannot open a pidfd of the daemon")));
    Reply reply = With(std::move(process), Encode(welcome));
    reply.otherwise = Goodbye;
    respond(std::move(reply));
  });
  if (!opening.ok()) return respond(Goodbye(opening));
  session_ = std::move(session);
}

void SessionProtocol::RegisterRegion(uint64_t bytes, const std::vector<UniqueFd>& descriptors, Respond respond) {
  if (descriptors.size() != 1) return respond(Error(NotOneDescriptor(descriptors)));
  if (absl::Status near = MayBeNear("register_region.on_gpu"); !near.ok()) return respond(Error(near));
  const RegionBudgets& budgets = session_->about().regions;
  auto number = InField("register_region.descriptor", Budget::Take(budgets.number, 1));
  if (!number.ok()) return respond(Error(number.status()));
  if (absl::Status capacity = CheckCapacityAfterAbandon(); !capacity.ok()) return respond(Error(capacity));
  auto mapped = Region::Register(descriptors[0], bytes);
  if (!mapped.ok()) return respond(Error(mapped.status()));
  // Memory with pages from the daemon is charged to the tenant while a process holds it.
  Holding holding{.hosted = services_.hosted.Find(session_->about().tenant, descriptors[0]),
                  .number = *std::move(number)};
  const auto [file_bytes, missing_bytes] = (*mapped)->Measure();
  if (missing_bytes > 0 && holding.hosted == nullptr) {
    return RegisterUntouched(*std::move(mapped), descriptors[0], std::move(holding.number), std::max(bytes, file_bytes),
                             std::move(respond));
  }
  if (holding.hosted == nullptr) (*mapped)->GuardWith(services_.guard.get());
  const uint64_t charged = ChargedFor(missing_bytes > 0 ? std::max(bytes, file_bytes) : bytes);
  auto charge = InField("register_region.bytes", holding.hosted != nullptr ? Budget::TakeHere(budgets.bytes, charged)
                                                                           : Budget::Take(budgets.bytes, charged));
  if (!charge.ok()) return respond(Error(charge.status()));
  holding.bytes = *std::move(charge);
  std::shared_ptr<Region> region = Kept(*std::move(mapped), std::move(holding), *session_, services_.mappings);
  if (missing_bytes == 0) return AddRegion(*session_, std::move(region), respond);
  // Pages of a block that its holders have freed since.
  const bool posted = services_.mappings.Post(tenant_.id, [&services = services_, session = session_, region, respond] {
    const absl::Status taken = region->TakePages(storage::kKeptFree + services.memory_to_come);
    taken.ok() ? AddRegion(*session, region, respond) : respond(Error(taken));
  });
  if (!posted) respond(Error(TooManyWaitForPages()));
}

// Its pages come from the daemon, so they are charged like hosted memory.
void SessionProtocol::RegisterUntouched(std::shared_ptr<Region> region, const UniqueFd& memfd, Budget::Charge number,
                                        uint64_t bytes, Respond respond) {
  const uint64_t charged = ChargedFor(bytes);
  auto of_session = InField("register_region.bytes", Budget::TakeHere(session_->about().regions.bytes, charged));
  if (!of_session.ok()) return respond(Error(of_session.status()));
  auto of_tenant = InField("register_region.bytes", Budget::Take(tenant_.regions.bytes, charged));
  if (!of_tenant.ok()) return respond(Error(of_tenant.status()));
  const auto same = std::make_shared<const UniqueFd>(fcntl(memfd.get(), F_DUPFD_CLOEXEC, 0));
  if (!same->valid()) {
    return respond(
        Error(absl::ResourceExhaustedError("register_region.descriptor: the daemon has no descriptor left")));
  }
  const bool posted =
      services_.mappings.Post(tenant_.id, [&services = services_, session = session_, region = std::move(region), same,
                                           number, of_session = *of_session, of_tenant = *of_tenant, respond] {
        const absl::Status taken = region->TakePages(storage::kKeptFree + services.memory_to_come);
        if (!taken.ok()) return respond(Error(taken));
        auto adopted = services.hosted.Adopt(session->about().tenant, *same, region->Measure().file_bytes, of_tenant);
        if (!adopted.ok()) return respond(Error(adopted.status()));
        region->UseDescriptor(std::move(adopted->memfd));
        Holding holding{std::move(adopted->use), number, of_session};
        AddRegion(*session, Kept(region, std::move(holding), *session, services.mappings), respond);
      });
  if (!posted) respond(Error(TooManyWaitForPages()));
}

// Dropped regions that a tenant still holds count against its descriptors, as its regions do.
absl::Status SessionProtocol::CheckCapacityAfterAbandon() const {
  const Budget& number = *tenant_.regions.number;
  if (number.taken() + services_.hosted.AbandonedBlocks(tenant_.id) <= number.limit()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("register_region.descriptor: the tenant may have at most ",
                                                   number.limit(),
                                                   " regions, including dropped ones that are still in use"));
}

void SessionProtocol::HostRegion(uint64_t bytes, Respond respond) {
  if (absl::Status near = MayBeNear("host_region"); !near.ok()) return respond(Error(near));
  const RegionBudgets& budgets = session_->about().regions;
  auto number = InField("host_region", Budget::Take(budgets.number, 1));
  if (!number.ok()) return respond(Error(number.status()));
  auto charge = InField("host_region.bytes", Budget::TakeHere(budgets.bytes, ChargedFor(bytes)));
  if (!charge.ok()) return respond(Error(charge.status()));
  // Reserving much memory takes long, and this thread must notice the deaths of engines meanwhile.
  const HostedMemory::Owner owner{tenant_.id, tenant_.regions.bytes,
                                  HostedMemory::kBlocksPerSession * tenant_.max_sessions};
  const bool posted = services_.mappings.Post(tenant_.id, [&services = services_, session = session_, owner, bytes,
                                                           number = *number, charge = *charge, respond] {
    auto made = InField("host_region.bytes", services.hosted.Make(owner, bytes));
    if (!made.ok()) return respond(Error(made.status()));
    auto region = Region::Register(made->memfd, bytes);
    if (!region.ok()) return respond(Error(region.status()));
    Holding holding{std::make_unique<HostedMemory::Use>(std::move(made->use)), number, charge};
    const auto handle = session->AddRegion(Kept(*std::move(region), std::move(holding), *session, services.mappings));
    if (!handle.ok()) return respond(Error(handle.status()));
    respond(GivenRegion(services.hosted, session, *handle, std::move(made->memfd)));
  });
  if (!posted) respond(Error(absl::ResourceExhaustedError("host_region: too many requests are queued; try again")));
}

absl::StatusOr<SessionServices::Seat> SessionProtocol::SeatOf(const std::string& gpu) const {
  const std::vector<SessionServices::Seat>& gpus = services_.gpus;
  if (gpus.empty()) {
    return absl::FailedPreconditionError("register_region.on_gpu: the daemon has no GPU; set gpu in its configuration");
  }
  if (gpu.empty() && gpus.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("register_region.gpu: required, because the daemon serves ", gpus.size(), " GPUs"));
  }
  const auto is_named = [&gpu](const SessionServices::Seat& seat) {
    const kernels::GpuId& id = seat.gpu->id();
    return gpu.empty() || gpu == absl::string_view(reinterpret_cast<const char*>(id.data()), id.size());
  };
  const auto seat = std::ranges::find_if(gpus, is_named);
  if (seat == gpus.end()) {
    return absl::FailedPreconditionError("register_region.gpu: is not a GPU of this daemon");
  }
  const Session::Far far = session_->far();
  if (far.gpu != nullptr && far.gpu != seat->gpu) {
    return absl::FailedPreconditionError("register_region.gpu: the session's other regions are on another GPU");
  }
  if (far.gpu == nullptr && seat->level.has_value() && session_->memory().regions > 0)
    return OnlyOnGpu("register_region.on_gpu");
  return *seat;
}

absl::Status SessionProtocol::MayBeNear(absl::string_view field) const {
  return session_->far().all ? OnlyOnGpu(field) : absl::OkStatus();
}

// The driver may take long, and this thread must notice the deaths of engines meanwhile.
void SessionProtocol::RegisterOnGpu(uint64_t bytes, const std::string& gpu, std::vector<UniqueFd> descriptors,
                                    Respond respond) {
  if (descriptors.size() != 1) return respond(Error(NotOneDescriptor(descriptors)));
  const auto seat = SeatOf(gpu);
  if (!seat.ok()) return respond(Error(seat.status()));
  const RegionBudgets& budgets = session_->about().regions;
  auto number = InField("register_region.descriptor", Budget::Take(budgets.number, 1));
  if (!number.ok()) return respond(Error(number.status()));
  auto charge = InField("register_region.bytes", Budget::Take(budgets.bytes, bytes));
  if (!charge.ok()) return respond(Error(charge.status()));
  const bool posted = services_.mappings.Post(
      tenant_.id, [&services = services_, session = session_, bytes, number = *number, charge = *charge, respond,
                   seat = *seat, descriptor = std::make_shared<UniqueFd>(std::move(descriptors.front()))] {
        auto region = Region::Import(*seat.gpu, *descriptor, bytes);
        if (!region.ok()) return respond(Error(region.status()));
        AddRegion(*session, Kept(*std::move(region), {.number = number, .bytes = charge}, *session, services.mappings),
                  Seated(services, session, seat, respond));
      });
  if (!posted) respond(Error(absl::ResourceExhaustedError("register_region: too many requests are queued; try again")));
}

void SessionProtocol::GetArena(uint32_t arena, Respond respond) {
  const bool posted =
      services_.loop.Post(tenant_.id, [&tiers = services_.tiers, tenant = session_->about().tenant, arena, respond] {
        const size_t place = std::min<size_t>(arena / storage::kArenasApart, tiers.size() - 1);
        const storage::MemoryTier& tier = *tiers[place];
        const auto descriptor = tier.Descriptor(tenant, arena);
        if (!descriptor.ok()) return respond(Error(descriptor.status()));
        v1::SessionReply message;
        message.mutable_arena()->set_arena(arena);
        message.mutable_arena()->set_bytes(descriptor->bytes);
        message.mutable_arena()->set_on_gpu(tier.gpu() != nullptr);
        UniqueFd passed(fcntl(descriptor->descriptor, F_DUPFD_CLOEXEC, 0));
        if (!passed.valid()) return respond(Error(absl::ErrnoToStatus(errno, "cannot pass the arena")));
        respond(With(std::move(passed), Encode(message)));
      });
  if (!posted) respond(Error(absl::ResourceExhaustedError("the daemon's metadata queue is full; try again")));
}

void SessionProtocol::DropRegion(uint64_t handle, Respond respond) {
  const std::shared_ptr<Region> region = session_->RemoveRegion(handle);
  if (region == nullptr) {
    return respond(Error(absl::InvalidArgumentError(absl::StrCat("drop_region.region: unknown region ", handle))));
  }
  region->WhenGone([&hosted = services_.hosted, block = region->block(), respond = std::move(respond), handle] {
    hosted.Drop(block);
    respond(RegionReply(handle));
  });
}

}  // namespace ashlar::daemon
