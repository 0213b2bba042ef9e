// SPDX-License-Identifier: Apache-2.0
// The texts that a command is about, as its arguments name them.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "ashlar/v1/admin.pb.h"
#include "tools/ashlarctl/command.h"

namespace ashlar::ctl {

// --tenant, --namespace or --model-file, --kind, --binary, --salt, and files of tokens. INVALID_ARGUMENT names the
// option or the file.
absl::StatusOr<v1::Texts> ReadTexts(const Arguments& arguments, AdminClient& client);

// The 32 bytes of --namespace. The option may give only the first digits if they are unique among the models that the
// daemon knows and the stored objects. Empty without --namespace. INVALID_ARGUMENT or NOT_FOUND names it.
absl::StatusOr<std::string> NamespaceBytes(const Arguments& arguments, AdminClient& client);

}  // namespace ashlar::ctl
