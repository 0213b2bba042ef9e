// SPDX-License-Identifier: Apache-2.0
// A load for the disk: the prompts that a daemon says it has acknowledged there, checks that they land as published,
// and engines that publish more of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/mutex.h"
#include "tests/integration/daemon_process.h"
#include "tests/integration/test_engine.h"

namespace ashlar::integration {

inline constexpr size_t kPromptSegments = 3;  // each segment is an object in an extent of 256 KiB
inline constexpr Shape kPromptShape{.tokens = 256};

// A prompt is identified by its seed; a text is one of its segments.
using Prompts = std::vector<uint64_t>;
using Texts = std::map<uint64_t, std::set<size_t>>;

std::vector<Tokens> PromptOf(uint64_t seed);
size_t Count(const Texts& texts);

bool HasDirectIo();  // returns whether the folder of the tests supports direct I/O

// Queries a daemon for what its disk has acknowledged.
class Witness {
 public:
  Witness(const std::string& admin_socket, const NamespaceId& ns);
  ~Witness();

  // Adds the texts of the prompts that the disk has acknowledged. Returns false if the daemon does not answer.
  bool Hear(const Prompts& prompts, Texts& acknowledged);

 private:
  struct Stub;
  const std::unique_ptr<Stub> stub_;
  const std::string ns_;
};

// Lands the prompt at the first attempt, and checks that it equals what was published. Returns whether all of `wanted`
// landed. Adds the number of landed texts to `landed`.
bool Lands(TestEngine& engine, uint64_t seed, const std::set<size_t>& wanted, size_t* landed = nullptr);

// Publishes the missing segments of the prompt as far as possible: the daemon may die meanwhile.
void PublishWhatIsMissing(TestEngine& engine, uint64_t seed);

// Engines that publish a limited number of new prompts, and land the existing ones, each on its own thread.
class Load {
 public:
  static constexpr int kEngines = 2;

  Load(const ClientOptions& options, std::mt19937_64& random, size_t most_prompts);
  ~Load() { End(); }

  void End();
  Prompts prompts() const;

 private:
  void Work(const ClientOptions& options, uint64_t seed);

  const size_t most_prompts_;
  std::atomic<bool> over_ = false;
  std::atomic<int> working_ = 0;
  mutable Mutex mutex_;
  Prompts prompts_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

}  // namespace ashlar::integration
