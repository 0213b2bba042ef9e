// SPDX-License-Identifier: Apache-2.0
// ashlarctl as an operator runs it, against a real daemon that a real engine uses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "proto/version.h"
#include "tests/integration/ashlarctl_run.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/test_engine.h"
#include "tools/ashlarctl/json_fields.h"
#include "tools/ashlarctl/terminal.h"

namespace ashlar::integration {
namespace {

using nlohmann::json;
using testing::HasSubstr;

class Ashlarctl : public testing::Test {
 protected:
  // `arguments` in the shell's words.
  Ended Run(const std::string& arguments) { return RunAshlarctl(ASHLARCTL, arguments, daemon_.admin_socket()); }
  json Ask(const std::string& arguments) {
    const Ended ended = Run(arguments + " --json");
    EXPECT_EQ(ended.code, 0) << ended.output;
    return json::parse(ended.output, nullptr, /*allow_exceptions=*/false);
  }
  // The prompt's segments as files of decimal numbers.
  std::string Files(const std::vector<Tokens>& segments) {
    std::string names;
    for (size_t i = 0; i < segments.size(); ++i) {
      const std::string name = daemon_.directory() + "/segment" + std::to_string(i);
      std::ofstream file(name);
      for (const int32_t token : segments[i]) file << token << " ";
      names += " " + name;
    }
    return names;
  }
  std::string Namespace() { return Ask("models")["tenants"][0]["models"][0]["namespace"]; }

