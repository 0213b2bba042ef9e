// SPDX-License-Identifier: Apache-2.0
// EventConnection: one subscriber or one replay client over ZMTP. The connection queues nothing: it reads the kept
// batches at its own pace, and skips batches that are no longer kept.
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
  // Most bytes that a peer may send per second. A subscriber sends its subscriptions, and then a few bytes per second.
  static constexpr size_t kMaxReceivedBytesPerSecond = 64 << 10;

  // `socket` must be non-blocking. `topic` is that of all batches, and must outlive the connection.
  EventConnection(UniqueFd socket, ZmtpSocket own, const std::string& topic, std::string peer, storage::Nanos now);

  // Reads some of the received bytes. Close the connection if Read or Send returns an error. UNAVAILABLE: the peer has
  // closed it.
  absl::Status Read(const KeptBatches& kept, storage::Nanos now);
  // Sends until the socket blocks, or about kTurnBytes are sent.
  absl::Status Send(const KeptBatches& kept);

  int socket() const { return socket_.get(); }
  const std::string& peer() const { return peer_; }
  storage::Nanos accepted() const { return accepted_; }
  bool ready() const { return ready_; }                   // the handshake is complete
  bool blocked() const { return blocked_; }               // the socket accepts no more bytes
  bool holds_batch() const { return batch_ != nullptr; }  // a batch is partly sent
  bool more() const { return more_; }                     // Send stopped although the socket accepts more

 private:
  static constexpr size_t kTurnBytes = size_t{1} << 20;

  absl::Status Handle(const ZmtpInput& input, const KeptBatches& kept);
  void Subscribe(const std::string& prefix, bool on, const KeptBatches& kept);
  bool subscribed() const;
  bool Fill(const KeptBatches& kept);  // returns false if nothing is left to send
  void FillBatch(const KeptBatches& kept);
  bool FillReplay(const KeptBatches& kept);

  const UniqueFd socket_;
  const ZmtpSocket own_;
  const std::string& topic_;
  const std::string peer_;
  const storage::Nanos accepted_;
  ZmtpReader reader_;
  bool ready_ = false, blocked_ = false, more_ = false;
  storage::Nanos second_ = 0;  // start of the current second
  size_t received_ = 0;        // bytes received in the current second

  std::vector<bool> prefixes_;  // subscribed prefixes of the topic, by length
  bool asked_ = false;          // true during a replay
  uint64_t next_ = 0;           // number of the next batch to send
  uint64_t end_ = 0;            // end of the replay

  std::string control_;                       // queued protocol replies
  std::string head_;                          // header of the message being sent
  std::shared_ptr<const std::string> batch_;  // body of the message being sent; may be null
  size_t sent_ = 0;                           // bytes sent of header and body
};

}  // namespace ashlar::daemon
