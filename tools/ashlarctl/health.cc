// SPDX-License-Identifier: Apache-2.0
// ashlarctl health: a health probe over the socket that engines use.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/default_socket.h"
#include "tools/ashlarctl/listener.h"

namespace ashlar::ctl {
namespace {

constexpr const char* kCheck = "/grpc.health.v1.Health/Check";
constexpr size_t kLongestService = 100;  // its length is one byte of the request
constexpr int kMostSeconds = 600;
constexpr const char* kStates[] = {"unknown", "serving", "not_serving"};

std::string RpcSocketOf(const Arguments& arguments) {
  return arguments.Has("rpc-socket") ? arguments.Get("rpc-socket") : DefaultSocket("ASHLAR_RPC_SOCKET", "rpc.sock");
}

// The messages are written and read by their bytes: Debian ships gRPC's health service without its .proto.
absl::StatusOr<std::string> Check(const std::string& socket, const std::string& service, int seconds) {
  grpc::GenericStub stub(grpc::CreateChannel(absl::StrCat("unix:", socket), grpc::InsecureChannelCredentials()));
  // HealthCheckRequest { string service = 1; }
  const grpc::Slice asked(service.empty() ? "" : absl::StrCat("\x0a", std::string(1, service.size()), service));
  const grpc::ByteBuffer request(&asked, 1);
  grpc::ByteBuffer reply;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(seconds));
  grpc::CompletionQueue queue;
  const auto call = stub.PrepareUnaryCall(&context, kCheck, request, &queue);
  call->StartCall();
  grpc::Status status;
  call->Finish(&reply, &status, nullptr);
  void* tag = nullptr;
  bool done = false;
  queue.Next(&tag, &done);  // not before the end of the call, which has a deadline
  if (status.error_code() == grpc::StatusCode::NOT_FOUND) {
    return absl::InvalidArgumentError(absl::StrCat("--service: the daemon has no service \"", service, "\""));
  }
  if (!status.ok()) {
    if (const absl::StatusOr<pid_t> listener = ListenerOf(socket); !listener.ok()) return listener.status();
    const auto code = static_cast<absl::StatusCode>(status.error_code());
    return absl::UnavailableError(absl::StrCat("no daemon answers on ", socket, ": ", absl::StatusCodeToString(code),
                                               status.error_message().empty() ? "" : ": ", status.error_message()));
  }
  // HealthCheckResponse { ServingStatus status = 1; }
  grpc::Slice answer;
  if (!reply.DumpToSingleSlice(&answer).ok())
    return absl::DataLossError(absl::StrCat(socket, ": the reply is not a health message"));
  const size_t state = answer.size() == 2 && answer.begin()[0] == 0x08 ? answer.begin()[1] : 0;
  return kStates[state < std::size(kStates) ? state : 0];
}

}  // namespace

absl::StatusOr<Answer> Health(const Arguments& arguments, AdminClient&) {
  const std::string service = arguments.Get("service");
  if (service.size() > kLongestService)
    return absl::InvalidArgumentError(
        absl::StrCat("--service: too long; expected at most ", kLongestService, " characters"));
  int seconds = 5;
  if (arguments.Has("seconds") &&
      (!absl::SimpleAtoi(arguments.Get("seconds"), &seconds) || seconds < 1 || seconds > kMostSeconds)) {
    return absl::InvalidArgumentError("--seconds: expected a number from 1 to 600");
  }
  const absl::StatusOr<std::string> state = Check(RpcSocketOf(arguments), service, seconds);
  if (!state.ok()) return state.status();
  return Answer{.json = {{"state", *state}}, .text = *state + "\n", .failed = *state != "serving"};
}

}  // namespace ashlar::ctl
