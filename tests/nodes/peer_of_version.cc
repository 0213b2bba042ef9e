// SPDX-License-Identifier: Apache-2.0
// peer_of_version: takes a daemon's place, with its certificate, and speaks one version of the peers' protocol.
//
//   peer_of_version VERSION NODE LISTEN PEM PEER PEER_ADDRESS
//
// PEM.ca, PEM.cert and PEM.key are NODE's files. It answers greetings at LISTEN, greets PEER, prints the replies, and
// continues to answer until it is killed.
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "ashlar/v1/peer.grpc.pb.h"

namespace ashlar::nodes {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

v1::PeerGreeting Greeting(uint32_t version, const std::string& node) {
  v1::PeerGreeting greeting;
  greeting.set_protocol_min(version);
  greeting.set_protocol_max(version);
  greeting.set_node(node);
  greeting.set_incarnation(std::string(16, 'i'));
  return greeting;
}

class Greeter final : public v1::Peer::Service {
 public:
  explicit Greeter(v1::PeerGreeting answer) : answer_(std::move(answer)) {}
  grpc::Status Greet(grpc::ServerContext* context, const v1::PeerGreeting*,
                     grpc::ServerWriter<v1::PeerGreeting>* writer) override {
    writer->Write(answer_);
    while (!context->IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return grpc::Status::CANCELLED;
  }

 private:
  const v1::PeerGreeting answer_;
};

int Main(char** arguments) {
  const v1::PeerGreeting greeting = Greeting(static_cast<uint32_t>(std::atoi(arguments[1])), arguments[2]);
  const std::string pem = arguments[4];
  const std::string authority = ReadFile(pem + ".ca"), certificate = ReadFile(pem + ".cert"),
                    key = ReadFile(pem + ".key");
  Greeter greeter(greeting);
  grpc::SslServerCredentialsOptions serving(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  serving.pem_root_certs = authority;
  serving.pem_key_cert_pairs.push_back({key, certificate});
  grpc::ServerBuilder builder;
  builder.AddListeningPort(arguments[3], grpc::SslServerCredentials(serving));
  builder.RegisterService(&greeter);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return 1;

  grpc::ChannelArguments channel;
  channel.SetSslTargetNameOverride(arguments[5]);
  const auto stub = v1::Peer::NewStub(
      grpc::CreateCustomChannel(arguments[6], grpc::SslCredentials({authority, key, certificate}), channel));
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  v1::PeerGreeting answer;
  const auto answers = stub->Greet(&context, greeting);
  while (answers->Read(&answer)) {
    std::printf("it was welcomed\n");
    std::fflush(stdout);
  }
  const grpc::Status status = answers->Finish();
  std::printf("refused: %d %s\n", static_cast<int>(status.error_code()), status.error_message().c_str());
  std::fflush(stdout);
  server->Wait();
  return 0;
}

}  // namespace
}  // namespace ashlar::nodes

int main(int count, char** arguments) {
  return count == 7 ? ashlar::nodes::Main(arguments) : 2;
}
