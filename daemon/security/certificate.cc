// SPDX-License-Identifier: Apache-2.0
#include "daemon/security/certificate.h"

#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509_vfy.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <ctime>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/invalid.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kMaxNodeName = 64;
constexpr size_t kMaxChain = 16;   // certificates accepted from a peer, because each takes time to read
constexpr int kSecurityLevel = 2;  // keys of 112 bits or more by OpenSSL's count, and no SHA-1

template <typename T, void (*kFree)(T*)>
struct Free {
  void operator()(T* object) const { kFree(object); }
};
using Bio = std::unique_ptr<BIO, Free<BIO, BIO_free_all>>;
using Certificate = std::unique_ptr<X509, Free<X509, X509_free>>;
using PrivateKey = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY, EVP_PKEY_free>>;
using Context = std::unique_ptr<X509_STORE_CTX, Free<X509_STORE_CTX, X509_STORE_CTX_free>>;
using Names = std::unique_ptr<GENERAL_NAMES, Free<GENERAL_NAMES, GENERAL_NAMES_free>>;
using Store = std::unique_ptr<X509_STORE, Free<X509_STORE, X509_STORE_free>>;

struct FreeStack {
  void operator()(STACK_OF(X509) * certificates) const { sk_X509_pop_free(certificates, X509_free); }
};
using Stack = std::unique_ptr<STACK_OF(X509), FreeStack>;

Bio Reader(absl::string_view text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// Keys with a passphrase are not supported. Without this callback, OpenSSL asks on the terminal.
int NoPassphrase(char*, int, int, void*) {
  return 0;
}

// Returns the certificates of `pem` in order, at most `most`. INVALID_ARGUMENT if one cannot be read or there are more.
absl::StatusOr<std::vector<Certificate>> ReadCertificates(absl::string_view pem, size_t most) {
  std::vector<Certificate> read;
  const Bio bio = Reader(pem);
  for (;;) {
    Certificate next(PEM_read_bio_X509(bio.get(), nullptr, NoPassphrase, nullptr));
    if (next == nullptr) break;
    if (read.size() == most) return Invalid("too many certificates; expected at most ", most);
    read.push_back(std::move(next));
  }
  // At the end there is no further block; a truncated or damaged block is another error.
  const unsigned long error = ERR_peek_last_error();
  ERR_clear_error();
  if (ERR_GET_LIB(error) != ERR_LIB_PEM || ERR_GET_REASON(error) != PEM_R_NO_START_LINE) {
    return Invalid("certificate ", read.size(), ": cannot be read as PEM");
  }
  return read;
}

Refusal RefusalOf(int error) {
  switch (error) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return Refusal::kExpired;
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return Refusal::kNotYetValid;
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
    case X509_V_ERR_CERT_UNTRUSTED:
      return Refusal::kUntrusted;
    default:
      return Refusal::kBadCertificate;
  }
}

// Returns a text of a certificate; empty if it contains a zero byte, which would end a C string.
std::string TextOf(const ASN1_STRING* text) {
  unsigned char* utf8 = nullptr;
  const int size = ASN1_STRING_to_UTF8(&utf8, text);
  if (size < 0) return "";
  std::string copy(reinterpret_cast<const char*>(utf8), static_cast<size_t>(size));
  OPENSSL_free(utf8);
  return copy.find('\0') == std::string::npos ? copy : "";
}

// Returns the subject's only common name; empty if there is none or several.
std::string CommonName(const X509* certificate) {
  const X509_NAME* subject = X509_get_subject_name(certificate);
  const int first = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  if (first < 0 || X509_NAME_get_index_by_NID(subject, NID_commonName, first) >= 0) return "";
  return TextOf(X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, first)));
}

// Returns the only URI among the subject's alternative names; empty if there is none or several.
std::string OneUri(const X509* certificate) {
  const Names names(static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  std::string uri;
  for (int i = 0; names != nullptr && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type != GEN_URI) continue;
    if (!uri.empty()) return "";
    uri = TextOf(name->d.uniformResourceIdentifier);
  }
  return uri;
}

}  // namespace

void KeepOpenSslAtExit() {
  OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
}

