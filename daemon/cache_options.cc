#include "daemon/cache_options.h"

#include <sys/random.h>

#include <string>
#include <utility>

#include "ashlar/v1/config.pb.h"

namespace ashlar::daemon {
namespace {

constexpr storage::Nanos kNanosOfASecond = 1'000'000'000;

uint64_t RandomWord() {
  uint64_t word = 0;
  while (getrandom(&word, sizeof word, 0) != sizeof word) {
    // Only a signal before the pool is seeded can interrupt so short a request.
  }
  return word;
}

storage::AdmissionMode AdmissionFrom(const std::string& name) {
  if (name == "all") return storage::AdmissionMode::kAll;
  return name == "tinylfu" ? storage::AdmissionMode::kTinyLfu : storage::AdmissionMode::kSecondUse;
}

}  // namespace

storage::CacheOptions CacheOptionsFrom(const v1::Config& config, storage::TellResidence residence) {
  const v1::Leases& leases = config.leases();
  storage::CacheOptions options;
  options.unused_lease = static_cast<storage::Nanos>(leases.unused_seconds()) * kNanosOfASecond;
  options.reservation = static_cast<storage::Nanos>(leases.reservation_seconds()) * kNanosOfASecond;
  options.objects.admission = AdmissionFrom(config.ssd().admission());
  options.objects.eviction = config.eviction() == "lru" ? storage::EvictionMode::kLru : storage::EvictionMode::kPrice;
  options.landings_per_session = config.workers().landings_per_session();
  options.random = RandomWord;
  options.objects.residence = std::move(residence);
  return options;
}

}  // namespace ashlar::daemon
