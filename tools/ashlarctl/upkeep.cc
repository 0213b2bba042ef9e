// SPDX-License-Identifier: Apache-2.0
// ashlarctl ls, erase, verify, reload: operations on many objects, and on the configuration.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/byte_size.h"
#include "proto/invalid.h"
#include "proto/key.h"
#include "proto/outcome.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/format.h"
#include "tools/ashlarctl/texts.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

constexpr uint64_t kDefaultLimit = 1000;
constexpr uint32_t kPage = 1000;
constexpr std::chrono::milliseconds kUpkeepPoll{200};
constexpr double kErasePatience = 60, kOneCall = 10, kMostPatience = 366.0 * 24 * 3600;

std::string KindName(uint32_t kind) {
  return std::string(Name(static_cast<ObjectKind>(kind)));
}

absl::StatusOr<uint32_t> KindFrom(const std::string& name) {
  for (const ObjectKind kind :
       {ObjectKind::kSegment, ObjectKind::kPrefixBlock, ObjectKind::kCheckpoint, ObjectKind::kSpan}) {
    if (Name(kind) == name) return static_cast<uint32_t>(kind);
  }
  return Invalid("--kind: unknown kind \"", name, "\"; expected segment, prefix_page, checkpoint or span");
}

absl::StatusOr<uint32_t> TierFrom(const std::string& name) {
  for (const TierKind tier : {TierKind::kHbm, TierKind::kDram, TierKind::kSsd}) {
    if (Name(tier) == name) return static_cast<uint32_t>(tier);
  }
  return Invalid("--tier: unknown tier \"", name, "\"; expected hbm, dram or ssd");
}

absl::StatusOr<uint64_t> NumberFrom(const Arguments& arguments, const char* option, uint64_t otherwise) {
  if (!arguments.Has(option)) return otherwise;
  uint64_t number = 0;
  if (!absl::SimpleAtoi(arguments.Get(option), &number)) return Invalid("--", option, ": expected a number");
  return number;
}

std::vector<std::string> TierNames(const google::protobuf::RepeatedField<uint32_t>& tiers) {
  std::vector<std::string> names;
  for (const uint32_t tier : tiers) names.push_back(TierName(tier));
  return names;
}

json ObjectJson(const v1::ListedObject& object) {
  return {{"tenant", object.tenant()},
          {"namespace", Hex(object.ns())},
          {"key", Hex(object.key())},
          {"kind", KindName(object.kind())},
          {"tokens", object.tokens()},
          {"bytes", object.bytes()},
          {"tiers", TierNames(object.tiers())},
          {"uses", object.uses()},
          {"references", object.references()},
          {"pinned", object.pinned()},
          {"own", object.own()},
          {"age_seconds", object.age_seconds()},
          {"idle_seconds", object.idle_seconds()},
          {"shard", object.shard()},
          {"of_shards", object.of_shards()}};
}

std::string ObjectLine(const v1::ListedObject& object) {
  const std::string shard =
      object.of_shards() > 1 ? absl::StrCat(" shard ", object.shard(), " of ", object.of_shards()) : "";
  return absl::StrFormat("%-12s %s  %-11s %7u tokens %10s  %-9s used %u, idle %s, age %s%s%s%s\n", object.tenant(),
                         ShortHex(object.key()), KindName(object.kind()), object.tokens(), Bytes(object.bytes()),
                         absl::StrJoin(TierNames(object.tiers()), ","), object.uses(), Duration(object.idle_seconds()),
                         Duration(object.age_seconds()), object.references() > 0 ? ", in use" : "",
                         object.pinned() ? ", pinned" : "", shard);
}

absl::StatusOr<v1::ListRequest> ListingOf(const Arguments& arguments, AdminClient& client) {
  v1::ListRequest request;
  request.set_tenant(arguments.Get("tenant"));
  const absl::StatusOr<std::string> ns = NamespaceBytes(arguments, client);
  if (!ns.ok()) return ns.status();
  request.set_ns(*ns);
  if (arguments.Has("kind")) {
    const absl::StatusOr<uint32_t> kind = KindFrom(arguments.Get("kind"));
    if (!kind.ok()) return kind.status();
    request.set_kind(*kind);
  }
  if (arguments.Has("tier")) {
    const absl::StatusOr<uint32_t> tier = TierFrom(arguments.Get("tier"));
    if (!tier.ok()) return tier.status();
    request.set_tier(*tier);
  }
  const absl::StatusOr<uint64_t> after = NumberFrom(arguments, "after", 0);
  if (!after.ok()) return after.status();
  request.set_after(*after);
  return request;
}

