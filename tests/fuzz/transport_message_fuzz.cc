// SPDX-License-Identifier: Apache-2.0
// The header of a message between two transports. An input is the size of a payload, two bytes, and a header.
#include <cstring>

#include "daemon/peer/transport/wire.h"
#include "tests/fuzz/fuzz.h"

using namespace ashlar::daemon;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const size_t payload = data[0] + 256u * data[1];
  const std::span<const std::byte> header(reinterpret_cast<const std::byte*>(data + 2), size - 2);
  const auto message = ParseMessage(header, payload);
  if (!message.ok()) return 0;
  // An accepted header equals the one that would be sent, and no computation with its places overflows.
  FUZZ_EXPECT(header.size() == kHeaderBytes);
  const HeaderBytes again = EncodeMessage(*message);
  FUZZ_EXPECT(std::memcmp(again.data(), header.data(), kHeaderBytes) == 0);
  const uint64_t extent = message->kind == MessageKind::kData ? payload : message->length;
  FUZZ_EXPECT(message->offset + extent >= message->offset && message->offset + extent <= uint64_t{1} << 63);
  FUZZ_EXPECT(SameGrant(message->to, message->to) && message->code <= 16);
  return 0;
}
