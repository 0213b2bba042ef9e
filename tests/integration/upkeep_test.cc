// SPDX-License-Identifier: Apache-2.0
// An operator lists, erases and verifies the objects of a real daemon, reloads its configuration, and enables its
// sandbox.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "tests/integration/ashlarctl_run.h"
#include "tests/integration/corrupt.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/prefix_engine.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

using nlohmann::json;
using testing::Each;
using testing::HasSubstr;
using testing::Not;

const DaemonOptions kWithDisk{.dram = "16MiB", .arena = "1MiB", .ssd = "64MiB", .admission = "all"};

class Upkeep : public testing::Test {
 protected:
  explicit Upkeep(const DaemonOptions& options = kWithDisk) : options_(options), daemon_(options) {}

  Ended Run(const std::string& arguments) { return RunAshlarctl(ASHLARCTL, arguments, daemon_.admin_socket()); }
  json Ask(const std::string& arguments, int code = 0) {
    const Ended ended = Run(arguments + " --json");
    EXPECT_EQ(ended.code, code) << ended.output;
    return json::parse(ended.output, nullptr, /*allow_exceptions=*/false);
  }
  size_t OnDisk() { return Ask("ls --tier ssd")["objects"].size(); }
  // Publishes a prompt of three segments, and waits until the disk has all of it.
  void PublishOnDisk(TestEngine& engine, uint64_t prompt) {
    engine.PublishPrompt(MakePrompt(prompt, 3, 60));
    EXPECT_TRUE(Eventually([&] { return Ask("stats")["objects"] == OnDisk(); }));
  }
  static size_t Hits(TestEngine& engine, uint64_t prompt) {
    size_t hits = 0;
    const Match match = engine.Lookup(MakePrompt(prompt, 3, 60));
    for (const auto& segment : match.segments()) hits += segment.hit() ? 1 : 0;
    return hits;
  }
  std::string AuditFile() const { return daemon_.directory() + "/audit.jsonl"; }
  std::vector<json> Audited() const {
    std::ifstream file(AuditFile());
    std::vector<json> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(json::parse(line));
    return lines;
  }

  DaemonOptions options_;
  DaemonProcess daemon_;
};

TEST_F(Upkeep, ListsPageByPage) {
  TestEngine engine(daemon_.client_options());
  for (const uint64_t prompt : {1, 2, 3}) PublishOnDisk(engine, prompt);
  const json all = Ask("ls");
  ASSERT_EQ(all["objects"].size(), 9u);
  EXPECT_FALSE(all["more"].get<bool>());
  EXPECT_EQ(all["next"], nullptr);
  EXPECT_EQ(all["objects"][0]["tenant"], "default");
  EXPECT_EQ(all["objects"][0]["tiers"], json::array({"dram", "ssd"}));
  EXPECT_EQ(all["objects"][0]["tokens"], 60);
  const json first = Ask("ls --limit 4");
  EXPECT_EQ(first["objects"].size(), 4u);
  EXPECT_TRUE(first["more"].get<bool>());
  const json rest = Ask("ls --limit 100 --after " + first["next"].dump());
  ASSERT_EQ(rest["objects"].size(), 5u);
  EXPECT_EQ(rest["objects"][0]["key"], all["objects"][4]["key"]);
  EXPECT_EQ(Ask("ls --kind checkpoint")["objects"].size(), 3u);
  EXPECT_EQ(Ask("ls --tenant default --namespace " + all["objects"][0]["namespace"].get<std::string>().substr(0, 8) +
                " --kind segment --tier dram")["objects"]
                .size(),
            6u);
  EXPECT_THAT(Run("ls --limit 1").output, HasSubstr("more objects: continue with --after "));
  EXPECT_EQ(Run("ls --kind poem").code, 2);
  EXPECT_THAT(Run("ls --tenant nobody").output, HasSubstr("tenant: \"nobody\""));
}

