// SPDX-License-Identifier: Apache-2.0
// ashlarctl layout: what a token, a segment and a conversation of a model cost, and how much a working set needs.
#include <iterator>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
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
    return absl::InvalidArgumentError(absl::StrCat("--", name, ": expected a number, at most ", most));
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
  if (arguments.Get("state-type") == "float32") question.wishes.state_dtype = DType::kF32;
  if (arguments.Get("state-type") == "bfloat16") question.wishes.state_dtype = DType::kBF16;
  if (arguments.Get("state-type") == "float16") question.wishes.state_dtype = DType::kF16;
  return question;
}

// Returns the bytes of the whole extents that an object takes.
absl::StatusOr<uint64_t> StoredBytes(const absl::StatusOr<ObjectHeader>& plan) {
  if (!plan.ok()) return plan.status();
  return plan->Extents() * limits::kExtentBytes;
}

struct Costs {
  uint64_t attention_layers = 0, linear_layers = 0, convolution_layers = 0;
  uint64_t token_bytes = 0;                                 // keys and values
  uint64_t recurrent_state_bytes = 0, conv_tail_bytes = 0;  // bytes of one prompt
  uint64_t segment_bytes = 0, conversation_bytes = 0;
};

absl::StatusOr<Costs> CostsOf(const HfLayout& model, const Question& question) {
  Costs costs;
  const Layout& layout = model.layout;
  for (size_t i = 0; i < layout.layers.size(); ++i) {
    if (const auto* attention = std::get_if<AttentionLayer>(&layout.layers[i])) {
      ++costs.attention_layers;
      const uint64_t elements = uint64_t{attention->kv_heads} * (attention->key_dim + attention->value_dim);
      costs.token_bytes += elements * ElementBytes(attention->dtype);
      continue;
    }
    if (const auto* opaque = std::get_if<OpaqueLayer>(&layout.layers[i])) {
      costs.token_bytes += opaque->token_bytes;
      costs.recurrent_state_bytes += opaque->state_bytes;
      continue;
    }
    const auto& linear = std::get<LinearLayer>(layout.layers[i]);
    const uint64_t state = uint64_t{linear.value_heads} * linear.d_k * linear.d_v * ElementBytes(linear.state_dtype);
    ++(model.convolution[i] ? costs.convolution_layers : costs.linear_layers);
    (model.convolution[i] ? costs.conv_tail_bytes : costs.recurrent_state_bytes) += state;
    costs.conv_tail_bytes += ConvTailBytes(linear);
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

uint64_t WorkingSet(const Costs& costs, const Question& question) {
  return question.segments * costs.segment_bytes + question.conversations * costs.conversation_bytes;
}

json JsonOf(const std::string& name, const Costs& costs, const Question& question) {
  return {{"model", name},
          {"attention_layers", costs.attention_layers},
          {"linear_layers", costs.linear_layers},
          {"convolution_layers", costs.convolution_layers},
          {"token_bytes", costs.token_bytes},
          {"recurrent_state_bytes", costs.recurrent_state_bytes},
          {"conv_tail_bytes", costs.conv_tail_bytes},
          {"state_bytes", costs.recurrent_state_bytes + costs.conv_tail_bytes},
          {"segment_tokens", question.segment_tokens},
          {"segment_bytes", costs.segment_bytes},
          {"conversation_tokens", question.conversation_tokens},
          {"conversation_bytes", costs.conversation_bytes},
          {"segments", question.segments},
          {"conversations", question.conversations},
          {"working_set_bytes", WorkingSet(costs, question)}};
}

std::string TextOf(const Costs& costs, const Question& question) {
  std::string text = absl::StrCat(costs.attention_layers, " attention layers, ", costs.linear_layers, " linear layers");
  if (costs.convolution_layers > 0) absl::StrAppend(&text, ", ", costs.convolution_layers, " convolution layers");
  absl::StrAppend(&text, "; on one rank\n");
  const auto line = [&](const std::string& what, uint64_t bytes) {
    absl::StrAppendFormat(&text, "%-44s %s\n", what, Bytes(bytes));
  };
  line("a token: keys and values", costs.token_bytes);
  line("any prompt: states and convolution tails", costs.recurrent_state_bytes + costs.conv_tail_bytes);
  line(absl::StrCat("a segment of ", question.segment_tokens, " tokens, stored"), costs.segment_bytes);
  line(absl::StrCat("a conversation of ", question.conversation_tokens, " tokens, stored"), costs.conversation_bytes);
  if (const uint64_t working_set = WorkingSet(costs, question); working_set > 0) {
    line(absl::StrCat(question.segments, " segments and ", question.conversations, " conversations"), working_set);
  }
  return text;
}

// Python writes numbers that JSON does not support, as in time_step_limit: replaces them by null.
std::string WithoutInfinities(const std::string& text) {
  std::string out;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (quoted && text[i] == '\\' && i + 1 < text.size())
      out += text[i++];
    else if (text[i] == '"')
      quoted = !quoted;
    const absl::string_view rest = absl::string_view(text).substr(i);
    size_t skipped = 0;
    for (const absl::string_view word : {"-Infinity", "Infinity", "NaN"}) {
      if (!quoted && skipped == 0 && absl::StartsWith(rest, word)) skipped = word.size();
    }
    out += skipped > 0 ? "null" : text.substr(i, 1);
    i += skipped > 0 ? skipped - 1 : 0;
  }
  return out;
}

struct Model {
  std::string name;  // the file's; of a list also the entry's
  json config;
};

// The models of a file: its configuration, or the ones of a list {"models": [{"model": NAME, "config": {...}}]}.
absl::StatusOr<std::vector<Model>> ModelsOf(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) return text.status();
  json file = json::parse(WithoutInfinities(*text), nullptr, /*allow_exceptions=*/false);
  if (!file.is_object()) return absl::InvalidArgumentError(absl::StrCat(path, ": expected a JSON object"));
  if (!file.contains("models")) return std::vector<Model>{{path, std::move(file)}};
  std::vector<Model> models;
  if (!file["models"].is_array()) return absl::InvalidArgumentError(absl::StrCat(path, ": models: expected a list"));
  for (size_t i = 0; i < file["models"].size(); ++i) {
    const json& entry = file["models"][i];
    const bool named = entry.is_object() && entry.contains("model") && entry["model"].is_string();
    if (!named || !entry.contains("config")) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": models[", i, "]: expected a model's name and its config"));
    }
    models.push_back({absl::StrCat(path, ": ", entry["model"].get<std::string>()), entry["config"]});
  }
  return models;
}

