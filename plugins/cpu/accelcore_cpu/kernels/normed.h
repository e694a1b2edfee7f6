// Optimizers whose update of an element depends on norms of its tensor: Lamb and AdamP.
//
// `measure` takes the gradient into the moments, and computes the direction of the update. `update` goes that way. Of a
// tensor too large to be in a cache still, the direction is not kept but computed anew from the moments: to read these
// again costs what reading it would, and nothing has been written for it.
#pragma once

#include <algorithm>
#include <cmath>

#include "rule.h"

struct Lamb : Rule {
  double lr, beta1, beta2, eps, weight_decay;
  bool plain;

  explicit Lamb(Options next) {
    lr = next, weight_decay = next, beta1 = next, beta2 = next, eps = next, plain = next, clips_all = next;
    clip = clips_all ? 1 : 0;
    sums = 2;
  }
  template <class T>
  void moments(const Block<T>& block, double* sums) const {
    const T toward1 = T(1 - beta1), beta2 = T(this->beta2), share2 = T(1 - this->beta2);
    const T eps = T(this->eps), weight_decay = T(this->weight_decay);
    Sum<T> values, directions;
    block.each([&](const Line<T>& at) {
      const Lanes<T> g = at.gradient(), m = at.state(0) = toward<Lanes<T>>(at.state(0), g, toward1);
      const Lanes<T> v = at.state(1) = beta2 * at.state(1) + share2 * g * g;
      const Lanes<T> value = at.value(), direction = plus(m / (sqrt(v) + eps), weight_decay, value);
      values += at.in_use(value * value), directions += at.in_use(direction * direction);
      at.keep(direction);
    }, values, directions);
    sums[0] += values.total(), sums[1] += directions.total();
  }
  void decide(const double* sums, long, long, bool, double* rate) const override {
    const double norm = std::fmin(std::sqrt(sums[0]), 10), length = std::sqrt(sums[1]);
    *rate = lr * (!plain && norm > 0 && length > 0 ? norm / length : 1);
  }
  template <class T>
  void compute(const Block<T>& block, double row) const {
    const T rate = T(row), eps = T(this->eps), weight_decay = T(this->weight_decay);
    const auto anew = [&](const Line<T>& at) -> Lanes<T> {
      return plus<Lanes<T>>(at.state(0) / (sqrt<Lanes<T>>(at.state(1)) + eps), weight_decay, at.value());
    };
    block.each([&](const Line<T>& at) { at.value() -= rate * at.kept(anew); });
  }
  MEASURE_BOTH_TYPES(moments)
  FOR_BOTH_TYPES(compute)
};

struct AdamP : Rule {
  double lr, beta1, beta2, eps, weight_decay, delta, wd_ratio, rate, root;
  bool nesterov;

  AdamP(Options next, double step) {
    lr = next, weight_decay = next, beta1 = next, beta2 = next, eps = next, delta = next, wd_ratio = next;
    nesterov = next;
    rate = lr / (1 - std::pow(beta1, step)), root = 1 / std::sqrt(1 - std::pow(beta2, step));
    sums = 4;
    looks_back = nesterov;
  }
  template <class T>
  void moments(const Block<T>& block, double* sums) const {
    const T toward1 = T(1 - beta1), beta2 = T(this->beta2), share2 = T(1 - this->beta2);
    const T eps = T(this->eps), root = T(this->root);
    const T ahead = T(1 - beta1);
    const bool nesterov = this->nesterov;
    Sum<T> values, along, gradients, directions;
    block.each([&](const Line<T>& at) {
      const Lanes<T> g = at.gradient(), m = at.state(0) = toward<Lanes<T>>(at.state(0), g, toward1);
      const Lanes<T> v = at.state(1) = beta2 * at.state(1) + share2 * g * g;
      const Lanes<T> value = at.value(), direction = (nesterov ? toward(m, g, ahead) : m) / (sqrt(v) * root + eps);
      values += at.in_use(value * value), along += at.in_use(value * g);
      gradients += at.in_use(g * g), directions += at.in_use(value * direction);
      at.keep(direction);
    }, values, along, gradients, directions);
    sums[0] += values.total(), sums[1] += along.total();
    sums[2] += gradients.total(), sums[3] += directions.total();
  }
  // What the value is multiplied by, row by row: decay, less what the update has in the direction of the value.
  void decide(const double* sums, long rows, long columns, bool projects, double* scale) const override {
    std::fill(scale, scale + rows, 1 - lr * weight_decay);
    if (!projects) return;
    double whole[4] = {};
    bool by_row = true;
    for (long row = 0; row < rows; row++) {
      const double* const its = sums + 4 * row;
      by_row = by_row && orthogonal(its, columns);
      for (int n = 0; n < 4; n++) whole[n] += its[n];
    }
    if (!by_row && !orthogonal(whole, rows * columns)) return;
    for (long row = 0; row < rows; row++) {
      const double* const its = by_row ? sums + 4 * row : whole;
      const double length = std::sqrt(its[0]) + eps;
      scale[row] = 1 - lr * weight_decay * wd_ratio + rate * its[3] / (length * length);
    }
  }
  bool orthogonal(const double* sums, long columns) const {
    if (!std::isfinite(sums[2])) return false;
    return std::fabs(sums[1]) / ((std::sqrt(sums[2]) + eps) * (std::sqrt(sums[0]) + eps)) < delta / std::sqrt(columns);
  }
  template <class T>
  void compute(const Block<T>& block, double row) const {
    const T rate = T(this->rate), scale = T(row), eps = T(this->eps), root = T(this->root);
    const T ahead = T(1 - beta1);
    const auto anew = [&](const Line<T>& at) -> Lanes<T> {
      const Lanes<T> m = nesterov ? toward<Lanes<T>>(at.state(0), at.gradient(), ahead) : at.state(0);
      return m / (sqrt<Lanes<T>>(at.state(1)) * root + eps);
    };
    block.each([&](const Line<T>& at) { at.value() = at.value() * scale - rate * at.kept(anew); });
  }
  MEASURE_BOTH_TYPES(moments)
  FOR_BOTH_TYPES(compute)
};
