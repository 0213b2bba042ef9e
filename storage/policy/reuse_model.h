// SPDX-License-Identifier: Apache-2.0
// ReuseModel: how soon a kept object will be used again, learned from earlier uses.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <numbers>

namespace ashlar::storage {

// The kinds of things whose uses are counted. Each kind has a model of its own. The first four are prefixes, by the
// reason for which they came to be worth a checkpoint; the others are objects.
enum class ReuseKind : uint8_t {
  kRequestEnd,  // behind the last decoded token: the conversation continues from there
  kBranch,      // where prompts parted: the tokens before it are shared
  kPlaced,      // where prompts are expected to part
  kEdge,        // not a prefix, but the new tokens of one prompt: used when another prompt parts from it
  kSegment,     // usable at any position
  kCheckpoint,  // that all of a namespace may resume from, a prompt's first segment among them
  kBlock,       // of a prefix
  kOwn,         // a conversation's
};
inline constexpr size_t kReuseKinds = 8;

// A *spell* is the time from one use of something (or its arrival) to its next use; time counts requests. For each kind
// and number of earlier uses, the model keeps how many spells came to each age, and how many of them ended there by a
// use: the hazard by age, in the manner of Kaplan and Meier (1958), so that unfinished spells count up to their present
// age. Ages are buckets, two an octave. A count of few cases leans on the kind's hazard, and that on a hazard that is
// equal in every bucket; with the latter the price falls as 1/age, and the order is that of least recent use.
//
// The price of an age is Gittins' index (1979) of the hazard from there on: the most uses an expected request of
// waiting that can be had by waiting up to some later age and then giving up. It is what a slot should be rented for.
class ReuseModel {
 public:
  struct Subject {
    ReuseKind kind = ReuseKind::kRequestEnd;
    uint32_t uses = 0;   // so far
    uint64_t fresh = 0;  // tokens behind the request end before it: long turns are followed differently from short ones
  };

  ReuseModel();

  // A spell ended at `age`: by a use, or because nothing is known any longer of what it is about.
  void Ended(const Subject& subject, uint64_t age, bool used);
  // The subject is given up, and its spell is followed no further: it counts as never used, until AskedForAgain.
  void GivenUp(const Subject& subject);
  void AskedForAgain(const Subject& subject, uint64_t age);
  // Reports an unfinished spell. Report all of them, each once, then call Refresh: from then on the model counts them.
  void GoesOn(const Subject& subject, uint64_t age);
  void Refresh();
  double remembered() const { return remembered_; }  // spells that ended, old ones counting less

  // Uses an expected request of keeping it, at that age.
  double Rate(const Subject& subject, uint64_t age) const { return Rate(ClassOf(subject), age); }
  // A class of subjects that the model does not tell apart.
  struct Class {
    uint8_t kind = 0, uses = 0, size = 0;
  };
  static Class ClassOf(const Subject& subject);
  double Rate(const Class& of, uint64_t age) const {
    return rates_[of.kind][of.uses][AgeBucket(age)] * factors_[of.kind][of.size];
  }

 private:
  static constexpr size_t kAges = 64, kUses = 8, kSizes = 24;
  static constexpr double kHazard = 0.05;       // of a bucket, where nothing is known
  static constexpr double kHazardWeight = 2;    // in spells
  static constexpr double kKindWeight = 4;      // of a kind's hazard against that of one number of uses
  static constexpr double kSizeWeight = 10;     // of "as others", in uses, against those of one size
  static constexpr double kRemembered = 65536;  // spells, then old ones count half

  // By age bucket. last: the number of spells whose last bucket it is. through: the sum of the parts of it that these
  // spells came through. used: how many ended there by a use. A spell that came to one age came through all buckets
  // before.
  struct Counts {
    std::array<double, kAges> last{}, through{}, used{};
  };
  // The same counts for queries. came: how many spells came to each age, parts of spells among them. used: how many
  // ended there.
  struct Known {
    std::array<double, kAges> came{}, used{};
  };
  template <typename T>
  using ByUses = std::array<std::array<T, kUses>, kReuseKinds>;
  // The number of uses in one size bucket, and the number that the hazards by age expected.
  struct Factor {
    double uses = 0, expected = 0;
  };
  using Factors = std::array<std::array<Factor, kSizes>, kReuseKinds>;

  // ⌊2 log₂ age⌋, from the bits, because it is computed for every candidate that is drawn for eviction.
  static size_t AgeBucket(uint64_t age) {
    constexpr uint64_t kHalfOctave = 6521908912666391106;  // 2^62.5
    const int octave = std::bit_width(age | 1) - 1;
    const uint64_t within = octave > 62 ? age >> 1 : age << (62 - octave);
    return std::min<size_t>(2 * static_cast<size_t>(octave) + (within > kHalfOctave ? 1 : 0), kAges - 1);
  }
  static constexpr double BucketBegin(size_t bucket) {
    return static_cast<double>(uint64_t{1} << bucket / 2) * (bucket % 2 == 0 ? 1 : std::numbers::sqrt2);
  }
  static double BucketWidth(size_t bucket) { return BucketBegin(bucket + 1) - BucketBegin(bucket); }
  static size_t UsesBucket(uint32_t uses);
  static size_t SizeBucket(uint64_t tokens) { return std::min<size_t>(std::bit_width(tokens | 1) - 1, kSizes - 1); }
  static constexpr uint64_t kForever = ~uint64_t{0};
  static double PartOf(size_t bucket, uint64_t age);  // that is over at that age, which lies in it
  static void RecordAge(Counts& counts, uint64_t age, bool used);
  double Expected(const Subject& subject, uint64_t age) const;
  void Erase();
  void SetRates(size_t kind, size_t uses, const Known& counts, const Known& kinds);

  ByUses<Counts> ended_{}, going_on_{};
  Factors ended_factors_{}, going_on_factors_{};
  double remembered_ = 0;
  // Kinds that Refresh must look at: kinds with spells that have ended, are unfinished, or were unfinished at the last
  // one.
  std::array<bool, kReuseKinds> changed_{}, goes_on_{};

  // Of the last Refresh; hazards summed over all ages before.
  ByUses<std::array<double, kAges + 1>> hazards_before_{};
  ByUses<std::array<double, kAges>> rates_{};
  std::array<std::array<double, kSizes>, kReuseKinds> factors_{};
};

}  // namespace ashlar::storage
