// SPDX-License-Identifier: Apache-2.0
// A trace of recorded requests: it is refused with a reason, or gives requests whose prompts can be assembled. The
// first byte selects the format and compression; a zero byte separates the two files of stf.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz.h"
#include "tools/replay/trace.h"

namespace {

struct Folder {
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "ashlar-trace-XXXXXX").string();
    FUZZ_EXPECT(::mkdtemp(name.data()) != nullptr);
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::filesystem::path path;
};

void Write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace ashlar::replay;
  static const std::vector<std::string> formats = {"stf", "mooncake", "cc", "marconi"};
  static const Folder folder;
  if (size == 0) return 0;
  const std::string& format = formats[data[0] % formats.size()];
  const std::string packed = data[0] / formats.size() % 2 == 1 ? ".zst" : "";
  const std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::string trace = folder.path / ("trace" + packed);
  if (format == "stf") {
    const size_t part = bytes.find('\0');
    Write(trace + ".segs.jsonl", bytes.substr(0, part));
    Write(trace + ".reqs.jsonl", part == std::string::npos ? "" : bytes.substr(part + 1));
  } else {
    Write(trace, bytes);
  }
  const absl::StatusOr<Trace> read = ReadTrace(format, trace);
  if (!read.ok()) {
    FUZZ_EXPECT(absl::IsInvalidArgument(read.status()) || absl::IsDataLoss(read.status()));
    FUZZ_EXPECT(read.status().message().find("trace") != std::string::npos);  // the file, and usually the line
    return 0;
  }
  FUZZ_EXPECT(!read->requests().empty());
  double before = read->requests().front().seconds;
  std::vector<int32_t> tokens;
  for (const Trace::Request& request : read->requests()) {
    FUZZ_EXPECT(request.seconds >= before);
    before = request.seconds;
    uint64_t all = 0, prompt = 0;
    for (const Trace::Piece& piece : request.prompt) prompt += piece.tokens;
    for (const Trace::Piece& piece : request.output) all += piece.tokens;
    if (prompt + all > (1 << 16)) continue;  // takes too long
    FUZZ_EXPECT(read->Tokens(request, tokens) == prompt);
    FUZZ_EXPECT(tokens.size() == prompt + all);
  }
  return 0;
}
