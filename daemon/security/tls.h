// SPDX-License-Identifier: Apache-2.0
// Tls: mutual TLS between daemons, with files that may be replaced while connections live.
//
// Files are read again every `check_every`. What has changed is taken when it was read alike twice in a row and makes
// sense: a private key and its certificate together, authorities whole. Anything else is left alone, and what was there
// before goes on being used. Connections that exist are not touched; Check says whether they would be made today.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/security/certificate.h"
#include "daemon/security/refusals.h"
#include "storage/executor.h"

namespace grpc {
class ChannelCredentials;
class ServerCredentials;
}  // namespace grpc

namespace ashlar::daemon {

// Thread-safe.
class Tls {
 public:
  struct Options {
    std::string node;           // of this daemon: its certificate must name it
    std::string ca_file;        // PEM: the authorities that sign nodes' certificates
    std::string cert_file;      // PEM: this node's certificate, and those between it and an authority
    std::string key_file;       // PEM
    std::string spiffe_prefix;  // as Trust::Check takes it
    storage::Nanos check_every = 10'000'000'000;
  };
  // `member`: whether the configuration lets a node of this name in; on any thread. `refusals` must outlive all
  // credentials. INVALID_ARGUMENT, NOT_FOUND and the like name the file that is wrong.
  static absl::StatusOr<std::unique_ptr<Tls>> Open(Options options, std::function<bool(const std::string&)> member,
                                                   Refusals& refusals);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  // For a server that listens: only members with good certificates get through the handshake.
  std::shared_ptr<grpc::ServerCredentials> OfServer() const;
  // For a channel to `node`: the other end must be that node.
  std::shared_ptr<grpc::ChannelCredentials> OfChannel(const std::string& node) const;
  // Judges the certificate of a client as a handshake would now. It is not counted as refused.
  CertificateVerdict CheckClient(absl::string_view leaf, absl::string_view chain) const;

  uint64_t clients_refused() const;  // handshakes, ever, that OfServer's credentials refused by the certificate
  uint64_t reloads() const;          // pairs and authorities that were taken since Open
  CertificateTerm term() const;      // of the pair in use

 private:
  struct Impl;
  explicit Tls(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
