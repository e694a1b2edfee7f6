// A group of ranks, which are processes of one machine, over a piece of shared memory.
//
// The memory has no name in any file system: rank 0 makes it (memfd), tells the others its process and descriptor
// within the root info that HCCL has the ranks exchange, and they open it through /proc. Only the same user can, and
// nothing is left behind, however a rank ends.
#pragma once

#include <atomic>

#include "emulator.h"

#include <third_party/hccl/inc/hccl/hccl.h>

namespace emulator {

// One collective or message as a rank calls it: what all ranks have to say alike (call.cpp).
struct Call {
  std::string operation;
  uint64_t count = 0;  // elements; 0 where each rank has sizes of its own
  HcclDataType type = HCCL_DATA_TYPE_RESERVED;
  HcclReduceOp reduction = HCCL_REDUCE_RESERVED;
  int root = -1;

  std::string text() const;
};

// "" where all texts are the same; else who says what: "rank 0: A; ranks 1, 2: B".
std::string differences(const std::vector<std::string> &texts);

size_t element_size(HcclDataType type);
// into[i] = into[i] op from[i]; false where the type has no reductions (reduce.cpp).
bool reduce_into(void *into, const void *from, size_t count, HcclDataType type, HcclReduceOp op);

struct Waits {
  double connect = 120, execute = 300;  // seconds, for the others to join and to call; may be infinite
};

// Refuses what HCCL refuses, by HcclCommConfig and by the environment, naming it; else says how long the communicator
// waits. `config` may be null (configuration.cpp).
HcclResult configure(const HcclCommConfig *config, Waits *waits);

constexpr int kMaxRanks = 64;
constexpr size_t kSlot = size_t(4) << 20;     // what a rank shows to all others at a time
constexpr size_t kMailbox = size_t(1) << 20;  // what a rank sends to one other at a time
constexpr size_t kText = 128;                 // the longest description of a call

// Where the shared memory of a communicator can be opened.
struct Root {
  int32_t process;
  int32_t descriptor;
  uint64_t key;  // tells it from whatever else the descriptor may have become
};

// Makes the shared memory of a communicator to be.
HcclResult make_root(Root *root);

struct Shared {
  struct Announcement {
    std::atomic<uint64_t> id;  // of the sub-communicator plus one; 0 where the place is free
    Root root;
    std::atomic<int> ready;
  };
  struct Sent {
    uint64_t count;
    HcclDataType type;
  };

  std::atomic<uint64_t> key;
  std::atomic<int32_t> processes[kMaxRanks];
  std::atomic<uint64_t> arrived[kMaxRanks];             // barriers that a rank has come to
  std::atomic<uint64_t> sent[kMaxRanks][kMaxRanks];     // pieces put into a mailbox, from and to
  std::atomic<uint64_t> received[kMaxRanks][kMaxRanks];  // pieces taken out
  Sent messages[kMaxRanks][kMaxRanks];                   // what a mailbox holds a piece of, from and to
  Announcement announcements[kMaxRanks];
  // What each rank calls. There are two places, taken in turn, so that one rank may go on to its next call while
  // another one still reads: no rank can be further ahead than that.
  char calls[2][kMaxRanks][kText];
  std::atomic<int> refusing;  // set by the rank that refuses a message, for the others
  std::atomic<int> refused;
  char refusal[4 * kText];
};

class Communicator {
 public:
  // Joins the ranks; waits until all have come.
  static HcclResult join(int size, int rank, const Root &root, const std::string &name, const Waits &waits,
                         Communicator **out);
  ~Communicator();

  int size() const { return size_; }
  int rank() const { return rank_; }
  const std::string &name() const { return name_; }
  Shared &shared() { return *shared_; }
  char *slot(int rank);
  char *mailbox(int from, int to);

  // Counts the operation, brings injected faults about, and refuses where it cannot be done.
  HcclResult begin(const Call &call);
  // The same for a collective: waits until all ranks have called, and refuses on each of them if they called
  // different things, which hangs a cluster or ends it with EI0005.
  HcclResult meet(const Call &call);
  // Waits for all ranks.
  HcclResult barrier();
  // A part of this communicator: the first of its ranks makes the memory, the others find it by the id.
  HcclResult split(int size, const uint32_t *ranks, uint64_t id, int rank, const Waits &waits, Communicator **out);

  // Waits while `pending`, which names a rank that is waited for, or is -1 when there is none.
  template <class Pending>
  HcclResult wait(Pending pending);
  HcclResult refuse(HcclResult code, const std::string &why);
  HcclResult refuse_difference(const std::string &who_says_what);
  // Refuses, here and in whatever the other ranks call next or wait for now.
  HcclResult refuse_for_all(const std::string &who_says_what);

 private:
  Communicator() = default;
  HcclResult look_after(int rank, double waited);  // while waiting: is the rank alive, and is there time left
  HcclResult heed_refusal();                       // of another rank
  std::string missing();                           // the ranks that are not at the barrier where this one is

  int size_ = 0, rank_ = 0;
  std::string name_, operation_ = "the first meeting", broken_;
  double limit_ = 0;  // seconds to wait
  Shared *shared_ = nullptr;
  size_t bytes_ = 0;
  uint64_t meetings_ = 0;
};

double seconds();

// Yields, and sleeps when it takes longer.
class Backoff {
 public:
  void pause();
  bool time_to_look() const { return tries_ % 1024 == 0; }

 private:
  uint64_t tries_ = 0;
};

template <class Pending>
HcclResult Communicator::wait(Pending pending) {
  Backoff backoff;
  double start = seconds();
  for (int rank = pending(); rank >= 0; rank = pending()) {
    backoff.pause();
    if (!backoff.time_to_look()) continue;
    // Once more, for a rank that came and then ended.
    if (pending() < 0) break;
    if (HcclResult error = look_after(rank, seconds() - start)) return error;
  }
  return HCCL_SUCCESS;
}

}  // namespace emulator
