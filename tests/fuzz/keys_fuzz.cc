// SPDX-License-Identifier: Apache-2.0
// The inputs of a key: tokens on the wire, a kind, hashes of media. Inputs that differ must not share a key.
#include <array>
#include <cstring>
#include <set>
#include <vector>

#include "proto/key.h"
#include "proto/tokens.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ashlar;
  if (size < 2) return 0;
  const auto kind = static_cast<ObjectKind>(1 + data[0] % 4);
  size_t media_count = data[1] % 4;
  data += 2;
  size -= 2;
  std::vector<MediaHash> media;
  for (; media_count > 0 && size >= 40; --media_count, data += 40, size -= 40) {
    MediaHash& hash = media.emplace_back();
    std::memcpy(&hash.offset, data, 8);
    std::memcpy(hash.hash.data(), data + 8, 32);
  }
  const absl::string_view wire(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<std::vector<int32_t>> tokens = UnpackTokens(wire);
  FUZZ_EXPECT(tokens.ok() == (size % 4 == 0));
  if (!tokens.ok()) {
    FUZZ_EXPECT(absl::IsInvalidArgument(tokens.status()));
    return 0;
  }
  FUZZ_EXPECT(PackTokens(*tokens) == wire);

  const NamespaceId ns{};
  NamespaceId other_ns = ns;
  other_ns.bytes[31] ^= 1;
  const Key key = MakeKey(ns, kind, *tokens, media);
  FUZZ_EXPECT(MakeKey(ns, kind, *tokens, media) == key);
  std::set<Key> keys = {key};
  const auto differs = [&](const Key& other) { FUZZ_EXPECT(keys.insert(other).second); };
  differs(MakeKey(other_ns, kind, *tokens, media));
  differs(MakeKey(Salted(ns, MakeSalt("salt")), kind, *tokens, media));
  differs(MakeKey(ns, kind == ObjectKind::kSpan ? ObjectKind::kSegment : ObjectKind::kSpan, *tokens, media));
  std::vector<int32_t> changed = *tokens;
  changed.push_back(0);
  differs(MakeKey(ns, kind, changed, media));
  if (!tokens->empty()) {
    changed = *tokens;
    changed[changed.size() / 2] ^= 1;
    differs(MakeKey(ns, kind, changed, media));
    differs(MakeKey(ns, kind, std::span(*tokens).first(tokens->size() - 1), media));
  }
  if (!media.empty()) {
    differs(MakeKey(ns, kind, *tokens, std::span(media).first(media.size() - 1)));
    media.back().offset ^= 1;
    differs(MakeKey(ns, kind, *tokens, media));
  }
  return 0;
}
