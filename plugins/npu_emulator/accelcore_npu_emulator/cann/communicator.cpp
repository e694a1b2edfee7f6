// How the ranks of a communicator find each other, wait for each other, and notice that one is gone.
#include "communicator.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

namespace emulator {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHeader = (sizeof(Shared) + kPage - 1) / kPage * kPage;

HcclResult system_error(const char *what) {
  failure(ACL_ERROR_FAILURE, "%s: %s", what, strerror(errno));
  return HCCL_E_SYSCALL;
}

size_t size_for(int ranks) {
  return kHeader + kSlot * size_t(ranks) + kMailbox * size_t(ranks) * size_t(ranks);
}

// A process that has ended stays visible until its parent asks for it: state Z.
bool alive(int process) {
  if (kill(process, 0) && errno == ESRCH) return false;
  char path[32], text[256];
  snprintf(path, sizeof path, "/proc/%d/stat", process);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return true;
  ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  if (length <= 0) return true;
  text[length] = 0;
  const char *name_end = strrchr(text, ')');
  return !(name_end && name_end[1] && (name_end[2] == 'Z' || name_end[2] == 'X'));
}

// The rank in the whole job, for faults that name one; where no launcher says it, the rank in the communicator.
int global_rank(const Communicator &communicator) {
  const char *text = getenv("RANK");
  return text && *text ? atoi(text) : communicator.rank();
}

}  // namespace

double seconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return double(time.tv_sec) + double(time.tv_nsec) * 1e-9;
}

void Backoff::pause() {
  constexpr uint64_t kYields = 2000;
  if (++tries_ < kYields) sched_yield();
  else usleep(50);
}

HcclResult make_root(Root *root) {
  int file = memfd_create("emulated-npu-communicator", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, off_t(kHeader))) return system_error("shared memory for a communicator");
  root->process = getpid();
  root->descriptor = file;
  if (getrandom(&root->key, sizeof root->key, 0) != sizeof root->key) return system_error("getrandom");
  root->key |= 1;  // not 0, which is what fresh memory holds
  if (pwrite(file, &root->key, sizeof root->key, offsetof(Shared, key)) < 0) return system_error("pwrite");
  return HCCL_SUCCESS;
}

HcclResult Communicator::join(int size, int rank, const Root &root, const std::string &name, const Waits &waits,
                              Communicator **out) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) {
    failure(ACL_ERROR_INVALID_PARAM, "there is no rank %d of %d; at most %d ranks are emulated", rank, size, kMaxRanks);
    return HCCL_E_PARA;
  }
  bool own = root.process == getpid();
  std::string path = "/proc/" + std::to_string(root.process) + "/fd/" + std::to_string(root.descriptor);
  int file = own ? root.descriptor : open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return system_error("the shared memory of rank 0 (has it ended?)");
  uint64_t key = 0;
  if (pread(file, &key, sizeof key, offsetof(Shared, key)) != sizeof key || key != root.key) {
    // Not the memory that is meant: it must not be touched.
    if (!own) close(file);
    failure(ACL_ERROR_FAILURE, "rank 0 of communicator %s has ended", name.c_str());
    return HCCL_E_UNAVAIL;
  }
  size_t bytes = size_for(size);
  void *memory = MAP_FAILED;
  if (ftruncate(file, off_t(bytes)) == 0) {
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  if (!own) close(file);
  if (memory == MAP_FAILED) return system_error("the shared memory of a communicator");

  Communicator *made = new Communicator;
  made->size_ = size;
  made->rank_ = rank;
  made->name_ = name;
  made->limit_ = waits.connect;
  made->shared_ = static_cast<Shared *>(memory);
  made->bytes_ = bytes;
  made->shared_->processes[rank] = getpid();
  trace("communicator %s: rank %d of %d", name.c_str(), rank, size);
  HcclResult result = made->barrier();
  if (own) close(file);
  if (result != HCCL_SUCCESS) {
    delete made;
    return result;
  }
  made->limit_ = waits.execute;
  *out = made;
  return HCCL_SUCCESS;
}

Communicator::~Communicator() { munmap(shared_, bytes_); }

char *Communicator::slot(int rank) { return reinterpret_cast<char *>(shared_) + kHeader + kSlot * size_t(rank); }

char *Communicator::mailbox(int from, int to) {
  return slot(size_) + kMailbox * (size_t(from) * size_t(size_) + size_t(to));
}

HcclResult Communicator::refuse(HcclResult code, const std::string &why) {
  broken_ = operation_ + " on rank " + std::to_string(rank_) + " of " + std::to_string(size_) + " failed: " + why;
  failure(ACL_ERROR_FAILURE, "%s", broken_.c_str());
  return code;
}

