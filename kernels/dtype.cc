// SPDX-License-Identifier: Apache-2.0
#include "kernels/dtype.h"

namespace ashlar::kernels {

float ReadElement(DType dtype, const void* array, int64_t index) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(array)[index];
    case DType::kF16:
      return Half::To(static_cast<const uint16_t*>(array)[index]);
    case DType::kBF16:
      return BFloat16::To(static_cast<const uint16_t*>(array)[index]);
    case DType::kF8E4M3:
      return Float8E4M3::To(static_cast<const uint8_t*>(array)[index]);
    case DType::kF8E5M2:
      return Float8E5M2::To(static_cast<const uint8_t*>(array)[index]);
  }
  return NAN;
}

void WriteElement(DType dtype, void* array, int64_t index, float value) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(array)[index] = value;
      return;
    case DType::kF16:
      static_cast<uint16_t*>(array)[index] = static_cast<uint16_t>(Half::From(value));
      return;
    case DType::kBF16:
      static_cast<uint16_t*>(array)[index] = static_cast<uint16_t>(BFloat16::From(value));
      return;
    case DType::kF8E4M3:
      static_cast<uint8_t*>(array)[index] = static_cast<uint8_t>(Float8E4M3::From(value));
      return;
    case DType::kF8E5M2:
      static_cast<uint8_t*>(array)[index] = static_cast<uint8_t>(Float8E5M2::From(value));
      return;
  }
}

}  // namespace ashlar::kernels
