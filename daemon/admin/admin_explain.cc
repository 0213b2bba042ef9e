// SPDX-License-Identifier: Apache-2.0
// Reasons of misses: Explain, LastMisses, Models.
#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "ashlar/v1/admin.pb.h"
#include "daemon/admin/admin_service.h"
#include "daemon/engine/request_fields.h"
#include "daemon/peer/cluster.h"
#include "proto/difference.h"
#include "proto/invalid.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

using storage::Explanation;
using storage::Miss;
using storage::Nanos;
using storage::Query;
using storage::TenantId;

constexpr size_t kMinPrefixBytes = 2;

double Seconds(Nanos nanos) {
  return static_cast<double>(nanos) * 1e-9;
}

std::string Bytes(const Digest& digest) {
  return digest == Digest{} ? "" : std::string(reinterpret_cast<const char*>(digest.bytes.data()), digest.bytes.size());
}

absl::StatusOr<std::shared_ptr<const Model>> Declared(absl::string_view tenant, const v1::Texts& request) {
  absl::StatusOr<Identity> identity = DecodeIdentity(request.identity());
  if (!identity.ok()) return Invalid(identity.status().message());
  absl::StatusOr<Layout> layout = DecodeLayout(request.layout());
  if (!layout.ok()) return Invalid(layout.status().message());
  const NamespaceId ns = MakeNamespace(tenant, *identity, *layout);
  auto model = std::make_shared<Model>(std::make_shared<const Layout>(*std::move(layout)));
  model->ns = ns;
  model->identity = *std::move(identity);
  return model;
}

absl::StatusOr<Query> ReadText(const std::string& field, const v1::ObjectName& text, const Model& model) {
  const auto kind = static_cast<ObjectKind>(text.kind());
  if (text.kind() != static_cast<uint32_t>(kind) || (kind != ObjectKind::kSegment && kind != ObjectKind::kCheckpoint)) {
    return Invalid(field, ".kind: expected segment or checkpoint");
  }
  const auto tokens = ReadTokens(absl::StrCat(field, ".tokens"), text.tokens());
  if (!tokens.ok()) return tokens.status();
  if (tokens->empty()) return Invalid(field, ".tokens: empty");
  const auto media = UnpackMedia(absl::StrCat(field, ".media"), text.media(), tokens->size());
  if (!media.ok()) return media.status();
  const auto salt = UnpackSalt(absl::StrCat(field, ".salt"), text.salt());
  if (!salt.ok()) return salt.status();
  Query query{.kind = kind, .shard = model.shard, .ns = model.ns, .tokens = tokens->size()};
  query.storable =
      kind == ObjectKind::kCheckpoint || tokens->size() > uint64_t{model.layout.head} + uint64_t{model.layout.tail};
  if (query.storable) query.key = MakeKey(Salted(model.ns, *salt), kind, *tokens, *media);
  query.text = MakeTextDigest(kind, *tokens, *media, *salt);
  return query;
}

void WritePresence(const storage::Presence& present, v1::Presence* out) {
  out->set_tier(static_cast<uint32_t>(present.tier));
  for (const TierKind tier : present.tiers) out->add_tiers(static_cast<uint32_t>(tier));
  out->set_shards(present.shards);
  out->set_of_shards(present.of_shards);
  out->set_bytes(present.bytes);
  out->set_uses(present.uses);
  out->set_references(present.references);
  out->set_age_seconds(Seconds(present.age));
  out->set_idle_seconds(Seconds(present.idle));
}

void WriteGhost(const storage::Ghost& ghost, Nanos now, v1::Gone* out) {
  out->set_reason(static_cast<uint32_t>(ghost.reason));
  out->set_policy(static_cast<uint32_t>(ghost.policy));
  out->set_tier(static_cast<uint32_t>(ghost.tier));
  out->set_bytes(ghost.bytes);
  out->set_uses(ghost.uses);
  out->set_seconds_ago(Seconds(now - ghost.gone_at));
  out->set_lived_seconds(Seconds(ghost.lived));
  out->set_idle_seconds(Seconds(ghost.idle));
}

}  // namespace

