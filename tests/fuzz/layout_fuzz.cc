// SPDX-License-Identifier: Apache-2.0
// A layout's canonical bytes, as an engine sends them, and the daemon's plans for an accepted layout.
#include <string>

#include "proto/object.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ashlar;
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<Layout> layout = DecodeLayout(bytes);
  if (!layout.ok()) {
    FUZZ_EXPECT(absl::IsInvalidArgument(layout.status()) && !layout.status().message().empty());
    return 0;
  }
  FUZZ_EXPECT(EncodeLayout(*layout) == bytes);
  if (!Validate(*layout).ok()) return 0;
  const uint64_t seams = uint64_t{layout->head} + layout->tail;
  for (const ObjectKind kind : {ObjectKind::kSegment, ObjectKind::kCheckpoint}) {
    for (const uint64_t tokens : {uint64_t{1}, seams, seams + 1, seams + 1000}) {
      absl::StatusOr<ObjectHeader> plan = PlanObject(*layout, NamespaceId{}, Key{}, kind, tokens);
      if (!plan.ok()) continue;
      const absl::StatusOr<ObjectHeader> read = DecodeHeader(EncodeHeader(*plan));
      FUZZ_EXPECT(read.ok() && *read == *plan);
    }
  }
  return 0;
}
