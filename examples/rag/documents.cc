// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/documents.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <string_view>

#include "absl/strings/str_cat.h"

namespace ashlar::rag {
namespace {

namespace fs = std::filesystem;

// The files to read, each once even if several links point to it.
std::vector<fs::path> TextFiles(const std::string& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator it(folder, fs::directory_options::skip_permission_denied, error), end; it != end;
       it.increment(error)) {
    if (error) break;
    if (it->is_regular_file(error)) files.push_back(it->path());
  }
  std::sort(files.begin(), files.end());
  std::set<fs::path> seen;
  std::erase_if(files, [&](const fs::path& path) {
    std::error_code canonical_error;
    return !seen.insert(fs::canonical(path, canonical_error)).second;
  });
  return files;
}

std::string ReadFile(const fs::path& path, size_t limit) {
  std::ifstream in(path, std::ios::binary);
  std::string text(limit, '\0');
  in.read(text.data(), static_cast<std::streamsize>(limit));
  text.resize(static_cast<size_t>(in.gcount()));
  return text;
}

// Returns where to cut `text` so that the piece has at most `aim` bytes: after a blank line, a line or a word, the
// first of these that leaves at least half of `aim`.
size_t CutPosition(std::string_view text, size_t aim) {
  if (text.size() <= aim) return text.size();
  for (std::string_view stop : {std::string_view("\n\n"), std::string_view("\n"), std::string_view(" ")}) {
    size_t at = text.rfind(stop, aim - stop.size());
    if (at != std::string_view::npos && at >= aim / 2) return at + stop.size();
  }
  return aim;
}

}  // namespace

absl::StatusOr<std::vector<Section>> ReadSections(const std::string& folder, const CutOptions& options) {
  std::vector<std::vector<Section>> documents;
  std::set<std::string> seen;
  for (const fs::path& path : TextFiles(folder)) {
    const std::string text = ReadFile(path, options.max_file_bytes);
    if (text.find('\0') != std::string::npos) continue;
    std::vector<Section> sections;
    for (std::string_view rest = text; !rest.empty();) {
      const size_t cut = CutPosition(rest, options.section_bytes);
      std::string piece(rest.substr(0, cut));
      rest.remove_prefix(cut);
      if (piece.size() < options.section_bytes / 4 || !seen.insert(piece).second) continue;
      const int32_t number = static_cast<int32_t>(sections.size());
      sections.push_back({path.filename().string(), number, std::move(piece)});
    }
    if (!sections.empty()) documents.push_back(std::move(sections));
  }
  if (documents.empty()) return absl::NotFoundError(absl::StrCat("docs: no text file in ", folder));

  std::vector<Section> taken;
  for (size_t round = 0;; ++round) {
    bool any = false;
    for (std::vector<Section>& document : documents) {
      if (round >= document.size()) continue;
      any = true;
      if (options.max_sections == 0 || taken.size() < options.max_sections) taken.push_back(document[round]);
    }
    if (!any || (options.max_sections != 0 && taken.size() >= options.max_sections)) break;
  }
  return taken;
}

}  // namespace ashlar::rag
