// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <string>

#include "examples/rag/conversation_job.h"
#include "examples/rag/in_place_job.h"
#include "examples/rag/main_job.h"
#include "proto/limits.h"

namespace {

constexpr const char* kUsage =
    "usage: ashlar-demo [--docs DIR] [--quick] [--json FILE] [--sections N] [--sections-per-prompt N] [--requests N]\n"
    "                   [--threads N] [--seed N] [--compose engine|daemon] [--family gdn|lightning]\n"
    "                   [--epsilon X] [--hbm SIZE] [--dram SIZE] [--ssd SIZE] [--nodes N]\n"
    "       ashlar-demo --in-place [--docs DIR] [--quick] [--json FILE] [--sections N] [--sections-per-prompt N]\n"
    "                   [--requests N] [--threads N] [--seed N] [--family gdn|lightning] [--dram SIZE]\n"
    "       ashlar-demo --conversations N [--turns M] [--decode N] [--regenerate] [--span-type f32|f16|bf16]\n"
    "                   and the options above\n"
    "Answers questions about the text files in DIR (default /usr/share/common-licenses) in four ways: full\n"
    "recompute, prefix cache, naive addition, Ashlar. Prints the savings and the loss of fidelity. With\n"
    "--conversations, runs N conversations about the files, of M turns each (default 4). Each one is left after\n"
    "every turn and resumed. Half of them start with the same instructions, half with retrieved sections (default\n"
    "4; --sections-per-prompt). The command fails if the logits of a text without sections differ from full\n"
    "recompute by more than 1e-5.\n"
    "With --regenerate, every turn after the first diverges from the text inside the last answer. The states\n"
    "there are rebuilt from the inputs that the engine captured (a span), and compared with full recompute.\n"
    "  --quick   a small corpus and a dozen requests: a few minutes on 2 cores\n"
    "  --in-place  run all requests at the same time; they read one copy of each segment in place (MEPIC). Prints\n"
    "            the pages saved. Fails if logits differ by more than 1e-5 from those of landed copies\n"
    "  --compose process that composes cached interiors and computes seams: engine (default) or daemon\n"
    "  --family  family of the linear layers: gated delta net (default), or lightning attention with RoPE\n"
    "  --epsilon largest error of a stored transition, in the spectral norm; 0 stores it unchanged\n"
    "  --nodes   number of daemons in a cluster on this machine, with etcd (Debian's etcd-server). Requests go to\n"
    "            them in turn, and each one serves the objects of the others. Not with --conversations\n"
    "  --hbm, --dram, --ssd  capacity of each daemon's tiers, such as 200MiB. By default only dram, large enough for\n"
    "            everything. Without a GPU, hbm is emulated in host memory\n";

bool ParseNumber(const char* name, const char* text, long least, long greatest, long* value) {
  char* end = nullptr;
  *value = std::strtol(text, &end, 10);
  if (*text != '\0' && *end == '\0' && *value >= least && *value <= greatest) return true;
  std::fprintf(stderr, "%s: '%s' is invalid; expected a number from %ld to %ld\n", name, text, least, greatest);
  return false;
}

bool ParseEpsilon(const char* text, double* value) {
  char* end = nullptr;
  *value = std::strtod(text, &end);
  if (*text != '\0' && *end == '\0' && *value >= 0 && *value < 1) return true;
  std::fprintf(stderr, "--epsilon: '%s' is invalid; expected a number of at least 0 and less than 1\n", text);
  return false;
}

bool ParseSize(const char* name, const std::string& text, uint64_t* bytes) {
  static const std::map<std::string, int> kUnits = {{"", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
  const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
  const auto unit = kUnits.find(text.substr(digits));
  if (digits > 0 && digits <= 9 && unit != kUnits.end()) {
    *bytes = std::stoull(text.substr(0, digits)) << unit->second;
    if (*bytes >= ashlar::limits::kExtentBytes) return true;
  }
  std::fprintf(stderr, "%s: '%s' is invalid; expected a size of at least 256KiB\n", name, text.c_str());
  return false;
}

// Reads an option whose value is a number. Returns false if there is no such option. `valid`: whether the value is
// valid.
bool ParseNumbered(const std::string& name, const char* value, ashlar::rag::ConversationOptions& options, bool* valid) {
  ashlar::rag::JobOptions& job = options.job;
  const struct {
    const char* name;
    long least, greatest;
    std::function<void(long)> set;
  } kNumbers[] = {
      {"--sections", 1, 100000, [&](long n) { job.sections = n; }},
      {"--sections-per-prompt", 1, 64, [&](long n) { job.sections_per_prompt = n; }},
      {"--conversations", 1, 1000, [&](long n) { options.conversations = n; }},
      {"--turns", 1, 1000, [&](long n) { options.turns = n; }},
      {"--decode", 0, 10000, [&](long n) { options.decode = n; }},
      {"--requests", 1, 10000, [&](long n) { job.requests = n; }},
      {"--nodes", 1, 16, [&](long n) { job.nodes = static_cast<size_t>(n); }},
      {"--threads", 1, 256, [&](long n) { job.threads = static_cast<int>(n); }},
      {"--seed", 0, 1L << 31, [&](long n) { job.seed = static_cast<uint64_t>(n); }},
  };
  const auto* const option = std::ranges::find(kNumbers, name, [](const auto& each) { return each.name; });
  if (option == std::end(kNumbers)) return false;
  long number = 0;
  *valid = ParseNumber(option->name, value, option->least, option->greatest, &number);
  if (*valid) option->set(number);
  return true;
}

// Reads an option whose value is one of a few words.
template <typename T>
bool ParseWord(const char* name, const std::string& text, const char* words, const std::map<std::string, T>& values,
               T* value) {
  const auto found = values.find(text);
  if (found != values.end()) {
    *value = found->second;
    return true;
  }
  std::fprintf(stderr, "%s: '%s' is invalid; expected %s\n", name, text.c_str(), words);
  return false;
}

// Reads any other option with a value. Returns false if there is no such option.
bool ParseNamed(const std::string& name, const char* value, ashlar::rag::ConversationOptions& options,
                std::string& json, bool* valid) {
  using ashlar::DType, ashlar::Family, ashlar::rag::ComposeBy;
  ashlar::rag::JobOptions& job = options.job;
  *valid = true;
  if (name == "--docs") {
    job.docs = value;
  } else if (name == "--json") {
    json = value;
  } else if (name == "--epsilon") {
    *valid = ParseEpsilon(value, &job.epsilon);
  } else if (name == "--hbm") {
    *valid = ParseSize("--hbm", value, &job.hbm_bytes);
  } else if (name == "--dram") {
    *valid = ParseSize("--dram", value, &job.dram_bytes);
  } else if (name == "--ssd") {
    *valid = ParseSize("--ssd", value, &job.ssd_bytes);
  } else if (name == "--span-type") {
    *valid =
        ParseWord<DType>("--span-type", value, "f32, f16 or bf16",
                         {{"f32", DType::kF32}, {"f16", DType::kF16}, {"bf16", DType::kBF16}}, &options.span_dtype);
  } else if (name == "--family") {
    *valid = ParseWord<Family>("--family", value, "gdn or lightning",
                               {{"gdn", Family::kGdn}, {"lightning", Family::kLightning}}, &job.family);
  } else if (name == "--compose") {
    *valid = ParseWord<ComposeBy>("--compose", value, "engine or daemon",
                                  {{"engine", ComposeBy::kEngine}, {"daemon", ComposeBy::kDaemon}}, &job.compose);
  } else {
    return false;
  }
  return true;
}

// Returns an exit code, or -1 to continue. The main job runs unless the conversations' options are given.
int Parse(int argc, char** argv, ashlar::rag::ConversationOptions& options, bool& in_place, std::string& json) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--help") return std::fputs(kUsage, stdout), 0;
    if (name == "--quick") {
      options.job.sections = 40;
      options.job.requests = 12;
      continue;
    }
    if (name == "--regenerate") {
      options.regenerate = true;
      continue;
    }
    if (name == "--in-place") {
      in_place = true;
      continue;
    }
    if (i + 1 == argc)
      return std::fprintf(stderr, "%s: unknown option, or its value is missing\n%s", name.c_str(), kUsage), 2;
    const char* const value = argv[++i];
    bool valid = false;
    if (!ParseNumbered(name, value, options, &valid) && !ParseNamed(name, value, options, json, &valid)) {
      return std::fprintf(stderr, "%s: unknown option\n%s", name.c_str(), kUsage), 2;
    }
    if (!valid) return 2;
  }
  return -1;
}

// Prints the summary of a run and writes it to the file `json`, if given. Returns the exit code.
template <typename Result>
int Report(const absl::StatusOr<Result>& run, const std::string& json) {
  if (!run.ok()) {
    std::fprintf(stderr, "ashlar-demo: %s\n", run.status().ToString().c_str());
    return 1;
  }
  PrintSummary(*run);
  if (json.empty()) return 0;
  std::ofstream out(json);
  out << ToJson(*run).dump(2) << "\n";
  if (!out.flush()) {
    std::fprintf(stderr, "--json: cannot write %s\n", json.c_str());
    return 1;
  }
  return 0;
}

int RunConversations(ashlar::rag::ConversationOptions& options, const std::string& json) {
  if (options.job.nodes > 1) return std::fputs("--nodes: --conversations needs one node; expected 1\n", stderr), 2;
  if (options.job.sections_per_prompt == 0) options.job.sections_per_prompt = 4;
  const auto run = ashlar::rag::RunConversationJob(options);
  if (const int code = Report(run, json); code != 0) return code;
  if (run->Holds()) return 0;
  std::fprintf(stderr, "ashlar-demo: logits or states of a resumed text differ from full recompute\n");
  return 1;
}

int ShareInPlace(const ashlar::rag::ConversationOptions& options, const std::string& json) {
  ashlar::rag::JobOptions job = options.job;
  if (options.conversations > 0) return std::fputs("--in-place: not with --conversations\n", stderr), 2;
  if (job.nodes > 1) return std::fputs("--in-place: not with --nodes\n", stderr), 2;
  if (job.sections_per_prompt == 0) job.sections_per_prompt = 16;
  const auto run = ashlar::rag::RunInPlaceJob(job);
  if (const int code = Report(run, json); code != 0) return code;
  if (run->Holds()) return 0;
  std::fprintf(stderr, "ashlar-demo: logits of segments shared in place differ from those of landed copies\n");
  return 1;
}

int Answer(ashlar::rag::JobOptions& options, const std::string& json) {
  if (options.sections_per_prompt == 0) options.sections_per_prompt = 16;
  return Report(ashlar::rag::RunMainJob(options), json);
}

}  // namespace

int main(int argc, char** argv) {
  ashlar::rag::ConversationOptions options;
  std::string json;
  options.job.sections_per_prompt = 0;  // a default that suits the job
  bool in_place = false;
  if (const int code = Parse(argc, argv, options, in_place, json); code >= 0) return code;
  if (in_place) return ShareInPlace(options, json);
  return options.conversations > 0 ? RunConversations(options, json) : Answer(options.job, json);
}
