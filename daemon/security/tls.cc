// SPDX-License-Identifier: Apache-2.0
#include "daemon/security/tls.h"

#include <fcntl.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_certificate_verifier.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/runtime/happens_before.h"
#include "daemon/runtime/log.h"
#include "daemon/runtime/named_thread.h"
#include "daemon/runtime/unique_fd.h"
#include "kernels/mutex.h"
#include "proto/invalid.h"
#include "proto/regular_file.h"

namespace ashlar::daemon {
namespace {

using grpc::experimental::ExternalCertificateVerifier;
using grpc::experimental::TlsCustomVerificationCheckRequest;

absl::string_view View(grpc::string_ref text) {
  return {text.data(), text.size()};
}

// Key and certificates in memory only, under a path that gRPC's provider reads at any time. A new pair atomically
// replaces the old one under the same path. The provider reads the path twice, for key and certificates, and repeats if
// the modification time has changed in between: so every pair has its own time.
class PairFile {
 public:
  // Returns false without memory or descriptors.
  bool Put(const std::string& cert, const std::string& key) {
    UniqueFd next(memfd_create("ashlar-tls", MFD_CLOEXEC));
    const std::string text = absl::StrCat(key, "\n", cert);
    if (!next.valid() || write(next.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) return false;
    time_ = std::max(time_ + 1, std::time(nullptr));
    const timespec times[] = {{time_, 0}, {time_, 0}};
    if (futimens(next.get(), times) != 0) return false;
    if (!file_.valid()) {
      file_ = std::move(next);
      return true;
    }
    return dup3(next.get(), file_.get(), O_CLOEXEC) >= 0;
  }
  std::string path() const { return absl::StrCat("/proc/self/fd/", file_.get()); }

 private:
  UniqueFd file_;
  std::time_t time_ = 0;
};

}  // namespace

// State of verifiers, which live as long as connections.
struct Judge {
  std::shared_ptr<const Trust> trust() const {
    MutexLock lock(mutex);
    return current;
  }

  std::string spiffe_prefix;
  std::function<bool(const std::string&)> member;
  Refusals& refusals;
  std::atomic<uint64_t> clients_refused{0};
  mutable Mutex mutex;
  std::shared_ptr<const Trust> current ABSL_GUARDED_BY(mutex);
};

namespace {

// gRPC's own verification is off: it runs once for a session that is resumed many times, and does not report reasons.
// This one judges every connection.
class Verifier final : public ExternalCertificateVerifier {
 public:
  // `node`: required peer of a channel; empty for a server, which accepts any member.
  Verifier(std::shared_ptr<Judge> judge, std::string node) : judge_(std::move(judge)), node_(std::move(node)) {
    HappensBefore(this);
  }
  ~Verifier() override { HappensAfter(this); }  // on a gRPC thread

  bool Verify(TlsCustomVerificationCheckRequest* request, std::function<void(grpc::Status)>,
              grpc::Status* status) override {
    HappensAfter(this);
    const TlsRole role = node_.empty() ? TlsRole::kClient : TlsRole::kServer;
    CertificateVerdict verdict = judge_->trust()->Check(
        View(request->peer_cert()), View(request->peer_cert_full_chain()), role, judge_->spiffe_prefix);
    if (!verdict.refusal.has_value() && !node_.empty() && verdict.node != node_) {
      verdict.refusal = Refusal::kWrongNode;
      verdict.why = absl::StrCat("the certificate names node ", verdict.node, "; expected node ", node_);
    } else if (!verdict.refusal.has_value() && !judge_->member(verdict.node)) {
      verdict.refusal = Refusal::kNotAMember;
      verdict.why = "cluster.peers does not list the node";
    }
    if (verdict.refusal.has_value()) {
      if (node_.empty()) ++judge_->clients_refused;
      judge_->refusals.Add(*verdict.refusal, verdict.node.empty() ? node_ : verdict.node, verdict.why);
      *status = grpc::Status(grpc::StatusCode::UNAUTHENTICATED, verdict.why);
    }
    HappensBefore(this);
    return true;  // decided synchronously
  }
  void Cancel(TlsCustomVerificationCheckRequest*) override {}

