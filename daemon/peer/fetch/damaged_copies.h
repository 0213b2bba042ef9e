// SPDX-License-Identifier: Apache-2.0
// DamagedCopies: which members have sent wrong bytes of which objects lately, so that others are asked for these first.
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

// Of copies that have been released, the latest ones are remembered: their bytes are verified only when they land.
class DamagedCopies {
 public:
  using Members = std::vector<std::shared_ptr<const Member>>;

  // A copy is released, whose bytes these members have sent.
  void Released(storage::RemoteCopyId copy, const Key& key, Members senders);
  // Bytes that came by a released copy were wrong. Returns who has sent them; empty: nobody remembers.
  Members Found(storage::RemoteCopyId copy, storage::Nanos now);
  // Wrong bytes of the object came from a member.
  void Add(const Member& member, const Key& key, storage::Nanos now);
  bool Contains(const Member& member, const Key& key, storage::Nanos now) const;

 private:
  static constexpr storage::Nanos kFor = 600'000'000'000;  // then the member is asked as before
  static constexpr size_t kMostReleased = 4096, kMostDamaged = 1024;

  struct Sent {
    Key key;
    Members by;
  };
  std::map<storage::RemoteCopyId, Sent> released_;              // the oldest ones go first
  std::map<std::pair<uint64_t, Key>, storage::Nanos> damaged_;  // by the member's incarnation: until when
};

}  // namespace ashlar::daemon
