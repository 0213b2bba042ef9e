// SPDX-License-Identifier: Apache-2.0
#include "proto/key.h"

#include <openssl/evp.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/escaping.h"
#include "proto/invalid.h"
#include "proto/limits.h"

namespace ashlar {
namespace {

static_assert(std::endian::native == std::endian::little, "integers are hashed as they lie in memory");
static_assert(sizeof(MediaHash) == 40 && offsetof(MediaHash, hash) == 8, "media are hashed, and travel, as they lie");

constexpr absl::string_view kNamespaceDomain = "ashlar/namespace/1", kSaltDomain = "ashlar/salt/1";
constexpr uint8_t kKeyVersion = 1, kChainedKeyVersion = 2, kSaltedVersion = 3;
constexpr uint8_t kChainRoot = 0;  // offset of the kind in the other hashes

// A keyless SHA-256 fails only without memory or with a broken OpenSSL; neither can be handled.
void Require(int ok) {
  if (ok == 1) return;
  std::fputs("ashlar: SHA-256 failed\n", stderr);
  std::abort();
}

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new()) {
    // Fetched once: a lookup of the algorithm costs more than hashing a few tokens.
    static EVP_MD* const algorithm = EVP_MD_fetch(nullptr, "SHA256", nullptr);
    Require(context_ != nullptr && algorithm != nullptr ? EVP_DigestInit_ex2(context_, algorithm, nullptr) : 0);
  }
  ~Sha256() { EVP_MD_CTX_free(context_); }
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Bytes(const void* data, size_t size) { Require(EVP_DigestUpdate(context_, data, size)); }
  template <typename Integer>
  void Number(Integer value) {
    Bytes(&value, sizeof value);
  }
  void Prefixed(absl::string_view bytes) {
    Number(static_cast<uint32_t>(bytes.size()));
    Bytes(bytes.data(), bytes.size());
  }
  void Media(std::span<const MediaHash> media) {
    Number(uint64_t{media.size()});
    Bytes(media.data(), media.size_bytes());
  }
  Digest Finish() {
    Digest digest;
    Require(EVP_DigestFinal_ex(context_, digest.bytes.data(), nullptr));
    return digest;
  }

 private:
  EVP_MD_CTX* const context_;
};

}  // namespace

