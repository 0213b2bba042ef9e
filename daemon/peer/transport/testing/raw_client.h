// SPDX-License-Identifier: Apache-2.0
// RawClient: a client that uses UCX directly, without a transport.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "daemon/runtime/host_port.h"

namespace ashlar::daemon {

class RawClient {
 public:
  RawClient(const HostPort& peer, uint64_t features) {
    ucp_config_t* config = nullptr;
    EXPECT_EQ(ucp_config_read(nullptr, nullptr, &config), UCS_OK);
    EXPECT_EQ(ucp_config_modify(config, "TLS", "tcp,self"), UCS_OK);
    EXPECT_EQ(ucp_config_modify(config, "NET_DEVICES", "lo"), UCS_OK);
    EXPECT_EQ(ucp_config_modify(config, "CM_USE_ALL_DEVICES", "n"), UCS_OK);
    ucp_params_t params{.field_mask = UCP_PARAM_FIELD_FEATURES, .features = features};
    EXPECT_EQ(ucp_init(&params, config, &context_), UCS_OK);
    ucp_config_release(config);
    ucp_worker_params_t worker{.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SINGLE};
    EXPECT_EQ(ucp_worker_create(context_, &worker, &worker_), UCS_OK);
    // Replies are dropped. Without a handler, UCX of this client would read unmapped memory.
    ucp_am_handler_param_t handler{.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB};
    handler.cb = [](void*, const void*, size_t, void*, size_t, const ucp_am_recv_param_t*) { return UCS_OK; };
    if (features & UCP_FEATURE_AM) {
      EXPECT_EQ(ucp_worker_set_am_recv_handler(worker_, &handler), UCS_OK);
    }
    sockaddr_in address{.sin_family = AF_INET, .sin_port = htons(peer.port)};
    inet_pton(AF_INET, peer.host.c_str(), &address.sin_addr);
    ucp_ep_params_t ep{};
    ep.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                    UCP_EP_PARAM_FIELD_ERR_HANDLER;
    ep.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
    ep.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    ep.err_handler = {[](void* self, ucp_ep_h, ucs_status_t) { static_cast<RawClient*>(self)->lost_ = true; }, this};
    ep.sockaddr = {reinterpret_cast<sockaddr*>(&address), sizeof address};
    EXPECT_EQ(ucp_ep_create(worker_, &ep, &ep_), UCS_OK);
  }
  ~RawClient() {
    ucp_request_param_t force{.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
    Wait(ucp_ep_close_nbx(ep_, &force));
    ucp_worker_destroy(worker_);
    ucp_cleanup(context_);
  }

  void Message(std::span<const std::byte> header, std::span<const std::byte> payload, uint32_t flags = 0,
               unsigned id = 0) {
    ucp_request_param_t param{.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_AM_SEND_FLAG_REPLY | flags};
    Wait(ucp_am_send_nbx(ep_, id, header.data(), header.size(), payload.data(), payload.size(), &param));
  }
  void Tag(std::span<const std::byte> bytes) {
    ucp_request_param_t param{};
    Wait(ucp_tag_send_nbx(ep_, bytes.data(), bytes.size(), 7, &param));
  }
  void Stream(std::span<const std::byte> bytes) {
    ucp_request_param_t param{};
    Wait(ucp_stream_send_nbx(ep_, bytes.data(), bytes.size(), &param));
  }
  // With a key for its own memory, at an address of the holder.
  void Memory(std::span<std::byte> target, std::span<std::byte> mine, bool write) {
    ucp_mem_map_params_t map{.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
                             .address = mine.data(),
                             .length = mine.size()};
    ucp_mem_h memory = nullptr;
    void* packed = nullptr;
    size_t size = 0;
    ucp_rkey_h key = nullptr;
    ASSERT_EQ(ucp_mem_map(context_, &map, &memory), UCS_OK);
    ASSERT_EQ(ucp_rkey_pack(context_, memory, &packed, &size), UCS_OK);
    ASSERT_EQ(ucp_ep_rkey_unpack(ep_, packed, &key), UCS_OK);
    ucp_rkey_buffer_release(packed);
    ucp_request_param_t param{};
    const uint64_t address = reinterpret_cast<uint64_t>(target.data());
    Wait(write ? ucp_put_nbx(ep_, mine.data(), mine.size(), address, key, &param)
               : ucp_get_nbx(ep_, mine.data(), mine.size(), address, key, &param));
    ucp_rkey_destroy(key);
    ucp_mem_unmap(context_, memory);
  }
  bool lost() {
    for (int i = 0; i < 100; ++i) ucp_worker_progress(worker_);
    return lost_;
  }

 private:
  // There may be no reply: waits briefly, then cancels.
  void Wait(ucs_status_ptr_t request) {
    if (!UCS_PTR_IS_PTR(request)) return;
    for (int i = 0; i < 3000 && !lost_ && ucp_request_check_status(request) == UCS_INPROGRESS; ++i) {
      if (ucp_worker_progress(worker_) == 0) usleep(100);
    }
    ucp_request_free(request);
  }

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_ep_h ep_ = nullptr;
  bool lost_ = false;
};

}  // namespace ashlar::daemon
