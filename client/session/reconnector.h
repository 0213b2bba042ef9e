// SPDX-License-Identifier: Apache-2.0
// Reconnector: keeps a client connected. It notices the daemon's end, connects again with growing pauses, and restores
// on the new connection the models and regions that the engine had opened and registered.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session/connection.h"
#include "client/session/deadline.h"
#include "client/session/descriptor.h"
#include "client/session/options.h"
#include "client/session/process_bound.h"
#include "kernels/mutex.h"

namespace ashlar::internal {

// An object that outlives a connection: a model, a region.
class Restorable {
 public:
  virtual ~Restorable() = default;

  // Registers the object on a connection, unless it is registered. UNAVAILABLE, DEADLINE_EXCEEDED and UNAUTHENTICATED:
  // the connection is unusable, and the reconnector makes another. RESOURCE_EXHAUSTED: the daemon has no space for this
  // object now, and the reconnector asks again later; meanwhile the connection serves all other objects. Any other
  // error is final: the object stays unregistered on this connection.
  virtual absl::Status Restore(const std::shared_ptr<Connection>& connection, Deadline deadline) = 0;
};

// Thread-safe. Process-bound.
class Reconnector {
 public:
  static absl::StatusOr<std::shared_ptr<Reconnector>> Start(const ClientOptions& options);
  ~Reconnector();

  // Ends the connection or the attempt to connect, and the thread, without waiting for the daemon. Later calls find no
  // connection.
  void Stop();

  // FAILED_PRECONDITION in a forked child, in which only tenant() may be called.
  absl::Status CheckProcess() const;
  // The current connection. UNAVAILABLE at once if there is none.
  absl::StatusOr<std::shared_ptr<Connection>> connection() const;
  Deadline CallDeadline() const { return After(options_.timeout); }
  const std::string& tenant() const { return tenant_; }

  // Restores `item`, which is known on `connection`, on every later one for as long as it lives. False: that connection
  // has ended meanwhile.
  bool Keep(const std::shared_ptr<Restorable>& item, const std::shared_ptr<Connection>& connection);

 private:
  template <typename T, typename... Args>
  friend std::shared_ptr<T> MakeProcessBound(Args&&... args);

  // Wakes the thread. Shared with connections, which may outlive the reconnector.
  class Bell {
   public:
    static absl::StatusOr<std::shared_ptr<Bell>> Make();
    explicit Bell(Descriptor fd) : fd_(std::move(fd)) {}
    void Ring();
    void Silence();
    int fd() const { return fd_.get(); }

   private:
    Descriptor fd_;
  };

  struct Kept {
    std::weak_ptr<Restorable> item;
    uint64_t generation = 0;  // connection on which the daemon last answered about the item
    uint64_t round = 0;       // round of the last attempt
  };

  Reconnector(const ClientOptions& options, std::shared_ptr<Bell> bell, std::shared_ptr<Connection> connection);
  static absl::StatusOr<std::shared_ptr<Connection>> Open(const ClientOptions& options,
                                                          const std::shared_ptr<Bell>& bell, Deadline deadline,
                                                          const std::stop_token& stop);
  void Run();
  void Serve(const std::shared_ptr<Connection>& connection);
  void Reconnect();
  absl::Status RestoreAll(const std::shared_ptr<Connection>& connection, Deadline deadline);
  void Lose(const std::shared_ptr<Connection>& connection);

  const ClientOptions options_;
  const std::string tenant_;
  const std::shared_ptr<Bell> bell_;
  const CreatorProcess creator_;
  std::stop_source stop_;

  mutable Mutex mutex_;
  std::shared_ptr<Connection> connection_ ABSL_GUARDED_BY(mutex_);  // null: not connected
  std::list<Kept> kept_ ABSL_GUARDED_BY(mutex_);
  uint64_t round_ = 0;       // round of restoring; used by the thread only, like the members below
  bool unrestored_ = false;  // the daemon had no space for some items
  Deadline next_round_{};    // next attempt to restore those items
  std::thread thread_;
};

}  // namespace ashlar::internal
