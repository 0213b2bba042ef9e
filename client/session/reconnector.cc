// SPDX-License-Identifier: Apache-2.0
#include "client/session/reconnector.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <random>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ashlar::internal {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstPause{10};
constexpr milliseconds kLongestPause{1000};
constexpr milliseconds kDeferredPause{200};  // pause before the daemon is asked again for what it refused
constexpr milliseconds kIdlePause{1000};     // interval of checks for leases that wait for their use
// Pause before deferred work: engines wait for their next request, but not for a release. Work that arrives meanwhile
// shares a call.
constexpr milliseconds kGatherDeferred{5};

bool IsOfNoUse(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsUnauthenticated(status);
}

// Half of the pause is fixed and half is random, so that engines do not all reconnect at the same instant.
milliseconds Jittered(milliseconds pause) {
  thread_local std::minstd_rand random(std::random_device{}());
  return pause / 2 + milliseconds(std::uniform_int_distribution<int64_t>(0, pause.count() / 2)(random));
}

void AwaitReadable(int fd, milliseconds timeout) {
  struct pollfd wait = {.fd = fd, .events = POLLIN, .revents = 0};
  ::poll(&wait, 1, static_cast<int>(timeout.count()));
}

}  // namespace

absl::StatusOr<std::shared_ptr<Reconnector::Bell>> Reconnector::Bell::Make() {
  Descriptor fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) return absl::ErrnoToStatus(errno, "eventfd");
  return std::make_shared<Bell>(std::move(fd));
}

void Reconnector::Bell::Ring() {
  ::eventfd_write(fd_.get(), 1);
}

void Reconnector::Bell::Silence() {
  eventfd_t rings;
  ::eventfd_read(fd_.get(), &rings);
}

absl::StatusOr<std::shared_ptr<Reconnector>> Reconnector::Start(const ClientOptions& options) {
  absl::StatusOr<std::shared_ptr<Bell>> bell = Bell::Make();
  if (!bell.ok()) return bell.status();
  absl::StatusOr<std::shared_ptr<Connection>> connection = Open(options, *bell, After(options.timeout), {});
  if (!connection.ok()) return connection.status();
  auto reconnector = MakeProcessBound<Reconnector>(options, *std::move(bell), *std::move(connection));
  try {
    reconnector->thread_ = std::thread([self = reconnector.get()] { self->Run(); });
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrCat("this process cannot start a thread: ", error.what(),
                                                     "; raise its limit (pids.max, or RLIMIT_NPROC)"));
  }
  return reconnector;
}

absl::StatusOr<std::shared_ptr<Connection>> Reconnector::Open(const ClientOptions& options,
                                                              const std::shared_ptr<Bell>& bell, Deadline deadline,
                                                              const std::stop_token& stop) {
  return Connection::Open(
      options, [bell] { bell->Ring(); }, deadline, stop);
}

Reconnector::Reconnector(const ClientOptions& options, std::shared_ptr<Bell> bell,
                         std::shared_ptr<Connection> connection)
    : options_(options),
      tenant_(connection->channel().tenant()),
      bell_(std::move(bell)),
      connection_(std::move(connection)) {}

Reconnector::~Reconnector() {
  Stop();
}

void Reconnector::Stop() {
  stop_.request_stop();
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(mutex_);
    connection = std::exchange(connection_, nullptr);
  }
  if (connection != nullptr) connection->End();
  bell_->Ring();
  if (thread_.joinable()) thread_.join();
}

absl::Status Reconnector::CheckProcess() const {
  if (!creator_.InChild()) return absl::OkStatus();
  return absl::FailedPreconditionError("this client was connected before fork(): it belongs to the parent process");
}

absl::StatusOr<std::shared_ptr<Connection>> Reconnector::connection() const {
  if (absl::Status status = CheckProcess(); !status.ok()) return status;
  MutexLock lock(mutex_);
  if (connection_ == nullptr || connection_->ended()) return absl::UnavailableError("not connected to the daemon");
  return connection_;
}

bool Reconnector::Keep(const std::shared_ptr<Restorable>& item, const std::shared_ptr<Connection>& connection) {
  MutexLock lock(mutex_);
  if (connection_ != connection || connection->ended()) return false;
  std::erase_if(kept_, [](const Kept& kept) { return kept.item.expired(); });
  kept_.push_back({item, connection->generation()});
  return true;
}

