// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/directory/directory_keys.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ashlar/v1/directory.pb.h"

namespace ashlar::daemon {
namespace {

constexpr char kHoldingFormat = 1;
constexpr uint32_t kMostSlices = 65536;  // two bytes of a key
constexpr uint64_t kKeysOfASlice = 2048;

std::string BigEndian(uint64_t number) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(number >> (56 - 8 * i));
  return bytes;
}

uint64_t ReadBigEndian(absl::string_view bytes) {
  uint64_t number = 0;
  for (int i = 0; i < 8; ++i) number = number << 8 | static_cast<uint8_t>(bytes[i]);
  return number;
}

absl::string_view View(const ShortDigest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

void AppendVarint(uint64_t number, std::string* out) {
  for (; number >= 0x80; number >>= 7) out->push_back(static_cast<char>(number | 0x80));
  out->push_back(static_cast<char>(number));
}

bool ReadVarint(absl::string_view* bytes, uint64_t most, uint64_t* number) {
  *number = 0;
  for (int shift = 0; shift < 64 && !bytes->empty(); shift += 7) {
    const auto byte = static_cast<uint8_t>(bytes->front());
    bytes->remove_prefix(1);
    *number |= uint64_t{byte & 0x7fu} << shift;
    if (byte < 0x80) return *number <= most;
  }
  return false;
}

}  // namespace

ShortDigest Shorten(const Digest& digest) {
  ShortDigest result;
  std::copy_n(digest.bytes.begin(), result.size(), result.begin());
  return result;
}

DirectoryKeys::DirectoryKeys(const std::string& prefix, const std::string& cluster)
    : prefix_(absl::StrCat(prefix, "/", cluster, "/")) {}

std::string DirectoryKeys::Members() const {
  return prefix_ + "m";
}

std::string DirectoryKeys::MemberKey(uint64_t incarnation) const {
  return Members() + BigEndian(incarnation);
}

std::optional<uint64_t> DirectoryKeys::ReadMember(absl::string_view key) const {
  const size_t head = prefix_.size() + 1;
  if (key.size() != head + 8 || !absl::StartsWith(key, Members())) return std::nullopt;
  return ReadBigEndian(key.substr(head));
}

std::string DirectoryKeys::Erasures() const {
  return prefix_ + "f";
}

std::string DirectoryKeys::ErasureKey(const ClusterErasure::Id& id) const {
  return Erasures() + std::string(id.begin(), id.end());
}

std::optional<ClusterErasure::Id> DirectoryKeys::ReadErasure(absl::string_view key) const {
  ClusterErasure::Id id;
  const std::string prefix = Erasures();
  if (key.size() != prefix.size() + id.size() || !absl::StartsWith(key, prefix)) return std::nullopt;
  std::copy(key.begin() + static_cast<ptrdiff_t>(prefix.size()), key.end(), id.begin());
  return id;
}

std::string DirectoryKeys::Entries() const {
  return prefix_ + "e";
}

std::string DirectoryKeys::EntriesOf(const ShortDigest& ns) const {
  return absl::StrCat(prefix_, "e", View(ns));
}

std::optional<std::string> DirectoryKeys::SliceEnd(absl::string_view from, uint32_t slices) const {
  const size_t head = prefix_.size() + 1 + std::tuple_size_v<ShortDigest>;
  if (from.size() < head || !absl::StartsWith(from, Entries())) return std::nullopt;
  const absl::string_view ns = from.substr(0, head), key = from.substr(head);
  uint32_t at = 0;  // the first two bytes of the key
  if (!key.empty()) at |= static_cast<uint32_t>(static_cast<uint8_t>(key[0])) << 8;
  if (key.size() > 1) at |= static_cast<uint8_t>(key[1]);
  const uint32_t size = kMostSlices / slices, end = (at / size + 1) * size;
  if (end >= kMostSlices) return RangeEnd(std::string(ns));
  const char bytes[] = {static_cast<char>(end >> 8), static_cast<char>(end)};
  return absl::StrCat(ns, absl::string_view(bytes, sizeof bytes));
}

std::string DirectoryKeys::EntryKey(const EntryId& id, uint64_t incarnation) const {
  const char shard[] = {static_cast<char>(id.rank), static_cast<char>(id.last_rank)};
  return absl::StrCat(prefix_, "e", View(id.ns), View(id.key), BigEndian(incarnation),
                      absl::string_view(shard, sizeof shard));
}

std::optional<DirectoryKeys::Entry> DirectoryKeys::ReadEntry(absl::string_view key) const {
  Entry entry;
  const size_t head = prefix_.size() + 1, digest = entry.id.ns.size();
  if (key.size() != head + 2 * digest + 10 || !absl::StartsWith(key, prefix_) || key[prefix_.size()] != 'e') {
    return std::nullopt;
  }
  std::memcpy(entry.id.ns.data(), key.data() + head, digest);
  std::memcpy(entry.id.key.data(), key.data() + head + digest, digest);
  entry.incarnation = ReadBigEndian(key.substr(head + 2 * digest));
  entry.id.rank = static_cast<uint8_t>(key[key.size() - 2]);
  entry.id.last_rank = static_cast<uint8_t>(key[key.size() - 1]);
  return entry;
}

uint32_t SlicesFor(int64_t keys) {
  const auto wanted = static_cast<uint64_t>(std::max<int64_t>(keys, 1)) / kKeysOfASlice + 1;
  return std::bit_ceil(static_cast<uint32_t>(std::min<uint64_t>(wanted, kMostSlices)));
}

std::string RangeEnd(std::string prefix) {
  while (!prefix.empty() && static_cast<uint8_t>(prefix.back()) == 0xff) prefix.pop_back();
  if (prefix.empty()) return std::string(1, '\0');  // in etcd: up to the last key
  ++prefix.back();
  return prefix;
}

std::string EncodeHolding(const Holding& holding) {
  std::string value;
  value.push_back(kHoldingFormat);
  value.push_back(static_cast<char>(static_cast<int>(holding.kind) << 4 | static_cast<int>(holding.tier)));
  AppendVarint(holding.bytes, &value);
  AppendVarint(holding.depth, &value);
  AppendVarint(holding.span_begin, &value);
  if (holding.gpu.has_value()) value.push_back(static_cast<char>(*holding.gpu + 1));
  return value;
}

std::optional<Holding> DecodeHolding(absl::string_view value, const EntryId& id) {
  if (value.size() < 2 || value[0] != kHoldingFormat) return std::nullopt;
  const auto kinds = static_cast<uint8_t>(value[1]);
  value.remove_prefix(2);
  Holding holding;
  holding.kind = static_cast<ObjectKind>(kinds >> 4);
  holding.tier = static_cast<TierKind>(kinds & 15);
  if (holding.kind < ObjectKind::kSegment || holding.kind > ObjectKind::kSpan) return std::nullopt;
  if (holding.tier < TierKind::kHbm || holding.tier > TierKind::kSsd) return std::nullopt;
  if (id.rank > id.last_rank) return std::nullopt;
  holding.shard = {id.rank, id.last_rank + 1u};
  uint64_t depth = 0, span_begin = 0;
  if (!ReadVarint(&value, kMostHoldingBytes, &holding.bytes) || !ReadVarint(&value, UINT32_MAX, &depth) ||
      !ReadVarint(&value, UINT32_MAX, &span_begin)) {
    return std::nullopt;
  }
  holding.depth = static_cast<uint32_t>(depth);
  holding.span_begin = static_cast<uint32_t>(span_begin);
  const uint8_t gpu = value.empty() ? 0 : static_cast<uint8_t>(value.front());
  if (gpu > 0 && holding.tier == TierKind::kHbm) holding.gpu = static_cast<uint8_t>(gpu - 1);
  return holding;
}

std::string EncodeErasure(const ClusterErasure& erasure) {
  v1::DirectoryErasure message;
  message.set_tenant(erasure.tenant);
  if (erasure.ns.has_value()) message.set_ns(erasure.ns->bytes.data(), erasure.ns->bytes.size());
  message.set_node(erasure.node);
  return message.SerializeAsString();
}

std::optional<ClusterErasure> DecodeErasure(absl::string_view value) {
  v1::DirectoryErasure message;
  if (!message.ParseFromArray(value.data(), static_cast<int>(value.size())) || message.tenant().empty()) {
    return std::nullopt;
  }
  ClusterErasure erasure{.tenant = message.tenant(), .node = message.node()};
  if (message.ns().empty()) return erasure;
  NamespaceId& ns = erasure.ns.emplace();
  if (message.ns().size() != ns.bytes.size()) return std::nullopt;
  std::memcpy(ns.bytes.data(), message.ns().data(), ns.bytes.size());
  return erasure;
}

std::string EncodeMember(const Member& member) {
  v1::DirectoryMember message;
  message.set_node(member.node);
  message.set_control_address(member.control_address);
  message.set_transport_address(member.transport_address);
  message.set_version(member.version);
  message.set_erased(member.erased);
  return message.SerializeAsString();
}

std::optional<Member> DecodeMember(absl::string_view value, uint64_t incarnation) {
  v1::DirectoryMember message;
  if (!message.ParseFromArray(value.data(), static_cast<int>(value.size())) || message.node().empty()) {
    return std::nullopt;
  }
  return Member{.node = message.node(),
                .incarnation = incarnation,
                .control_address = message.control_address(),
                .transport_address = message.transport_address(),
                .version = message.version(),
                .erased = message.erased()};
}

}  // namespace ashlar::daemon
