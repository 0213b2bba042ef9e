// PeerRates: how long copies from each other node take, as measured.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "storage/executor.h"

namespace ashlar::daemon {

// The metadata thread only. The latest measurements count most; each counts by its bytes.
class PeerRates {
 public:
  // A call was answered after so long.
  void Answered(const std::string& node, storage::Nanos took);
  // A call was not answered.
  void Failed(const std::string& node, storage::Nanos now);
  // Returns whether to ask a node that has not answered lately: after each failure it is left alone for longer.
  bool MayAsk(const std::string& node, storage::Nanos now) const;
  uint32_t failures(const std::string& node) const;  // since it has answered
  // So many bytes came in so long, waiting for others' bytes included.
  void Came(const std::string& node, uint64_t bytes, storage::Nanos took);

  // Estimates the time until an object that is asked for now is here. 0: nothing is known of the node yet.
  storage::Nanos Estimate(const std::string& node, uint64_t bytes) const;

 private:
  static constexpr double kKept = 0.9;  // of earlier measurements at each new one

  struct Rate {
    double bytes = 0, nanos = 0;
    double answers = 0, answer_nanos = 0;
    uint32_t failures = 0;
    storage::Nanos failed_at = 0;
  };
  std::map<std::string, Rate> rates_;
};

}  // namespace ashlar::daemon
