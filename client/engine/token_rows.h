// SPDX-License-Identifier: Apache-2.0
// ReadyRows: a layer's inputs in the form that the recurrence expects, with all strides set. Inputs that need
// normalization or scaling are copied.
#pragma once

#include <cstdint>
#include <vector>

#include "ashlar/engine.h"
#include "kernels/linear.h"

namespace ashlar::engine {

// Floats of one token.
struct RowWidths {
  explicit RowWidths(const kernels::LinearShape& shape);
  int64_t keys, values, gates, betas;
};

// Points into the engine's rows and into itself.
class ReadyRows {
 public:
  // `given` was checked (CheckRows).
  ReadyRows(const kernels::LinearShape& shape, const TokenRows& given);
  ReadyRows(const ReadyRows&) = delete;
  ReadyRows& operator=(const ReadyRows&) = delete;

  const TokenRows& rows() const { return rows_; }

 private:
  TokenRows rows_;
  std::vector<float> q_, k_;
};

}  // namespace ashlar::engine
