// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/wire.h"

#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace ashlar::daemon {
namespace {

static_assert(std::endian::native == std::endian::little, "headers are little endian");

// bytes 0, 1: magic; 2: version; 3: kind; 4: code; 5 to 7: 0; 8: to; 32: from; 56: offset; 64: length; 72: patience
constexpr uint8_t kMagic[2] = {0xa5, 0x1a};
constexpr uint8_t kVersion = 1;
constexpr uint64_t kMaxExtent = uint64_t{1} << 63;

void PutNumber(HeaderBytes& bytes, size_t at, uint64_t number) {
  std::memcpy(&bytes[at], &number, sizeof number);
}

void PutGrant(HeaderBytes& bytes, size_t at, const Grant& grant) {
  PutNumber(bytes, at, grant.number);
  std::memcpy(&bytes[at + 8], grant.secret.data(), grant.secret.size());
}

uint64_t NumberAt(std::span<const std::byte> bytes, size_t at) {
  uint64_t number;
  std::memcpy(&number, &bytes[at], sizeof number);
  return number;
}

Grant GrantAt(std::span<const std::byte> bytes, size_t at) {
  Grant grant;
  grant.number = NumberAt(bytes, at);
  std::memcpy(grant.secret.data(), &bytes[at + 8], grant.secret.size());
  return grant;
}

// The fields that a kind uses.
struct Use {
  bool known, to, from, offset, length, patience, code, payload;
};
constexpr Use kUse[] = {
    {},                                                                         // 0 is not a kind
    {.known = 1, .to = 1, .from = 1, .offset = 1, .length = 1, .patience = 1},  // kFetch
    {},                                                                         // 2 is reserved
    {},                                                                         // 3 is reserved
    {.known = 1, .to = 1, .offset = 1, .payload = 1},                           // kData
    {},                                                                         // 5 is reserved
    {.known = 1, .to = 1, .code = 1, .payload = 1},                             // kFailed
    {.known = 1, .from = 1},                                                    // kCancel
    {.known = 1},                                                               // kPing
    {.known = 1},                                                               // kPong
    {.known = 1, .to = 1, .from = 1, .offset = 1, .length = 1, .patience = 1},  // kBorrow
    {.known = 1, .to = 1, .from = 1},                                           // kLent
    {.known = 1, .to = 1},                                                      // kReturned
};

bool IsZero(const Grant& grant) {
  return grant.number == 0 && grant.secret == Grant{}.secret;
}

absl::Status Bad(absl::string_view what) {
  return absl::InvalidArgumentError(what);
}

}  // namespace

HeaderBytes EncodeMessage(const Message& message) {
  HeaderBytes bytes{};
  bytes[0] = std::byte{kMagic[0]};
  bytes[1] = std::byte{kMagic[1]};
  bytes[2] = std::byte{kVersion};
  bytes[3] = static_cast<std::byte>(message.kind);
  bytes[4] = std::byte{message.code};
  PutGrant(bytes, 8, message.to);
  PutGrant(bytes, 32, message.from);
  PutNumber(bytes, 56, message.offset);
  PutNumber(bytes, 64, message.length);
  PutNumber(bytes, 72, message.patience);
  return bytes;
}

absl::StatusOr<Message> ParseMessage(std::span<const std::byte> header, size_t payload_bytes) {
  if (header.size() != kHeaderBytes)
    return Bad(absl::StrCat("header: ", header.size(), " bytes; expected ", kHeaderBytes));
  if (header[0] != std::byte{kMagic[0]} || header[1] != std::byte{kMagic[1]}) return Bad("header: wrong magic");
  if (header[2] != std::byte{kVersion}) {
    return Bad(absl::StrCat("header: version ", static_cast<int>(header[2]), "; expected ", kVersion));
  }
  const uint8_t kind = static_cast<uint8_t>(header[3]);
  if (kind >= std::size(kUse) || !kUse[kind].known) return Bad(absl::StrCat("kind ", kind));
  const Use& use = kUse[kind];
  Message message{.kind = static_cast<MessageKind>(kind),
                  .code = static_cast<uint8_t>(header[4]),
                  .to = GrantAt(header, 8),
                  .from = GrantAt(header, 32),
                  .offset = NumberAt(header, 56),
                  .length = NumberAt(header, 64),
                  .patience = NumberAt(header, 72)};
  for (size_t i = 5; i < 8; ++i) {
    if (header[i] != std::byte{0}) return Bad("header: reserved bytes are not 0");
  }
  if (use.code ? message.code == 0 || message.code > 16 : message.code != 0) return Bad("code");
  if (use.to == IsZero(message.to)) return Bad("to");
  if (use.from == IsZero(message.from)) return Bad("from");
  if (!use.offset && message.offset != 0) return Bad("offset");
  if (use.length == (message.length == 0)) return Bad("length");
  if (use.patience == (message.patience == 0)) return Bad("patience");
  if (!use.payload && payload_bytes != 0) return Bad("payload");
  if (message.kind == MessageKind::kData && payload_bytes == 0) return Bad("data: empty payload");
  if (message.kind == MessageKind::kFailed && payload_bytes > kMaxErrorText) return Bad("error text: too long");
  const uint64_t extent = message.kind == MessageKind::kData ? payload_bytes : message.length;
  if (message.offset > kMaxExtent || extent > kMaxExtent - message.offset) return Bad("offset + length overflows");
  return message;
}

}  // namespace ashlar::daemon
