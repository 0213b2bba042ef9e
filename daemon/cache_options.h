// The cache's options, as the configuration asks for them.
#pragma once

#include "storage/cache.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

// `config` as ParseConfig accepted it; `residence` is told where objects are (storage/objects/object_table.h).
storage::CacheOptions CacheOptionsFrom(const v1::Config& config, storage::TellResidence residence);

}  // namespace ashlar::daemon
