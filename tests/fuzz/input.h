// SPDX-License-Identifier: Apache-2.0
// Input: a fuzzer's bytes, from the front.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ashlar::fuzz {

class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data, size) {}
  bool empty() const { return data_.empty(); }
  // 0 if none is left.
  uint8_t Byte() {
    if (data_.empty()) return 0;
    const uint8_t byte = data_.front();
    data_ = data_.subspan(1);
    return byte;
  }

 protected:
  std::span<const uint8_t> data_;
};

}  // namespace ashlar::fuzz
