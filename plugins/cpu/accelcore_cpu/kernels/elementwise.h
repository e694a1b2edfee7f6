// Optimizers that treat each element alike. The formulas are those of accelcore/optim/formulas, where they are explained.
#pragma once

#include <cmath>

#include "rule.h"

struct SGD : Rule {
  double lr, momentum, dampening;
  bool nesterov;

  explicit SGD(Options next) {
    lr = next, decay = next, maximizes = next, momentum = next, dampening = next, nesterov = next;
  }
  template <class T>
  void compute(const Block<T>& block, double) const {
    const T lr = T(this->lr), momentum = T(this->momentum), share = T(1 - dampening);
    T* __restrict value = block.value;
    const T* __restrict gradient = block.gradient;
    T* __restrict buffer = block.state[0];
    if (momentum == 0) {
      for (long i = 0; i < block.size; i++) value[i] -= lr * gradient[i];
      return;
    }
    for (long i = 0; i < block.size; i++) {
      T now = momentum * buffer[i] + share * gradient[i];
      if (share != 1) now = buffer[i] != buffer[i] ? gradient[i] : now;  // nan: the first gradient, not dampened
      buffer[i] = now;
      value[i] -= lr * (nesterov ? gradient[i] + momentum * now : now);
    }
  }
  FOR_BOTH_TYPES(compute)
};

// Adam and AdamW.
struct Adam : Rule {
  double beta1, beta2, eps, shrink, rate, root;
  bool amsgrad;

  Adam(Options next, double step) {
    const double lr = next, weight_decay = next;
    maximizes = next, beta1 = next, beta2 = next, eps = next, amsgrad = next;
    const bool decoupled = next;
    shrink = decoupled ? 1 - lr * weight_decay : 1;
    decay = decoupled ? 0 : weight_decay;
    rate = lr / (1 - std::pow(beta1, step)), root = 1 / std::sqrt(1 - std::pow(beta2, step));
  }
  template <class T>
  void compute(const Block<T>& block, double) const {
    const T rate = T(this->rate), root = T(this->root), eps = T(this->eps), shrink = T(this->shrink);
    const T toward1 = T(1 - beta1), beta2 = T(this->beta2), share2 = T(1 - this->beta2);
    T* __restrict value = block.value;
    const T* __restrict gradient = block.gradient;
    T* __restrict mean = block.state[0];
    T* __restrict square = block.state[1];
    T* __restrict largest = block.state[2];
    if (amsgrad) {
      for (long i = 0; i < block.size; i++) {
        const T g = gradient[i], m = mean[i] = toward(mean[i], g, toward1);
        const T v = square[i] = beta2 * square[i] + share2 * g * g;
        const T most = largest[i] = v > largest[i] || v != v ? v : largest[i];
        value[i] = value[i] * shrink - rate * m / (std::sqrt(most) * root + eps);
      }
      return;
    }
    for (long i = 0; i < block.size; i++) {
      const T g = gradient[i], m = mean[i] = toward(mean[i], g, toward1);
      const T v = square[i] = beta2 * square[i] + share2 * g * g;
      value[i] = value[i] * shrink - rate * m / (std::sqrt(v) * root + eps);
    }
  }
  FOR_BOTH_TYPES(compute)
};

struct Adadelta : Rule {
  double lr, rho, eps;

  explicit Adadelta(Options next) { lr = next, decay = next, maximizes = next, rho = next, eps = next; }
  template <class T>
  void compute(const Block<T>& block, double) const {
    const T lr = T(this->lr), rho = T(this->rho), share = T(1 - this->rho), eps = T(this->eps);
    T* __restrict value = block.value;
    const T* __restrict gradient = block.gradient;
    T* __restrict square = block.state[0];
    T* __restrict steps = block.state[1];
    for (long i = 0; i < block.size; i++) {
      const T g = gradient[i], v = square[i] = rho * square[i] + share * g * g;
      const T delta = std::sqrt((steps[i] + eps) / (v + eps)) * g;
      steps[i] = rho * steps[i] + share * delta * delta;
      value[i] -= lr * delta;
    }
  }
  FOR_BOTH_TYPES(compute)
};

