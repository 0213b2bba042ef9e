// A model's config.json, as an operator downloads it: refused by field, or a layout that has one encoding.
#include <string>

#include "proto/layout.h"
#include "tests/fuzz/fuzz.h"
#include "tools/ashlarctl/hf_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ashlar;
  const std::string text(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<Layout> layout = ctl::LayoutFromHfConfig(text, {.head = 4, .tail = 4});
  if (!layout.ok()) {
    FUZZ_EXPECT(!layout.status().message().empty());
    FUZZ_EXPECT(absl::IsInvalidArgument(layout.status()) || absl::IsUnimplemented(layout.status()));
    return 0;
  }
  FUZZ_EXPECT(Validate(*layout).ok());
  const absl::StatusOr<Layout> again = DecodeLayout(EncodeLayout(*layout));
  FUZZ_EXPECT(again.ok() && EncodeLayout(*again) == EncodeLayout(*layout));
  return 0;
}
