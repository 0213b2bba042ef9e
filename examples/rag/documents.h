// SPDX-License-Identifier: Apache-2.0
// Documents of the main job: text files of a folder, cut into sections that are retrieved and cached by themselves.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ashlar::rag {

struct Section {
  std::string document;  // file name
  int32_t number = 0;    // within the document
  std::string text;
};

struct CutOptions {
  size_t section_bytes = 512;  // upper limit; a section ends at a blank line, line or word before it
  size_t max_sections = 0;     // 0: all
  size_t max_file_bytes = 1 << 20;
};

// Reads every regular text file of `folder` (symbolic links to files followed once, files with NUL bytes skipped) in
// the order of their names and cuts it into sections. Sections shorter than a quarter of the aim are dropped,
// duplicates too. With `max_sections`, sections are taken evenly from all documents. NOT_FOUND when there is nothing to
// read.
absl::StatusOr<std::vector<Section>> ReadSections(const std::string& folder, const CutOptions& options);

}  // namespace ashlar::rag
