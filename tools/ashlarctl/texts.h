// The texts that a command is about, as its arguments name them.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "ashlar/v1/admin.pb.h"
#include "tools/ashlarctl/command.h"

namespace ashlar::ctl {

// --tenant, --namespace or --model-file, --kind, --binary, --salt, and files of tokens. INVALID_ARGUMENT names the
// option or the file.
absl::StatusOr<v1::Texts> ReadTexts(const Arguments& arguments);

// --namespace as bytes; none: empty.
absl::StatusOr<std::string> NamespaceBytes(const Arguments& arguments);

}  // namespace ashlar::ctl