TEST_F(Upkeep, ErasedObjectsDoNotReturnAfterKill) {
  {
    TestEngine engine(daemon_.client_options());
    for (const uint64_t prompt : {1, 2, 3, 4}) PublishOnDisk(engine, prompt);
    const json dry = Ask("erase --tenant default --dry-run");
    EXPECT_EQ(dry["objects"], 12);
    EXPECT_TRUE(dry["dry_run"].get<bool>());
    EXPECT_EQ(dry["tiers"]["ssd"], dry["bytes"]);
    EXPECT_EQ(Hits(engine, 1), 3u) << "nothing was done";
    EXPECT_TRUE(Eventually([&] { return daemon_.Metric("ashlar_leases") == 0; })) << "they are released later";
    // The engine holds leases of one prompt.
    const Match held = engine.Lookup(MakePrompt(2, 3, 60));
    const json done = Ask("erase --tenant default");
    EXPECT_EQ(done["objects"], 12);
    EXPECT_EQ(done["leased_objects"], 3);
    EXPECT_TRUE(done["done"].get<bool>());
    EXPECT_EQ(done["not_overwritten"], "");
    daemon_.Kill();
  }
  daemon_.Start();
  TestEngine engine(daemon_.client_options());
  for (const uint64_t prompt : {1, 2, 3, 4}) EXPECT_EQ(Hits(engine, prompt), 0u);
  EXPECT_EQ(Ask("ls")["objects"].size(), 0u);
  PublishOnDisk(engine, 1);
  EXPECT_EQ(Hits(engine, 1), 3u) << "the tenant goes on";
  EXPECT_EQ(Run("erase").code, 2);
  EXPECT_THAT(Run("erase --tenant nobody").output, HasSubstr("tenant: \"nobody\""));
}

TEST_F(Upkeep, ErasedBytesAreRemovedFromTheDisk) {
  TestEngine engine(daemon_.client_options());
  const std::vector<Tokens> prompt = MakePrompt(1, 3, 60);
  PublishOnDisk(engine, 1);
  const std::string secret = engine.StateOfHead(ObjectKind::kSegment, prompt[1], 2, 1);
  const auto is_there = [&] {
    std::ostringstream bytes;
    bytes << std::ifstream(daemon_.ssd_folder() + "/slab", std::ios::binary).rdbuf();
    return bytes.str().find(secret) != std::string::npos;
  };
  ASSERT_TRUE(is_there());
  EXPECT_TRUE(Ask("erase --tenant default")["done"].get<bool>());
  EXPECT_FALSE(is_there());
}

// Queries a daemon like a router: all replayed tokens from a batch on, and the next batch's number.
class ReplayAsker {
 public:
  explicit ReplayAsker(const std::string& address)
      : context_(zmq_ctx_new()), socket_(zmq_socket(context_, ZMQ_DEALER)) {
    const int patience = static_cast<int>(kPatience.count()), now = 0;
    zmq_setsockopt(socket_, ZMQ_RCVTIMEO, &patience, sizeof patience);
    zmq_setsockopt(socket_, ZMQ_LINGER, &now, sizeof now);
    zmq_connect(socket_, address.c_str());
  }
  ~ReplayAsker() {
    zmq_close(socket_);
    zmq_ctx_term(context_);
  }
  struct Replayed {
    size_t batches = 0;
    Tokens tokens;
  };
  Replayed All() {
    zmq_send(socket_, "", 0, ZMQ_SNDMORE);
    zmq_send(socket_, std::string(8, '\0').data(), 8, 0);
    Replayed replayed;
    while (true) {
      std::vector<std::string> frames(4, std::string(1 << 20, '\0'));
      for (std::string& frame : frames) {
        const int size = zmq_recv(socket_, frame.data(), frame.size(), 0);
        EXPECT_GE(size, 0);
        frame.resize(static_cast<size_t>(std::max(0, size)));
      }
      if (frames[3].empty()) return replayed;  // the end
      ++replayed.batches;
      const json batch = json::from_msgpack(frames[3]);
      for (const json& event : batch[1]) {
        if (event["type"] != "BlockStored") continue;
        const Tokens tokens = event["token_ids"];
        replayed.tokens.insert(replayed.tokens.end(), tokens.begin(), tokens.end());
      }
    }
  }

 private:
  void* const context_;
  void* const socket_;
};

TEST(UpkeepOfEvents, TokensOfErasedTextsAreNotReplayed) {
  const std::string place = testing::TempDir() + "/upkeep-" + std::to_string(getpid());
  DaemonOptions options = kWithDisk;
  options.more = "events: {zmq_address: \"ipc://" + place + "\", zmq_replay_address: \"ipc://" + place + "-replay\"}";
  DaemonProcess daemon(options);
  ReplayAsker router("ipc://" + place + "-replay");
  PrefixEngine engine(daemon.client_options());
  const Tokens tokens = MakePrompt(1, 1, 300)[0];
  engine.Commit({.tokens = tokens, .depths = {tokens.size()}});
  ASSERT_TRUE(Eventually([&] { return !router.All().tokens.empty(); }));
  const std::string ns =
      json::parse(RunAshlarctl(ASHLARCTL, "ls --json", daemon.admin_socket()).output)["objects"][0]["namespace"];
  EXPECT_EQ(RunAshlarctl(ASHLARCTL, "erase --namespace " + ns, daemon.admin_socket()).code, 0);
  EXPECT_EQ(router.All().tokens, Tokens());
  engine.Commit({.tokens = tokens, .depths = {tokens.size()}});
  ASSERT_TRUE(Eventually([&] { return !router.All().tokens.empty(); })) << "the tenant goes on";
  EXPECT_EQ(RunAshlarctl(ASHLARCTL, "erase --tenant default", daemon.admin_socket()).code, 0);
  EXPECT_EQ(router.All().tokens, Tokens());
}

