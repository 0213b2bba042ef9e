// SPDX-License-Identifier: Apache-2.0
#include "daemon/testing/certificates.h"

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "daemon/security/certificate.h"

namespace ashlar::daemon {
namespace {

void RequireSsl(bool done) {
  if (done) return;
  std::fputs("OpenSSL made no certificate\n", stderr);
  std::abort();
}

template <typename Write>
std::string Pem(Write write) {
  BIO* const bio = BIO_new(BIO_s_mem());
  RequireSsl(bio != nullptr && write(bio) == 1);
  char* text = nullptr;
  const long size = BIO_get_mem_data(bio, &text);
  std::string pem(text, static_cast<size_t>(size));
  BIO_free(bio);
  return pem;
}

void Extend(X509* certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str());
  RequireSsl(extension != nullptr);
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

// Null `issuer`: self-signed. The caller owns the result.
X509* Make(const TestSubject& subject, EVP_PKEY* key, X509* issuer, EVP_PKEY* issuer_key, bool authority) {
  static std::atomic<long> serial{1};
  X509* const certificate = X509_new();
  RequireSsl(certificate != nullptr);
  X509_set_version(certificate, 2);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), serial++);
  X509_gmtime_adj(X509_getm_notBefore(certificate), subject.from_seconds);
  X509_gmtime_adj(X509_getm_notAfter(certificate), subject.to_seconds);
  X509_set_pubkey(certificate, key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_UTF8,
                             reinterpret_cast<const unsigned char*>(subject.name.data()),
                             static_cast<int>(subject.name.size()), -1, 0);
  X509* const by = issuer == nullptr ? certificate : issuer;
  X509_set_issuer_name(certificate, X509_get_subject_name(by));
  Extend(certificate, by, NID_basic_constraints, authority ? "critical,CA:TRUE" : "CA:FALSE");
  if (!authority && !subject.usage.empty()) Extend(certificate, by, NID_ext_key_usage, subject.usage);
  if (!subject.uri.empty()) Extend(certificate, by, NID_subject_alt_name, subject.uri);
  RequireSsl(X509_sign(certificate, issuer_key, EVP_sha256()) > 0);
  return certificate;
}

EVP_PKEY* MakeKey() {
  KeepOpenSslAtExit();
  EVP_PKEY* const key = EVP_EC_gen("P-256");
  RequireSsl(key != nullptr);
  return key;
}

TestPair PairOf(X509* certificate, EVP_PKEY* key) {
  TestPair pair{
      .cert = Pem([&](BIO* bio) { return PEM_write_bio_X509(bio, certificate); }),
      .key = Pem([&](BIO* bio) { return PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr); })};
  X509_free(certificate);
  EVP_PKEY_free(key);
  return pair;
}

}  // namespace

TestAuthority::TestAuthority(const std::string& name)
    : key_(MakeKey()),
      certificate_(
          Make({.name = name, .from_seconds = -1'000'000, .to_seconds = 1'000'000}, key_, nullptr, key_, true)),
      pem_(Pem([this](BIO* bio) { return PEM_write_bio_X509(bio, certificate_); })) {}

TestAuthority::~TestAuthority() {
  X509_free(certificate_);
  EVP_PKEY_free(key_);
}

TestPair TestAuthority::Sign(const TestSubject& subject) const {
  EVP_PKEY* const key = MakeKey();
  return PairOf(Make(subject, key, certificate_, key_, false), key);
}

TestPair TestAuthority::SelfSigned(const TestSubject& subject) {
  EVP_PKEY* const key = MakeKey();
  return PairOf(Make(subject, key, nullptr, key, false), key);
}

void ReplaceFile(const std::string& path, const std::string& text) {
  const std::string fresh = path + ".fresh";
  std::ofstream(fresh, std::ios::binary) << text;
  std::filesystem::rename(fresh, path);
}

}  // namespace ashlar::daemon
