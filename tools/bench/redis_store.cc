// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tools/bench/shared_memory.h"
#include "tools/bench/value_store.h"

namespace ashlar::bench {
namespace {

constexpr auto kStartTimeout = std::chrono::seconds(10);

struct FreeReply {
  void operator()(redisReply* reply) const { freeReplyObject(reply); }
};
using Reply = std::unique_ptr<redisReply, FreeReply>;
struct FreeContext {
  void operator()(redisContext* context) const { redisFree(context); }
};

class RedisStore final : public ValueStore {
 public:
  explicit RedisStore(std::unique_ptr<SharedMemory> targets) : targets_(std::move(targets)) {}
  ~RedisStore() override;
  absl::Status Start();

  absl::Status Put(const Batch& batch, const std::byte* values) override;
  absl::Status Get(const Batch& batch, uint64_t offset) override;
  std::span<const std::byte> targets() const override { return targets_->bytes(); }
  pid_t server() const override { return pid_; }

 private:
  absl::Status Spawn();
  absl::Status Connect();
  std::string KeyOf(const Batch& batch, size_t i) const {
    return absl::StrCat("value:", (batch.first + i) % (targets_->bytes().size() / batch.value_bytes));
  }
  absl::Status Broken() const { return absl::UnavailableError(absl::StrCat("redis: ", context_->errstr)); }
  // The next reply of a pipeline; null: see Broken.
  Reply Next() {
    void* reply = nullptr;
    return Reply(redisGetReply(context_.get(), &reply) == REDIS_OK ? static_cast<redisReply*>(reply) : nullptr);
  }

  const std::unique_ptr<SharedMemory> targets_;
  std::string folder_;
  pid_t pid_ = -1;
  std::unique_ptr<redisContext, FreeContext> context_;
};

RedisStore::~RedisStore() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);  // it has no data to save
    waitpid(pid_, nullptr, 0);
  }
  std::error_code error;
  if (!folder_.empty()) std::filesystem::remove_all(folder_, error);
}

absl::Status RedisStore::Start() {
  std::string folder = "/tmp/ashlar-redis-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) return absl::ErrnoToStatus(errno, "cannot make a folder under /tmp");
  folder_ = folder;
  if (absl::Status status = Spawn(); !status.ok()) return status;
  const auto deadline = std::chrono::steady_clock::now() + kStartTimeout;
  while (std::chrono::steady_clock::now() < deadline) {
    if (Connect().ok()) return absl::OkStatus();
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = -1;
      return absl::NotFoundError("--compare redis: redis-server (Debian: redis-tools) is missing, or ended at once");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return absl::DeadlineExceededError("redis-server does not answer");
}

absl::Status RedisStore::Spawn() {
  const std::string socket = folder_ + "/redis.sock";
  const int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // a killed tool leaves no server running
    if (getppid() != parent) _exit(127);
    dup2(null, STDOUT_FILENO);
    dup2(null, STDERR_FILENO);
    // Debian's redis-tools has the same program under another name; the package redis-server would start a service.
    for (const char* program : {"redis-server", "redis-check-rdb"}) {
      execlp(program, "redis-server", "--port", "0", "--unixsocket", socket.c_str(), "--save", "", "--appendonly", "no",
             "--dir", folder_.c_str(), nullptr);
    }
    _exit(127);
  }
  close(null);
  return pid_ > 0 ? absl::OkStatus() : absl::ErrnoToStatus(errno, "fork");
}

absl::Status RedisStore::Connect() {
  context_.reset(redisConnectUnix((folder_ + "/redis.sock").c_str()));
  if (context_ == nullptr || context_->err != 0) return absl::UnavailableError("redis: cannot connect");
  context_->reader->maxbuf = 0;  // keeps its buffer between replies, which is faster
  return absl::OkStatus();
}

absl::Status RedisStore::Put(const Batch& batch, const std::byte* values) {
  for (size_t i = 0; i < batch.count; ++i) {
    const std::string key = KeyOf(batch, i);
    const char* arguments[] = {"SET", key.c_str(), reinterpret_cast<const char*>(values + i * batch.value_bytes)};
    const size_t lengths[] = {3, key.size(), batch.value_bytes};
    if (redisAppendCommandArgv(context_.get(), 3, arguments, lengths) != REDIS_OK) return Broken();
  }
  for (size_t i = 0; i < batch.count; ++i) {
    const Reply reply = Next();
    if (reply == nullptr) return Broken();
    if (reply->type == REDIS_REPLY_ERROR) return absl::InternalError(absl::StrCat("redis: SET: ", reply->str));
  }
  return absl::OkStatus();
}

absl::Status RedisStore::Get(const Batch& batch, uint64_t offset) {
  for (size_t i = 0; i < batch.count; ++i) {
    const std::string key = KeyOf(batch, i);
    if (redisAppendCommand(context_.get(), "GET %b", key.data(), key.size()) != REDIS_OK) return Broken();
  }
  bool found = true;
  for (size_t i = 0; i < batch.count; ++i) {
    const Reply reply = Next();
    if (reply == nullptr) return Broken();
    if (reply->type != REDIS_REPLY_STRING || reply->len != batch.value_bytes) {
      found = false;  // the replies after it are still read
      continue;
    }
    std::memcpy(targets_->bytes().data() + offset + i * batch.value_bytes, reply->str, batch.value_bytes);
  }
  return found ? absl::OkStatus() : absl::NotFoundError("redis: GET: a value is missing");
}

}  // namespace

absl::StatusOr<std::unique_ptr<ValueStore>> OpenRedisStore(const StoreSizes& sizes) {
  auto targets = SharedMemory::Make(sizes.ring_bytes);
  if (!targets.ok()) return targets.status();
  auto store = std::make_unique<RedisStore>(*std::move(targets));
  if (absl::Status status = store->Start(); !status.ok()) return status;
  return store;
}

}  // namespace ashlar::bench
