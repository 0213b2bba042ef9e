// SPDX-License-Identifier: Apache-2.0
// Recorded requests, from files in published trace formats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace ashlar::replay {

// Prompts consist of pieces that many requests share, and are assembled when a request is replayed: a trace of a
// hundred million tokens takes as little memory as its file.
class Trace {
 public:
  struct Piece {
    uint32_t id = 0;        // ID of a segment or a block
    uint32_t tokens = 0;    // number of its first tokens
    bool boundary = false;  // the file marks it as a separate segment
  };
  struct Request {
    double seconds = 0;
    uint64_t session = 0;
    std::vector<Piece> prompt, output;
  };

  const std::string& name() const { return name_; }
  const std::vector<Request>& requests() const { return requests_; }
  bool has_boundaries() const { return blocks_ == 0; }
  // Seconds from the first request to the last. Sizing scales a replay's capacity by the rate that follows from it.
  double span_seconds() const { return requests_.back().seconds - requests_.front().seconds; }
  // The prompt's tokens, then the decoded ones; returns the number of the prompt's tokens.
  uint64_t Tokens(const Request& request, std::vector<int32_t>& tokens) const;

 private:
  friend class TraceReader;
  void Append(const Piece& piece, std::vector<int32_t>& tokens) const;

  std::string name_;
  std::vector<Request> requests_;
  std::vector<std::vector<int32_t>> segments_;
  uint32_t blocks_ = 0;  // tokens of a block; 0: pieces are segments
};

// `format`: stf (NAME stands for NAME.segs.jsonl[.zst] and NAME.reqs.jsonl[.zst]), mooncake, cc or marconi (a file, or
// its name without .jsonl[.zst]). Requests are in the order of their time. INVALID_ARGUMENT that names the file, line
// and field; NOT_FOUND.
absl::StatusOr<Trace> ReadTrace(const std::string& format, const std::string& path);

}  // namespace ashlar::replay
