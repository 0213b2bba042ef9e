// SPDX-License-Identifier: Apache-2.0
// Retrieval by BM25 (Robertson and Zaragoza 2009, k1 = 1.2, b = 0.75), and questions to retrieve for.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "examples/rag/documents.h"

namespace ashlar::rag {

// Lower-case words of at least three letters.
std::vector<std::string> Words(std::string_view text);

class Bm25 {
 public:
  explicit Bm25(const std::vector<Section>& sections);

  // Indices of the `count` best sections, best first; ties by index. Always `count` of them (or all there are).
  std::vector<int32_t> Search(std::string_view query, size_t count) const;

  // Inverse document frequency; 0 for a word that no section has.
  double Idf(const std::string& word) const;

 private:
  struct Posting {
    int32_t section = 0;
    int32_t count = 0;
  };
  std::unordered_map<std::string, std::vector<Posting>> postings_;
  std::vector<double> lengths_;
  double mean_length_ = 0;
};

// Questions about a corpus without existing questions: each uses a few distinctive words of one section. Every section
// is used once before any is used again. The same corpus and seed give the same questions.
std::vector<std::string> MakeQuestions(const std::vector<Section>& sections, const Bm25& index, size_t count,
                                       uint64_t seed);

}  // namespace ashlar::rag
