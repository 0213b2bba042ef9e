// SPDX-License-Identifier: Apache-2.0
// integration_engine RPC_SOCKET SESSION_SOCKET UID COMMAND SEED SEGMENTS TOKENS [LEASE]
//
// Connects as user UID (0: unchanged), does one operation with the prompt MakePrompt(SEED, SEGMENTS, TOKENS), prints
// the result in one line, and then waits to be killed.
//   match    look the prompt up and keep the lease          prints "LEASE REASON…"
//   attach   attach LEASE (hex), check tuples of all hits   prints "ok REASON…"
//   reserve  reserve all segments and publish none          prints "OUTCOME…"
//   publish  publish all segments                           prints "published"
//   fork     fork a child that outlives its parent          prints "forked"
//   quiesce  publish and match, and at the first line that  prints "matched in process PID", "unresolved",
//            it reads land and abandon; at the second wait  "quiesced"
//            until that landing is quiesced
//   combine  plan the prompt's prefill, compute slowly what  prints "planning", "planned PENDING", "landed"
//            is its own, wait for the rest, land all of it
//   prefill  compute slowly what other engines miss        prints "serving", and "taken" at each segment
//   keep     publish and land over and over, also while    prints "keeping", and at each line that it reads
//            no daemon is there                            "asked N landed N kept N lost N failed N"
//   connect  connect and do nothing else                    prints the status's code
//   arenas   ask for every arena that there may be          prints "arenas COUNT", how many were granted
#include <grp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/escaping.h"
#include "ashlar/v1/session.pb.h"
#include "client/session/prefill.h"
#include "proto/hex.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/raw_session.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {
namespace {

std::string Reasons(const std::vector<SegmentResult>& segments) {
  std::string line;
  for (const SegmentResult& segment : segments) line += " " + std::string(Name(segment.reason));
  return line;
}

struct Command {
  std::string name;
  std::vector<Tokens> prompt;
  std::string lease;
};

// A child that lives until its output is no longer read.
std::string ForkChild() {
  if (::fork() == 0) {
    struct pollfd reader = {.fd = STDOUT_FILENO, .events = 0, .revents = 0};
    ::poll(&reader, 1, -1);
    ::_exit(0);
  }
  return "forked";
}

void Print(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

// The test has frozen the daemon when the landing begins, and killed it when its end is awaited.
void StayUnresolved(TestEngine& engine, const Command& command) {
  constexpr std::chrono::milliseconds kImpatience{50};
  engine.PublishPrompt(command.prompt);
  const Match match = engine.Lookup(command.prompt);
  Print("matched in process " + std::to_string(::getpid()));
  std::getchar();
  Landing landing = engine.Land(match, command.prompt);
  landing.Wait(kImpatience);
  Print(landing.WaitQuiesced(kImpatience) ? "quiesced too early" : "unresolved");
  std::getchar();
  Print(landing.WaitQuiesced(kPatience / 2) ? "quiesced" : "still unresolved");
}

constexpr std::chrono::milliseconds kSlowly{20};  // a segment

// Leaves it unpublished for most of the time, like an engine that computes.
bool ComputeAndPublish(TestEngine& engine, ObjectKind kind, const Tokens& run) {
  const Reservation reservation = engine.Reserve(kind, run);
  std::this_thread::sleep_for(kSlowly);
  if (!reservation.granted()) return reservation.outcome == ReserveOutcome::kAlreadyPresent;
  return engine.model().Publish(reservation, engine.Compute(kind, run)) == PublishOutcome::kPublished;
}

// Keeps its plan, its lease and its landing until it is killed.
void Combine(TestEngine& engine, const std::vector<Tokens>& prompt) {
  Print("planning");
  std::vector<ObjectRun> runs;
  for (size_t i = 0; i < prompt.size(); ++i)
    runs.push_back({.kind = KindOfSegment(i), .tokens = prompt[i], .media = {}});
  PrefillPlan plan = engine.model().PlanPrefill(runs);
  Print("planned " + std::to_string(std::ranges::count(plan.states, PrefillState::kPending)));
  std::vector<bool> computed(prompt.size(), false);
  for (bool pending = true; pending;) {
    for (size_t i = 0; i < prompt.size(); ++i) {
      if (plan.states[i] != PrefillState::kOwn || computed[i]) continue;
      computed[i] = true;
      ComputeAndPublish(engine, KindOfSegment(i), prompt[i]);
    }
    pending = engine.model().AwaitPrefill(plan, kPatience / 2);
    for (size_t i = 0; i < prompt.size(); ++i) pending |= plan.states[i] == PrefillState::kOwn && !computed[i];
  }
  const Match match = engine.Lookup(prompt);
  Landing landing = engine.Land(match, prompt);
  landing.Wait(kPatience);
  Print("landed");
  for (;;) ::pause();
}

void ServePrefill(TestEngine& engine) {
  std::vector<PrefillResult> results;
  Print("serving");
  for (;;) {
    const auto given = engine.model().ServePrefill(results, std::chrono::milliseconds(100));
    results.clear();
    if (!given.ok() || !given->has_value()) continue;
    Print("taken");
    const PrefillWork& work = **given;
    const bool published = ComputeAndPublish(engine, work.kind, work.tokens);
    results.push_back({.assignment = work.assignment, .generation = work.generation, .published = published});
  }
}

// Runs until killed. `kept`: texts whose publish was acknowledged; `lost`: the ones of them that a lookup now misses.
void Keep(TestEngine& engine, size_t tokens) {
  constexpr size_t kMostTexts = 200;  // fits into a small daemon
  constexpr uint64_t kFirstSeed = 1000;
  struct pollfd line = {.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
  std::vector<Tokens> kept;
  size_t asked = 0, landed = 0;
  Print("keeping");
  for (uint64_t round = 0;; ++round) {
    const Tokens fresh = MakeRun(kFirstSeed + round, tokens);
    if (kept.size() < kMostTexts && ComputeAndPublish(engine, KindOfSegment(0), fresh)) kept.push_back(fresh);
    const std::vector<Tokens> prompt = {kept.empty() ? fresh : kept[round % kept.size()]};
    engine.FillTargets(std::byte{0});
    ++asked;
    const Match match = engine.Lookup(prompt);
    if (engine.Land(match, prompt).Wait(kPatience) == std::vector<MissReason>{MissReason::kNone}) {
      ++landed;
      engine.ExpectLanded(KindOfSegment(0), prompt[0], 0, std::byte{0});
    }
    if (::poll(&line, 1, 0) <= 0) continue;
    for (int c = std::getchar(); c != '\n';) {
      if (c == EOF) ::_exit(0);
      c = std::getchar();
    }
    size_t lost = 0;
    for (const Tokens& text : kept) lost += engine.Lookup({text}).segments()[0].hit() ? 0 : 1;
    Print("asked " + std::to_string(asked) + " landed " + std::to_string(landed) + " kept " +
          std::to_string(kept.size()) + " lost " + std::to_string(lost) + " failed " +
          (testing::Test::HasFailure() ? "1" : "0"));
  }
}

std::string Execute(TestEngine& engine, const Command& command, std::vector<Match>& held) {
  if (command.name == "fork") return ForkChild();
  if (command.name == "publish") {
    engine.PublishPrompt(command.prompt);
    return testing::Test::HasFailure() ? "failed" : "published";
  }
  if (command.name == "reserve") {
    std::string line = "reserved";
    for (size_t i = 0; i < command.prompt.size(); ++i) {
      line += " " + std::string(Name(engine.Reserve(KindOfSegment(i), command.prompt[i]).outcome));
    }
    return line;
  }
  if (command.name == "attach") {
    std::vector<uint64_t> lengths;
    for (const Tokens& run : command.prompt) lengths.push_back(run.size());
    held.push_back(engine.model().Attach(BytesOfHex(command.lease), lengths));
    for (size_t i = 0; i < lengths.size(); ++i) {
      if (held.back().segments()[i].hit()) engine.ExpectTuples(held.back(), i, command.prompt[i]);
    }
    return (testing::Test::HasFailure() ? "failed" : "ok") + Reasons(held.back().segments());
  }
  held.push_back(engine.Lookup(command.prompt));
  if (command.name == "match") return absl::BytesToHexString(held.back().lease()) + Reasons(held.back().segments());
  return "unknown command";
}

std::string CountArenas(const ClientOptions& daemon) {
  constexpr uint32_t kNumbers = 64;
  RawSession session(daemon);
  session.Greet();
  size_t granted = 0;
  for (uint32_t arena = 0; arena < kNumbers; ++arena) {
    v1::SessionRequest request;
    request.mutable_get_arena()->set_arena(arena);
    size_t descriptors = 0;
    session.Send(request);
    session.Receive(&descriptors);
    granted += descriptors;
  }
  return "arenas " + std::to_string(granted);
}

int Main(int argc, char** argv) {
  if (argc < 8) return 2;
  if (const auto uid = static_cast<uid_t>(std::atoi(argv[3])); uid != 0) {
    // Keeps its group, which the sockets' mode admits.
    if (::setgroups(0, nullptr) != 0 || ::setuid(uid) != 0) return 2;
  }
  Command command{.name = argv[4],
                  .prompt = MakePrompt(std::strtoull(argv[5], nullptr, 10), std::strtoull(argv[6], nullptr, 10),
                                       std::strtoull(argv[7], nullptr, 10)),
                  .lease = argc > 8 ? argv[8] : ""};
  const ClientOptions daemon{
      .rpc_socket = argv[1], .session_socket = argv[2], .timeout = kPatience, .name = "engine_process"};
  if (command.name == "connect") {
    Print(absl::StatusCodeToString(Client::Connect(daemon).status().code()));
    return 0;
  }
  if (command.name == "arenas") {
    Print(CountArenas(daemon));
    return 0;
  }
  TestEngine engine(daemon);
  std::vector<Match> held;
  if (command.name == "combine") Combine(engine, command.prompt);
  if (command.name == "prefill") ServePrefill(engine);
  if (command.name == "keep") Keep(engine, command.prompt[0].size());
  if (command.name == "quiesce") {
    StayUnresolved(engine, command);
  } else {
    Print(Execute(engine, command, held));
  }
  for (;;) ::pause();
}

}  // namespace
}  // namespace ashlar::integration

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return ashlar::integration::Main(argc, argv);
}
