// SPDX-License-Identifier: Apache-2.0
// DamagedCopies: remembers which members recently sent wrong bytes of which objects, so that other holders are asked
// first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/peer/directory/directory.h"
#include "proto/key.h"
#include "storage/executor.h"
#include "storage/tier/remote_source.h"

namespace ashlar::daemon {

// Bytes are verified when they land, so the most recently released copies are remembered.
class DamagedCopies {
 public:
  using Members = std::vector<std::shared_ptr<const Member>>;

  // A copy was released. `senders` sent its bytes.
  void Released(storage::RemoteCopyId copy, const Key& key, Members senders);
  // A released copy had wrong bytes. Returns its senders; empty if unknown.
  Members Found(storage::RemoteCopyId copy, storage::Nanos now);
  // A member sent wrong bytes of the object.
  void Add(const Member& member, const Key& key, storage::Nanos now);
  bool Contains(const Member& member, const Key& key, storage::Nanos now) const;

 private:
  static constexpr storage::Nanos kFor = 600'000'000'000;  // a member with a damaged copy is asked last for this long
  static constexpr size_t kMostReleased = 4096, kMostDamaged = 1024;

  struct Sent {
    Key key;
    Members by;
  };
  std::map<storage::RemoteCopyId, Sent> released_;  // the oldest ones are dropped first
  // key: incarnation of the member, object; value: when it ends
  std::map<std::pair<uint64_t, Key>, storage::Nanos> damaged_;
};

}  // namespace ashlar::daemon
