// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/trace.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "tools/replay/lines.h"

namespace ashlar::replay {

using Json = nlohmann::json;

namespace {

constexpr uint64_t kMostBlocks = 1 << 16;       // blocks of one request
constexpr uint64_t kMostBlockTokens = 1 << 20;  // tokens of one block
constexpr double kMostSeconds = 1e12;           // a time stamp, in any unit

// The JSON library by itself would convert −1 and 1e30 to some number.
uint64_t Natural(const Json& value, const char* field, uint64_t most) {
  if (!value.is_number_integer() || (!value.is_number_unsigned() && value.get<int64_t>() < 0) ||
      value.get<uint64_t>() > most) {
    throw std::invalid_argument(absl::StrCat(field, ": expected a whole number from 0 to ", most));
  }
  return value.get<uint64_t>();
}

std::vector<uint64_t> Naturals(const Json& values, const char* field, uint64_t most) {
  if (!values.is_array()) throw std::invalid_argument(absl::StrCat(field, ": expected a list"));
  std::vector<uint64_t> numbers;
  for (const Json& value : values) numbers.push_back(Natural(value, field, most));
  return numbers;
}

double Time(const Json& value, const char* field) {
  const double time = value.is_number() ? value.get<double>() : NAN;
  if (!(std::abs(time) <= kMostSeconds))
    throw std::invalid_argument(absl::StrCat(field, ": expected a time in seconds"));
  return time;
}

std::vector<int32_t> TokensOf(const Json& values, const char* field) {
  const std::vector<uint64_t> numbers = Naturals(values, field, INT32_MAX);
  return {numbers.begin(), numbers.end()};
}

}  // namespace

uint64_t Trace::Tokens(const Request& request, std::vector<int32_t>& tokens) const {
  tokens.clear();
  for (const Piece& piece : request.prompt) Append(piece, tokens);
  const uint64_t prompt = tokens.size();
  for (const Piece& piece : request.output) Append(piece, tokens);
  return prompt;
}

// A block's tokens are unknown, but they are the same everywhere: made-up numbers replace them.
void Trace::Append(const Piece& piece, std::vector<int32_t>& tokens) const {
  if (blocks_ == 0) {
    const std::vector<int32_t>& segment = segments_[piece.id];
    tokens.insert(tokens.end(), segment.begin(), segment.begin() + piece.tokens);
    return;
  }
  const uint32_t first = piece.id * blocks_;  // distinct as long as fewer than 2³² tokens are
  for (uint32_t i = 0; i < piece.tokens; ++i) tokens.push_back(static_cast<int32_t>(first + i));
}

class TraceReader {
 public:
  absl::StatusOr<Trace> Read(const std::string& format, const std::string& path) {
    trace_.name_ = std::filesystem::path(path).filename().string();
    for (const char* suffix : {".zst", ".jsonl"}) {
      if (trace_.name_.ends_with(suffix)) trace_.name_.resize(trace_.name_.size() - std::string(suffix).size());
    }
    absl::Status status;
    if (format == "stf") {
      status = ReadStf(path);
    } else if (format == "mooncake") {
      status = ReadLines(File(path), [&](const std::string& line) { return Parse(line, &TraceReader::Mooncake); });
    } else if (format == "cc") {
      status = ReadLines(File(path), [&](const std::string& line) { return Parse(line, &TraceReader::Cc); });
    } else if (format == "marconi") {
      status = ReadLines(File(path), [&](const std::string& line) { return Parse(line, &TraceReader::Marconi); });
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat("format: ", format, " is unknown; expected stf, mooncake, cc or marconi"));
    }
    if (!status.ok()) return status;
    if (trace_.requests_.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": the trace has no requests"));
    const auto has_tokens = [](const Trace::Request& request) {
      return std::any_of(request.prompt.begin(), request.prompt.end(),
                         [](const auto& each) { return each.tokens > 0; });
    };
    if (std::none_of(trace_.requests_.begin(), trace_.requests_.end(), has_tokens)) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": all prompts are empty"));
    }
    std::stable_sort(trace_.requests_.begin(), trace_.requests_.end(),
                     [](const Trace::Request& a, const Trace::Request& b) { return a.seconds < b.seconds; });
    return std::move(trace_);
  }

 private:
  static std::string File(const std::string& path) { return Exists(path) ? path : path + ".jsonl"; }

  absl::Status Parse(const std::string& line, void (TraceReader::*read)(const Json&)) {
    try {
      (this->*read)(Json::parse(line));
      return absl::OkStatus();
    } catch (const std::exception& error) {
      return absl::InvalidArgumentError(error.what());
    }
  }

  absl::Status ReadStf(const std::string& path) {
    const absl::Status segments =
        ReadLines(path + ".segs.jsonl", [&](const std::string& line) { return Parse(line, &TraceReader::StfSegment); });
    if (!segments.ok()) return segments;
    return ReadLines(path + ".reqs.jsonl",
                     [&](const std::string& line) { return Parse(line, &TraceReader::StfRequest); });
  }

  void StfSegment(const Json& line) {
    const uint64_t id = Natural(line.at("id"), "id", UINT32_MAX);
    if (id != trace_.segments_.size()) throw std::invalid_argument(absl::StrCat("id: ", id, " is out of order"));
    trace_.segments_.push_back(TokensOf(line.at("tok"), "tok"));
  }

  void StfRequest(const Json& line) {
    Trace::Request request{.seconds = Time(line.at("ts"), "ts"), .session = Natural(line.at("sid"), "sid", UINT64_MAX)};
    const auto pieces = [&](const char* field, std::vector<Trace::Piece>& into) {
      for (const uint64_t id : Naturals(line.at(field), field, UINT32_MAX)) {
        if (id >= trace_.segments_.size()) throw std::invalid_argument(absl::StrCat(field, ": unknown segment ", id));
        const size_t tokens = trace_.segments_[id].size();
        if (tokens > 0) into.push_back({static_cast<uint32_t>(id), static_cast<uint32_t>(tokens), true});
      }
    };
    pieces("ins", request.prompt);
    pieces("outs", request.output);
    trace_.requests_.push_back(std::move(request));
  }

  void Marconi(const Json& line) {
    Trace::Request request{.seconds = Time(line.at("ts"), "ts"),
                           .session = Natural(line.at("session_id"), "session_id", UINT64_MAX)};
    const auto piece = [&](const char* field, std::vector<Trace::Piece>& into) {
      std::vector<int32_t> tokens = TokensOf(line.at(field), field);
      if (tokens.empty()) return;
      into.push_back({static_cast<uint32_t>(trace_.segments_.size()), static_cast<uint32_t>(tokens.size()), false});
      trace_.segments_.push_back(std::move(tokens));
    };
    piece("input_tokens", request.prompt);
    piece("output_tokens", request.output);
    trace_.requests_.push_back(std::move(request));
  }

  // Blocks with a name in the file, and blocks without one: decoded tokens are unknown, and no other request has them.
  uint32_t Block(uint64_t session, uint64_t id) {
    return blocks_.try_emplace({session, id}, next_block_).second ? next_block_++ : blocks_.at({session, id});
  }
  std::vector<Trace::Piece> Blocks(uint64_t session, const std::vector<uint64_t>& ids, uint64_t tokens) {
    std::vector<Trace::Piece> pieces;
    for (const uint64_t id : ids) {
      if (tokens == 0) break;
      const auto some = static_cast<uint32_t>(std::min<uint64_t>(tokens, trace_.blocks_));
      pieces.push_back({Block(session, id), some});
      tokens -= some;
    }
    while (tokens > 0) {
      const auto some = static_cast<uint32_t>(std::min<uint64_t>(tokens, trace_.blocks_));
      pieces.push_back({next_block_++, some});
      tokens -= some;
    }
    return pieces;
  }

  void Mooncake(const Json& line) {
    trace_.blocks_ = kMooncakeBlock;
    Trace::Request request{.seconds = Time(line.at("timestamp"), "timestamp") / 1000,
                           .session = trace_.requests_.size()};
    const uint64_t tokens = Natural(line.at("input_length"), "input_length", MostTokens());
    const std::vector<uint64_t> ids = Naturals(line.at("hash_ids"), "hash_ids", UINT64_MAX);
    // Traces with blocks of another length have the same fields. Read as Mooncake's they give wrong hit rates.
    if (const uint64_t blocks = (tokens + kMooncakeBlock - 1) / kMooncakeBlock; ids.size() != blocks) {
      throw std::invalid_argument(absl::StrCat("hash_ids: ", ids.size(), " blocks for input_length ", tokens,
                                               "; expected ", blocks, " blocks of ", kMooncakeBlock, " tokens"));
    }
    request.prompt = Blocks(0, ids, tokens);
    request.output = Blocks(0, {}, Natural(line.at("output_length"), "output_length", MostTokens()));
    trace_.requests_.push_back(std::move(request));
  }

  uint64_t MostTokens() const { return kMostBlocks * trace_.blocks_; }

  // Sessions start one after another, a minute apart: the file does not say when they did.
  void Cc(const Json& line) {
    if (line.contains("session")) {
      trace_.blocks_ = static_cast<uint32_t>(Natural(line.at("block"), "block", kMostBlockTokens));
      if (trace_.blocks_ == 0) throw std::invalid_argument("block: 0");
      ++session_;
      chains_.clear();
      return;
    }
    if (trace_.blocks_ == 0) throw std::invalid_argument("session: request before the first session");
    std::vector<uint64_t> ids;
    if (const uint64_t shared = Natural(line.at("l"), "l", kMostBlocks); shared > 0) {
      const std::vector<uint64_t>& earlier = chains_.at(Natural(line.at("b"), "b", UINT32_MAX));
      if (shared > earlier.size()) throw std::invalid_argument("l: exceeds the blocks of the earlier request");
      ids.assign(earlier.begin(), earlier.begin() + static_cast<ptrdiff_t>(shared));
    }
    for (const Json& run : line.at("n")) {
      const uint64_t first = Natural(run.at(0), "n", UINT64_MAX);
      const uint64_t count = Natural(run.at(1), "n", kMostBlocks - std::min(ids.size(), kMostBlocks));
      for (uint64_t i = 0; i < count; ++i) ids.push_back(first + i);
    }
    Trace::Request request{.seconds = kSessionSeconds * static_cast<double>(session_) + Time(line.at("t"), "t"),
                           .session = session_};
    request.prompt = Blocks(session_, ids, Natural(line.at("i"), "i", MostTokens()));
    request.output = Blocks(session_, {}, Natural(line.at("o"), "o", MostTokens()));
    chains_.push_back(std::move(ids));
    trace_.requests_.push_back(std::move(request));
  }

  static constexpr double kSessionSeconds = 60;
  static constexpr uint32_t kMooncakeBlock = 512;  // tokens

  Trace trace_;
  absl::flat_hash_map<std::pair<uint64_t, uint64_t>, uint32_t> blocks_;
  uint32_t next_block_ = 0;
  uint64_t session_ = 0;
  std::vector<std::vector<uint64_t>> chains_;  // chains of the sessions' requests
};

absl::StatusOr<Trace> ReadTrace(const std::string& format, const std::string& path) {
  return TraceReader().Read(format, path);
}

}  // namespace ashlar::replay
