#include "proto/key.h"

#include <openssl/evp.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <bit>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/escaping.h"

namespace ashlar {
namespace {

static_assert(std::endian::native == std::endian::little, "integers are hashed as they lie in memory");

constexpr absl::string_view kNamespaceDomain = "ashlar/namespace/1";
constexpr uint8_t kKeyVersion = 1, kChainedKeyVersion = 2;
constexpr uint8_t kChainRoot = 0;  // where a kind stands in the others

// A keyless SHA-256 fails only when the process has no memory left or a broken OpenSSL: neither has a way out.
void Require(int ok) {
  if (ok == 1) return;
  std::fputs("ashlar: SHA-256 failed\n", stderr);
  std::abort();
}

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new()) {
    // Fetched once: looking the algorithm up costs more than hashing a short run of tokens.
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
    case ObjectKind::kPrefixPage:
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

Key MakeKey(const NamespaceId& ns, ObjectKind kind, std::span<const int32_t> tokens, std::span<const MediaHash> media) {
  Sha256 hash;
  hash.Number(kKeyVersion);
  hash.Number(kind);
  hash.Bytes(ns.bytes.data(), ns.bytes.size());
  hash.Number(uint64_t{tokens.size()});
  hash.Bytes(tokens.data(), tokens.size_bytes());
  hash.Number(uint64_t{media.size()});
  for (const MediaHash& item : media) {
    hash.Number(item.offset);
    hash.Bytes(item.hash.data(), item.hash.size());
  }
  return hash.Finish();
}

Key MakeChainedKey(const NamespaceId& ns, ObjectKind kind, const Digest& before, std::span<const int32_t> tokens) {
  Sha256 hash;
  hash.Number(kChainedKeyVersion);
  hash.Number(kind);
  hash.Bytes(ns.bytes.data(), ns.bytes.size());
  hash.Bytes(before.bytes.data(), before.bytes.size());
  hash.Number(uint64_t{tokens.size()});
  hash.Bytes(tokens.data(), tokens.size_bytes());
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

TextDigest MakeTextDigest(ObjectKind kind, std::span<const int32_t> tokens) {
  const XXH128_hash_t hash = XXH3_128bits_withSeed(tokens.data(), tokens.size_bytes(), static_cast<uint64_t>(kind));
  return {hash.low64, hash.high64};
}

}  // namespace ashlar
