// SPDX-License-Identifier: Apache-2.0
// Certificates of nodes: which authorities are trusted, and which node a certificate names.
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

// The end of a connection that the holder of a certificate has.
enum class TlsRole { kServer, kClient };

struct CertificateVerdict {
  std::string node;                // that the certificate names; empty where it is refused before its name is read
  std::optional<Refusal> refusal;  // none: it is good
  std::string why;                 // of a refusal
};

// The authorities that nodes' certificates may be signed by. Immutable, and so thread-safe.
class Trust {
 public:
  // `pem`: one certificate or more. INVALID_ARGUMENT if one cannot be read, or the last one is cut off.
  static absl::StatusOr<std::shared_ptr<const Trust>> Parse(absl::string_view pem);
  ~Trust();

  // Judges the certificate `leaf` at this moment: signatures up to an authority, dates, what it may be used for, and
  // the name. `chain`: certificates that may lie between, in any order. `spiffe_prefix`: what stands before the node's
  // name in the certificate's one URI; empty: the node's name is the subject's common name.
  CertificateVerdict Check(absl::string_view leaf, absl::string_view chain, TlsRole role,
                           absl::string_view spiffe_prefix) const;

 private:
  explicit Trust(x509_store_st* store) : store_(store) {}
  x509_store_st* const store_;  // owned
};

// INVALID_ARGUMENT unless `cert` begins with a certificate whose private key is `key`, both PEM.
absl::Status CheckPair(absl::string_view cert, absl::string_view key);

struct CertificateTerm {
  int64_t ends = 0;     // Unix time; 0: none can be read
  int64_t seconds = 0;  // from its beginning to its end
};
// Of the certificate in `pem` that ends first, which may be one between the node's own and an authority.
CertificateTerm TermOf(absl::string_view pem);

// gRPC's threads may be inside a handshake when the process exits, and OpenSSL would tear itself down under them. Call
// it before anything else that uses OpenSSL: then it stays as it is until the end.
void KeepOpenSslAtExit();

// Returns whether a node may be called so: letters, digits, '.', '_' and '-', at most 64.
bool IsNodeName(absl::string_view name);

}  // namespace ashlar::daemon
