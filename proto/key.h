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
    uint64_t word;  // already uniformly distributed
    std::memcpy(&word, digest.bytes.data(), sizeof word);
    return H::combine(std::move(state), word);
  }
};
using NamespaceId = Digest;
using Key = Digest;

// The content of an object. The numbers are part of the key and of the object format.
enum class ObjectKind : uint8_t {
  kSegment = 1,      // interior of a run of tokens, usable at any position
  kPrefixBlock = 2,  // keys and values of a block of a prefix (proto/prefix.h)
  kCheckpoint = 3,   // states at one prefix depth, with the prefix's keys and values that no block has
  kSpan = 4,         // inputs of the recurrence, keys and values for a run of tokens after a checkpoint
};
absl::string_view Name(ObjectKind kind);
// The kind with which a segment of a prompt is looked up. The first segment starts at position 0, so it is a prefix and
// is cached completely. The others may be at any position.
constexpr ObjectKind KindOfSegment(size_t index) {
  return index == 0 ? ObjectKind::kCheckpoint : ObjectKind::kSegment;
}

// A multimodal input (an image, a sound): the hash of its content, and the index of its first token in the run. All
// tokens of an input lie in one segment. Offsets of the inputs of a run are ascending.
struct MediaHash {
  uint64_t offset = 0;
  std::array<uint8_t, 32> hash{};
  bool operator==(const MediaHash&) const = default;
};
// Returns the inputs that begin in [begin, end), with offsets relative to `begin`.
std::vector<MediaHash> MediaWithin(std::span<const MediaHash> media, uint64_t begin, uint64_t end);
// The wire format: for each input the offset (u64, little endian) and the hash.
std::string PackMedia(std::span<const MediaHash> media);
// INVALID_ARGUMENT begins with `field`: the length is wrong, there are too many inputs, offsets do not ascend, or an
// offset is not below `tokens`.
absl::StatusOr<std::vector<MediaHash>> UnpackMedia(absl::string_view field, absl::string_view bytes, uint64_t tokens);

// The digest of a caller's salt. Texts with different salts do not find each other's objects (docs/formats.md,
// "Salts"). All zero means no salt.
using Salt = Digest;
Salt MakeSalt(absl::string_view given);  // an empty string means no salt
// Returns the namespace to use in keys of texts with this salt. Without a salt it is `ns`.
Digest Salted(const NamespaceId& ns, const Salt& salt);
// The wire format: 32 bytes, or empty. INVALID_ARGUMENT begins with `field`.
std::string PackSalt(const Salt& salt);
absl::StatusOr<Salt> UnpackSalt(absl::string_view field, absl::string_view bytes);

// Identifies a text independently of its namespace, so that a miss can be explained by the same text in another
// namespace. It is not cryptographic and is never used as a key: a tenant that forges one only gets wrong explanations
// of its own texts.
struct TextDigest {
  uint64_t low = 0, high = 0;
  bool operator==(const TextDigest&) const = default;

  template <typename H>
  friend H AbslHashValue(H state, const TextDigest& text) {
    return H::combine(std::move(state), text.low, text.high);
  }
};

NamespaceId MakeNamespace(absl::string_view tenant, const Identity& identity, const Layout& layout);
// Makes a namespace. `identity` and `layout` must be results of EncodeIdentity and EncodeLayout.
NamespaceId MakeNamespace(absl::string_view tenant, absl::string_view identity, absl::string_view layout);
// Here and below, `ns` must be the result of Salted if the text has a salt.
Key MakeKey(const NamespaceId& ns, ObjectKind kind, std::span<const int32_t> tokens,
            std::span<const MediaHash> media = {});
// Makes a key that is chained to `before`, the key of the preceding tokens. Prefixes use chained keys because they
// share their beginnings (proto/prefix.h).
Key MakeChainedKey(const NamespaceId& ns, ObjectKind kind, const Digest& before, std::span<const int32_t> tokens,
                   std::span<const MediaHash> media = {});
// Returns the root of a conversation's private key chain. The root of the shared chain is all zero.
Digest MakeChainRoot(const NamespaceId& ns, std::span<const uint8_t, 16> conversation);
// Takes a twelfth of the time of MakeKey.
TextDigest MakeTextDigest(ObjectKind kind, std::span<const int32_t> tokens, std::span<const MediaHash> media = {},
                          const Salt& salt = {});

}  // namespace ashlar
