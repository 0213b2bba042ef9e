// SPDX-License-Identifier: Apache-2.0
// A client's bytes on the event addresses, cut at any place: the daemon keeps a bounded amount of them.
#include <string>
#include <vector>

#include "daemon/events/zmtp.h"
#include "tests/fuzz/fuzz.h"

namespace {

using namespace ashlar::daemon;

// False: it was refused.
bool Read(ZmtpReader& reader, const char* data, size_t size, std::vector<ZmtpInput>& all) {
  const auto inputs = reader.Receive({data, size});
  if (!inputs.ok()) {
    const bool named = absl::IsInvalidArgument(inputs.status()) || absl::IsFailedPrecondition(inputs.status());
    FUZZ_EXPECT(named && !inputs.status().message().empty());
    return false;
  }
  all.insert(all.end(), inputs->begin(), inputs->end());
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const ZmtpSocket own = data[0] % 2 == 0 ? ZmtpSocket::kPub : ZmtpSocket::kRouter;
  const char* const bytes = reinterpret_cast<const char*>(data) + 1;
  std::vector<ZmtpInput> at_once, byte_by_byte;
  ZmtpReader whole(own), cut(own);
  const bool taken = Read(whole, bytes, size - 1, at_once);
  bool also = true;
  for (size_t i = 0; i + 1 < size && also; ++i) also = Read(cut, bytes + i, 1, byte_by_byte);
  FUZZ_EXPECT(taken == also);
  if (!taken) return 0;
  FUZZ_EXPECT(at_once.size() == byte_by_byte.size());
  for (size_t i = 0; i < at_once.size(); ++i) {
    FUZZ_EXPECT(at_once[i].kind == byte_by_byte[i].kind && at_once[i].frames == byte_by_byte[i].frames);
    FUZZ_EXPECT(at_once[i].frames.size() <= ZmtpReader::kMaxFrames);
    for (const std::string& frame : at_once[i].frames) FUZZ_EXPECT(frame.size() <= ZmtpReader::kMaxFrameBytes);
  }
  return 0;
}
