// SPDX-License-Identifier: Apache-2.0
// The width of the terminal, and texts that fit it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace ashlar::ctl {

// Columns of the terminal that is the standard output, or $COLUMNS. None: unlimited.
std::optional<size_t> OutputColumns();

// Columns that a line of UTF-8 without control characters takes. In a UTF-8 locale, wide characters (East Asian ones,
// emoji) take two, and combining ones none; otherwise every character takes one.
size_t WidthOf(absl::string_view line);
// The line's beginning that fits, with "…" for the rest.
std::string Cut(absl::string_view line, size_t columns);
// Exactly `columns` wide.
std::string Padded(absl::string_view text, size_t columns);
// Breaks longer lines at spaces. Continuation lines are indented by two more than the line.
std::string Wrapped(absl::string_view text, size_t columns);

}  // namespace ashlar::ctl
