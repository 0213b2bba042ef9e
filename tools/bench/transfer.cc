// SPDX-License-Identifier: Apache-2.0
#include "tools/bench/transfer.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <sstream>

#include "absl/strings/str_cat.h"

namespace ashlar::bench {
namespace {

// A process with a pipe to its input and one from its output. Its input ends with this object.
class Child {
 public:
  explicit Child(std::vector<std::string> command, std::vector<std::string> environment = {}) {
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) return;
    pid_ = fork();
    if (pid_ == 0) {
      dup2(in[0], STDIN_FILENO);
      dup2(out[1], STDOUT_FILENO);
      for (std::string& variable : environment) putenv(variable.data());
      std::vector<char*> arguments;
      for (std::string& each : command) arguments.push_back(each.data());
      arguments.push_back(nullptr);
      execvp(arguments[0], arguments.data());
      _exit(127);
    }
    close(in[0]);
    close(out[1]);
    in_ = in[1];
    out_ = fdopen(out[0], "r");
  }
  ~Child() {
    if (in_ >= 0) close(in_);
    if (out_ != nullptr) std::fclose(out_);
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  std::string Line() {
    std::string line;
    for (int c; out_ != nullptr && (c = std::fgetc(out_)) != EOF && c != '\n';) line += static_cast<char>(c);
    return line;
  }
  std::string Rest() {
    std::string rest;
    for (int c; out_ != nullptr && (c = std::fgetc(out_)) != EOF;) rest += static_cast<char>(c);
    return rest;
  }

 private:
  pid_t pid_ = -1;
  int in_ = -1;
  FILE* out_ = nullptr;
};

// Two ends of a link: how to run a command there, and its address.
struct Link {
  const char* name;
  std::vector<std::string> holder_prefix, asker_prefix;
  std::string holder_host, asker_host;
};

int Run(const std::string& command) {
  return std::system(absl::StrCat("{ ", command, "; } > /dev/null 2>&1").c_str());
}

// Two network namespaces with a pair of veth between them, while this object lives.
class Namespaces {
 public:
  Namespaces() : a_(absl::StrCat("ashlar-a", getpid())), b_(absl::StrCat("ashlar-b", getpid())) {
    const bool made =
        Run(absl::StrCat("ip netns add ", a_, " && ip netns add ", b_, " && ip link add veth-a netns ", a_,
                         " type veth peer name veth-b netns ", b_, " && ip -n ", a_,
                         " addr add 10.213.7.1/24 dev veth-a && ip -n ", b_,
                         " addr add 10.213.7.2/24 dev veth-b && ip -n ", a_, " link set veth-a up && ip -n ", b_,
                         " link set veth-b up && ip -n ", a_, " link set lo up && ip -n ", b_, " link set lo up")) == 0;
    // The kernel reports the pair as running a moment after it is up; UCX checks before that.
    for (int i = 0; made && !ready_ && i < 100; ++i) {
      ready_ = Run(absl::StrCat("ip -n ", a_, " link show veth-a | grep -q 'state UP' && ip -n ", b_,
                                " link show veth-b | grep -q 'state UP'")) == 0;
      usleep(50'000);
    }
  }
  ~Namespaces() { Run(absl::StrCat("ip netns del ", a_, "; ip netns del ", b_)); }
  Namespaces(const Namespaces&) = delete;
  Namespaces& operator=(const Namespaces&) = delete;

  bool ready() const { return ready_; }
  Link link() const {
    return {"netns", {"ip", "netns", "exec", a_}, {"ip", "netns", "exec", b_}, "10.213.7.1", "10.213.7.2"};
  }

 private:
  const std::string a_, b_;
  bool ready_ = false;
};

std::vector<std::string> Join(std::vector<std::string> prefix, const std::vector<std::string>& command) {
  prefix.insert(prefix.end(), command.begin(), command.end());
  return prefix;
}

// GB/s of ucx_perftest's ucp_am_bw with segments as large as the transport's; 0: it is not installed, or failed.
double Perftest(const Link& link, uint64_t bytes, uint64_t total) {
  const std::vector<std::string> environment = {"UCX_TLS=tcp,self", "UCX_TCP_TX_SEG_SIZE=260k",
                                                "UCX_TCP_RX_SEG_SIZE=260k"};
  const std::string port = std::to_string(20000 + getpid() % 10000);
  const std::string count = std::to_string(std::max<uint64_t>(total / bytes, 4));
  Child server(Join(link.holder_prefix, {"ucx_perftest", "-p", port}), environment);
  usleep(300'000);  // ucx_perftest does not report when it listens
  Child client(Join(link.asker_prefix, {"ucx_perftest", link.holder_host, "-p", port, "-t", "ucp_am_bw", "-s",
                                        std::to_string(bytes), "-n", count, "-w", "4", "-O", "16"}),
               environment);
  std::istringstream lines(client.Rest());
  for (std::string line; std::getline(lines, line);) {
    // "Final:", iterations, three latencies, bandwidth in MiB/s on average and overall, …
    std::istringstream words(line);
    std::string name;
    double numbers[6] = {};
    words >> name;
    for (double& number : numbers) words >> number;
    if (name == "Final:" && words) return numbers[5] * 1048576 / 1e9;
  }
  return 0;
}

absl::Status MeasureLink(const Link& link, const Options& options, nlohmann::json& cases) {
  std::error_code error;
  const std::string self = std::filesystem::read_symlink("/proc/self/exe", error).string();
  nlohmann::json measured;
  {
    Child holder(Join(link.holder_prefix, {self, "transfer-holder", link.holder_host}));
    const std::string description = holder.Line();
    Child asker(Join(link.asker_prefix,
                     {self, "transfer-asker", link.asker_host, description,
                      std::to_string(options.quick ? 1 : options.repetitions), options.quick ? "quick" : "full"}));
    measured = nlohmann::json::parse(asker.Rest(), nullptr, false);
  }
  if (!measured.is_array()) return absl::InternalError(absl::StrCat("no figures for ", link.name));
  std::map<uint64_t, double> perftest;
  for (auto& each : measured) {
    const uint64_t bytes = each["bytes"];
    if (!perftest.contains(bytes)) {
      std::vector<double> rates;
      const int times = options.quick ? 1 : std::min(options.repetitions, 3);
      for (int i = 0; i < times; ++i) rates.push_back(Perftest(link, bytes, options.quick ? 16 << 20 : 512 << 20));
      perftest[bytes] = Median(rates);
    }
    const double rate = perftest[bytes];
    each["link"] = link.name;
    each["perftest_gbps"] = rate > 0 ? nlohmann::json(rate) : nlohmann::json(nullptr);
    each["ratio_perftest"] = rate > 0 ? nlohmann::json(each["gbps"].get<double>() / rate) : nlohmann::json(nullptr);
    std::printf(
        "%-6s %-8s %9lu  %6.2f GB/s  p50 %8.0f us  p99 %8.0f us  %5.2f cpu s/GB  raw %5.2f GB/s %5.2f cpu s/GB  ratio "
        "%4.2f",
        each["op"].get<std::string>().c_str(), link.name, static_cast<unsigned long>(bytes), each["gbps"].get<double>(),
        each["p50_us"].get<double>(), each["p99_us"].get<double>(), each["cpu_s_per_gb"].get<double>(),
        each["raw_gbps"].get<double>(), each["raw_cpu_s_per_gb"].get<double>(), each["ratio"].get<double>());
    std::printf(rate > 0 ? "  to ucx_perftest %4.2f\n" : "  ucx_perftest: none\n",
                rate > 0 ? each["gbps"].get<double>() / rate : 0);
    std::fflush(stdout);
    cases.push_back(each);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Transfer(const Options& options, nlohmann::json& figures) {
  figures["machine"] = Machine();
  figures["cases"] = nlohmann::json::array();
  if (absl::Status s = MeasureLink({"loopback", {}, {}, "127.0.0.1", "127.0.0.1"}, options, figures["cases"]);
      !s.ok()) {
    return s;
  }
  const Namespaces namespaces;
  if (!namespaces.ready()) {
    std::printf("netns: skipped, no network namespaces can be made here (it takes root and iproute2)\n");
    return absl::OkStatus();
  }
  return MeasureLink(namespaces.link(), options, figures["cases"]);
}

}  // namespace ashlar::bench
