// SPDX-License-Identifier: Apache-2.0
// The table of ashlarctl's commands.
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/manual.h"

namespace ashlar::ctl {
namespace {

const Option kTenant = {"tenant", "NAME", "the tenant, as the configuration names it", {}};

// The options that name texts, and `more`.
std::vector<Option> TextOptions(std::vector<Option> more) {
  std::vector<Option> options = {
      kTenant,
      {"namespace", "HEX", "the model's namespace, or as many first digits as tell it from others", {}},
      {"model-file", "FILE", "the model's identity and layout, instead of its namespace", {}},
      {"kind", "KIND", "of what the texts are", {"prompt", "segment", "checkpoint"}},
      {"binary", "", "the files hold int32 little endian, not decimal numbers", {}},
      {"salt", "TEXT", "the salt of the prompts that these texts are of", {}}};
  options.insert(options.end(), more.begin(), more.end());
  return options;
}

constexpr const char* kTokens = "TOKENS-FILE...";

std::vector<Command> CommandsOnObjects() {
  return {
      {"explain", kTokens, "what a look-up of these texts finds, or why it misses",
       "The first file is the prompt's prefix. Each file holds token ids. With --last and without files: the latest "
       "misses.",
       TextOptions({{"last", "N", "the latest N misses of each tenant", {}}}), Explain},
      {"pin", kTokens, "keeps the objects of these texts in some tier",
       "Whoever needs the space, the objects stay until the time is over. A second pin replaces the first.",
       TextOptions({{"until", "TIME", "as in RFC 3339: 2030-12-31T23:59:59Z", {}}, {"hard", "", "for good", {}}}), Pin},
      {"unpin", kTokens, "ends a pin", "", TextOptions({}), Unpin},
      {"evict", kTokens, "takes the objects of these texts out of all tiers", "Leased bytes leave with their leases.",
       TextOptions({}), Evict},
      {"warm", kTokens, "has these texts computed by engines that offer prefill",
       "The first file is the prompt's prefix, which has another key than a segment: use --kind segment for texts that "
       "stand behind others. It waits, and fails if one of them is not in the cache then.",
       TextOptions({{"seconds", "S", "how long it waits, 600 if not given", {}}}), Warm},
  };
}

const Option kNamespace = {
    "namespace", "HEX", "the model's namespace, or as many first digits as tell it from others", {}};

std::vector<Command> CommandsOnMany() {
  return {
      {"ls",
       "",
       "the objects: tenant, key, kind, size, tiers, uses, ages",
       "In the order in which they came. Each is listed once, whatever comes and goes meanwhile.",
       {kTenant,
        kNamespace,
        {"kind", "KIND", "of this kind only", {"segment", "checkpoint", "prefix_page", "span"}},
        {"tier", "TIER", "of which this tier has a whole copy", {"hbm", "dram", "ssd"}},
        {"limit", "N", "at most so many, 1000 if not given", {}},
        {"after", "CURSOR", "go on behind an earlier listing, which said where", {}}},
       Ls},
      {"erase",
       "",
       "ends all that is cached, and known, of a tenant or of a model",
       "Look-ups that begin then find nothing of it; one that began before keeps what it found, and leased bytes leave "
       "memory with their leases; on the disk records are deleted and bytes overwritten, and a crash brings nothing "
       "back. "
       "What engines publish later stays. All nodes of a cluster do the same; those that are away do when they come "
       "back, "
       "within 30 days. It fails if a node, or its disk, does not acknowledge in time; call it again then.",
       {kTenant,
        kNamespace,
        {"dry-run", "", "only say how much it is, on this node", {}},
        {"this-node", "", "other nodes of the cluster keep theirs, and may give it to this one again", {}},
        {"seconds", "S", "how long it waits for disks and other nodes, 60 if not given", {}}},
       Erase},
      {"verify",
       "",
       "verifies the checksums of all copies in all tiers, at a bounded rate",
       "Damaged copies are dropped, so that they are misses. It waits, and fails if a copy was damaged.",
       {{"rate", "SIZE", "bytes per second, like 64MiB; else scrub.bytes_per_second, or 256MiB where that is off", {}},
        {"no-wait", "", "begin only", {}},
        {"status", "", "begin nothing: how far the pass under way is, or what the last one found", {}}},
       Verify},
  };
}

std::vector<Command> CommandsOnTheDaemon() {
  return {
      {"status",
       "",
       "how the daemon is, on a few lines",
       "It fails unless the daemon serves: if it drains, if a tier takes no writes, or in a cluster if etcd or all "
       "peers are not reached.",
       {},
       Status},
      {"top",
       "",
       "a live view: hit rates, misses and tenants in each interval",
       "It fits the terminal, and ends with Ctrl-C, or after --count intervals.",
       {{"interval", "S", "seconds between two views, 2 if not given", {}},
        {"count", "N", "views until it ends; needed with --json", {}},
        {"color", "WHEN", "auto: on a terminal", {"auto", "always", "never"}}},
       Top},
      {"models", "", "the models that engines opened last, and their namespaces", "", {kTenant}, Models},
      {"stats", "", "tiers, tenants, hit rates, reasons of misses, evictions", "", {}, Stats},
      {"sessions", "", "the engines that are connected", "", {}, Sessions},
      {"peers",
       "",
       "the other nodes of the cluster, as this one sees them",
       "Of each: what carries its bytes, how fast they come, how long a call takes, what failed, and what the two keep "
       "for each other.",
       {},
       Peers},
      {"drain",
       "",
       "ends what is under way and writes to the disk what memory alone has",
       "It waits, and fails if something is left then.",
       {{"seconds", "S", "how long it waits; else as long as the daemon would", {}}},
       Drain},
      {"undrain", "", "takes requests again", "", {}, Undrain},
      {"config", "", "the configuration in effect", "", {}, Config},
      {"reload",
       "",
       "reads the configuration's file again, as SIGHUP does",
       "All of it is taken over, or nothing: fields that need a restart are named, and refused.",
       {{"dry-run", "", "only say what would change", {}}},
       Reload},
      {"support-bundle",
       "FILE",
       "what others need to understand the daemon, in one JSON file",
       "Status, statistics, sessions, peers, models, misses, configuration and the machine's settings, no metrics and "
       "no log. "
       "Names of tenants, models, engines, users and nodes are replaced by numbers, and nodes' addresses; paths stay. "
       "FILE "
       "must not exist and gets mode 0600; - writes to the standard output.",
       {},
       SupportBundle},
  };
}

std::vector<Command> CommandsOnItself() {
  return {
      {"health",
       "",
       "whether the daemon serves engines, for probes",
       "Asks grpc.health.v1.Health on the engines' socket, as load balancers do. It fails unless the answer is "
       "serving.",
       {{"rpc-socket", "PATH", "else $ASHLAR_RPC_SOCKET, else /run/ashlar/rpc.sock", {}},
        {"service", "NAME", "ashlar.v1.Ssd: the disk tier; the whole daemon if not given", {}},
        {"seconds", "S", "how long the answer may take, 5 if not given", {}}},
       Health,
       {},
       /*offline=*/true},
      {"doctor",
       "",
       "the settings of this machine that will hurt a daemon, each with its remedy",
       "It looks at the limits, the control group and the configuration of the daemon that listens on the socket; "
       "where "
       "none does, at its own limits, and at the configuration that --config names. It says at which. It fails if one "
       "of "
       "them is bad, not merely worth a note.",
       {{"config", "FILE", "a configuration of the daemon; the options below replace what it says", {}},
        {"dram", "SIZE", "memory that the daemon shall have, like 64GiB", {}},
        {"folder", "PATH", "of the disk tier; a small file is written there and removed", {}},
        {"ssd", "SIZE", "disk that the daemon shall have there", {}},
        {"lock", "", "dram.lock is wanted: arenas that are never swapped out", {}},
        {"rdma", "", "peers shall be reached by RDMA", {}}},
       Doctor},
      {"layout",
       "CONFIG-JSON...",
       "what a token, a segment and a conversation of a model cost",
       "Each CONFIG-JSON is a model's config.json as on Hugging Face, or a list {\"models\": [{\"model\": NAME, "
       "\"config\": {...}}]}. With --segments or --conversations: what tiers must hold for so many of them. A "
       "configuration with a field that is not understood and may change the layout is refused, with the field's name; "
       "the others are still answered, and the exit code is 2. No daemon is asked.",
       {{"segment-tokens", "N", "tokens of a segment, 1024 if not given", {}},
        {"conversation-tokens", "N", "tokens of a conversation, 32768 if not given", {}},
        {"segments", "N", "segments of the working set", {}},
        {"conversations", "N", "conversations of the working set", {}},
        {"page-tokens", "N", "tokens of the engine's page, 16 if not given", {}},
        {"head", "N", "seam at the segment's begin, 4 tokens if not given", {}},
        {"tail", "N", "seam at its end, likewise", {}},
        {"state-type", "TYPE", "of running states", {"float32", "bfloat16", "float16"}}},
       LayoutCosts,
       {},
       /*offline=*/true},
      {"completion",
       "SHELL",
       "a completion script for that shell",
       "bash: source it, or put it into /usr/share/bash-completion/completions/ashlarctl. zsh: put it into a folder of "
       "$fpath as _ashlarctl. fish: put it into ~/.config/fish/completions/ashlarctl.fish.",
       {},
       Completion,
       {"bash", "zsh", "fish"},
       /*offline=*/true},
      {"man",
       "",
       "this program's manual page, as troff",
       "Read it with: ashlarctl man | man -l -",
       {},
       Manual,
       {},
       /*offline=*/true},
  };
}

}  // namespace

const std::vector<Command>& Commands() {
  static const auto* const commands = [] {
    auto* all = new std::vector<Command>();
    for (const auto& part : {CommandsOnObjects(), CommandsOnMany(), CommandsOnTheDaemon(), CommandsOnItself()}) {
      all->insert(all->end(), part.begin(), part.end());
    }
    return all;
  }();
  return *commands;
}

const std::vector<Option>& CommonOptions() {
  static const auto* const options = new std::vector<Option>{
      {"json", "", "the answer as JSON", {}}, {"help", "", "what the command does, and its options", {}}};
  return *options;
}

const Option& SocketOption() {
  static const auto* const option =
      new Option{"socket",
                 "PATH",
                 "listen.admin_socket of the daemon; else $ASHLAR_ADMIN_SOCKET, else /run/ashlar/admin.sock",
                 {}};
  return *option;
}

std::vector<Option> OptionsOf(const Command& command) {
  std::vector<Option> options = command.options;
  if (!command.offline) options.push_back(SocketOption());
  options.insert(options.end(), CommonOptions().begin(), CommonOptions().end());
  return options;
}

}  // namespace ashlar::ctl
