// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/texts.h"

#include <cstdint>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/hex.h"
#include "proto/invalid.h"
#include "proto/key.h"
#include "tools/ashlarctl/format.h"
#include "tools/ashlarctl/token_file.h"

namespace ashlar::ctl {
namespace {

constexpr size_t kNamespaceDigits = 64;
constexpr uint32_t kObjectsPerCall = 1000;

// The namespaces, in hexadecimal beginning with `hex`, of models that engines opened.
absl::StatusOr<std::set<std::string>> OpenedNamespaces(const std::string& tenant, const std::string& hex,
                                                       AdminClient& client) {
  v1::ModelsRequest request;
  request.set_tenant(tenant);
  v1::ModelsReply reply;
  if (absl::Status status = client.Models(request, &reply); !status.ok()) return status;
  std::set<std::string> found;
  for (const v1::TenantModels& each : reply.tenants()) {
    for (const v1::OpenedModel& model : each.models()) {
      if (absl::StartsWith(Hex(model.ns()), hex)) found.insert(model.ns());
    }
  }
  return found;
}

// The same for objects in the cache.
absl::StatusOr<std::set<std::string>> StoredNamespaces(const std::string& tenant, const std::string& hex,
                                                       AdminClient& client) {
  v1::ListRequest request;
  request.set_tenant(tenant);
  request.set_most(kObjectsPerCall);
  std::set<std::string> found;
  for (bool more = true; more;) {
    v1::ListReply reply;
    if (absl::Status status = client.List(request, &reply); !status.ok()) return status;
    for (const v1::ListedObject& object : reply.objects()) {
      if (absl::StartsWith(Hex(object.ns()), hex)) found.insert(object.ns());
    }
    request.set_after(reply.next());
    more = reply.more();
  }
  return found;
}

// --namespace in lower case.
absl::StatusOr<std::string> NamespaceDigits(const Arguments& arguments) {
  const std::string hex = absl::AsciiStrToLower(arguments.Get("namespace"));
  const bool digits = !hex.empty() && hex.find_first_not_of("0123456789abcdef") == std::string::npos;
  if (digits && hex.size() <= kNamespaceDigits) return hex;
  return Invalid("--namespace: expected 1 to ", kNamespaceDigits, " hexadecimal digits");
}

// Everything of --namespace or --model-file that needs no daemon.
absl::Status CheckModel(const Arguments& arguments, v1::Texts& texts) {
  if (arguments.Has("namespace") == arguments.Has("model-file")) {
    return Invalid("--namespace: --namespace or --model-file is required");
  }
  if (arguments.Has("namespace")) return NamespaceDigits(arguments).status();
  absl::StatusOr<ModelFile> model = ReadModelFile(arguments.Get("model-file"));
  if (!model.ok()) return model.status();
  texts.set_identity(std::move(model->identity));
  texts.set_layout(std::move(model->layout));
  return absl::OkStatus();
}

// The first file is the prompt's prefix, like the first segment of a match, unless one kind is requested.
absl::StatusOr<ObjectKind> KindOf(const Arguments& arguments, size_t index) {
  const std::string kind = arguments.Has("kind") ? arguments.Get("kind") : "prompt";
  if (kind == "prompt") return index == 0 ? ObjectKind::kCheckpoint : ObjectKind::kSegment;
  if (kind == "segment") return ObjectKind::kSegment;
  if (kind == "checkpoint") return ObjectKind::kCheckpoint;
  return Invalid("--kind: expected prompt, segment or checkpoint");
}

}  // namespace

absl::StatusOr<std::string> NamespaceBytes(const Arguments& arguments, AdminClient& client) {
  if (!arguments.Has("namespace")) return "";
  const absl::StatusOr<std::string> sound = NamespaceDigits(arguments);
  if (!sound.ok()) return sound.status();
  const std::string& hex = *sound;
  if (hex.size() == kNamespaceDigits) return BytesOfHex(hex);
  absl::StatusOr<std::set<std::string>> found = OpenedNamespaces(arguments.Get("tenant"), hex, client);
  // Objects outlive the daemon that a model was opened in.
  if (found.ok() && found->empty()) found = StoredNamespaces(arguments.Get("tenant"), hex, client);
  if (!found.ok()) return found.status();
  if (found->empty()) {
    return absl::NotFoundError(absl::StrCat("--namespace: no model or object has a namespace that begins with ", hex));
  }
  if (found->size() > 1) {
    return Invalid("--namespace: ambiguous; ", found->size(), " namespaces begin with ", hex,
                   "; give more digits, for example of ",
                   absl::StrJoin(*found, ", ", [](std::string* out, const std::string& ns) { *out += Hex(ns); }));
  }
  return *found->begin();
}

absl::StatusOr<v1::Texts> ReadTexts(const Arguments& arguments, AdminClient& client) {
  if (!arguments.Has("tenant")) return Invalid("--tenant: required");
  if (arguments.files.empty()) return Invalid("TOKENS-FILE: at least one is required");
  v1::Texts texts;
  texts.set_tenant(arguments.Get("tenant"));
  if (absl::Status status = CheckModel(arguments, texts); !status.ok()) return status;
  for (size_t i = 0; i < arguments.files.size(); ++i) {
    absl::StatusOr<std::string> tokens = ReadTokenFile(arguments.files[i], arguments.Has("binary"));
    if (!tokens.ok()) return tokens.status();
    if (tokens->empty()) return Invalid(arguments.files[i], ": the file has no tokens");
    const absl::StatusOr<ObjectKind> kind = KindOf(arguments, i);
    if (!kind.ok()) return kind.status();
    v1::ObjectName* text = texts.add_texts();
    text->set_kind(static_cast<uint32_t>(*kind));
    text->set_tokens(*std::move(tokens));
    text->set_salt(PackSalt(MakeSalt(arguments.Get("salt"))));
  }
  absl::StatusOr<std::string> ns = NamespaceBytes(arguments, client);
  if (!ns.ok()) return ns.status();
  texts.set_ns(*std::move(ns));
  return texts;
}

}  // namespace ashlar::ctl
