// SPDX-License-Identifier: Apache-2.0
// EventConnection: one subscriber, or one asker of replays, over ZMTP. It queues nothing: it reads the kept batches at
// its own pace, and misses those that are no longer kept when it comes to them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/events/kept_batches.h"
#include "daemon/events/zmtp.h"
#include "daemon/runtime/unique_fd.h"
#include "storage/executor.h"

namespace ashlar::daemon {

class EventConnection {
 public:
  // What a connection may send in a second. A subscriber sends its subscriptions, and a few bytes a second later.
  static constexpr size_t kMaxReceivedBytesPerSecond = 64 << 10;

  // `socket`: non-blocking. `topic` of all batches; it outlives the connection.
  EventConnection(UniqueFd socket, ZmtpSocket own, const std::string& topic, std::string peer, storage::Nanos now);

  // Reads some of what has arrived. A status other than OK, here and from Send: close it. UNAVAILABLE: it has ended.
  absl::Status Read(const KeptBatches& kept, storage::Nanos now);
  // Sends what the socket takes, and not much more than kTurnBytes.
  absl::Status Send(const KeptBatches& kept);

  int socket() const { return socket_.get(); }
  const std::string& peer() const { return peer_; }
  storage::Nanos accepted() const { return accepted_; }
  bool ready() const { return ready_; }                   // its greeting is complete
  bool blocked() const { return blocked_; }               // the socket takes nothing more
  bool holds_batch() const { return batch_ != nullptr; }  // it is in the middle of sending one
  bool more() const { return more_; }                     // Send has stopped, although the socket takes more

 private:
  static constexpr size_t kTurnBytes = size_t{1} << 20;

  absl::Status Handle(const ZmtpInput& input, const KeptBatches& kept);
  void Subscribe(const std::string& prefix, bool on, const KeptBatches& kept);
  bool subscribed() const;
  bool Fill(const KeptBatches& kept);  // false: there is nothing to be sent
  void FillBatch(const KeptBatches& kept);
  bool FillReplay(const KeptBatches& kept);

  const UniqueFd socket_;
  const ZmtpSocket own_;
  const std::string& topic_;
  const std::string peer_;
  const storage::Nanos accepted_;
  ZmtpReader reader_;
  bool ready_ = false, blocked_ = false, more_ = false;
  storage::Nanos second_ = 0;  // when the current one began
  size_t received_ = 0;        // bytes, in it

  std::vector<bool> prefixes_;  // of the topic, by length, that are subscribed to
  bool asked_ = false;          // a replay is under way
  uint64_t next_ = 0;           // the batch to be sent next
  uint64_t end_ = 0;            // of the replay

  std::string control_;                       // answers of the protocol that wait
  std::string head_;                          // being sent, and then
  std::shared_ptr<const std::string> batch_;  // the rest of the message; may be null
  size_t sent_ = 0;                           // bytes of both
};

}  // namespace ashlar::daemon
