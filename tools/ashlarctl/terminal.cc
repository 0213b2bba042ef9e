// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cwchar>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ashlar::ctl {
namespace {

constexpr size_t kLeastColumns = 20;  // on a narrower terminal, words would be split into single letters

// Removes the first character of `text`, which is UTF-8. A stray byte counts as a character.
absl::string_view TakeCharacter(absl::string_view& text) {
  size_t bytes = 1;
  while (bytes < text.size() && (static_cast<unsigned char>(text[bytes]) & 0xC0) == 0x80) ++bytes;
  const absl::string_view character = text.substr(0, bytes);
  text.remove_prefix(bytes);
  return character;
}

size_t WidthOfCharacter(absl::string_view character) {
  const auto lead = static_cast<unsigned char>(character[0]);
  if (lead < 0x80) return 1;
  uint32_t code = lead & (0x7fu >> character.size());
  for (const char byte : character.substr(1)) code = code << 6 | (static_cast<unsigned char>(byte) & 0x3fu);
  const int width = wcwidth(static_cast<wchar_t>(code));
  return width < 0 ? 1 : static_cast<size_t>(width);
}

// The longest prefix that takes at most `columns`, in bytes.
size_t BytesWithin(absl::string_view line, size_t columns) {
  absl::string_view rest = line;
  size_t width = 0;
  while (!rest.empty()) {
    const absl::string_view before = rest;
    width += WidthOfCharacter(TakeCharacter(rest));
    if (width > columns) return line.size() - before.size();
  }
  return line.size();
}

void AppendWrapped(absl::string_view line, size_t columns, std::string* out) {
  const size_t indent =
      std::min(line.find_first_not_of(' ') == line.npos ? 0 : line.find_first_not_of(' ') + 2, columns / 2);
  bool first = true;
  for (;;) {
    const size_t available = first ? columns : columns - indent;
    if (WidthOf(line) <= available) break;
    const size_t fits = std::max<size_t>(BytesWithin(line, available), 1);
    // Breaks at the space after the last word that fits. A word longer than the line is broken anywhere.
    size_t end = line[fits] == ' ' ? fits : line.rfind(' ', fits);
    if (end == line.npos || line.find_first_not_of(' ') >= end) end = fits;
    absl::StrAppend(out, line.substr(0, end), "\n", std::string(indent, ' '));
    line.remove_prefix(end);
    line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
    first = false;
  }
  absl::StrAppend(out, line);
}

}  // namespace

std::optional<size_t> OutputColumns() {
  winsize size{};
  if (isatty(STDOUT_FILENO) == 1 && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  const char* const given = std::getenv("COLUMNS");
  uint32_t columns = 0;
  if (given == nullptr || !absl::SimpleAtoi(given, &columns) || columns == 0) return std::nullopt;
  return columns;
}

size_t WidthOf(absl::string_view line) {
  size_t width = 0;
  while (!line.empty()) width += WidthOfCharacter(TakeCharacter(line));
  return width;
}

std::string Cut(absl::string_view line, size_t columns) {
  if (WidthOf(line) <= columns) return std::string(line);
  if (columns == 0) return "";
  return absl::StrCat(line.substr(0, BytesWithin(line, columns - 1)), "…");
}

std::string Padded(absl::string_view text, size_t columns) {
  const std::string cut = Cut(text, columns);
  return absl::StrCat(cut, std::string(columns - WidthOf(cut), ' '));
}

std::string Wrapped(absl::string_view text, size_t columns) {
  if (columns < kLeastColumns) columns = kLeastColumns;
  std::string out;
  bool first = true;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (!first) out += '\n';
    first = false;
    AppendWrapped(line, columns, &out);
  }
  return out;
}

}  // namespace ashlar::ctl
