// SPDX-License-Identifier: Apache-2.0
// ashlar-bench COMMAND: the table of its commands.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "tools/bench/bench.h"
#include "tools/bench/mirror.h"
#include "tools/bench/transfer.h"
#include "tools/command_line/command_line.h"
#include "tools/load/load.h"
#include "tools/neighbours/neighbours.h"

namespace {

using ashlar::bench::Options;

using Run = absl::Status (*)(const Options&, nlohmann::json&);

absl::Status Load(const Options& options, nlohmann::json& figures);
absl::Status Neighbours(const Options& options, nlohmann::json& figures);

struct Command {
  const char* name;
  Run run;
  std::vector<const char*> options;  // its options besides --json
  const char* about;
};

const std::vector<Command>& Commands() {
  static const auto* const commands = new std::vector<Command>{
      {"land",
       ashlar::bench::Land,
       {"repetitions", "threads"},
       "Landing of cached attention pages through a daemon, against memcpy; mapping of tuples."},
      {"sharing",
       ashlar::bench::Sharing,
       {"quick"},
       "Memory of requests that share segments in place, against a copy for each."},
      {"entries",
       ashlar::bench::Entries,
       {"quick", "repetitions"},
       "Match, touch and eviction among 1,000,000 objects, against a lookup in a hash table; size of an object."},
      {"prefix",
       ashlar::bench::Prefix,
       {"quick", "repetitions"},
       "Walk of 131,072 tokens through the prefix tree, against comparing them; requests among 1,000,000 nodes."},
      {"store",
       ashlar::bench::Store,
       {"compare", "quick", "repetitions", "threads"},
       "Values of 64 KiB to 16 MiB, put and got by another process than the daemon, against memcpy."},
      {"load",
       Load,
       {"quick", "threads"},
       "Time to first token and throughput under Poisson arrivals: full recompute, prefix cache, Ashlar."},
      {"neighbours",
       Neighbours,
       {"filter", "quick", "seconds"},
       "A tenant's calls alone and under seven attacks of another; needs root. Fails unless the bar is met."},
      {"ssd",
       ashlar::bench::Ssd,
       {"dir", "engine", "quick", "repetitions"},
       "Values of 256 KiB to 16 MiB through the SSD tier, against the disk alone."},
      {"transfer",
       ashlar::bench::Transfer,
       {"quick", "repetitions"},
       "Values of 64 KiB to 64 MiB between two daemons' transports, against TCP streams and ucx_perftest."},
      {"router",
       ashlar::bench::Router,
       {"quick", "repetitions"},
       "A cold prompt of 11 segments that engines of 1, 2, 4 and 8 nodes compute at once; prefill is emulated."},
      {"remote",
       ashlar::bench::Remote,
       {"dir", "quick", "repetitions"},
       "A prompt to landed: from another node, from the node's own memory and disk, and computed (emulated)."},
      {"traffic",
       ashlar::bench::Traffic,
       {"quick", "seconds"},
       "Landings from a node's own memory, alone and while it fetches and is fetched from."},
      {"mirror",
       ashlar::bench::Mirror,
       {"quick"},
       "Eight daemons and 1,000,000 entries in etcd: memory, time from scratch, announcements per second."},
      {"decode",
       ashlar::bench::Decode,
       {"filter", "quick", "repetitions", "threads"},
       "A batch from buffers against recurrent decoding; draft verification; the reference engine both ways."},
      {"kernels",
       ashlar::bench::TimeKernels,
       {"filter", "quick", "repetitions", "threads"},
       "Every operation of the host back end, against copy bandwidth and multiply-add units."},
      {"transitions",
       ashlar::bench::Transitions,
       {"quick", "repetitions", "threads"},
       "Bytes saved by storing transitions as zero, low rank or dense, and the error."},
      {"vectors",
       ashlar::bench::CheckVectorsFile,
       {"FILE"},
       "Checks every back end against the test vectors of FILE. Fails unless all are met."}};
  return *commands;
}

void AddOption(CLI::App* command, const std::string& name, Options& options) {
  const auto number = [&](int& value, const char* about) {
    command->add_option("--" + name, value, about)
        ->type_name("N")
        ->check(CLI::Range(1, 1000).description(""))
        ->take_last();
  };
  const auto text = [&](std::string& value, const char* type, const char* about) {
    return command->add_option("--" + name, value, about)->type_name(type)->take_last();
  };
  if (name == "FILE") command->add_option(name, options.file, "Test vectors.")->take_last();
  if (name == "quick") command->add_flag("--quick", options.quick, "Smaller sizes and fewer rounds.");
  if (name == "repetitions") number(options.repetitions, "Medians are taken over these; 9 if not given.");
  if (name == "threads") number(options.threads, "Threads, or engines of load; all cores if not given.");
  if (name == "seconds") number(options.seconds, "Seconds of each attack or phase.");
  if (name == "filter") text(options.filter, "TEXT", "Only cases whose name contains TEXT.");
  if (name == "dir") text(options.dir, "DIR", "Folder on the disk to measure.");
  if (name == "compare") text(options.compare, "NAME", "Compare with this server.")->check(CLI::IsMember({"redis"}));
  if (name == "engine") {
    text(options.engine, "NAME", "SSD tier, or RocksDB's blob files in its place.")
        ->check(CLI::IsMember({"tier", "blobdb"}));
  }
}

bool WriteJson(const std::string& path, const nlohmann::json& figures) {
  std::ofstream out(path);
  out << figures.dump(2) << "\n";
  if (out.flush()) return true;
  std::fprintf(stderr, "--json: cannot write %s\n", path.c_str());
  return false;
}

absl::Status Load(const Options& options, nlohmann::json& figures) {
  figures["machine"] = ashlar::bench::Machine();
  return ashlar::load::Run({.engines = options.threads, .quick = options.quick}, figures);
}

absl::Status Neighbours(const Options& options, nlohmann::json& figures) {
  figures["machine"] = ashlar::bench::Machine();
  return ashlar::neighbours::Run(
      {.seconds = static_cast<double>(options.seconds), .quick = options.quick, .filter = options.filter}, figures);
}

// Runs the roles that `load`, `neighbours`, `mirror` and `transfer` start in new processes of this program.
int RunRole(int argc, char** argv) {
  const std::string role = argc > 1 ? argv[1] : "";
  if (role == "load-engine" && argc == 5) return ashlar::load::RunEngine(argv[2], argv[3], argv[4]);
  if (role == "neighbours-victim" && argc == 4) return ashlar::neighbours::RunVictim(argv[2], argv[3]);
  if (role == "neighbours-attacker" && argc == 7) {
    return ashlar::neighbours::RunAttacker(argv[2], argv[3], argv[4], argv[5], std::string(argv[6]) == "quick");
  }
  if (role == "mirror-holder" && argc == 7) {
    return ashlar::bench::RunMirrorHolder(argv[2], argv[3], argv[4], argv[5], argv[6]);
  }
  if (role == "transfer-holder" && argc == 3) return ashlar::bench::RunTransferHolder(argv[2]);
  if (role == "transfer-asker" && argc == 6) return ashlar::bench::RunTransferAsker(argv[2], argv[3], argv[4], argv[5]);
  return -1;  // not a role
}

}  // namespace