void Reconnector::Run() {
  sigset_t signals;  // signals are for the engine to handle, on its own threads
  ::sigfillset(&signals);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  for (;;) {
    std::shared_ptr<Connection> connection;
    {
      MutexLock lock(mutex_);
      connection = connection_;
    }
    if (stop_.stop_requested()) return;
    if (connection == nullptr) {
      Reconnect();
    } else {
      Serve(connection);
    }
  }
}

// Does deferred work until the daemon ends, or until the bell rings for another reason.
void Reconnector::Serve(const std::shared_ptr<Connection>& connection) {
  struct pollfd watched[] = {
      {.fd = bell_->fd(), .events = POLLIN, .revents = 0},
      {.fd = connection->channel().fd(), .events = POLLRDHUP, .revents = 0},
      {.fd = connection->daemon().pidfd(), .events = POLLIN, .revents = 0},  // −1 is skipped
  };
  const bool done = connection->DoDeferredWork(CallDeadline());
  if (unrestored_ && Passed(next_round_)) {
    // Stop ends only calls over gRPC. RestoreAll also uses the session socket, which this ends.
    const std::stop_callback on_stop(stop_.get_token(), [&connection] { connection->EndSession(); });
    const absl::Status status = RestoreAll(connection, CallDeadline());
    if (absl::IsUnavailable(status) || absl::IsUnauthenticated(status)) return Lose(connection);
    unrestored_ |= !status.ok();
    next_round_ = After(kDeferredPause);
  }
  const milliseconds pause = done && !unrestored_ ? kIdlePause : kDeferredPause;
  const int ready = ::poll(watched, std::size(watched), static_cast<int>(pause.count()));
  if (ready <= 0) return;
  const auto is_over = [&] { return watched[1].revents != 0 || watched[2].revents != 0 || connection->rpc().lost(); };
  if (!is_over() && !stop_.stop_requested()) {
    ::poll(watched + 1, std::size(watched) - 1, static_cast<int>(kGatherDeferred.count()));
  }
  bell_->Silence();
  if (is_over()) Lose(connection);
}

// The session ends with the connection: the next one needs its space.
void Reconnector::Lose(const std::shared_ptr<Connection>& connection) {
  connection->EndSession();
  MutexLock lock(mutex_);
  if (connection_ == connection) connection_ = nullptr;
}

void Reconnector::Reconnect() {
  for (milliseconds pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    AwaitReadable(bell_->fd(), Jittered(pause));
    bell_->Silence();
    if (stop_.stop_requested()) return;
    const Deadline deadline = CallDeadline();
    absl::StatusOr<std::shared_ptr<Connection>> connection = Open(options_, bell_, deadline, stop_.get_token());
    // Another tenant's namespaces differ from the ones in which this client's models were opened.
    if (!connection.ok() || (*connection)->channel().tenant() != tenant_) continue;
    const std::stop_callback on_stop(stop_.get_token(), [&connection] { (*connection)->EndSession(); });
    if (RestoreAll(*connection, deadline).ok()) return;
    (*connection)->EndSession();
  }
}

// Restores every item that the daemon accepts, then makes `connection` the current one. Also restores items that the
// engine adds meanwhile.
absl::Status Reconnector::RestoreAll(const std::shared_ptr<Connection>& connection, Deadline deadline) {
  ++round_;
  unrestored_ = false;
  for (;;) {
    std::shared_ptr<Restorable> item;
    Kept* kept = nullptr;  // stays where it is while the item lives
    {
      MutexLock lock(mutex_);
      if (stop_.stop_requested()) return absl::CancelledError("stopping");  // Stop checks later for what is set here
      const auto next = std::ranges::find_if(
          kept_, [&](const Kept& k) { return k.generation != connection->generation() && k.round != round_; });
      if (next == kept_.end()) {
        connection_ = connection;
        return absl::OkStatus();
      }
      kept = &*next;
      kept->round = round_;
      item = kept->item.lock();
    }
    if (item == nullptr) continue;
    const absl::Status status = item->Restore(connection, deadline);
    if (IsOfNoUse(status)) return status;
    if (absl::IsResourceExhausted(status)) {
      unrestored_ = true;
      continue;
    }
    MutexLock lock(mutex_);
    kept->generation = connection->generation();
  }
}

}  // namespace ashlar::internal