 private:
  const std::shared_ptr<Judge> judge_;
  const std::string node_;
};

}  // namespace

struct Tls::Impl {
  struct Files {
    std::string ca, cert, key;
    bool operator==(const Files&) const = default;
  };

  absl::StatusOr<Files> Read() const {
    auto ca = ReadRegularFile("ca_file", options.ca_file, kMaxConfigFileBytes),
         cert = ReadRegularFile("cert_file", options.cert_file, kMaxConfigFileBytes),
         key = ReadRegularFile("key_file", options.key_file, kMaxConfigFileBytes);
    for (const auto* file : {&ca, &cert, &key}) {
      if (!file->ok()) return file->status();
    }
    return Files{*std::move(ca), *std::move(cert), *std::move(key)};
  }

  absl::Status TakePair(const Files& files) {
    if (absl::Status status = CheckPair(files.cert, files.key); !status.ok()) return status;
    const CertificateVerdict own = judge->trust()->Check(files.cert.substr(0, EndOfFirst(files.cert)), files.cert,
                                                         TlsRole::kServer, options.spiffe_prefix);
    if (own.refusal.has_value()) return Invalid("cert_file: ", own.why);
    if (own.node != options.node) return Invalid("cert_file: names node ", own.node, "; expected node ", options.node);
    if (!pair.Put(files.cert, files.key)) return absl::ErrnoToStatus(errno, "cannot keep the certificate");
    const CertificateTerm term = TermOf(files.cert);
    term_ends = term.ends;
    term_seconds = term.seconds;
    return absl::OkStatus();
  }
  // A certificate's chain follows it in its file.
  static size_t EndOfFirst(const std::string& pem) {
    constexpr absl::string_view kEnd = "-----END CERTIFICATE-----";
    const size_t end = pem.find(kEnd.data(), 0, kEnd.size());
    return end == std::string::npos ? pem.size() : end + kEnd.size();
  }

  absl::Status TakeTrust(const std::string& pem) {
    absl::StatusOr<std::shared_ptr<const Trust>> trust = Trust::Parse(pem);
    if (!trust.ok()) return Invalid("ca_file: ", trust.status().message());
    MutexLock lock(judge->mutex);
    judge->current = *std::move(trust);
    return absl::OkStatus();
  }

  // On the thread. Authorities are loaded first, because a new one may have signed the new pair.
  void Look() {
    absl::StatusOr<Files> files = Read();
    if (!files.ok()) return Complain(files.status());
    const bool settled = *files == last_read;
    last_read = *files;
    if (!settled || *files == taken) return;
    if (files->ca != taken.ca) {
      if (absl::Status status = TakeTrust(files->ca); !status.ok()) return Complain(status);
      taken.ca = files->ca;
      ++reloads;
      Log(LogLevel::kInfo, "reloaded the certificate authorities for peers", {{"file", options.ca_file}});
    }
    if (files->cert != taken.cert || files->key != taken.key) {
      if (absl::Status status = TakePair(*files); !status.ok()) return Complain(status);
      taken = *std::move(files);
      ++reloads;
      Log(LogLevel::kInfo, "reloaded the certificate for peers", {{"file", options.cert_file}});
    }
    complaint.clear();
  }

  void Complain(const absl::Status& status) {
    if (complaint == status.message()) return;
    complaint = std::string(status.message());
    Log(LogLevel::kWarning, "cannot reload the certificates for peers; the previous ones stay in use",
        {{"error", complaint}});
  }

