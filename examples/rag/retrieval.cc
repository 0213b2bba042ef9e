// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/retrieval.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>

#include "absl/strings/ascii.h"

namespace ashlar::rag {
namespace {

constexpr double kTellingIdf = 2.0;
constexpr size_t kTellingWords = 12;  // words of a section; a question uses a few of them
constexpr size_t kQuestionWords = 4;

}  // namespace

std::vector<std::string> Words(std::string_view text) {
  std::vector<std::string> words;
  std::string word;
  auto finish = [&] {
    if (word.size() >= 3) words.push_back(word);
    word.clear();
  };
  for (char c : text) {
    if (absl::ascii_isalpha(static_cast<unsigned char>(c))) {
      word += absl::ascii_tolower(static_cast<unsigned char>(c));
    } else {
      finish();
    }
  }
  finish();
  return words;
}

Bm25::Bm25(const std::vector<Section>& sections) {
  for (size_t i = 0; i < sections.size(); ++i) {
    const std::vector<std::string> words = Words(sections[i].text);
    std::map<std::string, int32_t> counts;
    for (const std::string& word : words) ++counts[word];
    for (const auto& [word, count] : counts) postings_[word].push_back({static_cast<int32_t>(i), count});
    lengths_.push_back(static_cast<double>(words.size()));
  }
  if (!lengths_.empty()) mean_length_ = std::accumulate(lengths_.begin(), lengths_.end(), 0.0) / lengths_.size();
}

double Bm25::Idf(const std::string& word) const {
  auto it = postings_.find(word);
  if (it == postings_.end()) return 0;
  const double with = static_cast<double>(it->second.size());
  return std::log(1 + (lengths_.size() - with + 0.5) / (with + 0.5));
}

std::vector<int32_t> Bm25::Search(std::string_view query, size_t count) const {
  constexpr double kK1 = 1.2, kB = 0.75;
  std::vector<double> scores(lengths_.size(), 0.0);
  for (const std::string& word : Words(query)) {
    auto it = postings_.find(word);
    if (it == postings_.end()) continue;
    const double idf = Idf(word);
    for (const Posting& posting : it->second) {
      const double norm = kK1 * (1 - kB + kB * lengths_[posting.section] / mean_length_);
      scores[posting.section] += idf * posting.count * (kK1 + 1) / (posting.count + norm);
    }
  }
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return scores[a] > scores[b]; });
  order.resize(std::min(count, order.size()));
  return order;
}

std::vector<std::string> MakeQuestions(const std::vector<Section>& sections, const Bm25& index, size_t count,
                                       uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<size_t> order(sections.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::vector<std::string> questions;
  for (size_t i = 0; i < count; ++i) {
    const size_t turn = i % order.size();
    std::swap(order[turn], order[turn + random() % (order.size() - turn)]);
    std::vector<std::string> words = Words(sections[order[turn]].text);
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    // The rarest words identify a single section; words of middling rarity occur in several.
    std::stable_sort(words.begin(), words.end(), [&](const std::string& a, const std::string& b) {
      return std::abs(index.Idf(a) - kTellingIdf) < std::abs(index.Idf(b) - kTellingIdf);
    });
    words.resize(std::max<size_t>(kQuestionWords, std::min(words.size(), kTellingWords)), "text");
    for (size_t w = 0; w < kQuestionWords; ++w) std::swap(words[w], words[w + random() % (words.size() - w)]);
    questions.push_back("What is said here about " + words[0] + ", " + words[1] + ", " + words[2] + " and " + words[3] +
                        "?");
  }
  return questions;
}

}  // namespace ashlar::rag
