// SPDX-License-Identifier: Apache-2.0
// TestAuthority: signs valid and invalid node certificates for tests.
#pragma once

#include <memory>
#include <string>

struct evp_pkey_st;
struct x509_st;

namespace ashlar::daemon {

struct TestPair {
  std::string cert, key;  // PEM
};

struct TestSubject {
  std::string name;                                 // common name
  std::string uri;                                  // alternative name; may be empty
  int64_t from_seconds = -3600, to_seconds = 3600;  // validity relative to now
  std::string usage = "serverAuth,clientAuth";      // extended key usage
};

class TestAuthority {
 public:
  explicit TestAuthority(const std::string& name = "authority");
  ~TestAuthority();

  const std::string& pem() const { return pem_; }
  TestPair Sign(const TestSubject& subject) const;
  // Returns a self-signed certificate.
  static TestPair SelfSigned(const TestSubject& subject);

 private:
  evp_pkey_st* key_;
  x509_st* certificate_;
  std::string pem_;
};

// Atomically replaces the file at `path` by one with `text`.
void ReplaceFile(const std::string& path, const std::string& text);

}  // namespace ashlar::daemon