TEST_F(Upkeep, VerifyFindsADamagedCopyAndDropsIt) {
  TestEngine engine(daemon_.client_options());
  const std::vector<Tokens> prompt = MakePrompt(1, 3, 60);
  PublishOnDisk(engine, 1);
  const json sound = Ask("verify --rate 1GiB");
  EXPECT_EQ(sound["damaged"].size(), 0u);
  ASSERT_EQ(sound["tiers"].size(), 2u);
  EXPECT_EQ(sound["tiers"][0]["tier"], "dram");
  EXPECT_EQ(sound["tiers"][0]["copies"], 3);
  EXPECT_EQ(sound["tiers"][1]["copies"], 3);
  ASSERT_EQ(FlipInArenas(daemon_.pid(), engine.StateOfHead(ObjectKind::kSegment, prompt[1], 2, 1)), 1);
  const json found = Ask("verify", 1);
  ASSERT_EQ(found["damaged"].size(), 1u);
  EXPECT_EQ(found["damaged"][0]["tier"], "dram");
  EXPECT_EQ(found["damaged"][0]["reason"], "checksum_failed");
  EXPECT_EQ(Ask("verify --status", 1)["pass"], 2);
  EXPECT_EQ(Ask("verify")["damaged"].size(), 0u) << "it is gone";
  EXPECT_TRUE(Eventually([&] { return daemon_.Metric("ashlar_scrub_corrupt_copies_total{tier=\"dram\"}") == 1; }));
  EXPECT_TRUE(Eventually([&] { return daemon_.Metric("ashlar_scrub_passes_total") == 3; }));
  EXPECT_GT(daemon_.Metric("ashlar_scrub_bytes_total{tier=\"ssd\"}"), 0);
  EXPECT_GT(daemon_.Metric("ashlar_scrub_last_pass_timestamp_seconds"), 1.6e9);
  EXPECT_EQ(Run("verify --rate 0").code, 2);
}

class Reloaded : public Upkeep {
 protected:
  static DaemonOptions Options(const std::string& more, uint32_t drain_seconds = 2) {
    DaemonOptions options = kWithDisk;
    options.drain_seconds = drain_seconds;
    options.more = more;
    return options;
  }
  static std::string Tenant(const std::string& dram, const std::string& more = "") {
    return "tenants: [{name: default, uids: [" + std::to_string(getuid()) + "], dram_bytes: " + dram +
           ", ssd_bytes: 64MiB" + more + "}]\n";
  }
  Reloaded() : Upkeep(Options(Tenant("8MiB"))) {}
};

TEST_F(Reloaded, AppliesReloadableFields) {
  TestEngine engine(daemon_.client_options());
  PublishOnDisk(engine, 1);
  daemon_.Configure(Options(Tenant("16MiB", ", ttl_seconds: 1, max_regions: 1") +
                                "scrub: {bytes_per_second: 64MiB}\nlog: {level: debug, audit_file: " + AuditFile() +
                                "}\n",
                            7));
  const json dry = Ask("reload --dry-run");
  EXPECT_EQ(dry["changes"].size(), 7u) << dry.dump(2);
  EXPECT_EQ(daemon_.Metric("ashlar_config_last_reload_successful"), 1);
  EXPECT_EQ(Ask("stats")["tenants"][0]["tiers"][0]["capacity_bytes"], 8 << 20) << "nothing has changed";
  EXPECT_EQ(Ask("reload")["changes"], dry["changes"]);
  EXPECT_EQ(Ask("stats")["tenants"][0]["tiers"][0]["capacity_bytes"], 16 << 20);
  EXPECT_THAT(Run("config").output, HasSubstr("drain_seconds: 7"));
  EXPECT_EQ(Ask("reload")["changes"].size(), 0u);
  // The time to live applies to earlier objects too, and the rate to later passes.
  EXPECT_TRUE(Eventually([&] { return Ask("ls")["objects"].empty(); }));
  PublishOnDisk(engine, 2);
  EXPECT_TRUE(Eventually([&] { return daemon_.Metric("ashlar_scrub_bytes_total{tier=\"ssd\"}") > 0; }));
  EXPECT_EQ(daemon_.Metric("ashlar_regions_limit{tenant=\"default\"}"), 1);
  ASSERT_EQ(Audited().size(), 2u) << "the reload that named the file, and the next one";
  EXPECT_EQ(Audited()[0]["action"], "Reload");
  EXPECT_THAT(Audited()[0]["outcome"].get<std::string>(), HasSubstr("changes=7 fields="));
  EXPECT_THAT(Audited()[0]["outcome"].get<std::string>(), HasSubstr("log.audit_file"));
  EXPECT_THAT(Audited()[0]["outcome"].get<std::string>(), Not(HasSubstr(AuditFile()))) << "no values";
  daemon_.Configure(Options(Tenant("16MiB"), 7));
  Ask("reload");
  ASSERT_EQ(Audited().size(), 3u) << "the reload that ends the file is in it";
  EXPECT_THAT(Audited()[2]["outcome"].get<std::string>(), HasSubstr("log.audit_file"));
  EXPECT_EQ(Audited()[0]["user"], getuid() == 0 ? json("root") : Audited()[0]["user"]);
}

