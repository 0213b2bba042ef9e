// SPDX-License-Identifier: Apache-2.0
// The directory's keys and values in etcd (docs/formats.md, section 10). With P = prefix, '/', cluster, '/':
//
//   P "m" incarnation                          a member, under its lease
//   P "e" namespace key incarnation shard      an object that this incarnation holds, without a lease
//   P "f" id                                   an erasure, under a lease of its own that is not renewed
//
// Namespace and key are the first 16 bytes of their digests, which are uniform. Finding a collision is infeasible, and
// it would only cause a fetch, with the complete key, from a node that does not have the object.
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

// An object as a node announces it.
struct EntryId {
  ShortDigest ns{}, key{};
  uint8_t rank = 0, last_rank = 0;  // rank of the shard, and the size of its bundle minus one
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

  std::string Members() const;  // common prefix
  std::string MemberKey(uint64_t incarnation) const;
  std::optional<uint64_t> ReadMember(absl::string_view key) const;  // returns the incarnation

  std::string Erasures() const;  // common prefix
  std::string ErasureKey(const ClusterErasure::Id& id) const;
  std::optional<ClusterErasure::Id> ReadErasure(absl::string_view key) const;

  std::string Entries() const;  // common prefix
  std::string EntriesOf(const ShortDigest& ns) const;
  // Returns the end of the slice of a namespace that contains `from`. A namespace is divided by key into `slices`, a
  // power of two of at most 65,536. Returns nothing if `from` names no namespace.
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

// Returns the number of slices for `keys`. etcd 3.4 scans the whole range for each page, so reading a large range by
// pages takes quadratic time, and by slices linear time.
uint32_t SlicesFor(int64_t keys);

// Returns the end of the range of all keys with this prefix.
std::string RangeEnd(std::string prefix);

// Does not encode the shard, which is in the key.
std::string EncodeHolding(const Holding& holding);
// Returns nothing for an unknown format. Bytes after the known fields are ignored, so that later versions can add
// fields.
std::optional<Holding> DecodeHolding(absl::string_view value, const EntryId& id);

// Does not encode id and revision, which are in the key. Decoding returns nothing if the tenant is missing or the
// namespace invalid.
std::string EncodeErasure(const ClusterErasure& erasure);
std::optional<ClusterErasure> DecodeErasure(absl::string_view value);

std::string EncodeMember(const Member& member);
std::optional<Member> DecodeMember(absl::string_view value, uint64_t incarnation);

}  // namespace ashlar::daemon
