// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/engine_doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/outcome.h"

namespace ashlar::ctl {
namespace {

using ::testing::HasSubstr;

constexpr const char* kTypes =
    "# HELP vllm:ashlar_state 1 for the current state.\n# TYPE vllm:ashlar_state gauge\n"
    "# TYPE vllm:ashlar_lookups_total counter\n";
constexpr const char* kServing = "vllm:ashlar_state{engine=\"0\",reason=\"none\",state=\"serving\"} 1.0\n";

std::string Counter(const char* name, const char* outcome, double count) {
  return absl::StrCat("vllm:ashlar_", name, "_total{engine=\"0\",model_name=\"a \\\"b\\\" {c},\\n\",outcome=\"",
                      outcome, "\"} ", count, "\n");
}

std::string Read(const std::string& name) {
  std::ostringstream text;
  text << std::ifstream(absl::StrCat(ASHLAR_SOURCE_DIR, "/", name)).rdbuf();
  return text.str();
}

Finding Worst(const std::string& text) {
  Finding worst;
  for (const Finding& finding : JudgeEngine(ParseMetrics(text))) {
    if (finding.verdict >= worst.verdict) worst = finding;
    EXPECT_EQ(finding.verdict == Verdict::kFine, finding.remedy.empty()) << finding.check;
  }
  return worst;
}

void ExpectWorst(const std::string& text, Verdict verdict, const std::string& check, const std::string& found,
                 const std::string& remedy) {
  const Finding worst = Worst(text);
  EXPECT_EQ(worst.verdict, verdict) << worst.check << ": " << worst.found;
  EXPECT_EQ(worst.check, check);
  EXPECT_THAT(worst.found, HasSubstr(found));
  EXPECT_THAT(worst.remedy, HasSubstr(remedy));
}

TEST(EngineDoctor, AnEngineThatHitsAndStoresPasses) {
  const std::string text = absl::StrCat(kTypes, kServing, Counter("lookups", "hit", 3), Counter("lookups", "miss", 1),
                                        Counter("stores", "kept", 2),
                                        "vllm:ashlar_state{engine=\"0\",reason=\"lost\",state=\"opening\"} 0\n");
  const std::vector<Finding> findings = JudgeEngine(ParseMetrics(text));
  ASSERT_EQ(findings.size(), 3u);
  for (const Finding& finding : findings) EXPECT_EQ(finding.verdict, Verdict::kFine) << finding.found;
  EXPECT_EQ(findings[1].found, "hit 3, miss 1");
}

TEST(EngineDoctor, CountsPromptsThatHitSegments) {
  const std::string serving = absl::StrCat(kTypes, kServing, Counter("stores", "kept", 2),
                                           "vllm:request_success_total{engine=\"0\",finished_reason=\"stop\"} 7\n");
  const auto hits = [](const char* kind) {
    return absl::StrCat("vllm:ashlar_hits_total{engine=\"0\",kind=\"", kind, "\",tier=\"dram\"} 3\n");
  };
  for (const std::string& lookups : {std::string(), Counter("lookups", "miss", 4)}) {
    ExpectWorst(absl::StrCat(serving, lookups, hits("prefix")), Verdict::kBad, "lookups", "", "");
    const std::vector<Finding> findings = JudgeEngine(ParseMetrics(absl::StrCat(serving, lookups, hits("composed"))));
    ASSERT_EQ(findings.size(), 3u);
    EXPECT_EQ(findings[1].verdict, Verdict::kFine);
    EXPECT_EQ(findings[1].found, absl::StrCat(lookups.empty() ? "none" : "miss 4", "; 3 prompts hit segments"));
  }
  ExpectWorst(absl::StrCat(serving, Counter("lookups", "timed_out", 3), hits("composed")), Verdict::kBad, "lookups",
              "expected answers within lookup_ms", "lookup_ms");
}

TEST(EngineDoctor, NamesEachReasonWithItsRemedy) {
  for (const EngineReason& each : EngineReasons()) {
    if (each.remedy[0] == '\0') continue;
    ExpectWorst(absl::StrCat(kTypes, "vllm:ashlar_state{engine=\"0\",reason=\"", each.reason, "\",state=\"", each.state,
                             "\"} 1.0\n"),
                Verdict::kBad, "state", absl::StrCat(each.state, " (", each.reason, "); expected serving"),
                each.remedy);
  }
  ExpectWorst("vllm:ashlar_state{engine=\"0\",reason=\"new\",state=\"off\"} 1\n", Verdict::kBad, "state", "off (new)",
              "of the engine's release");
}

TEST(EngineDoctor, FindsEachReasonForAnUnusedCache) {
  ExpectWorst("process_cpu_seconds_total 3\n", Verdict::kBad, "engine", "no metrics of vLLM", "/metrics");
  ExpectWorst("vllm:num_requests_running{engine=\"0\"} 0\n", Verdict::kBad, "connector", "not loaded",
              "--kv-transfer-config");
  ExpectWorst(kTypes, Verdict::kBad, "state", "not reported yet", "send a prompt");
  const std::string serving = absl::StrCat(kTypes, kServing);
  EXPECT_EQ(Worst(serving).verdict, Verdict::kNote) << "an engine without requests";
  ExpectWorst(absl::StrCat(serving, "vllm:request_success_total{engine=\"0\",finished_reason=\"stop\"} 7\n"),
              Verdict::kBad, "lookups", "none of 7 requests", "32 tokens or more");
  const std::string hits = Counter("lookups", "hit", 3);
  ExpectWorst(absl::StrCat(serving, Counter("lookups", "miss", 5), Counter("stores", "kept", 5)), Verdict::kBad,
              "lookups", "miss 5; expected hits", "ashlarctl explain");
  ExpectWorst(absl::StrCat(serving, hits, Counter("lookups", "paused", 9), Counter("stores", "kept", 5)), Verdict::kBad,
              "lookups", "paused 9; expected answers within lookup_ms", "lookup_ms");
  ExpectWorst(absl::StrCat(serving, hits, Counter("lookups", "timed_out", 1), Counter("stores", "kept", 5)),
              Verdict::kNote, "lookups", "timed_out 1", "lookup_ms");
  ExpectWorst(absl::StrCat(serving, hits, Counter("stores", "no_space", 4), Counter("stores", "busy", 1)),
              Verdict::kBad, "stores", "busy 1, no_space 4; expected kept", "budgets: objects in use");
  ExpectWorst(absl::StrCat(serving, hits, Counter("stores", "busy", 1), Counter("stores", "new", 4)), Verdict::kBad,
              "stores", "busy 1, new 4; expected kept", "of the engine's release");
  ExpectWorst(absl::StrCat(serving, hits, Counter("stores", "kept", 1), Counter("stores", "busy", 4)), Verdict::kNote,
              "stores", "busy 4, kept 1", "saves_in_flight");
  ExpectWorst(
      absl::StrCat(serving, hits, Counter("stores", "kept", 1), "vllm:ashlar_load_failures_total{engine=\"0\"} 2\n"),
      Verdict::kNote, "loads", "2 failed and were recomputed", "log");
}

TEST(EngineDoctor, EachOutcomeOfACommitHasARemedy) {
  const std::set<std::string> kept = {"kept", "already_present", "kept_as_span"};
  for (uint8_t outcome = 1; Name(static_cast<CommitOutcome>(outcome)) != "unknown"; ++outcome) {
    const std::string name(Name(static_cast<CommitOutcome>(outcome)));
    EXPECT_EQ(kept.contains(name), std::ranges::count(StoreOutcomes(), name, &StoreOutcome::outcome) == 0) << name;
  }
  const std::string connector =
      Read("client/python/ashlar/vllm/saves.py") + Read("client/python/ashlar/vllm/offers.py");
  for (const char* const own : {"unavailable", "busy", "weights_changed", "too_long"}) {
    EXPECT_THAT(connector, HasSubstr(absl::StrCat("\"", own, "\"")));
    EXPECT_EQ(std::ranges::count(StoreOutcomes(), std::string(own), &StoreOutcome::outcome), 1) << own;
  }
}

TEST(EngineDoctor, ChecksEachEngineOfAServer) {
  const Finding worst = Worst(
      absl::StrCat(kTypes, kServing, "vllm:ashlar_state{engine=\"1\",reason=\"no_daemon\",state=\"opening\"} 1.0\n"));
  EXPECT_EQ(worst.found, "engine 1: opening (no_daemon); expected serving");
}

std::string Plain(std::string cell) {
  cell = std::regex_replace(cell, std::regex(R"(\[([^\]]*)\]\([^)]*\))"), "$1");
  cell = std::regex_replace(cell, std::regex("`"), "");
  return cell == "–" ? "" : cell;
}

// The connector logs the reasons, the page explains them, and this command prints them.
TEST(EngineDoctor, ReasonsMatchTheConnectorAndThePage) {
  using Table = std::map<std::string, std::pair<std::string, std::string>>;
  Table here, connector, page;
  for (const EngineReason& each : EngineReasons()) here[each.reason] = {each.state, each.remedy};
  const auto collect = [](const std::string& text, const char* pattern, int reason, int state, Table& table) {
    const std::regex row(pattern);
    for (std::sregex_iterator each(text.begin(), text.end(), row), end; each != end; ++each) {
      table[(*each)[reason]] = {(*each)[state], Plain((*each)[3])};
    }
  };
  collect(Read("client/python/ashlar/vllm/state.py"), R"rx("(\w+)": \((\w+), "([^"]*)"\))rx", 1, 2, connector);
  collect(Read("docs/vllm.md"), R"(\| ?`(serving|opening|off)` ?\| ?`(\w+)` ?\| ?([^|]*?) ?\|)", 2, 1, page);
  for (auto& [reason, row] : connector) std::ranges::transform(row.first, row.first.begin(), ::tolower);
  EXPECT_EQ(connector, here);
  EXPECT_EQ(page, here);
}

// Answers one request on a port of loopback.
class OneAnswer {
 public:
  explicit OneAnswer(std::string answer) : answer_(std::move(answer)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(listen(listener_, 1), 0);
    EXPECT_EQ(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    url_ = absl::StrCat("http://127.0.0.1:", ntohs(address.sin_port));
    server_ = std::thread([this] {
      const int fd = accept(listener_, nullptr, nullptr);
      char bytes[4096];
      const ssize_t count = recv(fd, bytes, sizeof bytes, 0);
      request_.assign(bytes, count > 0 ? static_cast<size_t>(count) : 0);
      EXPECT_EQ(send(fd, answer_.data(), answer_.size(), MSG_NOSIGNAL), static_cast<ssize_t>(answer_.size()));
      close(fd);
    });
  }
  ~OneAnswer() {
    if (server_.joinable()) server_.join();
    close(listener_);
  }
  const std::string& url() const { return url_; }
  std::string Request() {
    server_.join();
    return request_;
  }

 private:
  const std::string answer_;
  std::string url_, request_;
  int listener_ = -1;
  std::thread server_;
};

TEST(EngineMetrics, AreReadOverHttp) {
  OneAnswer server(absl::StrCat("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n", kTypes, kServing));
  const absl::StatusOr<std::vector<Finding>> findings = ExamineEngine(server.url());
  ASSERT_TRUE(findings.ok()) << findings.status();
  EXPECT_EQ((*findings)[0].found, "serving (none)");
  EXPECT_THAT(server.Request(), HasSubstr("GET /metrics HTTP/1.0\r\nHost: 127.0.0.1:"));
}

TEST(EngineMetrics, FailuresNameTheAddressAndWhatIsExpected) {
  const auto error = [](const std::string& url) { return std::string(ExamineEngine(url).status().message()); };
  {
    OneAnswer server("HTTP/1.1 404 Not Found\r\n\r\n");
    EXPECT_THAT(error(server.url() + "/metrix"), HasSubstr("/metrix: HTTP status 404; expected the metrics endpoint"));
  }
  {
    OneAnswer server("SSH-2.0\r\n");
    EXPECT_THAT(error(server.url()), HasSubstr("the answer is not HTTP"));
  }
  EXPECT_THAT(error("http://127.0.0.1:1/metrics"), HasSubstr("127.0.0.1:1/metrics: Connection refused"));
  for (const char* url : {"https://localhost:8000", "localhost:8000", "http://", "http://h:0", "http://h:x/metrics",
                          "http://[::1", "http://h/a b", "http://u@h/metrics"}) {
    EXPECT_THAT(error(url), HasSubstr("is not supported; expected http://HOST:PORT/metrics")) << url;
  }
}

}  // namespace
}  // namespace ashlar::ctl