// Both rates, from none and back to none. An engine that exceeds one gets misses, and no error.
TEST_F(Reloaded, NewRatesApplyAtOnce) {
  TestEngine engine(daemon_.client_options());
  PublishOnDisk(engine, 1);
  const auto prompt = MakePrompt(1, 3, 60);
  const auto reasons = [&] {
    std::vector<MissReason> found;
    const Match match = engine.Lookup(prompt);
    for (const SegmentResult& segment : match.segments()) found.push_back(segment.reason);
    return found;
  };
  EXPECT_THAT(reasons(), Each(MissReason::kNone));
  daemon_.Configure(Options(Tenant("8MiB", ", calls_per_second: 2")));
  EXPECT_EQ(Ask("reload")["changes"].size(), 1u);
  EXPECT_THAT(Run("config").output, HasSubstr("calls_per_second: 2"));
  std::vector<MissReason> last;
  for (int i = 0; i < 20; ++i) last = reasons();
  EXPECT_THAT(last, Each(MissReason::kBusy));
  const auto refused = [&](const std::string& limit) {
    return daemon_.Metric("ashlar_rate_limited_requests_total{limit=\"" + limit + "\",tenant=\"default\"}");
  };
  EXPECT_TRUE(Eventually([&] { return refused("calls_per_second") >= 10; }));
  EXPECT_EQ(refused("bytes_per_second"), 0);
  daemon_.Configure(Options(Tenant("8MiB", ", bytes_per_second: 1")));
  EXPECT_EQ(Ask("reload")["changes"].size(), 2u);
  const auto land = [&] {
    const Match match = engine.Lookup(prompt);
    return engine.Land(match, prompt).Wait(kPatience);
  };
  EXPECT_THAT(land(), Each(MissReason::kNone)) << "one is let through, whatever its size";
  EXPECT_THAT(land(), Each(MissReason::kBusy));
  EXPECT_TRUE(Eventually([&] { return refused("bytes_per_second") == 1; }));
  daemon_.Configure(Options(Tenant("8MiB")));
  EXPECT_EQ(Ask("reload")["changes"].size(), 1u);
  EXPECT_THAT(land(), Each(MissReason::kNone));
}

TEST_F(Reloaded, ASignalReloadsAsWell) {
  daemon_.Configure(Options(Tenant("12MiB")));
  daemon_.Signal(SIGHUP);
  EXPECT_TRUE(Eventually([&] { return Ask("stats")["tenants"][0]["tiers"][0]["capacity_bytes"] == 12 << 20; }));
  EXPECT_TRUE(Eventually([&] { return daemon_.log().find("audit Reload") != std::string::npos; }));
  EXPECT_THAT(daemon_.log(), HasSubstr("signal=SIGHUP"));
  EXPECT_THAT(daemon_.log(), HasSubstr("fields=tenants[0].dram_bytes"));
  EXPECT_THAT(daemon_.log(), HasSubstr("pid=" + std::to_string(getpid()) + " "));
}

