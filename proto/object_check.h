// SPDX-License-Identifier: Apache-2.0
// CheckObject: checks the rules of a header that its encoding does not enforce. Used by DecodeHeader.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "proto/object.h"

namespace ashlar {

// DATA_LOSS, "object header: " and what is wrong with it.
absl::Status BadHeader(absl::string_view what);

// DATA_LOSS names what is wrong: fields out of range; parts that leave the object, overlap, are out of order or have
// impossible sizes; keys and values that do not hold the stored tokens; a head of a segment's state without a
// transition, or with two.
absl::Status CheckObject(const ObjectHeader& header);

}  // namespace ashlar