// RMSprop and RMSpropTF, which differ in where eps and lr come in.
struct RMSprop : Rule {
  double lr, alpha, momentum, inside, outside, shrink;
  bool centered, lr_in_momentum;

  RMSprop(Options next, bool inner) {
    lr = next;
    const double weight_decay = next;
    maximizes = next, alpha = next;
    const double eps = next;
    momentum = next, centered = next;
    const bool decoupled = next;
    lr_in_momentum = next;
    shrink = decoupled ? 1 - weight_decay : 1, decay = decoupled ? 0 : weight_decay;
    inside = inner ? eps : 0, outside = inner ? 0 : eps;
  }
  template <class T>
  void compute(const Block<T>& block, double) const {
    const T alpha = T(this->alpha), share = T(1 - this->alpha), inside = T(this->inside), outside = T(this->outside);
    const T momentum = T(this->momentum), shrink = T(this->shrink);
    const T first = lr_in_momentum ? T(lr) : T(1), last = lr_in_momentum ? T(1) : T(lr);
    T* __restrict value = block.value;
    const T* __restrict gradient = block.gradient;
    T* __restrict square = block.state[0];
    T* __restrict buffer = block.state[1];
    T* __restrict mean = block.state[2];
    T update[BLOCK];
    if (centered) {
      for (long i = 0; i < block.size; i++) {
        const T g = gradient[i], v = square[i] = alpha * square[i] + share * g * g;
        const T m = mean[i] = toward(mean[i], g, share);
        update[i] = g / (std::sqrt(v - m * m + inside) + outside);
      }
    } else {
      for (long i = 0; i < block.size; i++) {
        const T g = gradient[i], v = square[i] = alpha * square[i] + share * g * g;
        update[i] = g / (std::sqrt(v + inside) + outside);
      }
    }
    if (momentum != 0) {
      for (long i = 0; i < block.size; i++) update[i] = buffer[i] = momentum * buffer[i] + first * update[i];
    } else {
      for (long i = 0; i < block.size; i++) update[i] *= first;
    }
    for (long i = 0; i < block.size; i++) value[i] = value[i] * shrink - last * update[i];
  }
  FOR_BOTH_TYPES(compute)
};

struct BertAdam : Rule {
  enum Schedule { CONSTANT, COSINE, LINEAR, POLY };
  double rate, b1, b2, e, weight_decay;

  BertAdam(Options next, double step) {
    const double lr = next;
    weight_decay = next, b1 = next, b2 = next, e = next, clip = next;
    const double warmup = next, t_total = next;
    const int schedule = next;
    rate = lr * (t_total == -1 ? 1 : factor(schedule, (step - 1) / t_total, warmup));
  }
  static double factor(int schedule, double progress, double warmup) {
    if (progress < warmup) return progress / warmup;
    switch (schedule) {
      case COSINE: return 0.5 * (1 + std::cos(M_PI * std::fmin(progress, 1)));
      case LINEAR: return std::fmax((progress - 1) / (warmup - 1), 0);
      case POLY: return std::sqrt(std::fmax(1 - progress, 0));
      default: return 1;
    }
  }
  template <class T>
  void compute(const Block<T>& block, double) const {
    const T rate = T(this->rate), e = T(this->e), weight_decay = T(this->weight_decay);
    const T toward1 = T(1 - b1), b2 = T(this->b2), share2 = T(1 - this->b2);
    T* __restrict value = block.value;
    const T* __restrict gradient = block.gradient;
    T* __restrict mean = block.state[0];
    T* __restrict square = block.state[1];
    for (long i = 0; i < block.size; i++) {
      const T g = gradient[i], m = mean[i] = toward(mean[i], g, toward1);
      const T v = square[i] = b2 * square[i] + share2 * g * g;
      value[i] -= rate * (m / (std::sqrt(v) + e) + weight_decay * value[i]);
    }
  }
  FOR_BOTH_TYPES(compute)
};