TEST_F(Reloaded, RefusesFieldsThatNeedARestartByName) {
  TestEngine engine(daemon_.client_options());
  PublishOnDisk(engine, 1);
  const std::string before = Run("config").output;
  const auto refused = [&](const std::string& more, const std::string& field, int code) {
    SCOPED_TRACE(more);
    daemon_.Configure(Options(more));
    const Ended ended = Run("reload");
    EXPECT_EQ(ended.code, code);
    EXPECT_THAT(ended.output, HasSubstr(field));
    EXPECT_EQ(Run("config").output, before);
    EXPECT_EQ(daemon_.Metric("ashlar_config_last_reload_successful"), 0);
  };
  daemon_.Configure(Options(Tenant("512KiB")));
  EXPECT_NE(Run("reload --dry-run").code, 0);
  EXPECT_EQ(daemon_.Metric("ashlar_config_last_reload_successful"), 1) << "a dry run is no reload";
  refused(Tenant("12MiB") + "gpu: {device: 0}\n", "gpu: needs a restart", 1);
  refused(Tenant("12MiB", ", max_sessions: 3"), "tenants[0].max_sessions: needs a restart", 1);
  refused(Tenant("12MiB") + "scrub: {bytes_per_second: fast}\n", "scrub.bytes_per_second", 2);
  refused(Tenant("64MiB"), "dram_bytes", 2);
  refused(Tenant("512KiB"), "dram_bytes", 2);
  refused(Tenant("12MiB") + "log: {audit_file: /nowhere/audit}\n", "log.audit_file", 2);
  for (uint64_t prompt = 2; prompt < 30; ++prompt) engine.PublishPrompt(MakePrompt(prompt, 3, 60));
  refused(Tenant("1MiB"), "tenants[0].dram_bytes: 1048576; expected at least ", 1);
  daemon_.Signal(SIGHUP);
  EXPECT_TRUE(Eventually([&] { return daemon_.log().find("the size of the tenant's arenas") != std::string::npos; }));
  daemon_.Configure(Options(Tenant("8MiB")));
  EXPECT_EQ(Run("reload").code, 0);
  EXPECT_EQ(daemon_.Metric("ashlar_config_last_reload_successful"), 1);
  EXPECT_EQ(Run("status").code, 0) << "it goes on";
}

class Sandboxed : public Upkeep {
 protected:
  [[maybe_unused]] static void AddTo(const char* name, const std::string& more) {
    const char* const given = getenv(name);
    setenv(name, ((given == nullptr ? "" : given) + more).c_str(), 1);
  }
  static DaemonOptions Options() {
    DaemonOptions options = kWithDisk;
    options.more = "sandbox: on\n";
    // The sandbox keeps LeakSanitizer from tracing the daemon, and ThreadSanitizer from reading the names for its
    // suppressions.
#if defined(__SANITIZE_ADDRESS__)
    AddTo("ASAN_OPTIONS", ":detect_leaks=0");
#elif defined(__SANITIZE_THREAD__)
    AddTo("TSAN_OPTIONS", ":report_bugs=0");
#endif
    return options;
  }
  Sandboxed() : Upkeep(Options()) {}
};

TEST_F(Sandboxed, TheDaemonServesAndItsThreadsAreFiltered) {
  EXPECT_THAT(daemon_.log(), HasSubstr("sandbox active"));
  std::ostringstream status;
  status << std::ifstream("/proc/" + std::to_string(daemon_.pid()) + "/status").rdbuf();
  EXPECT_THAT(status.str(), HasSubstr("NoNewPrivs:\t1"));
  EXPECT_THAT(status.str(), HasSubstr("Seccomp:\t2"));
  {
    TestEngine engine(daemon_.client_options());
    const std::vector<Tokens> prompt = MakePrompt(1, 3, 60);
    PublishOnDisk(engine, 1);
    engine.FillTargets(std::byte{0});
    EXPECT_THAT(engine.Land(engine.Lookup(prompt), prompt).Wait(kPatience), testing::Each(MissReason::kNone));
    TestEngine hosted(daemon_.client_options(), {}, TestEngine::Memory::kHosted);
    EXPECT_EQ(Hits(hosted, 1), 3u);
  }
  EXPECT_EQ(Ask("verify")["damaged"].size(), 0u);
  EXPECT_EQ(Run("reload").code, 0) << "its own file can be read again";
  // A file in another folder cannot be created.
  DaemonOptions elsewhere = Options();
  elsewhere.more += "log: {audit_file: /var/tmp/ashlar_sandboxed_audit}\n";
  daemon_.Configure(elsewhere);
  const Ended refused = Run("reload");
  EXPECT_NE(refused.code, 0);
  EXPECT_THAT(refused.output, HasSubstr("log.audit_file"));
  EXPECT_NE(access("/var/tmp/ashlar_sandboxed_audit", F_OK), 0);
  EXPECT_EQ(daemon_.Terminate(), 0);
  daemon_.Configure(Options());
  daemon_.Start();
  TestEngine engine(daemon_.client_options());
  EXPECT_EQ(Hits(engine, 1), 3u) << "the disk is found again";
}

}  // namespace
}  // namespace ashlar::integration
