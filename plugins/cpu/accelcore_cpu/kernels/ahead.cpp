// How far before its use memory is asked for: measured, because processors differ by a quarter in what is best.
#include <algorithm>
#include <chrono>
#include <vector>

#include "lanes.h"
#include "plan.h"
#include "threads.h"

extern "C" {

void* plan_new(int kind, Fork fork, const int64_t* sources, long source_count, const int64_t* tensors,
               long tensor_count) noexcept;
void plan_free(void* plan) noexcept;
bool plan_step(void* plan, void* const* gradients, const double* options, long stride, double grad_scale,
               int threads) noexcept;

void ahead_set(long bytes) noexcept { ahead = bytes; }

// The quickest of a few distances for steps of Adam (`kind`) that no cache has room for, after so many seconds or three
// rounds. The distance that was set, where there is not enough memory.
long ahead_quickest(int kind, double seconds) noexcept try {
  using Clock = std::chrono::steady_clock;
  constexpr long candidates[] = {0, 256, 512, 2048}, elements = 1 << 22;
  const long before = ahead;
  std::vector<float> tensors[4];
  for (auto& tensor : tensors) tensor.assign(elements, 0.01f);
  float step = 0;
  const Source source{tensors[0].data(), {tensors[1].data(), tensors[2].data()}, &step, FLOAT, FLOAT, FLOAT, 0, 0};
  const Tensor tensor{0, 1, elements, 0};
  const double options[] = {1e-3, 0, 0, 0.9, 0.999, 1e-8, 0, 1};
  void* const plan = plan_new(kind, nullptr, reinterpret_cast<const int64_t*>(&source), 1,
                              reinterpret_cast<const int64_t*>(&tensor), 1);
  void* const gradients[] = {tensors[3].data()};
  std::vector<double> times[std::size(candidates)];
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (int round = 0; plan && (round < 3 || Clock::now() < end); round++)
    for (size_t n = 0; n < std::size(candidates); n++) {
      ahead = candidates[n];
      const auto begin = Clock::now();
      plan_step(plan, gradients, options, 0, 1, 1);
      times[n].push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    }
  plan_free(plan);
  ahead = before;
  if (!plan) return before;
  for (auto& its : times) std::nth_element(its.begin(), its.begin() + its.size() / 2, its.end());
  const auto median = [](const auto& its) { return its[its.size() / 2]; };
  const auto best = std::min_element(std::begin(times), std::end(times),
                                     [&](const auto& one, const auto& other) { return median(one) < median(other); });
  return candidates[best - std::begin(times)];
} catch (...) {
  return ahead;
}
}
