// ashlar-replay: what policies make of recorded requests.
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tools/replay/commands.h"

namespace ashlar::replay {

constexpr const char* kUsage =
    "usage: ashlar-replay run --trace PATH[,PATH…] --format stf|mooncake|cc|marconi --capacity 10GB[,20GB…]\n"
    "                         --policy POLICY[,POLICY…] [--boundaries on|off] [--model MODEL] [--threads N]\n"
    "                         [--json FILE] [--plot FILE.svg]\n"
    "       ashlar-replay pareto --trace PATH[,PATH…] --format … [--model MODEL] [--json FILE] [--plot FILE.svg]\n"
    "       ashlar-replay segments --trace PATH[,PATH…] --format stf [--capacity 10GB[,…]] [--model MODEL] [--json "
    "FILE]\n"
    "\n"
    "  run     replays each trace through every policy at every capacity\n"
    "            none            nothing is kept\n"
    "            block:N         a state every N tokens, pages of 64, least recently used first\n"
    "            sglang          a state at branches and ends, least recently used first\n"
    "            marconi         the same, by FLOP efficiency; alpha is tuned as published, or given: marconi:ALPHA\n"
    "            ashlar          the daemon's own; ashlar:N where engines capture at multiples of N tokens only\n"
    "          --boundaries is accepted and changes nothing: no policy is told where segments of prompts end\n"
    "  pareto  tokens that may be skipped against checkpoints an entry, by way of placing them: learned from the "
    "first\n"
    "          half of the trace, scored on the second\n"
    "  segments  what may be skipped where the boundaries of segments are known: prefixes and segments in the best "
    "cover,\n"
    "          without a limit and at each capacity, with and without seams, transitions dense and as adaptive ones "
    "are\n"
    "\n"
    "  MODEL   marconi-7b (default), qwen3-next, kimi-linear, ring-mini, or a JSON file\n";

namespace {

absl::Status Set(const std::string& name, const std::string& value, Options& options) {
  const std::vector<std::string> values = absl::StrSplit(value, ',', absl::SkipEmpty());
  if (name == "--trace") {
    options.traces = values;
  } else if (name == "--format") {
    options.format = value;
  } else if (name == "--model") {
    options.model = value;
  } else if (name == "--policy") {
    options.policies = values;
  } else if (name == "--json") {
    options.json = value;
  } else if (name == "--plot") {
    options.plot = value;
  } else if (name == "--capacity") {
    for (const std::string& one : values) {
      const absl::StatusOr<uint64_t> bytes = ParseBytes(one);
      if (!bytes.ok()) return bytes.status();
      options.capacities.push_back(*bytes);
    }
  } else if (name == "--threads") {
    const auto parsed = std::from_chars(value.data(), value.data() + value.size(), options.threads);
    if (parsed.ec != std::errc() || *parsed.ptr != '\0' || options.threads < 1 || options.threads > 1024) {
      return absl::InvalidArgumentError(absl::StrCat("threads: ", value, " is not a number from 1 to 1024"));
    }
  } else if (name == "--boundaries" && (value == "on" || value == "off")) {
    // Accepted for scripts that were written when policies could be told where segments end. It changes nothing.
  } else {
    return absl::InvalidArgumentError(absl::StrCat(name, " ", value, ": unknown option or value"));
  }
  return absl::OkStatus();
}

absl::Status Check(const std::string& command, const Options& options) {
  const auto missing = [](const char* name) { return absl::InvalidArgumentError(absl::StrCat(name, ": is missing")); };
  if (options.traces.empty()) return missing("--trace");
  if (options.format.empty()) return missing("--format");
  if (command != "run") return absl::OkStatus();
  if (options.capacities.empty()) return missing("--capacity");
  if (options.policies.empty()) return missing("--policy");
  return absl::OkStatus();
}

// Writes the files that were asked for. A plot that fails costs neither the table nor the JSON.
absl::Status Write(const Options& options, const Figures& figures) {
  absl::Status status;
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) status = absl::ErrnoToStatus(errno, "stdout: cannot write the table");
  if (!options.json.empty()) status.Update(WriteFile(options.json, figures.json.dump(2) + "\n"));
  if (!options.plot.empty() && !figures.curves.panels.empty()) {
    const absl::StatusOr<std::string> picture = Draw(figures.curves);
    status.Update(picture.ok() ? WriteFile(options.plot, *picture) : picture.status());
  }
  return status;
}

int Main(int argc, char** argv) {
  using Command = absl::Status (*)(const Options&, Figures&);
  static const std::map<std::string, Command> kCommands = {
      {"run", RunTraces}, {"pareto", ComparePlacements}, {"segments", ReuseSegments}};
  const std::string name = argc > 1 ? argv[1] : "";
  if (name == "--help" || name == "-h") {
    std::fputs(kUsage, stdout);
    return 0;
  }
  const auto command = kCommands.find(name);
  Options options;
  absl::Status status;
  if (command == kCommands.end()) status = absl::InvalidArgumentError(absl::StrCat("command: ", name, " is unknown"));
  for (int i = 2; status.ok() && i < argc; i += 2) {
    status = i + 1 < argc ? Set(argv[i], argv[i + 1], options)
                          : absl::InvalidArgumentError(absl::StrCat(argv[i], ": needs a value"));
  }
  if (status.ok()) status = Check(name, options);
  if (!status.ok()) {
    std::fprintf(stderr, "error: %s\n%s", std::string(status.message()).c_str(), kUsage);
    return 2;
  }
  Figures figures;
  status = command->second(options, figures);
  if (status.ok()) status = Write(options, figures);
  if (status.ok()) return 0;
  std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace ashlar::replay

int main(int argc, char** argv) {
  return ashlar::replay::Main(argc, argv);
}
