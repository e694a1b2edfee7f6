// Threads: those of the OpenMP runtime that torch computes on.
#pragma once

#include <atomic>

// GOMP_parallel, as GNU's and LLVM's runtimes have it; null: there is one thread only.
typedef void (*Fork)(void (*)(void*), void*, unsigned threads, unsigned flags);

// Calls `work` with 0 to count - 1, each once. Who is free takes the next.
template <class Work>
void parallel(Fork fork, int threads, long count, const Work& work) {
  std::atomic<long> next{0};
  auto run = [&] {
    for (long number; (number = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(number);
  };
  if (!fork || threads < 2 || count < 2) return run();
  fork([](void* given) { (*static_cast<decltype(run)*>(given))(); }, &run, threads, 0);
}
