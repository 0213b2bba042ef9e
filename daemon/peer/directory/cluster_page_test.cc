// SPDX-License-Identifier: Apache-2.0
// Checks the table of docs/directory.md against the constants that it is computed from.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "daemon/peer/directory/directory_keys.h"
#include "daemon/peer/directory/directory_writer.h"

namespace ashlar::daemon {
namespace {

constexpr double kObjects = 100000;  // objects that each node announces
constexpr double kMirrorBytes = 85;  // largest size of an entry (mirror.h)
constexpr double kKeepAlivesALease = 3;

std::string Number(double number) {
  std::string text = absl::StrFormat("%.0f", number);
  for (int at = static_cast<int>(text.size()) - 3; at > 0; at -= 3) text.insert(static_cast<size_t>(at), 1, ',');
  return text;
}

size_t EventBytes() {
  const EtcdDirectoryOptions options;
  EntryId id;
  id.ns.fill(1);
  id.key.fill(1);
  etcdserverpb::WatchResponse response;
  mvccpb::KeyValue* pair = response.add_events()->mutable_kv();
  pair->set_key(DirectoryKeys(options.prefix, options.cluster).EntryKey(id, 1));
  pair->set_value(EncodeHolding({.kind = ObjectKind::kCheckpoint, .bytes = 80 << 20, .depth = 100000}));
  pair->set_create_revision(100000000);
  pair->set_mod_revision(100000000);
  pair->set_version(1);
  return response.ByteSizeLong();
}

TEST(ClusterPage, TableMatchesCode) {
  std::stringstream page;
  page << std::ifstream(ASHLAR_CLUSTER_PAGE).rdbuf();
  const EtcdDirectoryOptions options;
  for (const double nodes : {10., 100., 1000.}) {
    const double rate = DirectoryWriter::Rate(options, static_cast<size_t>(nodes)), all = rate * nodes;
    const double entries = std::min(kObjects * nodes, static_cast<double>(options.mirror_entries));
    const std::string row = absl::StrFormat(
        "| %s | %s | %s | %s | %s | %s | %s | %s | %s |", Number(nodes), Number(rate), Number(all),
        Number(std::ceil(all / DirectoryWriter::kTxnOps)), Number(nodes * kKeepAlivesALease / options.lease_seconds),
        absl::StrFormat("%.2f MB/s", all * static_cast<double>(EventBytes()) / 1e6),
        absl::StrFormat("%.0f MB/s", all * nodes * static_cast<double>(EventBytes()) / 1e6),
        absl::StrFormat("%.0f MB", entries * kMirrorBytes / 1e6), absl::StrFormat("%s s", Number(kObjects / rate)));
    EXPECT_TRUE(absl::StrContains(page.str(), row)) << row;
  }
  EXPECT_TRUE(absl::StrContains(page.str(), absl::StrFormat("An event takes %d bytes", EventBytes())));
}

}  // namespace
}  // namespace ashlar::daemon