  void Run() {
    MutexLock lock(mutex);
    for (;;) {
      const auto due = CondVar::Clock::now() + std::chrono::nanoseconds(options.check_every);
      while (!ending && ended.WaitUntil(mutex, due)) continue;
      if (ending) return;
      lock.Unlock();
      Look();
      lock.Lock();
    }
  }

  template <typename OptionsOfAnEnd>
  void Fill(OptionsOfAnEnd& end, const std::string& node) const {
    end.set_certificate_provider(provider);
    end.watch_identity_key_cert_pairs();
    end.set_certificate_verifier(ExternalCertificateVerifier::Create<Verifier>(judge, node));
    end.set_check_call_host(false);
  }

  Options options;
  std::shared_ptr<Judge> judge;
  std::atomic<uint64_t> reloads{0};
  std::atomic<int64_t> term_ends{0}, term_seconds{0};  // term of the pair in use

  Files taken, last_read;  // used only by the thread once it runs; so are the fields below
  PairFile pair;
  std::string complaint;

  std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider;
  Mutex mutex;
  CondVar ended;
  bool ending ABSL_GUARDED_BY(mutex) = false;
  std::thread thread;
};

absl::StatusOr<std::unique_ptr<Tls>> Tls::Open(Options options, std::function<bool(const std::string&)> member,
                                               Refusals& refusals) {
  KeepOpenSslAtExit();
  auto impl = std::make_unique<Impl>();
  impl->options = std::move(options);
  impl->judge = std::shared_ptr<Judge>(
      new Judge{.spiffe_prefix = impl->options.spiffe_prefix, .member = std::move(member), .refusals = refusals});
  absl::StatusOr<Impl::Files> files = impl->Read();
  if (!files.ok()) return files.status();
  if (absl::Status status = impl->TakeTrust(files->ca); !status.ok()) return status;
  if (absl::Status status = impl->TakePair(*files); !status.ok()) return status;
  impl->taken = impl->last_read = *std::move(files);
  const std::string path = impl->pair.path();
  constexpr unsigned kSeconds = 1;  // gRPC's minimum
  impl->provider = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(path, path, kSeconds);
  return std::unique_ptr<Tls>(new Tls(std::move(impl)));
}

Tls::Tls(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {
  impl_->thread = NamedThread("certificates", [impl = impl_.get()] { impl->Run(); });
}

Tls::~Tls() {
  {
    MutexLock lock(impl_->mutex);
    impl_->ending = true;
  }
  impl_->ended.NotifyAll();
  impl_->thread.join();
}

std::shared_ptr<grpc::ServerCredentials> Tls::OfServer() const {
  grpc::experimental::TlsServerCredentialsOptions options(impl_->provider);
  impl_->Fill(options, "");
  // A peer without a certificate reaches the verifier, which reports it.
  options.set_cert_request_type(GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_BUT_DONT_VERIFY);
  return grpc::experimental::TlsServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> Tls::OfChannel(const std::string& node) const {
  grpc::experimental::TlsChannelCredentialsOptions options;
  impl_->Fill(options, node);
  options.set_verify_server_certs(false);
  return grpc::experimental::TlsCredentials(options);
}

CertificateVerdict Tls::CheckClient(absl::string_view leaf, absl::string_view chain) const {
  CertificateVerdict verdict =
      impl_->judge->trust()->Check(leaf, chain, TlsRole::kClient, impl_->options.spiffe_prefix);
  if (!verdict.refusal.has_value() && !impl_->judge->member(verdict.node)) {
    verdict.refusal = Refusal::kNotAMember;
    verdict.why = "cluster.peers does not list the node";
  }
  return verdict;
}

uint64_t Tls::clients_refused() const {
  return impl_->judge->clients_refused.load();
}

uint64_t Tls::reloads() const {
  return impl_->reloads.load();
}

CertificateTerm Tls::term() const {
  return {.ends = impl_->term_ends.load(), .seconds = impl_->term_seconds.load()};
}

}  // namespace ashlar::daemon
