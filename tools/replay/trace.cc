#include "tools/replay/trace.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "tools/replay/lines.h"

namespace ashlar::replay {

using Json = nlohmann::json;

uint64_t Trace::Tokens(const Request& request, std::vector<int32_t>& tokens) const {
  tokens.clear();
  for (const Piece& piece : request.prompt) Append(piece, tokens);
  const uint64_t prompt = tokens.size();
  for (const Piece& piece : request.output) Append(piece, tokens);
  return prompt;
}

// A block's tokens are not known, only that they are the same wherever it stands: numbers stand for them.
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
      return absl::InvalidArgumentError(absl::StrCat("format: ", format, " is none of stf, mooncake, cc, marconi"));
    }
    if (!status.ok()) return status;
    if (trace_.requests_.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": has no requests"));
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
    const auto id = line.at("id").get<uint32_t>();
    if (id != trace_.segments_.size()) throw std::invalid_argument(absl::StrCat("id: ", id, " is out of order"));
    trace_.segments_.push_back(line.at("tok").get<std::vector<int32_t>>());
  }

  void StfRequest(const Json& line) {
    Trace::Request request{.seconds = line.at("ts").get<double>(), .session = line.at("sid").get<uint64_t>()};
    const auto pieces = [&](const char* field, std::vector<Trace::Piece>& into) {
      for (const auto id : line.at(field).get<std::vector<uint32_t>>()) {
        if (id >= trace_.segments_.size()) throw std::invalid_argument(absl::StrCat(field, ": no segment ", id));
        const size_t tokens = trace_.segments_[id].size();
        if (tokens > 0) into.push_back({id, static_cast<uint32_t>(tokens), true});
      }
    };
    pieces("ins", request.prompt);
    pieces("outs", request.output);
    trace_.requests_.push_back(std::move(request));
  }

  void Marconi(const Json& line) {
    Trace::Request request{.seconds = line.at("ts").get<double>(), .session = line.at("session_id").get<uint64_t>()};
    const auto piece = [&](const char* field, std::vector<Trace::Piece>& into) {
      auto tokens = line.at(field).get<std::vector<int32_t>>();
      if (tokens.empty()) return;
      into.push_back({static_cast<uint32_t>(trace_.segments_.size()), static_cast<uint32_t>(tokens.size()), false});
      trace_.segments_.push_back(std::move(tokens));
    };
    piece("input_tokens", request.prompt);
    piece("output_tokens", request.output);
    trace_.requests_.push_back(std::move(request));
  }

  // Blocks by the file's names, and those that no name stands for: what is decoded is not known, and nobody else has
  // it.
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
    trace_.blocks_ = 512;
    Trace::Request request{.seconds = line.at("timestamp").get<double>() / 1000, .session = trace_.requests_.size()};
    request.prompt =
        Blocks(0, line.at("hash_ids").get<std::vector<uint64_t>>(), line.at("input_length").get<uint64_t>());
    request.output = Blocks(0, {}, line.at("output_length").get<uint64_t>());
    trace_.requests_.push_back(std::move(request));
  }

  // Sessions start one after another, a minute apart: the file does not say when they did.
  void Cc(const Json& line) {
    if (line.contains("session")) {
      trace_.blocks_ = line.at("block").get<uint32_t>();
      ++session_;
      chains_.clear();
      return;
    }
    std::vector<uint64_t> ids;
    if (const auto shared = line.at("l").get<size_t>(); shared > 0) {
      const std::vector<uint64_t>& earlier = chains_.at(line.at("b").get<size_t>());
      if (shared > earlier.size()) throw std::invalid_argument("l: more blocks than the earlier request has");
      ids.assign(earlier.begin(), earlier.begin() + static_cast<ptrdiff_t>(shared));
    }
    for (const Json& run : line.at("n")) {
      for (uint64_t i = 0; i < run.at(1).get<uint64_t>(); ++i) ids.push_back(run.at(0).get<uint64_t>() + i);
    }
    Trace::Request request{.seconds = kSessionSeconds * static_cast<double>(session_) + line.at("t").get<double>(),
                           .session = session_};
    request.prompt = Blocks(session_, ids, line.at("i").get<uint64_t>());
    request.output = Blocks(session_, {}, line.at("o").get<uint64_t>());
    chains_.push_back(std::move(ids));
    trace_.requests_.push_back(std::move(request));
  }

  static constexpr double kSessionSeconds = 60;

  Trace trace_;
  absl::flat_hash_map<std::pair<uint64_t, uint64_t>, uint32_t> blocks_;
  uint32_t next_block_ = 0;
  uint64_t session_ = 0;
  std::vector<std::vector<uint64_t>> chains_;  // of the session's requests
};

absl::StatusOr<Trace> ReadTrace(const std::string& format, const std::string& path) {
  return TraceReader().Read(format, path);
}

}  // namespace ashlar::replay
