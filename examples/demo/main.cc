#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <string>

#include "examples/rag/main_job.h"
#include "examples/talk/talk_job.h"
#include "proto/limits.h"

namespace {

constexpr const char* kUsage =
    "usage: ashlar-demo [--docs DIR] [--quick] [--json FILE] [--sections N] [--sections-per-prompt N] [--requests N]\n"
    "                   [--threads N] [--seed N] [--compose engine|daemon] [--family gdn|lightning]\n"
    "                   [--epsilon X] [--hbm SIZE] [--dram SIZE] [--ssd SIZE]\n"
    "       ashlar-demo --conversations N [--turns M] [--decode N] [--regenerate] [--span-type f32|f16|bf16] and the "
    "same\n"
    "Answers questions about the text files in DIR (default /usr/share/common-licenses) four ways: full recompute, "
    "prefix\n"
    "cache, naive addition, Ashlar. Prints what was saved and what it cost in fidelity. Or has N conversations about "
    "them,\n"
    "of M turns each (default 4), that are left after every turn and resumed: half of them begin with instructions "
    "that "
    "they\n"
    "share, half with retrieved sections (4, unless --sections-per-prompt says so). Fails if logits of a text without\n"
    "sections are further than 1e-5 from full recompute's.\n"
    "With --regenerate every next turn parts from the text inside the last answer; the states there are rebuilt from\n"
    "the inputs that the engine captured of it (a span), and held to full recompute's.\n"
    "  --quick   a small corpus and a dozen requests: a few minutes on 2 cores\n"
    "  --compose whose kernels compose cached interiors and compute seams: the engine's (default), or the daemon's\n"
    "  --family  of the linear layers: gated delta net (default), or lightning attention with RoPE inside its layers\n"
    "  --epsilon how far a stored transition may be from the computed one, in the spectral norm; 0 to store it as it "
    "is\n"
    "  --hbm, --dram, --ssd  how much the daemon's tiers hold, as in 200MiB. By default one tier, dram, holds "
    "everything;\n"
    "            without a GPU hbm is emulated in the processor's memory\n";

bool ParseNumber(const char* name, const char* text, long least, long greatest, long* value) {
  char* end = nullptr;
  *value = std::strtol(text, &end, 10);
  if (*text != '\0' && *end == '\0' && *value >= least && *value <= greatest) return true;
  std::fprintf(stderr, "%s: must be a number from %ld to %ld, not '%s'\n", name, least, greatest, text);
  return false;
}

bool ParseEpsilon(const char* text, double* value) {
  char* end = nullptr;
  *value = std::strtod(text, &end);
  if (*text != '\0' && *end == '\0' && *value >= 0 && *value < 1) return true;
  std::fprintf(stderr, "--epsilon: must be a number from 0 to below 1, not '%s'\n", text);
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
  std::fprintf(stderr, "%s: must be a size of at least 256KiB, not '%s'\n", name, text.c_str());
  return false;
}

// Returns an exit code, or -1 to continue. Without the conversations' options, the main job runs.
int Parse(int argc, char** argv, ashlar::talk::TalkOptions& talk, std::string& json) {
  ashlar::rag::JobOptions& options = talk.job;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--help") return std::fputs(kUsage, stdout), 0;
    if (name == "--quick") {
      options.sections = 40;
      options.requests = 12;
      continue;
    }
    if (name == "--regenerate") {
      talk.regenerate = true;
      continue;
    }
    if (i + 1 == argc)
      return std::fprintf(stderr, "%s: unknown option, or its value is missing\n%s", name.c_str(), kUsage), 2;
    const char* value = argv[++i];
    long number = 0;
    if (name == "--docs") {
      options.docs = value;
    } else if (name == "--json") {
      json = value;
    } else if (name == "--sections") {
      if (!ParseNumber("--sections", value, 1, 100000, &number)) return 2;
      options.sections = number;
    } else if (name == "--sections-per-prompt") {
      if (!ParseNumber("--sections-per-prompt", value, 1, 64, &number)) return 2;
      options.sections_per_prompt = number;
    } else if (name == "--conversations") {
      if (!ParseNumber("--conversations", value, 1, 1000, &number)) return 2;
      talk.conversations = number;
    } else if (name == "--turns") {
      if (!ParseNumber("--turns", value, 1, 1000, &number)) return 2;
      talk.turns = number;
    } else if (name == "--decode") {
      if (!ParseNumber("--decode", value, 0, 10000, &number)) return 2;
      talk.decode = number;
    } else if (name == "--span-type") {
      static const std::map<std::string, ashlar::DType> kTypes = {
          {"f32", ashlar::DType::kF32}, {"f16", ashlar::DType::kF16}, {"bf16", ashlar::DType::kBF16}};
      const auto type = kTypes.find(value);
      if (type == kTypes.end())
        return std::fprintf(stderr, "--span-type: must be f32, f16 or bf16, not '%s'\n", value), 2;
      talk.span_dtype = type->second;
    } else if (name == "--requests") {
      if (!ParseNumber("--requests", value, 1, 10000, &number)) return 2;
      options.requests = number;
    } else if (name == "--threads") {
      if (!ParseNumber("--threads", value, 1, 256, &number)) return 2;
      options.threads = static_cast<int>(number);
    } else if (name == "--seed") {
      if (!ParseNumber("--seed", value, 0, 1L << 31, &number)) return 2;
      options.seed = static_cast<uint64_t>(number);
    } else if (name == "--epsilon") {
      if (!ParseEpsilon(value, &options.epsilon)) return 2;
    } else if (name == "--hbm") {
      if (!ParseSize("--hbm", value, &options.hbm_bytes)) return 2;
    } else if (name == "--dram") {
      if (!ParseSize("--dram", value, &options.dram_bytes)) return 2;
    } else if (name == "--ssd") {
      if (!ParseSize("--ssd", value, &options.ssd_bytes)) return 2;
    } else if (name == "--family") {
      if (std::strcmp(value, "gdn") != 0 && std::strcmp(value, "lightning") != 0) {
        return std::fprintf(stderr, "--family: must be gdn or lightning, not '%s'\n", value), 2;
      }
      const bool lightning = std::strcmp(value, "lightning") == 0;
      options.family = lightning ? ashlar::Family::kLightning : ashlar::Family::kGdn;
    } else if (name == "--compose") {
      if (std::strcmp(value, "engine") != 0 && std::strcmp(value, "daemon") != 0) {
        return std::fprintf(stderr, "--compose: must be engine or daemon, not '%s'\n", value), 2;
      }
      options.compose =
          std::strcmp(value, "daemon") == 0 ? ashlar::rag::ComposeBy::kDaemon : ashlar::rag::ComposeBy::kEngine;
    } else {
      return std::fprintf(stderr, "%s: unknown option\n%s", name.c_str(), kUsage), 2;
    }
  }
  return -1;
}

// Prints the summary of what was run and writes it to the file `json`, where there is one. Exit code.
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

int Talk(ashlar::talk::TalkOptions& options, const std::string& json) {
  if (options.job.sections_per_prompt == 0) options.job.sections_per_prompt = 4;
  const auto talk = ashlar::talk::RunTalkJob(options);
  if (const int code = Report(talk, json); code != 0) return code;
  if (talk->Holds()) return 0;
  std::fprintf(stderr, "ashlar-demo: a resumed text's logits, or its states, are not those of full recompute\n");
  return 1;
}

int Answer(ashlar::rag::JobOptions& options, const std::string& json) {
  if (options.sections_per_prompt == 0) options.sections_per_prompt = 16;
  return Report(ashlar::rag::RunMainJob(options), json);
}

}  // namespace

int main(int argc, char** argv) {
  ashlar::talk::TalkOptions options;
  std::string json;
  options.job.sections_per_prompt = 0;  // as many as suit what is run
  if (const int code = Parse(argc, argv, options, json); code >= 0) return code;
  return options.conversations > 0 ? Talk(options, json) : Answer(options.job, json);
}