HcclResult Communicator::refuse_difference(const std::string &who_says_what) {
  return refuse(HCCL_E_PARA, "the ranks differ (EI0005, inconsistent between ranks): " + who_says_what);
}

HcclResult Communicator::refuse_for_all(const std::string &who_says_what) {
  if (!shared_->refusing.exchange(1)) {
    snprintf(shared_->refusal, sizeof shared_->refusal, "%s", who_says_what.c_str());
    shared_->refused = 1;
  }
  return refuse_difference(who_says_what);
}

HcclResult Communicator::heed_refusal() {
  return shared_->refused ? refuse_difference(shared_->refusal) : HcclResult(HCCL_SUCCESS);
}

HcclResult Communicator::begin(const Call &call) {
  static std::atomic<uint64_t> operations{0};
  const char *operation = call.operation.c_str();
  if (forked()) {
    refuse_forked();
    return HCCL_E_UNAVAIL;
  }
  if (capturing()) {
    failure(ACL_ERROR_FEATURE_UNSUPPORTED, "%s within a graph capture is not emulated", operation);
    return HCCL_E_NOT_SUPPORT;
  }
  if (!broken_.empty()) {
    failure(ACL_ERROR_FAILURE, "%s after %s", operation, broken_.c_str());
    return HCCL_E_UNAVAIL;
  }
  uint64_t number = ++operations;
  operation_ = call.operation + " (collective " + std::to_string(number) + ")";
  trace("%s, rank %d of %d, %llu elements", operation_.c_str(), rank_, size_, (unsigned long long)call.count);
  if (HcclResult error = heed_refusal()) return error;
  count_launch(operation);
  const Faults &faults = settings().faults;
  if (number == faults.die && global_rank(*this) == faults.die_rank) {
    trace("rank %d dies (an injected fault)", faults.die_rank);
    kill(getpid(), SIGKILL);
  }
  if (number == faults.timeout) return refuse(HCCL_E_TIMEOUT, "timed out (an injected fault)");
  return HCCL_SUCCESS;
}

HcclResult Communicator::meet(const Call &call) {
  if (HcclResult error = begin(call)) return error;
  auto &calls = shared_->calls[meetings_++ % 2];
  snprintf(calls[rank_], kText, "%s", call.text().c_str());
  if (HcclResult error = barrier()) return error;
  std::string told = differences(std::vector<std::string>(calls, calls + size_));
  return told.empty() ? HcclResult(HCCL_SUCCESS) : refuse_difference(told);
}

HcclResult Communicator::barrier() {
  uint64_t here = ++shared_->arrived[rank_];
  return wait([&] {
    for (int rank = 0; rank < size_; rank++) {
      if (shared_->arrived[rank] < here) return rank;
    }
    return -1;
  });
}

std::string Communicator::missing() {
  uint64_t here = shared_->arrived[rank_];
  std::string names;
  for (int rank = 0; rank < size_; rank++) {
    if (shared_->arrived[rank] >= here) continue;
    int process = shared_->processes[rank];
    names += (names.empty() ? "" : ", ") + std::to_string(rank);
    if (!process) names += " (never joined)";
    else if (!alive(process)) names += " (process " + std::to_string(process) + " has ended)";
  }
  return names;
}

HcclResult Communicator::look_after(int rank, double waited) {
  if (HcclResult error = heed_refusal()) return error;
  int process = shared_->processes[rank];
  bool ended = process && !alive(process);
  if (!ended && waited < limit_) return HCCL_SUCCESS;
  std::string names = missing();
  if (names.empty()) {  // it came to the barriers; a message of it is waited for
    names = std::to_string(rank) + (ended ? " (process " + std::to_string(process) + " has ended)" : "");
  }
  char after[32];
  snprintf(after, sizeof after, "%.3g", waited);
  return refuse(HCCL_E_TIMEOUT, std::string("gave up after ") + after + " s, waiting for rank " + names);
}

HcclResult Communicator::split(int size, const uint32_t *ranks, uint64_t id, int rank, const Waits &waits,
                               Communicator **out) {
  operation_ = "HcclCreateSubCommConfig";
  Shared::Announcement &place = shared_->announcements[ranks[0] % kMaxRanks];
  Root root;
  if (rank == 0) {
    if (HcclResult error = make_root(&root)) return error;
    place.root = root;
    place.id = id + 1;
    place.ready = 1;
  } else {
    int first = int(ranks[0]);
    if (HcclResult error = wait([&] { return place.ready && place.id == id + 1 ? -1 : first; })) return error;
    root = place.root;
  }
  HcclResult result = join(size, rank, root, name_ + "." + std::to_string(id), waits, out);
  if (rank == 0) place.ready = 0;  // all have joined: the place is free for the next one
  return result;
}

}  // namespace emulator
