// SPDX-License-Identifier: Apache-2.0
// TestAuthority: signs certificates of nodes, good ones and others, for tests.
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
  std::string name;                                 // the common name
  std::string uri;                                  // an alternative name; empty: none
  int64_t from_seconds = -3600, to_seconds = 3600;  // its validity, counted from now
  std::string usage = "serverAuth,clientAuth";      // extended key usage
};

class TestAuthority {
 public:
  explicit TestAuthority(const std::string& name = "authority");
  ~TestAuthority();

  const std::string& pem() const { return pem_; }
  TestPair Sign(const TestSubject& subject) const;
  // A certificate that nobody but its own key has signed.
  static TestPair SelfSigned(const TestSubject& subject);

 private:
  evp_pkey_st* key_;
  x509_st* certificate_;
  std::string pem_;
};

// Writes `text` to a new file of the path's name and puts it in the place of the old one.
void ReplaceFile(const std::string& path, const std::string& text);

}  // namespace ashlar::daemon
