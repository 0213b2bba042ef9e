// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/engine_metrics.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace ashlar::ctl {
namespace {

using std::chrono::steady_clock;

constexpr size_t kMaxAnswerBytes = size_t{64} << 20;
constexpr absl::string_view kScheme = "http://";

struct Url {
  std::string host, port = "80", path = "/metrics", authority;
};

absl::StatusOr<Url> ParseUrl(const std::string& text) {
  const auto refused = [&] {
    return absl::InvalidArgumentError(
        absl::StrCat("--engine: ", text, " is not supported; expected http://HOST:PORT/metrics"));
  };
  absl::string_view rest = text;
  if (!absl::ConsumePrefix(&rest, kScheme)) return refused();
  Url url;
  const size_t slash = rest.find('/');
  if (slash != absl::string_view::npos && slash + 1 < rest.size()) url.path = std::string(rest.substr(slash));
  absl::string_view authority = rest.substr(0, slash);
  url.authority = std::string(authority);
  const size_t bracket = authority.rfind(']'), colon = authority.rfind(':');
  if (colon != absl::string_view::npos && (bracket == absl::string_view::npos || colon > bracket)) {
    url.port = std::string(authority.substr(colon + 1));
    authority = authority.substr(0, colon);
  }
  if (absl::ConsumePrefix(&authority, "[") && !absl::ConsumeSuffix(&authority, "]")) return refused();
  url.host = std::string(authority);
  int port = 0;
  if (url.host.empty() || !absl::SimpleAtoi(url.port, &port) || port < 1 || port > 65535) return refused();
  for (const char each : text) {
    if (each <= ' ' || each == '@' || each == 0x7f) return refused();
  }
  return url;
}

class Exchange {
 public:
  Exchange(const std::string& name, std::chrono::milliseconds timeout)
      : name_(name), deadline_(steady_clock::now() + timeout) {}

  // Sends one request to one address. Returns the answer with its header.
  absl::StatusOr<std::string> Run(const addrinfo& address, const std::string& request) const {
    const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return Failed(errno);
    const absl::Cleanup closing = [fd] { close(fd); };
    if (connect(fd, address.ai_addr, address.ai_addrlen) != 0 && errno != EINPROGRESS) return Failed(errno);
    if (const absl::Status ready = Wait(fd, POLLOUT); !ready.ok()) return ready;
    int error = 0;
    socklen_t size = sizeof error;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0) return Failed(error);
    // A request is smaller than any socket's buffer.
    if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(request.size())) {
      return Failed(errno);
    }
    std::string answer;
    char bytes[65536];
    for (;;) {
      if (const absl::Status ready = Wait(fd, POLLIN); !ready.ok()) return ready;
      const ssize_t count = recv(fd, bytes, sizeof bytes, 0);
      if (count == 0) return answer;
      if (count < 0 && errno != EAGAIN && errno != EINTR) return Failed(errno);
      if (count > 0) answer.append(bytes, static_cast<size_t>(count));
      if (answer.size() > kMaxAnswerBytes) return Refused("the answer is too long");
    }
  }

  absl::Status Refused(absl::string_view why) const {
    return absl::UnavailableError(absl::StrCat("--engine: ", name_, ": ", why,
                                               "; expected the metrics endpoint of a running engine; check host, port "
                                               "and the engine's log"));
  }

 private:
  absl::Status Failed(int error) const { return Refused(std::strerror(error)); }

  absl::Status Wait(int fd, short events) const {
    pollfd wait = {.fd = fd, .events = events, .revents = 0};
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - steady_clock::now()).count();
    if (left > 0 && poll(&wait, 1, static_cast<int>(left)) != 0) return absl::OkStatus();
    return Refused("no answer in time");
  }

  const std::string name_;
  const steady_clock::time_point deadline_;
};

// Returns the value of a label, starting after its opening quote; `rest` continues after the closing one.
std::string LabelValue(absl::string_view* rest) {
  std::string value;
  while (!rest->empty() && rest->front() != '"') {
    if (rest->front() == '\\' && rest->size() > 1) {
      rest->remove_prefix(1);
      value.push_back(rest->front() == 'n' ? '\n' : rest->front());
    } else {
      value.push_back(rest->front());
    }
    rest->remove_prefix(1);
  }
  absl::ConsumePrefix(rest, "\"");
  return value;
}

bool ParseSample(absl::string_view line, Sample* sample) {
  const size_t end = line.find_first_of("{ ");
  if (end == absl::string_view::npos) return false;
  sample->name = std::string(line.substr(0, end));
  line.remove_prefix(end);
  if (absl::ConsumePrefix(&line, "{")) {
    while (!absl::ConsumePrefix(&line, "}")) {
      const size_t equals = line.find("=\"");
      if (equals == absl::string_view::npos) return false;
      const std::string label(absl::StripAsciiWhitespace(line.substr(0, equals)));
      line.remove_prefix(equals + 2);
      sample->labels[label] = LabelValue(&line);
      absl::ConsumePrefix(&line, ",");
    }
  }
  const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
  return !words.empty() && absl::SimpleAtod(words[0], &sample->value);  // a timestamp may follow
}

}  // namespace

EngineMetrics ParseMetrics(const std::string& text) {
  EngineMetrics metrics;
  for (const absl::string_view line : absl::StrSplit(text, absl::ByAnyChar("\r\n"), absl::SkipEmpty())) {
    if (absl::StartsWith(line, "# TYPE ")) {
      const std::vector<std::string> words = absl::StrSplit(line, ' ');
      if (words.size() > 2) metrics.families.insert(words[2]);
    } else if (Sample sample; !absl::StartsWith(line, "#") && ParseSample(line, &sample)) {
      metrics.families.insert(sample.name);
      metrics.samples.push_back(std::move(sample));
    }
  }
  return metrics;
}

absl::StatusOr<std::string> FetchMetrics(const std::string& url, std::chrono::milliseconds timeout) {
  const absl::StatusOr<Url> parsed = ParseUrl(url);
  if (!parsed.ok()) return parsed.status();
  const Exchange exchange(url, timeout);
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (const int error = getaddrinfo(parsed->host.c_str(), parsed->port.c_str(), &hints, &found); error != 0) {
    return exchange.Refused(gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, freeaddrinfo);
  // Version 1.0: the answer ends with the connection, and is not chunked.
  const std::string request = absl::StrCat("GET ", parsed->path, " HTTP/1.0\r\nHost: ", parsed->authority, "\r\n\r\n");
  absl::StatusOr<std::string> answer = exchange.Refused("the host has no address");
  for (const addrinfo* each = found; each != nullptr && !answer.ok(); each = each->ai_next) {
    answer = exchange.Run(*each, request);
  }
  if (!answer.ok()) return answer;
  const std::vector<std::string> status = absl::StrSplit(answer->substr(0, answer->find('\r')), ' ');
  const size_t head = answer->find("\r\n\r\n");
  if (!absl::StartsWith(*answer, "HTTP/1.") || status.size() < 2 || head == std::string::npos) {
    return exchange.Refused("the answer is not HTTP");
  }
  if (status[1] != "200") return exchange.Refused(absl::StrCat("HTTP status ", status[1]));
  return answer->substr(head + 4);
}

}  // namespace ashlar::ctl
