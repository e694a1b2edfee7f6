// How far before its use memory is asked for: measured, because processors differ by a quarter in what is best.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "lanes.h"
#include "plan.h"
#include "threads.h"

constexpr double CLEARLY = 0.96;

extern "C" {

void* plan_new(const char* name, Fork fork, const int64_t* sources, long source_count, const int64_t* tensors,
               long tensor_count) noexcept;
void plan_free(void* plan) noexcept;
bool plan_step(void* plan, void* const* gradients, const double* options, long stride, double grad_scale,
               int threads) noexcept;

void prefetch_set(long bytes) noexcept { ahead = bytes; }

// The quickest of a few distances for steps of Adam: the first, unless another is clearly quicker. Each step is
// on the next part of memory that no cache has room for, and short: the least time is one that nothing else disturbed.
long prefetch_quickest(double seconds) noexcept try {
  using Clock = std::chrono::steady_clock;
  constexpr long candidates[] = {512, 0, 256}, elements = 1 << 22, parts = 16, size = elements / parts;
  std::vector<float> value(elements, 1), gradient(value), mean(value), square(value);
  const Tensor tensor{0, 1, size, 0};
  const double options[] = {1e-3, 0, 0, 0.9, 0.999, 1e-8, 0, 1};
  float step = 0;
  double least[std::size(candidates)];
  std::fill(std::begin(least), std::end(least), HUGE_VAL);
  std::vector<void*> plans;
  for (long first = 0; first < elements; first += size) {
    const Source source{&value[first], {&mean[first], &square[first]}, &step, FLOAT, FLOAT, FLOAT, 0, 0};
    plans.push_back(plan_new("adam", nullptr, reinterpret_cast<const int64_t*>(&source), 1,
                             reinterpret_cast<const int64_t*>(&tensor), 1));
  }
  const long before = ahead;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (size_t turn = 0; turn < 2 * parts || Clock::now() < end; turn++)
    for (size_t n = 0; n < std::size(candidates); n++) {
      const size_t part = (turn * std::size(candidates) + n + turn / parts) % parts;
      void* const gradients[] = {&gradient[part * size]};
      ahead = candidates[n];
      const auto begin = Clock::now();
      if (plans[part]) plan_step(plans[part], gradients, options, 0, 1, 1);
      const double time = std::chrono::duration<double>(Clock::now() - begin).count();
      if (turn >= parts) least[n] = std::min(least[n], time);  // before that, memory is touched for the first time
    }
  for (void* plan : plans) plan_free(plan);
  ahead = before;
  const auto best = std::min_element(std::begin(least), std::end(least));
  return *best < CLEARLY * least[0] ? candidates[best - std::begin(least)] : candidates[0];
} catch (...) {
  return ahead;
}
}
