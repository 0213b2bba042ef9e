// SPDX-License-Identifier: Apache-2.0
// Namespaces and keys: SHA-256 over the canonical bytes described in docs/formats.md.
//
// Cryptographic because a tenant who chooses tokens must not be able to forge another text's key.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/layout.h"

namespace ashlar {

struct Digest {
  std::array<uint8_t, 32> bytes{};
  bool operator==(const Digest&) const = default;
  auto operator<=>(const Digest&) const = default;
  std::string Hex() const;

  template <typename H>
  friend H AbslHashValue(H state, const Digest& digest) {
    uint64_t word;  // already uniform
    std::memcpy(&word, digest.bytes.data(), sizeof word);
    return H::combine(std::move(state), word);
  }
};
using NamespaceId = Digest;
using Key = Digest;

// The content of an object. Numbers are part of the key and of the object format.
enum class ObjectKind : uint8_t {
  kSegment = 1,      // interior of a run of tokens, usable at any position
  kPrefixBlock = 2,  // keys and values of a block of a prefix (proto/prefix.h)
  kCheckpoint = 3,   // states at one prefix depth, with the prefix's keys and values that no block has
  kSpan = 4,         // the recurrence's inputs of a run of tokens behind a checkpoint, with their keys and values
};
absl::string_view Name(ObjectKind kind);
// The kind with which a prompt's segment is looked up: the first stands at position 0, so it is a prefix and cached
// whole; the others may stand anywhere.
constexpr ObjectKind KindOfSegment(size_t index) {
  return index == 0 ? ObjectKind::kCheckpoint : ObjectKind::kSegment;
}

// A multimodal input (an image, a sound): the hash of its content, and the token at which it begins, counted from the
// run's start. The tokens of an input all lie in one segment. Offsets of a run's inputs ascend.
struct MediaHash {
  uint64_t offset = 0;
  std::array<uint8_t, 32> hash{};
  bool operator==(const MediaHash&) const = default;
};
// Those that begin in [begin, end), with offsets counted from `begin`.
std::vector<MediaHash> MediaWithin(std::span<const MediaHash> media, uint64_t begin, uint64_t end);
// As they travel: for each the offset (u64, little endian) and the hash.
std::string PackMedia(std::span<const MediaHash> media);
// INVALID_ARGUMENT begins with `field`: not whole inputs, too many, not ascending, behind the last of `tokens` tokens.
absl::StatusOr<std::vector<MediaHash>> UnpackMedia(absl::string_view field, absl::string_view bytes, uint64_t tokens);

// Keeps texts of one namespace apart that shall not find one another's objects (docs/formats.md, "Salts"): the digest
// of the salt that a caller gives. All zero: none.
using Salt = Digest;
Salt MakeSalt(absl::string_view given);  // an empty one is none
// Stands in the namespace's place in keys of texts with this salt; without a salt, the namespace itself.
Digest Salted(const NamespaceId& ns, const Salt& salt);
// As it travels: 32 bytes, or none. INVALID_ARGUMENT begins with `field`.
std::string PackSalt(const Salt& salt);
absl::StatusOr<Salt> UnpackSalt(absl::string_view field, absl::string_view bytes);

// The identity of a text in any namespace, so that a miss can be explained by the same text under another one. Not
// cryptographic, and no name of anything: a tenant that forges one gets wrong explanations of its own texts.
struct TextDigest {
  uint64_t low = 0, high = 0;
  bool operator==(const TextDigest&) const = default;

  template <typename H>
  friend H AbslHashValue(H state, const TextDigest& text) {
    return H::combine(std::move(state), text.low, text.high);
  }
};

NamespaceId MakeNamespace(absl::string_view tenant, const Identity& identity, const Layout& layout);
// Makes the namespace from encodings; only those of EncodeIdentity and EncodeLayout name anything.
NamespaceId MakeNamespace(absl::string_view tenant, absl::string_view identity, absl::string_view layout);
// `ns`, here and below: Salted, where the text has a salt.
Key MakeKey(const NamespaceId& ns, ObjectKind kind, std::span<const int32_t> tokens,
            std::span<const MediaHash> media = {});
// Makes a key that is chained to `before`, the key of the tokens before these: for prefixes, which share their
// beginnings (proto/prefix.h).
Key MakeChainedKey(const NamespaceId& ns, ObjectKind kind, const Digest& before, std::span<const int32_t> tokens,
                   std::span<const MediaHash> media = {});
// Returns the root of the chain of a conversation's own keys; the shared chain's root is all zero.
Digest MakeChainRoot(const NamespaceId& ns, std::span<const uint8_t, 16> conversation);
// Takes a twelfth of MakeKey's time.
TextDigest MakeTextDigest(ObjectKind kind, std::span<const int32_t> tokens, std::span<const MediaHash> media = {},
                          const Salt& salt = {});

}  // namespace ashlar