  DaemonProcess daemon_{DaemonOptions{.dram = "8MiB", .arena = "1MiB"}};
  TestEngine engine_{daemon_.client_options()};
  const std::vector<Tokens> prompt_ = MakePrompt(6, 3, 60);
};

TEST_F(Ashlarctl, ExplainsEverySegmentOfAPrompt) {
  const std::string question = "explain --tenant default --namespace " + Namespace().substr(0, 8) + Files(prompt_);
  const json unknown = Ask(question);
  for (const json& text : unknown["texts"]) EXPECT_EQ(text["reason"], "never_seen");
  engine_.PublishPrompt(prompt_);
  const json here = Ask(question);
  ASSERT_EQ(here["texts"].size(), 3u);
  EXPECT_EQ(here["texts"][0]["kind"], "checkpoint");
  for (const json& text : here["texts"]) {
    EXPECT_TRUE(text["hit"].get<bool>());
    EXPECT_EQ(text["present"]["tier"], "dram");
    EXPECT_EQ(text["present"]["tiers"], json::array({"dram"}));
  }
  EXPECT_THAT(Run(question).output, HasSubstr("segment of 60 tokens: in dram, "));
  // Under a salt they are different texts, of which nothing is known.
  const json salted = Ask(question + " --salt somebody");
  for (const json& text : salted["texts"]) {
    EXPECT_EQ(text["reason"], "never_seen");
    EXPECT_NE(text["key"], here["texts"][0]["key"]);
  }

  // Other prompts take the space.
  const auto any_left = [&] {
    const json texts = Ask(question)["texts"];
    return texts[1]["hit"].get<bool>() || texts[2]["hit"].get<bool>();
  };
  for (uint64_t other = 100; any_left(); ++other) {
    ASSERT_LT(other, 200u);
    engine_.PublishPrompt(MakePrompt(other, 3, 60));
  }
  const json gone = Ask(question)["texts"][1];
  EXPECT_EQ(gone["reason"], "evicted");
  EXPECT_EQ(gone["gone"]["tier"], "dram");
  EXPECT_EQ(gone["gone"]["policy"], "price");
  EXPECT_GT(gone["gone"]["bytes"].get<uint64_t>(), 0u);
  EXPECT_THAT(Run(question).output, HasSubstr(" ago from dram by price, "));

  engine_.Lookup(prompt_);
  const json last = Ask("explain --last 2")["tenants"][0]["misses"];
  ASSERT_EQ(last.size(), 2u);
  EXPECT_EQ(last[0]["reason"], "evicted");
  EXPECT_EQ(last[0]["tokens"], 60);
}

TEST_F(Ashlarctl, BundlesWhatOthersNeedWithoutNames) {
  engine_.PublishPrompt(prompt_);
  const std::string file = daemon_.directory() + "/bundle.json";
  EXPECT_THAT(Run("support-bundle " + file).output, HasSubstr("mode 0600"));
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  const json bundle = json::parse(text.str());
  for (const char* part : {"status", "stats", "sessions", "peers", "models", "config", "last_misses", "doctor"}) {
    ASSERT_TRUE(bundle.contains(part)) << part;
    EXPECT_FALSE(bundle[part].contains("error")) << part << ": " << bundle[part].dump();
  }
  EXPECT_EQ(bundle["stats"]["tenants"][0]["tenant"], "tenant-1");
  EXPECT_EQ(bundle["models"]["tenants"][0]["tenant"], "tenant-1") << "the same wherever it occurs";
  for (const char* name : {"\"default\"", "integration test"})
    EXPECT_EQ(text.str().find(name), std::string::npos) << name;
  EXPECT_EQ(Run("support-bundle " + file).code, 1) << "nothing is overwritten";
  EXPECT_EQ(json::parse(Run("support-bundle -").output)["stats"]["tenants"][0]["tenant"], "tenant-1") << "as of a pod";
}

TEST_F(Ashlarctl, ExaminesTheRunningDaemon) {
  const json running = json::parse(Run("doctor --json").output);
  EXPECT_EQ(running["daemon_pid"], daemon_.pid());
  EXPECT_TRUE(running["daemon_error"].is_null());
  EXPECT_EQ(running["configuration"], "the daemon's");
  EXPECT_THAT(Run("doctor").output, HasSubstr("of the daemon, process " + std::to_string(daemon_.pid())));
  const std::string answer = daemon_.directory() + "/doctor.json";
  EXPECT_THAT(Run("doctor --json " + answer).output, HasSubstr("of the daemon, process ")) << "the text, too";
  std::ifstream written(answer);
  EXPECT_EQ(json::parse(written)["daemon_pid"], daemon_.pid());
  EXPECT_EQ(Run("doctor --json /dev/full").code, 1);
  const std::string file = daemon_.directory() + "/other.yaml";
  std::ofstream(file) << "dram: {capacity_bytes: 900TiB}\nssd: {folder: " << daemon_.directory()
                      << ", capacity_bytes: 900TiB}\n";
  daemon_.Terminate();
  const Ended ended = Run("doctor --json --config " + file);
  EXPECT_EQ(ended.code, 1);
  const json planned = json::parse(ended.output);
  EXPECT_TRUE(planned["daemon_pid"].is_null());
  const std::string why = planned["daemon_error"];
  EXPECT_THAT(Run("doctor --config " + file).output, HasSubstr("ashlarctl itself; " + why + "\n"));
  EXPECT_EQ(planned["configuration"], file);
  std::set<std::string> bad;
  for (const json& check : planned["checks"]) {
    if (check["verdict"] == "bad") bad.insert(check["check"]);
  }
  EXPECT_TRUE(bad.contains("memory") && bad.contains("disk space")) << ended.output;
  EXPECT_THAT(Run("doctor --config /nonexistent").output, HasSubstr("--config: cannot read /nonexistent: "));
}

TEST_F(Ashlarctl, PinsAndEvicts) {
  engine_.PublishPrompt(prompt_);
  const std::string texts = " --tenant default --namespace " + Namespace() + Files(prompt_);
  const json pinned = Ask("pin --hard" + texts);
  for (const json& text : pinned["texts"]) EXPECT_TRUE(text["found"].get<bool>());
  // These prompts would evict everything that is not pinned.
  for (uint64_t other = 100; other < 140; ++other) engine_.PublishPrompt(MakePrompt(other, 3, 60));
  const json here = Ask("explain" + texts);
  for (const json& text : here["texts"]) EXPECT_TRUE(text["hit"].get<bool>());
  EXPECT_THAT(Run("unpin" + texts).output, HasSubstr("unpinned"));
  EXPECT_THAT(Run("evict" + texts).output, HasSubstr("evicted"));
  const json gone = Ask("explain" + texts);
  for (const json& text : gone["texts"]) {
    EXPECT_EQ(text["reason"], "evicted");
    EXPECT_EQ(text["gone"]["policy"], "operator");
  }
  EXPECT_FALSE(Ask("pin --until 2100-01-01T00:00:00Z" + texts)["texts"][0]["found"].get<bool>());
}

TEST_F(Ashlarctl, WarmReportsWhyEachTextIsNotInTheCache) {
  engine_.PublishPrompt({prompt_[0]});
  const std::string texts = "warm --tenant default --seconds 0.1 --namespace " + Namespace() + Files(prompt_);
  const Ended ended = Run(texts + " --json");
  EXPECT_EQ(ended.code, 1);
  const json answer = json::parse(ended.output, nullptr, /*allow_exceptions=*/false);
  ASSERT_EQ(answer["texts"].size(), prompt_.size()) << ended.output;
  EXPECT_THAT(answer["texts"][0]["file"], HasSubstr("/segment0"));
  for (size_t i = 0; i < prompt_.size(); ++i) {
    EXPECT_EQ(answer["texts"][i]["warm"], i == 0);
    EXPECT_EQ(answer["texts"][i]["reason"], i == 0 ? "none" : "not_computed");
  }
  const std::string text = Run(texts).output;
  EXPECT_THAT(text, HasSubstr("/segment0: in the cache\n"));
  EXPECT_THAT(text, HasSubstr("/segment2: not computed by any engine\n"));
}

TEST_F(Ashlarctl, StatusReportsDaemonState) {
  engine_.PublishPrompt(prompt_);
  const Match match = engine_.Lookup(prompt_);
  const json status = Ask("status");
  EXPECT_EQ(status["state"], "serving");
  EXPECT_EQ(status["version"], Version());
  EXPECT_EQ(status["tokens"]["hits"]["dram"], 180);
  EXPECT_EQ(status["landings"], 0);
  EXPECT_EQ(status["cluster"], nullptr);
  const json top = Ask("top --interval 0.1 --count 2");
  ASSERT_EQ(top["frames"].size(), 2u);
  EXPECT_EQ(top["frames"][1]["tokens"]["asked_tokens"], 0) << "nothing came in the interval";
  EXPECT_EQ(Run("top --interval 0.01").code, 2);
  const json stats = Ask("stats");
  EXPECT_EQ(stats["objects"], 3);
  EXPECT_EQ(status["object_bytes"], stats["object_bytes"]);
  EXPECT_EQ(stats["sessions"], 1);
  EXPECT_EQ(stats["tenants"][0]["hits"][0]["tier"], "dram");
  EXPECT_EQ(stats["tenants"][0]["hits"][0]["segments"], 3);
  EXPECT_THAT(Run("stats").output, HasSubstr("hits from dram"));
  EXPECT_EQ(Ask("sessions")["sessions"][0]["models"], 1);
  EXPECT_EQ(Ask("sessions")["sessions"][0]["release"], Version());
  EXPECT_THAT(Run("sessions").output, HasSubstr("tenant default"));
  ClientOptions options = daemon_.client_options();
  options.name = "evil\x1b[2J\nsession 9";
  const TestEngine other(options);
  Identity identity = TestEngine::identity();
  identity.model_id = "m\xff\x1b[2J\nn";
  const auto model = engine_.client().OpenModel(identity, engine_.Whole());
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_THAT(Run("models").output, HasSubstr(R"("m\xff\x1b[2J\x0an")"));
  EXPECT_EQ(Ask("models")["tenants"][0]["models"][0]["model_id"], "m\xef\xbf\xbd\x1b[2J\nn") << "JSON all the same";
  EXPECT_FALSE(json::parse(Run("support-bundle -").output, nullptr, false).is_discarded());
  EXPECT_THAT(Run("sessions").output, HasSubstr(R"("evil\x1b[2J\x0asession 9")")) << "no command to the terminal";
  EXPECT_EQ(Ask("sessions")["sessions"].size(), 2u);
  EXPECT_EQ(Run("peers").output, "no other nodes\n");
  EXPECT_EQ(Ask("peers"), json::parse(R"({"peers": []})"));
  EXPECT_THAT(Run("config").output, HasSubstr("capacity_bytes: 8388608"));
}

TEST_F(Ashlarctl, DrainWithoutADiskDoesNotMentionOne) {
  EXPECT_EQ(Run("drain").output, "drained: nothing is lost when the daemon stops\n");
}

TEST_F(Ashlarctl, DrainsAndTakesRequestsAgain) {
  engine_.PublishPrompt(prompt_);
  {
    const Match held = engine_.Lookup(prompt_);
    const Ended waited = Run("drain --seconds 0.2");
    EXPECT_EQ(waited.code, 1);
    EXPECT_THAT(waited.output, HasSubstr("not drained: leases 1, requests 0"));
  }
  for (int twice = 0; twice < 2; ++twice) {
    const json drained = Ask("drain");
    EXPECT_TRUE(drained["done"].get<bool>());
    EXPECT_EQ(drained["memory_only_objects"], 3) << "there is no disk";
    EXPECT_THAT(Run("drain").output, HasSubstr("a stop loses 3 objects"));
  }
  EXPECT_EQ(engine_.Lookup(prompt_).segments()[0].reason, MissReason::kDaemonUnavailable);
  EXPECT_FALSE(Ask("undrain")["draining"].get<bool>());
  EXPECT_TRUE(engine_.Lookup(prompt_).segments()[0].hit());
}

TEST_F(Ashlarctl, ProbesTheEnginesHealthService) {
  const std::string health = "health --rpc-socket " + daemon_.client_options().rpc_socket;
  EXPECT_EQ(Ask(health)["state"], "serving");
  Ask("drain");
  const Ended draining = Run(health);
  EXPECT_EQ(draining.code, 1);
  EXPECT_EQ(draining.output, "not_serving\n");
  const Ended unknown = Run(health + " --service cake");
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(unknown.output, HasSubstr("--service: the daemon has no service \"cake\""));
  EXPECT_EQ(Run("health --seconds 0").code, 2);
  EXPECT_EQ(Run("health --rpc-socket /nowhere --seconds 1").code, 1);
}

// For a value that is not an object or an array of objects.
void CollectPaths(const json& value, const std::string& path, std::set<std::string>& paths) {
  if (value.is_object() && !value.empty()) {
    for (const auto& [name, below] : value.items()) {
      CollectPaths(below, path.empty() ? name : path + "." + name, paths);
    }
  } else if (value.is_array()) {
    for (const json& below : value) CollectPaths(below, path + "[]", paths);
  } else if (!value.is_object()) {
    paths.insert(path);
  }
}

TEST_F(Ashlarctl, EveryFieldOfEveryAnswerIsDocumented) {
  engine_.PublishPrompt(prompt_);
  engine_.Lookup(prompt_);
  engine_.Lookup(MakePrompt(77, 3, 60));
  const std::string texts = " --tenant default --namespace " + Namespace() + Files(prompt_);
  const struct {
    std::string command, arguments;
  } kCases[] = {{"explain", texts},
                {"explain", " --last 5"},
                {"pin", " --hard" + texts},
                {"unpin", texts},
                {"ls", ""},
                {"verify", ""},
                {"erase", " --tenant default --dry-run"},
                {"reload", ""},
                {"evict", texts},
                {"warm", " --seconds 0.1" + texts},
                {"probe", " --tenant default" + Files(prompt_)},
                {"status", ""},
                {"top", " --count 1 --interval 0.1"},
                {"models", ""},
                {"stats", ""},
                {"sessions", ""},
                {"drain", " --seconds 0.1"},
                {"undrain", ""},
                {"config", ""},
                {"support-bundle", " " + daemon_.directory() + "/bundle"},
                {"doctor", ""},
                {"completion", " bash"},
                {"man", ""}};
  for (const auto& [command, arguments] : kCases) {
    SCOPED_TRACE(command);
    std::set<std::string> documented;
    for (const ctl::JsonField& field : ctl::JsonFieldsOf(command)) documented.insert(field.path);
    const Ended ended = Run(command + arguments + " --json");
    const json answer = json::parse(ended.output, nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(answer.is_object()) << ended.output;
    std::set<std::string> paths;
    CollectPaths(answer, "", paths);
    EXPECT_FALSE(paths.empty());
    for (const std::string& path : paths) {
      const bool known = documented.contains(path) || documented.contains(path.substr(0, path.rfind('.')) + ".*");
      EXPECT_TRUE(known) << path << " is not in tools/ashlarctl/json_fields.cc";
    }
  }
}

TEST_F(Ashlarctl, RefusesWhatIsInvalidByName) {
  const std::string empty = daemon_.directory() + "/empty";
  std::ofstream(empty).close();
  const struct {
    std::string arguments;
    int code;
    const char* message;
  } kCases[] = {
      {"explian", 2, "explian: unknown command of ashlarctl; did you mean explain?"},
      {"stats --tenant x", 2, "--tenant: unknown option of ashlarctl stats"},
      {"stats file", 2, "file: unknown argument of ashlarctl stats"},
      {"explain --tenant", 2, "--tenant: 1 required NAME missing"},
      {"explain --last many", 2, "--last: expected a positive number"},
      {"explain /dev/null", 2, "--tenant: required"},
      {"explain --tenant default", 2, "TOKENS-FILE: at least one is required"},
      {"explain --tenant default /dev/null", 2, "--namespace: --namespace or --model-file is required"},
      {"explain --tenant default --namespace xyz /dev/null", 2, "--namespace: expected 1 to 64 hexadecimal digits"},
      {"explain --tenant default --namespace abcd /dev/null", 2, "cannot read /dev/null: it is a device"},
      {"explain --tenant default --namespace abcd " + empty, 2, "empty: the file has no tokens"},
      {"explain --tenant default --model-file " + empty + " " + empty, 2, "empty: truncated in the identity"},
      {"explain --tenant default --namespace abcd /nonexistent", 1, "/nonexistent"},
      {"ls --namespace abc", 1, "--namespace: no model or object has a namespace that begins with abc"},
      {"health --socket /x", 2, "did you mean --rpc-socket?"},
      {"verify --rate 10GX", 2, "--rate: \"10GX\" is not a size"},
      {"verify --rate 0", 2, "--rate: 0; expected at least 1 byte per second"},
      {"pin /dev/null", 2, "--until: --until or --hard is required"},
      {"pin --until tomorrow /dev/null", 2, "--until: expected a time such as"},
      {"pin --until 2001-01-01T00:00:00Z /dev/null", 2, "--until: must be in the future"},
      {"evict --until x /dev/null", 2, "--until: unknown option of ashlarctl evict"},
      {"drain --seconds -1", 2, "--seconds: expected a number"},
      {"drain --seconds nan", 2, "--seconds: expected a number"},
      {"models --tenant nobody", 1, "tenant: \"nobody\""},
  };
  for (const auto& c : kCases) {
    const Ended ended = Run(c.arguments);
    EXPECT_EQ(ended.code, c.code) << c.arguments;
    EXPECT_THAT(ended.output, HasSubstr(c.message)) << c.arguments;
  }
  EXPECT_THAT(Run("stats --tenant x --json").output,
              HasSubstr(R"("error": "--tenant: unknown option of ashlarctl stats)"));
  daemon_.Terminate();
  EXPECT_THAT(Run("stats").output, HasSubstr("no daemon answers on " + daemon_.admin_socket()));
  EXPECT_THAT(Run("stats").output, testing::Not(HasSubstr("\"error\"")));
  EXPECT_THAT(Run("stats --json").output, HasSubstr(R"("error": "no daemon answers on )" + daemon_.admin_socket()));
}

TEST_F(Ashlarctl, ReportsWhySocketDoesNotAnswer) {
  const std::string rpc = daemon_.client_options().rpc_socket, session = daemon_.client_options().session_socket;
  for (const char* const command : {"status --socket ", "stats --json --socket "}) {
    const Ended other = Run(command + rpc);
    EXPECT_EQ(other.code, 1);
    EXPECT_THAT(other.output, HasSubstr(rpc + ": the server does not implement this call")) << "not an empty message";
    EXPECT_THAT(Run(command + session).output, HasSubstr(session + ": wrong socket type"));
    EXPECT_THAT(Run(std::string(command) + "/nowhere").output, HasSubstr("no daemon answers on /nowhere"));
  }
  EXPECT_THAT(Run("health --rpc-socket " + session).output, HasSubstr(session + ": wrong socket type"));
  EXPECT_THAT(Run("doctor --socket " + session).output, HasSubstr(session + ": wrong socket type"));
}

TEST_F(Ashlarctl, AcceptsUniqueNamespacePrefix) {
  engine_.PublishPrompt(prompt_);
  const std::string whole = Namespace();
  std::string upper = whole.substr(0, 9);
  std::ranges::transform(upper, upper.begin(), [](unsigned char c) { return std::toupper(c); });
  for (const std::string& digits : {whole.substr(0, 1), whole.substr(0, 3), upper, whole}) {
    EXPECT_FALSE(Ask("ls --namespace " + digits)["objects"].empty()) << digits;
    EXPECT_EQ(Ask("explain --tenant default --namespace " + digits + Files(prompt_))["texts"][0]["namespace"], whole);
  }
  std::string other = whole.substr(0, 5);
  other[0] = other[0] == '0' ? '1' : '0';
  EXPECT_THAT(Run("ls --namespace " + other).output,
              HasSubstr("--namespace: no model or object has a namespace that begins"));
}

TEST_F(Ashlarctl, FailsIfItsOutputCannotBeWritten) {
  for (const char* const arguments : {"status", "status --json", "support-bundle -", "completion bash", "--help",
                                      "--version", "top --count 1 --interval 0.1"}) {
    EXPECT_EQ(Run(std::string(arguments) + " > /dev/full").code, 1) << arguments;
  }
}

TEST_F(Ashlarctl, WrapsTextToTheTerminalsWidth) {
  setenv("COLUMNS", "60", 1);
  for (const char* const arguments :
       {"status", "stats", "sessions", "models", "doctor", "top --count 1 --interval 0.1"}) {
    std::istringstream lines(Run(arguments).output);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(ctl::WidthOf(line), 60u) << arguments << ": " << line;
  }
  unsetenv("COLUMNS");
}

}  // namespace
}  // namespace ashlar::integration