bool IsNodeName(absl::string_view name) {
  return !name.empty() && name.size() <= kMaxNodeName &&
         std::ranges::all_of(name, [](char c) { return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-'; });
}

absl::StatusOr<std::shared_ptr<const Trust>> Trust::Parse(absl::string_view pem) {
  absl::StatusOr<std::vector<Certificate>> authorities = ReadCertificates(pem, 1024);
  if (!authorities.ok()) return authorities.status();
  if (authorities->empty()) return Invalid("the file has no certificate; expected PEM");
  Store store(X509_STORE_new());
  if (store == nullptr) return absl::ResourceExhaustedError("no memory for certificates");
  for (size_t i = 0; i < authorities->size(); ++i) {
    if (X509_STORE_add_cert(store.get(), (*authorities)[i].get()) == 1) continue;
    const char* const reason = ERR_reason_error_string(ERR_get_error());
    return Invalid("certificate ", i, ": OpenSSL rejects it as an authority: ", reason == nullptr ? "unknown" : reason);
  }
  return std::shared_ptr<const Trust>(new Trust(store.release()));
}

Trust::~Trust() {
  X509_STORE_free(store_);
}

CertificateVerdict Trust::Check(absl::string_view leaf, absl::string_view chain, TlsRole role,
                                absl::string_view spiffe_prefix) const {
  const auto refuse = [](Refusal refusal, std::string why, std::string node = "") {
    return CertificateVerdict{std::move(node), refusal, std::move(why)};
  };
  if (leaf.empty()) return refuse(Refusal::kNoCertificate, "the peer sent no certificate");
  auto own = ReadCertificates(leaf, 1), between = ReadCertificates(chain, kMaxChain);
  if (!own.ok() || own->empty()) return refuse(Refusal::kBadCertificate, "the peer's certificate cannot be parsed");
  if (!between.ok())
    return refuse(Refusal::kBadCertificate, absl::StrCat("the peer's certificate chain: ", between.status().message()));
  X509* const certificate = own->front().get();

  const Stack untrusted(sk_X509_new_null());
  for (Certificate& one : *between) sk_X509_push(untrusted.get(), one.release());
  const Context context(X509_STORE_CTX_new());
  if (X509_STORE_CTX_init(context.get(), store_, certificate, untrusted.get()) != 1) {
    return refuse(Refusal::kBadCertificate, "the peer's certificate cannot be verified");
  }
  X509_STORE_CTX_set_default(context.get(), role == TlsRole::kServer ? "ssl_server" : "ssl_client");
  X509_VERIFY_PARAM_set_auth_level(X509_STORE_CTX_get0_param(context.get()), kSecurityLevel);
  const int verified = X509_verify_cert(context.get());
  const int error = X509_STORE_CTX_get_error(context.get());
  ERR_clear_error();
  const std::string name = spiffe_prefix.empty() ? CommonName(certificate) : OneUri(certificate);
  if (verified != 1 || error != X509_V_OK) {
    return refuse(RefusalOf(error), X509_verify_cert_error_string(error), name);
  }
  if (!absl::StartsWith(name, spiffe_prefix) || !IsNodeName(absl::string_view(name).substr(spiffe_prefix.size()))) {
    return refuse(Refusal::kNoName,
                  spiffe_prefix.empty()
                      ? std::string("the certificate's common name is not a valid node name")
                      : absl::StrCat("the certificate has no single URI of the form ", spiffe_prefix, "NODE"),
                  name);
  }
  return {.node = name.substr(spiffe_prefix.size())};
}

absl::Status CheckPair(absl::string_view cert, absl::string_view key) {
  const Bio cert_bio = Reader(cert), key_bio = Reader(key);
  const Certificate certificate(PEM_read_bio_X509(cert_bio.get(), nullptr, NoPassphrase, nullptr));
  const PrivateKey private_key(PEM_read_bio_PrivateKey(key_bio.get(), nullptr, NoPassphrase, nullptr));
  ERR_clear_error();
  if (certificate == nullptr) return Invalid("cert_file: the file has no certificate; expected PEM");
  if (private_key == nullptr)
    return Invalid(
        "key_file: the file has no private key, or the key has a passphrase; expected PEM without a passphrase");
  const bool match = X509_check_private_key(certificate.get(), private_key.get()) == 1;
  ERR_clear_error();
  return match ? ReadCertificates(cert, kMaxChain).status()
               : Invalid("key_file: does not match cert_file; expected the certificate's private key");
}

CertificateTerm TermOf(absl::string_view pem) {
  const auto read = ReadCertificates(pem, kMaxChain);
  CertificateTerm first;
  for (size_t i = 0; read.ok() && i < read->size(); ++i) {
    std::tm begins{}, ends{};
    if (ASN1_TIME_to_tm(X509_get0_notBefore((*read)[i].get()), &begins) != 1) return {};
    if (ASN1_TIME_to_tm(X509_get0_notAfter((*read)[i].get()), &ends) != 1) return {};
    const int64_t end = timegm(&ends);
    if (i == 0 || end < first.ends) first = {.ends = end, .seconds = end - timegm(&begins)};
  }
  return first;
}

}  // namespace ashlar::daemon
