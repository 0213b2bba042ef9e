// SPDX-License-Identifier: Apache-2.0
// RocksDB's write-ahead log as a start finds it: arbitrary bytes, and damaged logs.
#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "storage/tier/record_log.h"
#include "tests/fuzz/fuzz.h"

namespace {

using namespace ashlar::storage;

constexpr size_t kFragmentHeader = 7, kMostBytes = 100'000, kMostBatches = 20;

// Expects that a log of the batches found has the same batches.
void CheckFound(std::string_view bytes) {
  const RecordLogScan scan = ScanRecordLog(bytes);
  size_t taken = 0;
  for (const std::string& batch : scan.batches) taken += kFragmentHeader + batch.size();
  FUZZ_EXPECT(taken <= bytes.size());
  const RecordLogScan again = ScanRecordLog(EncodeRecordLog(scan.batches));
  FUZZ_EXPECT(again.batches == scan.batches && !again.whole_after_damage);
}

// The bytes decide the parts of a log, and its damage.
class Story {
 public:
  explicit Story(std::string_view bytes) : bytes_(bytes) {}

  bool empty() const { return bytes_.empty(); }
  size_t Number() {
    uint16_t number = 0;
    std::memcpy(&number, bytes_.data(), std::min(sizeof number, bytes_.size()));
    bytes_.remove_prefix(std::min(sizeof number, bytes_.size()));
    return number;
  }
  // Up to 64 bytes of the input, repeated.
  std::string Batch() {
    const size_t size = Number();
    const std::string_view piece = bytes_.substr(0, Number() % 64);
    bytes_.remove_prefix(piece.size());
    std::string batch(size, piece.empty() ? 'x' : piece[0]);
    for (size_t i = 0; i < size && !piece.empty(); ++i) batch[i] = piece[i % piece.size()];
    return batch;
  }

 private:
  std::string_view bytes_;
};

// Each of `some` is among `all`, in the same order.
bool Among(const std::vector<std::string>& some, const std::vector<std::string>& all) {
  size_t next = 0;
  for (const std::string& each : all) next += next < some.size() && some[next] == each ? 1 : 0;
  return next == some.size();
}

// Damage loses the damaged batches, and creates none.
void CheckDamaged(Story story) {
  const size_t kind = story.Number(), at = story.Number() * 4, length = 1 + story.Number();
  std::vector<std::string> batches;
  std::vector<size_t> begins = {0};
  while (!story.empty() && begins.back() < kMostBytes && batches.size() < kMostBatches) {
    batches.push_back(story.Batch());
    begins.push_back(EncodeRecordLog(batches).size());
  }
  std::string log = EncodeRecordLog(batches);
  const RecordLogScan before = ScanRecordLog(log);
  FUZZ_EXPECT(before.batches == batches && !before.whole_after_damage);
  if (log.empty()) return;
  const size_t from = at % log.size();
  const size_t to = kind % 3 == 0 ? from + 1 : kind % 3 == 1 ? std::min(log.size(), from + length) : log.size();
  if (kind % 3 == 0) log[from] = static_cast<char>(log[from] ^ (1 << kind / 3 % 8));
  if (kind % 3 == 1) std::fill(log.begin() + static_cast<ptrdiff_t>(from), log.begin() + static_cast<ptrdiff_t>(to), 0);
  if (kind % 3 == 2) log.resize(from);
  std::vector<std::string> untouched;
  for (size_t i = 0; i < batches.size(); ++i) {
    if (begins[i + 1] <= from || begins[i] >= to) untouched.push_back(batches[i]);
  }
  const RecordLogScan scan = ScanRecordLog(log);
  FUZZ_EXPECT(Among(scan.batches, batches));
  FUZZ_EXPECT(Among(untouched, scan.batches));
  FUZZ_EXPECT(kind % 3 != 2 || !scan.whole_after_damage);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  CheckFound(bytes);
  // If a batch that contains a whole fragment is damaged, that fragment is revealed: such inputs are skipped.
  if (size > 0 && ScanRecordLog(bytes).batches.empty()) CheckDamaged(Story(bytes));
  return 0;
}
