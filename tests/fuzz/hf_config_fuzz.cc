// SPDX-License-Identifier: Apache-2.0
// A model's config.json, as an operator downloads it: it is refused by field, or gives a layout with one encoding.
#include <string>

#include "proto/layout.h"
#include "tests/fuzz/fuzz.h"
#include "tools/ashlarctl/hf_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ashlar;
  const std::string text(reinterpret_cast<const char*>(data), size);
  const nlohmann::json file = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const absl::StatusOr<ctl::HfLayout> model = ctl::LayoutFromHfConfig(file, {.head = 4, .tail = 4});
  if (!model.ok()) {
    FUZZ_EXPECT(!model.status().message().empty());
    FUZZ_EXPECT(absl::IsInvalidArgument(model.status()));
    return 0;
  }
  FUZZ_EXPECT(model->convolution.size() == model->layout.layers.size());
  FUZZ_EXPECT(Validate(model->layout).ok());
  const absl::StatusOr<Layout> again = DecodeLayout(EncodeLayout(model->layout));
  FUZZ_EXPECT(again.ok() && EncodeLayout(*again) == EncodeLayout(model->layout));
  return 0;
}
