// SPDX-License-Identifier: Apache-2.0
// Requests as bytes, checked before they are parsed: accepted ones are bounded after parsing.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/message.h>
#include <google/protobuf/unknown_field_set.h>

#include <memory>
#include <string>
#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "daemon/rpc/request_gate.h"
#include "daemon/session/session_table.h"
#include "tests/fuzz/fuzz.h"

namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using namespace ashlar::daemon;

constexpr int kBlock = 7;  // so that everything straddles some blocks

absl::Status Judge(const google::protobuf::Descriptor& type, const std::string& bytes) {
  google::protobuf::io::ArrayInputStream stream(bytes.data(), static_cast<int>(bytes.size()), kBlock);
  return CheckCounts(type, stream);
}

std::string Secret(const std::string& bytes) {
  google::protobuf::io::ArrayInputStream stream(bytes.data(), static_cast<int>(bytes.size()), kBlock);
  return FindSession(stream);
}

struct Found {
  bool too_many = false;  // for a repeated field
  size_t unknown = 0;
};

void Look(const Message& message, Found& found) {
  const auto* reflection = message.GetReflection();
  found.unknown += static_cast<size_t>(reflection->GetUnknownFields(message).field_count());
  std::vector<const FieldDescriptor*> fields;
  reflection->ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    const int count = field->is_repeated() ? reflection->FieldSize(message, field) : 1;
    found.too_many |= static_cast<uint64_t>(count) > MaxCount(*field);
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    for (int i = 0; i < count; ++i) {
      Look(field->is_repeated() ? reflection->GetRepeatedMessage(message, field, i)
                                : reflection->GetMessage(message, field),
           found);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const auto* service = ashlar::v1::MatchRequest::descriptor()->file()->FindServiceByName("Cache");
  const auto& type = *service->method(data[0] % service->method_count())->input_type();
  const std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  FUZZ_EXPECT(Secret(bytes).size() <= kSecretBytes);
  const absl::Status judged = Judge(type, bytes);
  FUZZ_EXPECT(judged.ok() || (absl::IsInvalidArgument(judged) && !judged.message().empty()));

  const std::unique_ptr<Message> message(
      google::protobuf::MessageFactory::generated_factory()->GetPrototype(&type)->New());
  if (!message->ParseFromString(bytes)) return 0;
  Found found;
  Look(*message, found);
  if (judged.ok()) FUZZ_EXPECT(!found.too_many && found.unknown <= kMaxUnknownFields);
  // A message from an ordinary client passes.
  if (found.too_many || found.unknown > 0) return 0;
  const std::string canonical = message->SerializeAsString();
  FUZZ_EXPECT(Judge(type, canonical).ok());
  std::string scratch;
  const std::string& secret =
      message->GetReflection()->GetStringReference(*message, type.FindFieldByNumber(1), &scratch);
  FUZZ_EXPECT(Secret(canonical) == (secret.size() <= kSecretBytes ? secret : ""));
  return 0;
}