std::string Digest::Hex() const {
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

absl::string_view Name(ObjectKind kind) {
  switch (kind) {
    case ObjectKind::kSegment:
      return "segment";
    case ObjectKind::kPrefixBlock:
      return "prefix_page";
    case ObjectKind::kCheckpoint:
      return "checkpoint";
    case ObjectKind::kSpan:
      return "span";
  }
  return "unknown";
}

NamespaceId MakeNamespace(absl::string_view tenant, const Identity& identity, const Layout& layout) {
  return MakeNamespace(tenant, EncodeIdentity(identity), EncodeLayout(layout));
}

NamespaceId MakeNamespace(absl::string_view tenant, absl::string_view identity, absl::string_view layout) {
  Sha256 hash;
  hash.Bytes(kNamespaceDomain.data(), kNamespaceDomain.size());
  hash.Prefixed(tenant);
  hash.Prefixed(identity);
  hash.Prefixed(layout);
  return hash.Finish();
}

Salt MakeSalt(absl::string_view given) {
  if (given.empty()) return {};
  Sha256 hash;
  hash.Bytes(kSaltDomain.data(), kSaltDomain.size());
  hash.Bytes(given.data(), given.size());
  return hash.Finish();
}

Digest Salted(const NamespaceId& ns, const Salt& salt) {
  if (salt == Salt{}) return ns;
  Sha256 hash;
  hash.Number(kSaltedVersion);
  hash.Bytes(ns.bytes.data(), ns.bytes.size());
  hash.Bytes(salt.bytes.data(), salt.bytes.size());
  return hash.Finish();
}

std::string PackSalt(const Salt& salt) {
  if (salt == Salt{}) return {};
  return std::string(reinterpret_cast<const char*>(salt.bytes.data()), salt.bytes.size());
}

absl::StatusOr<Salt> UnpackSalt(absl::string_view field, absl::string_view bytes) {
  Salt salt;
  if (bytes.empty()) return salt;
  if (bytes.size() != salt.bytes.size())
    return Invalid(field, ": wrong length; expected ", salt.bytes.size(), " bytes, or empty");
  std::ranges::copy(bytes, salt.bytes.begin());
  if (salt == Salt{})
    return Invalid(
        field, ": all zero; expected a salt, or empty for none");  // zeros mean no salt, which would share everything
  return salt;
}

Key MakeKey(const NamespaceId& ns, ObjectKind kind, std::span<const int32_t> tokens, std::span<const MediaHash> media) {
  Sha256 hash;
  hash.Number(kKeyVersion);
  hash.Number(kind);
  hash.Bytes(ns.bytes.data(), ns.bytes.size());
  hash.Number(uint64_t{tokens.size()});
  hash.Bytes(tokens.data(), tokens.size_bytes());
  hash.Media(media);
  return hash.Finish();
}

std::vector<MediaHash> MediaWithin(std::span<const MediaHash> media, uint64_t begin, uint64_t end) {
  std::vector<MediaHash> within;
  const auto first = std::ranges::lower_bound(media, begin, {}, &MediaHash::offset);
  for (auto item = first; item != media.end() && item->offset < end; ++item) {
    within.push_back({item->offset - begin, item->hash});
  }
  return within;
}

std::string PackMedia(std::span<const MediaHash> media) {
  return std::string(reinterpret_cast<const char*>(media.data()), media.size_bytes());
}

absl::StatusOr<std::vector<MediaHash>> UnpackMedia(absl::string_view field, absl::string_view bytes, uint64_t tokens) {
  if (bytes.size() % sizeof(MediaHash) != 0)
    return Invalid(field, ": length is not a multiple of 40 bytes (offset and hash)");
  if (bytes.size() / sizeof(MediaHash) > limits::kMaxMedia)
    return Invalid(field, ": too many; expected at most ", limits::kMaxMedia);
  std::vector<MediaHash> media(bytes.size() / sizeof(MediaHash));
  if (!media.empty()) std::memcpy(media.data(), bytes.data(), bytes.size());
  for (size_t i = 0; i < media.size(); ++i) {
    if (i > 0 && media[i].offset <= media[i - 1].offset)
      return Invalid(field, "[", i, "].offset: must be greater than the previous offset");
    if (media[i].offset >= tokens) return Invalid(field, "[", i, "].offset: must be less than the number of tokens");
  }
  return media;
}

Key MakeChainedKey(const NamespaceId& ns, ObjectKind kind, const Digest& before, std::span<const int32_t> tokens,
                   std::span<const MediaHash> media) {
  Sha256 hash;
  hash.Number(kChainedKeyVersion);
  hash.Number(kind);
  hash.Bytes(ns.bytes.data(), ns.bytes.size());
  hash.Bytes(before.bytes.data(), before.bytes.size());
  hash.Number(uint64_t{tokens.size()});
  hash.Bytes(tokens.data(), tokens.size_bytes());
  // Prompts without media add no bytes, so their keys equal those of releases without media. The forms with and without
  // media are unambiguous, because the token count determines where the tokens end.
  if (!media.empty()) hash.Media(media);
  return hash.Finish();
}

Digest MakeChainRoot(const NamespaceId& ns, std::span<const uint8_t, 16> conversation) {
  Sha256 hash;
  hash.Number(kChainedKeyVersion);
  hash.Number(kChainRoot);
  hash.Bytes(ns.bytes.data(), ns.bytes.size());
  hash.Bytes(conversation.data(), conversation.size());
  return hash.Finish();
}

TextDigest MakeTextDigest(ObjectKind kind, std::span<const int32_t> tokens, std::span<const MediaHash> media,
                          const Salt& salt) {
  uint64_t salted[2];  // zeros without a salt
  std::memcpy(salted, salt.bytes.data(), sizeof salted);
  const XXH128_hash_t hash = XXH3_128bits_withSeed(tokens.data(), tokens.size_bytes(), static_cast<uint64_t>(kind));
  if (media.empty()) return {hash.low64 ^ salted[0], hash.high64 ^ salted[1]};
  const XXH128_hash_t inputs = XXH3_128bits_withSeed(media.data(), media.size_bytes(), hash.low64);
  return {inputs.low64 ^ salted[0], inputs.high64 ^ hash.high64 ^ salted[1]};
}

}  // namespace ashlar