// The first field in which two models differ. Lives for one call: each pair is compared once, because tables may be
// large and the same two models differ in every text.
class AdminService::Differences {
 public:
  // Nothing if one of the models is unknown.
  const std::optional<Difference>& Between(const Model* here, const Model* there) {
    static const std::optional<Difference> none;
    // A model with a known namespace only has no weights.
    if (here == nullptr || there == nullptr || here->identity.weights_digest.empty()) return none;
    const auto [found, fresh] = known_.try_emplace({here->ns, there->ns});
    std::optional<Difference>& difference = found->second;
    if (fresh) difference = FirstDifference(here->identity, there->identity);
    if (fresh && !difference) difference = FirstDifference(here->layout, there->layout);
    return difference;
  }

 private:
  std::map<std::pair<NamespaceId, NamespaceId>, std::optional<Difference>> known_;
};

absl::StatusOr<std::shared_ptr<const Model>> AdminService::FindModel(TenantId tenant, const v1::Texts& request) const {
  if (request.ns().empty()) return Declared(parts_.tenants[tenant], request);
  if (!request.identity().empty() || !request.layout().empty())
    return Invalid("ns: given together with an identity or a layout; expected one or the other");
  NamespaceId ns;
  if (request.ns().size() > ns.bytes.size() || request.ns().size() < kMinPrefixBytes) {
    return Invalid("ns: wrong length; expected ", kMinPrefixBytes, " to ", ns.bytes.size(), " bytes");
  }
  const std::vector<std::shared_ptr<const Model>> found = parts_.models.List(tenant, request.ns());
  if (found.size() == 1) return found[0];
  if (found.size() > 1)
    return Invalid("ns: ambiguous; ", found.size(), " models begin with ", absl::BytesToHexString(request.ns()),
                   "; give more digits");
  if (request.ns().size() < ns.bytes.size()) {
    return absl::NotFoundError(absl::StrCat("ns: no model begins with ", absl::BytesToHexString(request.ns())));
  }
  auto model = std::make_shared<Model>(std::make_shared<const Layout>());
  std::memcpy(model->ns.bytes.data(), request.ns().data(), request.ns().size());
  return model;
}

void AdminService::WriteText(TenantId tenant, const Query& query, const Explanation& why, const Model* model, Nanos now,
                             Differences& differences, v1::ExplainedText* out) const {
  out->set_kind(static_cast<uint32_t>(query.kind));
  out->set_tokens(query.tokens);
  out->set_ns(Bytes(query.ns));
  out->set_key(Bytes(query.key));
  out->set_miss_reason(static_cast<uint32_t>(why.reason));
  if (why.present) WritePresence(*why.present, out->mutable_present());
  if (why.ghost) WriteGhost(*why.ghost, now, out->mutable_gone());
  if (!why.elsewhere) return;
  v1::NamespaceDifference* other = out->mutable_other_namespace();
  other->set_ns(Bytes(*why.elsewhere));
  const std::shared_ptr<const Model> there = parts_.models.Find(tenant, *why.elsewhere);
  const std::optional<Difference>& difference = differences.Between(model, there.get());
  if (!difference) return;
  other->set_field(difference->field);
  other->set_requested_value(difference->first);
  other->set_other_value(difference->second);
}

absl::StatusOr<AdminService::ParsedTexts> AdminService::ReadTexts(const v1::Texts& texts) const {
  const auto tenant = FindTenant(texts.tenant());
  if (!tenant.ok()) return tenant.status();
  const auto model = FindModel(*tenant, texts);
  if (!model.ok()) return model.status();
  if (static_cast<uint64_t>(texts.texts_size()) > limits::kMaxSegments) {
    return Invalid("texts: too many; expected at most ", limits::kMaxSegments);
  }
  ParsedTexts asked{.tenant = *tenant, .model = *model};
  for (int i = 0; i < texts.texts_size(); ++i) {
    const auto query = ReadText(absl::StrCat("texts[", i, "]"), texts.texts(i), **model);
    if (!query.ok()) return query.status();
    asked.queries.push_back(*query);
  }
  return asked;
}

