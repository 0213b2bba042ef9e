// SPDX-License-Identifier: Apache-2.0
// ashlarctl explain, ashlarctl models: reasons of misses.
#include <cstdint>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proto/invalid.h"
#include "proto/layout.h"
#include "tools/ashlarctl/command.h"
#include "tools/ashlarctl/explanation_text.h"
#include "tools/ashlarctl/format.h"
#include "tools/ashlarctl/texts.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

absl::StatusOr<Answer> ExplainLast(const Arguments& arguments, AdminClient& client) {
  v1::LastMissesRequest request;
  request.set_tenant(arguments.Get("tenant"));
  uint32_t count = 0;
  if (!absl::SimpleAtoi(arguments.Get("last"), &count) || count == 0)
    return Invalid("--last: expected a positive number");
  request.set_count(count);
  v1::LastMissesReply reply;
  if (absl::Status status = client.LastMisses(request, &reply); !status.ok()) return status;
  Answer answer{.json = {{"tenants", json::array()}}};
  for (const v1::TenantMisses& tenant : reply.tenants()) {
    json misses = json::array();
    absl::StrAppend(&answer.text, "tenant ", tenant.tenant(), ": ", tenant.misses_size(), " misses, newest first\n");
    for (const v1::MissedText& miss : tenant.misses()) {
      json text = ExplanationJson(miss.text());
      text["seconds_ago"] = miss.seconds_ago();
      text["session"] = miss.session();
      misses.push_back(std::move(text));
      absl::StrAppend(&answer.text, "  ", Duration(miss.seconds_ago()), " ago, session ", miss.session(), ": ",
                      ExplanationText(miss.text()), "\n");
    }
    answer.json["tenants"].push_back({{"tenant", tenant.tenant()}, {"misses", std::move(misses)}});
  }
  return answer;
}

}  // namespace

absl::StatusOr<Answer> Explain(const Arguments& arguments, AdminClient& client) {
  if (arguments.Has("last")) {
    if (!arguments.files.empty()) return Invalid(arguments.files[0], ": unexpected file; --last takes no files");
    return ExplainLast(arguments, client);
  }
  const absl::StatusOr<v1::Texts> texts = ReadTexts(arguments, client);
  if (!texts.ok()) return texts.status();
  v1::ExplainReply reply;
  if (absl::Status status = client.Explain(*texts, &reply); !status.ok()) return status;
  Answer answer{.json = {{"texts", json::array()}}};
  for (int i = 0; i < reply.texts_size(); ++i) {
    json text = ExplanationJson(reply.texts(i));
    text["file"] = arguments.files[i];
    answer.json["texts"].push_back(std::move(text));
    absl::StrAppend(&answer.text, arguments.files[i], ": ", ExplanationText(reply.texts(i)), "\n");
  }
  return answer;
}

absl::StatusOr<Answer> Models(const Arguments& arguments, AdminClient& client) {
  v1::ModelsRequest request;
  request.set_tenant(arguments.Get("tenant"));
  v1::ModelsReply reply;
  if (absl::Status status = client.Models(request, &reply); !status.ok()) return status;
  Answer answer{.json = {{"tenants", json::array()}}};
  for (const v1::TenantModels& tenant : reply.tenants()) {
    json models = json::array();
    absl::StrAppend(&answer.text, "tenant ", tenant.tenant(), ": ", tenant.models_size(),
                    " models, most recently opened first\n");
    for (const v1::OpenedModel& opened : tenant.models()) {
      const absl::StatusOr<Identity> identity = DecodeIdentity(opened.identity());
      if (!identity.ok()) return identity.status();
      models.push_back({{"namespace", Hex(opened.ns())},
                        {"model_id", identity->model_id},
                        {"weights_digest", identity->weights_digest},
                        {"dtype", identity->dtype},
                        {"quantization", identity->quantization},
                        {"tokenizer_digest", identity->tokenizer_digest},
                        {"lora", identity->lora},
                        {"layers", opened.layers()},
                        {"page_tokens", opened.page_tokens()},
                        {"head", opened.head()},
                        {"tail", opened.tail()}});
      absl::StrAppend(&answer.text, "  ", ShortHex(opened.ns()), "…  \"", Printable(identity->model_id), "\", weights ",
                      Printable(identity->weights_digest), ", ", opened.layers(), " layers, pages of ",
                      opened.page_tokens(), " tokens, head ", opened.head(), ", tail ", opened.tail(),
                      identity->lora.empty() ? "" : absl::StrCat(", adapter ", Printable(identity->lora)), "\n");
    }
    answer.json["tenants"].push_back({{"tenant", tenant.tenant()}, {"models", std::move(models)}});
  }
  return answer;
}

}  // namespace ashlar::ctl
