// SPDX-License-Identifier: Apache-2.0
// ReuseModel: predicts how soon a kept object will be used again, from past uses.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numbers>

namespace ashlar::storage {

// The kinds of objects, each with its own model. The first five are prefixes, by the reason for their checkpoint.
enum class ReuseKind : uint8_t {
  kRequestEnd,  // after the last decoded token, where the conversation continues
  kContinued,   // the end of a request that a later one has continued
  kBranch,      // where prompts diverged: the tokens before it are shared
  kPlaced,      // where prompts are expected to diverge
  kEdge,        // not a prefix but the new tokens of one prompt; used when another prompt diverges from it
  kSegment,     // usable at any position
  kCheckpoint,  // shared in a namespace, including the first segment of a prompt
  kBlock,       // block of a prefix
  kOwn,         // private to a conversation
};
inline constexpr size_t kReuseKinds = 9;

// A *spell* is the time from one use of an object (or its arrival) to its next use, in requests. For each kind and
// number of earlier uses, the model counts how many spells reached each age and how many ended there by a use. That
// gives the hazard by age, estimated as by Kaplan and Meier (1958), so that unfinished spells count up to their current
// age. Ages are buckets, two per octave. With few cases, the estimate falls back to the hazard of the kind, and then to
// a constant hazard per bucket; with the latter the price falls as 1/age, which is the order of least recent use.
//
// The price at an age is Gittins' index (1979) of the hazard from there on: the largest number of uses per expected
// request of waiting that any stopping age achieves. It is the rent that a slot is worth.
//
// The model learns from uses only, and its constants do not change at run time. It neither compares policies by ghost
// caches (ARC, LeCaR) nor tunes its constants by sampled simulations (Mini-Sim, Caffeine).
class ReuseModel {
 public:
  struct Subject {
    ReuseKind kind = ReuseKind::kRequestEnd;
    uint32_t uses = 0;   // uses so far
    uint64_t fresh = 0;  // tokens after the previous request end; long turns continue differently from short ones
  };

  ReuseModel();

  // A spell ended at `age`, by a use or because the object is no longer known.
  void Ended(const Subject& subject, uint64_t age, bool used);
  // The subject was evicted and is no longer followed: its spell counts as unused, until AskedForAgain.
  void GivenUp(const Subject& subject);
  void AskedForAgain(const Subject& subject, uint64_t age);
  // Reports an unfinished spell. Report all of them once, then call Refresh, which makes the model count them.
  void GoesOn(const Subject& subject, uint64_t age);
  void Refresh();
  double remembered() const { return remembered_; }  // ended spells, with less weight for old ones

  // Expected uses per request of keeping the subject at this age.
  double Rate(const Subject& subject, uint64_t age) const { return Rate(ClassOf(subject), age); }
  // Returns the hazards of all ages up to this one, summed: the subject is unused until then with likelihood exp(−sum).
  double Hazards(const Subject& subject, uint64_t age) const;
  // A class of subjects that the model treats alike.
  struct Class {
    uint8_t kind = 0, uses = 0, size = 0;
  };
  static Class ClassOf(const Subject& subject);
  double Rate(const Class& of, uint64_t age) const {
    const Kind& kind = *kinds_[of.kind];
    return kind.rates[of.uses][AgeBucket(age)] * kind.factors[of.size];
  }

 private:
  static constexpr size_t kAges = 64, kUses = 8, kSizes = 24;
  static constexpr double kHazard = 0.05;       // hazard per bucket without data
  static constexpr double kHazardWeight = 2;    // weight in spells
  static constexpr double kKindWeight = 4;      // weight of a kind's hazard against that of one number of uses
  static constexpr double kSizeWeight = 10;     // weight, in uses, of the average against those of one size
  static constexpr double kRemembered = 65536;  // spells; older ones then count half

  // By age bucket. last: spells that ended in the bucket. through: the sum of the parts of the bucket that these spells
  // passed. used: spells that ended in the bucket by a use. A spell passed all buckets before its last.
  struct Counts {
    std::array<double, kAges> last{}, through{}, used{};
  };
  // The same counts for queries. came: spells that reached each age, including fractions. used: spells that ended there
  // by a use.
  struct Known {
    std::array<double, kAges> came{}, used{};
  };
  // Observed uses in one size bucket, and the number expected from the hazards.
  struct Factor {
    double uses = 0, expected = 0;
  };
  using Factors = std::array<Factor, kSizes>;
  struct Kind {
    std::array<Counts, kUses> ended{}, going_on{};
    Factors ended_factors{}, going_on_factors{};
    // From the last Refresh; hazards summed over all earlier ages.
    std::array<std::array<double, kAges + 1>, kUses> hazards_before{};
    std::array<std::array<double, kAges>, kUses> rates{};
    std::array<double, kSizes> factors{};
  };

  // ⌊2 log₂ age⌋, computed from the bits because it is needed for every eviction candidate.
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
  static double PartOf(size_t bucket, uint64_t age);  // fraction of the bucket before that age, which lies in it
  static void RecordAge(Counts& counts, uint64_t age, bool used);
  void Erase();
  static const Kind& Unknown();  // a kind without data
  Kind& Of(size_t kind);
  static void Refresh(Kind& kind);
  static void SetRates(Kind& kind, size_t uses, const Known& counts, const Known& kinds);

  std::array<std::unique_ptr<Kind>, kReuseKinds> own_;  // null: the kind has no data
  std::array<const Kind*, kReuseKinds> kinds_;          // its own or the unknown one
  double remembered_ = 0;
  // Kinds that Refresh must process: those with ended or unfinished spells, or with unfinished ones at the last
  // refresh.
  std::array<bool, kReuseKinds> changed_{}, goes_on_{};
};

}  // namespace ashlar::storage
