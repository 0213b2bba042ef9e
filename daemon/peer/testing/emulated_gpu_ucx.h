// SPDX-License-Identifier: Apache-2.0
// EmulatedGpuUcx: UCX over TCP that reaches the memory of emulated GPUs as CUDA-aware UCX reaches that of real ones.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/peer/transport/ucx.h"
#include "kernels/cuda/emulator/driver.h"

namespace ashlar::daemon {

// The memory of an emulated GPU is accessible only to a thread that acts as the GPU. The library acts as the GPU in all
// its calls, but not in its callbacks. So a transport that copies there itself gets a signal, unless another
// transport's library runs at that moment.
class EmulatedGpuUcx final : public Ucx {
 public:
  // One per transport; it must outlive it.
  struct Control {
    bool reaches = true;                 // GPU memory is reachable
    std::atomic<bool> stands = false;    // the network is stalled
    std::atomic<uint64_t> gpu_sent = 0;  // bytes of GPU memory sent by messages
    std::atomic<uint64_t> gpu_got = 0;   // bytes read into GPU memory
  };

  static TransportSurroundings Surroundings(Control& control) {
    TransportSurroundings surroundings = TransportSurroundings::OfThisProcess();
    surroundings.open = [&control](const TransportOptions& options,
                                   LinkEvents events) -> absl::StatusOr<std::unique_ptr<Ucx>> {
      auto ucx = std::make_unique<EmulatedGpuUcx>(control);
      absl::StatusOr<std::unique_ptr<Ucx>> opened = Ucx::Open(options, ucx->Apart(std::move(events)));
      if (!opened.ok()) return opened;
      ucx->ucx_ = *std::move(opened);
      return ucx;
    };
    return surroundings;
  }
  explicit EmulatedGpuUcx(Control& control) : control_(control) {}
  ~EmulatedGpuUcx() override {
    const AsGpus as_gpus(*this);
    ucx_ = nullptr;
  }

  HostPort address() const override { return ucx_->address(); }
  const std::vector<UcxSetting>& settings() const override { return ucx_->settings(); }
  bool has_rdma() const override { return ucx_->has_rdma(); }
  absl::StatusOr<Link*> Connect(const HostPort& peer) override { return ucx_->Connect(peer); }
  void Send(Link& link, const Message& message, ConstSpans pieces, std::function<void(absl::Status)> sent) override {
    for (const auto& piece : pieces) {
      if (TypeOf(piece.data()) == MemoryType::kCuda) control_.gpu_sent += piece.size();
    }
    const AsGpus as_gpus(*this);
    ucx_->Send(link, message, std::move(pieces), std::move(sent));
  }
  void SendText(Link& link, const Message& message, std::string text) override {
    ucx_->SendText(link, message, std::move(text));
  }
  bool reads() const override { return ucx_->reads(); }
  bool ReadsOver(const std::string& lanes) const override { return ucx_->ReadsOver(lanes); }
  bool Reaches(MemoryType type) const override { return type == MemoryType::kHost || control_.reaches; }
  absl::StatusOr<std::string> Register(std::byte* data, uint64_t bytes, MemoryType type) override {
    if (type == MemoryType::kCuda) on_gpus_[data] = bytes;
    return ucx_->Register(data, bytes, MemoryType::kHost);  // as the library sees it
  }
  MemoryType TypeOf(const std::byte* data) const override {
    const auto next = on_gpus_.upper_bound(data);
    if (next == on_gpus_.begin()) return MemoryType::kHost;
    const auto& [begin, bytes] = *std::prev(next);
    return data < begin + bytes ? MemoryType::kCuda : MemoryType::kHost;
  }
  absl::StatusOr<std::unique_ptr<RemoteKey>> Unpack(Link& link, const std::string& packed) override {
    return ucx_->Unpack(link, packed);
  }
  void Get(Link& link, RemoteKey& key, uint64_t address, std::span<std::byte> target,
           std::function<void(absl::Status)> got) override {
    if (TypeOf(target.data()) == MemoryType::kCuda) control_.gpu_got += target.size();
    const AsGpus as_gpus(*this);
    ucx_->Get(link, key, address, target, std::move(got));
  }
  void Close(Link& link) override { ucx_->Close(link); }
  std::string Lanes(Link& link) const override { return ucx_->Lanes(link); }
  bool Progress() override {
    if (control_.stands) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return false;
    }
    const AsGpus as_gpus(*this);
    return ucx_->Progress();
  }
  bool Arm() override { return ucx_->Arm(); }
  int event() const override { return ucx_->event(); }

 private:
  using Work = kernels::cuda::emulator::DeviceWork;
  struct EveryGpu {
    EveryGpu() : first(0), second(1) {}
    Work first, second;
  };
  static_assert(kernels::cuda::emulator::kDevices == 2);

  // Acts as the GPU while the library runs.
  class AsGpus {
   public:
    explicit AsGpus(EmulatedGpuUcx& ucx) : ucx_(ucx), begins_(!ucx.as_gpus_.has_value() && !ucx.on_gpus_.empty()) {
      if (begins_) ucx_.as_gpus_.emplace();
    }
    ~AsGpus() {
      if (begins_) ucx_.as_gpus_.reset();
    }
    AsGpus(const AsGpus&) = delete;
    AsGpus& operator=(const AsGpus&) = delete;

   private:
    EmulatedGpuUcx& ucx_;
    const bool begins_;
  };

  // Callbacks run without acting as the GPU.
  LinkEvents Apart(LinkEvents events) {
    LinkEvents apart = events;
    apart.received = [this, received = std::move(events.received)](Link* link, std::span<const std::byte> header,
                                                                   std::span<const std::byte> payload) {
      const bool was = as_gpus_.has_value();
      as_gpus_.reset();
      received(link, header, payload);
      if (was) as_gpus_.emplace();
    };
    return apart;
  }

  Control& control_;
  std::unique_ptr<Ucx> ucx_;
  std::map<const std::byte*, uint64_t> on_gpus_;  // bytes by start address
  std::optional<EveryGpu> as_gpus_;
};

}  // namespace ashlar::daemon
