// SPDX-License-Identifier: Apache-2.0
// Certificates of nodes: trusted authorities, and the node that a certificate names.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/security/refusals.h"

struct x509_store_st;

namespace ashlar::daemon {

// The TLS role of the holder of a certificate.
enum class TlsRole { kServer, kClient };

struct CertificateVerdict {
  std::string node;                // the node in the certificate; empty if it was refused before the name was read
  std::optional<Refusal> refusal;  // empty if accepted
  std::string why;                 // reason of the refusal
};

// The authorities that may sign certificates of nodes. Immutable and thread-safe.
class Trust {
 public:
  // `pem` has one or more certificates. INVALID_ARGUMENT if one cannot be parsed or the last one is truncated.
  static absl::StatusOr<std::shared_ptr<const Trust>> Parse(absl::string_view pem);
  ~Trust();

  // Checks the certificate `leaf` now: signatures up to an authority, validity, key usage and name. `chain` has
  // intermediate certificates in any order. `spiffe_prefix` is what precedes the node name in the certificate's single
  // URI; if empty, the node name is the subject's common name.
  CertificateVerdict Check(absl::string_view leaf, absl::string_view chain, TlsRole role,
                           absl::string_view spiffe_prefix) const;

 private:
  explicit Trust(x509_store_st* store) : store_(store) {}
  x509_store_st* const store_;  // owned
};

// INVALID_ARGUMENT unless `cert` begins with a certificate that matches the private key `key`; both are PEM.
absl::Status CheckPair(absl::string_view cert, absl::string_view key);

struct CertificateTerm {
  int64_t ends = 0;     // Unix time; 0 if unreadable
  int64_t seconds = 0;  // length of its validity
};
// Returns the term of the certificate in `pem` that expires first, which may be an intermediate one.
CertificateTerm TermOf(absl::string_view pem);

// gRPC's threads may be inside a handshake when the process exits, and OpenSSL would clean up under them. Call this
// before any other use of OpenSSL to disable its cleanup.
void KeepOpenSslAtExit();

// Returns whether a name is valid for a node: letters, digits, '.', '_' and '-', at most 64.
bool IsNodeName(absl::string_view name);

}  // namespace ashlar::daemon