int main(int argc, char** argv) {
  if (const int code = RunRole(argc, argv); code >= 0) return code;
  CLI::App app("Measures Ashlar beside the limits of the machine.", "ashlar-bench");
  Options options;
  for (const Command& each : Commands()) {
    CLI::App* const command = app.add_subcommand(each.name, each.about);
    for (const char* const option : each.options) AddOption(command, option, options);
    command->add_option("--json", options.json, "File for the figures.")->type_name("FILE")->take_last();
  }
  if (const auto code = ashlar::command_line::Parse(app, argc, argv)) return *code;
  const auto command =
      std::ranges::find_if(Commands(), [&](const Command& each) { return app.got_subcommand(each.name); });
  if (command == Commands().end() || (app.got_subcommand("vectors") && options.file.empty())) {
    std::fprintf(stderr, "ashlar-bench: a %s is missing; see ashlar-bench --help\n",
                 command == Commands().end() ? "command" : "FILE of vectors");
    return ashlar::command_line::kBadUsage;
  }
  nlohmann::json figures;
  const absl::Status status = command->run(options, figures);
  if (!status.ok()) std::fprintf(stderr, "ashlar-bench %s: %s\n", command->name, status.ToString().c_str());
  // Vectors that are not met have figures too.
  const bool wanted = !options.json.empty() && (status.ok() || !figures.is_null());
  if (wanted && !WriteJson(options.json, figures)) return 1;
  return ashlar::command_line::Finish("ashlar-bench", status.ok() ? 0 : 1);
}
