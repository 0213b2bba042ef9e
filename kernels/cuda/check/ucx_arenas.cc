// SPDX-License-Identifier: Apache-2.0
// Sends an arena of one GPU to an arena of another process by UCX, as a transport between nodes with GPUs would, and
// checks the bytes. UCX_TLS selects the path: cuda_copy goes through host memory, cuda_ipc does not.
//
// usage: cuda_ucx_arenas FROM TO, numbers of GPUs, which may be the same; exit status 0 only if every byte arrived.
#include <cuda_runtime.h>
#include <poll.h>
#include <sys/wait.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/device_arena.h"
#include "kernels/cuda/launch.h"

namespace ashlar::kernels::cuda {
namespace {

constexpr uint64_t kBytes = uint64_t{8} << 20;
constexpr ucp_tag_t kTag = 7;
constexpr time_t kPatience = 60;  // seconds

[[noreturn]] void Fail(const char* what, const std::string& why) {
  std::fprintf(stderr, "ucx_arenas: %s: %s\n", what, why.c_str());
  std::exit(1);
}
void Require(ucs_status_t status, const char* what) {
  if (status != UCS_OK) Fail(what, ucs_status_string(status));
}

std::vector<uint32_t> Numbers() {
  std::vector<uint32_t> numbers(kBytes / sizeof(uint32_t));
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<uint32_t>(i * 2654435761u + 17);
  return numbers;
}

// Whole messages of a pipe, each with its length before it.
void Write(int pipe, const void* data, uint64_t bytes) {
  if (write(pipe, &bytes, sizeof bytes) != sizeof bytes) Fail("pipe", "cannot write");
  if (write(pipe, data, bytes) != static_cast<ssize_t>(bytes)) Fail("pipe", "cannot write");
}
std::string Read(int pipe) {
  pollfd ready{.fd = pipe, .events = POLLIN, .revents = 0};
  if (poll(&ready, 1, kPatience * 1000) != 1) Fail("pipe", "the other process says nothing");
  uint64_t bytes = 0;
  if (read(pipe, &bytes, sizeof bytes) != sizeof bytes) Fail("pipe", "the other process has gone");
  std::string message(bytes, '\0');
  for (size_t at = 0; at < bytes;) {
    const ssize_t got = read(pipe, message.data() + at, bytes - at);
    if (got <= 0) Fail("pipe", "cannot read");
    at += static_cast<size_t>(got);
  }
  return message;
}

// One end: an arena on a GPU, and a worker that knows it as device memory.
class End {
 public:
  explicit End(int device) {
    Check(cudaSetDevice(device), "cudaSetDevice");
    Check(cudaFree(nullptr), "context");
    if (SystemDriver() == nullptr) Fail("driver", "there is none with virtual memory management");
    ArenaError error;
    arena_ = DeviceArena::Make(*SystemDriver(), device, kBytes, &error);
    if (arena_ == nullptr) Fail("arena", error.message);
    ucp_config_t* config = nullptr;
    Require(ucp_config_read(nullptr, nullptr, &config), "ucp_config_read");
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_TAG;
    Require(ucp_init(&params, config, &context_), "ucp_init");
    ucp_config_release(config);
    ucp_worker_params_t worker{};
    worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker.thread_mode = UCS_THREAD_MODE_SINGLE;
    Require(ucp_worker_create(context_, &worker, &worker_), "ucp_worker_create");
  }
  ~End() {
    if (endpoint_ != nullptr) {
      ucp_request_param_t param{};
      Await(ucp_ep_close_nbx(endpoint_, &param), "close");
    }
    ucp_worker_destroy(worker_);
    ucp_cleanup(context_);
  }
  End(const End&) = delete;
  End& operator=(const End&) = delete;

  void TellAddress(int pipe) const {
    ucp_address_t* address = nullptr;
    size_t bytes = 0;
    Require(ucp_worker_get_address(worker_, &address, &bytes), "address");
    Write(pipe, address, bytes);
    ucp_worker_release_address(worker_, address);
  }
  void Connect(const std::string& address) {
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
    params.address = reinterpret_cast<const ucp_address_t*>(address.data());
    Require(ucp_ep_create(worker_, &params, &endpoint_), "endpoint");
  }
  void Send() {
    ucp_request_param_t param = OnDevice();
    Await(ucp_tag_send_nbx(endpoint_, arena_->data(), kBytes, kTag, &param), "send");
  }
  void Receive() {
    ucp_request_param_t param = OnDevice();
    Await(ucp_tag_recv_nbx(worker_, arena_->data(), kBytes, kTag, UINT64_MAX, &param), "receive");
  }
  std::byte* data() const { return arena_->data(); }

 private:
  static ucp_request_param_t OnDevice() {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    param.memory_type = UCS_MEMORY_TYPE_CUDA;
    return param;
  }
  void Await(ucs_status_ptr_t request, const char* what) {
    if (request == nullptr) return;
    if (UCS_PTR_IS_ERR(request)) Require(UCS_PTR_STATUS(request), what);
    const time_t deadline = time(nullptr) + kPatience;
    ucs_status_t status;
    while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS) {
      ucp_worker_progress(worker_);
      if (time(nullptr) > deadline) Fail(what, "not done in time");
    }
    ucp_request_free(request);
    Require(status, what);
  }

  std::unique_ptr<DeviceArena> arena_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
};

int Send(int device, int from, int to) {
  const std::vector<uint32_t> numbers = Numbers();
  End end(device);
  Check(cudaMemcpy(end.data(), numbers.data(), kBytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  end.Connect(Read(from));
  end.Send();
  Write(to, "sent", 4);
  return Read(from) == "same" ? 0 : 1;
}

int Receive(int device, int from, int to) {
  End end(device);
  Check(cudaMemset(end.data(), 0, kBytes), "cudaMemset");
  Check(cudaDeviceSynchronize(), "cudaMemset");
  end.TellAddress(to);
  end.Receive();
  std::vector<uint32_t> found(kBytes / sizeof(uint32_t));
  Check(cudaMemcpy(found.data(), end.data(), kBytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  const bool same = found == Numbers();
  Read(from);
  Write(to, same ? "same" : "else", 4);
  if (!same) std::fprintf(stderr, "ucx_arenas: other bytes arrived\n");
  return same ? 0 : 1;
}

}  // namespace
}  // namespace ashlar::kernels::cuda

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: cuda_ucx_arenas FROM TO\n");
    return 2;
  }
  int there[2], back[2];
  if (pipe(there) != 0 || pipe(back) != 0) return 2;
  const pid_t child = fork();  // before either process has a context
  if (child == 0) {
    close(there[1]);
    close(back[0]);
    return ashlar::kernels::cuda::Receive(std::atoi(argv[2]), there[0], back[1]);
  }
  close(there[0]);
  close(back[1]);
  const int sent = ashlar::kernels::cuda::Send(std::atoi(argv[1]), back[0], there[1]);
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0 ? sent : 1;
}
