// One Land call: its progress, its verdict, and the proof that it can write no more.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/connection.h"
#include "client/deadline.h"

namespace ashlar::v1 {
class LandRequest;
}

namespace ashlar::internal {

// Thread-safe. Process-bound. It has no thread of its own: events are taken in by whoever waits.
class LandCall {
 public:
  // Starts the call. `request` is complete but for the session and the landing's number. Null: too many are under way.
  static std::shared_ptr<LandCall> Start(std::shared_ptr<Connection> connection, v1::LandRequest& request);
  ~LandCall();  // cancels, and waits until the landing is quiet

  // Until so many layers are done, or the call is over. False: it is over, or the deadline came first.
  bool WaitLayers(uint32_t layers, Deadline deadline);
  // The daemon's verdict, one MissReason a segment; or why there is none. At the deadline the call is cancelled.
  absl::StatusOr<std::vector<uint32_t>> WaitVerdict(Deadline deadline);

  // True once nothing can write for this landing any more (writing_call.h).
  bool WaitQuiet(Deadline deadline);

 private:
  template <typename T, typename... Args>
  friend std::shared_ptr<T> MakeProcessBound(Args&&... args);
  class Impl;
  explicit LandCall(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::internal
