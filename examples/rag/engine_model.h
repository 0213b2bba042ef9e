// SPDX-License-Identifier: Apache-2.0
// The reference engine's model as the engine API describes models.
#pragma once

#include <vector>

#include "ashlar/engine.h"
#include "examples/refengine/model.h"
#include "examples/refengine/stored_segment.h"
#include "proto/layout.h"

namespace ashlar::rag {

class EngineModel {
 public:
  // `page_tokens`: tokens per page.
  EngineModel(const refengine::Model& model, refengine::SeamWidths seams, int32_t page_tokens);
  EngineModel(const EngineModel&) = delete;
  EngineModel& operator=(const EngineModel&) = delete;

  // Points into this object.
  const engine::Model& described() const { return described_; }

 private:
  const Identity identity_;
  const Layout layout_;
  std::vector<engine::Layer> layers_;
  engine::Model described_;
};

}  // namespace ashlar::rag
