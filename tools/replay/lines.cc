// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/lines.h"

#include <zstd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace ashlar::replay {
namespace {

constexpr size_t kLongestLine = size_t{256} << 20;  // bytes; a conversation of millions of tokens is shorter
constexpr int kLargestWindow = 27;                  // log2: what `zstd --long=27` writes

std::string Resolve(const std::string& path) {
  return !std::filesystem::exists(path) && std::filesystem::exists(path + ".zst") ? path + ".zst" : path;
}

class LineSplitter {
 public:
  LineSplitter(const std::string& path, const std::function<absl::Status(const std::string&)>& each)
      : path_(path), each_(each) {}

  absl::Status Add(const char* bytes, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (bytes[i] != '\n') {
        if (line_.size() == kLongestLine) {
          return absl::InvalidArgumentError(
              absl::StrCat(path_, ":", number_ + 1, ": line too long; expected at most ", kLongestLine, " bytes"));
        }
        line_.push_back(bytes[i]);
        continue;
      }
      if (const absl::Status status = End(); !status.ok()) return status;
    }
    return absl::OkStatus();
  }
  absl::Status End() {
    ++number_;
    const absl::Status status = line_.empty() ? absl::OkStatus() : each_(line_);
    line_.clear();
    if (status.ok()) return status;
    return absl::InvalidArgumentError(absl::StrCat(path_, ":", number_, ": ", status.message()));
  }

 private:
  const std::string& path_;
  const std::function<absl::Status(const std::string&)>& each_;
  std::string line_;
  uint64_t number_ = 0;
};

absl::Status Unpack(std::ifstream& in, const std::string& path, LineSplitter& lines) {
  const std::unique_ptr<ZSTD_DStream, decltype(&ZSTD_freeDStream)> stream(ZSTD_createDStream(), ZSTD_freeDStream);
  ZSTD_DCtx_setParameter(stream.get(), ZSTD_d_windowLogMax, kLargestWindow);
  std::vector<char> packed(ZSTD_DStreamInSize()), plain(ZSTD_DStreamOutSize());
  size_t left = 0;
  while (in.read(packed.data(), static_cast<std::streamsize>(packed.size())), in.gcount() > 0) {
    ZSTD_inBuffer input{packed.data(), static_cast<size_t>(in.gcount()), 0};
    while (input.pos < input.size) {
      ZSTD_outBuffer output{plain.data(), plain.size(), 0};
      left = ZSTD_decompressStream(stream.get(), &output, &input);
      if (ZSTD_isError(left)) return absl::DataLossError(absl::StrCat(path, ": ", ZSTD_getErrorName(left)));
      if (const absl::Status status = lines.Add(plain.data(), output.pos); !status.ok()) return status;
    }
  }
  if (left != 0) return absl::DataLossError(absl::StrCat(path, ": truncated gzip file"));
  return absl::OkStatus();
}

}  // namespace

bool Exists(const std::string& path) {
  return std::filesystem::exists(Resolve(path));
}

absl::Status ReadLines(const std::string& path, const std::function<absl::Status(const std::string& line)>& each) {
  const std::string file = Resolve(path);
  std::ifstream in(file, std::ios::binary);
  if (!in) return absl::NotFoundError(absl::StrCat(file, ": cannot be opened"));
  LineSplitter lines(file, each);
  if (absl::EndsWith(file, ".zst")) {
    if (const absl::Status status = Unpack(in, file, lines); !status.ok()) return status;
    return lines.End();
  }
  std::vector<char> bytes(1 << 16);
  while (in.read(bytes.data(), static_cast<std::streamsize>(bytes.size())), in.gcount() > 0) {
    if (const absl::Status status = lines.Add(bytes.data(), static_cast<size_t>(in.gcount())); !status.ok()) {
      return status;
    }
  }
  return lines.End();
}

}  // namespace ashlar::replay
