// CheckObject: the rules of a header beyond its encoding. For DecodeHeader.
#pragma once

#include "absl/status/status.h"
#include "proto/object.h"

namespace ashlar {

// DATA_LOSS names what is wrong: fields out of range; parts that leave the object, overlap, are out of order or have
// impossible sizes; keys and values that do not hold the stored tokens; a head of a segment's state without a
// transition, or with two.
absl::Status CheckObject(const ObjectHeader& header);

}  // namespace ashlar
