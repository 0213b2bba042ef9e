// SPDX-License-Identifier: Apache-2.0
// ashlar-replay: simulates cache policies on recorded requests.
#include <cerrno>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/byte_size.h"
#include "proto/limits.h"
#include "tools/command_line/command_line.h"
#include "tools/replay/commands.h"

namespace ashlar::replay {
namespace {

constexpr const char* kPolicies =
    "\nPolicies:\n"
    "  none             no cache\n"
    "  block:N          a state every N tokens, pages of up to 64 tokens, evicted by last use\n"
    "  vllm             vLLM's align mode with shared-prefix checkpoints: blocks of at least 16 tokens, evicted by "
    "last\n"
    "                   use; vllm:N also has a state every N tokens (prefix_cache_retention_interval, by default 0)\n"
    "  sglang           a state at branches and ends, evicted by last use\n"
    "  sglang-now       SGLang's tree with branching checkpoints: states and pages in two pools, each evicted by last "
    "use\n"
    "  marconi          like sglang, evicted by FLOP efficiency; alpha is tuned as published, fixed by marconi:ALPHA,\n"
    "                   or the best of all by marconi:oracle\n"
    "  marconi-offload  like vllm, evicted by uses × exp(−DECAY × age) / (depth + 1), with the age in requests;\n"
    "                   marconi-offload:DECAY sets DECAY (default: 0.1)\n"
    "  ashlar           the daemon's policy; ashlar:N checkpoints inside prompts at multiples of N only\n";

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
  return command;
}

void AddThreads(CLI::App* command, Options& options) {
  command->add_option("--threads", options.threads, "Number of threads; default: all cores.")
      ->type_name("N")
      ->check(CLI::Range(1, 1024).description(""))
      ->take_last();
}

CLI::Option* AddPolicies(CLI::App* command, Options& options) {
  return command->add_option("--policy", options.policies, "Policies, separated by commas.")
      ->type_name("POLICY[,POLICY...]")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->required();
}

void AddCapture(CLI::App* command, Options& options, const char* about) {
  command->add_option("--capture", options.capture, about)
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 20).description(""))
      ->take_last();
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
    if (*bytes == 0) return absl::InvalidArgumentError("--capacity: 0; expected at least 1 byte");
    options.capacities.push_back(*bytes);
  }
  return absl::OkStatus();
}

CLI::App* AddBreakEven(CLI::App& app, Options& options, std::vector<std::string>& links) {
  CLI::App* const command =
      app.add_subcommand("break-even", "Compute the shortest segments that are faster to move than to compute.");
  command->add_option("--model", options.models, "Models, separated by commas; default: all built-in ones.")
      ->type_name("MODEL[,MODEL...]")
      ->delimiter(',')
      ->allow_extra_args(false);
  command->add_option("--link", links, "Bytes per second between store and engine, separated by commas; default: 50GB.")
      ->type_name("SIZE[,SIZE...]")
      ->delimiter(',')
      ->allow_extra_args(false);
  command->add_option("--json", options.json, "Write the figures to this JSON file.")->type_name("FILE")->take_last();
  command->footer("\nThe segment is at position 4096 of its prompt.");
  return command;
}

absl::Status ReadLinks(const std::vector<std::string>& rates, Options& options) {
  if (!rates.empty()) options.links.clear();
  for (const std::string& rate : rates) {
    const absl::StatusOr<uint64_t> bytes = ParseByteSize(rate);
    if (!bytes.ok()) return absl::InvalidArgumentError(absl::StrCat("--link: ", bytes.status().message()));
    if (*bytes == 0) return absl::InvalidArgumentError("--link: 0; expected at least 1 byte per second");
    options.links.push_back(*bytes);
  }
  return absl::OkStatus();
}

struct ServeSizes {
  std::string dram, ssd;
};