Answer Described(const v1::EraseReply& reply, bool dry_run) {
  Answer answer{.json = {{"dry_run", dry_run},
                         {"objects", reply.objects()},
                         {"bytes", reply.bytes()},
                         {"leased_objects", reply.leased_objects()},
                         {"leased_bytes", reply.leased_bytes()},
                         {"tiers", json::object()},
                         {"nodes", json::array()},
                         {"done", reply.done()},
                         {"on_disk", reply.on_disk()},
                         {"not_overwritten", reply.not_overwritten()}}};
  std::string tiers;
  for (const v1::TierBytes& tier : reply.tiers()) {
    answer.json["tiers"][TierName(tier.tier())] = tier.bytes();
    absl::StrAppend(&tiers, tiers.empty() ? ": " : ", ", TierName(tier.tier()), " ", Bytes(tier.bytes()));
  }
  answer.text = absl::StrCat(dry_run ? "would erase " : "erased: ", reply.objects(), " objects, ", Bytes(reply.bytes()),
                             tiers, "\n");
  if (reply.leased_objects() > 0) {
    absl::StrAppend(&answer.text, reply.leased_objects(), " of them are in use: ", Bytes(reply.leased_bytes()),
                    " leave", dry_run ? "" : "s", " memory with their leases\n");
  }
  if (dry_run) return answer;
  std::vector<std::string> waits;
  for (const v1::EraseNode& node : reply.nodes()) {
    answer.json["nodes"].push_back({{"node", node.node()}, {"done", node.done()}});
    if (!node.done()) waits.push_back(node.node());
  }
  if (!waits.empty()) {
    answer.failed = true;
    absl::StrAppend(&answer.text, "not acknowledged yet by, so data may return from: ", absl::StrJoin(waits, ", "),
                    ". Run the command again.\n");
  } else if (reply.nodes_size() > 0) {
    absl::StrAppend(&answer.text, "erased by all ", reply.nodes_size(),
                    " present nodes; an absent node erases when it returns within 30 days\n");
  } else if (!reply.done()) {
    answer.failed = true;
    absl::StrAppend(
        &answer.text,
        "lookups no longer find the objects, but the disk has not acknowledged: after a crash they may come "
        "back. Run the command again.\n");
  }
  if (!reply.not_overwritten().empty()) {
    absl::StrAppend(&answer.text, "some bytes could not be overwritten: ", reply.not_overwritten(), "\n");
  }
  return answer;
}

std::string Summary(const v1::VerifyReply& reply) {
  uint64_t copies = 0, bytes = 0, damaged = 0;
  for (const v1::VerifiedTier& tier : reply.tiers()) {
    copies += tier.copies();
    bytes += tier.bytes();
    damaged += tier.damaged();
  }
  return absl::StrCat(copies, " copies, ", Bytes(bytes), " in ", Duration(reply.seconds()), "; ", damaged, " damaged");
}

Answer Described(const v1::VerifyReply& reply) {
  Answer answer{.json = {{"running", reply.running()},
                         {"requested", reply.requested()},
                         {"pass", reply.pass()},
                         {"seconds", reply.seconds()},
                         {"ended_seconds_ago", nullptr},
                         {"tiers", json::array()},
                         {"skipped", reply.skipped()},
                         {"damaged", json::array()},
                         {"background_bytes_per_second", reply.background_bytes_per_second()}}};
  if (reply.pass() > 0 && !reply.running()) answer.json["ended_seconds_ago"] = reply.ended_seconds_ago();
  if (reply.pass() == 0) answer.text = "no verification yet\n";
  if (reply.pass() > 0) {
    answer.text = absl::StrCat(reply.running() ? "running: " : "verified: ", Summary(reply), "\n");
  }
  for (const v1::VerifiedTier& tier : reply.tiers()) {
    answer.json["tiers"].push_back({{"tier", TierName(tier.tier())},
                                    {"copies", tier.copies()},
                                    {"bytes", tier.bytes()},
                                    {"damaged", tier.damaged()}});
    absl::StrAppend(&answer.text, "  ", TierName(tier.tier()), ": ", tier.copies(), " copies, ", Bytes(tier.bytes()),
                    ", ", tier.damaged(), " damaged\n");
  }
  for (const v1::DamagedCopy& copy : reply.damaged()) {
    answer.json["damaged"].push_back({{"tenant", copy.tenant()},
                                      {"namespace", Hex(copy.ns())},
                                      {"key", Hex(copy.key())},
                                      {"kind", KindName(copy.kind())},
                                      {"tier", TierName(copy.tier())},
                                      {"bytes", copy.bytes()},
                                      {"reason", ReasonName(copy.reason())}});
    absl::StrAppend(&answer.text, "  dropped from ", TierName(copy.tier()), ": ", copy.tenant(), " ", Hex(copy.key()),
                    ", ", KindName(copy.kind()), " of ", Bytes(copy.bytes()), ", ", ReasonName(copy.reason()), "\n");
  }
  if (reply.skipped() > 0) {
    absl::StrAppend(&answer.text, "  in a GPU's memory, not verified: ", reply.skipped(), " copies\n");
  }
  answer.failed = !answer.json["damaged"].empty();
  return answer;
}

absl::StatusOr<v1::VerifyReply> AwaitVerified(AdminClient& client, v1::VerifyReply reply) {
  const bool terminal = isatty(STDERR_FILENO) == 1;
  const uint64_t pass = reply.pass();
  while (reply.running() && reply.pass() == pass) {
    if (terminal) std::fprintf(stderr, "\r\033[K%s", Summary(reply).c_str());
    std::this_thread::sleep_for(kUpkeepPoll);
    v1::VerifyReply next;
    v1::GetVerifyRequest request;
    request.set_pass(pass);
    if (absl::Status status = client.GetVerify(request, &next); !status.ok()) return status;
    if (next.pass() != pass) break;  // another operator has started one
    reply = std::move(next);
  }
  if (terminal) std::fputs("\r\033[K", stderr);
  return reply;
}

}  // namespace

