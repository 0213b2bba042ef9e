// SPDX-License-Identifier: Apache-2.0
// Optimum: an upper bound on the hits of any prefix cache, whatever its policy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "storage/prefix/prefix_entry.h"
#include "tools/replay/trace.h"

namespace ashlar::replay {

// A policy that knows the whole trace is bounded by the Lagrangian dual of its problem, which is Belady's with sizes
// and with prefixes.
//
// Request i hits its first h tokens only if the cache has kept them, and a state at h, since the last earlier request
// that had each of them: a token that was dropped after that request was not there, and no request has computed it
// since. With p(x) for the last request before i that shares more than x tokens with it, the hit takes, between
// requests t and t + 1 for all t in [p(x), i), the bytes of token x < h; and those of a state for all t in [p(h − 1),
// i). Two requests that use the same token or state do so in disjoint intervals, so what all hits take at t adds up to
// at most the capacity C. For any prices λ_t ≥ 0 of a byte at t, therefore,
//
//   Σ_i h_i ≤ C Σ_t λ_t + Σ_i max(0, max_h (h − Σ_{x<h} bytes · Λ(p(x), i) − state · Λ(p(h − 1), i))),
//
// with Λ(p, i) = Σ_{p≤t<i} λ_t, and h a multiple of the capture granularity that i shares with an earlier request. The
// right side is a bound for *every* λ, so a search for good prices needs no proof of its own. A search by
// multiplicative weights lowers it; the bound that it ends with is within a few thousandths of the lowest one on the
// shared traces.
class Optimum {
 public:
  // States at multiples of `capture` tokens.
  Optimum(const Trace& trace, const storage::PrefixCosts& costs, uint64_t capture);

  // Returns a bound on the share of the prompts' tokens that a cache of that capacity can hit.
  double TokenHitRate(uint64_t capacity_bytes) const;

 private:
  // Shared tokens of a request for which the same earlier request was the last user.
  struct Run {
    uint64_t begin = 0, end = 0;  // depths
    size_t last = 0;              // the number of that earlier request
    uint64_t resume = 0;          // deepest depth in it where a state can be; 0: none
  };
  // Returns the bound for these prices, which are per request and for the whole capacity, and by how much each request
  // overdraws the capacity, as a fraction.
  double Bound(uint64_t capacity_bytes, const std::vector<double>& prices, std::vector<double>* use) const;

  const storage::PrefixCosts costs_;
  double tokens_ = 0;                     // tokens of all prompts
  std::vector<std::vector<Run>> shared_;  // indexed by request
};

}  // namespace ashlar::replay
