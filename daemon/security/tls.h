// SPDX-License-Identifier: Apache-2.0
// Tls: mutual TLS between daemons, with files that can be replaced while connections are open.
//
// The files are read again every `check_every`. A change is applied when two consecutive reads agree and the files are
// valid: private key and certificate match, authorities are complete. Otherwise the previous ones stay in use. Existing
// connections are not affected; CheckClient reports whether they would be accepted now.
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
    std::string node;           // the certificate must name this daemon
    std::string ca_file;        // PEM: authorities that sign certificates of nodes
    std::string cert_file;      // PEM: this node's certificate and intermediate ones
    std::string key_file;       // PEM
    std::string spiffe_prefix;  // as in Trust::Check
    storage::Nanos check_every = 10'000'000'000;
  };
  // `member` returns whether the configuration accepts a node of this name; called on any thread. `refusals` must
  // outlive all credentials. INVALID_ARGUMENT, NOT_FOUND and the like name the file.
  static absl::StatusOr<std::unique_ptr<Tls>> Open(Options options, std::function<bool(const std::string&)> member,
                                                   Refusals& refusals);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  // For a server: only members with valid certificates pass the handshake.
  std::shared_ptr<grpc::ServerCredentials> OfServer() const;
  // For a channel to `node`: the peer must be that node.
  std::shared_ptr<grpc::ChannelCredentials> OfChannel(const std::string& node) const;
  // Checks a client's certificate as a handshake would now. Not counted as a refusal.
  CertificateVerdict CheckClient(absl::string_view leaf, absl::string_view chain) const;

  uint64_t clients_refused() const;  // handshakes refused because of the client's certificate, since the start
  uint64_t reloads() const;          // applied changes since Open
  CertificateTerm term() const;      // term of the pair in use

 private:
  struct Impl;
  explicit Tls(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
