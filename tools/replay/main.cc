// SPDX-License-Identifier: Apache-2.0
// ashlar-replay: what policies make of recorded requests.
#include <cerrno>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/byte_size.h"
#include "tools/command_line/command_line.h"
#include "tools/replay/commands.h"

namespace ashlar::replay {
namespace {

constexpr const char* kPolicies =
    "\nPolicies:\n"
    "  none            no cache\n"
    "  block:N         a state every N tokens, pages of 64 tokens, evicted by last use\n"
    "  sglang          a state at branches and ends, evicted by last use\n"
    "  marconi         like sglang, evicted by FLOP efficiency; alpha is tuned as published, or fixed by "
    "marconi:ALPHA\n"
    "  ashlar          the daemon's policy; ashlar:N if engines capture only at multiples of N tokens\n";

using Command = absl::Status (*)(const Options&, Figures&);

CLI::App* AddCommand(CLI::App& app, const char* name, const char* about, Options& options) {
  CLI::App* const command = app.add_subcommand(name, about);
  command->add_option("--trace", options.traces, "Traces of one format, separated by commas.")
      ->type_name("PATH[,PATH...]")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->required();
  command->add_option("--format", options.format, "Format of the traces: stf, mooncake, cc or marconi.")
      ->type_name("FORMAT")
      ->take_last()
      ->required();
  command
      ->add_option("--model", options.model,
                   "marconi-7b (default), qwen3-next, kimi-linear, ring-mini, or a JSON file.")
      ->type_name("MODEL")
      ->take_last();
  command->add_option("--json", options.json, "Write the figures to this JSON file.")->type_name("FILE")->take_last();
  command->add_option("--threads", options.threads, "Number of threads; default: all cores.")
      ->type_name("N")
      ->check(CLI::Range(1, 1024).description(""))
      ->take_last();
  return command;
}

void AddPlot(CLI::App* command, Options& options) {
  command->add_option("--plot", options.plot, "SVG file for the curves, drawn by gnuplot.")
      ->type_name("FILE")
      ->take_last();
}

CLI::Option* AddCapacities(CLI::App* command, std::vector<std::string>& capacities) {
  return command->add_option("--capacity", capacities, "Capacities, such as 10GB or 64GiB, separated by commas.")
      ->type_name("SIZE[,SIZE...]")
      ->delimiter(',')
      ->allow_extra_args(false);
}

absl::Status ReadCapacities(const std::vector<std::string>& sizes, Options& options) {
  for (const std::string& size : sizes) {
    const absl::StatusOr<uint64_t> bytes = ParseByteSize(size);
    if (!bytes.ok()) return absl::InvalidArgumentError(absl::StrCat("--capacity: ", bytes.status().message()));
    if (*bytes == 0) return absl::InvalidArgumentError("--capacity: must be positive");
    options.capacities.push_back(*bytes);
  }
  return absl::OkStatus();
}

// Writes the files that were asked for. A plot that fails costs neither the table nor the JSON.
absl::Status Write(const Options& options, const Figures& figures) {
  absl::Status status;
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    status = absl::ErrnoToStatus(errno, "stdout: cannot write the table");
  if (!options.json.empty()) status.Update(WriteFile(options.json, figures.json.dump(2) + "\n"));
  if (!options.plot.empty() && !figures.curves.panels.empty()) {
    const absl::StatusOr<std::string> picture = Draw(figures.curves);
    status.Update(picture.ok() ? WriteFile(options.plot, *picture) : picture.status());
  }
  return status;
}

int Main(int argc, char** argv) {
  Options options;
  std::vector<std::string> capacities;
  CLI::App app("Replay recorded requests through cache policies.", "ashlar-replay");
  CLI::App* const run = AddCommand(app, "run", "Replay each trace through every policy at every capacity.", options);
  AddCapacities(run, capacities)->required();
  run->add_option("--policy", options.policies, "Policies, separated by commas.")
      ->type_name("POLICY[,POLICY...]")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->required();
  std::string boundaries;  // accepted for older scripts: no policy is told where segments end
  run->add_option("--boundaries", boundaries, "Ignored; accepted for compatibility with older scripts.")
      ->type_name("on|off")
      ->take_last();
  AddPlot(run, options);
  run->footer(kPolicies);
  CLI::App* const pareto = AddCommand(
      app, "pareto", "Compute the tokens skipped against checkpoints per entry, by placement policy.", options);
  pareto->footer("\nPlacements are learned from the first half of the trace and scored on the second.");
  AddPlot(pareto, options);
  CLI::App* const segments =
      AddCommand(app, "segments", "Compute the tokens skipped with known segment boundaries.", options);
  segments->footer(
      "\nCovers prompts by prefixes and segments: without a limit and at each capacity, with and without seams, with "
      "dense and\nwith adaptive transitions.");
  AddCapacities(segments, capacities);
  if (const auto code = command_line::Parse(app, argc, argv)) return *code;
  const Command command = run->parsed() ? RunTraces : pareto->parsed() ? ComparePlacements : ReuseSegments;
  if (app.get_subcommands().empty()) {
    std::fprintf(stderr, "ashlar-replay: command: expected run, pareto or segments; see ashlar-replay --help\n");
    return command_line::kBadUsage;
  }
  if (absl::Status read = ReadCapacities(capacities, options); !read.ok()) {
    std::fprintf(stderr, "ashlar-replay: %s\n", std::string(read.message()).c_str());
    return command_line::kBadUsage;
  }
  Figures figures;
  absl::Status status = command(options, figures);
  if (status.ok()) status = Write(options, figures);
  if (status.ok()) return 0;
  std::fprintf(stderr, "ashlar-replay: %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace ashlar::replay

int main(int argc, char** argv) {
  return ashlar::replay::Main(argc, argv);
}
