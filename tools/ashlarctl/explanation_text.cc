// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/explanation_text.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proto/key.h"
#include "proto/outcome.h"
#include "tools/ashlarctl/format.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

std::string Words(std::string name) {
  std::ranges::replace(name, '_', ' ');
  return name;
}
std::string Uses(uint32_t uses) {
  if (uses == 0) return "never used";
  return uses == 1 ? "used once" : absl::StrCat("used ", uses, " times");
}

std::string PresenceText(const v1::Presence& present) {
  std::string text = absl::StrCat("in ", TierName(present.tier()), ", ", Bytes(present.bytes()), ", published ",
                                  Duration(present.age_seconds()), " ago, ", Uses(present.uses()));
  if (present.uses() > 0) absl::StrAppend(&text, ", last ", Duration(present.idle_seconds()), " ago");
  if (present.references() > 0) absl::StrAppend(&text, ", held by ", present.references());
  if (present.of_shards() > 1) absl::StrAppend(&text, ", ", present.shards(), " of ", present.of_shards(), " shards");
  return text;
}

std::string GoneText(const v1::Gone& gone) {
  std::string text = absl::StrCat(Words(ReasonName(gone.reason())), " ", Duration(gone.seconds_ago()), " ago");
  if (gone.tier() != 0) absl::StrAppend(&text, " from ", TierName(gone.tier()));
  if (gone.policy() != 0) absl::StrAppend(&text, " by ", PolicyName(gone.policy()));
  absl::StrAppend(&text, ", ", Bytes(gone.bytes()));
  if (gone.tier() == 0) return text;
  absl::StrAppend(&text, ", ", Uses(gone.uses()), " in ", Duration(gone.lived_seconds()));
  if (gone.uses() > 0) absl::StrAppend(&text, ", not in the last ", Duration(gone.idle_seconds()));
  return text;
}

std::string OtherNamespaceText(const v1::NamespaceDifference& other) {
  std::string text = absl::StrCat("published under namespace ", ShortHex(other.ns()), "…");
  if (other.field().empty()) return text;
  return absl::StrCat(text, ", which differs in ", other.field(), ": ", Printable(other.requested_value()), " here, ",
                      Printable(other.other_value()), " there");
}

// node0 (dram), node1 (hbm of GPU 2, shard 1)
std::string HoldersText(const v1::ExplainedText& text) {
  std::string said;
  for (const v1::TextHolder& holder : text.holders()) {
    absl::StrAppend(&said, said.empty() ? "" : ", ", holder.node(), " (", TierName(holder.tier()));
    if (holder.has_gpu()) absl::StrAppend(&said, " of GPU ", holder.gpu());
    absl::StrAppend(&said, holder.rank() > 0 ? absl::StrCat(", shard ", holder.rank()) : "",
                    holder.unreachable() ? ", unreachable" : "", ")");
  }
  return said;
}

std::string TextHere(const v1::ExplainedText& text) {
  std::string said = absl::StrCat(Name(static_cast<ObjectKind>(text.kind())), " of ", text.tokens(), " tokens: ");
  const auto reason = static_cast<MissReason>(text.miss_reason());
  if (reason == MissReason::kNone) return absl::StrCat(said, PresenceText(text.present()));
  // A hit as soon as the other ranks have published.
  const bool partial = text.has_present() && text.present().shards() < text.present().of_shards();
  if (partial && text.present().shards() > 0) return absl::StrCat(said, PresenceText(text.present()));
  // A deleted object gives its own reason, unless the lookup missed for another reason.
  const bool told = text.has_gone() && text.gone().reason() == text.miss_reason();
  if (!told) absl::StrAppend(&said, Words(ReasonName(text.miss_reason())));
  if (text.has_gone()) absl::StrAppend(&said, told ? "" : "; ", GoneText(text.gone()));
  if (text.has_other_namespace()) absl::StrAppend(&said, ": ", OtherNamespaceText(text.other_namespace()));
  return said;
}

}  // namespace

std::string ExplanationText(const v1::ExplainedText& text) {
  const std::string here = TextHere(text);
  return text.holders().empty() ? here : absl::StrCat(here, "; also at ", HoldersText(text));
}

json ExplanationJson(const v1::ExplainedText& text) {
  json out = {{"kind", Name(static_cast<ObjectKind>(text.kind()))},
              {"tokens", text.tokens()},
              {"namespace", Hex(text.ns())},
              {"key", Hex(text.key())},
              {"hit", text.miss_reason() == 0},
              {"reason", ReasonName(text.miss_reason())}};
  if (text.has_present()) {
    const v1::Presence& present = text.present();
    json tiers = json::array();
    for (const uint32_t tier : present.tiers()) tiers.push_back(TierName(tier));
    out["present"] = {{"tier", TierName(present.tier())},
                      {"tiers", std::move(tiers)},
                      {"bytes", present.bytes()},
                      {"shards", present.shards()},
                      {"of_shards", present.of_shards()},
                      {"uses", present.uses()},
                      {"references", present.references()},
                      {"age_seconds", present.age_seconds()},
                      {"idle_seconds", present.idle_seconds()}};
  }
  if (text.has_gone()) {
    const v1::Gone& gone = text.gone();
    out["gone"] = {{"reason", ReasonName(gone.reason())},
                   {"policy", PolicyName(gone.policy())},
                   {"tier", TierName(gone.tier())},
                   {"bytes", gone.bytes()},
                   {"uses", gone.uses()},
                   {"seconds_ago", gone.seconds_ago()},
                   {"lived_seconds", gone.lived_seconds()},
                   {"idle_seconds", gone.idle_seconds()}};
  }
  if (text.has_other_namespace()) {
    out["other_namespace"] = {{"namespace", Hex(text.other_namespace().ns())},
                              {"field", text.other_namespace().field()},
                              {"requested_value", text.other_namespace().requested_value()},
                              {"other_value", text.other_namespace().other_value()}};
  }
  for (const v1::TextHolder& holder : text.holders()) {
    json one = {{"node", holder.node()}, {"tier", TierName(holder.tier())}, {"rank", holder.rank()}};
    if (holder.has_gpu()) one["gpu"] = holder.gpu();
    if (holder.unreachable()) one["unreachable"] = true;
    out["holders"].push_back(std::move(one));
  }
  return out;
}

}  // namespace ashlar::ctl
