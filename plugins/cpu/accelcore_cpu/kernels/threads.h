// Threads: those of the OpenMP runtime that torch computes on.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

// GOMP_parallel, as GNU's and LLVM's runtimes have it; null: there is one thread only.
typedef void (*Fork)(void (*)(void*), void*, unsigned threads, unsigned flags);

// A thread's own part of the work.
struct alignas(64) Share {
  std::atomic<long> next{0};
  std::atomic<bool> taken{false};
};

// The share that a thread had last, if it is free: what it worked on then may still be in its caches, and cores of one
// processor need not have a cache in common.
inline size_t take_share(std::vector<Share>& shares) {
  thread_local size_t last = 0;
  for (size_t n = 0; n < shares.size(); n++) {
    const size_t share = (last + n) % shares.size();
    if (!shares[share].taken.exchange(true, std::memory_order_relaxed)) return last = share;
  }
  return last;
}

// Calls `work` with 0 to count - 1, each once: every thread its own share, in this order or `backwards`. Who has
// finished helps the others.
template <class Work>
void parallel(Fork fork, int threads, long count, bool backwards, const Work& work) {
  std::vector<Share> shares(fork ? std::max(1L, std::min(long(threads), count)) : 1);
  auto run = [&] {
    const long all = shares.size(), own = take_share(shares);
    for (long n = 0; n < all; n++) {
      const long share = (own + n) % all, first = count * share / all, size = count * (share + 1) / all - first;
      for (long done; (done = shares[share].next.fetch_add(1, std::memory_order_relaxed)) < size;)
        work(backwards ? first + size - 1 - done : first + done);
    }
  };
  if (shares.size() == 1) return run();
  fork([](void* given) { (*static_cast<decltype(run)*>(given))(); }, &run, shares.size(), 0);
}
