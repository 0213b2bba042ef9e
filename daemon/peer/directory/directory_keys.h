// SPDX-License-Identifier: Apache-2.0
// The directory's keys and values in etcd (docs/formats.md, section 10). With P = prefix, '/', cluster, '/':
//
//   P "m" incarnation                          a member; under its lease
//   P "e" namespace key incarnation shard      an object that this incarnation holds; under no lease
//   P "f" id                                   an erasure; under a lease of its own, which nobody keeps
//
// Namespace and key are the first 16 bytes of their digests, which are uniform: nobody finds another text with the same
// ones, and who did would only send a fetch, which gives the whole key, to a node that then has nothing.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "daemon/peer/directory/directory.h"

namespace ashlar::daemon {

using ShortDigest = std::array<uint8_t, 16>;
ShortDigest Shorten(const Digest& digest);

// An object as one node announces it.
struct EntryId {
  ShortDigest ns{}, key{};
  uint8_t rank = 0, last_rank = 0;  // of the shard: its rank, and its bundle's size less one
  bool operator==(const EntryId&) const = default;

  template <typename H>
  friend H AbslHashValue(H state, const EntryId& id) {
    return H::combine(std::move(state), id.ns, id.key, id.rank, id.last_rank);
  }
};

inline constexpr uint64_t kMostHoldingBytes = (uint64_t{1} << 40) - 1;

class DirectoryKeys {
 public:
  DirectoryKeys(const std::string& prefix, const std::string& cluster);

  std::string Members() const;  // the prefix of all of them
  std::string MemberKey(uint64_t incarnation) const;
  std::optional<uint64_t> ReadMember(absl::string_view key) const;  // the incarnation

  std::string Erasures() const;  // the prefix of all of them
  std::string ErasureKey(const ClusterErasure::Id& id) const;
  std::optional<ClusterErasure::Id> ReadErasure(absl::string_view key) const;

  std::string Entries() const;  // the prefix of all of them
  std::string EntriesOf(const ShortDigest& ns) const;
  // The end of the slice of a namespace that `from` lies in, where the namespace is cut into `slices` by its keys: a
  // power of two, at most 65,536. None: `from` names no namespace.
  std::optional<std::string> SliceEnd(absl::string_view from, uint32_t slices) const;
  std::string EntryKey(const EntryId& id, uint64_t incarnation) const;
  struct Entry {
    EntryId id;
    uint64_t incarnation = 0;
  };
  std::optional<Entry> ReadEntry(absl::string_view key) const;

 private:
  std::string prefix_;
};

// Into how many slices so many keys are cut. etcd 3.4 walks through a whole range for each page of it, so that pages of
// a large range take quadratic time, and those of slices linear time.
uint32_t SlicesFor(int64_t keys);

// The end of the range of all keys that begin so.
std::string RangeEnd(std::string prefix);

// Without the shard, which the key has.
std::string EncodeHolding(const Holding& holding);
// None: of an unknown format. What follows the known fields is ignored, so that later builds may add some.
std::optional<Holding> DecodeHolding(absl::string_view value, const EntryId& id);

// Without id and revision, which the key has. None: it names no tenant, or a namespace that is none.
std::string EncodeErasure(const ClusterErasure& erasure);
std::optional<ClusterErasure> DecodeErasure(absl::string_view value);

std::string EncodeMember(const Member& member);
std::optional<Member> DecodeMember(absl::string_view value, uint64_t incarnation);

}  // namespace ashlar::daemon