CLI::App* AddServe(CLI::App& app, Options& options, ServeSizes& sizes) {
  ServeOptions& given = options.serve;
  CLI::App* const serve =
      AddCommand(app, "serve", "Replay each trace through a real daemon, with an emulated engine.", options);
  AddPolicies(serve, options)->check(CLI::IsMember({"ashlar", "lru", "none"}));
  serve->add_option("--arrival-rate", given.arrival_rates, "Requests per second, separated by commas.")
      ->type_name("RATE[,RATE...]")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Range(0.001, 1e6).description(""))
      ->required();
  serve->add_option("--dram", sizes.dram, "Capacity of the dram tier, before --scale.")->type_name("SIZE")->required();
  serve->add_option("--ssd", sizes.ssd, "Capacity of the ssd tier, before --scale; default: no such tier.")
      ->type_name("SIZE")
      ->take_last();
  serve->add_option("--admission", given.admission, "ssd.admission: second_use (the daemon's default), all or tinylfu.")
      ->type_name("NAME")
      ->check(CLI::IsMember({"all", "second_use", "tinylfu"}))
      ->take_last();
  serve->add_option("--scale", given.scale, "Divide all sizes of the model and the tiers by N; default: 16.")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 20).description(""))
      ->take_last();
  serve
      ->add_option("--prefill-rate", given.prefill_rates,
                   "Measured tokens per second of prefill by prompt length, separated by commas; default: the model's "
                   "FLOPs at its rate.")
      ->type_name("TOKENS:RATE[,...]")
      ->delimiter(',')
      ->allow_extra_args(false);
  serve->add_option("--requests", given.requests, "Replay at most N requests of each trace; default: 400.")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 30).description(""))
      ->take_last();
  serve->add_option("--running", given.running, "Number of requests that the engine runs at a time; default: 16.")
      ->type_name("N")
      ->check(CLI::Range(1, 1024).description(""))
      ->take_last();
  serve->add_option("--daemon", given.daemon, "ashlard to start; default: the one beside this program.")
      ->type_name("PATH")
      ->take_last();
  AddCapture(serve, options, "States are captured at multiples of N tokens only; default: 64.");
  serve->footer(
      "\nPolicies:\n"
      "  ashlar  the daemon as it is\n"
      "  lru     eviction: lru, and every offered state is kept until it is the least recently used\n"
      "  none    no daemon: every prompt is computed\n"
      "\nEach policy has a fresh daemon at each rate. Emulated: prefill sleeps, one prompt at a time; decoding takes "
      "no "
      "time.\nReal: lookups, landings, commits, evictions and copies between tiers. Sessions take turns: a request "
      "waits for the\nprevious one of its session.");
  return serve;
}

absl::Status ReadSizes(const ServeSizes& sizes, ServeOptions& options) {
  const absl::StatusOr<uint64_t> dram = ParseByteSize(sizes.dram);
  if (!dram.ok()) return absl::InvalidArgumentError(absl::StrCat("--dram: ", dram.status().message()));
  if (*dram / options.scale < limits::kExtentBytes) {
    return absl::InvalidArgumentError(absl::StrCat("--dram: ", sizes.dram, " is too small; expected at least ",
                                                   options.scale * limits::kExtentBytes, " bytes at --scale ",
                                                   options.scale));
  }
  options.dram_bytes = *dram;
  if (sizes.ssd.empty()) return absl::OkStatus();
  const absl::StatusOr<uint64_t> ssd = ParseByteSize(sizes.ssd);
  if (!ssd.ok()) return absl::InvalidArgumentError(absl::StrCat("--ssd: ", ssd.status().message()));
  options.ssd_bytes = *ssd;
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
  AddPolicies(run, options);
  AddCapture(run, options,
             "States are captured, and prompts resume, at multiples of N tokens only, with every policy; default: 64.");
  run->add_option(
         "--page", options.page,
         "Minimum number of tokens in a page of the ashlar policy. A partly filled page takes as many bytes as a full "
         "one. The daemon's pages have at least 256 tokens. Other policies are charged for tokens only. Default: 1.")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 20).description(""))
      ->take_last();
  AddThreads(run, options);
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
  AddThreads(pareto, options);
  CLI::App* const segments =
      AddCommand(app, "segments", "Compute the tokens skipped with known segment boundaries.", options);
  segments->footer(
      "\nCovers prompts by prefixes and segments: without a limit and at each capacity, with and without seams, with "
      "dense and\nwith adaptive transitions.");
  AddCapacities(segments, capacities);
  AddThreads(segments, options);
  AddCapture(segments, options, "States are captured at multiples of N tokens only; default: 64.");
  segments
      ->add_option("--state-type", options.state_type,
                   "Type of stored states and transitions: bf16 (default; vLLM's size) or fp32 (Transformers).")
      ->type_name("TYPE")
      ->check(CLI::IsMember({"bf16", "fp32"}))
      ->take_last();
  std::vector<std::string> links;
  CLI::App* const break_even = AddBreakEven(app, options, links);
  ServeSizes sizes;
  CLI::App* const serve = AddServe(app, options, sizes);
  if (const auto code = command_line::Parse(app, argc, argv)) return *code;
  const Command command = run->parsed()          ? RunTraces
                          : pareto->parsed()     ? ComparePlacements
                          : segments->parsed()   ? ReuseSegments
                          : break_even->parsed() ? FindBreakEven
                                                 : ServeTraces;
  if (app.get_subcommands().empty()) {
    std::fprintf(
        stderr,
        "ashlar-replay: command: expected run, pareto, segments, break-even or serve; see ashlar-replay --help\n");
    return command_line::kBadUsage;
  }
  absl::Status read = ReadCapacities(capacities, options);
  if (read.ok()) read = ReadLinks(links, options);
  if (read.ok() && serve->parsed()) read = ReadSizes(sizes, options.serve);
  if (!read.ok()) {
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
