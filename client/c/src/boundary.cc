// SPDX-License-Identifier: Apache-2.0
#include "client/c/src/boundary.h"

#include <cinttypes>
#include <cstdio>

#include "proto/version.h"

namespace ashlar::c {
namespace {

thread_local char error_message[sizeof(engine::Status::message)] = "";

bool IsError(int32_t code) {
  return code != ASHLAR_OK && code != ASHLAR_PENDING && code != ASHLAR_RESTART && code != ASHLAR_OTHER_PAGES;
}

}  // namespace

int32_t Fail(int32_t code, const char* message) {
  std::snprintf(error_message, sizeof error_message, "%s", message);
  return code;
}

int32_t OutOfRange(const char* field, uint64_t index, uint64_t count, const char* items) {
  std::snprintf(error_message, sizeof error_message, "%s: %" PRIu64 " is out of range; there are %" PRIu64 " %s", field,
                index, count, items);
  return ASHLAR_INVALID_ARGUMENT;
}

int32_t Report(const engine::Status& status) {
  const auto code = static_cast<int32_t>(status.code);
  return IsError(code) ? Fail(code, status.message) : code;
}

std::vector<engine::LinearTensors> TensorsOf(const std::string& name, const ashlar_linear_tensors* given,
                                             uint32_t count) {
  std::vector<engine::LinearTensors> all;
  for (const ashlar_linear_tensors& tensors : ReadAll(name, given, count)) {
    all.push_back({.layer = tensors.layer,
                   .state = tensors.state,
                   .state_exponents = tensors.state_exponents,
                   .conv_tail = tensors.conv_tail,
                   .transition = tensors.transition,
                   .decay = tensors.decay,
                   .state_head_stride = tensors.state_head_stride,
                   .conv_row_stride = tensors.conv_row_stride});
  }
  return all;
}

std::vector<engine::PageTable> TablesOf(const std::string& name, const ashlar_page_table* given, uint32_t count) {
  if (count > 0 && given == nullptr) throw Refused(name + ": null");
  std::vector<engine::PageTable> all(count);
  for (uint32_t i = 0; i < count; ++i) all[i] = {given[i].pages, given[i].count};
  return all;
}

std::vector<engine::Media> MediaOf(const std::string& name, const ashlar_media* given, uint64_t count) {
  if (count > 0 && given == nullptr) throw Refused(name + ": null");
  std::vector<engine::Media> all(count);
  for (uint64_t i = 0; i < count; ++i) {
    all[i].offset = given[i].offset;
    std::memcpy(all[i].hash, given[i].hash, sizeof all[i].hash);
  }
  return all;
}

engine::TokenRows RowsOf(const std::string& name, const ashlar_token_rows* given) {
  if (given == nullptr) return {};
  const ashlar_token_rows rows = Read(name, given);
  return {rows.tokens,   rows.q,        rows.k,        rows.v,        rows.g,           rows.beta,
          rows.q_stride, rows.k_stride, rows.v_stride, rows.g_stride, rows.beta_stride, rows.norm_epsilon,
          rows.q_scale};
}

engine::State StateOf(const std::string& name, const ashlar_state* given) {
  const ashlar_state state = Read(name, given);
  return {state.data, EnumOf(name + ".dtype", state.dtype, DType::kF32), state.exponents, state.head_stride};
}

}  // namespace ashlar::c

const char* ashlar_version(void) {
  return ashlar::Version();
}

const char* ashlar_error_message(void) {
  return ashlar::c::error_message;
}

int32_t ashlar_segment_lengths(const int32_t* tokens, uint64_t token_count, const int32_t* separator,
                               uint64_t separator_count, uint64_t min_tokens, uint64_t* lengths, uint64_t capacity,
                               uint64_t* count) {
  return ashlar::c::Report(ashlar::engine::SegmentLengths(tokens, token_count, separator, separator_count, min_tokens,
                                                          lengths, capacity, count));
}

const char* ashlar_miss_name(uint32_t reason) {
  return ashlar::engine::MissName(static_cast<uint8_t>(std::min<uint32_t>(reason, UINT8_MAX)));
}

const char* ashlar_tier_name(uint32_t tier) {
  return ashlar::engine::TierName(static_cast<uint8_t>(std::min<uint32_t>(tier, UINT8_MAX)));
}

const char* ashlar_publish_name(uint32_t outcome) {
  return ashlar::engine::PublishName(static_cast<uint8_t>(std::min<uint32_t>(outcome, UINT8_MAX)));
}

const char* ashlar_handoff_name(uint32_t outcome) {
  return ashlar::engine::HandoffName(static_cast<uint8_t>(std::min<uint32_t>(outcome, UINT8_MAX)));
}

const char* ashlar_commit_name(uint32_t outcome) {
  return ashlar::engine::CommitName(static_cast<uint8_t>(std::min<uint32_t>(outcome, UINT8_MAX)));
}
