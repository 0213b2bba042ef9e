#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <string>

#include "tools/bench/bench.h"
#include "tools/bench/mirror.h"
#include "tools/bench/transfer.h"
#include "tools/load/load.h"
#include "tools/neighbours/neighbours.h"

namespace {

using ashlar::bench::Options;

constexpr const char* kUsage =
    "usage: ashlar-bench COMMAND [FILE] [--json FILE] [--repetitions N] [--threads N]\n"
    "  land         landing of cached attention pages through a daemon, against memcpy; handing over tuples by "
    "mapping\n"
    "  sharing      what requests hold that share segments in place, against copies for each; --quick: 25 in flight\n"
    "  entries      what a match, a touch and an eviction cost among 1,000,000 objects, against a look-up in a hash\n"
    "               table, and what an object takes; --quick: 20,000\n"
    "  prefix       walking a prompt of 131,072 tokens through the prefix tree, against comparing them; requests and\n"
    "               evictions among 1,000,000 nodes, against a look-up in a hash table; --quick: 20,000\n"
    "  store        values of 64 KiB to 16 MiB, put and got by another process than the daemon, against memcpy;\n"
    "               --compare redis: and against a Redis server; --quick: small values\n"
    "  load         time to first token and throughput of engine processes under Poisson arrivals, for full "
    "recompute,\n"
    "               prefix cache and Ashlar; --threads: that many engines; --quick: a few requests\n"
    "  neighbours   one tenant's match, landing and release alone and under seven attacks of another, as root; "
    "--seconds "
    "N:\n"
    "               of each attack; --filter TEXT: only such; --quick: 1.5 seconds, smaller; exits with 0 only if the "
    "bar "
    "is met\n"
    "  ssd          values of 256 KiB to 16 MiB on a disk, through the SSD tier, against the disk alone; --dir DIR: "
    "where;\n"
    "               --engine blobdb: RocksDB's blob files in the tier's place; --quick: few values\n"
    "  transfer     values of 64 KiB to 64 MiB between two daemons' transports, on loopback and between two network\n"
    "               namespaces (as root), against TCP streams and ucx_perftest; --quick: few values\n"
    "  router       a cold prompt of 11 segments, of one length and of mixed lengths, that engines of 1, 2, 4 and 8\n"
    "               nodes compute at once, prefill emulated, against the bound of longest-first and a transfer; "
    "--quick: 1 and\n"
    "               2 nodes, 3 segments, once\n"
    "  remote       a prompt to landed from another node, from the node's own memory and disk, and computed "
    "(emulated);\n"
    "               --dir DIR: where the disk is; --quick: one segment, twice\n"
    "  traffic      landings from a node's own memory, alone and while it fetches and is fetched from; --seconds N: of "
    "each\n"
    "               phase; --quick: 2 seconds\n"
    "  mirror       eight daemons and 1,000,000 entries in etcd: memory, time from scratch, announcements a second; a\n"
    "               look-up of 128 k tokens without and with the mirror full; --quick: 2 daemons, 8,000 entries\n"
    "  decode       a batch from buffers against recurrent decoding; verifying drafts against steps that keep states;\n"
    "               what measured costs choose; the reference engine's loop both ways; --filter steps, choices or\n"
    "               engine\n"
    "  kernels      every operation of the host back end, against copy bandwidth and multiply-add units;\n"
    "               --filter TEXT: only cases whose \"op family dtype shape\" contains it; --quick: small shapes\n"
    "  transitions  what storing transitions as zero, low rank or dense saves, and what it costs in error\n"
    "  vectors FILE holds every back end to the test vectors of FILE; exits with 0 only if all are met\n";

bool WriteJson(const std::string& path, const nlohmann::json& figures) {
  std::ofstream out(path);
  out << figures.dump(2) << "\n";
  if (out.flush()) return true;
  std::fprintf(stderr, "--json: cannot write %s\n", path.c_str());
  return false;
}

bool ParseOptions(int argc, char** argv, Options& options) {
  const std::string command = argv[1];
  for (int i = 2; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--quick") {
      options.quick = true;
      continue;
    }
    if (command == "vectors" && options.file.empty() && name.rfind("--", 0) != 0) {
      options.file = name;
      continue;
    }
    if (i + 1 == argc) {
      std::fprintf(stderr, "%s: needs a value\n", name.c_str());
      return false;
    }
    const char* value = argv[++i];
    char* end = nullptr;
    const long number = std::strtol(value, &end, 10);
    const bool positive = *end == '\0' && number > 0 && number <= 1000;
    if (name == "--json") {
      options.json = value;
    } else if (name == "--filter") {
      options.filter = value;
    } else if (name == "--dir") {
      options.dir = value;
    } else if (name == "--engine") {
      options.engine = value;
    } else if (name == "--compare") {
      options.compare = value;
    } else if (name == "--repetitions" && positive) {
      options.repetitions = static_cast<int>(number);
    } else if (name == "--seconds" && positive) {
      options.seconds = static_cast<int>(number);
    } else if (name == "--threads" && positive) {
      options.threads = static_cast<int>(number);
    } else {
      std::fprintf(stderr, "%s %s: unknown option or bad value\n%s", name.c_str(), value, kUsage);
      return false;
    }
  }
  if (command == "vectors" && options.file.empty()) {
    std::fprintf(stderr, "vectors: FILE is missing\n%s", kUsage);
    return false;
  }
  return true;
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
  return -1;  // none
}

}  // namespace

int main(int argc, char** argv) {
  if (const int code = RunRole(argc, argv); code >= 0) return code;
  const std::map<std::string, std::function<absl::Status(const Options&, nlohmann::json&)>> commands = {
      {"land", ashlar::bench::Land},
      {"sharing", ashlar::bench::Sharing},
      {"entries", ashlar::bench::Entries},
      {"prefix", ashlar::bench::Prefix},
      {"store", ashlar::bench::Store},
      {"load", Load},
      {"neighbours", Neighbours},
      {"ssd", ashlar::bench::Ssd},
      {"transfer", ashlar::bench::Transfer},
      {"router", ashlar::bench::Router},
      {"remote", ashlar::bench::Remote},
      {"traffic", ashlar::bench::Traffic},
      {"mirror", ashlar::bench::Mirror},
      {"decode", ashlar::bench::Decode},
      {"kernels", ashlar::bench::TimeKernels},
      {"transitions", ashlar::bench::Transitions},
      {"vectors", ashlar::bench::CheckVectorsFile}};
  const auto command = commands.find(argc > 1 ? argv[1] : "");
  if (command == commands.end()) {
    std::fputs(kUsage, argc > 1 && std::string(argv[1]) == "--help" ? stdout : stderr);
    return argc > 1 && std::string(argv[1]) == "--help" ? 0 : 2;
  }
  Options options;
  if (!ParseOptions(argc, argv, options)) return 2;
  nlohmann::json figures;
  const absl::Status status = command->second(options, figures);
  if (!status.ok()) std::fprintf(stderr, "ashlar-bench %s: %s\n", argv[1], status.ToString().c_str());
  // Vectors that are not met have figures too.
  const bool wanted = !options.json.empty() && (status.ok() || !figures.is_null());
  if (wanted && !WriteJson(options.json, figures)) return 1;
  return status.ok() ? 0 : 1;
}