absl::StatusOr<Answer> Ls(const Arguments& arguments, AdminClient& client) {
  absl::StatusOr<v1::ListRequest> request = ListingOf(arguments, client);
  if (!request.ok()) return request.status();
  const absl::StatusOr<uint64_t> limit = NumberFrom(arguments, "limit", kDefaultLimit);
  if (!limit.ok()) return limit.status();
  if (*limit == 0) return Invalid("--limit: 0; expected at least 1");
  Answer answer{.json = {{"objects", json::array()}, {"next", nullptr}, {"more", false}}};
  uint64_t listed = 0, bytes = 0;
  bool more = true;
  while (more && listed < *limit) {
    request->set_most(static_cast<uint32_t>(std::min<uint64_t>(kPage, *limit - listed)));
    v1::ListReply reply;
    if (absl::Status status = client.List(*request, &reply); !status.ok()) return status;
    for (const v1::ListedObject& object : reply.objects()) {
      answer.json["objects"].push_back(ObjectJson(object));
      absl::StrAppend(&answer.text, ObjectLine(object));
      bytes += object.bytes();
    }
    listed += static_cast<uint64_t>(reply.objects_size());
    request->set_after(reply.next());
    more = reply.more();
  }
  absl::StrAppend(&answer.text, listed, " objects, ", Bytes(bytes), "\n");
  answer.json["more"] = more;
  if (more) {
    answer.json["next"] = request->after();
    absl::StrAppend(&answer.text, "more objects: continue with --after ", request->after(), "\n");
  }
  return answer;
}

absl::StatusOr<Answer> Erase(const Arguments& arguments, AdminClient& client) {
  if (!arguments.Has("tenant") && !arguments.Has("namespace")) {
    return Invalid("--tenant: --tenant or --namespace is required");
  }
  v1::EraseRequest request;
  request.set_tenant(arguments.Get("tenant"));
  const absl::StatusOr<std::string> ns = NamespaceBytes(arguments, client);
  if (!ns.ok()) return ns.status();
  request.set_ns(*ns);
  request.set_dry_run(arguments.Has("dry-run"));
  request.set_this_node(arguments.Has("this-node"));
  double seconds = kErasePatience;
  if (arguments.Has("seconds") && (!absl::SimpleAtod(arguments.Get("seconds"), &seconds) || !std::isfinite(seconds) ||
                                   seconds <= 0 || seconds > kMostPatience)) {
    return Invalid("--seconds: expected a number of seconds, at most a year");
  }
  const auto begin = std::chrono::steady_clock::now();
  v1::EraseReply reply;
  for (double left = seconds; left > 0 && !reply.done();) {
    request.set_wait_seconds(std::min(left, kOneCall));
    if (absl::Status status = client.Erase(request, &reply); !status.ok()) return status;
    if (request.dry_run()) break;
    request.set_erasure(reply.erasure());
    left = seconds - std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  return Described(reply, request.dry_run());
}

absl::StatusOr<Answer> Verify(const Arguments& arguments, AdminClient& client) {
  v1::VerifyReply reply;
  if (arguments.Has("status")) {
    if (absl::Status status = client.GetVerify(v1::GetVerifyRequest(), &reply); !status.ok()) return status;
    return Described(reply);
  }
  v1::VerifyRequest request;
  if (arguments.Has("rate")) {
    const absl::StatusOr<uint64_t> rate = ParseByteSize(arguments.Get("rate"));
    if (!rate.ok()) return Invalid("--rate: ", rate.status().message());
    if (*rate == 0) return Invalid("--rate: 0; expected at least 1 byte per second");
    request.set_bytes_per_second(*rate);
  }
  if (absl::Status status = client.Verify(request, &reply); !status.ok()) return status;
  if (arguments.Has("no-wait")) return Described(reply);
  const absl::StatusOr<v1::VerifyReply> ended = AwaitVerified(client, std::move(reply));
  if (!ended.ok()) return ended.status();
  return Described(*ended);
}

absl::StatusOr<Answer> Reload(const Arguments& arguments, AdminClient& client) {
  v1::ReloadRequest request;
  request.set_dry_run(arguments.Has("dry-run"));
  v1::ReloadReply reply;
  if (absl::Status status = client.Reload(request, &reply); !status.ok()) return status;
  Answer answer{.json = {{"dry_run", request.dry_run()}, {"changes", json::array()}}};
  for (const v1::ConfigChange& change : reply.changes()) {
    answer.json["changes"].push_back(
        {{"field", change.field()}, {"before", change.before()}, {"after", change.after()}});
    absl::StrAppend(&answer.text, change.field(), ": ", change.before(), " → ", change.after(), "\n");
  }
  if (reply.changes().empty()) answer.text = "no changes\n";
  return answer;
}

}  // namespace ashlar::ctl
