// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/http_endpoint.h"

#include <sys/socket.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/observe/metrics_text.h"
#include "daemon/runtime/port_wait.h"
#include "daemon/runtime/tcp_socket.h"

namespace ashlar::daemon {
namespace {

// Adds a listener. An error names its configuration field.
absl::Status AddListener(absl::string_view field, HttpServer::ListenerKind kind, absl::StatusOr<Listener> listener,
                         HttpServer::Options& options) {
  if (!listener.ok()) {
    return absl::Status(listener.status().code(), absl::StrCat(field, ": ", listener.status().message()));
  }
  options.listeners.emplace_back(kind, *std::move(listener));
  return absl::OkStatus();
}

// `named`: the TCP address also shows tenants' names.
HttpServer::Routes RoutesOf(const Metrics& metrics, const Probes& probes, bool named) {
  return {{"/",
           [&metrics](HttpServer::ListenerKind) {
             return HttpReply{.body = metrics.board().Page(), .type = "text/html; charset=utf-8"};
           }},
          {"/healthz",
           [alive = probes.alive](HttpServer::ListenerKind) {
             if (alive()) return HttpReply{.body = "alive\n"};
             return HttpReply{.status = 503, .body = "the metadata thread does not respond\n"};
           }},
          {"/readyz",
           [unready = probes.unready](HttpServer::ListenerKind) {
             const std::string why = unready();
             return why.empty() ? HttpReply{.body = "ready\n"} : HttpReply{.status = 503, .body = why + "\n"};
           }},
          {"/metrics", [&metrics, named](HttpServer::ListenerKind kind) {
             const bool names = named || kind == HttpServer::ListenerKind::kUnix;
             return HttpReply{.body = metrics.Text(names ? TenantLabel::kNamed : TenantLabel::kSummed),
                              .type = kMetricsType};
           }}};
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpEndpoint>> HttpEndpoint::Start(const v1::Config& config, const Metrics& metrics,
                                                                  const Probes& probes) {
  const v1::Listen& listen = config.listen();
  HttpServer::Options options;
  uint16_t port = 0;
  absl::Status status;
  if (!listen.metrics_address().empty()) {
    status = AddListener("listen.metrics_address", HttpServer::ListenerKind::kTcp,
                         ListenTcp(*ParseHostPort(listen.metrics_address()), kPortPatience), options);
    if (!status.ok()) return status;
    port = PortOf(options.listeners.back().second.fd.get());
  }
  if (!listen.metrics_socket().empty()) {
    const mode_t mode = listen.metrics_socket_access() == "group" ? 0660 : 0600;
    status = AddListener("listen.metrics_socket", HttpServer::ListenerKind::kUnix,
                         Listen(listen.metrics_socket(), SOCK_STREAM, mode), options);
    if (!status.ok()) return status;
  }
  if (options.listeners.empty()) return nullptr;
  auto server = HttpServer::Start(std::move(options), RoutesOf(metrics, probes, config.metrics().tenants() == "named"));
  if (!server.ok()) return server.status();
  return std::unique_ptr<HttpEndpoint>(new HttpEndpoint(*std::move(server), port));
}

}  // namespace ashlar::daemon
