// SPDX-License-Identifier: Apache-2.0
// OverlapModel: where prompts part from earlier ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace ashlar::storage {

// Histograms of where a prompt was parted from, in which later requests count more: by the depth from its start
// (instructions of one length, then something else), and by the distance from its end (a document of any length, then a
// short question). Each is asked in the proportion in which it foretold the last requests. (Sparse Prefix Caching,
// §4.2, has the first one.)
class OverlapModel {
 public:
  // A request had `depth` tokens in common with an earlier one, whose prompt had `length`: no more, or fewer when the
  // earlier one's decoded tokens were common, too.
  void Observe(uint64_t depth, uint64_t length);
  uint64_t observed() const { return observed_; }

  struct Mass {
    uint64_t depth = 0;
    double weight = 0;
  };
  // The model of where a prompt of `length` tokens will be parted from, once it is, as far as that is in (begin,
  // length]; by depth. Weights add up to the likelihood of that, one at most.
  std::vector<Mass> Between(uint64_t begin, uint64_t length) const;

 private:
  static constexpr size_t kMostDepths = 4096;  // of a histogram; then the lightest go
  static constexpr double kDecay = 1.0 / 4096;
  static constexpr uint64_t kNear = 16;       // tokens: a guess that is off by no more was a good one
  static constexpr double kForesight = 0.98;  // of what earlier guesses count, a request on

  class Histogram {
   public:
    void Add(uint64_t at);
    double Share(uint64_t first, uint64_t last) const;  // of the weight of all
    double total() const { return total_; }
    const std::map<uint64_t, double>& weights() const { return weights_; }

   private:
    void Prune();
    std::map<uint64_t, double> weights_;
    double total_ = 0, unit_ = 1;  // a request's weight: it grows, so that nothing is touched in order to decay
  };

  Histogram from_start_, from_end_;
  double start_foresight_ = 0, end_foresight_ = 0;  // log-likelihood
  uint64_t observed_ = 0;
};

}  // namespace ashlar::storage
