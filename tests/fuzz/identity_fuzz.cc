// SPDX-License-Identifier: Apache-2.0
// An identity's canonical bytes, as an engine sends them.
#include "proto/key.h"
#include "proto/layout.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ashlar;
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<Identity> identity = DecodeIdentity(bytes);
  if (!identity.ok()) {
    FUZZ_EXPECT(absl::IsInvalidArgument(identity.status()) && !identity.status().message().empty());
    return 0;
  }
  FUZZ_EXPECT(EncodeIdentity(*identity) == bytes);
  Identity other = *identity;
  other.lora += "x";
  FUZZ_EXPECT(MakeNamespace("tenant", *identity, {}) != MakeNamespace("tenant", other, {}));
  return 0;
}
