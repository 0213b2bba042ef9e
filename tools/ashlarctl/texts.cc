#include "tools/ashlarctl/texts.h"

#include <cstdint>
#include <utility>

#include "absl/strings/escaping.h"
#include "proto/invalid.h"
#include "proto/key.h"
#include "tools/ashlarctl/token_file.h"

namespace ashlar::ctl {
namespace {

absl::Status NameModel(const Arguments& arguments, v1::Texts& texts) {
  if (arguments.Has("namespace") == arguments.Has("model-file")) {
    return Invalid("--namespace: either it or --model-file is required");
  }
  if (arguments.Has("model-file")) {
    absl::StatusOr<ModelFile> model = ReadModelFile(arguments.Get("model-file"));
    if (!model.ok()) return model.status();
    texts.set_identity(std::move(model->identity));
    texts.set_layout(std::move(model->layout));
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> ns = NamespaceBytes(arguments);
  if (!ns.ok()) return ns.status();
  texts.set_ns(*std::move(ns));
  return absl::OkStatus();
}

// The first file is the prompt's prefix, as the first segment of a match is; unless one kind is asked for.
absl::StatusOr<ObjectKind> KindOf(const Arguments& arguments, size_t index) {
  const std::string kind = arguments.Has("kind") ? arguments.Get("kind") : "prompt";
  if (kind == "prompt") return index == 0 ? ObjectKind::kCheckpoint : ObjectKind::kSegment;
  if (kind == "segment") return ObjectKind::kSegment;
  if (kind == "checkpoint") return ObjectKind::kCheckpoint;
  return Invalid("--kind: expected prompt, segment or checkpoint");
}

}  // namespace

absl::StatusOr<std::string> NamespaceBytes(const Arguments& arguments) {
  const std::string hex = arguments.Get("namespace");
  const bool digits = hex.size() % 2 == 0 && hex.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos;
  if (!digits) return Invalid("--namespace: not an even number of hexadecimal digits");
  return absl::HexStringToBytes(hex);
}

absl::StatusOr<v1::Texts> ReadTexts(const Arguments& arguments) {
  if (!arguments.Has("tenant")) return Invalid("--tenant: required");
  if (arguments.files.empty()) return Invalid("TOKENS-FILE: at least one");
  v1::Texts texts;
  texts.set_tenant(arguments.Get("tenant"));
  if (absl::Status status = NameModel(arguments, texts); !status.ok()) return status;
  for (size_t i = 0; i < arguments.files.size(); ++i) {
    absl::StatusOr<std::string> tokens = ReadTokenFile(arguments.files[i], arguments.Has("binary"));
    if (!tokens.ok()) return tokens.status();
    if (tokens->empty()) return Invalid(arguments.files[i], ": no tokens");
    const absl::StatusOr<ObjectKind> kind = KindOf(arguments, i);
    if (!kind.ok()) return kind.status();
    v1::ObjectName* text = texts.add_texts();
    text->set_kind(static_cast<uint32_t>(*kind));
    text->set_tokens(*std::move(tokens));
    text->set_salt(PackSalt(MakeSalt(arguments.Get("salt"))));
  }
  return texts;
}

}  // namespace ashlar::ctl