// If only unreachable nodes have a text, that is the reason of its miss.
void AdminService::WriteHolders(const ParsedTexts& asked, const std::set<std::string>& unreachable,
                                v1::ExplainReply* reply) const {
  if (parts_.cluster == nullptr) return;
  std::vector<Key> keys;
  for (const Query& query : asked.queries) keys.push_back(query.key);
  for (const Located& located : parts_.cluster->Locate(asked.model->ns, keys)) {
    const Query& query = asked.queries[located.index];
    if (!query.storable || located.holding.kind != query.kind) continue;
    v1::TextHolder* holder = reply->mutable_texts(static_cast<int>(located.index))->add_holders();
    holder->set_node(located.member->node);
    holder->set_tier(static_cast<uint32_t>(located.holding.tier));
    if (located.holding.gpu.has_value()) holder->set_gpu(*located.holding.gpu);
    holder->set_rank(located.holding.shard.rank);
    holder->set_unreachable(unreachable.contains(located.member->node));
  }
  for (v1::ExplainedText& text : *reply->mutable_texts()) {
    const bool none_answers =
        text.holders_size() > 0 && std::ranges::all_of(text.holders(), &v1::TextHolder::unreachable);
    const bool here = text.miss_reason() == 0 || text.has_present();
    if (none_answers && !here) text.set_miss_reason(static_cast<uint32_t>(MissReason::kHolderUnreachable));
  }
}

absl::Status AdminService::Explain(const v1::Texts& texts, v1::ExplainReply* reply) const {
  const absl::StatusOr<ParsedTexts> asked = ReadTexts(texts);
  if (!asked.ok()) return asked.status();
  std::vector<Explanation> why;
  Differences differences;
  Nanos now = 0;
  std::set<std::string> unreachable;
  const absl::Status answered = OnLoop([&] {
    for (const storage::Query& query : asked->queries) {
      why.push_back(parts_.cache.explainer().Explain(asked->tenant, query));
    }
    now = parts_.clock.Now();
    if (parts_.cluster != nullptr) unreachable = parts_.cluster->Unreachable();
  });
  if (!answered.ok()) return answered;
  for (size_t i = 0; i < why.size(); ++i) {
    WriteText(asked->tenant, asked->queries[i], why[i], asked->model.get(), now, differences, reply->add_texts());
  }
  WriteHolders(*asked, unreachable, reply);
  return absl::OkStatus();
}

absl::Status AdminService::LastMisses(const v1::LastMissesRequest& request, v1::LastMissesReply* reply) const {
  const auto tenants = FindTenants(request.tenant());
  if (!tenants.ok()) return tenants.status();
  const size_t most = request.count() == 0 ? storage::MissLog::kDefaultMisses : request.count();
  Differences differences;
  for (const TenantId tenant : *tenants) {
    std::vector<Miss> misses;
    Nanos now = 0;
    const absl::Status asked = OnLoop([&] {
      misses = parts_.cache.explainer().LastMisses(tenant, most);
      now = parts_.clock.Now();
    });
    if (!asked.ok()) return asked;
    v1::TenantMisses* out = reply->add_tenants();
    out->set_tenant(parts_.tenants[tenant]);
    for (const Miss& miss : misses) {
      v1::MissedText* missed = out->add_misses();
      missed->set_seconds_ago(Seconds(now - miss.at));
      missed->set_session(miss.session);
      const std::shared_ptr<const Model> model = parts_.models.Find(tenant, miss.query.ns);
      WriteText(tenant, miss.query, miss.why, model.get(), now, differences, missed->mutable_text());
    }
  }
  return absl::OkStatus();
}

absl::Status AdminService::Models(const v1::ModelsRequest& request, v1::ModelsReply* reply) const {
  const auto tenants = FindTenants(request.tenant());
  if (!tenants.ok()) return tenants.status();
  for (const TenantId tenant : *tenants) {
    v1::TenantModels* out = reply->add_tenants();
    out->set_tenant(parts_.tenants[tenant]);
    for (const std::shared_ptr<const Model>& model : parts_.models.List(tenant)) {
      v1::OpenedModel* opened = out->add_models();
      opened->set_ns(Bytes(model->ns));
      opened->set_identity(EncodeIdentity(model->identity));
      opened->set_layers(static_cast<uint32_t>(model->layout.layers.size()));
      opened->set_page_tokens(model->layout.page_tokens);
      opened->set_head(model->layout.head);
      opened->set_tail(model->layout.tail);
    }
  }
  return absl::OkStatus();
}

}  // namespace ashlar::daemon
