// ashlarctl layout: what a token, a segment and a conversation of a model cost, and how much a working set needs.
#include <cmath>
#include <variant>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/limits.h"
#include "proto/object.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/format.h"
#include "tools/ashlarctl/hf_config.h"
#include "tools/ashlarctl/token_file.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

// INVALID_ARGUMENT names the option.
absl::StatusOr<uint64_t> NumberOf(const Arguments& arguments, const char* name, uint64_t otherwise, uint64_t most) {
  if (!arguments.Has(name)) return otherwise;
  uint64_t number = 0;
  if (!absl::SimpleAtoi(arguments.Get(name), &number) || number > most) {
    return absl::InvalidArgumentError(absl::StrCat("--", name, ": not a number, at most ", most));
  }
  return number;
}

struct Question {
  LayoutWishes wishes;
  uint64_t segment_tokens = 0, conversation_tokens = 0, segments = 0, conversations = 0;
};

absl::StatusOr<Question> ReadQuestion(const Arguments& arguments) {
  Question question;
  const auto read = [&](const char* name, uint64_t otherwise, uint64_t most, auto* out) {
    const absl::StatusOr<uint64_t> number = NumberOf(arguments, name, otherwise, most);
    if (number.ok()) *out = static_cast<std::remove_pointer_t<decltype(out)>>(*number);
    return number.status();
  };
  constexpr uint64_t kMost = uint64_t{1} << 40;
  for (const absl::Status& status :
       {read("page-tokens", 16, 4096, &question.wishes.page_tokens), read("head", 4, 4096, &question.wishes.head),
        read("tail", 4, 4096, &question.wishes.tail),
        read("segment-tokens", 1024, limits::kMaxPromptTokens, &question.segment_tokens),
        read("conversation-tokens", 32768, limits::kMaxPromptTokens, &question.conversation_tokens),
        read("segments", 0, kMost, &question.segments), read("conversations", 0, kMost, &question.conversations)}) {
    if (!status.ok()) return status;
  }
  if (arguments.Get("state-type") == "bfloat16") question.wishes.state_dtype = DType::kBF16;
  if (arguments.Get("state-type") == "float16") question.wishes.state_dtype = DType::kF16;
  return question;
}

// Returns the bytes of whole extents that an object takes.
absl::StatusOr<uint64_t> StoredBytes(const absl::StatusOr<ObjectHeader>& plan) {
  if (!plan.ok()) return plan.status();
  return plan->Extents() * limits::kExtentBytes;
}

struct Costs {
  uint64_t attention_layers = 0, linear_layers = 0;
  uint64_t token_bytes = 0;  // keys and values
  uint64_t state_bytes = 0;  // of one prompt: running states and the convolutions' tails
  uint64_t segment_bytes = 0, conversation_bytes = 0;
};

absl::StatusOr<Costs> CostsOf(const Layout& layout, const Question& question) {
  Costs costs;
  for (const Layer& layer : layout.layers) {
    if (const auto* attention = std::get_if<AttentionLayer>(&layer)) {
      ++costs.attention_layers;
      const uint64_t elements = uint64_t{attention->kv_heads} * (attention->key_dim + attention->value_dim);
      costs.token_bytes += elements * ElementBytes(attention->dtype);
    } else {
      const auto& linear = std::get<LinearLayer>(layer);
      ++costs.linear_layers;
      const uint64_t elements = uint64_t{linear.value_heads} * linear.d_k * linear.d_v;
      costs.state_bytes += elements * ElementBytes(linear.state_dtype) + ConvTailBytes(linear);
    }
  }
  const NamespaceId ns{};
  const Key key{};
  const auto segment = StoredBytes(PlanObject(layout, ns, key, ObjectKind::kSegment, question.segment_tokens));
  if (!segment.ok()) return absl::InvalidArgumentError(absl::StrCat("--segment-tokens: ", segment.status().message()));
  const auto whole = StoredBytes(PlanObject(layout, ns, key, ObjectKind::kCheckpoint, question.conversation_tokens));
  if (!whole.ok()) return absl::InvalidArgumentError(absl::StrCat("--conversation-tokens: ", whole.status().message()));
  costs.segment_bytes = *segment;
  costs.conversation_bytes = *whole;
  return costs;
}

}  // namespace

absl::StatusOr<Answer> LayoutCosts(const Arguments& arguments, AdminClient&) {
  if (arguments.files.size() != 1) return absl::InvalidArgumentError("CONFIG-JSON: exactly one is required");
  const absl::StatusOr<Question> question = ReadQuestion(arguments);
  if (!question.ok()) return question.status();
  const absl::StatusOr<std::string> file = ReadFile(arguments.files[0]);
  if (!file.ok()) return file.status();
  const absl::StatusOr<Layout> layout = LayoutFromHfConfig(*file, question->wishes);
  if (!layout.ok()) return layout.status();
  const absl::StatusOr<Costs> costs = CostsOf(*layout, *question);
  if (!costs.ok()) return costs.status();
  const uint64_t working_set =
      question->segments * costs->segment_bytes + question->conversations * costs->conversation_bytes;
  Answer answer{.json = {{"attention_layers", costs->attention_layers},
                         {"linear_layers", costs->linear_layers},
                         {"token_bytes", costs->token_bytes},
                         {"state_bytes", costs->state_bytes},
                         {"segment_tokens", question->segment_tokens},
                         {"segment_bytes", costs->segment_bytes},
                         {"conversation_tokens", question->conversation_tokens},
                         {"conversation_bytes", costs->conversation_bytes},
                         {"segments", question->segments},
                         {"conversations", question->conversations},
                         {"working_set_bytes", working_set}}};
  const auto line = [&](const std::string& what, uint64_t bytes) {
    absl::StrAppendFormat(&answer.text, "%-44s %s\n", what, Bytes(bytes));
  };
  absl::StrAppend(&answer.text, costs->attention_layers, " layers of attention, ", costs->linear_layers,
                  " linear layers; on one rank\n");
  line("a token: keys and values", costs->token_bytes);
  line("a prompt of any length: states and tails", costs->state_bytes);
  line(absl::StrCat("a segment of ", question->segment_tokens, " tokens, stored"), costs->segment_bytes);
  line(absl::StrCat("a conversation of ", question->conversation_tokens, " tokens, stored"), costs->conversation_bytes);
  if (working_set > 0) {
    line(absl::StrCat(question->segments, " segments and ", question->conversations, " conversations"), working_set);
  }
  return answer;
}

}  // namespace ashlar::ctl
