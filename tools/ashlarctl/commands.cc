// SPDX-License-Identifier: Apache-2.0
// The table of ashlarctl's commands.
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/manual.h"

namespace ashlar::ctl {
namespace {

const Option kTenant = {"tenant", "NAME", "tenant name in the daemon's configuration", {}};

// The options that name texts, and `more`.
std::vector<Option> TextOptions(std::vector<Option> more) {
  std::vector<Option> options = {
      kTenant,
      {"namespace", "HEX", "namespace of the model, or a unique prefix of it", {}},
      {"model-file", "FILE", "file with the identity and layout of the model, instead of --namespace", {}},
      {"kind", "KIND", "kind of the texts", {"prompt", "segment", "checkpoint"}},
      {"binary", "", "the files hold little-endian int32 instead of decimal numbers", {}},
      {"salt", "TEXT", "salt of the prompts", {}}};
  options.insert(options.end(), more.begin(), more.end());
  return options;
}

constexpr const char* kTokens = "TOKENS-FILE...";

std::vector<Command> CommandsOnObjects() {
  return {
      {"explain", kTokens, "show what a lookup of these texts finds, or why it misses",
       "Each file holds token ids. The first file is the prefix of the prompt. With --last, give no files: the "
       "command lists the latest misses.",
       TextOptions({{"last", "N", "list the latest N misses of each tenant", {}}}), Explain},
      {"probe",
       kTokens,
       "estimate how much of a prompt this node has cached, and how busy it is",
       "The files together are the prompt. With --segments, each file but the last is one of its segments. If the "
       "engine has opened the model a second time for its segments, both layouts are probed. With tensor parallelism, "
       "only the segments of vLLM's rank 0 are probed. No lookup is counted. With --cluster, nodes that do not answer "
       "within 100 ms are left out; the cheapest is where the first token is expected first.",
       {kTenant,
        {"namespace", "HEX", "namespace of the model, or a unique prefix of it", {}},
        {"model-id", "NAME", "model_id of the model, instead of --namespace; neither is needed for a single model", {}},
        {"segments", "", "each file but the last is a segment", {}},
        {"cluster", "", "also ask the other nodes, and name the cheapest", {}},
        {"binary", "", "the files hold little-endian int32 instead of decimal numbers", {}},
        {"salt", "TEXT", "salt of the prompt", {}}},
       Probe},
      {"pin", kTokens, "pin the objects of these texts",
       "A pinned object stays in at least one tier until the pin ends. A second pin replaces the first.",
       TextOptions({{"until", "TIME", "end of the pin in RFC 3339 format, such as 2030-12-31T23:59:59Z", {}},
                    {"hard", "", "pin without an end", {}}}),
       Pin},
      {"unpin", kTokens, "remove a pin", "", TextOptions({}), Unpin},
      {"evict", kTokens, "evict the objects of these texts from all tiers",
       "The bytes of a leased object are freed when its leases end.", TextOptions({}), Evict},
      {"warm", kTokens, "let engines that offer prefill compute these texts",
       "The first file is the prefix of the prompt. A prefix and a segment have different keys: use --kind segment for "
       "texts that follow others. The command waits, and fails if a text is not in the cache at the end. A text is "
       "tried again until then, unless each engine that was asked can never compute it.",
       TextOptions({{"seconds", "S", "longest wait in seconds; default 600", {}}}), Warm},
  };
}

const Option kNamespace = {"namespace", "HEX", "namespace of the model, or a unique prefix of it", {}};

std::vector<Command> CommandsOnMany() {
  return {
      {"ls",
       "",
       "list objects: tenant, key, kind, size, tiers, uses, ages",
       "Objects are listed in order of insertion. Each is listed once, even if the cache changes meanwhile.",
       {kTenant,
        kNamespace,
        {"kind", "KIND", "list only this kind", {"segment", "checkpoint", "prefix_page", "span"}},
        {"tier", "TIER", "list only objects with a complete copy in this tier", {"hbm", "dram", "ssd"}},
        {"limit", "N", "largest number of objects; default 1000", {}},
        {"after", "CURSOR", "continue at the cursor that an earlier listing printed", {}}},
       Ls},
      {"erase",
       "",
       "erase everything that is cached or recorded of a tenant or a model",
       "Later lookups find nothing. An earlier lookup keeps what it found; leased bytes are freed when their leases "
       "end. On the disk, records are deleted and bytes are overwritten, so that a crash restores nothing. What "
       "engines publish afterwards stays. All nodes of a cluster erase; an absent node erases when it returns within "
       "30 days. The command fails if a node or its disk does not acknowledge in time; run it again in that case.",
       {kTenant,
        kNamespace,
        {"dry-run", "", "only print how much would be erased on this node", {}},
        {"this-node", "", "erase on this node only; other nodes keep their copies and may send them here again", {}},
        {"seconds", "S", "longest wait for disks and other nodes; default 60", {}}},
       Erase},
      {"verify",
       "",
       "verify the checksums of all copies in all tiers at a bounded rate",
       "Damaged copies are dropped and become misses. The command waits, and fails if a copy was damaged.",
       {{"rate",
         "SIZE",
         "bytes per second, such as 64MiB; default scrub.bytes_per_second, or 256MiB if that is off",
         {}},
        {"no-wait", "", "start the verification and return", {}},
        {"status", "", "start nothing; print the progress of the current pass, or the result of the last one", {}}},
       Verify},
  };
}

std::vector<Command> CommandsOnTheDaemon() {
  return {
      {"status",
       "",
       "print the state of the daemon on a few lines",
       "The command fails if the daemon is draining, if a tier takes no writes, or in a cluster if etcd or every "
       "peer is unreachable.",
       {},
       Status},
      {"top",
       "",
       "show hit rates, misses and tenants live, per interval",
       "The view fits the terminal. It ends with Ctrl-C, or after --count intervals.",
       {{"interval", "S", "seconds between two views; default 2", {}},
        {"count", "N", "number of views; required with --json", {}},
        {"color", "WHEN", "when to use colors; auto: on a terminal", {"auto", "always", "never"}}},
       Top},
      {"models", "", "list the models that engines opened last, and their namespaces", "", {kTenant}, Models},
      {"stats", "", "print tiers, tenants, hit rates, reasons of misses, evictions", "", {}, Stats},
      {"sessions", "", "list the connected engines", "", {}, Sessions},
      {"peers",
       "",
       "list the other nodes of the cluster as this node sees them",
       "For each peer: its transport, its throughput, the round-trip time, its failures, and the objects that the two "
       "nodes hold for each other.",
       {},
       Peers},
      {"drain",
       "",
       "finish requests in flight and write to the disk what is in memory only",
       "The command waits, and fails if something is left at the end.",
       {{"seconds", "S", "longest wait; default drain_seconds of the daemon", {}}},
       Drain},
      {"undrain", "", "accept requests again", "", {}, Undrain},
      {"config", "", "print the effective configuration", "", {}, Config},
      {"reload",
       "",
       "reload the configuration file, as SIGHUP does",
       "A reload applies all changes or none. It is refused, with their names, if fields that need a restart changed.",
       {{"dry-run", "", "only print what would change", {}}},
       Reload},
      {"support-bundle",
       "FILE",
       "write a JSON file with what support needs to diagnose the daemon",
       "The file has the status, statistics, sessions, peers, models, misses, configuration and machine settings, but "
       "no metrics and no log. Names of tenants, models, engines, users and nodes, and addresses of nodes, are "
       "replaced "
       "by numbers; paths stay. FILE must not exist and gets mode 0600; - writes to standard output.",
       {},
       SupportBundle},
  };
}

std::vector<Command> CommandsOnItself() {
  return {
      {"health",
       "",
       "check whether the daemon serves engines; for probes",
       "Calls grpc.health.v1.Health on the engines' socket, as load balancers do. The command fails unless the "
       "answer is serving.",
       {{"rpc-socket",
         "PATH",
         "default $ASHLAR_RPC_SOCKET, or rpc.sock in /run/ashlar, or in $XDG_RUNTIME_DIR/ashlar",
         {}},
        {"service", "NAME", "ashlar.v1.Ssd for the disk tier; default: the whole daemon", {}},
        {"seconds", "S", "longest wait for the answer; default 5", {}}},
       Health,
       {},
       /*offline=*/true},
      {"doctor",
       "",
       "check this machine, or why an engine does not use the cache, and print remedies",
       "Checks the limits, the control group and the configuration of the daemon that listens on the socket. Without "
       "a daemon, it checks the limits of ashlarctl and the configuration that --config names. The output says which. "
       "With --engine, it reads the metrics of an engine instead, and fails if the engine does not use the cache. "
       "The command fails if a check is bad; a note does not fail it.",
       {{"engine", "URL", "metrics endpoint of an engine to check, such as http://localhost:8000/metrics", {}},
        {"config", "FILE", "configuration file of the daemon; the options below override it", {}},
        {"dram", "SIZE", "dram.capacity_bytes to check, such as 64GiB", {}},
        {"folder", "PATH", "ssd.folder to check; a small file is written there and removed", {}},
        {"ssd", "SIZE", "ssd.capacity_bytes to check", {}},
        {"lock", "", "check for dram.lock: arenas that are never swapped out", {}},
        {"rdma", "", "check for RDMA between peers", {}}},
       Doctor},
      {"layout",
       "CONFIG-JSON...",
       "print the bytes that a token, a segment and a conversation of a model take",
       "Each CONFIG-JSON is a Hugging Face config.json, or a list {\"models\": [{\"model\": NAME, \"config\": "
       "{...}}]}. "
       "With --segments or --conversations, the output also has the bytes of that working set. A configuration with an "
       "unknown field that may change the layout is refused, with the name of the field; the others are still printed, "
       "and the exit code is 2. The command needs no daemon.",
       {{"segment-tokens", "N", "tokens per segment; default 1024", {}},
        {"conversation-tokens", "N", "tokens per conversation; default 32768", {}},
        {"segments", "N", "number of segments in the working set", {}},
        {"conversations", "N", "number of conversations in the working set", {}},
        {"page-tokens", "N", "tokens per page of the engine; default 16", {}},
        {"head", "N", "tokens of the seam at the start of a segment; default 4", {}},
        {"tail", "N", "tokens of the seam at the end of a segment; default 4", {}},
        {"state-type", "TYPE", "data type of running states", {"float32", "bfloat16", "float16"}}},
       LayoutCosts,
       {},
       /*offline=*/true},
      {"completion",
       "SHELL",
       "print a completion script for a shell",
       "bash: source the script, or write it to /usr/share/bash-completion/completions/ashlarctl. zsh: write it to "
       "_ashlarctl in a directory of $fpath. fish: write it to ~/.config/fish/completions/ashlarctl.fish.",
       {},
       Completion,
       {"bash", "zsh", "fish"},
       /*offline=*/true},
      {"man",
       "",
       "print the manual page as troff",
       "To read it, run: ashlarctl man | man -l -",
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
  static constexpr const char* kJsonHelp =
      "print the answer as JSON, or write it to FILE and print the text; with operands: --json=FILE";
  static const auto* const options =
      new std::vector<Option>{{"json", "[FILE]", kJsonHelp, {}}, {"help", "", "print the help of the command", {}}};
  return *options;
}

const Option& SocketOption() {
  static const auto* const option =
      new Option{"socket",
                 "PATH",
                 "admin socket of the daemon; default $ASHLAR_ADMIN_SOCKET, or admin.sock in /run/ashlar, or in "
                 "$XDG_RUNTIME_DIR/ashlar",
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
