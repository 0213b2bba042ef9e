// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/request_gate.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <algorithm>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "daemon/session/session_table.h"
#include "proto/limits.h"
#include "proto/prefill_limits.h"

namespace ashlar::daemon {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

constexpr int kSessionField = 1;

template <typename Message>
const FieldDescriptor* Field(int number) {
  return Message::descriptor()->FindFieldByNumber(number);
}

// Returns all repeated fields of all requests.
const absl::flat_hash_map<const FieldDescriptor*, uint64_t>& RepeatedFields() {
  static const absl::flat_hash_map<const FieldDescriptor*, uint64_t> fields = {
      {Field<v1::DeclarePagesRequest>(v1::DeclarePagesRequest::kLayersFieldNumber), limits::kMaxLayers},
      {Field<v1::DeclarePagesRequest>(v1::DeclarePagesRequest::kGroupsFieldNumber), limits::kMaxLayers},
      {Field<v1::MatchRequest>(v1::MatchRequest::kPromptsFieldNumber), limits::kMaxPromptsPerCall},
      {Field<v1::Prompt>(v1::Prompt::kSegmentLengthsFieldNumber), limits::kMaxSegments},
      {Field<v1::ReserveRequest>(v1::ReserveRequest::kObjectsFieldNumber), limits::kMaxObjectsPerCall},
      {Field<v1::PlanPrefillRequest>(v1::PlanPrefillRequest::kObjectsFieldNumber), limits::kMaxObjectsPerCall},
      {Field<v1::ServePrefillRequest>(v1::ServePrefillRequest::kResultsFieldNumber), limits::kMaxPrefillResults},
      {Field<v1::PublishRequest>(v1::PublishRequest::kObjectsFieldNumber), limits::kMaxObjectsPerCall},
      {Field<v1::PublishObject>(v1::PublishObject::kPartsFieldNumber), limits::kMaxPartSources},
      {Field<v1::PublishObject>(v1::PublishObject::kPageTableFieldNumber), limits::kMaxPromptTokens},
      {Field<v1::PublishObject>(v1::PublishObject::kGroupPagesFieldNumber), limits::kMaxLayers},
      {Field<v1::CommitRequest>(v1::CommitRequest::kCheckpointsFieldNumber), limits::kMaxCheckpointsPerCommit},
      {Field<v1::CommitRequest>(v1::CommitRequest::kPageTableFieldNumber), limits::kMaxPromptTokens},
      {Field<v1::CommitRequest>(v1::CommitRequest::kGroupPagesFieldNumber), limits::kMaxLayers},
      {Field<v1::CapturedState>(v1::CapturedState::kPartsFieldNumber), limits::kMaxPartSources},
      {Field<v1::CapturedSpan>(v1::CapturedSpan::kPartsFieldNumber), limits::kMaxPartSources},
      {Field<v1::AbandonRequest>(v1::AbandonRequest::kReservationsFieldNumber), limits::kMaxObjectsPerCall},
      {Field<v1::LandRequest>(v1::LandRequest::kPageTableFieldNumber), limits::kMaxPromptTokens},
      {Field<v1::LandRequest>(v1::LandRequest::kGroupPagesFieldNumber), limits::kMaxLayers},
      {Field<v1::LandRequest>(v1::LandRequest::kSegmentsFieldNumber), limits::kMaxObjectsPerLanding},
      {Field<v1::LandRequest>(v1::LandRequest::kTuplesOnlyFieldNumber), limits::kMaxObjectsPerLanding},
      {Field<v1::LookupAndLandRequest>(v1::LookupAndLandRequest::kPageTableFieldNumber), limits::kMaxPromptTokens},
      {Field<v1::LookupAndLandRequest>(v1::LookupAndLandRequest::kGroupPagesFieldNumber), limits::kMaxLayers},
      {Field<v1::AdvanceRequest>(v1::AdvanceRequest::kStepsFieldNumber), limits::kMaxStepsPerComposition},
      {Field<v1::AdmitRequest>(v1::AdmitRequest::kUnsharedSegmentsFieldNumber), limits::kMaxSegments},
      {Field<v1::SegmentsToFill>(v1::SegmentsToFill::kSegmentsFieldNumber), limits::kMaxObjectsPerLanding},
      {Field<v1::MarkFilledRequest>(v1::MarkFilledRequest::kSegmentsFieldNumber), limits::kMaxObjectsPerLanding},
      {Field<v1::ReleaseRequest>(v1::ReleaseRequest::kLeasesFieldNumber), limits::kMaxReleasesPerCall},
  };
  return fields;
}

absl::Status Malformed() {
  return absl::InvalidArgumentError("request: cannot be parsed as the call's message type");
}

// Counts varints: bytes without the continuation bit; the parser also keeps a truncated last one.
uint64_t CountVarints(CodedInputStream& in, int bytes) {
  uint64_t count = 0;
  bool cut_off = false;
  const void* data;
  int size;
  while (bytes > 0 && in.GetDirectBufferPointer(&data, &size)) {
    size = std::min(size, bytes);
    const auto* begin = static_cast<const uint8_t*>(data);
    count += std::count_if(begin, begin + size, [](uint8_t byte) { return byte < 0x80; });
    cut_off = begin[size - 1] >= 0x80;
    in.Skip(size);
    bytes -= size;
  }
  return count + (cut_off ? 1 : 0);
}

// Returns whether the parser reads the bytes after `tag` as the field rather than as an unknown field.
bool IsKnown(const FieldDescriptor* field, uint32_t tag) {
  if (field == nullptr) return false;
  const auto type = WireFormatLite::WireTypeForFieldType(static_cast<WireFormatLite::FieldType>(field->type()));
  const auto wire = WireFormatLite::GetTagWireType(tag);
  return wire == type || (field->is_packable() && wire == WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
}

class Counter {
 public:
  explicit Counter(CodedInputStream& in) : in_(in) {}

  // Counts up to the end of the message, or to the limit that the caller has pushed.
  absl::Status Count(const Descriptor& type) {
    std::vector<uint64_t> counts(type.field_count());
    while (const uint32_t tag = in_.ReadTag()) {
      const FieldDescriptor* field = type.FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
      if (!IsKnown(field, tag)) {
        if (absl::Status status = SkipUnknown(tag); !status.ok()) return status;
        continue;
      }
      uint64_t elements = 1;
      uint64_t& count = counts[field->index()];
      if (absl::Status status = Enter(*field, tag, count, &elements); !status.ok()) return status;
      count += elements;
      // A repeated number or text replaces the previous one; a repeated message is merged.
      const bool accumulates = field->is_repeated() || field->message_type() != nullptr;
      if (accumulates && count > MaxCount(*field)) {
        return absl::InvalidArgumentError(
            absl::StrCat(field->name(), ": too many; expected at most ", MaxCount(*field)));
      }
    }
    return in_.ConsumedEntireMessage() ? absl::OkStatus() : Malformed();
  }

 private:
  absl::Status SkipUnknown(uint32_t tag) {
    if (++unknown_ > kMaxUnknownFields) {
      return absl::InvalidArgumentError(absl::StrCat("request: more than ", kMaxUnknownFields, " unknown fields"));
    }
    // Groups nest, but proto3 has none.
    const bool group = WireFormatLite::GetTagWireType(tag) == WireFormatLite::WIRETYPE_START_GROUP;
    return !group && WireFormatLite::SkipField(&in_, tag) ? absl::OkStatus() : Malformed();
  }

  // Enters the value of a known field, the `index`-th in its message; a packed one has many `elements`.
  absl::Status Enter(const FieldDescriptor& field, uint32_t tag, uint64_t index, uint64_t* elements) {
    if (WireFormatLite::GetTagWireType(tag) != WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
      return WireFormatLite::SkipField(&in_, tag) ? absl::OkStatus() : Malformed();
    }
    int size;
    if (!in_.ReadVarintSizeAsInt(&size)) return Malformed();
    if (field.message_type() != nullptr) {
      const CodedInputStream::Limit limit = in_.PushLimit(size);
      const absl::Status status = Count(*field.message_type());
      in_.PopLimit(limit);
      if (status.ok()) return status;
      const std::string place = field.is_repeated() ? absl::StrCat("[", index, "]") : "";
      return absl::InvalidArgumentError(absl::StrCat(field.name(), place, ".", std::string(status.message())));
    }
    if (field.is_packable()) {
      *elements = CountVarints(in_, size);
      return absl::OkStatus();
    }
    return in_.Skip(size) ? absl::OkStatus() : Malformed();
  }

  CodedInputStream& in_;
  size_t unknown_ = 0;
};

}  // namespace

std::string FindSession(google::protobuf::io::ZeroCopyInputStream& request) {
  CodedInputStream in(&request);
  while (const uint32_t tag = in.ReadTag()) {
    if (tag == WireFormatLite::MakeTag(kSessionField, WireFormatLite::WIRETYPE_LENGTH_DELIMITED)) {
      uint32_t size;
      std::string secret;
      if (!in.ReadVarint32(&size) || size > kSecretBytes || !in.ReadString(&secret, static_cast<int>(size))) return "";
      return secret;
    }
    if (!WireFormatLite::SkipField(&in, tag)) return "";
  }
  return "";
}

uint64_t MaxCount(const FieldDescriptor& field) {
  if (!field.is_repeated()) return 1;
  const auto found = RepeatedFields().find(&field);
  return found == RepeatedFields().end() ? 0 : found->second;
}

absl::Status CheckCounts(const Descriptor& type, google::protobuf::io::ZeroCopyInputStream& request) {
  CodedInputStream in(&request);
  return Counter(in).Count(type);
}

}  // namespace ashlar::daemon