absl::StatusOr<Costs> CostsOf(const Model& model, const Question& question) {
  const absl::StatusOr<HfLayout> layout = LayoutFromHfConfig(model.config, question.wishes);
  if (!layout.ok()) return absl::InvalidArgumentError(absl::StrCat(model.name, ": ", layout.status().message()));
  return CostsOf(*layout, question);
}

// For several models: the supported ones, and why the others are not supported.
Answer AnswerForMany(const std::vector<Model>& models, const Question& question) {
  Answer answer{.json = {{"accepted", json::array()}, {"refused", json::array()}}};
  for (const Model& model : models) {
    const absl::StatusOr<Costs> costs = CostsOf(model, question);
    if (costs.ok()) {
      answer.json["accepted"].push_back(JsonOf(model.name, *costs, question));
      absl::StrAppend(&answer.text, model.name, "\n", TextOf(*costs, question), "\n");
      continue;
    }
    answer.refused = true;
    answer.json["refused"].push_back({{"model", model.name}, {"error", std::string(costs.status().message())}});
    absl::StrAppend(&answer.text, "refused: ", costs.status().message(), "\n\n");
  }
  absl::StrAppend(&answer.text, answer.json["accepted"].size(), " of ", models.size(), " accepted\n");
  return answer;
}

}  // namespace

absl::StatusOr<Answer> LayoutCosts(const Arguments& arguments, AdminClient&) {
  if (arguments.files.empty()) return absl::InvalidArgumentError("CONFIG-JSON: at least one is required");
  const absl::StatusOr<Question> question = ReadQuestion(arguments);
  if (!question.ok()) return question.status();
  std::vector<Model> models;
  bool listed = arguments.files.size() > 1;
  for (const std::string& path : arguments.files) {
    absl::StatusOr<std::vector<Model>> of_file = ModelsOf(path);
    if (!of_file.ok()) return of_file.status();
    listed |= of_file->size() != 1 || of_file->front().name != path;
    models.insert(models.end(), std::make_move_iterator(of_file->begin()), std::make_move_iterator(of_file->end()));
  }
  if (listed) return AnswerForMany(models, *question);
  const absl::StatusOr<Costs> costs = CostsOf(models[0], *question);
  if (!costs.ok()) return costs.status();
  return Answer{.json = JsonOf(models[0].name, *costs, *question), .text = TextOf(*costs, *question)};
}

}  // namespace ashlar::ctl
